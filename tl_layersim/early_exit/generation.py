"""The loop of decoding steps of `EarlyExit.generate`, and the next token of each row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief
from ..sources.split_model import LocalSplitModel
from .decoding import Decoding
from .exit_checks import ExitCheck
from .exit_results import Generated


class TokenSampler:
    """Chooses the next token of each row from its logits.

    Args:
        sample: whether tokens are sampled; otherwise the most probable token is taken.
        temperature: temperature of the sampling.
        top_p: see `EarlyExit.generate`.
        seed: seed of the sampling; each row has a generator of its own, so that its tokens do not depend on the other rows.
        rows: number of rows.
    """

    def __init__(self, sample: bool, temperature: float, top_p: float, seed: int | None, rows: int) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

        if not sample and (temperature != 1 or top_p != 1 or seed is not None):
            raise LayersimError(
                f"`temperature`, `top_p` and `seed` are {temperature}, {top_p} and {seed}; they have no effect without "
                "do_sample=True."
            )
        self.sample = sample
        self.warpers = LogitsProcessorList()
        if temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_p != 1:
            self.warpers.append(TopPLogitsWarper(float(top_p)))
        # Without a seed, sampling follows torch's global generator, as in transformers.
        start = int(torch.randint(1 << 62, ())) if sample and seed is None else seed or 0
        seeds = torch.Generator().manual_seed(start)
        row_seeds = [int(torch.randint(1 << 62, (), generator=seeds)) for _ in range(rows if sample else 0)]
        self.generators = [torch.Generator().manual_seed(row_seed) for row_seed in row_seeds]

    def __call__(self, logits: Tensor, rows: list[int], tokens: Tensor) -> Tensor:
        """Choose the next token of each row.

        Args:
            logits: `row vocabulary`.
            rows: index of each row in the original batch.
            tokens: `row column`, the tokens so far.

        Returns:
            `row`.
        """
        if not self.sample:
            return logits.argmax(-1)
        probabilities = self.warpers(tokens, logits.float()).softmax(-1).cpu()
        new = [torch.multinomial(p, 1, generator=self.generators[row]) for p, row in zip(probabilities, rows, strict=True)]
        return torch.cat(new).to(logits.device)


def end_ids(module: Any, eos_token_id: Any) -> frozenset[int]:
    """Token ids that end a row: the given ones, else those of the model's configuration."""
    if eos_token_id is None:
        eos_token_id = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
        eos_token_id = getattr(module.config, "eos_token_id", None) if eos_token_id is None else eos_token_id
    if eos_token_id is None:
        return frozenset()
    return frozenset(int(i) for i in eos_token_id) if isinstance(eos_token_id, Iterable) else frozenset({int(eos_token_id)})


class StopCriteria:
    """Decides whether a row of new tokens is complete.

    Args:
        ids: tokens that end a row.
        stop: texts that end a row.
        tokenizer: decodes rows if `stop` is given.
    """

    def __init__(self, ids: frozenset[int], stop: str | list[str] | None, tokenizer: Any) -> None:
        self.ids, self.tokenizer = ids, tokenizer
        self.stop = [stop] if isinstance(stop, str) else stop or []
        if self.stop and (tokenizer is None or not all(self.stop)):
            raise LayersimError(
                f"`stop` is {brief(stop)}; it must be texts that are not empty."
                if tokenizer is not None
                else f"`stop` is {brief(stop)}, which needs a tokenizer."
            )

    def __call__(self, tokens: list[int]) -> bool:
        """Whether a row of new tokens is complete."""
        if tokens[-1] in self.ids:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(tokens)
        return any(stop in text for stop in self.stop)


class GenerationLoop:
    """Generates tokens for the rows of a batch until every row is complete.

    Args:
        split_model: the model.
        ends: as in `Segments`.
        check: decides after each segment which tokens exit.
        tokens: `row column`, the prompts.
        attended: `row column`, False at padding; None if no row is padded.
        sampler: chooses the next tokens.
        stop: decides whether a row is complete.
        max_new_tokens: maximum number of new tokens in a row.
    """

    def __init__(
        self,
        split_model: LocalSplitModel,
        ends: tuple[int, ...],
        check: ExitCheck,
        tokens: Tensor,
        attended: Tensor | None,
        sampler: TokenSampler,
        stop: StopCriteria,
        max_new_tokens: int,
    ) -> None:
        self.check, self.sampler, self.stop, self.max_new_tokens = check, sampler, stop, max_new_tokens
        device = split_model.device
        tokens, attended = tokens.to(device), None if attended is None else attended.to(device)
        self.state = Decoding(split_model, ends, tokens, attended, tokens.shape[1] + max_new_tokens, self.decide)
        # Indices, in the original batch, of the rows that are not complete.
        self.rows = list(range(len(tokens)))
        self.tokens: list[list[int]] = [[] for _ in self.rows]
        self.exits: list[list[int]] = [[] for _ in self.rows]
        # Of the current step, for each row that is not complete.
        self.step_logits: list[Tensor] = []
        self.step_exits: list[int] = []
        self.steps = self.full_block_tokens = 0

    def run(self) -> None:
        """Run all decoding steps."""
        state, blocks = self.state, self.state.ends[-1]
        with self.state.split_model.evaluating(), torch.no_grad(), state.hooked():
            while True:
                self.step_logits, self.step_exits = [torch.empty(0)] * len(self.rows), [0] * len(self.rows)
                self.check.restart(self.rows)
                self.full_block_tokens += blocks * len(self.rows) * (state.tokens.shape[1] if self.steps == 0 else 1)
                state.run()
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
        exits, logits = self.check(x, entering, torch.tensor(rows), layer, layer == self.state.ends[-1])
        if logits is None:
            return rows
        flags = exits.tolist()
        for i, row in enumerate(row for row, flag in zip(rows, flags, strict=True) if flag):
            self.step_logits[row], self.step_exits[row] = logits[i : i + 1], layer
        return [row for row, flag in zip(rows, flags, strict=True) if not flag]

    def result(self, tokenizer: Any) -> Generated:
        """The result; texts are empty if there is no tokenizer."""
        texts = [tokenizer.decode(row, skip_special_tokens=True) if tokenizer is not None else "" for row in self.tokens]
        state = self.state
        return Generated(
            tokens=tuple(torch.tensor(row) for row in self.tokens),
            texts=tuple(texts),
            exits=tuple(torch.tensor(row) for row in self.exits),
            layers=state.ends[-1],
            steps=self.steps,
            block_calls=state.block_calls,
            block_tokens=state.block_tokens,
            full_block_tokens=self.full_block_tokens,
            passes=state.passes,
            checks=self.check.checked,
        )
