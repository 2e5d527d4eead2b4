"""`linear_probe`: accuracy of a linear classifier on frozen activations, at each site of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..analyzers.linear_probe import LinearProbe, LinearProbeResult, ProbeAnalyzer
from ..core.argument_checks import typed
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError
from ..core.server_addresses import shown
from ..core.wording import brief
from ..data.batches import Batches
from ..data.data import Data
from ..data.labels import NO_LABEL, as_labels
from ..models.model_inputs import position_counter
from ..models.open import OpenedModel
from ..models.source import CanReadSites
from ..remote.open import open_source
from .api import analyze
from .logistic_probe import LogisticProbe
from .site_plan import DEFAULT, AtArgument
from .validation import with_tokenizer


@typed
def linear_probe(
    model: Any,
    data: Any,
    probe: ProbeAnalyzer | None = None,
    *,
    test_data: Any = None,
    test_labels: Any = None,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> LinearProbeResult:
    """Accuracy of a linear classifier on frozen activations at each site, on rows that it was not fitted on.

    The classifier of each site is fitted on its own. Nothing in the model changes. A sample is a counted position, see
    `positions` of `Data`: of a classifier the position that its head reads, of other models every position.

    Args:
        model: as in `analyze`.
        data: as in `analyze`. A part of its rows is held out, unless `test_data` is given.
        probe: `LinearProbe` fits in closed form from sums, in two passes over the data, and runs on servers. `LogisticProbe`
            keeps the activations of training samples in memory, for models in this process. Default:
            `LinearProbe(labels="data")`, the classes of the data's own column.
        test_data: held-out data of the same kind; the probes are then fitted on all of `data`.
        test_labels: labels of `test_data`, where the labels of the probe are not "data" or "next_token".
        at: see `analyze`, as for all further options.
        per_head: see `analyze`.
        intervals: see `analyze`; they hold the fitted probes fixed and vary the held-out rows.
        checkpoint: see `analyze`.

    Returns:
        A `LinearProbeResult`.

    Raises:
        LayersimError: there is one class only, too few samples, a label below 0, or too little memory; or as `analyze`.

    Source:
        See `LinearProbe`.

    Examples:
        Whether a text's last token has an even id, which the embedding knows best.

        >>> import tl_layersim as lsim
        >>> model, texts = lsim.demo_model(), lsim.demo_text()[:60]
        >>> ids = [model.tokenizer(text)["input_ids"][:16] for text in texts]
        >>> even = lsim.LinearProbe(labels=[row[-1] % 2 for row in ids])
        >>> probe = lsim.linear_probe(model, lsim.Data(ids, positions="last"), even)
        >>> probe.accuracy.shape, probe.labels
        (torch.Size([9]), (0, 1))
    """
    probe, data = probe or LinearProbe(labels="data"), Data.of(data)
    if isinstance(probe, LogisticProbe):
        remote, ranks = OpenedModel.of(model).remote, rank_and_size()[1]
        given = {"`checkpoint`": checkpoint is not None, f"remote={shown(remote)}": remote is not False}
        for words, wrong in (given | {f"{ranks} processes": ranks > 1}).items():
            if wrong:
                raise LayersimError(
                    f"LogisticProbe cannot run with {words}: it keeps activations in the memory of one process. Use "
                    "LinearProbe."
                )
    if test_data is None:
        if test_labels is not None:
            raise LayersimError("`test_labels` is given without `test_data`, whose labels it holds.")
    else:
        parts = [data, data.like(test_data)]
        # An iterator would be gone after its rows are counted.
        parts = [replace(part, source=list(part.source)) if part.read_once else part for part in parts]
        count, test_count = _counts(model, parts, at)
        probe = replace(probe, labels=_labels_of_both(probe.labels, test_labels, count, test_count), first_test_row=count)
        data = replace(data, source=[part.source for part in parts])
    report = analyze(model, data, [probe], at=at, per_head=per_head, intervals=intervals, checkpoint=checkpoint)
    result: LinearProbeResult = report["linear_probe"]
    return result


def _counts(model: Any, parts: Sequence[Data], at: AtArgument) -> list[int]:
    """Numbers of rows of data sets."""
    # `analyze` verifies the model.
    source = open_source(replace(OpenedModel.of(model), verify=None), either_stack=True, at=at)
    # An encoder and a decoder read different columns.
    if isinstance(source, CanReadSites):
        source.in_stack(at)
    described = with_tokenizer(source.model, parts[0].tokenizer)
    return [Batches(part, described, count_positions=position_counter([source])).count_rows() for part in parts]


def _labels_of_both(labels: str | Tensor, test_labels: Any, count: int, test_count: int) -> str | Tensor:
    """The labels of both data sets, the held-out rows after the others."""
    if isinstance(labels, str):
        if test_labels is not None:
            raise LayersimError(
                f"`test_labels` cannot be combined with labels={labels!r}, which names the source of all labels."
            )
        return labels
    held_out = as_labels(test_labels) if test_labels is not None else None
    if (
        not isinstance(held_out, Tensor)
        or held_out.dim() != labels.dim()
        or [count, test_count] != [len(labels), len(held_out)]
    ):
        given = f"of shape {tuple(held_out.shape)}" if isinstance(held_out, Tensor) else brief(held_out)
        raise LayersimError(
            f"`labels` of shape {tuple(labels.shape)} and `test_labels` {given} must have one entry for each of {count} rows "
            f"of `data` and {test_count} of `test_data`."
        )
    if labels.dim() == 1:
        return torch.cat([labels.long(), held_out.long()])
    both = torch.full((count + test_count, max(labels.shape[1], held_out.shape[1])), NO_LABEL)
    both[:count, : labels.shape[1]], both[count:, : held_out.shape[1]] = labels, held_out
    return both
