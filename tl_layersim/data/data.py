"""`Data`: data of any accepted kind with its reading options; rows are tokenised once."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

from ..core.arguments import NonNegativeInt, PositiveInt, RowCount, TwoOrMore, typed
from ..core.errors import LayersimError, warn
from ..core.wording import brief
from .padding_masks import RunsAtEnds
from .positions import PositionRule, Positions
from .row import Row
from .source_content import content_digest
from .texts import GroupNumbers, groups_as_list


@dataclass
class Notes:
    """Counts of texts and rows in a data pass, and issued warnings.

    Attributes:
        own_bos: number of rows whose text began with a BOS, so that none was added.
        masked: number of token rows whose mask was derived from the padding id.
        texts: number of texts.
        cut: number of texts that were cut to one row.
        warned: warnings of earlier passes, which are not repeated.
        neighbours: number of rows of texts whose neighbours are not independent of them, see `TextOfRow`.
        unread: whether unread columns were logged.
        packed: whether it was logged that rows hold several documents.
        runs: counts of token rows without a mask that end in runs of one token id.
    """

    own_bos: int = 0
    masked: int = 0
    texts: int = 0
    cut: int = 0
    neighbours: int = 0
    warned: set[str] = field(default_factory=set)
    unread: bool = False
    packed: bool = False
    runs: RunsAtEnds = field(default_factory=RunsAtEnds)

    def begin(self) -> None:
        """Reset the counts for another pass over the data."""
        self.own_bos = 0
        self.masked = 0
        self.texts = 0
        self.cut = 0
        self.neighbours = 0
        self.runs = RunsAtEnds()

    def repeat(self, earlier: Notes) -> None:
        """Copy the counts of an earlier pass whose rows were kept, and repeat its warnings."""
        self.own_bos = earlier.own_bos
        self.masked = earlier.masked
        self.texts = earlier.texts
        self.cut = earlier.cut
        self.neighbours = earlier.neighbours
        # A set has no order of its own.
        for text in sorted(earlier.warned):
            self.once(text)

    def once(self, text: str) -> None:
        """Issue a warning unless the text is empty or was issued before."""
        if text and text not in self.warned:
            self.warned.add(text)
            warn(text)


# Most memory of the rows that are kept. Larger data is read and tokenised again in each pass.
MOST_KEPT = 256_000_000
# Memory of a row beside its tensors' numbers.
ROW_BYTES = 1000


@dataclass
class KeptRows:
    """Tokenised rows of one pass over the data, kept for later passes up to `MOST_KEPT` bytes.

    Attributes:
        tokenizer: the tokenizer that made the tokens; None for rows of ids.
        processor: the processor that made the other inputs. Tokenizer and processor are held so that no other object gets their
            `id`.
        rows: the rows so far.
        size: bytes of the rows so far.
        notes: counts of the pass; None until all rows of the data are kept.
    """

    tokenizer: Any
    processor: Any
    rows: list[Row] = field(default_factory=list)
    size: int = 0
    notes: Notes | None = None

    def add(self, row: Row) -> None:
        """Keep one more row; drop all rows if they take more than `MOST_KEPT` bytes."""
        self.size += ROW_BYTES + row.nbytes
        if self.fits:
            self.rows.append(row)
        else:
            self.rows.clear()

    @property
    def fits(self) -> bool:
        """Whether the rows so far take at most `MOST_KEPT` bytes."""
        return self.size <= MOST_KEPT


@dataclass
class SourceReading:
    """What calls have read of a source, and the content of the source at that time.

    Attributes:
        content: digest of the source (`content_digest`); None if its content cannot be known.
        rows: tokenised rows, by properties of the model that they depend on.
        items: number of items that were read of an iterable without a length.
    """

    content: str | None = None
    rows: dict[Hashable, KeptRows] = field(default_factory=dict)
    items: int = 0


# The name of a column, or the names of two columns of texts that form pairs.
Column = str | tuple[str, str]
# The name of a column, or a sequence, array or tensor with one value for each row.
Groups = str | Any
# Longest chat template that is recorded as text.
LONGEST_RECORDED = 80
# Number of characters shown of the first row.
LONGEST_SHOWN = 60
# Further keys in the provenance of a run. No option of an analyzer has one of these names.
RECORDED = (
    *("tokenizer", "processor", "main_input", "layers", "unembed", "at", "per_head"),
    *("own_bos", "masked_by_pad_id", "cut_texts", "rows_as_texts"),
)


@typed
@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """Data with its reading options, such as batch size, row length and positions.

    Functions that take data accept a `Data`, or raw data, which gets the default options.

    The rows are tokenised by the first call that needs them and kept for later calls of models with the same tokenizer, up to
    256 MB. `print(data)` then shows how many rows and positions they have. A later call reads the source again if its content
    has changed, or if it is an iterable whose content is not known, such as a `DataLoader`.

    Args:
        source: a list of texts, a token tensor `batch pos`, a mapping of the model's inputs by name (`input_ids`,
            `attention_mask`, `token_type_ids`, `pixel_values`, ...), a `datasets.Dataset` or `IterableDataset`, chats as lists
            of messages with `role` and `content`, or an iterable of these. Every column that is an argument of the model's
            forward is passed to it.
        column: the column of a data set that holds texts, tokens, images or chat messages; two names for pairs of texts.
        groups: the text that each row of the data belongs to, if the data comes cut: the name of a column, or a sequence with
            one value for each row, such as the document, the author or the prompt template. Rows with equal values are one
            text. They need not be consecutive: a text is measured where its first row stands. Rows that `seq_len` cuts from one
            text are one text by themselves. Pairs of rows of one text are left out of similarities, and permutations, splits
            and jackknife blocks hold whole texts.
        tokenizer: tokenizer, or image processor, to use in place of the model's own. Models that are compared share it.
        batch_size: largest number of rows in a forward pass; above 16 it is rounded down to a power of two. Results of measures
            do not depend on it. A step of training is one batch.
        seq_len: longest row of tokens; longer texts and rows continue in further rows. For a text classifier, the tokenizer
            cuts each text to one row. Default: 256 for texts, or the model's context if that is shorter; rows of tokens are not
            cut.
        pack: whether to join the texts with end-of-text tokens and cut the joined text into rows of full length, instead of
            padding each text.
        max_tokens: number of counted tokens after which reading stops.
        skip_first: number of positions to leave out at the start of each row, where many models have massive activations.
        positions: the measured positions of each row, among the attended positions after `skip_first`: "all", "first", "last"
            or a slice; "mean" for one sample per row, the mean over its positions; a function that takes the token ids of a row
            and returns a mask or indices; the name of a mask column beside `input_ids`; "assistant", the assistant's tokens in
            chat messages; "image" or "text", the image tokens or all others; or "padded", all positions and the masked padding
            of rows of tokens, to repeat published numbers. A row is a row of the model's input, after `seq_len` and `pack`.
            Default: the position that a row classifier's head reads ("first" for [CLS], "last" for decoders); "all" for any
            other model, and for analyzers that take rows as samples. The rule is recorded in the provenance.
        prepend_bos: whether every row that comes from text starts with the tokenizer's BOS, as in TransformerLens.
        chat_template: template that renders chat messages, in place of the tokenizer's own.
        add_generation_prompt: whether each chat ends with the tokens that begin an assistant's answer.

    Examples:
        >>> import tl_layersim as lsim
        >>> data = lsim.Data(lsim.demo_text()[:4], seq_len=32, skip_first=2)
        >>> report = lsim.analyze(lsim.demo_model(), data, lsim.Cosine())
        >>> data
        Data(a list of 4 str, seq_len=32, skip_first=2)
          24 rows, 708 positions, 660 of them counted
          first row: <|endoftext|>Once upon a time there was a little duck named ...
    """

    source: Any
    _: KW_ONLY
    column: Column | None = None
    groups: Groups = None
    tokenizer: Any = None
    batch_size: RowCount = 16
    seq_len: TwoOrMore | None = None
    pack: bool = False
    max_tokens: PositiveInt | None = None
    skip_first: NonNegativeInt = 0
    positions: PositionRule | None = None
    prepend_bos: bool = True
    chat_template: str | None = None
    add_generation_prompt: bool = False
    _reading: SourceReading = field(default_factory=SourceReading, init=False)
    # Whether this is the data of one call, whose source was compared with what earlier calls have read.
    _is_of_call: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.seq_len and self.skip_first >= self.seq_len:
            raise LayersimError(f"`skip_first` is {self.skip_first}; it must be below `seq_len`, which is {self.seq_len}.")
        groups_as_list(self.groups)

    @classmethod
    def of(cls, given: Any, **defaults: Any) -> Data:
        """Convert the argument `data` of a call to a `Data`; raw data gets the default options.

        The rows that earlier calls have kept are used only if the content of the source is the same.

        Args:
            given: a `Data`, or raw data.
            **defaults: options for raw data in which the call differs from the defaults of `Data`.
        """
        if not isinstance(given, Data):
            return cls(given, **defaults)._for_call(SourceReading())
        if given._is_of_call:
            return given
        # An iterator that was read cannot be read again, so its rows are those that were kept.
        if not given.read_once:
            content = content_digest(given.source)
            if content is None or content != given._reading.content:
                object.__setattr__(given, "_reading", SourceReading(content))
        return given._for_call(given._reading)

    def _for_call(self, reading: SourceReading) -> Data:
        """A copy for one call, which shares the rows that were read."""
        copy = replace(self)
        object.__setattr__(copy, "_reading", reading)
        object.__setattr__(copy, "_is_of_call", True)
        return copy

    def like(self, given: Any) -> Data:
        """Convert further data of the same call, such as `eval_data`, to a `Data`; raw data gets the options of this data.

        Args:
            given: a `Data`, or raw data.
        """
        # A sequence of groups belongs to the rows of this data.
        groups = self.groups if isinstance(self.groups, str) else None
        if not isinstance(given, Data):
            given = replace(self, source=given, groups=groups)
        return Data.of(given)

    def counting(self, rule: PositionRule) -> Data:
        """A copy of the data with another rule for `positions` and the same tokenised rows.

        Args:
            rule: the rule, see `positions`.
        """
        return replace(self, positions=rule)._for_call(self._reading)

    def kept(self, key: Hashable) -> KeptRows | None:
        """The `KeptRows` of the last pass with this key; None before the first pass.

        Args:
            key: properties of the model that the rows depend on.
        """
        return self._reading.rows.get(key)

    def keep(self, key: Hashable, rows: KeptRows) -> None:
        """Store the `KeptRows` of a new pass under a key. Passes that run at the same time each fill their own rows.

        Args:
            key: properties of the model that the rows depend on.
            rows: empty container of the pass's rows.
        """
        self._reading.rows[key] = rows

    @property
    def items_read(self) -> int:
        """Number of items that were read of a source without a length."""
        return self._reading.items

    def note_items(self, count: int) -> None:
        """Note that items of the source were read.

        Args:
            count: number of items from the beginning of the source.
        """
        self._reading.items = max(self._reading.items, count)

    @property
    def read_once(self) -> bool:
        """Whether the source is an iterator, which one pass consumes."""
        return isinstance(self.source, Iterator)

    @property
    def is_used_up(self) -> bool:
        """Whether the source is an iterator that an earlier pass has started to read."""
        return self.read_once and bool(self._reading.rows)

    @property
    def selection(self) -> Positions:
        """The rule that selects the counted positions of a row."""
        return Positions("all" if self.positions is None else self.positions, self.skip_first)

    def record(self) -> dict[str, Any]:
        """A dict of the reading options, for the provenance."""
        options = {name: getattr(self, name) for name in OPTIONS}
        # JSON has no tuples.
        column = list(self.column) if isinstance(self.column, tuple) else self.column
        return options | {
            "column": column,
            "groups": _recorded_groups(self.groups),
            "positions": self.selection.record(),
            "chat_template": _recorded_template(self.chat_template),
        }

    def __repr__(self) -> str:
        arguments = [brief(self.source)]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.init and option.name != "source" and value != option.default:
                arguments.append(f"{option.name}={brief(value)}")
        title = f"Data({', '.join(arguments)})"
        complete = next((kept_rows for kept_rows in self._reading.rows.values() if kept_rows.notes is not None), None)
        if complete is None or not complete.rows:
            return f"{title}\n  not read yet, or not kept: a call with a model reads it"
        positions = sum(len(row.tokens) for row in complete.rows)
        counted = sum(int((row.attention if row.counted is None else row.counted).sum()) for row in complete.rows)
        counts = f"{len(complete.rows):,} rows, {positions:,} positions, {counted:,} of them counted"
        return f"{title}\n  {counts}\n  first row: {_shown_row(complete.rows[0], complete.tokenizer)}"


def _shown_row(row: Row, tokenizer: Any) -> str:
    """The beginning of a row as text: its tokens decoded, or the names and shapes of its inputs."""
    if not row.has_tokens:
        return ", ".join(f"{name} {tuple(values.shape)}" for name, values in row.inputs.items())
    ids = row.tokens.tolist()
    text = brief(ids[:8]) if tokenizer is None else tokenizer.decode(ids)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."


# Options that a result records as they are; a tokenizer is recorded by its class and size.
OPTIONS = tuple(option.name for option in fields(Data) if option.init and option.name not in ("source", "tokenizer"))
DATA_OPTIONS = (*OPTIONS, *RECORDED)


def _recorded_groups(groups: Any) -> str | None:
    """Name of the column of groups, or a digest of their values."""
    values = groups_as_list(groups)
    if values is None:
        name: str | None = groups
        return name
    numbers = GroupNumbers(values)
    group_of_rows = [numbers.of(number, None) for number in range(len(values))]
    digest = hashlib.sha256(str(group_of_rows).encode()).hexdigest()[:12]
    return f"sha256 {digest} of {len(set(group_of_rows))} groups in {len(group_of_rows)} rows"


def _recorded_template(template: str | None) -> str | None:
    """A chat template, or its digest if it is long."""
    if template is None or len(template) <= LONGEST_RECORDED:
        return template
    digest = hashlib.sha256(template.encode()).hexdigest()[:12]
    return f"sha256 {digest} of {len(template)} characters"
