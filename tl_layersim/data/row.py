"""`Row`: one row of the data. `ModelInputs`: the properties of a model on which reading depends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TextOfRow(NamedTuple):
    """The text that a row belongs to. Rows of one text depend on each other, so the text is the unit of statistics.

    Attributes:
        group: index in the data of the first row of the text, which identifies the text; -1 if the row joins several texts.
        unit: index of the text among the texts with rows, in the order in which they are measured. Rows of a unit follow each
            other.
        part: index of the row among the rows of its unit.
        joined: for a row that joins several texts, the identities of the first and of the last one; else `group` twice.
        neighbours: whether units that follow each other may share a text, or are parts of one: rows of packed data, documents
            of packed rows, and rows of data with too few texts.
    """

    group: int
    unit: int
    part: int
    joined: tuple[int, int]
    neighbours: bool = False


@dataclass(frozen=True)
class Row:
    """A row of tokens or of other inputs, without padding at its ends.

    Attributes:
        tokens: `pos`; zeros for a row without token ids, a single zero if the number of positions is unknown.
        attention: `pos`, positions that the model attends to.
        labels: `pos`, labels from the data; a class of the row is repeated at each position. None if there are no labels.
        source: index of the row in the data; -1 if the row joins several.
        group: the group of the row, from the data; once rows are numbered, the index in the data of the group's first row,
            which is `source` without groups; -1 if the row joins several texts.
        joined: for a row that joins several texts, the groups of the first and of the last one; None for any other row.
        document: index of the row among the documents that position ids tell apart in one data row; None for any other row.
        text: the text that the row belongs to; None until all rows are numbered.
        start: start position in that row.
        marks: `pos`, positions that a mask column or a chat template marks; None if there are no marks.
        counted: `pos`, positions that analyzers measure; None until they are selected.
        inputs: further inputs by name: `pos ...` if listed in `positional`, else any shape.
        positional: names of the inputs that have one value for each position.
        of_images: names of the inputs with one entry for each image of the row, or for each patch.
        has_tokens: whether the row has token ids.
    """

    tokens: Tensor
    attention: Tensor
    labels: Tensor | None = None
    source: int = -1
    group: Any = -1
    joined: tuple[int, int] | None = None
    document: int | None = None
    text: TextOfRow | None = None
    start: int = 0
    marks: Tensor | None = None
    counted: Tensor | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    positional: frozenset[str] = frozenset()
    of_images: frozenset[str] = frozenset()
    has_tokens: bool = True

    @property
    def has_positions(self) -> bool:
        """Whether the number of positions is known before a forward pass. It is not for images."""
        return self.has_tokens or bool(self.positional)

    @property
    def nbytes(self) -> int:
        """Bytes of the row's tensors."""
        tensors = (self.tokens, self.attention, self.labels, self.marks, self.counted, *self.inputs.values())
        return sum(values.nbytes for values in tensors if values is not None)

    def copied(self) -> Row:
        """The row with tensors of its own, which do not change with the data."""

        def copy(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.clone()

        return replace(
            self,
            tokens=self.tokens.clone(),
            attention=self.attention.clone(),
            labels=copy(self.labels),
            marks=copy(self.marks),
            counted=copy(self.counted),
            inputs={name: values.clone() for name, values in self.inputs.items()},
        )

    def __getitem__(self, span: slice) -> Row:
        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[span]

        inputs = dict(self.inputs)
        for name in self.inputs.keys() & self.positional:
            inputs[name] = self.inputs[name][span]
        return replace(
            self,
            tokens=self.tokens[span],
            attention=self.attention[span],
            labels=part(self.labels),
            start=self.start + (span.start or 0),
            marks=part(self.marks),
            counted=part(self.counted),
            inputs=inputs,
        )


NOTHING = Row(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Inputs and tokenizer of a model. The subclass `ModelDescription` explains the attributes."""

    name: str
    tokenizer: Any
    vocabulary: int | None
    context: int | None
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    main_input: str = "input_ids"
    token_input: str = "input_ids"
    mask_input: str = "attention_mask"
    processor: Any = None
    pads: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    pixel_axes: int | None = None
    channels: int | None = None
    image_tokens: Mapping[str, int] = field(default_factory=dict)
    merged_patches: int = 1

    @property
    def reads_rows(self) -> bool:
        """Whether the head makes one prediction per row."""
        raise NotImplementedError
