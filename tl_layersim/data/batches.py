"""Right-padded batches of the rows of the data, with masks and labels."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.code_digests import ValueNames
from ..core.errors import LayersimError, as_argument, in_words
from .collated_rows import collated, cut_to_longest
from .data import MOST_KEPT, Data, KeptRows, Notes
from .images_of_rows import image_marks
from .input_names import TOKEN_IDS
from .labels import NO_LABEL
from .positions import Positions
from .reader import Reader, refuse_path
from .row import ModelInputs, Row, TextOfRow
from .texts import LEAST_TEXTS, in_texts
from .tokenization import Text, TextRows
from .vector_rows import VectorRows


def fingerprint(digest: Any, batch: Batch, marked: bool = False) -> None:
    """Update a hash with the rows of a batch.

    The hash does not depend on the batch size or on padding that is not counted.

    Args:
        digest: the hash.
        batch: the rows.
        marked: whether the data marks the counted positions, which are then hashed too.
    """
    for number in range(len(batch.tokens)):
        digest.update(row_bytes(batch, number))
        if marked:
            digest.update(batch.counted[number][batch.attention[number]].numpy().tobytes() + b"|")


def row_bytes(batch: Batch, number: int) -> bytes:
    """One row of a batch as bytes: token ids, mask and further inputs. Padding is left out unless it is counted."""
    length = _length_of_row(batch, number)
    content = batch.tokens[number].numpy()[:length].tobytes() + batch.attention[number].numpy()[:length].tobytes() + b"|"
    inputs = cut_to_longest({name: values[number : number + 1] for name, values in batch.inputs.items()})
    for name, values in sorted(inputs.items()):
        row = values[0, :length] if name in batch.positional else values[0]
        if name in batch.images:
            row = row[: batch.images[name][number]]
            if not len(row):
                continue
        # NumPy has no bfloat16.
        values_as_bytes = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        content += f"{name} {row.dtype} {tuple(row.shape)} ".encode() + values_as_bytes + b"|"
    return content


def _length_of_row(batch: Batch, number: int) -> int:
    """Number of positions of a row up to its last one that is attended or counted."""
    # NumPy, because a call of torch takes longer than reading a row.
    in_use = batch.attention[number].numpy() | batch.counted[number].numpy()
    return int(in_use.nonzero()[0][-1]) + 1


class RowDigests:
    """Digests of the rows that a pass over the data has read so far. They do not depend on the batch size.

    Args:
        marked: whether the data marks the counted positions, which `rows` then includes.
    """

    def __init__(self, marked: bool = False) -> None:
        self._marked = marked
        self._rows = new_digest()
        self._annotations = new_digest()

    def add(self, batch: Batch) -> None:
        """Update the digests with the rows of a batch."""
        fingerprint(self._rows, batch, self._marked)
        for number in range(len(batch.tokens)):
            self._annotations.update(annotation_bytes(batch, number))

    @property
    def rows(self) -> str:
        """SHA-256 of tokens, masks and further inputs of the model."""
        return str(self._rows.hexdigest())

    @property
    def inputs(self) -> str:
        """SHA-256 of everything in the rows that changes a number: `rows`, counted positions, labels and texts."""
        return hashlib.sha256(f"{self._rows.hexdigest()} {self._annotations.hexdigest()}".encode()).hexdigest()


def annotation_bytes(batch: Batch, number: int) -> bytes:
    """All but the inputs of one row of a batch, as bytes: counted positions, labels, where the row begins, and its text."""
    length = _length_of_row(batch, number)
    content = batch.counted[number].numpy()[:length].tobytes() + b"|"
    if batch.labels is not None:
        labels = batch.labels[number, :length]
        # A row without labels has missing labels beside rows with labels, and no labels alone: its bytes are the same in both.
        if bool((labels != NO_LABEL).any()):
            content += labels.numpy().tobytes()
    origin = batch.origins[number] if batch.origins else (batch.first + number, 0)
    content += f"|{origin} {batch.pooled} {batch.has_tokens} {sorted(batch.positional)}|".encode()
    # The same rows as parts of other texts give other numbers.
    if batch.texts:
        content += repr(tuple(batch.texts[number])).encode() + b"|"
    return content


def new_digest() -> Any:
    """A new SHA-256 hash, to be updated by `fingerprint`."""
    return hashlib.sha256()


# Number of texts from which the mean number of counted positions per text is estimated.
FIRST_TEXTS = 16
# Number of positions in a short row, which is run to test a model.
SHORT = 16
# Fields of `Batch` that say how the sums of its rows are grouped.
GROUPING = ("leaf", "block", "capacity", "density", "rows_at_once", "whole_texts")


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of tokens, or rows of other inputs.

    Attributes:
        tokens: `batch pos`, int64; zeros for rows without token ids.
        attention: `batch pos`, positions that the model attends to; False at padding.
        counted: `batch pos`, positions that analyzers measure: attended, and selected by `positions` and `skip_first`; with
            positions="padded" the row's own padding too.
        first: index of the batch's first row in the data.
        labels: `batch pos`, labels from the data, `NO_LABEL` at positions without a label; None if the data has no labels.
        origins: for each row, the index of its data row (-1 if it joins several) and its start position there.
        texts: for each row, the text that it belongs to; empty if each row is a text.
        pooled: whether the counted positions of a row become one sample, the mean of their activations.
        inputs: further inputs of the model by name: `batch pos ...` if listed in `positional`, else `batch ...`.
        positional: names of the inputs that have one value for each position.
        images: for inputs `batch image ...`, with one entry for each image or patch, how many of them each row has.
        has_tokens: whether the rows have token ids.
        rows_at_once: rows in a forward pass; 0 for all.
        whole_texts: whether a forward pass holds all rows of a text, however many they are.
        leaf: number of texts in a leaf, whose sums are kept apart; a power of two. The last leaf may have fewer texts.
        block: number of texts whose sums may be added, see `core.sums`; 0 for no limit.
        capacity: number of texts in every batch but the last; 0 if unknown.
        density: mean number of counted positions per text, over the first texts of the data.
    """

    tokens: Tensor
    attention: Tensor
    counted: Tensor
    first: int
    labels: Tensor | None = None
    origins: tuple[tuple[int, int], ...] = ()
    texts: tuple[TextOfRow, ...] = ()
    pooled: bool = False
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    positional: frozenset[str] = frozenset()
    images: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_tokens: bool = True
    rows_at_once: int = 0
    whole_texts: bool = False
    leaf: int = 1
    block: int = 0
    capacity: int = 0
    density: float = 1.0

    @property
    def starts(self) -> tuple[int, ...]:
        """Index of the first row of each forward pass; the last entry is the number of rows."""
        total = len(self.tokens)
        at_once = self.rows_at_once or total
        if not self.whole_texts:
            return (*range(0, total, at_once), total)
        # The last row is followed by no row of its text.
        units = (*self.units, None)
        starts = [0]
        end_of_text = 0
        for row in range(total):
            if units[row] == units[row + 1]:
                continue
            # The rows up to this one are whole texts.
            if row + 1 - starts[-1] > at_once and end_of_text > starts[-1]:
                starts.append(end_of_text)
            end_of_text = row + 1
        return (*starts, total)

    @property
    def units(self) -> tuple[int, ...]:
        """For each row, the index of its text in the batch, ascending."""
        if not self.texts:
            return tuple(range(len(self.tokens)))
        index = 0
        units = [index]
        for text, following in itertools.pairwise(self.texts):
            if text.unit != following.unit:
                index += 1
            units.append(index)
        return tuple(units)

    @property
    def text_count(self) -> int:
        """Number of texts that the rows belong to."""
        return self.units[-1] + 1

    @property
    def neighbours(self) -> bool:
        """Whether texts that follow each other are left out as pairs, because they are not independent, see `TextOfRow`.

        All data in a first batch with fewer than twice `LEAST_TEXTS` texts is too little to leave out every other text.
        """
        is_little = self.first == 0 and self.text_count < 2 * LEAST_TEXTS
        return any(text.neighbours for text in self.texts) and not is_little

    @property
    def groups(self) -> tuple[int, ...]:
        """For each row, the index of the first data row of its text, which identifies the text; -1 if it joins several."""
        if not self.texts:
            return self.source_rows
        return tuple(text.group for text in self.texts)

    @property
    def tokens_of_texts(self) -> tuple[int, ...]:
        """Number of counted positions of each text."""
        counts = torch.zeros(self.text_count, dtype=torch.int64)
        counts.index_add_(0, torch.tensor(self.units), self.counted.sum(1))
        return tuple(counts.tolist())

    def passes(self) -> Iterator[Batch]:
        """Split the rows into batches, one for each forward pass."""
        starts = self.starts
        if len(starts) == 2:
            return iter([self])
        return itertools.starmap(self.rows, itertools.pairwise(starts))

    @property
    def pass_size(self) -> tuple[int, int]:
        """Largest number of rows and of positions in a forward pass."""
        rows = max(end - start for start, end in itertools.pairwise(self.starts))
        return rows, rows * self.tokens.shape[1]

    @property
    def leaf_texts(self) -> int:
        """Number of texts, rounded up to whole leaves: groups of `leaf` texts whose sums are kept apart."""
        leaf_count = math.ceil(self.text_count / self.leaf)
        return leaf_count * self.leaf

    @property
    def has_positions(self) -> bool:
        """Whether the number of positions per row is known before a forward pass. It is not for images."""
        return self.has_tokens or bool(self.positional)

    @property
    def token_positions(self) -> int | None:
        """Number of positions per row; None for images and other inputs whose positions a forward pass determines."""
        return self.tokens.shape[1] if self.has_positions else None

    @property
    def source_rows(self) -> tuple[int, ...]:
        """For each row, the index of its data row; -1 if it joins several."""
        if not self.origins:
            return tuple(range(self.first, self.first + len(self.tokens)))
        return tuple(row for row, _ in self.origins)

    @property
    def sources(self) -> tuple[Tensor, Tensor]:
        """Data row of each token (-1 in packed rows), and its position in that row (both `batch pos`)."""
        origins = self.origins
        if not origins:
            origins = tuple((self.first + number, 0) for number in range(len(self.tokens)))
        data_rows, starts = torch.tensor(origins).unbind(1)
        places = torch.arange(self.tokens.shape[1])
        return data_rows[:, None].expand_as(self.tokens), starts[:, None] + places

    @property
    def padded(self) -> bool:
        """Whether the batch has padding, so that the model needs a mask."""
        return not bool(self.attention.all())

    @property
    def next_tokens(self) -> Tensor:
        """The next token at each position (`batch pos`); `NO_LABEL` if no attended token follows."""
        if not self.has_tokens:
            return torch.full_like(self.tokens, NO_LABEL)
        return next_tokens(self.tokens, self.attention)

    @property
    def first_row(self) -> Batch:
        """The first row as a batch, without padding."""
        return self.rows(0, 1)

    @property
    def short_row(self) -> Batch:
        """A batch of the first tokens of the first row, with all attended positions counted.

        It has fewer tokens than the row, so that an axis which is as long as the rows only by chance is noticed. A row is not
        cut if it has no token ids, or has inputs that belong to it as a whole, such as images.
        """
        row = self.whole_row
        if not row.can_be_cut:
            return row
        length = max(1, min(SHORT, row.tokens.shape[1] - 1))
        return row._cut(slice(0, 1), length)

    @property
    def whole_row(self) -> Batch:
        """The first row as a batch, without padding, with all attended positions counted."""
        row = self.first_row
        return replace(row, counted=row.attention, pooled=False)

    @property
    def doubled_row(self) -> Batch:
        """The first row twice, one after the other, as one row. A row that cannot be cut is unchanged."""
        row = self.whole_row
        if not row.can_be_cut:
            return row

        def doubled(values: Tensor) -> Tensor:
            return torch.cat([values, values], 1)

        return replace(
            row,
            tokens=doubled(row.tokens),
            attention=doubled(row.attention),
            counted=doubled(row.counted),
            labels=None,
            inputs={name: doubled(values) for name, values in row.inputs.items()},
        )

    def has_rows_of(self, other: Batch) -> bool:
        """Whether another batch has the same rows, however they are grouped to leaves and blocks.

        Args:
            other: the other batch.
        """
        names = [item.name for item in fields(self) if item.name not in GROUPING]
        return all(_are_equal(getattr(self, name), getattr(other, name)) for name in names)

    @property
    def can_be_cut(self) -> bool:
        """Whether all inputs have one value for each token."""
        return self.has_tokens and self.positional >= self.inputs.keys()

    def rows(self, start: int, stop: int) -> Batch:
        """A batch of the rows `start` to `stop - 1`, cut to the length of the longest of these rows."""
        return self.chosen(slice(start, stop))

    def chosen(self, rows: slice | list[int]) -> Batch:
        """A batch of some rows, cut to the length of the longest of these rows.

        Args:
            rows: their indices.
        """
        part = self._cut(rows, int(self.lengths[rows].max()))
        return replace(part, inputs=cut_to_longest(part.inputs))

    @property
    def lengths(self) -> Tensor:
        """For each row, the number of positions up to its last one that is attended or counted (`batch`)."""
        in_use = self.attention | self.counted
        # The length of a row that ended at each position.
        lengths = torch.arange(1, in_use.shape[1] + 1)
        return (in_use * lengths).amax(1)

    def part(self, start: int, stop: int) -> Batch:
        """A batch of the rows `start` to `stop - 1`, with the same number of positions per row."""
        return self._cut(slice(start, stop), self.tokens.shape[1])

    def _cut(self, rows: slice | list[int], width: int) -> Batch:
        rows_and_positions = (rows, slice(0, width))
        numbers = range(len(self.tokens))[rows] if isinstance(rows, slice) else rows
        inputs = {}
        for name, values in self.inputs.items():
            inputs[name] = values[rows_and_positions] if name in self.positional else values[rows]
        images = {}
        for name, counts in self.images.items():
            images[name] = tuple(counts[number] for number in numbers)
        return replace(
            self,
            tokens=self.tokens[rows_and_positions],
            attention=self.attention[rows_and_positions],
            counted=self.counted[rows_and_positions],
            first=self.first + numbers[0],
            labels=None if self.labels is None else self.labels[rows_and_positions],
            origins=tuple(self.origins[number] for number in numbers) if self.origins else (),
            texts=tuple(self.texts[number] for number in numbers) if self.texts else (),
            inputs=inputs,
            images=images,
        )

    def with_positions(self, count: int, selection: Positions) -> Batch:
        """A copy of a batch without token ids, with `count` attended positions per row.

        Args:
            count: number of positions in the model's residual stream.
            selection: the rule of the counted positions.
        """
        selection.refuse_without_tokens()
        shape = (len(self.tokens), count)
        tokens = self.tokens.new_zeros(shape)
        attention = torch.ones(shape, dtype=torch.bool)
        counted = torch.stack([selection.select(*row) for row in zip(tokens, attention, strict=True)])
        labels = None if self.labels is None else self.labels.expand(shape)
        return replace(self, tokens=tokens, attention=attention, counted=counted, labels=labels)


def _are_equal(value: Any, other: Any) -> bool:
    """Whether two fields of batches are equal; tensors have one dtype too."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_are_equal(value[name], other[name]) for name in value)
    return type(value) is type(other) and bool(value == other)


def state_of(tool: Any, with_vocabulary: bool = False) -> str:
    """Digest of the settings of a tokenizer or an image processor, which may be changed in place; "" for None.

    Args:
        tool: the tokenizer or the processor.
        with_vocabulary: whether to read vocabularies and lists of merges, which takes seconds. Else they count by their size.
    """
    if tool is None:
        return ""
    backend = getattr(tool, "backend_tokenizer", None)
    steps = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    # Steps of a fast tokenizer have their settings as JSON.
    steps = [step.__getstate__() if type(step).__module__.startswith("tokenizers") else step for step in steps]
    size = len(tool) if hasattr(tool, "__len__") else 0
    settings = vars(tool) if hasattr(tool, "__dict__") else {}
    if not with_vocabulary:
        settings = {name: _size_if_long(value) for name, value in settings.items()}
    return ValueNames().digest(f"{type(tool).__qualname__} {size}", [settings, steps])


# Number of items from which a setting of a tokenizer is a part of its vocabulary.
MOST_ITEMS = 1000


def _size_if_long(value: Any) -> Any:
    """A value, or its number of items if it is a mapping, list or set of many."""
    is_long = isinstance(value, Mapping | list | tuple | set | frozenset) and len(value) > MOST_ITEMS
    return f"{type(value).__name__} of {len(value)}" if is_long else value


@dataclass(frozen=True)
class Batches:
    """Batches of the data, in the same order at each iteration.

    Args:
        data: the data with its reading options.
        model: description of the model that reads the rows.
        labelled: whether an analyzer needs labels from the data.
        count_positions: returns the number of positions of rows without token ids, see `CanCountPositions`; None if such rows
            raise an error.
        pool_texts: returns the number of texts of the largest pool from the mean number of counted positions per text. A batch
            then holds whole texts and whole pools; None for batches of `batch_size` rows.
        whole_texts: see `Batch`.
        argument: the argument of the public function that holds the data, for messages; see `as_argument`.
    """

    data: Data
    model: ModelInputs
    labelled: bool = False
    count_positions: Callable[[Batch], int] | None = field(default=None, repr=False, compare=False)
    pool_texts: Callable[[float], int] | None = field(default=None, repr=False, compare=False)
    whole_texts: bool = field(default=False, repr=False, compare=False)
    argument: str = field(default="data", repr=False, compare=False)
    notes: Notes = field(default_factory=Notes, init=False, repr=False, compare=False)
    # Numbers of positions by the shapes of a row's inputs.
    _counts: dict[Any, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.data.source, str | Path):
            with as_argument("data", self.argument):
                refuse_path(self.data.source)
        if self.data.seq_len and self.model.context and self.data.seq_len > self.model.context:
            raise LayersimError(
                f"`seq_len` is {self.data.seq_len}; it must be at most {self.model.context}, the context of {self.model.name}."
            )
        if self.data.pack and self.model.reads_rows:
            raise LayersimError(
                f"`pack` is True, which joins texts, but the head of {self.model.name} makes one prediction per row. Pass "
                "`pack=False`."
            )

    @property
    def one_shot(self) -> bool:
        """Whether the data is an iterator whose rows are not kept, so that it can be read only once."""
        return self.data.read_once and (self._kept_rows is None or self._kept_rows.notes is None)

    def read_ahead(self, reader: str, remedy: str) -> None:
        """Read an iterator to its end and keep the rows, because several passes need them.

        Args:
            reader: the analyzer or function that needs several passes, for the error message.
            remedy: the data or analyzer to pass instead, for the error message.

        Raises:
            LayersimError: the rows take more than `MOST_KEPT` bytes.
        """
        for _ in self.rows():
            if self._kept_rows is not None and not self._kept_rows.fits:
                raise LayersimError(
                    f"`data` is a generator, which can be read only once, and {reader} needs several passes. The rows take "
                    f"more than {in_words(MOST_KEPT)}, so they were not kept: pass {remedy}."
                )

    @property
    def _kept_rows(self) -> KeptRows | None:
        return self.data.kept(self._key_of_rows)

    @property
    def _key_of_rows(self) -> Hashable:
        """Key of the kept rows: the properties of the model and the options on which the rows depend."""
        model = self.model
        tools = (id(model.tokenizer), state_of(model.tokenizer), id(model.processor), state_of(model.processor))
        reading = (self.labelled, self.count_positions is None)
        tokens = (model.vocabulary, model.context, model.reads_rows, model.pads, model.starts, model.ends)
        images = (model.pixel_axes, model.channels, tuple(model.image_tokens.items()), model.merged_patches)
        names = (model.main_input, model.token_input, model.mask_input, *sorted(model.inputs))
        # A list of groups may be changed in place.
        groups = self.data.record()["groups"]
        return tools, reading, tokens, images, names, self.data.selection.record(), self.data.skip_first, groups

    def record(self) -> dict[str, Any]:
        """A dict of the reading options, tokenizer, processor and main input, for the provenance."""
        tokenizer = self.model.tokenizer
        options = self.data.record()
        options["tokenizer"] = None if tokenizer is None else f"{type(tokenizer).__name__} of {len(tokenizer)} tokens"
        if self.model.processor is not None:
            options["processor"] = type(self.model.processor).__name__
        if self.model.main_input != TOKEN_IDS:
            options["main_input"] = self.model.main_input
        return options

    def row_counts(self) -> dict[str, int]:
        """A dict for the provenance: numbers of rows that began with BOS, got a derived mask or were cut.

        `own_bos`: rows of text that began with a BOS of their own; `masked_by_pad_id`: rows of tokens whose mask was derived
        from padding ids; `cut_texts`: texts that were cut to one row, for a row classifier; `rows_as_texts`, if there are any:
        rows that stand for texts although their neighbours share a text with them, see `in_texts`.
        """
        counts = {"own_bos": self.notes.own_bos, "masked_by_pad_id": self.notes.masked, "cut_texts": self.notes.cut}
        if self.notes.neighbours:
            counts["rows_as_texts"] = self.notes.neighbours
        return counts

    def __iter__(self) -> Iterator[Batch]:
        with as_argument("data", self.argument):
            yield from self._batches()

    def _batches(self) -> Iterator[Batch]:
        rows = self.rows()
        if self.pool_texts is None:
            yield from self._batches_of_rows(rows)
            return
        texts: Iterator[list[Row]] = (list(text) for _, text in itertools.groupby(rows, _unit_of))
        first_texts = list(itertools.islice(texts, FIRST_TEXTS))
        if not first_texts:
            return
        # Row by row: images of different sizes form no batch.
        first_rows = itertools.chain.from_iterable(first_texts)
        counted = sum(self._counted_positions(row, number) for number, row in enumerate(first_rows))
        density = counted / len(first_texts)
        yield from self._batches_of_texts(itertools.chain(first_texts, texts), self.pool_texts(density), density)

    def _counted_positions(self, row: Row, number: int) -> int:
        """Number of counted positions of a row.

        Args:
            row: the row.
            number: index of the row in the data.
        """
        if row.has_positions:
            return int((row.attention if row.counted is None else row.counted).sum())
        return int(self.batch([row], number).counted.sum())

    def _batches_of_rows(self, rows: Iterator[Row]) -> Iterator[Batch]:
        """Yield batches of `batch_size` rows."""
        first = 0
        while chunk := list(itertools.islice(rows, self.data.batch_size)):
            yield self.batch(chunk, first)
            first += len(chunk)

    def _batches_of_texts(self, texts: Iterator[list[Row]], pool: int, density: float) -> Iterator[Batch]:
        """Yield batches of whole texts.

        Args:
            texts: the rows of each text.
            pool: number of texts of the largest pool.
            density: see `Batch`.
        """
        size = self.data.batch_size
        # Powers of two, which join to blocks.
        capacity = max(pool, 1 << (size.bit_length() - 1))
        first = 0
        while texts_of_batch := list(itertools.islice(texts, capacity)):
            chunk = list(itertools.chain.from_iterable(texts_of_batch))
            yield replace(
                self.batch(chunk, first),
                rows_at_once=min(size, capacity),
                whole_texts=self.whole_texts,
                capacity=capacity,
                density=density,
            )
            first += len(chunk)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the data without padding, until `max_tokens` tokens are counted."""
        with as_argument("data", self.argument):
            yield from self._read_rows()

    def _read_rows(self) -> Iterator[Row]:
        """Yield the rows; see `rows`."""
        earlier = self._kept_rows
        if earlier is not None and earlier.notes is not None:
            self.notes.repeat(earlier.notes)
            yield from earlier.rows
            return
        if self.data.is_used_up:
            raise LayersimError(
                "`data` is a generator that an earlier pass has consumed, and its rows were not kept. Pass list(data)."
            )
        kept_rows = KeptRows(self.model.tokenizer, self.model.processor)
        # Rows that stand for vectors are made faster than they are kept.
        keeps_rows = not isinstance(self.data.source, VectorRows)
        if keeps_rows:
            self.data.keep(self._key_of_rows, kept_rows)
        self.notes.begin()
        texts = TextRows(self.data, self.model, self.notes)
        # An iterable may use the memory of a row again for the next one.
        rows = (row.copied() for row in self._up_to_limit(texts.rows(self._items())))
        for row in in_texts(rows, self.data.groups is not None, self.data.pack):
            if row.text is not None and row.text.neighbours:
                self.notes.neighbours += 1
            if keeps_rows:
                kept_rows.add(row)
            yield row
        texts.warn_of_cut()
        self.notes.once(self.notes.runs.warning(self.model))
        kept_rows.notes = replace(self.notes) if kept_rows.fits else None

    def batch(self, rows: list[Row], first: int) -> Batch:
        """Pad rows on the right and join them in a batch.

        Args:
            rows: at least one.
            first: index of the first row in the data.
        """
        length = max(len(row.tokens) for row in rows)
        tokens = torch.full((len(rows), length), _pad_id(self.model))
        attention, counted = torch.zeros((2, len(rows), length), dtype=torch.bool)
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens)] = row.tokens
            attention[number, : len(row.tokens)] = row.attention
            counted[number, : len(row.tokens)] = row.attention if row.counted is None else row.counted
        labels = None
        if any(row.labels is not None for row in rows):
            labels = torch.full((len(rows), length), NO_LABEL)
            for number, row in enumerate(rows):
                if row.labels is not None:
                    labels[number, : len(row.labels)] = row.labels
        inputs, positional, images = collated(rows, length, self.model)
        batch = Batch(
            tokens,
            attention,
            counted,
            first,
            labels,
            origins=tuple((row.source, row.start) for row in rows),
            texts=tuple(row.text for row in rows if row.text is not None),
            pooled=self.data.selection.pooled,
            inputs=inputs,
            positional=positional,
            images=images,
            has_tokens=rows[0].has_tokens,
        )
        if batch.has_positions:
            return batch
        return batch.with_positions(self._position_count(batch), self.data.selection)

    def _position_count(self, batch: Batch) -> int:
        """Number of positions per row, from one forward pass for each shape of the inputs."""
        # Rows without token ids are refused before where positions cannot be counted.
        assert self.count_positions is not None
        key = tuple((name, values.shape[1:]) for name, values in sorted(batch.inputs.items()))
        if key not in self._counts:
            self._counts[key] = self.count_positions(batch.first_row)
        return self._counts[key]

    def _up_to_limit(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Select the counted positions of rows, until `max_tokens` positions are counted.

        The last row is cut there. For a row classifier it stays whole, because the prediction would change.
        """
        remaining = self.data.max_tokens
        selection = self.data.selection
        for row in rows:
            self._refuse_unfit(row)
            if not row.has_positions:
                # Their positions are selected once a forward pass has counted them.
                yield row
                continue
            marks = image_marks(selection.rule, row.tokens, self.model) if row.has_tokens else None
            if marks is None:
                marks = row.marks
            counted = selection.select(row.tokens, row.attention, marks)
            row = replace(row, counted=counted)
            if remaining is None:
                yield row
                continue
            count = int(counted.sum())
            if count < remaining:
                remaining -= count
                yield row
                continue
            # A mean is that of the whole row, too.
            if self.model.reads_rows or selection.pooled:
                yield row
            elif selection.rule == "all":
                # Tokens after the last counted one do not run.
                length = int((counted.cumsum(0) < remaining).sum()) + 1
                yield row[:length]
            else:
                yield replace(row, counted=counted & (counted.cumsum(0) <= remaining))
            return

    def _refuse_unfit(self, row: Row) -> None:
        """Raise an error if the model does not take the row, or if an option cannot be applied to it."""
        context = self.model.context
        if context and len(row.tokens) > context:
            if self.model.reads_rows:
                remedy = f"Cut the row with tokenizer(texts, truncation=True, max_length={context})."
            else:
                remedy = f"`seq_len={context}` cuts longer rows into several."
            raise LayersimError(
                f"`data` has a row of {len(row.tokens)} tokens; {self.model.name} has a context of {context} tokens. {remedy}"
            )
        if row.has_tokens:
            refuse_other_ids(row.tokens, self.model)
            return
        if self.count_positions is None:
            raise LayersimError(
                f"`data` has rows without token ids ({', '.join(row.inputs)}); this call takes texts or token ids."
            )
        for name in ("seq_len", "max_tokens"):
            limit = getattr(self.data, name)
            if limit is not None:
                raise LayersimError(
                    f"`{name}` is {limit}, but the rows have no token ids to limit. Pass fewer rows, such as "
                    "data.select(range(n))."
                )

    def count_rows(self) -> int:
        """Number of rows in the data, before tokenisation and splitting of long rows."""
        with as_argument("data", self.argument):
            return sum(1 for _ in self._items())

    def _items(self) -> Iterator[Text | Row]:
        return Reader(self.data, self.model, self.notes, self.labelled).items(self.data.source)


class BatchSize(NamedTuple):
    """Numbers of rows and positions of a batch.

    Attributes:
        tokens: number of counted positions.
        rows: number of rows.
        texts: number of texts.
        pass_size: numbers of rows and positions in the largest forward pass, padding included.
        density: see `Batch`.
    """

    tokens: int
    rows: int
    texts: int
    pass_size: tuple[int, int]
    density: float


def batch_sizes(batches: Batches) -> list[BatchSize]:
    """A list with the `BatchSize` of each batch; batches without counted positions are left out. Reads the data once."""
    sizes = list[BatchSize]()
    for batch in batches:
        tokens = int(batch.counted.sum())
        if tokens:
            sizes.append(BatchSize(tokens, len(batch.tokens), batch.text_count, batch.pass_size, batch.density))
    return sizes


def _unit_of(row: Row) -> int:
    assert row.text is not None
    return row.text.unit


def found_in(*parts: Batches) -> dict[str, int]:
    """Sum the counts in `Batches.row_counts` over several data sets."""
    totals: dict[str, int] = {}
    for part in parts:
        for name, count in part.row_counts().items():
            totals[name] = totals.get(name, 0) + count
    return totals


def refuse_other_ids(tokens: Tensor, model: ModelInputs, argument: str = "data") -> None:
    """Raise an error if a token id is outside the vocabulary of a model.

    Args:
        tokens: token ids of any shape.
        model: the model.
        argument: name of the argument that holds the tokens.

    Raises:
        LayersimError: there are no tokens, or an id is below 0, or not below the size of the vocabulary.
    """
    if not tokens.numel():
        raise LayersimError(f"`{argument}` has shape {tuple(tokens.shape)}; it must hold at least one token.")
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or (model.vocabulary and high >= model.vocabulary):
        ids = f"from 0 to {model.vocabulary - 1}" if model.vocabulary else "from 0"
        raise LayersimError(
            f"`{argument}` has token ids from {low} to {high}, outside the vocabulary of {model.name}, which has ids {ids}."
        )


def next_tokens(tokens: Tensor, attention: Tensor) -> Tensor:
    """The next token at each position (`batch pos`); `NO_LABEL` if no attended token follows."""
    following = torch.full_like(tokens, NO_LABEL)
    both_attended = attention[:, :-1] & attention[:, 1:]
    following[:, :-1] = torch.where(both_attended, tokens[:, 1:], NO_LABEL)
    return following


def _pad_id(model: ModelInputs) -> int:
    pad = getattr(model.tokenizer, "pad_token_id", None)
    if pad is None:
        pad = next(iter(model.pads), None)
    # A padding token that was added to the tokenizer alone has no embedding in the model.
    if pad is None or (model.vocabulary is not None and pad >= model.vocabulary):
        return 0
    return pad
