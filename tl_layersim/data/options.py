"""`DataOptions`: how data is read, the same in every function that takes data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..core.errors import LayersimError

# Further keys in the provenance of a run: no analyzer may have an option of such a name.
RECORDED = ("tokenizer", "layers", "unembed", "at", "per_head", "own_bos", "masked_by_pad_id")


@dataclass(frozen=True)
class DataOptions:
    """Options of `analyze`, `compare`, `stitch` and the trainings on how data is read.

    Attributes:
        batch_size: rows in a forward pass.
        seq_len: longest row; None for 256 or the model's context if that is shorter (texts) or the rows as they are (tokens).
        pack: join texts, with an end-of-text token between them, and cut rows of `seq_len` from the whole.
        max_tokens: stop after this many counted tokens.
        skip_first: positions at the start of each row that are not counted.
        prepend_bos: start each row that comes from text with the tokenizer's BOS, as TransformerLens does.
        column: the column of a data set that holds texts or tokens; None to find it.

    Raises:
        LayersimError: a number is below its smallest value, or no position of a row is left.

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
    column: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seq_len", 2), ("max_tokens", 1), ("skip_first", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise LayersimError(
                    f"`{name}` must be at least {least}.", given=value, expected=f"{least} or more", do=f"{name}={least}"
                )
        if self.seq_len and self.skip_first >= self.seq_len:
            raise LayersimError(
                "`skip_first` must be below `seq_len`, or every position is left out.",
                given=f"skip_first={self.skip_first} with seq_len={self.seq_len}",
                expected="skip_first below seq_len",
                do="skip_first=1",
            )

    def record(self) -> dict[str, Any]:
        """The options by name, for a result's provenance."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


DATA_OPTIONS = (*(field.name for field in fields(DataOptions)), *RECORDED)
