"""`Data`: data of any accepted kind with the options of reading, and its rows, which are tokenised once."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

import torch

from ..core.arguments import NonNegativeInt, PositiveInt, RowCount, TwoOrMore, typed
from ..core.errors import LOG, LayersimError, warn
from ..core.wording import brief
from .masks import RunsAtEnds
from .positions import PositionRule, Positions
from .rows import Row


@dataclass
class Notes:
    """Counts of rows that a pass over the data treated specially, for the provenance.

    Attributes:
        own_bos: rows of texts that began with a BOS of their own, so that none was added.
        masked: rows of tokens without a mask, whose mask was derived from the padding id.
        texts: texts.
        cut: texts that were cut to one row.
        warned: warnings of earlier passes, which are not repeated.
        unread: whether columns that are not read were named.
        runs: of one token id at the ends of rows of tokens without a mask.
    """

    own_bos: int = 0
    masked: int = 0
    texts: int = 0
    cut: int = 0
    warned: set[str] = field(default_factory=set)
    unread: bool = False
    runs: RunsAtEnds = field(default_factory=RunsAtEnds)

    def begin(self) -> None:
        """Begin to count anew, for another pass over the data."""
        self.own_bos = self.masked = self.texts = self.cut = 0
        self.runs = RunsAtEnds()

    def repeat(self, earlier: Notes) -> None:
        """Take the counts of an earlier pass whose rows were kept, and repeat its warnings.

        Args:
            earlier: the counts of that pass.
        """
        self.own_bos, self.masked, self.texts, self.cut = earlier.own_bos, earlier.masked, earlier.texts, earlier.cut
        for text in sorted(earlier.warned):
            self.once(text)

    def name_unread(self, names: list[str]) -> None:
        """Name the columns that are not read, once."""
        if names and not self.unread:
            self.unread = True
            LOG.warning("Columns of the data that are not read: %s", ", ".join(names))

    def once(self, text: str) -> None:
        """Warn, unless the text is empty or the same warning was given before."""
        if text and text not in self.warned:
            self.warned.add(text)
            warn(text)


# Most memory of the rows that are kept. Larger data is read and tokenised again in each pass.
MOST_KEPT = 256_000_000
# Memory of a row beside its tensors' numbers.
ROW_BYTES = 1000


@dataclass
class KeptRows:
    """Rows that one pass over the data has tokenised, kept for later passes as long as they are within `MOST_KEPT` bytes.

    Attributes:
        tokenizer: that made the tokens, None for rows of ids.
        processor: that made the other inputs. Both are held here, so that no other object gets their `id`.
        rows: so far.
        size: bytes of the rows that were read so far.
        notes: counts of the pass; None until all rows of the data are kept.
    """

    tokenizer: Any
    processor: Any
    rows: list[Row] = field(default_factory=list)
    size: int = 0
    notes: Notes | None = None

    def add(self, row: Row) -> None:
        """Keep one more row; above `MOST_KEPT` drop all."""
        self.size += ROW_BYTES + row.nbytes
        if self.fits:
            self.rows.append(row)
        else:
            self.rows.clear()

    def finish(self, notes: Notes) -> None:
        """End the pass, which has read all rows.

        Args:
            notes: of the pass.
        """
        if self.fits:
            self.notes = notes

    @property
    def fits(self) -> bool:
        """Whether the rows that were read so far are within `MOST_KEPT` bytes."""
        return self.size <= MOST_KEPT


# The name of a column, or the names of two columns of texts that form pairs.
Column = str | tuple[str, str]
# Characters of a chat template that is recorded as it is.
LONGEST_RECORDED = 80
# Characters of the first row that are shown.
LONGEST_SHOWN = 60
# Further keys in the provenance of a run: no analyzer may have an option of such a name.
RECORDED = (
    *("tokenizer", "processor", "main_input", "layers", "unembed", "at", "per_head"),
    *("own_bos", "masked_by_pad_id", "cut_texts"),
)


@typed
@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """Data, and how it is read. Every function that takes data takes a `Data`, or raw data, which is read by the defaults.

    The rows are tokenised by the first call that needs them and kept for later calls of models with the same tokenizer, up to
    256 MB. `print(data)` then shows how many rows and positions they have.

    Args:
        source: a list of texts, a token tensor `batch pos`, a mapping of the model's inputs by name (`input_ids`,
            `attention_mask`, `token_type_ids`, `pixel_values`, ...), a `datasets.Dataset` or `IterableDataset`, chats as lists
            of messages with `role` and `content`, or an iterable of these. Every column that the model's forward takes reaches
            it.
        column: the column of a data set that holds texts, tokens, images or chat messages; two names for pairs of texts.
        tokenizer: used in place of the model's own; for images their processor. Models that are compared share it.
        batch_size: rows in a forward pass at most; above 16 the next lower power of two. Results of measures do not depend on
            it. A step of training is one batch.
        seq_len: longest row of tokens; longer texts and rows continue in further rows. A head that reads a row as one, as that
            of a classifier of texts, reads one row of each text, which the tokenizer cuts. Default: 256 for texts or the
            model's context if that is shorter; token rows as they are.
        pack: join texts, with an end-of-text token between them, and cut rows of full length from the joined text, instead of
            padding each text.
        max_tokens: stop after this many counted tokens.
        skip_first: leave out the first positions of each row, whose activations are massive in many models.
        positions: the positions of each row that are measured, among the attended ones that `skip_first` leaves: "all",
            "first", "last" or a slice; "mean", one sample a row, the mean over its positions; a function that takes the token
            ids of a row and returns a mask or indices; the name of a mask column beside `input_ids`; or "assistant", the
            assistant's tokens in chat messages. A row is one that the model reads, after `seq_len` and `pack`. Default: the
            position that a row classifier's head reads ("first" for [CLS], "last" for decoders); "all" for any other model, and
            for analyzers that take rows as samples. The rule is recorded.
        prepend_bos: start every row that comes from text with the tokenizer's BOS, as TransformerLens does.
        chat_template: renders chat messages in place of the tokenizer's own template.
        add_generation_prompt: end each chat with the tokens that begin an answer of the assistant.

    Raises:
        LayersimError: a number is below its smallest value, or no position of a row is left.

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
    # By model properties that the rows depend on.
    _kept: dict[Hashable, KeptRows] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.seq_len and self.skip_first >= self.seq_len:
            raise LayersimError(
                f"`skip_first` is {self.skip_first} and `seq_len` is {self.seq_len}; `skip_first` must be smaller."
            )

    @classmethod
    def of(cls, given: Any, **defaults: Any) -> Data:
        """The `Data` that a call was given; raw data is read by the defaults.

        Args:
            given: a `Data`, or raw data.
            **defaults: of the call where they differ from those of `Data`, for raw data.
        """
        return given if isinstance(given, Data) else cls(given, **defaults)

    def like(self, given: Any) -> Data:
        """Other data of the same call, such as its `eval_data`: raw data is read as this is.

        Args:
            given: a `Data`, or raw data.
        """
        return given if isinstance(given, Data) else replace(self, source=given)

    def counting(self, rule: PositionRule) -> Data:
        """The same data with another rule of positions; rows that were tokenised are shared.

        Args:
            rule: of the run, see `positions`.
        """
        settled = replace(self, positions=rule)
        object.__setattr__(settled, "_kept", self._kept)
        return settled

    def kept(self, key: Hashable) -> KeptRows | None:
        """The rows that the last pass for models of some properties has read; None before the first one.

        Args:
            key: the properties.
        """
        return self._kept.get((key, self._state))

    def keep(self, key: Hashable, rows: KeptRows) -> None:
        """Begin a pass for models of some properties. Passes that run at the same time each fill rows of their own.

        Args:
            key: the properties.
            rows: for the rows of the pass, still empty.
        """
        self._kept[key, self._state] = rows

    @property
    def _state(self) -> int | None:
        """A number that changes as a list grows or a tensor is changed in place, after which rows are read anew."""
        if isinstance(self.source, torch.Tensor) and not self.source.is_inference():
            return self.source._version
        return len(self.source) if isinstance(self.source, list | tuple) else None

    @property
    def read_once(self) -> bool:
        """Whether the source is an iterator, which is gone after one pass."""
        return isinstance(self.source, Iterator)

    @property
    def is_used_up(self) -> bool:
        """Whether the source is an iterator of which an earlier pass has read rows."""
        return self.read_once and bool(self._kept)

    @property
    def selection(self) -> Positions:
        """The rule that selects the counted positions of a row."""
        return Positions("all" if self.positions is None else self.positions, self.skip_first)

    def record(self) -> dict[str, Any]:
        """The options by name, for a result's provenance."""
        known = {name: getattr(self, name) for name in OPTIONS}
        column = list(self.column) if isinstance(self.column, tuple) else self.column
        return known | {"column": column, "positions": self.selection.record(), "chat_template": _short(self.chat_template)}

    def __dir__(self) -> list[str]:
        # What a user sets; other members are for functions that read the data.
        return [one.name for one in fields(self) if one.init]

    def __repr__(self) -> str:
        title, lines = self._shown()
        return "\n  ".join([title, *lines])

    def _repr_html_(self) -> str:
        title, lines = self._shown()
        return f"<b>{html.escape(title)}</b><br>" + "<br>".join(map(html.escape, lines))

    def _shown(self) -> tuple[str, list[str]]:
        options = [(f.name, getattr(self, f.name), f.default) for f in fields(self) if f.init and f.name != "source"]
        given = [f"{name}={brief(value)}" for name, value, default in options if value != default]
        title = f"Data({', '.join([brief(self.source), *given])})"
        read = next((kept for kept in self._kept.values() if kept.notes is not None), None)
        if read is None or not read.rows:
            return title, ["not read yet, or not kept: a call with a model reads it"]
        counted = sum(int((row.attention if row.counted is None else row.counted).sum()) for row in read.rows)
        lines = [
            f"{len(read.rows):,} rows, {sum(len(row.tokens) for row in read.rows):,} positions, {counted:,} of them counted"
        ]
        first = read.rows[0]
        if first.has_tokens:
            ids = first.tokens.tolist()
            text = brief(ids[:8]) if read.tokenizer is None else read.tokenizer.decode(ids)
            lines.append(f"first row: {text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + '...'}")
        else:
            lines.append(f"first row: {', '.join(f'{name} {tuple(value.shape)}' for name, value in first.inputs.items())}")
        return title, lines


# Options that a result records as they are; a tokenizer is recorded by its class and size.
OPTIONS = tuple(f.name for f in fields(Data) if f.init and f.name not in ("source", "tokenizer"))
DATA_OPTIONS = (*OPTIONS, *RECORDED)


def _short(template: str | None) -> str | None:
    """A template as it is, or the digest of a long one."""
    if template is None or len(template) <= LONGEST_RECORDED:
        return template
    return f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:12]} of {len(template)} characters"
