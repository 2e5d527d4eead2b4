"""Rows of texts: windows of one text, or rows that are cut from all texts joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .model_properties import ModelInputs
from .options import DataOptions
from .readers import Notes
from .row import Row
from .text_encoding import SEGMENTS, Encoded, adds_specials

DEFAULT_SEQ_LEN = 256


@dataclass(frozen=True)
class TextRows:
    """Cuts encoded texts into rows.

    Args:
        model: its tokenizer and context apply.
        options: how the data is read.
        notes: counts the rows that began with a BOS of their own.
    """

    model: ModelInputs
    options: DataOptions
    notes: Notes

    @property
    def length(self) -> int:
        """Most tokens of a row."""
        return self.options.seq_len or min(DEFAULT_SEQ_LEN, self.model.context or DEFAULT_SEQ_LEN)

    @property
    def bos(self) -> list[int]:
        """The BOS that a row starts with, [] where this package adds none."""
        bos = self.model.tokenizer.bos_token_id
        return [bos] if self.options.prepend_bos and bos is not None and not adds_specials(self.model.tokenizer) else []

    def windows(self, text: Encoded) -> Iterator[Row]:
        """Rows of a text's tokens; a long text continues in further rows, without losing a token."""
        self.notes.own_bos += text.own
        # Rows of a chat whose template writes no BOS have none.
        adds = not text.chat or text.ids[:1] == self.bos
        start = 0
        while start < len(text.ids):
            row, taken = self.row(text.ids[start : start + self.length], text.ids[start] in self.bos, adds)
            labels = None if text.label is None else torch.full_like(row, text.label)
            inputs, positional = dict(text.inputs), frozenset[str]()
            if text.segments is not None:
                # Tokenizers that give segments add all special tokens themselves: no BOS comes before the ids.
                inputs[SEGMENTS] = torch.tensor(text.segments[start : start + taken])
                positional = frozenset([SEGMENTS])
            marks = None
            if text.marks is not None:
                marks = torch.tensor([False] * (len(row) - taken) + text.marks[start : start + taken])
            attention = torch.ones(len(row), dtype=torch.bool)
            yield Row(row, attention, labels, text.number, start, marks, None, inputs, positional)
            start += taken

    def row(self, ids: list[int], own: bool, adds: bool = True) -> tuple[Tensor, int]:
        """A row of at most the text length, with a BOS, and the number of ids that it takes from the text.

        Args:
            ids: the next ids of the text.
            own: whether they begin with a BOS, so that none is added.
            adds: whether a BOS is added at all.
        """
        self.notes.own_bos += own
        bos = [] if own or not adds else self.bos
        taken = ids[: self.length - len(bos)]
        return torch.tensor(bos + taken), len(taken)

    def packed(self, items: Iterable[Encoded | Row]) -> Iterator[Row]:
        """Full rows cut from all texts, with an end-of-text token between texts, and a last shorter row.

        Args:
            items: the encoded texts.

        Raises:
            LayersimError: an item is no text, or a text has further inputs.
        """
        held: list[int] = []
        # For each id, whether it separates texts: an end-of-text token may be the BOS too, and does not count as one here.
        separates: list[bool] = []

        def cut(least: int) -> Iterator[Row]:
            start = 0
            while start < len(held):
                own = held[start] in self.bos and not separates[start]
                if len(held) - start < least - (0 if own else len(self.bos)):
                    break
                row, taken = self.row(held[start : start + self.length], own)
                start += taken
                yield Row(row, torch.ones(len(row), dtype=torch.bool))
            del held[:start], separates[:start]

        for item in items:
            if isinstance(item, Row) or item.chat:
                raise LayersimError(
                    "`pack` applies to texts only.",
                    given=f"a row of {len(item.tokens)} tokens with pack=True"
                    if isinstance(item, Row)
                    else "a chat with pack=True",
                    expected="texts",
                    do="pack=False: each chat and each row of tokens is taken as it is",
                )
            end = self.model.tokenizer.eos_token_id
            ids = item.ids
            if item.inputs or item.segments is not None:
                raise LayersimError(
                    "`pack` joins texts, and these have further inputs that belong to one text each.",
                    given=f"pack=True with {', '.join(item.inputs) or SEGMENTS}",
                    expected="texts alone",
                    do="pass pack=False",
                )
            if held and separates[-1] and ids[:1] == [held[-1]] and ids[0] in self.bos:
                # The separator is the BOS of this text.
                del held[-1], separates[-1]
            held += ids + ([end] if end is not None else [])
            separates += [False] * len(ids) + ([True] if end is not None else [])
            yield from cut(self.length)
        yield from cut(0)
