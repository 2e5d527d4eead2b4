"""Generation from several layers of a model at once: each continuation is read at one layer, and no block above it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.arguments import with_tokenizer
from .arguments import prompt_rows
from .checks import ExitCheck, ExitLens
from .decoding import Decoding
from .early_exit import EarlyExit
from .generation import GenerationLoop, StopCriteria, TokenSampler, end_ids

# Bytes of keys and values that the rows of layers which are generated from together may take. On one layer they may take more.
KEYS_AND_VALUES_BYTES = 2**28


class Continuation(NamedTuple):
    """What one layer makes of one prompt.

    Attributes:
        tokens: the new token ids.
        text: of these tokens, without special tokens; "" where there is no tokenizer.
    """

    tokens: Tensor
    text: str


class RowLayerCheck(ExitCheck):
    """The check of a `GenerationLoop` whose rows have fixed layers, in place of an exit rule.

    Args:
        lens: the predictions of each layer.
        layers: for each row, the number of the block after which its tokens are read.

    Attributes:
        rows: indices in `layers` of the rows that are not complete.
    """

    def __init__(self, lens: ExitLens, layers: Sequence[int]) -> None:
        # No rule is evaluated, so there is no state of one.
        self.lens, self.layers = lens, layers
        self.rows: Callable[[], list[int]] = lambda: list(range(len(layers)))

    def restart(self, count: int) -> None:
        """Nothing is kept from token to token."""

    def __call__(
        self, leaving: Tensor, entering: Tensor, index: Tensor, layer: int, read: Tensor | None = None, needs_norm: bool = True
    ) -> tuple[Tensor, None]:
        """Which tokens exit at a layer; logits are left to the caller. Arguments as those of `ExitCheck`."""
        rows = self.rows()
        exits = [self.layers[rows[i]] == layer for i in index.tolist()]
        return torch.tensor(exits, device=leaving.device), None


class LayerSampler(TokenSampler):
    """A sampler for copies of the same rows, one after the other, each of which draws what a single copy would draw.

    Args:
        top_p: of the sampling.
        seed: of the sampling.
        rows: number of rows of a copy.
        copies: number of copies.
        on_tokens: called at each step with the number of its tokens.
    """

    def __init__(self, top_p: float, seed: int, rows: int, copies: int, on_tokens: Callable[[int], object]) -> None:
        super().__init__(True, 1.0, top_p, seed, rows)
        self.on_tokens = on_tokens
        others = (TokenSampler(True, 1.0, top_p, seed, rows).generators for _ in range(copies - 1))
        self.generators += [generator for one in others for generator in one]

    def __call__(self, logits: Tensor, rows: list[int], tokens: Tensor) -> Tensor:
        self.on_tokens(len(rows))
        return super().__call__(logits, rows, tokens)


def generate_from_layers(
    early: EarlyExit,
    prompts: list[str],
    *,
    max_new_tokens: int,
    top_p: float,
    seed: int,
    tokenizer: Any = None,
    on_tokens: Callable[[int], object] = lambda _count: None,
) -> list[list[Continuation]]:
    """Sampled continuations of prompts from every layer of a model, in as few decoding steps as the cache's memory allows.

    Every layer draws the same random numbers, as if each ran alone.

    Args:
        early: of the model, with `at="all"`.
        prompts: the texts.
        max_new_tokens: maximum number of new tokens in each row.
        top_p: of the sampling.
        seed: of the sampling.
        tokenizer: used in place of the model's own.
        on_tokens: called at each step with the number of its tokens.

    Returns:
        For each layer and prompt, the continuation.

    Raises:
        LayersimError: the model cannot generate, or the rows would exceed its context.
    """
    early.refuse_no_generation()
    split_model = early.split_model
    tokenizer = with_tokenizer(split_model.model, tokenizer).tokenizer
    tokens, attended = prompt_rows(prompts, None, split_model.model, tokenizer, max_new_tokens)
    tokens = tokens.to(split_model.device)
    attended = None if attended is None else attended.to(split_model.device)
    stop = StopCriteria(end_ids(early.model, None), None, tokenizer)
    blocks, room = len(split_model.blocks), tokens.shape[1] + max_new_tokens
    out: list[list[Continuation]] = []
    for group in layer_groups(blocks, _cache_bytes(early, len(tokens) * room)):
        layers = [layer for layer in group for _ in range(len(tokens))]
        check = RowLayerCheck(early._lens, layers)
        sampler = LayerSampler(top_p, seed, len(tokens), len(group), on_tokens)
        with split_model.evaluating(), torch.no_grad():
            many = None if attended is None else attended.repeat(len(group), 1)
            state = Decoding(split_model, tuple(group), tokens.repeat(len(group), 1), many, room)
            loop = GenerationLoop(state, check, sampler, stop, max_new_tokens)
            check.rows = partial(getattr, loop, "rows")
            loop.run()
        written = loop.result(tokenizer)
        rows = [Continuation(*one) for one in zip(written.tokens, written.texts, strict=True)]
        out += [rows[i : i + len(tokens)] for i in range(0, len(rows), len(tokens))]
    return out


def layer_groups(blocks: int, cache_bytes: int) -> list[range]:
    """The layers, counted from 1, in groups that are generated from together.

    Args:
        blocks: number of blocks.
        cache_bytes: keys and values of the rows of one layer.

    Examples:
        >>> layer_groups(5, KEYS_AND_VALUES_BYTES // 2)
        [range(1, 3), range(3, 5), range(5, 6)]
    """
    size = min(blocks, max(1, KEYS_AND_VALUES_BYTES // max(1, cache_bytes)))
    return [range(start, min(start + size, blocks + 1)) for start in range(1, blocks + 1, size)]


def _cache_bytes(early: EarlyExit, columns: int) -> int:
    """Bytes of keys and values of all blocks at some columns, where neither is wider than the residual."""
    width = early.split_model.model.d_model or 4096
    return 2 * len(early.split_model.blocks) * columns * width * next(early.split_model.module.parameters()).element_size()
