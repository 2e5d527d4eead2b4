"""`tl-layersim stitch` and `train`: stitching and aligned fine-tuning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError
from .models_and_data import evaluation_data_option, named_data, named_model, opened, read_data, read_held_out
from .options import CommandCall, command, stitch_point
from .output import make_folder, prepare, print_run, report_file_options, write_report
from .run_file import config_option


def stitch_model_arguments(front: str, back: str) -> None:
    """Declares the options for the two models of `stitch`.

    Args:
        front: the model whose lower blocks are used: folder or hub name, demo or demo-aligned.
        back: the model whose upper blocks are used; the tokenizers must be the same.
    """


def stitch_options(*, at: list[str] | None = None, paper: bool = False) -> None:
    """Declares options of `tl-layersim stitch` that differ from the arguments of `stitch`.

    Args:
        at: a stitch point L:M: FRONT runs up to block L, BACK from the block after M. Blocks are numbers from 0, negative from
            the end, or names. May be repeated. Several points give a grid in both directions; without this option the grid has
            all blocks.
        paper: settings of Brown et al. 2023 (affine-norm, sgd on weights in plain units). Other options override them.
    """


@command(
    "stitch",
    {
        "Model": (stitch_model_arguments, named_model),
        "Data": (named_data, evaluation_data_option, "Data"),
        "Measures": (stitch_options, "stitch"),
        "Run": ("stitching.StitchTraining", config_option),
        "Output": (report_file_options,),
    },
    without=["model", "remote", "server"],
)
def stitch_models(call: CommandCall) -> None:
    """Stitch two models, and measure the loss of the stitched model.

    Examples:
    tl-layersim stitch demo demo-aligned --at 4:4 --fit lstsq
    tl-layersim stitch gpt2 gpt2-medium --at 6:12 --data text.txt --steps 500
    tl-layersim stitch base/ tuned/ --adapter identity
    """
    from .. import Report, stitch, stitch_grid
    from ..stitching import StitchTraining

    points = list(dict.fromkeys(stitch_point(text) for text in call.options["at"] or []))
    paper = call.options["paper"]
    start = StitchTraining.paper() if paper else StitchTraining()
    training = replace(start, **call.of("stitching.StitchTraining"))
    options: dict[str, Any] = {}
    if paper:
        options |= {"adapter": "affine-norm", "fit": "sgd"}
    options |= call.of("stitch", without=["at"])
    # Without a training by gradients, settings other than the defaults are refused.
    if training != StitchTraining():
        options["training"] = training
    prepare(call)
    data = read_data(call)
    options["eval_data"] = read_held_out(call)
    front_model = opened(call, "front")
    back_model = opened(call, "back")
    if len(points) == 1:
        result: Any = stitch(front_model, back_model, data, at=points[0], **options)
    else:
        front = call.options["front"]
        back = call.options["back"]
        if front == back:
            # The names of the models of a grid must differ.
            front = f"{front} (front)"
            back = f"{back} (back)"
        layers = None
        if points:
            front_layers, back_layers = zip(*points, strict=True)
            layers = {front: list(front_layers), back: list(back_layers)}
        result = stitch_grid({front: front_model, back: back_model}, data, layers=layers, **options)
    report = Report({"stitch": result})
    print_run(report)
    write_report(call, report)


def training_options(*, save_to: Path, paper: bool = False, lora: int | None = None) -> None:
    """Declares options of `tl-layersim train` that differ from the arguments of `finetune_aligned`.

    Args:
        save_to: folder for the trained model; --model and from_pretrained load it.
        paper: settings of AlignedGPT in Jiang, Zhou and Zhu 2024 (40,000 steps, no clipping, norm only at the last layer).
            Other options override them.
        lora: train only LoRA adapters of this rank, and merge them at the end.
    """


@command(
    "train",
    {
        "Model": (named_model, "open_model"),
        "Data": (named_data, evaluation_data_option, "Data"),
        "Measures": (training_options, "AlignedTraining"),
        "Run": (config_option, "finetune_aligned"),
        "Output": (report_file_options,),
    },
    without=["remote", "server", "tokens_per_request"],
    split="train",
    batch_size=8,
)
def train_model(call: CommandCall) -> None:
    """Fine-tune a model so that every layer predicts the targets.

    Examples:
    tl-layersim train demo --steps 20 --lr 1e-3 --save-to tuned
    tl-layersim train gpt2 --data text.txt --save-to tuned --checkpoint run.ckpt
    tl-layersim train gpt2 --lora 8 --mixed-precision bf16 --save-to tuned
    """
    from .. import AlignedTraining, Report, finetune_aligned

    start = AlignedTraining.paper_gpt2() if call.options["paper"] else AlignedTraining()
    settings = call.of("AlignedTraining")
    rank = call.options["lora"]
    if rank is not None:
        if rank < 1:
            raise LayersimError(f"`lora` is {rank}; it must be an int of 1 or more.")
        from peft import LoraConfig

        settings["lora"] = LoraConfig(r=rank, target_modules="all-linear")
    training = replace(start, **settings)
    make_folder(call.options["save_to"], "save_to")
    prepare(call)
    data = read_data(call)
    eval_data = read_held_out(call)
    result: Any = finetune_aligned(opened(call), data, training, eval_data=eval_data, **call.of("finetune_aligned"))
    report = Report({"training": result})
    print_run(report)
    write_report(call, report)
    print(f"Model:   {call.options['save_to'].resolve()}")
