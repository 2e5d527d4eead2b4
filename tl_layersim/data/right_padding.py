"""`RightPadding`: rows with their padding moved to the right, and results moved back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .input_names import EMBEDDINGS, MASK, ROW_AXES

POSITION_IDS = "position_ids"


class RightPadding:
    """Order of positions in which the tokens of each row come first, and its padding follows.

    Padding after the tokens changes nothing in a causal model. Padding before them shifts the positions of a model that counts
    columns, such as GPT-2, and runs through the state of a recurrent model. The positions of a row keep their order, so masked
    positions between tokens stay where they are.

    Args:
        attended: `batch pos`, False at padding; None without padding.

    Attributes:
        moves: whether a row has padding on the left.

    Examples:
        >>> order = RightPadding(torch.tensor([[False, False, True, True], [True, True, True, False]]))
        >>> tokens = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
        >>> order.moved(tokens).tolist()
        [[5, 6, 0, 0], [7, 8, 9, 0]]
        >>> bool((order.restored(order.moved(tokens)) == tokens).all())
        True
    """

    def __init__(self, attended: Tensor | None) -> None:
        self.moves = attended is not None and attended.numel() > 0 and not bool(attended[:, 0].all())
        # The column of each position before and after the move.
        self._before = torch.empty(0, 0, dtype=torch.int64)
        self._after = self._before
        if attended is not None and self.moves:
            rows, width = attended.shape
            first = attended.int().argmax(1, keepdim=True)
            columns = torch.arange(width, device=attended.device).expand(rows, width)
            self._before = (columns + first) % width
            self._after = (columns - first) % width

    def moved(self, values: Tensor) -> Tensor:
        """Values of positions (`batch pos ...`, or `1 pos ...` for all rows) in this order."""
        return _in_columns(values, self._before) if self.moves else values

    def restored(self, values: Tensor) -> Tensor:
        """Values in this order (`batch pos ...`) in the order of the caller."""
        return _in_columns(values, self._after) if self.moves else values

    def moved_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a forward pass by name, of which those with one value for each position are in this order."""
        return {name: self._moved_input(name, values) for name, values in inputs.items()}

    def _moved_input(self, name: str, values: Any) -> Any:
        if not self.moves or not isinstance(values, Tensor):
            return values
        rows, width = self._before.shape
        shapes = ((rows, width), (1, width))
        # Some models have several axes of positions, `axis batch pos`.
        if name == POSITION_IDS and values.dim() == 3 and values.shape[1:] in shapes:
            return torch.stack([self.moved(axis) for axis in values])
        # Inputs of another stack or of images have no values for these positions.
        if (name in ROW_AXES and name != EMBEDDINGS) or name.startswith("decoder_"):
            return values
        may_be_of_positions = not values.is_floating_point() or name in (MASK, EMBEDDINGS)
        if may_be_of_positions and tuple(values.shape[:2]) in shapes:
            return self.moved(values)
        return values


def _in_columns(values: Tensor, columns: Tensor) -> Tensor:
    """The entries of `values` (`batch pos ...`) at `columns` (`batch pos`) of their rows."""
    columns = columns.to(values.device)
    values = values.expand(len(columns), *values.shape[1:])
    return values[torch.arange(len(columns), device=values.device)[:, None], columns]
