"""`tl-layersim stitch`: lower blocks of one model, an adapter, and upper blocks of another."""

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

StitchPoints = Annotated[
    list[str] | None,
    o.option(
        o.MEASURES,
        "L:M",
        "Stitch point: the layer of FRONT that is read, and the layer of BACK that is replaced. Layer i is the output of block "
        "number i, counted from 1. May be repeated. Several points, or none for all blocks, give a grid in both directions.",
        "--at",
    ),
]
AdapterOption = Annotated[str, o.option(o.MEASURES, "KIND", "identity, linear, affine or affine-norm.", "--adapter")]
FitOption = Annotated[
    str | None,
    o.option(
        o.MEASURES,
        "METHOD",
        "lstsq (closed form), sgd (by the loss of BACK) or lstsq+sgd. Default: lstsq+sgd at one stitch point, else lstsq.",
        "--fit",
    ),
]
RidgeOption = Annotated[float, o.option(o.MEASURES, "X", "Ridge of lstsq: fraction added to the diagonal of X'X.", "--ridge")]
StitchSteps = Annotated[int, o.option(o.RUN, "N", "Steps of sgd, one batch each.", "--steps")]
StitchRate = Annotated[float, o.option(o.RUN, "X", "Learning rate of sgd.", "--lr")]
StitchPaper = Annotated[
    bool,
    o.option(
        o.RUN,
        None,
        "Stitching of Brown et al. 2023, but for options that are given: affine-norm, sgd in plain weights.",
        "--paper",
    ),
]
CacheOption = Annotated[
    Path | None, o.option(o.RUN, "FOLDER", "Folder for the activations of FRONT. Default: in memory.", "--cache")
]


def stitch_models(
    context: typer.Context,
    front: o.FrontModel,
    back: o.BackModel,
    device: o.DeviceOption = "cpu",
    dtype: o.DtypeOption = o.Dtype.float32,
    trust_remote_code: o.TrustOption = False,
    data: o.DataOption = None,
    split: o.SplitOption = "test",
    column: o.ColumnOption = None,
    eval_data: o.EvalDataOption = None,
    max_tokens: o.MaxTokensOption = 65536,
    seq_len: o.SeqLenOption = None,
    pack: o.PackOption = None,
    skip_first: o.SkipFirstOption = 0,
    at: StitchPoints = None,
    adapter: AdapterOption = "affine",
    fit: FitOption = None,
    ridge: RidgeOption = 0.0,
    paper: StitchPaper = False,
    config: o.ConfigOption = None,
    steps: StitchSteps = 2000,
    lr: StitchRate = 1.0,
    batch_size: o.BatchSizeOption = 16,
    seed: o.SeedOption = 0,
    cache: CacheOption = None,
    checkpoint: o.CheckpointOption = None,
    out: o.OutOption = o.OUT,
    format: o.FormatOption = "html",
) -> None:
    """Stitch two models, and measure the loss of the stitched model."""
    from .. import StitchTraining
    from ..models.named_model import refuse_missing_device

    chosen_formats(format)
    points = list(dict.fromkeys(_stitch_point(text) for text in at or []))
    refuse_missing_device(device)
    make_folder(out)
    options = context.params
    if paper:
        adapter = adapter if is_set(context, "adapter") else "affine-norm"
        fit = fit or "sgd"
    if fit is None and adapter != "identity":
        fit = "lstsq+sgd" if len(points) == 1 else "lstsq"
    trained = fit is not None and "sgd" in fit
    if not trained:
        _refuse_settings_of_sgd(context, f"--fit {fit}" if fit else f"--adapter {adapter}")
    training = replace(StitchTraining.paper() if paper else StitchTraining(), steps=steps, lr=lr, seed=seed)
    source = named_data(data, split)
    models = [named_model(name, options, option=option) for name, option in ((front, "FRONT"), (back, "BACK"))]
    arguments: dict[str, Any] = {"adapter": adapter, "fit": fit, "ridge": ridge, "cache": cache, "checkpoint": checkpoint}
    arguments |= {"training": training if trained else None}
    arguments |= {"eval_data": None if eval_data is None else named_data(eval_data, split, "--eval-data")}
    result = _stitched((front, back), models, as_data(source, options), points, arguments)
    report = noted({"stitch": result}, trust_remote_code=trust_remote_code)
    print_run(result)
    write_report(context, report, settled_options(report) | {"adapter": adapter, "fit": fit})


def _stitched(
    names: tuple[str, str], models: list[Any], read: Any, points: list[tuple[Any, Any]], arguments: dict[str, Any]
) -> Any:
    """The result of one stitch point, or the grid of several or all."""
    from .. import stitch, stitch_grid

    if len(points) == 1:
        return stitch(models[0], models[1], read, at=points[0], **arguments)
    front, back = names if names[0] != names[1] else (f"{names[0]} (front)", f"{names[1]} (back)")
    layers = dict(zip((front, back), map(list, zip(*points, strict=True)), strict=True)) if points else None
    return stitch_grid({front: models[0], back: models[1]}, read, layers=layers, **arguments)


def _refuse_settings_of_sgd(context: typer.Context, given: str) -> None:
    """Refuse settings of a training where none takes place."""
    for name in ("steps", "lr"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise LayersimError(
                f"`--{name}` has no effect without a fit by sgd.",
                given=f"--{name} {context.params[name]} with {given}",
                expected="--fit sgd or --fit lstsq+sgd",
                do=f"--fit lstsq+sgd, or leave --{name} out",
            )


def _stitch_point(text: str) -> tuple[int | str, int | str]:
    """A stitch point: two layers, each a number or a name."""
    first, colon, second = (part.strip() for part in text.partition(":"))
    if not (first and colon and second):
        raise LayersimError(
            "`--at` must be two layers, joined by a colon.",
            given=f"--at {text}",
            expected="the layer of FRONT that is read and the layer of BACK that is replaced, as numbers or names",
            do="--at 4:4",
        )
    return (int(first) if first.isdecimal() else first, int(second) if second.isdecimal() else second)
