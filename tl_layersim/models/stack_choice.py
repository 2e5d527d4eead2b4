"""Choice of the stack of an encoder-decoder that is read, from the sites that `at=` names."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import LayersimError
from .block_lists import SIDES, blocks_in, has_encoder_positions, lists_by_side, side_of
from .hook_points import find_points
from .module_sites import find_stacks
from .site_map import SITE_NAMES


def choose_stack(module: torch.nn.Module, home: list[str], named: bool, at: Any) -> tuple[list[str], Any]:
    """Paths of the blocks of the stack whose sites `at` names, and `at` with families named without it.

    A family without the name of a stack belongs to the stack of `home`.

    Args:
        module: the encoder-decoder.
        home: paths of the blocks that are read where `at` names no stack.
        named: whether the user named these blocks, so that no other stack can be read.
        at: as in `find_points`.

    Raises:
        LayersimError: `at` names sites of both stacks, of a stack other than that of `layers`, or sites that are computed from
            the encoder inside the decoder; or no site.
    """
    items = [at] if isinstance(at, str) or callable(at) else list(at)
    others = [item for item in items if item not in SITE_NAMES]
    if not others:
        return home, at
    blocks = find_stacks(module, None) if lists_by_side(module) else home
    modules = [point.module for point in find_points(module, blocks, others)]
    crossing = [path for path in modules if has_encoder_positions(path)]
    if crossing:
        raise LayersimError(
            "`at` names keys or values of attention from the decoder to the encoder, which have the encoder's positions.",
            given=crossing[0],
            expected="sites that hold a vector for each position of the stack that is read",
            do="at='encoder.ln_final', from which they are computed; at='decoder.cross_attn_out'",
        )
    read = side_of(module, home)
    side = side_of(module, [*modules, *home] if len(others) < len(items) else modules) or read
    if side == "both" or (named and side != read):
        raise LayersimError(
            "`at` names sites of both stacks, encoder and decoder, which have positions of their own."
            if side == "both"
            else f"`at` names sites of the {side}, and `layers` blocks of the {read}.",
            given=f"at={at!r}" + (f", and families without a stack belong to the {read}" if side == "both" else ""),
            expected="sites of one stack in one call",
            do="one call with at='encoder.attn_out', and another with at='decoder.attn_out'",
        )
    paths = home if side == read else blocks_in(module, lists_by_side(module)[side])
    stripped = [_without_prefix(side, item) for item in items]
    return paths, stripped[0] if isinstance(at, str) or callable(at) else stripped


def _without_prefix(side: str, item: Any) -> Any:
    """A family without the name of its stack; any other item unchanged."""
    family = item.removeprefix(f"{side}.") if isinstance(item, str) and side in SIDES else item
    return family if isinstance(family, str) and family in SITE_NAMES else item
