"""The next token of each row, greedy or sampled, and the conditions at which a row ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief


class TokenSampler:
    """Chooses the next token of each row from its logits.

    Args:
        sample: whether tokens are sampled; otherwise the most probable token is taken.
        temperature: of the sampling.
        top_p: of the sampling.
        seed: of the sampling; each row has a generator of its own, so that its tokens do not depend on the other rows.
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
        tokenizer: decodes rows where `stop` is given.
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
