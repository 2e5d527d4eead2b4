"""`linear_probe`: accuracy of a linear classifier on frozen activations, at each site of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor

from ..analyzers.linear_probe import LinearProbe, LinearProbeResult, ProbeAnalyzer
from ..core.argument_checks import typed
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError
from ..core.server_addresses import shown
from ..data.batches import Batches
from ..data.labels import NO_LABEL, as_labels
from ..data.options import DataOptions
from ..remote.open import open_source
from .api import analyze
from .logistic_probe import LogisticProbe
from .site_plan import DEFAULT
from .validation import DataArgument, with_tokenizer


@typed
def linear_probe(
    model: Any,
    data: DataArgument,
    *,
    labels: Any = "data",
    test_data: Any = None,
    test_labels: Any = None,
    test_fraction: int | float | None = None,
    method: Literal["ridge", "logistic"] = "ridge",
    ridge: int | float | None = None,
    C: int | float | None = None,
    max_iter: int | None = None,
    max_classes: int | None = None,
    control: Literal["token", "row"] | None = None,
    seed: int = 0,
    max_memory_gb: int | float = 4.0,
    **options: Any,
) -> LinearProbeResult:
    """Accuracy of a linear classifier on frozen activations at each site, on rows that it was not fitted on.

    The classifier of each site is fitted on its own. Nothing in the model changes. A sample is a counted position, see
    `positions` of `analyze`: of a classifier the position that its head reads, of other models every position.

    Args:
        model: as in `analyze`.
        data: as in `analyze`. A part of its rows is held out, unless `test_data` is given.
        labels: the classes, whole numbers from 0: "data" for the data's own column `labels` or `label`; labels `row` or `row
            pos`; or "next_token". -100 marks a sample without class.
        test_data: held-out data of the same kind; the probes are then fitted on all of `data`.
        test_labels: labels of `test_data`, where `labels` are not "data" or "next_token".
        test_fraction: fraction of the rows of `data` that are held out, by their number alone; 0.2 by default.
        method: "ridge" fits in closed form from sums (`LinearProbe`), in two passes over the data, and runs on servers.
            "logistic" keeps the activations of training samples in memory, standardises each dimension by them, and fits
            scikit-learn's `LogisticRegression`, in two passes too; for models in this process. Intervals of both hold the
            fitted probes fixed and vary the held-out rows.
        ridge: of "ridge", see `LinearProbe`; 0.1 by default.
        C: of "logistic", the inverse strength of the L2 penalty; 1 by default.
        max_iter: of "logistic", most iterations; 1000 by default. A fit that stops there is named in a warning.
        max_classes: of "ridge", a number above every class of the data's own column; 100 by default.
        control: also fit probes of control labels, which are random for each "token" type or for each "row", for
            `selectivity`; see `LinearProbe`.
        seed: of the choice of held-out rows and of control labels.
        max_memory_gb: limit for the sums of "ridge", or for the activations that "logistic" keeps.
        **options: further options of `analyze`: `at`, `per_head`, `positions`, `batch_size`, `remote`, `checkpoint`, ...

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
        >>> probe = lsim.linear_probe(model, ids, labels=[row[-1] % 2 for row in ids], positions="last")
        >>> probe.accuracy.shape, probe.labels
        (torch.Size([9]), (0, 1))
    """
    _refuse_options(method, {"ridge": ridge, "max_classes": max_classes}, {"C": C, "max_iter": max_iter}, options)
    given = {"ridge": ridge, "max_classes": max_classes, "C": C, "max_iter": max_iter, "test_fraction": test_fraction}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    classes = as_labels(labels)
    if test_data is None:
        if test_labels is not None:
            raise LayersimError(
                "`test_labels` are labels of `test_data`, which is not given.",
                given="test_labels= without test_data=",
                expected="both, or labels= for all rows of data",
                do="test_data=..., or leave out test_labels",
            )
    else:
        if test_fraction is not None:
            raise LayersimError(
                "`test_fraction` cannot be combined with `test_data`.",
                given=f"test_fraction={test_fraction} with test_data=",
                expected="one of them",
                do="leave out test_fraction: the probes are fitted on all of data",
            )
        # An iterator would be gone after its rows are counted.
        data, test_data = (list(part) if isinstance(part, Iterator) else part for part in (data, test_data))
        count, test_count = _counts(model, (data, test_data), options)
        classes = _labels_of_both(classes, test_labels, count, test_count)
        data, settings["first_test_row"] = [data, test_data], count
    kind: type[ProbeAnalyzer] = LinearProbe if method == "ridge" else LogisticProbe
    probe = kind(labels=classes, seed=seed, max_memory_gb=max_memory_gb, control=control, **settings)
    result: LinearProbeResult = analyze(model, data, [probe], **options)["linear_probe"]
    return result


def _refuse_options(method: str, of_ridge: dict[str, Any], of_logistic: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuse options of the other method, and runs that the method or this function cannot do."""
    other = of_logistic if method == "ridge" else of_ridge
    for name, value in other.items():
        if value is not None:
            raise LayersimError(
                f"`{name}` is an option of the other method.",
                given=f'{name}={value} with method="{method}"',
                expected=f"options of {method}: {', '.join(of_ridge if method == 'ridge' else of_logistic)}",
                do=f'method="{"logistic" if method == "ridge" else "ridge"}", or leave out {name}',
            )
    if options.get("blocking", True) is not True:
        raise LayersimError(
            "`blocking` must be True for linear_probe, which returns a result.",
            given="blocking=False",
            expected="True",
            do="analyze(model, data, [LinearProbe(...)], blocking=False, remote=...)",
        )
    if method == "ridge":
        return
    ranks = rank_and_size()[1]
    if options.get("remote", False) is not False or options.get("checkpoint") is not None or ranks > 1:
        place = f"remote={shown(options['remote'])}" if options.get("remote", False) is not False else f"{ranks} processes"
        raise LayersimError(
            "Logistic regression keeps activations in the memory of one process: no server, checkpoint or group of processes.",
            given="checkpoint=" if options.get("checkpoint") is not None else place,
            expected="a model in this process, without checkpoint=",
            do='method="ridge", which needs sums only',
        )


def _counts(model: Any, parts: tuple[Any, Any], options: dict[str, Any]) -> tuple[int, int]:
    """Numbers of rows of two data sets."""
    opening = {name: options[name] for name in ("layers", "remote") if name in options}
    source = open_source(model, either_stack=True, **opening)
    # An encoder and a decoder read different columns.
    source.in_stack(options.get("at", DEFAULT))
    described = with_tokenizer(source.model, options.get("tokenizer"))
    reading = DataOptions(**{field.name: options[field.name] for field in fields(DataOptions) if field.name in options})
    first, second = (Batches(part, described, reading, count_positions=source.count_positions).count_rows() for part in parts)
    return first, second


def _labels_of_both(labels: str | Tensor, test_labels: Any, count: int, test_count: int) -> str | Tensor:
    """The labels of both data sets, the held-out rows after the others."""
    if isinstance(labels, str):
        if test_labels is not None:
            raise LayersimError(
                "`test_labels` are given, and `labels` names the source of all labels.",
                given=f"labels={labels!r} with test_labels=",
                expected="labels of both, or of neither",
                do="labels=tensor, test_labels=tensor; or leave out test_labels",
            )
        return labels
    held_out = as_labels(test_labels) if test_labels is not None else None
    if (
        not isinstance(held_out, Tensor)
        or held_out.dim() != labels.dim()
        or [count, test_count] != [len(labels), len(held_out)]
    ):
        given = "nothing" if held_out is None else f"{tuple(held_out.shape)}" if isinstance(held_out, Tensor) else held_out
        raise LayersimError(
            "`labels` and `test_labels` must have one entry for each row of `data` and of `test_data`.",
            given=f"labels {tuple(labels.shape)} for {count} rows, and test_labels {given} for {test_count} rows",
            expected="labels of shape (row,), or (row, pos), of both",
            do="labels=labels, test_labels=labels of the rows of test_data",
        )
    if labels.dim() == 1:
        return torch.cat([labels.long(), held_out.long()])
    both = torch.full((count + test_count, max(labels.shape[1], held_out.shape[1])), NO_LABEL)
    both[:count, : labels.shape[1]], both[count:, : held_out.shape[1]] = labels, held_out
    return both
