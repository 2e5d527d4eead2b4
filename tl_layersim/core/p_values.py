"""p-values of a whole report in one table, adjusted for their number after Holm or Benjamini and Hochberg."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from .label_table import label_table
from .provenance import JOINT
from .report_tables import joined_tables

if TYPE_CHECKING:
    import pandas

Correction: TypeAlias = Literal["holm", "fdr_bh"]
# Columns of the numbers.
P_VALUE, P_ADJUSTED = "p_value", "p_adjusted"


def report_p_values(report: Mapping[str, Any], method: Correction) -> pandas.DataFrame:
    """All p-values of a report, a line for each, adjusted over the report; see `Report.p_values`.

    Args:
        report: results by name.
        method: of the adjustment.
    """
    tables = [
        p_value_lines(field, {axis: result.coordinates(axis) for axis in axes}, getattr(result, field), tested, name)
        for name, result in report.items()
        for field, axes in result.tensor_fields().items()
        if is_p_value_field(field) and bool((tested := distinct_tests(result, field)).any())
    ]
    return adjusted_table(tables, method)


def is_p_value_field(field: str) -> bool:
    """Whether a tensor field holds p-values, by its name.

    Args:
        field: the name.

    Examples:
        >>> is_p_value_field("max_p_value"), is_p_value_field("values")
        (True, False)
    """
    return field.endswith(("p_value", "p_values"))


def distinct_tests(result: Any, field: str) -> Tensor:
    """Which entries of a field of p-values are tests of their own; none where the run had no permutations.

    Between layers of one model, a layer and itself are no pair, and two layers are one pair if the measure is symmetric.

    Args:
        result: whose field.
        field: its name.
    """
    p, axes = getattr(result, field), result.tensor_fields()[field]
    tested = torch.full_like(p, fill_value=not bool(p.isnan().all()), dtype=torch.bool)
    if axes == ("row", "column") and JOINT not in result.provenance.model and result.layers == result.coordinates("column"):
        # p-values of few permutations have few values: they may look symmetric where the measure is not.
        if is_symmetric(result.values):
            return tested.triu(1)
        return tested & ~torch.eye(len(p), dtype=torch.bool)
    return tested


def is_symmetric(values: Tensor) -> bool:
    """Whether a tensor is a symmetric matrix, but for rounding.

    Args:
        values: of any shape.
    """
    square = values.dim() == 2 and values.shape[0] == values.shape[1]
    return square and torch.allclose(values, values.T, rtol=1e-6, atol=0, equal_nan=True)


def p_value_lines(
    field: str, labels: Mapping[str, tuple[Any, ...]], p: Tensor, tested: Tensor, analyzer: str = ""
) -> pandas.DataFrame:
    """The p-values of a field as a table, a line for each test.

    Args:
        field: its name.
        labels: along each axis.
        p: the p-values.
        tested: which of them are tests of their own.
        analyzer: name of the result; no such column without it.
    """
    table = label_table(labels)
    table.insert(0, "field", field)
    if analyzer:
        table.insert(0, "analyzer", analyzer)
    table[P_VALUE] = p.numpy().reshape(-1)
    return table[tested.numpy().reshape(-1)]


def adjusted_table(tables: Sequence[pandas.DataFrame], method: Correction) -> pandas.DataFrame:
    """Tables of p-values below one another, with a column of p-values that are adjusted over all of them.

    Args:
        tables: see `p_value_lines`.
        method: of the adjustment.
    """
    found = joined_tables(tables, (P_VALUE,))
    found[P_ADJUSTED] = adjusted(torch.tensor(found[P_VALUE].to_numpy(dtype=float)), method).numpy()
    return found


def adjusted(p: Tensor, method: Correction) -> Tensor:
    """p-values adjusted for their number; NaN is no test, and the two halves of a symmetric matrix count once.

    Args:
        p: of any shape.
        method: "holm" (Holm 1979) or "fdr_bh" (Benjamini and Hochberg 1995).

    Examples:
        >>> adjusted(torch.tensor([0.01, 0.04, float("nan")]).double(), "holm")
        tensor([0.0200, 0.0400,    nan], dtype=torch.float64)
    """
    from statsmodels.stats.multitest import multipletests

    symmetric = is_symmetric(p)
    once = counted_once(p)
    tested = once & ~p.isnan()
    out = torch.full_like(p, math.nan)
    if bool(tested.any()):
        out[tested] = torch.as_tensor(multipletests(p[tested].numpy(), method=method)[1], dtype=p.dtype)
    return out.where(once, out.T) if symmetric else out


def counted_once(p: Tensor) -> Tensor:
    """Which entries are tests of their own: the upper half of a symmetric matrix, else all.

    Args:
        p: p-values of t tests, of any shape.
    """
    once = torch.ones_like(p, dtype=torch.bool)
    return once.triu() if is_symmetric(p) else once
