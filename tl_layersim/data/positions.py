"""Positions: the rule that selects the measured positions of a row."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief
from .labels import number_tensor

PositionRule: TypeAlias = str | slice | Callable[[Tensor], Any]
SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(:(-?\d+)?)?")
# Any other text is the name of a mask column of the data.
RULES = ("all", "first", "last", "mean", "assistant", "image", "text", "padded")
# Rules whose positions the data or the model marks.
MARKED_RULES = ("assistant", "image", "text")


@dataclass(frozen=True)
class Positions:
    """A rule that selects the measured positions of a row from its attended positions.

    `skip_first` applies first: "first", "last" and slices refer to the attended positions after it. A function, a mask column,
    "assistant", "image" and "text" see the whole row; positions among the first `skip_first` are removed from their selection.

    Args:
        rule: "all"; "first" or "last"; a slice; "mean", one sample per row, the mean over all positions; a function that takes
            the token ids of a row and returns a mask or indices; "assistant" for the tokens that a chat template marks; "image"
            or "text" for the image tokens of the model, or all others; the name of a mask column of the data; or "padded", all
            positions of the row, its padding too.
        skip_first: number of attended positions to leave out at the start of each row.

    Examples:
        The row of four tokens is padded at its end.

        >>> attention = torch.tensor([True, True, True, True, False])
        >>> Positions("first", skip_first=1).select(torch.arange(5), attention).tolist()
        [False, True, False, False, False]
        >>> Positions(slice(-2, None)).select(torch.arange(5), attention).tolist()
        [False, False, True, True, False]
    """

    rule: PositionRule = "all"
    skip_first: int = 0

    @property
    def pooled(self) -> bool:
        """Whether the counted positions of a row become one sample, the mean of their activations."""
        return self.rule == "mean"

    @property
    def marked(self) -> bool:
        """Whether a mask column, a chat template or the model's image tokens choose the counted positions."""
        return self.column is not None or self.rule in MARKED_RULES

    @property
    def column(self) -> str | None:
        """Name of the mask column that marks the positions; None for any other rule."""
        return self.rule if isinstance(self.rule, str) and self.rule not in RULES else None

    def record(self) -> str:
        """The rule as text for the provenance: a slice as "start:stop", a function as its name and code digest."""
        if isinstance(self.rule, str):
            return self.rule
        if isinstance(self.rule, slice):
            bounds = [self.rule.start, self.rule.stop]
            if self.rule.step is not None:
                bounds.append(self.rule.step)
            return ":".join("" if bound is None else str(bound) for bound in bounds)
        # Imported here, because a user's trace ships this class by value, with what it names.
        from ..core.code_digests import ValueNames

        return ValueNames().function(self.rule)

    def select(self, tokens: Tensor, attention: Tensor, marks: Tensor | None = None) -> Tensor:
        """Bool mask of the counted positions of one row (`pos`).

        Args:
            tokens: `pos`, the token ids of the row.
            attention: `pos`, positions that the model attends to.
            marks: `pos`, positions that a mask column or chat template marks; None if there are no marks.

        Raises:
            LayersimError: the rule needs marks and there are none, or the function did not return a mask or indices.
        """
        attended = torch.arange(len(attention)) if self.rule == "padded" else attention.nonzero()[:, 0]
        after_skipped = attended[self.skip_first :]
        if self.marked:
            if marks is None:
                raise LayersimError(
                    f"`positions` is {self.rule!r}, but `data` has no mask column of this name and no chats. `positions` "
                    f"must be {', '.join(map(repr, RULES))}, a slice (on the command line, 2:10 or -5:), a function, or the "
                    "name of a column."
                )
            chosen = after_skipped[marks[after_skipped]]
        elif callable(self.rule):
            chosen = attended[self._chosen_by_function(tokens[attended].clone())]
        elif isinstance(self.rule, slice):
            # Tensors have no slices with a negative step.
            chosen = after_skipped[list(range(len(after_skipped))[self.rule])]
        elif self.rule == "first":
            chosen = after_skipped[:1]
        elif self.rule == "last":
            chosen = after_skipped[-1:]
        else:
            chosen = after_skipped
        counted = torch.zeros_like(attention, dtype=torch.bool)
        counted[chosen] = True
        # A function sees these positions too.
        counted[attended[: self.skip_first]] = False
        return counted

    def select_rows(self, tokens: Tensor, attention: Tensor, continued: bool) -> Tensor:
        """Bool mask of the counted positions in a forward pass (`batch pos`).

        Args:
            tokens: `batch pos`, token ids.
            attention: `batch pos`, positions that the model attends to.
            continued: whether the earlier positions of the rows are in a cache.

        Raises:
            LayersimError: the rows continue from a cache, and the rule refers to whole rows.
        """
        if self.rule == "all":
            return attention
        if continued and self.rule != "last":
            raise LayersimError(
                f"`positions` is {self.record()}, which refers to whole rows, but this forward pass continues rows from a "
                "cache. Use 'all' or 'last', or measure the finished rows."
            )
        pairs = zip(tokens, attention, strict=True)
        return torch.stack([self.select(tokens_of_row, attention_of_row) for tokens_of_row, attention_of_row in pairs])

    def refuse_without_tokens(self) -> None:
        """Raise an error if the rule is a function: it needs token ids, and the rows have none."""
        if callable(self.rule):
            raise LayersimError("`positions` is a function of token ids, but the rows have no token ids. Use a slice.")

    def _chosen_by_function(self, tokens: Tensor) -> Tensor:
        """Indices that the function selects among the attended tokens of a row."""
        assert callable(self.rule)
        count = len(tokens)
        try:
            selection = self.rule(tokens)
        except LayersimError:
            raise
        except (TypeError, ValueError) as error:
            raise LayersimError(
                f"`positions` is {brief(self.rule)}, which fails on a row of {count} token ids: {error}"
            ) from error
        # None and texts are no tensors, and floats and numbers out of range no indices.
        with suppress(LayersimError, IndexError):
            index = number_tensor(selection)
            if not index.numel():
                # An empty list becomes a float tensor.
                return index.long()
            chosen = torch.arange(count)[index]
            # A mask as integers would select the positions 0 and 1.
            if chosen.dim() < 2 and (index.dtype == torch.bool or len(torch.unique(chosen)) == chosen.numel()):
                return chosen
        raise LayersimError(
            f"`positions` returned {brief(selection)} for a row of {count} tokens; it must return a bool mask of the row, or "
            f"indices from {-count} to {count - 1} without repeats."
        )


def as_rule(text: str | None) -> str | slice | None:
    """Parse a rule from text: a slice from "start:stop" or "start:stop:step", any other rule from its name.

    Examples:
        >>> as_rule("2:-1"), as_rule("last")
        (slice(2, -1, None), 'last')
    """
    if text is None or not SLICE.fullmatch(text):
        return text
    bounds = [int(bound) if bound else None for bound in text.split(":")]
    return slice(*bounds)
