"""Results of finished stitches: one as a `StitchResult`, those of a grid as a `StitchGrid`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.provenance import Provenance
from ..models.split_model import LocalSplitModel, SplitModel
from .adapter import Adapter
from .experiment import JUDGED, StitchRun
from .intervals import over_batches
from .results import StitchGrid, StitchResult
from .spec import StitchSpec
from .stitched_model import StitchedModel

# By the names of front and back, and the number of the stitch point.
Cells = Mapping[tuple[str, str, int], StitchRun]
Join = Callable[[Adapter], StitchedModel]


def joining(front: SplitModel, back: SplitModel, at: tuple[int, int], tokenizer: Any) -> Join | None:
    """The function that makes the stitched model with an adapter; None where a model is on a server."""
    lower, upper = front.local, back.local
    return None if lower is None or upper is None else partial(_stitched_model, lower, upper, at, tokenizer)


def _stitched_model(
    front: LocalSplitModel, back: LocalSplitModel, at: tuple[int, int], tokenizer: Any, adapter: Adapter
) -> StitchedModel:
    return StitchedModel(front, back.described_as(replace(back.model, tokenizer=tokenizer)), adapter.to(back.device), at)


def result_of(
    run: StitchRun, names: tuple[str, ...], spec: StitchSpec, unit: str, provenance: Provenance, join: Join | None
) -> StitchResult:
    """One stitch as a result.

    Args:
        run: the stitch.
        names: the front's layer and the back's.
        spec: the adapter and its fit.
        unit: "token", or "row" of a classifier.
        provenance: the record.
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
    """The stitches of a grid as one result.

    Args:
        cells: the stitches.
        models: their names, and their groups or none.
        labels: of the stitch points.
        spec: the adapter and its fit.
        unit: "token", or "row" of a classifier.
        provenance: the record.
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
