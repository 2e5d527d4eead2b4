"""All p-values of a report in one table, corrected for multiple tests by Holm or Benjamini-Hochberg."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from .fields import JOINT
from .report_tables import joined_tables, label_table

if TYPE_CHECKING:
    import pandas

Correction: TypeAlias = Literal["holm", "fdr_bh"]
# Columns of the numbers.
P_VALUE, P_ADJUSTED = "p_value", "p_adjusted"


def report_p_values(report: Mapping[str, Any], method: Correction) -> pandas.DataFrame:
    """All p-values of a report, one per line, corrected for the number of tests; see `Report.p_values`."""
    tables = []
    for name, result in report.items():
        for field, axes in result.tensor_fields().items():
            tested = distinct_tests(result, field) if field.endswith(("p_value", "p_values")) else None
            if tested is not None and bool(tested.any()):
                table = label_table({axis: result.coordinates(axis) for axis in axes})
                table[P_VALUE] = getattr(result, field).numpy().reshape(-1)
                table.insert(0, "analyzer", name)
                table.insert(1, "field", field)
                tables.append(table[tested.numpy().reshape(-1)])
    found = joined_tables(tables, (P_VALUE,))
    found[P_ADJUSTED] = adjusted(torch.tensor(found[P_VALUE].to_numpy(dtype=float)), method).numpy()
    return found


def distinct_tests(result: Any, field: str) -> Tensor:
    """Mask of the entries of a p-value field that are separate tests; none are if the run had no permutations.

    For layers of one model, the diagonal is left out, and a symmetric measure counts each pair of layers once.

    Args:
        result: the result that has the field.
        field: name of the field.
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
    """Whether a tensor is a symmetric matrix up to rounding."""
    square = values.dim() == 2 and values.shape[0] == values.shape[1]
    largest = float(values.nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
    return square and torch.allclose(values, values.T, rtol=1e-6, atol=1e-9 * largest, equal_nan=True)


def adjusted(p: Tensor, method: Correction, symmetric: bool = False) -> Tensor:
    """p-values corrected for multiple tests; NaN does not count as a test.

    Args:
        p: p-values of any shape.
        method: "holm" (Holm 1979) or "fdr_bh" (Benjamini and Hochberg 1995).
        symmetric: whether the p-values form a symmetric matrix, whose two halves count once.

    Examples:
        >>> adjusted(torch.tensor([0.01, 0.04, float("nan")]).double(), "holm")
        tensor([0.0200, 0.0400,    nan], dtype=torch.float64)
    """
    return adjusted_together([(p, symmetric)], method)[0]


def adjusted_together(each: Sequence[tuple[Tensor, bool]], method: Correction) -> list[Tensor]:
    """p-values of several fields, corrected together; see `adjusted`.

    Args:
        each: for each field, its p-values, and whether they form a symmetric matrix.
        method: "holm" or "fdr_bh".
    """
    from statsmodels.stats.multitest import multipletests

    tested = [(~p.isnan()).triu() if symmetric else ~p.isnan() for p, symmetric in each]
    known = torch.cat([p[own] for own, (p, _) in zip(tested, each, strict=True)])
    found = torch.as_tensor(multipletests(known.numpy(), method=method)[1] if len(known) else known, dtype=torch.float64)
    parts = torch.split(found, [int(own.sum()) for own in tested])
    filled = [
        torch.full_like(p, math.nan).masked_scatter(own, part) for (p, _), own, part in zip(each, tested, parts, strict=True)
    ]
    return [own.triu() + own.triu(1).T if symmetric else own for own, (_, symmetric) in zip(filled, each, strict=True)]
