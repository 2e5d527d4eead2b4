"""Values by row of the data: the indices of the rows, which a first pass without the model finds, and sums for each row.

Kernels are plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations.view import View
from ..core import LayersimError, Sums

# Rows of the data that can be counted.
COUNTED_ROWS = 2**19


def row_counts_kernel(view: View) -> dict[str, Tensor]:
    """Number of counted positions in each row of the data, as far as they are known without the model."""
    assert view.row is not None
    if len(view.row) and int(view.row.max()) >= COUNTED_ROWS:
        raise LayersimError(
            f"`per_prompt` is True, but the data has more than {COUNTED_ROWS} rows, which is the limit for values by prompt."
        )
    return {"rows": torch.bincount(view.row, minlength=COUNTED_ROWS)}


def counted_rows(first: Sums) -> Tensor:
    """Indices of the rows of the data that have counted positions, ascending.

    Args:
        first: sums of `row_counts_kernel`; empty without values by row.
    """
    return first["rows"].nonzero()[:, 0] if first else torch.zeros(0, dtype=torch.int64)


def prompt_fields(name: str, sums: Sums, first: Sums, known: str) -> dict[str, Any]:
    """Fields of a result that hold values by row of the data; empty if values by row were not measured.

    Args:
        name: name of the quantity.
        sums: sums of the main pass over the data.
        first: sums of `row_counts_kernel`; empty without values by row.
        known: name of the sums with the number of samples at which the quantity is defined.
    """
    none = torch.zeros(0, dtype=torch.float64)
    return {
        f"prompt_{name}": sums[f"prompt {name}"] / sums[known] if first else none,
        "prompt_tokens": sums["prompt tokens"] if first else none,
        "prompt_rows": tuple(counted_rows(first).tolist()),
    }


def sums_by_row(values: Tensor, row: Tensor, rows: Tensor) -> Tensor:
    """Sum of the values of each row of the data, `row ...`, float64.

    Args:
        values: `sample ...`.
        row: `sample`, index of the row of each sample.
        rows: indices of all rows, ascending.
    """
    index = torch.searchsorted(rows.to(row.device), row).to(values.device)
    return torch.zeros(len(rows), *values.shape[1:], dtype=torch.float64, device=values.device).index_add(
        0, index, values.double()
    )


def defined_by_row(values: Tensor, rows: tuple[int, ...], analyzer: str) -> dict[str, float]:
    """Values by row of the data without undefined ones, by names such as "row 3".

    Args:
        values: `row`, the values.
        rows: indices of the rows; empty if values by row were not measured.
        analyzer: name of the analyzer, for the message.

    Raises:
        LayersimError: values by row were not measured.
    """
    if not rows:
        raise LayersimError(f"This result has no values by prompt; {analyzer}(per_prompt=True) measures them.")
    known = (~values.isnan()).tolist()
    return {f"row {row}": value for row, value, one in zip(rows, values.tolist(), known, strict=True) if one}
