"""Generation from several layers of a model at once: each continuation is read at one layer, and no block above it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.chosen_analyzers import with_tokenizer
from .arguments import prompt_rows
from .early_exit import EarlyExit
from .exit_checks import FixedCheck
from .generation import GenerationLoop, StopCriteria, TokenSampler, end_ids

# Most bytes of keys and values of the layers that are generated from together. Those of a single layer may take more.
KEYS_AND_VALUES_BYTES = 2**28


class Continuation(NamedTuple):
    """The continuation of one prompt by one layer.

    Attributes:
        tokens: the new token ids.
        text: text of these tokens, without special tokens; "" if there is no tokenizer.
    """

    tokens: Tensor
    text: str


class LayerSampler(TokenSampler):
    """A sampler for several copies of the same rows; every copy gets the random draws that one copy alone would get.

    Args:
        top_p: see `EarlyExit.generate`.
        seed: seed of the sampling.
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
        early: the `EarlyExit` of the model, with `at="all"`.
        prompts: the texts.
        max_new_tokens: maximum number of new tokens in each row.
        top_p: see `EarlyExit.generate`.
        seed: seed of the sampling.
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
    stop = StopCriteria(end_ids(early.model, None), None, tokenizer)
    room = tokens.shape[1] + max_new_tokens
    out: list[list[Continuation]] = []
    for group in layer_groups(len(split_model.blocks), _cache_bytes(early, len(tokens) * room)):
        check = FixedCheck(early.lens, torch.tensor(group).repeat_interleave(len(tokens)))
        sampler = LayerSampler(top_p, seed, len(tokens), len(group), on_tokens)
        many = None if attended is None else attended.repeat(len(group), 1)
        loop = GenerationLoop(
            split_model, tuple(group), check, tokens.repeat(len(group), 1), many, sampler, stop, max_new_tokens
        )
        loop.run()
        written = loop.result(tokenizer)
        rows = [Continuation(*one) for one in zip(written.tokens, written.texts, strict=True)]
        out += [rows[i : i + len(tokens)] for i in range(0, len(rows), len(tokens))]
    return out


def layer_groups(blocks: int, cache_bytes: int) -> list[range]:
    """Groups of layers, counted from 1, that generate text together.

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
