"""stitch and stitch_grid: adapters between layers of two models, fitted and judged by use."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.errors import LayersimError
from ..core.provenance import Provenance
from ..core.storage import refuse_unwritable
from ..core.typed import typed
from ..data.options import DataOptions
from ..models.adapter import Adapter
from ..models.split_model import LocalSplitModel
from ..remote.open import open_split_model
from .experiment import JUDGED, StitchExperiment, StitchRun
from .fitting import Fit, StitchTraining
from .progress import Progress
from .results import StitchGrid, StitchResult, over_batches
from .spec import StitchSpec, layer_number, seam_label, seams_of
from .stitched_model import StitchedModel

Kind = Literal["identity", "linear", "affine", "affine-norm"]
Place = bool | str
Layer = int | str


@typed
def stitch(
    front: Any,
    back: Any,
    data: Any,
    *,
    at: tuple[Layer, Layer],
    adapter: Kind | Adapter = "affine",
    fit: Fit | None = None,
    training: StitchTraining | None = None,
    ridge: int | float = 0.0,
    seed: int = 0,
    eval_data: Any = None,
    labels: Any = None,
    layers: tuple[list[str] | None, list[str] | None] = (None, None),
    remote: Place | tuple[Place, Place] = False,
    cache: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    batch_size: int = 16,
    seq_len: int | None = None,
    pack: bool = False,
    max_tokens: int | None = None,
    skip_first: int = 0,
    prepend_bos: bool = True,
    column: str | None = None,
) -> StitchResult:
    """Put the front's layer l, through an adapter, in the place of the back's layer m, and see what the back makes of it.

    Neither model is changed: nothing but the adapter learns. The front's activations are computed once; in training only the
    back's blocks above the seam run. Adapters are fitted on all attended positions, also those that `skip_first` does not
    count: the back reads them too.

    Args:
        front: the model whose lower blocks are used; kinds as in `analyze`.
        back: the model whose upper blocks are used. Widths and depths may differ, tokenizers may not.
        data: as in `analyze`, read by the front's tokenizer, or the back's where the front carries none.
        at: layers (l, m): of the front, what is read; of the back, what is replaced. Numbers count what leaves blocks, 0 is
            what enters block 0 (l blocks of the front run, and all of the back's but the first m); or names, such as
            `blocks.2.hook_resid_post`.
        adapter: `"identity"`, `"linear"`, `"affine"`, `"affine-norm"`, see `Adapter`; or an `Adapter`, judged as it is.
        fit: `"lstsq"` for the closed form, nearest to the back's own residual; `"sgd"` for training by the back's loss, from
            the identity; `"lstsq+sgd"` for one after the other. Default: `"lstsq+sgd"`; `"lstsq"` where the back is in a
            server's sandbox.
        training: of `"sgd"`; default `StitchTraining()`, the paper's settings.
        ridge: of `"lstsq"`: added to the diagonal of X'X, in units of its mean.
        seed: of the order of batches in training.
        eval_data: what the penalty is measured on, at most `max_tokens` of it too. Default: the last fifth of the rows of
            `data`, which are then kept out of the fit; all of them where nothing is fitted.
        labels: what the back ought to say: `"next_token"`, `"data"`, or a table, as in `LogitLens`. Default: `"next_token"`,
            for a classifier `"data"`.
        layers: paths of the blocks of each model, for layouts that are not known.
        remote: for nnsight models, as in `analyze`, for both or for each. One request is one model: the front's activations at
            the one layer cross, how much is said first; training needs a trusted server for the back.
        cache: a folder for the front's activations, which are then mapped from a file there; default: in memory.
        checkpoint: a file that keeps a training that is interrupted; the same call goes on from it, with the same numbers.
        tokenizer: in place of theirs; the two models are then taken to share it.
        batch_size: see `analyze`, as for all further options. A training step is one batch.
        seq_len: see `analyze`.
        pack: see `analyze`.
        max_tokens: see `analyze`.
        skip_first: see `analyze`.
        prepend_bos: see `analyze`.
        column: see `analyze`.

    Returns:
        A `StitchResult`: losses, penalty with its interval, learning curve, adapter, and the stitched model.

    Raises:
        LayersimError: the models do not share their tokens, a layer does not exist, or the call cannot be done as asked.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), sections 2 and 3, appendix C.1; Bansal, Nakkiran and Barak 2021 (arXiv
        2106.07682).

    Example:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> same = lsim.stitch(model, model, lsim.demo_text()[:8], at=(4, 4), adapter="identity")
        >>> same.penalty
        0.0
    """
    refuse_unwritable(checkpoint, "checkpoint")
    places = remote if isinstance(remote, tuple) else (remote, remote)
    halves = [
        open_split_model(m, layers=paths, remote=place) for m, paths, place in zip((front, back), layers, places, strict=True)
    ]
    numbers = (layer_number(halves[0].model, at[0]), layer_number(halves[1].model, at[1]))
    task = StitchSpec.of(adapter, fit, training, ridge, seed, [halves[1]])
    task.refuse(halves[0], halves[1], numbers)
    options = {"eval_data": eval_data, "labels": labels, "tokenizer": tokenizer}
    reading = DataOptions(batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column)
    bench = StitchExperiment(halves, halves[1:], data, task, options, reading, cache, list(layers))
    keep = Progress(checkpoint, bench.identity() | {"at": list(numbers)})
    start = time.perf_counter()
    with bench:
        acts = bench.activations(halves[0], numbers[0])
        cell = bench.cell("stitch", halves[0], halves[1], numbers, acts, keep)
    names = tuple(half.model.layers[number] for half, number in zip(halves, numbers, strict=True))
    result = _one(cell, names, task, bench.unit, bench.provenance(halves, time.perf_counter() - start, {"at": list(names)}))
    lower, upper = halves
    if isinstance(lower, LocalSplitModel) and isinstance(upper, LocalSplitModel):
        object.__setattr__(result, "_join", partial(_join, lower, upper, result.adapter, numbers, bench.tokenizer))
    return result


@typed
def stitch_grid(
    models: Any,
    data: Any,
    *,
    layers: list[Layer] | dict[str, list[Layer]] | None = None,
    adapter: Kind = "affine",
    fit: Fit | None = None,
    training: StitchTraining | None = None,
    ridge: int | float = 0.0,
    seed: int = 0,
    eval_data: Any = None,
    labels: Any = None,
    remote: Place = False,
    cache: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    batch_size: int = 16,
    seq_len: int | None = None,
    pack: bool = False,
    max_tokens: int | None = None,
    skip_first: int = 0,
    prepend_bos: bool = True,
    column: str | None = None,
) -> StitchGrid:
    """Stitch some models in all directions at some seams, each with itself included: figures 1 and 2 of Brown et al.

    In training the front's activations are computed once for each front and seam; the back's own loss is once for each back.

    Args:
        models: a mapping from names to models.
        data: as in `stitch`.
        layers: the layers that are joined, as in `at` of `stitch`: one list for all models, or one for each by name, of one
            length: the i-th seam joins the i-th layers. Default: what leaves each block, for models of equal depth.
        adapter: see `stitch`, as for all further options.
        fit: see `stitch`.
        training: see `stitch`.
        ridge: see `stitch`.
        seed: see `stitch`.
        eval_data: see `stitch`.
        labels: see `stitch`.
        remote: see `stitch`, for all models.
        cache: see `stitch`.
        checkpoint: a file that keeps what is done; the same call goes on from it.
        tokenizer: see `stitch`.
        batch_size: see `stitch`.
        seq_len: see `stitch`.
        pack: see `stitch`.
        max_tokens: see `stitch`.
        skip_first: see `stitch`.
        prepend_bos: see `stitch`.
        column: see `stitch`.

    Returns:
        A `StitchGrid`: penalties with intervals, a tidy table, a plot.

    Raises:
        LayersimError: as in `stitch`.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), figures 1 and 2.

    Example:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> grid = lsim.stitch_grid({"a": model, "b": model}, lsim.demo_text()[:4], layers=[2, 6], adapter="identity")
        >>> grid.penalty.abs().max().item()
        0.0
    """
    refuse_unwritable(checkpoint, "checkpoint")
    if not isinstance(models, Mapping) or not models or not all(isinstance(name, str) for name in models):
        raise LayersimError(
            "A grid needs names for its models.",
            given=type(models).__name__,
            expected="a mapping from names to models",
            do='stitch_grid({"base": model_a, "tuned": model_b}, data)',
        )
    halves = {name: open_split_model(model, layers=None, remote=remote) for name, model in models.items()}
    seams = seams_of(halves, layers)
    task = StitchSpec.of(adapter, fit, training, ridge, seed, list(halves.values()))
    count = len(next(iter(seams.values())))
    for a, front in halves.items():
        for b, back in halves.items():
            for s in range(count):
                task.refuse(front, back, (seams[a][s], seams[b][s]))
    options = {"eval_data": eval_data, "labels": labels, "tokenizer": tokenizer}
    reading = DataOptions(batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column)
    bench = StitchExperiment(list(halves.values()), list(halves.values()), data, task, options, reading, cache)
    keep = Progress(checkpoint, bench.identity() | {"names": list(halves), "seams": seams})
    start = time.perf_counter()
    cells: dict[tuple[str, str, int], StitchRun] = {}
    with bench, tqdm(total=len(halves) ** 2 * count, desc="stitches", disable=None) as bar:
        for a, front in halves.items():
            for s in range(count):
                acts = bench.activations(front, seams[a][s])
                with ExitStack() as kept:
                    # Numbers, since names may hold anything.
                    keys = {b: f"{list(halves).index(a)} {number} {s}" for number, b in enumerate(halves)}
                    waiting = [b for b in halves if not keep.done(keys[b])]
                    if waiting and "sgd" in task.fit:
                        kept.enter_context(acts[0].keep(bench.cache))
                    for b, back in halves.items():
                        bar.set_postfix_str(f"{a} into {b}, seam {s + 1} of {count}")
                        cells[a, b, s] = bench.cell(keys[b], front, back, (seams[a][s], seams[b][s]), acts, keep)
                        bar.update()
    labels_of_seams = tuple(seam_label(halves, seams, s) for s in range(count))
    run = bench.provenance(list(halves.values()), time.perf_counter() - start, {"layers": seams})
    return _grid(cells, tuple(halves), labels_of_seams, task, bench.unit, run)


def _join(
    front: LocalSplitModel, back: LocalSplitModel, adapter: Adapter, at: tuple[int, int], tokenizer: Any
) -> StitchedModel:
    reader = LocalSplitModel(back.source, replace(back.model, tokenizer=tokenizer))
    return StitchedModel(front, reader, adapter.to(back.device), at)


def _one(cell: StitchRun, names: tuple[str, ...], task: StitchSpec, unit: str, run: Provenance) -> StitchResult:
    """A cell as a result."""
    weight, bias = cell.adapter.weight, cell.adapter.bias
    return StitchResult(
        values=torch.tensor(cell.curve, dtype=torch.float64),
        weight=torch.zeros(0, 0).double() if weight is None else weight.double(),
        bias=torch.zeros(0).double() if bias is None else bias.double(),
        kind=task.kind,
        fit=task.fit,
        explained=cell.explained,
        stopped=cell.stopped + 1,
        unit=unit,
        layers=names,
        provenance=run,
        **{f"batch_{name}": cell.judged[name] for name in JUDGED},
    )


def _grid(
    cells: Mapping[tuple[str, str, int], StitchRun],
    names: tuple[str, ...],
    seams: tuple[str, ...],
    task: StitchSpec,
    unit: str,
    run: Provenance,
) -> StitchGrid:
    """All cells as one result."""

    def table(of: Any) -> Tensor:
        rows = [[[of(cells[a, b, s]) for s in range(len(seams))] for b in names] for a in names]
        return torch.tensor(rows, dtype=torch.float64)

    def mean(name: str) -> Tensor:
        return table(lambda cell: float(cell.judged[name].sum() / cell.judged["tokens"].sum()))

    def intervals(better: str, worse: str) -> list[Tensor]:
        found = {
            key: over_batches(cell.judged[worse] - cell.judged[better], cell.judged["tokens"], 0.95)
            for key, cell in cells.items()
        }
        rows = [[[found[a, b, s] for s in range(len(seams))] for b in names] for a in names]
        return list(torch.tensor(rows, dtype=torch.float64).unbind(-1))

    penalty, low, high = intervals("back_loss", "loss")
    missing, missing_low, missing_high = intervals("correct", "back_correct")
    return StitchGrid(
        values=penalty.contiguous(),
        low=low.contiguous(),
        high=high.contiguous(),
        loss=mean("loss"),
        back_loss=mean("back_loss"),
        accuracy=mean("correct"),
        accuracy_penalty=missing.contiguous(),
        accuracy_low=missing_low.contiguous(),
        accuracy_high=missing_high.contiguous(),
        stopped=table(lambda cell: cell.stopped + 1.0),
        batch_tokens=next(iter(cells.values())).judged["tokens"],
        batch_penalty=table(lambda cell: (cell.judged["loss"] - cell.judged["back_loss"]).tolist()),
        fronts=names,
        seams=seams,
        kind=task.kind,
        fit=task.fit,
        unit=unit,
        layers=(),
        provenance=run,
    )
