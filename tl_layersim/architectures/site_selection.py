"""Resolves `at=`: block indices, families, names, patterns and functions become hook points."""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import is_available

from ..core.arguments import Layer
from ..core.distributed import weight_peers
from ..core.errors import LayersimError
from ..core.wording import brief
from .blocks import (
    blocks_in,
    encoder_and_decoder,
    find_blocks,
    find_stacks,
    has_both_towers,
    has_encoder_positions,
    lists_by_stage,
    lists_of_blocks,
    stack_of,
    stacks_with,
)
from .hook_points import HEAD_FAMILIES, SITE_NAMES, HookPoint, Site, SiteMap, StreamSum, distinct_points
from .layouts import BlockLayout
from .module_sites import module_site_map
from .transformer_lens import is_transformer_lens, transformer_lens_site_map

At = str | int | Callable[[str], bool]
# A head of a site of heads, or a run of another module, which may run several times in a forward pass.
_NUMBERED = re.compile(r"(.+)\[(\d+)\]$")


def site_map(module: torch.nn.Module, blocks: Sequence[str], watched: Mapping[str, BlockLayout] | None = None) -> SiteMap:
    """The sites of a model.

    Args:
        module: a TransformerLens, Hugging Face or other torch model.
        blocks: module paths of its blocks; unused for TransformerLens models.
        watched: see `module_site_map`.
    """
    return transformer_lens_site_map(module) if is_transformer_lens(module) else module_site_map(module, blocks, watched)


def find_points(
    module: torch.nn.Module,
    blocks: Sequence[str],
    at: Layer | At | Sequence[Layer | At],
    per_head: bool = False,
    watched: Mapping[str, BlockLayout] | None = None,
) -> tuple[HookPoint, ...]:
    """The hook points that `at=` selects.

    Families are in the order of computation, block by block, even if several are named. Names are in the order given. Patterns
    and functions are matched against the sites of all families; if none matches, against the other hook points of a
    TransformerLens model, or the module paths of another model.

    Args:
        module: the model.
        blocks: module paths of its blocks, as `find_blocks` or `find_stacks` gives them.
        at: the index of a block, whose output is read (negative from the end); a family, such as "attn_out", or
            "encoder.attn_out" for one stack; a TransformerLens name, with `[5]` for head 5, or a module path; a name with `[1]`
            for the second run of a module that runs several times; a pattern with `*`; a function that is True for the names to
            read; or a list of these.
        per_head: whether to return one hook point for each head.
        watched: see `module_site_map`.

    Raises:
        LayersimError: a name is unknown, or the model lacks a family.
    """
    known = site_map(module, blocks, watched)
    outputs = [site.point.name for site in known.of_families(["resid_post"]) if not site.first]
    items = [outputs[block_number(item, outputs, "at")] if isinstance(item, int) else item for item in items_of(at)]
    families = [item for item in items if isinstance(item, str) and known.is_family(item)]
    if not items:
        raise LayersimError(f"`at` is {brief(at)}; it must name one site or more.")
    for family in families:
        if not known.of_families([family]):
            stack, _, own = family.rpartition(".")
            raise LayersimError(
                f"`at` is {family!r}, which {known.model} does not have: "
                f"{known.lacks.get(own, f'the blocks of its {stack} have none')}. It has {', '.join(known.families())}."
            )
    found: list[Site] = []
    for item in items:
        if item not in families:
            found += _named(known, item)
        elif item == families[0]:
            # All families together, at the place of the first.
            found += known.of_families(families)
    points = [point for site in found for point in (_by_head(site) if per_head else [site.point])]
    # A family and a pattern may select the same site.
    return distinct_points(points)


def items_of(at: Any) -> list[Any]:
    """The argument `at` as a list, in which integers of NumPy are ints."""
    at = as_int(at)
    return [at] if isinstance(at, str | int) or callable(at) else [as_int(item) for item in at]


def as_int(item: Any) -> Any:
    """An integer of NumPy or another library as an int; anything else is unchanged."""
    try:
        return item if isinstance(item, bool) else operator.index(item)
    except TypeError:
        return item


def stream_sums(
    module: torch.nn.Module, blocks: Sequence[str], families: Iterable[str], watched: Mapping[str, BlockLayout] | None = None
) -> tuple[StreamSum, ...]:
    """The additions to the residual stream (`StreamSum`) that involve a site of some families.

    An example is resid_pre + attn_out = resid_mid.

    They follow from the architecture. If activations do not satisfy a sum, a site reads another tensor than its name says.

    Args:
        module: the model.
        blocks: module paths of its blocks.
        families: families, or names of sites.
        watched: see `module_site_map`.
    """
    asked = set(families)
    known = site_map(module, blocks, watched)
    names = {site.point.name for site in known.sites if site.family in asked or site.point.name in asked}
    return tuple(one for one in known.sums if names & {point.name for point in (one.total, *one.terms)})


def _by_head(site: Site) -> list[HookPoint]:
    if site.heads or _NUMBERED.match(site.point.name):
        return [site.head(number) for number in range(len(site.heads))] or [site.point]
    raise LayersimError(
        f"`per_head` is True, but {site.point.name} has no heads; `at` must name sites of {', '.join(HEAD_FAMILIES)}, and the "
        "configuration must give the number of heads."
    )


def _named(known: SiteMap, item: str | Callable[[str], bool]) -> list[Site]:
    """The sites and other hook points that a name, pattern or function selects.

    Raises:
        LayersimError: no hook point is selected.
    """
    sites = {site.point.name: site for site in known.sites}
    if not isinstance(item, str) and (not callable(item) or isinstance(item, type)):
        raise LayersimError(
            f"`at` holds {brief(item)}; it must be names or patterns of sites, numbers of blocks, or a function of a name."
        )
    if isinstance(item, str) and (named := _site_called(known, sites, item)):
        return [named]
    matches: Callable[[str], bool] = item if callable(item) else lambda name: fnmatch.fnmatchcase(name, item)
    for names in (sites, known.other_names):
        found = [one for name in names if matches(name) and (one := _site_called(known, sites, name))]
        if found:
            return list({_tensor_of(one.point): one for one in found}.values())
    raise _unknown(known, sites, item)


def _site_called(known: SiteMap, sites: dict[str, Site], name: str) -> Site | None:
    """The site, head or other hook point called `name`; None if there is none.

    Raises:
        LayersimError: the site and TransformerLens's hook point of this name are different tensors, or it has no such head.
    """
    other, site = known.by_name(name), sites.get(name)
    if site is None:
        numbered = None if other is not None else _NUMBERED.match(name)
        whole = None if numbered is None else _site_called(known, sites, numbered[1])
        if numbered is None or whole is None:
            return None if other is None else Site(other, "")
        number, last = int(numbered[2]), len(whole.heads) - 1
        if number <= last:
            return Site(whole.head(number), "")
        if not whole.heads and whole.family not in HEAD_FAMILIES:
            return Site(replace(whole.point, name=name, run=number), "")
        has = f"{numbered[1]} has heads 0 to {last}" if whole.heads else "the configuration names no number of heads"
        raise LayersimError(f"`at` is {name!r}, a head that the model does not have; {has}.")
    if other is not None and _tensor_of(other) != _tensor_of(site.point):
        raise LayersimError(
            f"`at` is {name!r}; this hook point of the {known.model} and the family {site.family!r} are different tensors. "
            f"Use at={site.family!r} for the family, which is read at {site.point.module}."
        )
    return site


def _tensor_of(point: HookPoint) -> tuple[object, ...]:
    """A key that is equal for two hook points if they read the same tensor."""
    part = point.part
    return point.module, point.incoming, point.run, None if part is None else (part.shape, str(part.index))


def _unknown(known: SiteMap, sites: dict[str, Site], item: str | Callable[[str], bool]) -> LayersimError:
    """The error for a name, pattern or function that selects no hook point."""
    names = list(dict.fromkeys([*known.families(), *sites, *known.other_names]))
    near = difflib.get_close_matches(item, names, n=3) if isinstance(item, str) else []
    # The end of a TransformerLens name, such as hook_z, stands for a family.
    near = list(dict.fromkeys(one.family for name, one in sites.items() if name.rpartition(".")[2] == item)) or near
    return LayersimError(
        (f"`at` is {item!r}" if isinstance(item, str) else "`at` is a function that is False for all names")
        + f", which selects no hook point of {known.model}; "
        + (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"its families are {', '.join(known.families())}, and lsim.sites(model) lists its names."
        )
    )


_BLOCK = re.compile(r"(?:.*\.)?blocks\.(\d+)\.")


def block_number(layer: Layer, names: Sequence[str], argument: str) -> int:
    """Index of a block in the list of blocks that are read.

    Args:
        layer: index of the block (negative from the end), or the name of its output.
        names: output names of the blocks that are read.
        argument: name of the argument, for the message.

    Raises:
        LayersimError: there is no such block.

    Examples:
        >>> names = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
        >>> block_number(-1, names, "at"), block_number("blocks.0.hook_resid_post", names, "at")
        (1, 0)
    """
    layer = as_int(layer)
    if isinstance(layer, str) and layer in names:
        return names.index(layer)
    # Blocks that `open_model(layers=...)` chose keep the numbers of their names.
    own = [int(found[1]) if (found := _BLOCK.match(name)) else place for place, name in enumerate(names)]
    if isinstance(layer, int) and not isinstance(layer, bool):
        if layer in own:
            return own.index(layer)
        if -len(names) <= layer < 0:
            return layer % len(names)
    raise LayersimError(
        f"`{argument}` names block {layer!r}; it must be {own[0]} to {own[-1]}, a negative index from the end, or a "
        f"name such as {names[0]}."
    )


def block_numbers(layers: Layer | Sequence[Layer], names: Sequence[str], argument: str) -> tuple[int, ...]:
    """Indices of one or several blocks in the list of blocks that are read, in the order given.

    Each is found by `block_number`.

    Raises:
        LayersimError: no block is given, one is given twice, or there is no such block.
    """
    given = items_of(layers)
    numbers = tuple(block_number(layer, names, argument) for layer in given)
    if not numbers or len(set(numbers)) < len(numbers):
        raise LayersimError(f"`{argument}` is {given}; it must name one block or more, each once.")
    return numbers


def blocks_to_read(module: torch.nn.Module, layers: list[str] | None, at: Any) -> list[str] | None:
    """Module paths of the blocks that `layers` or `at` chooses; None for the default blocks.

    A name with a stack or a stage chooses this stack of an encoder-decoder or of a model of stages. Families without one belong
    to the blocks that are read by default. Several stages can be read in one call, with names of their stages. In a model with
    unknown blocks, the modules that `at` names are read in place of blocks.

    Args:
        module: the model.
        layers: the paths that the user names; then no other stack can be read. None to find them by the layout.
        at: see `find_points`; None for the residual layers.

    Raises:
        LayersimError: `at` names no site, sites of both stacks, sites outside the stack of `layers`, or cross-attention sites
            at the encoder's positions.
    """
    if at is None or is_transformer_lens(module):
        return layers
    lists, items = lists_of_blocks(module), items_of(at)
    if not encoder_and_decoder(module) and not lists_by_stage(module):
        known = layers is not None or (lists and not has_both_towers(module))
        return layers if known else _modules_named(module, items)
    others = [item for item in items if not isinstance(item, int) and item not in SITE_NAMES]
    if not others:
        return layers
    home = find_blocks(module, layers)
    modules = [point.module for point in find_points(module, find_stacks(module, None) if len(lists) > 1 else home, others)]
    crossing = [path for path in modules if has_encoder_positions(path)]
    if crossing:
        raise LayersimError(
            f"`at` names {crossing[0]} inside cross-attention, which has an activation for each position of the encoder. Use "
            "'encoder.ln_final' or 'decoder.cross_attn_out'."
        )
    read = stack_of(module, home)
    reached = stacks_with(module, [*modules, *home] if len(others) < len(items) else modules) or [read]
    if (layers is not None and reached != [read]) or ("encoder" in reached and len(reached) > 1):
        raise LayersimError(
            f"`at` is {brief(at)}, with sites of {' and '.join(reached)}"
            + (
                f", but `layers` has blocks of {read or 'several stacks or none'}; both must name the same stack."
                if layers
                else "; it must name sites of one stack, such as 'encoder.attn_out'."
            )
        )
    return layers if len(reached) > 1 or reached == [read] else blocks_in(module, lists[reached[0]])


def _modules_named(module: torch.nn.Module, items: list[At]) -> list[str] | None:
    """Paths of the modules that names and patterns select; None if an item selects none."""
    own = [
        name for name, sub in module.named_modules() if name and not isinstance(sub, torch.nn.ModuleList | torch.nn.ModuleDict)
    ]
    matches = [fnmatch.filter(own, _module_pattern(item)) if isinstance(item, str) else [] for item in items]
    return list(dict.fromkeys(name for found in matches for name in found)) if all(matches) else None


def _module_pattern(name: str) -> str:
    """The path of a module, or a pattern of paths, in the name of its output, of its input or of one of its runs."""
    numbered = _NUMBERED.match(name)
    return (name if numbered is None else numbered[1]).removesuffix(".input")


def refuse_sharded_sites(module: torch.nn.Module, points: Iterable[HookPoint]) -> None:
    """Raise an error if tensor parallelism splits the activations of a hook point.

    Each process holds a part of the queries, keys, values, head outputs and MLP hidden activations. The outputs of attention,
    MLPs and blocks are added over the processes, so each holds them whole.

    Args:
        module: the model.
        points: the hook points that are to be read.

    Raises:
        LayersimError: names the hook points.
    """
    peers = weight_peers(module)
    if not peers:
        return
    places = _sharded_axes(module)
    parted = [point.name for point in points if _is_parted(module, point, places)]
    if parted:
        more = f" and {len(parted) - 3} more" if len(parted) > 3 else ""
        raise LayersimError(
            f"`at` names {', '.join(parted[:3])}{more}, but tensor parallelism splits these activations over the ranks "
            f"{sorted(peers)}. `at` must name outputs of attention, MLPs or blocks, which each rank holds whole."
        )


def _sharded_axes(module: torch.nn.Module) -> dict[str, int]:
    """The axis along which tensor parallelism splits each weight, by module path."""
    gathered: set[int] = set()
    if is_available():
        from torch.distributed.fsdp import FSDPModule

        # FSDP gathers weights before a module runs, so that activations are whole.
        fully = [sub for sub in module.modules() if isinstance(sub, FSDPModule)]
        gathered = {
            id(p) for sub in fully for p in sub.parameters() if getattr(getattr(p, "device_mesh", None), "ndim", 1) == 1
        }
    axes: dict[str, int] = {}
    for path, sub in module.named_modules():
        for parameter in sub.parameters(recurse=False):
            if id(parameter) in gathered:
                continue
            dims = [placement.dim for placement in getattr(parameter, "placements", ()) if placement.is_shard()]
            if dims and parameter.dim() > 1:
                axes[path] = dims[-1]
    return axes


def _is_parted(module: torch.nn.Module, point: HookPoint, axes: dict[str, int]) -> bool:
    """Whether a hook point lies between a column-sharded and a row-sharded matrix."""
    names = point.module.split(".")
    if not any(name.isdecimal() for name in names[:-1]):
        # Embedding, final norm and head, whose outputs are gathered; or a block itself.
        return False
    if point.module in axes:
        return (axes[point.module] == 0) != point.incoming
    parent = ".".join(names[:-1])
    beside = any(path.rpartition(".")[0] == parent for path in axes)
    # A block that holds the matrices of its MLP itself, as that of OPT, has norms and attention beside them.
    of_block = names[-2].isdecimal()
    return beside and not (of_block and next(module.get_submodule(point.module).parameters(), None) is not None)
