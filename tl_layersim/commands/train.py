"""`tl-layersim train`: aligned fine-tuning, after which shallow layers predict tokens too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import LayersimError
from . import options as o
from .inputs import as_data, named_data, named_model
from .output import chosen_formats, make_folder, noted, print_run, settled_options, write_report
from .run_file import is_set

TRAINING = "Training"
# Options that are settings of `AlignedTraining`.
SETTINGS = (
    *("objective", "schedule", "weights", "beta", "kl", "steps", "lr", "warmup", "accumulation", "layers_per_step"),
    *("eval_every", "mixed_precision", "gradient_checkpointing", "seed", "save_to"),
)
SaveOption = Annotated[
    Path, o.option(o.OUTPUT, "FOLDER", "Folder for the trained model, which --model and from_pretrained load.", "--save-to")
]
ObjectiveOption = Annotated[str, o.option(TRAINING, "NAME", "aligned, cosine-reg, multi-head or standard.", "--objective")]
ScheduleOption = Annotated[
    str | None,
    o.option(
        TRAINING,
        "NAME",
        "alternating: the last layer's loss at every other step; or always the objective. Default: always with cosine-reg, "
        "else alternating.",
        "--schedule",
    ),
]
WeightsOption = Annotated[str, o.option(TRAINING, "NAME", "Weights of layers: linear or uniform.", "--weights")]
BetaOption = Annotated[float, o.option(TRAINING, "X", "Weight of the cosine term, with cosine-reg.", "--beta")]
DivergenceOption = Annotated[
    float, o.option(TRAINING, "X", "Weight of the KL divergence from the last layer, with multi-head.", "--kl")
]
TrainSteps = Annotated[int, o.option(TRAINING, "N", "Steps of the optimiser.", "--steps")]
TrainRate = Annotated[float, o.option(TRAINING, "X", "Highest learning rate of AdamW.", "--lr")]
WarmupOption = Annotated[int, o.option(TRAINING, "N", "Steps over which the learning rate rises from 0.", "--warmup")]
AccumulationOption = Annotated[int, o.option(TRAINING, "N", "Batches in a step.", "--accumulation")]
LayersOption = Annotated[
    int | None, o.option(TRAINING, "N", "Layers drawn at random at each step. Default: all.", "--layers-per-step")
]
EvalOption = Annotated[
    int | None, o.option(TRAINING, "N", "Steps between evaluations. Default: before and after alone.", "--eval-every")
]
PrecisionOption = Annotated[str, o.option(TRAINING, "NAME", "no, or bf16 for autocast.", "--mixed-precision")]
RecomputeOption = Annotated[
    bool,
    o.option(TRAINING, None, "Compute activations again in the backward pass, to save memory.", "--gradient-checkpointing"),
]
TrainPaper = Annotated[
    bool,
    o.option(
        TRAINING,
        None,
        "Settings of AlignedGPT in Jiang, Zhou and Zhu 2024, but for options that are given: 40,000 steps, no clipping, norm "
        "at the last layer alone.",
        "--paper",
    ),
]
RankOption = Annotated[
    int | None, o.option(TRAINING, "RANK", "Train LoRA adapters of this rank alone, and merge them at the end.", "--lora")
]


def train_model(
    context: typer.Context,
    model: o.ModelArgument,
    save_to: SaveOption,
    device: o.DeviceOption = "cpu",
    dtype: o.DtypeOption = o.Dtype.float32,
    trust_remote_code: o.TrustOption = False,
    data: o.DataOption = None,
    split: o.SplitOption = "train",
    column: o.ColumnOption = None,
    eval_data: o.EvalDataOption = None,
    max_tokens: o.MaxTokensOption = None,
    seq_len: o.SeqLenOption = None,
    pack: o.PackOption = None,
    skip_first: o.SkipFirstOption = 0,
    paper: TrainPaper = False,
    objective: ObjectiveOption = "aligned",
    schedule: ScheduleOption = None,
    weights: WeightsOption = "linear",
    beta: BetaOption = 1.0,
    kl: DivergenceOption = 0.0,
    steps: TrainSteps = 1000,
    lr: TrainRate = 2e-5,
    warmup: WarmupOption = 0,
    accumulation: AccumulationOption = 1,
    layers_per_step: LayersOption = None,
    eval_every: EvalOption = None,
    mixed_precision: PrecisionOption = "no",
    gradient_checkpointing: RecomputeOption = False,
    lora: RankOption = None,
    config: o.ConfigOption = None,
    batch_size: o.BatchSizeOption = 8,
    seed: o.SeedOption = 0,
    checkpoint: o.CheckpointOption = None,
    out: o.OutOption = o.OUT,
    format: o.FormatOption = "html",
) -> None:
    """Fine-tune a model so that every layer predicts the targets."""
    from .. import finetune_aligned
    from ..models.named_model import refuse_missing_device

    chosen_formats(format)
    training = _training(context)
    training.check_folder()
    refuse_missing_device(device)
    make_folder(out)
    source = named_data(data, split)
    opened = named_model(model, context.params, option="MODEL")
    held_out = None if eval_data is None else named_data(eval_data, split, "--eval-data")
    read = as_data(source, context.params, opened)
    result: Any = finetune_aligned(opened, read, training, eval_data=held_out, checkpoint=checkpoint)
    report = noted({"training": result}, trust_remote_code=trust_remote_code)
    print_run(result)
    write_report(context, report, settled_options(report) | {name: getattr(training, name) for name in SETTINGS})
    typer.echo(f"Model:   {save_to.resolve()}")


def _training(context: typer.Context) -> Any:
    """The settings of training that the options name."""
    from .. import AlignedTraining

    options = context.params
    start = AlignedTraining.paper_gpt2() if options["paper"] else AlignedTraining()
    named = {name: options[name] for name in SETTINGS if not options["paper"] or is_set(context, name)}
    return replace(start, **named, lora=_lora(options["lora"]))


def _lora(rank: int | None) -> Any:
    if rank is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError:
        raise LayersimError(
            "`--lora` needs the package peft, which is not installed.",
            given=f"--lora {rank}",
            expected="peft",
            do="pip install 'tl_layersim[lora]'",
        ) from None
    if rank < 1:
        raise LayersimError(
            "`--lora` must be at least 1.", given=f"--lora {rank}", expected="the rank of the adapters", do="--lora 8"
        )
    return LoraConfig(r=rank, target_modules="all-linear")
