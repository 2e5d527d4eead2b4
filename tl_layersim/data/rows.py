"""A row of the data: its tokens, mask, labels and further inputs, and what its reading depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A row of tokens or of other inputs, without padding at its ends.

    Attributes:
        tokens: `pos`; zeros for a row without token ids, one alone where the number of its positions is not known.
        attention: `pos`, positions that the model attends to.
        labels: `pos`, the data's labels, a class of the whole row at each of its positions; None without labels.
        source: the row of the data that it came from; -1 for several.
        start: its start position in that row.
        marks: `pos`, positions that the data marks, in a mask column or by a chat template; None where it marks none.
        counted: `pos`, positions that analyzers measure; None as long as they are not selected.
        inputs: further inputs by name: `pos ...` of those in `positional`, and any shape.
        positional: names of the inputs that have one value for each position.
        has_tokens: whether the row has token ids.
    """

    tokens: Tensor
    attention: Tensor
    labels: Tensor | None = None
    source: int = -1
    start: int = 0
    marks: Tensor | None = None
    counted: Tensor | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    positional: frozenset[str] = frozenset()
    has_tokens: bool = True

    @property
    def has_positions(self) -> bool:
        """Whether the positions of the row are known, which those of an image are after a forward pass."""
        return self.has_tokens or bool(self.positional)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        held = (self.tokens, self.attention, self.labels, self.marks, self.counted, *self.inputs.values())
        return sum(values.nbytes for values in held if values is not None)

    def __getitem__(self, span: slice) -> Row:
        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[span]

        inputs = {name: values[span] if name in self.positional else values for name, values in self.inputs.items()}
        return replace(
            self,
            tokens=self.tokens[span],
            attention=self.attention[span],
            labels=cut(self.labels),
            start=self.start + (span.start or 0),
            marks=cut(self.marks),
            counted=cut(self.counted),
            inputs=inputs,
        )

    def split(self, length: int) -> Iterator[Row]:
        """Split the row into rows of at most `length` tokens."""
        for start in range(0, len(self.tokens), max(length, 1)):
            yield self[start : start + length]


NOTHING = Row(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))


class ModelInputs(Protocol):
    """The inputs that a model accepts, and its tokenizer; see the fields of `Model`."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def vocabulary(self) -> int | None: ...
    @property
    def context(self) -> int | None: ...
    @property
    def inputs(self) -> Mapping[str, int | None]: ...
    @property
    def main_input(self) -> str: ...
    @property
    def token_input(self) -> str: ...
    @property
    def mask_input(self) -> str: ...
    @property
    def processor(self) -> Any: ...
    @property
    def pads(self) -> tuple[int, ...]: ...
    @property
    def starts(self) -> tuple[int, ...]: ...
    @property
    def ends(self) -> tuple[int, ...]: ...
    @property
    def reads_rows(self) -> bool: ...
