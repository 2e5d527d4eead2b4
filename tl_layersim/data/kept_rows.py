"""Rows that were tokenised once and are kept for later passes over the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .notes import Notes
from .row import Row

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
