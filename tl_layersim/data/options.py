"""`DataOptions`: how data is read, the same in every function that takes data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from ..core.errors import LayersimError
from .positions import PositionRule, Positions

# The name of a column, or the names of two columns of texts that form pairs.
Column = str | tuple[str, str]
# Characters of a chat template that is recorded as it is.
LONGEST_RECORDED = 80
# Most rows in a forward pass: batches are allocated by this number before the data ends.
LARGEST_BATCH = 2**20
# Further keys in the provenance of a run: no analyzer may have an option of such a name.
RECORDED = (
    *("tokenizer", "processor", "main_input", "layers", "unembed", "at", "per_head"),
    *("own_bos", "masked_by_pad_id", "cut_texts"),
)


def refuse_outside(name: str, value: int | None, least: int) -> None:
    """Refuse a number that is below its least value, or so large that memory or 64 bits do not hold what it counts.

    Args:
        name: of the argument.
        value: of the argument; None is accepted.
        least: its smallest value.

    Raises:
        LayersimError: names the argument, its value and the bound.
    """
    most = LARGEST_BATCH if name == "batch_size" else 2**63 - 1
    if value is None or least <= value <= most:
        return
    side, bound = ("least", least) if value < least else ("most", most)
    raise LayersimError(
        f"`{name}` must be at {side} {bound}.",
        given=value,
        expected=f"{bound} or {'more' if side == 'least' else 'fewer'}",
        do=f"{name}={bound}",
    )


@dataclass(frozen=True)
class DataOptions:
    """Options of `analyze`, `compare`, `stitch` and the trainings on how data is read.

    Attributes:
        batch_size: rows in a forward pass.
        seq_len: longest row; longer ones continue in further rows, and a text is cut where the head reads a row as one. None
            for 256 or the model's context if that is shorter (texts) or the rows as they are (tokens).
        pack: join texts, with an end-of-text token between them, and cut rows of `seq_len` from the whole.
        max_tokens: stop after this many counted tokens.
        skip_first: positions at the start of each row that are not counted.
        prepend_bos: start each row that comes from text with the tokenizer's BOS, as TransformerLens does.
        column: the column of a data set that holds texts, chats, tokens or images, or a pair of columns of texts; None to find
            it.
        positions: the positions of each row that are counted, see `Positions`; None for all.
        chat_template: the template that renders chat messages; None for the tokenizer's own.
        add_generation_prompt: whether the rendered chat ends with the tokens that begin an answer of the assistant.

    Raises:
        LayersimError: a number is below its smallest value, no position of a row is left, or `positions` is no rule.

    Examples:
        >>> DataOptions(batch_size=4).record()["batch_size"]
        4
    """

    batch_size: int = 16
    seq_len: int | None = None
    pack: bool = False
    max_tokens: int | None = None
    skip_first: int = 0
    prepend_bos: bool = True
    column: Column | None = None
    positions: PositionRule | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seq_len", 2), ("max_tokens", 1), ("skip_first", 0)):
            refuse_outside(name, getattr(self, name), least)
        if self.seq_len and self.skip_first >= self.seq_len:
            raise LayersimError(
                "`skip_first` must be below `seq_len`, or every position is left out.",
                given=f"skip_first={self.skip_first} with seq_len={self.seq_len}",
                expected="skip_first below seq_len",
                do="skip_first=1",
            )
        # Refused here, before any data is read.
        _ = self.selection

    @property
    def selection(self) -> Positions:
        """The rule that selects the counted positions of a row."""
        return Positions("all" if self.positions is None else self.positions, self.skip_first)

    def record(self) -> dict[str, Any]:
        """The options by name, for a result's provenance."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        column = list(self.column) if isinstance(self.column, tuple) else self.column
        return known | {"column": column, "positions": self.selection.record(), "chat_template": _short(self.chat_template)}


def _short(template: str | None) -> str | None:
    """A template as it is, or the digest of a long one."""
    if template is None or len(template) <= LONGEST_RECORDED:
        return template
    return f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:12]} of {len(template)} characters"


DATA_OPTIONS = (*(field.name for field in fields(DataOptions)), *RECORDED)
