"""From prompts to rows that grow side by side, and from logits to the next token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..data.batches import Batches
from ..data.options import DataOptions
from ..data.padding import mask_of, masked_warning
from ..models.model_info import Model


def rows_of(prompt: Any, attention_mask: Tensor | None, model: Model, tokenizer: Any, new: int) -> tuple[Tensor, Tensor | None]:
    """Token ids `row column` padded on the left, and which are no padding (None where all are).

    Raises:
        LayersimError: this is no prompt, or leaves no room for that many new tokens.
    """
    if isinstance(prompt, Tensor):
        tokens, attention = _given(prompt, attention_mask, replace(model, tokenizer=tokenizer))
    else:
        tokens, attention = _read(prompt, attention_mask, model, tokenizer)
    lengths = attention.sum(1)
    longest = int(lengths.max())
    if int(lengths.min()) == 0:
        raise LayersimError(
            "A row has nothing to go on from.",
            given="a row of padding alone",
            expected="at least one token in each",
            do="leave the row out",
        )
    # The last new token is not read again.
    if model.context and longest + new - 1 > model.context:
        raise LayersimError(
            "The model does not take rows this long.",
            given=f"a prompt of {longest} tokens, and {new} new ones",
            expected=f"at most {model.context + 1} together: the context of {model.name}, and a last one that is not read",
            do=f"max_new_tokens={max(1, model.context - longest + 1)}, or a shorter prompt",
        )
    if int(lengths.min()) == tokens.shape[1]:
        return tokens, None
    left = torch.zeros(len(tokens), longest, dtype=torch.int64, device=tokens.device)
    for row, length in enumerate(lengths.tolist()):
        left[row, longest - length :] = tokens[row, attention[row]]
    kept = torch.arange(longest, device=tokens.device) >= (longest - lengths)[:, None]
    return left, None if bool(kept.all()) else kept


def _given(tokens: Tensor, mask: Tensor | None, model: Model) -> tuple[Tensor, Tensor]:
    """Token ids as they are; without a mask, padding ids at the ends of rows are padding."""
    tokens = tokens[None] if tokens.dim() == 1 else tokens
    if (
        tokens.dim() != 2
        or tokens.is_floating_point()
        or not tokens.numel()
        or (mask is not None and mask.shape != tokens.shape)
    ):
        raise LayersimError(
            "These are no token ids.",
            given=f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            + ("" if mask is None else f", a mask of shape {tuple(mask.shape)}"),
            expected="integers `batch pos`, and a mask of the same shape",
            do="generate(encoded.input_ids, attention_mask=encoded.attention_mask)",
        )
    if mask is None and (mask := mask_of(tokens, model)) is not None:
        warn(masked_warning(tokens[~mask].tolist()))
    return tokens.long(), torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.to(tokens.device).bool()


def _read(prompt: Any, mask: Tensor | None, model: Model, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Texts, tokenised as `analyze` does."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if mask is not None or not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise LayersimError(
            "This is no prompt." if mask is None else "A text has no attention mask.",
            given=type(prompt).__name__,
            expected="a text, a list of texts, or token ids `batch pos`",
            do='generate("Once upon a time")',
        )
    described = replace(model, tokenizer=tokenizer or model.tokenizer)
    length = model.context or 1 << 20
    rows = list(Batches(texts, described, DataOptions(batch_size=len(texts) + 1, seq_len=length)).rows())
    if len(rows) != len(texts):
        raise LayersimError(
            "A prompt is empty, or longer than the model's context.",
            given=f"{len(texts)} texts that became {len(rows)} rows",
            expected=f"texts of 1 to {length} tokens",
            do="a shorter prompt",
        )
    batch = Batches(texts, described, DataOptions(batch_size=len(texts) + 1, seq_len=length)).batch(rows, 0)
    return batch.tokens, batch.attention


class Choice:
    """The next token of each row.

    Args:
        sample: whether it is drawn, or the most probable.
        temperature: of the draw.
        top_p: of the draw.
        seed: of the draw; each row has a generator of its own, so that its tokens do not depend on what stands beside it.
        rows: how many.
    """

    def __init__(self, sample: bool, temperature: float, top_p: float, seed: int | None, rows: int) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

        if sample and not (temperature > 0 and 0 < top_p <= 1):
            raise LayersimError(
                "Nothing can be drawn like this.",
                given=f"temperature={temperature}, top_p={top_p}",
                expected="a temperature above 0, and 0 < top_p <= 1",
                do="do_sample=False for the most probable token",
            )
        if not sample and (temperature != 1 or top_p != 1 or seed is not None):
            raise LayersimError(
                "Nothing is drawn, so there is nothing to set.",
                given=f"temperature={temperature}, top_p={top_p}, seed={seed} with do_sample=False",
                expected="do_sample=True, or none of them",
                do="do_sample=True",
            )
        self.sample = sample
        self.warpers = LogitsProcessorList()
        if temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_p != 1:
            self.warpers.append(TopPLogitsWarper(float(top_p)))
        # Without a seed it follows from torch's own generator, as in transformers.
        start = int(torch.randint(1 << 62, ())) if sample and seed is None else seed or 0
        seeds = torch.Generator().manual_seed(start)
        drawn = [int(torch.randint(1 << 62, (), generator=seeds)) for _ in range(rows if sample else 0)]
        self.generators = [torch.Generator().manual_seed(own) for own in drawn]

    def __call__(self, logits: Tensor, rows: list[int], tokens: Tensor) -> Tensor:
        """`row`, from `row vocabulary`; `rows` are the numbers that they had at the beginning."""
        if not self.sample:
            return logits.argmax(-1)
        probabilities = self.warpers(tokens, logits.float()).softmax(-1).cpu()
        drawn = [torch.multinomial(p, 1, generator=self.generators[row]) for p, row in zip(probabilities, rows, strict=True)]
        return torch.cat(drawn).to(logits.device)


def end_ids(module: Any, given: Any) -> frozenset[int]:
    """Ids that end a row: those that are given, else the model's own."""
    if given is None:
        given = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
        given = getattr(module.config, "eos_token_id", None) if given is None else given
    if given is None:
        return frozenset()
    return frozenset(int(i) for i in given) if isinstance(given, Iterable) else frozenset({int(given)})


class Ends:
    """Which rows are done.

    Args:
        ids: tokens that end a row.
        stop: texts that end a row.
        tokenizer: reads tokens where there are such texts.
    """

    def __init__(self, ids: frozenset[int], stop: str | list[str] | None, tokenizer: Any) -> None:
        self.ids, self.tokenizer = ids, tokenizer
        self.stop = [stop] if isinstance(stop, str) else stop or []
        if self.stop and (tokenizer is None or not all(self.stop)):
            raise LayersimError(
                "Texts at which to stop cannot be looked for.",
                given=f"stop={stop!r}" + (" and no tokenizer" if tokenizer is None else ""),
                expected="texts that are not empty, and a tokenizer",
                do="tokenizer=..., or eos_token_id=",
            )

    def __call__(self, row: list[int]) -> bool:
        """Whether a row of new tokens is done."""
        if row[-1] in self.ids:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(row)
        return any(stop in text for stop in self.stop)
