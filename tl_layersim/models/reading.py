"""The sites that a recorder reads, what it knows of a forward pass, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .block_lists import Side, encoder_and_decoder, side_of
from .feature_maps import Channels
from .hook_point import Part
from .view import View


@dataclass(frozen=True)
class Tap:
    """The place at which one site is read: the input or the output of a module, or a part of it.

    Attributes:
        module: the module.
        incoming: whether the input is read.
        part: of the tensor; None for all of it.
        path: of the module, for messages.
        channels: see `HookPoint`.
    """

    module: torch.nn.Module
    incoming: bool
    part: Part | None = None
    path: str = ""
    channels: Channels | None = None


@dataclass(frozen=True)
class Reading:
    """The sites that a recorder reads.

    Attributes:
        names: of the sites, in the order of `View.activations`.
        taps: where each is read.
        order: the sites in the order in which a forward pass reaches them; None where the first forward pass is to show it.
        inside: whether all sites lie inside the innermost module that contains all blocks.
        last: the site that is the output of the last block, None where it is not read.
    """

    names: tuple[str, ...]
    taps: tuple[Tap, ...]
    order: tuple[int, ...] | None
    inside: bool
    last: int | None

    def by_module(self) -> dict[tuple[torch.nn.Module, bool], list[int]]:
        """The sites that are parts of one tensor, by module and by whether its input is read."""
        together: dict[tuple[torch.nn.Module, bool], list[int]] = {}
        for site, tap in enumerate(self.taps):
            together.setdefault((tap.module, tap.incoming), []).append(site)
        return together


@dataclass(frozen=True)
class Stack:
    """The stack, encoder or decoder, of an encoder-decoder model whose residual stream is read.

    Attributes:
        side: "encoder" or "decoder"; "" for a model of one stack, "both" for blocks of both or of none.
        start: the token id with which the model itself begins its decoder input, None where its configuration has none.
    """

    side: Side
    start: int | None = None


@dataclass(frozen=True)
class Call:
    """Shape and inputs of one forward pass, as known when its first site is read.

    Attributes:
        shape: `batch pos` of the activations in the blocks (one position per row in cached generation).
        tokens: `batch pos`, None if the model was called with embeddings.
        attention: the attention mask of the stack that is read, in the form that the model was given, None if there is none.
        cached: whether the model was given keys and values of earlier positions, which the mask then covers too.
        start: see `Stack`.
    """

    shape: tuple[int, int]
    tokens: Tensor | None
    attention: Any
    cached: bool = False
    start: int | None = None


@dataclass(frozen=True)
class Choice:
    """Positions of a forward pass that are counted, and positions that the model attends to.

    Attributes:
        counted: `batch pos`, positions that become tokens of the view.
        attended: `batch pos`, positions that the model attends to.
        pooled: whether a sample is the mean of a row's counted positions.
        has_tokens: see `SiteBuffer`.
    """

    counted: Tensor
    attended: Tensor
    pooled: bool = False
    has_tokens: bool = True


@dataclass(frozen=True)
class Callbacks:
    """Functions that a recorder calls; see `HookedSource.tapped`.

    Attributes:
        on_view: takes each view.
        choose: gives the positions of a call that count.
        compare: called once, with the difference between the lens and the logits.
        on_error: takes errors of the hooks; None where errors are raised.
    """

    on_view: Callable[[View], None]
    choose: Callable[[Call], Choice]
    compare: Callable[[Tensor, torch.dtype], None] | None
    on_error: Callable[[Exception], None] | None


def stack_side(module: torch.nn.Module, paths: list[str]) -> Stack:
    """The stack of an encoder-decoder in which the blocks at these paths lie."""
    if not encoder_and_decoder(module):
        return Stack("")
    side = side_of(module, paths) or "both"
    start = getattr(module.config, "decoder_start_token_id", None)
    return Stack(side, start if side == "decoder" and isinstance(start, int) else None)
