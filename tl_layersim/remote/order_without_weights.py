"""`order_without_weights`: the order of hook points in a forward pass, found in this process for a model without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..architectures.blocks import encoder_and_decoder
from ..architectures.chosen_hook_points import site_map
from ..architectures.points import HookPoint
from ..core.errors import LayersimError
from ..sources.hooked import firing_order
from ..sources.inputs import call_on, device_of, no_cache

# The order of hook points as their indices, and the width of each; no widths where no forward pass could run.
Order = tuple[tuple[int, ...], tuple[int, ...]]
# Positional and keyword arguments of a forward pass.
Arguments = tuple[Sequence[Tensor], Mapping[str, Any]]
# Number of tokens of a forward pass.
PROBE_POSITIONS = 4
# What forward passes without weights raise where they depend on values.
FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def order_without_weights(
    module: torch.nn.Module, blocks: Sequence[str], points: Sequence[HookPoint], arguments: Arguments
) -> Order:
    """The order of hook points in a forward pass, and their widths, from a forward pass on the meta device.

    If no such pass can run, the order is the order of `lsim.sites`, and the widths are empty.

    Args:
        module: the model.
        blocks: module paths of its blocks.
        points: the hook points.
        arguments: arguments of a forward pass. On the meta device they have no values.

    Raises:
        LayersimError: a module does not run exactly once in a forward pass; or no forward pass can run here, and a point is not
            a listed site.
    """
    found = _shown_by(module, points, [partial(_on_device, module, arguments), *_token_passes(module)])
    return (_listed_order(module, blocks, points, found), ()) if isinstance(found, Exception) else found


def widths_without_weights(module: torch.nn.Module, points: Sequence[HookPoint]) -> tuple[int, ...]:
    """The widths of hook points, from a forward pass of token ids on the meta device; empty if no such pass can run.

    Args:
        module: the model.
        points: the hook points.

    Raises:
        LayersimError: a module does not run exactly once in a forward pass.
    """
    found = _shown_by(module, points, _token_passes(module))
    return () if isinstance(found, Exception) else found[1]


def _shown_by(module: torch.nn.Module, points: Sequence[HookPoint], passes: Sequence[Callable[[], Any]]) -> Order | Exception:
    """Order and widths of hook points, from the first forward pass that runs. Raises the last failure if none does."""
    modules = {point.module: module.get_submodule(point.module) for point in points}
    failed = Exception("no forward pass")
    for run in passes:
        try:
            return firing_order(points, modules, run)
        except LayersimError:
            raise
        except FAILURES as error:
            failed = error
    return failed


def _on_device(module: torch.nn.Module, arguments: Arguments) -> Any:
    """Run the module on the arguments, moved to the device of its weights."""
    args, options = arguments
    # Masks are computed from values, which meta tensors do not have. Masks of four axes are in their final form.
    given = {name: value for name, value in options.items() if not name.endswith("attention_mask") or value.dim() == 4}
    return call_on(device_of(module), module, args, given)


def _token_passes(module: torch.nn.Module) -> list[Callable[[], Any]]:
    """Arguments of forward passes of token ids, without a mask and with a 4D mask, which most decoders take as it is."""
    tokens, mask = torch.zeros(1, PROBE_POSITIONS, dtype=torch.long), torch.zeros(1, 1, PROBE_POSITIONS, PROBE_POSITIONS)
    options: dict[str, Any] = {**no_cache(module)}
    name = "attention_mask"
    if encoder_and_decoder(module):
        options, name = options | {"decoder_input_ids": tokens}, "decoder_attention_mask"
    return [partial(_on_device, module, ((tokens,), options | more)) for more in ({}, {name: mask})]


def _listed_order(
    module: torch.nn.Module, blocks: Sequence[str], points: Sequence[HookPoint], failed: Exception
) -> tuple[int, ...]:
    """The hook points in the order of `lsim.sites`, the order of computation.

    Raises:
        LayersimError: a point is not a listed site, so its place in the order is unknown.
    """
    place: dict[tuple[str, bool], int] = {}
    for site in site_map(module, blocks).sites:
        place.setdefault((site.point.module, site.point.incoming), len(place))
    strange = [point for point in points if (point.module, point.incoming) not in place]
    if strange:
        raise LayersimError(
            f"`at` names {strange[0].name}, whose place in the forward pass cannot be found without the model's weights "
            f"({type(failed).__name__}: {str(failed)[:160]}). Use a site that lsim.sites(model) lists."
        )
    return tuple(sorted(range(len(points)), key=lambda number: place[points[number].module, points[number].incoming]))
