"""Generation with early exit: prompts, decoding steps and sampling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..core.wording import amount, brief
from ..data.batches import Batches, refuse_other_ids
from ..data.data import Data
from ..data.padding_masks import RunsAtEnds, as_mask, mask_of, masked_warning
from ..sources.model_description import ModelDescription
from ..sources.partial_forward import LocalSplitModel
from .exit_decisions import ExitCheck
from .generation_config import TokenRules
from .segments import Decoding


@dataclass(frozen=True, eq=False, repr=False)
class Generated:
    """Result of `EarlyExit.generate`: texts, the exit layer of each token, and the number of blocks computed.

    Attributes:
        tokens: for each row, its new token ids, `token`.
        texts: for each row, its new text; empty if there is no tokenizer.
        exits: for each row and new token, the number of blocks that had run when the token was chosen, `token`.
        layers: number of blocks of the model.
        steps: number of decoding steps; each gives every unfinished row one token.
        block_calls: number of block calls, each of which reads the weights of a block. The full model makes `layers * steps`.
        block_tokens: number of computed (token, block) pairs, prompts and padding included.
        full_block_tokens: the same for the full model.
        checks: tokens evaluated at checks, summed over checks.
    """

    tokens: tuple[Tensor, ...]
    texts: tuple[str, ...]
    exits: tuple[Tensor, ...]
    layers: int
    steps: int
    block_calls: int
    block_tokens: int
    full_block_tokens: int
    checks: int

    @property
    def mean_exit(self) -> float:
        """Mean number of blocks that had run when a new token was chosen."""
        return float(torch.cat(self.exits).double().mean())

    @property
    def share_of_blocks(self) -> float:
        """Number of block calls, divided by the number in the full model.

        This ratio is the relative time if memory bandwidth is the bottleneck.
        """
        return self.block_calls / max(1, self.layers * self.steps)

    @property
    def share_of_block_tokens(self) -> float:
        """Number of (token, block) pairs that are computed, divided by the number in the full model.

        This ratio is the relative time if arithmetic is the bottleneck.
        """
        return self.block_tokens / max(1, self.full_block_tokens)

    def __repr__(self) -> str:
        new_tokens = sum(len(row) for row in self.tokens)
        return (
            f"Generated: {len(self.tokens)} {'row' if len(self.tokens) == 1 else 'rows'}, {new_tokens} new tokens, exits after "
            f"{self.mean_exit:.2f} of {self.layers} blocks on average, {100 * self.share_of_blocks:.0f} % of the full model's "
            f"block calls, {self.checks} checks"
        )


class TokenSampler:
    """Chooses the next token of each row from its logits.

    Args:
        rules: for each row, its rules.
        sample: whether tokens are sampled; otherwise the most probable token is taken.
        seed: seed of the sampling; each row has a generator of its own, so that its tokens do not depend on the other rows.
        copies: number of copies of these rows, one after the other; each draws what a single copy would draw.
    """

    def __init__(self, rules: Sequence[TokenRules], sample: bool, seed: int | None, copies: int = 1) -> None:
        self.sample = sample
        self.plain = all(rule.plain for rule in rules)
        # Watermarks keep a state of the row, so each copy needs its own.
        self.rules = list(rules)
        if not self.plain:
            self.rules = []
            for _ in range(copies):
                self.rules += [copy.deepcopy(rule) for rule in rules]
        if seed is None:
            # Without a seed, sampling follows torch's global generator, as in transformers.
            seed = int(torch.randint(1 << 62, ())) if sample else 0
        generator_of_seeds = torch.Generator().manual_seed(seed)
        sampled_rows = len(rules) if sample else 0
        row_seeds = [int(torch.randint(1 << 62, (), generator=generator_of_seeds)) for _ in range(sampled_rows)]
        self.generators = [torch.Generator().manual_seed(row_seed) for row_seed in row_seeds * copies]

    def __call__(self, logits: Tensor, rows: list[int], tokens: Sequence[Tensor]) -> tuple[Tensor, list[bool]]:
        """The next token of each row (`row`), and whether a rule of the row ends it there.

        Args:
            logits: `row vocabulary`.
            rows: indices of the rows.
            tokens: for each row, its prompt and new tokens without padding, `pos`.
        """
        if self.plain:
            # The same warpers for every row, which do not read its tokens.
            scores = self.rules[0].scores(logits.new_empty(0), logits) if self.sample else logits
            return self._choose(scores, rows), [False] * len(rows)
        scores_of_rows = []
        for i, row in enumerate(rows):
            scores_of_rows.append(self.rules[row].scores(tokens[i][None], logits[i : i + 1]))
        scores = torch.cat(scores_of_rows)
        new_tokens = self._choose(scores, rows)
        ended = []
        for i, row in enumerate(rows):
            row_tokens = torch.cat([tokens[i], new_tokens[i : i + 1]])[None]
            ended.append(self.rules[row].ends(row_tokens, scores[i : i + 1]))
        return new_tokens, ended

    def _choose(self, scores: Tensor, rows: list[int]) -> Tensor:
        if not self.sample:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1).cpu()
        new_tokens = []
        for row_probabilities, row in zip(probabilities, rows, strict=True):
            new_tokens.append(torch.multinomial(row_probabilities, 1, generator=self.generators[row]))
        return torch.cat(new_tokens).to(scores.device)


def generate_rows(
    split_model: LocalSplitModel,
    ends: tuple[int, ...],
    check: ExitCheck,
    prompts: tuple[Tensor, Tensor | None],
    sampler: TokenSampler,
    stop: frozenset[int],
    max_new_tokens: int,
    tokenizer: Any,
    on_tokens: Callable[[int], object] = lambda _count: None,
) -> Generated:
    """Generate tokens until every row is complete.

    Args:
        split_model: the model.
        ends: as in `Segments`.
        check: decides after each segment which tokens exit.
        prompts: see `prompt_rows`.
        sampler: chooses the next tokens.
        stop: token ids that end a row.
        max_new_tokens: maximum number of new tokens in a row.
        tokenizer: decodes the new tokens; texts are empty if there is none.
        on_tokens: called at each step with the number of its tokens.
    """
    tokens, attended = prompts
    tokens = tokens.to(split_model.device)
    if attended is not None:
        attended = attended.to(split_model.device)
    new_tokens = [list[int]() for _ in tokens]
    exits = [list[int]() for _ in tokens]
    steps = 0
    full_block_tokens = 0
    decoding = Decoding(split_model, ends, check, tokens, attended, tokens.shape[1] + max_new_tokens)
    unfinished = list(range(len(tokens)))
    with split_model.evaluating(), torch.no_grad(), decoding.hooked():
        while unfinished:
            rows = decoding.numbers
            # The first step runs the whole prompts.
            columns = decoding.tokens.shape[1] if steps == 0 else 1
            full_block_tokens += ends[-1] * len(rows) * columns
            decoding.run()
            steps += 1
            on_tokens(len(rows))
            logits = torch.cat([decoding.exited[i][0] for i in range(len(rows))])
            step_tokens, ended = sampler(logits, rows, decoding.rows_without_padding())
            unfinished = []
            for i, (row, token) in enumerate(zip(rows, step_tokens.tolist(), strict=True)):
                new_tokens[row].append(token)
                exits[row].append(decoding.exited[i][1])
                if len(new_tokens[row]) < max_new_tokens and token not in stop and not ended[i]:
                    unfinished.append(i)
            if unfinished:
                decoding.append(step_tokens)
            if 0 < len(unfinished) < len(rows):
                decoding.keep(unfinished)
    texts = [""] * len(new_tokens)
    if tokenizer is not None:
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in new_tokens]
    return Generated(
        tokens=tuple(map(torch.tensor, new_tokens)),
        texts=tuple(texts),
        exits=tuple(map(torch.tensor, exits)),
        layers=ends[-1],
        steps=steps,
        block_calls=decoding.block_calls,
        block_tokens=decoding.block_tokens,
        full_block_tokens=full_block_tokens,
        checks=check.checked,
    )


def prompt_rows(
    prompt: Any, attention_mask: Tensor | None, description: ModelDescription, tokenizer: Any, max_new_tokens: int
) -> tuple[Tensor, Tensor | None]:
    """Token ids of prompts, padded on the left, and their attention mask (both `row column`). The mask is None without padding.

    Raises:
        LayersimError: `prompt` is neither text nor token ids, or leaves no room for `max_new_tokens`.
    """
    if isinstance(prompt, Tensor):
        tokens, attention = _rows_of_ids(prompt, attention_mask, replace(description, tokenizer=tokenizer))
    elif attention_mask is not None:
        raise LayersimError("`attention_mask` is given, but `prompt` is text; it must be None, or `prompt` token ids.")
    else:
        tokens, attention = _rows_of_texts(prompt, description, tokenizer)
    lengths = attention.sum(1)
    if not len(lengths) or int(lengths.min()) == 0:
        raise LayersimError("`prompt` has a row without a token; every row needs one or more.")
    refuse_other_ids(tokens[attention], description, "prompt")
    longest = int(lengths.max())
    # The last new token does not run through the model.
    if description.context and longest + max_new_tokens - 1 > description.context:
        raise LayersimError(
            f"`prompt` has {longest} tokens and `max_new_tokens` is {max_new_tokens}; with {description.name}, the sum must be "
            f"at most {description.context + 1}."
        )
    if int(lengths.min()) == tokens.shape[1]:
        return tokens, None
    left_padded = torch.zeros(len(tokens), longest, dtype=torch.int64, device=tokens.device)
    attended = torch.arange(longest, device=tokens.device) >= (longest - lengths)[:, None]
    left_padded[attended] = tokens[attention]
    if bool(attended.all()):
        return left_padded, None
    return left_padded, attended


def _rows_of_ids(tokens: Tensor, mask: Tensor | None, description: ModelDescription) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of a prompt that is a tensor."""
    if tokens.dim() == 1:
        tokens = tokens[None]
    if mask is None:
        runs = RunsAtEnds()
        runs.add(tokens, description)
        if warning := runs.warning(description):
            warn(warning)
        mask = mask_of(tokens, description)
        if mask is not None:
            warn(masked_warning(tokens[~mask].tolist()))
    attention = torch.ones_like(tokens, dtype=torch.bool) if mask is None else as_mask(mask).to(tokens.device)
    return tokens.long(), attention


def _rows_of_texts(prompt: Any, description: ModelDescription, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of prompts that are texts."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    # The annotation is checked on one random item of a list.
    if not all(isinstance(text, str) for text in texts):
        raise LayersimError(f"`prompt` is {brief(prompt)}; it must be a text, texts alone, or a tensor of token ids.")
    # Without a head and a context, Data does not cut texts. Long ones are refused by `prompt_rows`.
    description = replace(description, tokenizer=tokenizer or description.tokenizer, head=None, context=None)
    data = Data(texts, batch_size=len(texts) + 1, seq_len=1 << 62)
    batches = Batches(data, description, argument="prompt")
    rows = list(batches.rows())
    if not rows or len(rows) != len(texts):
        empty = len(texts) - len(rows)
        raise LayersimError(
            f"`prompt` has {amount(len(texts), 'text')}, {empty} of them empty; it must have one or more texts, none empty."
        )
    batch = batches.batch(rows, 0)
    return batch.tokens, batch.attention
