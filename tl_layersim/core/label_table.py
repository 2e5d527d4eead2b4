"""Tables of labels: one line for each entry of a tensor with named axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

# Axes whose labels are the blocks of the (first) model.
BLOCK_AXES = ("layer", "row_block", "column_block", "skipped", "affected")
# Names of columns, for axes whose labels are sites.
COLUMNS = {
    "residual": "layer",
    "row": "row_layer",
    "column": "column_layer",
    "row_block": "row_layer",
    "column_block": "column_layer",
}


def label_table(labels: Mapping[str, tuple[Any, ...]]) -> pandas.DataFrame:
    """A table with one line for each entry of a tensor, in the order of its memory, and a column for each axis.

    Args:
        labels: along each axis, in order.
    """
    import pandas

    table = pandas.DataFrame(
        list(itertools.product(*labels.values())),
        columns=[COLUMNS.get(axis, axis) for axis in labels],
        index=None if labels else [0],
    )
    for axis, own in labels.items():
        if axis in (*COLUMNS, *BLOCK_AXES):
            # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
            name = COLUMNS.get(axis, axis)
            table[name] = pandas.Categorical(table[name], categories=list(own), ordered=True)
    return table
