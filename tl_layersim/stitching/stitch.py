"""`stitch` and `stitch_grid`: fit an adapter between layers of two models and measure the stitched model's loss."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.arguments import NonNegativeFloat, typed
from ..core.fields import Provenance
from ..core.storage import refuse_unwritable
from ..data.data import Data
from ..many.compare_grid import group_labels
from ..remote.open import open_split_model
from ..sources.open import OpenedModel, records_of
from ..sources.split_model import LocalSplitModel, SplitModel
from .activation_store import ActivationStore
from .adapter import Adapter
from .experiment import JUDGED, StitchExperiment, StitchRun
from .fitting import Fit, Progress, StitchTraining
from .spec import StitchSpec, kind_of_adapter, point_number, stitch_point_label, stitch_points_of
from .stitch_results import StitchGrid, StitchResult, over_batches
from .stitched_model import StitchedModel

# By the names of front and back, and the number of the stitch point.
Cells = Mapping[tuple[str, str, int], StitchRun]
Join = Callable[[Adapter], StitchedModel]


def joining(front: SplitModel, back: SplitModel, at: tuple[int, int], tokenizer: Any) -> Join | None:
    """A function from an adapter to the stitched model; None if a model is on a server."""
    lower, upper = front.local, back.local
    return None if lower is None or upper is None else partial(_stitched_model, lower, upper, at, tokenizer)


def _stitched_model(
    front: LocalSplitModel, back: LocalSplitModel, at: tuple[int, int], tokenizer: Any, adapter: Adapter
) -> StitchedModel:
    return StitchedModel(front, back.described_as(replace(back.model, tokenizer=tokenizer)), adapter.to(back.device), at)


def result_of(
    run: StitchRun, names: tuple[str, ...], spec: StitchSpec, unit: str, provenance: Provenance, join: Join | None
) -> StitchResult:
    """The `StitchResult` of one stitch.

    Args:
        run: the finished stitch.
        names: names of the front model's layer and of the back model's layer.
        spec: the adapter and its fit.
        unit: unit of a target: "token", or "row" for a classifier.
        provenance: provenance of the run.
        join: see `joining`.
    """
    weight, bias = run.adapter.weight, run.adapter.bias
    judged: dict[str, Any] = {f"batch_{name}": run.judged[name] for name in JUDGED}
    return StitchResult(
        values=torch.tensor(run.curve, dtype=torch.float64),
        weight=torch.zeros(0, 0).double() if weight is None else weight.double(),
        bias=torch.zeros(0).double() if bias is None else bias.double(),
        kind=spec.kind.name,
        fit=spec.fit,
        explained=run.explained,
        stopped=run.stopped + 1,
        unit=unit,
        layers=names,
        provenance=provenance,
        join=join,
        **judged,
    )


def grid_of(
    cells: Cells,
    models: tuple[tuple[str, ...], tuple[str, ...]],
    labels: tuple[str, ...],
    spec: StitchSpec,
    unit: str,
    provenance: Provenance,
) -> StitchGrid:
    """The `StitchGrid` of finished stitches.

    Args:
        cells: the finished stitches.
        models: names of the models, and their groups, which may be empty.
        labels: labels of the stitch points.
        spec: the adapter and its fit.
        unit: unit of a target: "token", or "row" for a classifier.
        provenance: provenance of the run.
    """
    names, groups = models

    def table(of: Callable[[StitchRun], Any]) -> Tensor:
        rows = [[[of(cells[a, b, s]) for s in range(len(labels))] for b in names] for a in names]
        return torch.tensor(rows, dtype=torch.float64)

    def mean(name: str) -> Tensor:
        return table(lambda run: float(run.judged[name].sum() / run.judged["tokens"].sum()))

    def intervals(better: str, worse: str) -> tuple[Tensor, ...]:
        each = table(lambda run: over_batches(run.judged[worse] - run.judged[better], run.judged["tokens"], 0.95))
        return tuple(part.contiguous() for part in each.unbind(-1))

    penalty, low, high = intervals("back_loss", "loss")
    missing, missing_low, missing_high = intervals("correct", "back_correct")
    return StitchGrid(
        values=penalty,
        low=low,
        high=high,
        loss=mean("loss"),
        back_loss=mean("back_loss"),
        accuracy=mean("correct"),
        accuracy_penalty=missing,
        accuracy_low=missing_low,
        accuracy_high=missing_high,
        stopped=table(lambda run: run.stopped + 1.0),
        batch_tokens=next(iter(cells.values())).judged["tokens"],
        batch_penalty=table(lambda run: (run.judged["loss"] - run.judged["back_loss"]).tolist()),
        fronts=names,
        groups=groups,
        seams=labels,
        kind=spec.kind.name,
        fit=spec.fit,
        unit=unit,
        layers=(),
        provenance=provenance,
    )


Layer = int | str


@typed
def stitch(
    front: Any,
    back: Any,
    data: Any,
    *,
    at: tuple[Layer, Layer],
    adapter: str | Adapter = "affine",
    fit: Fit | None = None,
    training: StitchTraining | None = None,
    ridge: NonNegativeFloat = 0.0,
    eval_data: Any = None,
    labels: Any = None,
    cache: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> StitchResult:
    """Stitch two models: replace the back model's layer m by the front model's layer l and an adapter, and measure the loss.

    Neither model is changed; only the adapter is trained. The front model's activations are computed once, and a training step
    runs only the back model's blocks above the stitch point. Adapters are fitted on all attended positions, also on those that
    `Data(skip_first=..., positions=...)` leaves out: the back attends to them too.

    Args:
        front: the model whose lower blocks are used; as in `analyze`. If a model is on a server, the front model's activations
            at one layer are transferred, and their size is printed first. Training needs a trusted server for the back model.
        back: the model whose upper blocks are used. Widths and depths may differ, tokenizers may not.
        data: a `Data`, or raw data, read by the front model's tokenizer, or by the back model's if the front model has none. A
            training step takes one batch.
        at: the stitch point (l, m): the front runs up to block l, the back from the block after m. Blocks are given by number,
            negative from the end, or by name, such as `blocks.2.hook_resid_post`; `blocks.0.hook_resid_pre` is the input of
            block 0.
        adapter: `"identity"`, `"linear"`, `"affine"`, `"affine-norm"`, see `Adapter`; or an `Adapter`, which is only evaluated.
        fit: `"lstsq"` for least squares against the back model's own residual; `"sgd"` for training by the back model's loss,
            from the identity; `"lstsq+sgd"` for one after the other. Default: `"lstsq+sgd"`; `"lstsq"` if the back model is in
            a server's sandbox.
        training: settings of `"sgd"`; default `StitchTraining()`. The paper's stitching is `adapter="affine-norm"`, `fit="sgd"`
            and `training=StitchTraining.paper()`.
        ridge: regularisation of `"lstsq"`: the diagonal of X'X is raised by this fraction of itself.
        eval_data: data for measuring the penalty: a `Data`, or raw data, which is read like `data`. Default: about the last
            fifth of the rows of `data`, from documents that are not in the fit; all rows if nothing is fitted.
        labels: targets of the back model: `"next_token"`, `"data"`, or a table, as in `LogitLens`. Default: `"next_token"`, for
            a classifier, and for rows without tokens that have labels, `"data"`.
        cache: folder for a memory-mapped file of the front model's activations; default: they are kept in memory.
        checkpoint: file with the state of the training; the same call resumes from it, with the same numbers.

    Returns:
        A `StitchResult`: losses, penalty with its interval, learning curve, adapter, and the stitched model.

    Raises:
        LayersimError: the models read different tokens, a layer does not exist, or the arguments contradict one another.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), sections 2 and 3, appendix C.1; Bansal, Nakkiran and Barak 2021 (arXiv
        2106.07682).

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> same = lsim.stitch(model, model, lsim.demo_text()[:8], at=(3, 3), adapter="identity")
        >>> same.penalty
        0.0
    """
    refuse_unwritable(checkpoint, "checkpoint")
    # A name that no kind has is refused before models are opened.
    kind_of_adapter(adapter)
    opened = OpenedModel.of(front), OpenedModel.of(back)
    models = [open_split_model(each) for each in opened]
    numbers = (point_number(models[0].model, at[0], "at"), point_number(models[1].model, at[1], "at"))
    spec = StitchSpec.of(adapter, fit, training, ridge, [models[1]])
    spec.refuse(models[0], models[1])
    paths = [each.layers for each in opened]
    experiment = StitchExperiment(models, models[1:], Data.of(data), spec, eval_data, labels, cache, paths)
    identity = {} if checkpoint is None else experiment.identity() | {"at": list(numbers)}
    progress = Progress(checkpoint, identity)
    start = time.perf_counter()
    with experiment:
        activations = experiment.activations(models[0], numbers[0])
        run = experiment.cell("stitch", models[0], models[1], numbers, activations, progress)
    names = tuple(each.model.layers[number] for each, number in zip(models, numbers, strict=True))
    provenance = experiment.provenance(models, time.perf_counter() - start, {"at": list(names)})
    join = joining(models[0], models[1], numbers, experiment.tokenizer)
    return result_of(run, names, spec, experiment.unit, provenance, join)


@typed
def stitch_grid(
    models: Mapping[str, Any],
    data: Any,
    *,
    layers: Sequence[Layer] | Mapping[str, Sequence[Layer]] | None = None,
    groups: Any = None,
    adapter: str = "affine",
    fit: Fit | None = None,
    training: StitchTraining | None = None,
    ridge: NonNegativeFloat = 0.0,
    eval_data: Any = None,
    labels: Any = None,
    cache: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> StitchGrid:
    """Stitch every pair of models in both directions, and each model with itself: figures 1 and 2 of Brown et al. 2023.

    Activations are computed once for each front model and stitch point, the loss of a back model alone once for each back
    model. With `adapter="identity"` nothing is trained: do fine-tunes of one model fall into groups? See `compare_groups`.

    Args:
        models: a mapping from names to models, each as in `analyze`.
        data: as in `stitch`.
        layers: layers of the stitch points, as in `at` of `stitch`: one list for all models, or a list for each model by name,
            all of one length. Stitch point i joins the i-th layers. Default: the output of each block, for models of equal
            depth.
        groups: a mapping from names of models to groups, or a list of groups in the order of the models, for `compare_groups`.
        adapter: see `stitch`, as for all further options.
        fit: see `stitch`.
        training: see `stitch`.
        ridge: see `stitch`.
        eval_data: see `stitch`.
        labels: see `stitch`.
        cache: folder for the front model's activations, see `stitch`; here those of the evaluation and of all fits are kept.
        checkpoint: file with the finished stitches and the state of the current training; the same call resumes from it.

    Returns:
        A `StitchGrid`: penalties with intervals, a tidy table, a plot.

    Raises:
        LayersimError: as in `stitch`.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), figures 1 and 2.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> grid = lsim.stitch_grid({"a": model, "b": model}, lsim.demo_text()[:4], layers=[1, 5], adapter="identity")
        >>> grid.penalty.abs().max().item()
        0.0
    """
    refuse_unwritable(checkpoint, "checkpoint")
    kind_of_adapter(adapter)
    labels_of_models = () if groups is None else group_labels(groups, tuple(models))
    opened = {name: OpenedModel.of(model) for name, model in models.items()}
    split = {name: open_split_model(each) for name, each in opened.items()}
    points = stitch_points_of(split, layers)
    joined = {name: [split[name].model.layers[number] for number in own] for name, own in points.items()}
    every = list(split.values())
    spec = StitchSpec.of(adapter, fit, training, ridge, every)
    for front in every:
        for back in every:
            spec.refuse(front, back)
    paths = records_of(list(opened.values()))["layers"]
    experiment = StitchExperiment(every, every, Data.of(data), spec, eval_data, labels, cache, paths)
    identity = {} if checkpoint is None else experiment.identity() | {"names": list(opened), "seams": points}
    progress = Progress(checkpoint, identity)
    start = time.perf_counter()
    cells = _run_grid(experiment, split, points, progress)
    count = len(next(iter(points.values())))
    labels_of_points = tuple(stitch_point_label(split, points, s) for s in range(count))
    provenance = experiment.provenance(every, time.perf_counter() - start, {"layers": joined})
    return grid_of(cells, (tuple(opened), labels_of_models), labels_of_points, spec, experiment.unit, provenance)


def _run_grid(
    experiment: StitchExperiment, models: Mapping[str, SplitModel], points: Mapping[str, list[int]], progress: Progress
) -> Cells:
    """Run every stitch of a grid, and return the runs by front model, back model and index of the stitch point."""
    count = len(next(iter(points.values())))
    cells: dict[tuple[str, str, int], StitchRun] = {}
    with experiment, tqdm(total=len(models) ** 2 * count, desc="stitches", disable=None) as bar:
        for number, (a, front) in enumerate(models.items()):
            for s in range(count):
                activations = experiment.activations(front, points[a][s])
                with ExitStack() as kept:
                    # Numbers, since names may hold any character.
                    keys = {b: f"{number} {other} {s}" for other, b in enumerate(models)}
                    _keep(experiment, activations, kept, sum(not progress.done(key) for key in keys.values()))
                    for b, back in models.items():
                        bar.set_postfix_str(f"{a} into {b}, stitch point {s + 1} of {count}")
                        at = (points[a][s], points[b][s])
                        cells[a, b, s] = experiment.cell(keys[b], front, back, at, activations, progress)
                        bar.update()
    return cells


def _keep(experiment: StitchExperiment, activations: Iterable[ActivationStore], kept: ExitStack, backs: int) -> None:
    """Keep the front model's activations if they are read more than once.

    Args:
        experiment: the experiment of the call.
        activations: activations on the fit data and on the evaluation data.
        kept: context stack that keeps the activations until it is closed.
        backs: number of stitches that read the activations.
    """
    trained = "sgd" in experiment.spec.fit
    fit, evaluation = activations
    if trained and backs:
        kept.enter_context(fit.keep(experiment.cache))
    if backs > 1:
        for store in (fit, evaluation):
            if len(store):
                kept.enter_context(store.keep(experiment.cache, required=False))
