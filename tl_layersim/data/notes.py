"""Counts of rows that a pass over the data treated specially, for the provenance."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.errors import LOG, warn
from .missing_mask import RunsAtEnds


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
