"""The loop of decoding steps of `EarlyExit.generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decoding import Decoding
from .exit_check import ExitCheck
from .results import Generated
from .sampling import StopCriteria, TokenSampler


class GenerationLoop:
    """Generates tokens for the rows of a batch until every row is complete.

    Args:
        state: the rows, with their prompts.
        check: the check after each segment.
        sampler: chooses the next tokens.
        stop: decides whether a row is complete.
        max_new_tokens: maximum number of new tokens in a row.
    """

    def __init__(
        self, state: Decoding, check: ExitCheck, sampler: TokenSampler, stop: StopCriteria, max_new_tokens: int
    ) -> None:
        self.state, self.check, self.sampler, self.stop, self.max_new_tokens = state, check, sampler, stop, max_new_tokens
        # Indices, in the original batch, of the rows that are not complete.
        self.rows = list(range(len(state.tokens)))
        self.tokens: list[list[int]] = [[] for _ in self.rows]
        self.exits: list[list[int]] = [[] for _ in self.rows]
        # Of the current step, for each row that is not complete.
        self.step_logits: list[Tensor] = []
        self.step_exits: list[int] = []
        self.steps = self.full_block_tokens = 0

    def run(self) -> None:
        """Run all decoding steps."""
        state, blocks = self.state, self.state.ends[-1]
        with state.watched(self.decide) as run_step:
            while True:
                self.step_logits, self.step_exits = [torch.empty(0)] * len(self.rows), [0] * len(self.rows)
                self.check.restart(len(self.rows))
                self.full_block_tokens += blocks * len(self.rows) * (state.tokens.shape[1] if self.steps == 0 else 1)
                run_step()
                self.steps += 1
                logits = self.step_logits[0] if len(self.rows) == 1 else torch.cat(self.step_logits)
                new = self.sampler(logits, self.rows, state.tokens)
                kept = self._append(new.tolist())
                if not kept:
                    return
                state.append(new)
                if len(kept) < len(self.rows):
                    state.keep(kept)
                    self.rows = [self.rows[i] for i in kept]

    def _append(self, new: list[int]) -> list[int]:
        """Append a token to each row; return the indices, within `self.rows`, of the rows that are not complete."""
        kept = []
        for i, (row, token) in enumerate(zip(self.rows, new, strict=True)):
            self.tokens[row].append(token)
            self.exits[row].append(self.step_exits[i])
            if len(self.tokens[row]) < self.max_new_tokens and not self.stop(self.tokens[row]):
                kept.append(i)
        return kept

    def decide(self, layer: int, rows: list[int], x: Tensor, entering: Tensor) -> list[int]:
        """Return the rows that continue after a segment, and store the logits of those that exit."""
        if layer == self.state.ends[-1]:
            self._exit(layer, rows, self.check.lens(x, layer))
            return []
        self.state.counts.checks += len(rows)
        exits, logits = self.check(x, entering, torch.tensor(rows), layer)
        flags = exits.tolist()
        exiting = [row for row, flag in zip(rows, flags, strict=True) if flag]
        if not exiting:
            return rows
        every = len(exiting) == len(rows)
        if logits is None:
            logits = self.check.lens(x if every else x[exits], layer)
        elif not every:
            logits = logits[exits]
        self._exit(layer, exiting, logits)
        return [row for row, flag in zip(rows, flags, strict=True) if not flag]

    def _exit(self, layer: int, rows: list[int], logits: Tensor) -> None:
        for i, row in enumerate(rows):
            self.step_logits[row], self.step_exits[row] = logits[i : i + 1], layer

    def result(self, tokenizer: Any) -> Generated:
        """The result; texts are empty where there is no tokenizer."""
        texts = [tokenizer.decode(row, skip_special_tokens=True) if tokenizer is not None else "" for row in self.tokens]
        counts = self.state.counts
        return Generated(
            tokens=tuple(torch.tensor(row) for row in self.tokens),
            texts=tuple(texts),
            exits=tuple(torch.tensor(row) for row in self.exits),
            layers=self.state.ends[-1],
            steps=self.steps,
            block_calls=counts.blocks,
            block_tokens=counts.tokens,
            full_block_tokens=self.full_block_tokens,
            passes=counts.passes,
            checks=counts.checks,
        )
