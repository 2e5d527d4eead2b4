"""Choice of the stack of a model of several that is read, from the sites that `at=` names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..core.errors import LayersimError
from ..core.wording import brief
from .block_lists import blocks_in, has_encoder_positions, lists_by_stack, lists_by_stage, side_of, stack_of
from .hook_points import find_points, items_of
from .module_sites import find_stacks
from .site_map import SITE_NAMES


def choose_stack(module: torch.nn.Module, home: list[str], named: bool, at: Any) -> tuple[list[str], Any]:
    """Paths of the blocks of the stack whose sites `at` names, and `at` with families named without it.

    A family without the name of a stack belongs to the stack of `home`.

    Args:
        module: an encoder-decoder, or a model of stages.
        home: paths of the blocks that are read where `at` names no stack.
        named: whether the user named these blocks, so that no other stack can be read.
        at: as in `find_points`.

    Raises:
        LayersimError: `at` names sites of both stacks, of a stack other than that of `layers`, or sites that are computed from
            the encoder inside the decoder; or no site.
    """
    items = items_of(at)
    others = [item for item in items if not isinstance(item, int) and item not in SITE_NAMES]
    if not others:
        return home, at
    lists = lists_by_stack(module)
    blocks = find_stacks(module, None) if lists else home
    modules = [point.module for point in find_points(module, blocks, others)]
    crossing = [path for path in modules if has_encoder_positions(path)]
    if crossing:
        raise LayersimError(
            f"`at` names {crossing[0]}, which attends from the decoder to the encoder and has the encoder's positions. Use "
            "'encoder.ln_final' or 'decoder.cross_attn_out'."
        )
    if lists_by_stage(module):
        return _choose_stage(module, home, named, at, modules)
    read = side_of(module, home)
    side = side_of(module, [*modules, *home] if len(others) < len(items) else modules) or read
    if side == "both" or (named and side != read):
        raise LayersimError(
            (
                f"`at` is {brief(at)}, sites of both encoder and decoder, which have positions of their own"
                if side == "both"
                else f"`at` is {brief(at)}, sites of the {side}, and `layers` names blocks of the {read}"
            )
            + ". Read one stack in a call, such as at='encoder.attn_out'."
        )
    paths = home if side == read else blocks_in(module, lists[side])
    return paths, [_without_prefix(lists, item) for item in items]


def _choose_stage(module: torch.nn.Module, home: list[str], named: bool, at: Any, modules: list[str]) -> tuple[list[str], Any]:
    """`choose_stack` of a model of stages, of which several can be read in one call."""
    items = items_of(at)
    lists, read = lists_by_stage(module), stack_of(module, home)
    families = any(isinstance(item, int) or item in SITE_NAMES for item in items)
    reached = {name for name, path in lists.items() if any(one.startswith(f"{path}.") for one in modules)}
    reached |= {read} if families else set()
    if named and reached - {read}:
        raise LayersimError(
            f"`at` is {brief(at)}, sites of {' and '.join(sorted(reached - {read}))}, and `layers` names blocks of "
            f"{read or 'no stage'}; leave out layers=."
        )
    if len(reached) > 1:
        # Each stage has a number of positions of its own, so families keep the names of their stages.
        return home, [f"{read}.{item}" if item in SITE_NAMES else item for item in items]
    stage = next(iter(reached), read)
    paths = home if stage == read else blocks_in(module, lists[stage])
    return paths, [_without_prefix(lists, item) for item in items]


def _without_prefix(stacks: Iterable[str], item: Any) -> Any:
    """A family without the name of its stack; any other item unchanged."""
    stack, _, family = item.rpartition(".") if isinstance(item, str) else ("", "", "")
    return family if stack in stacks and family in SITE_NAMES else item
