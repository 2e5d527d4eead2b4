"""Resolves `at=`: block indices, families, names, patterns and functions become hook points."""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import is_available

from ..core.arguments import Layer
from ..core.distributed import weight_peers
from ..core.errors import LayersimError
from ..core.wording import brief
from .anatomy import Anatomy
from .blocks import anatomy_of, choose_blocks, choose_stacks, has_encoder_positions, with_blocks
from .hook_points import HEAD_FAMILIES, SITE_NAMES, HookPoint, Site, SiteMap, StreamSum, distinct_points
from .module_sites import module_site_map
from .transformer_lens import transformer_lens_site_map

At = str | int | Callable[[str], bool]
# A head of a site of heads, or a run of another module, which may run several times in a forward pass.
_NUMBERED = re.compile(r"(.+)\[(\d+)\]$")


def site_map(module: torch.nn.Module, anatomy: Anatomy) -> SiteMap:
    """The sites of a model.

    Args:
        module: a TransformerLens, Hugging Face or other torch model.
        anatomy: what lies where in it. A TransformerLens model describes its own blocks.
    """
    is_transformer_lens = anatomy.library == "transformer_lens"
    return transformer_lens_site_map(module) if is_transformer_lens else module_site_map(module, anatomy)


def _sites_of_blocks(module: torch.nn.Module, blocks: Sequence[str]) -> SiteMap:
    """The sites of some blocks of a model that is not opened."""
    return site_map(module, with_blocks(module, anatomy_of(module), blocks, named=True))


def find_points(
    module: torch.nn.Module, blocks: Sequence[str], at: Layer | At | Sequence[Layer | At], per_head: bool = False
) -> tuple[HookPoint, ...]:
    """The hook points that `at=` selects.

    Families are in the order of computation, block by block, even if several are named. Names are in the order given. Patterns
    and functions are matched against the sites of all families; if none matches, against the other hook points of a
    TransformerLens model, or the module paths of another model.

    Args:
        module: the model.
        blocks: module paths of its blocks, as `find_stacks` gives them; unused for TransformerLens models.
        at: the index of a block, whose output is read (negative from the end); a family, such as "attn_out", or
            "encoder.attn_out" for one stack; a TransformerLens name, with `[5]` for head 5, or a module path; a name with `[1]`
            for the second run of a module that runs several times; a pattern with `*`; a function that is True for the names to
            read; or a list of these.
        per_head: whether to return one hook point for each head.

    Raises:
        LayersimError: a name is unknown, or the model lacks a family.
    """
    return points_at(_sites_of_blocks(module, blocks), at, per_head)


def points_at(sites: SiteMap, at: Any, per_head: bool = False) -> tuple[HookPoint, ...]:
    """The hook points among the sites of a model that `at=` selects; see `find_points`."""
    outputs = [site.point.name for site in sites.of_families(["resid_post"]) if not site.first]
    items: list[Any] = []
    for item in items_of(at):
        items.append(outputs[block_number(item, outputs, "at")] if isinstance(item, int) else item)
    families = [item for item in items if isinstance(item, str) and sites.is_family(item)]
    if not items:
        raise LayersimError(f"`at` is {brief(at)}; it must name one site or more.")
    for family in families:
        if not sites.of_families([family]):
            stack, _, family_in_stack = family.rpartition(".")
            reason = sites.lacks.get(family_in_stack, f"the blocks of its {stack} have none")
            raise LayersimError(
                f"`at` is {family!r}, which {sites.model} does not have: {reason}. It has {', '.join(sites.families())}."
            )
    selected: list[Site] = []
    for item in items:
        if item not in families:
            selected += _sites_matching(sites, item)
        elif item == families[0]:
            # All families together, at the place of the first.
            selected += sites.of_families(families)
    points: list[HookPoint] = []
    for site in selected:
        if per_head:
            points += _by_head(site)
        else:
            points.append(site.point)
    # A family and a pattern may select the same site.
    return distinct_points(points)


def items_of(at: Any) -> list[Any]:
    """The argument `at` as a list, in which integers of NumPy are ints."""
    at = as_int(at)
    is_single = isinstance(at, str | int) or callable(at)
    return [at] if is_single else [as_int(item) for item in at]


def as_int(item: Any) -> Any:
    """An integer of NumPy or another library as an int; anything else is unchanged."""
    if isinstance(item, bool):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item


def stream_sums(module: torch.nn.Module, blocks: Sequence[str], families: Iterable[str]) -> tuple[StreamSum, ...]:
    """The additions to the residual stream (`StreamSum`) that involve a site of some families.

    An example is resid_pre + attn_out = resid_mid.

    They follow from the architecture. If activations do not satisfy a sum, a site reads another tensor than its name says.

    Args:
        module: the model.
        blocks: module paths of its blocks.
        families: families, or names of sites.
    """
    return sums_with(_sites_of_blocks(module, blocks), families)


def sums_with(sites: SiteMap, families: Iterable[str]) -> tuple[StreamSum, ...]:
    """The stream sums among the sites of a model that involve a site of some families; see `stream_sums`."""
    chosen = set(families)
    names = {site.point.name for site in sites.sites if site.family in chosen or site.point.name in chosen}
    sums: list[StreamSum] = []
    for stream_sum in sites.sums:
        names_in_sum = {point.name for point in (stream_sum.total, *stream_sum.terms)}
        if names & names_in_sum:
            sums.append(stream_sum)
    return tuple(sums)


def _by_head(site: Site) -> list[HookPoint]:
    """The hook point of each head of a site; of a single head, its own.

    Raises:
        LayersimError: the site has no heads.
    """
    if site.heads:
        return [site.head(number) for number in range(len(site.heads))]
    if _NUMBERED.match(site.point.name):
        return [site.point]
    raise LayersimError(
        f"`per_head` is True, but {site.point.name} has no heads; `at` must name sites of {', '.join(HEAD_FAMILIES)}, and the "
        "configuration must give the number of heads."
    )


def _sites_matching(sites: SiteMap, item: str | Callable[[str], bool]) -> list[Site]:
    """The sites and other hook points that a name, pattern or function selects.

    Raises:
        LayersimError: no hook point is selected.
    """
    site_by_name = {site.point.name: site for site in sites.sites}
    if not isinstance(item, str) and (not callable(item) or isinstance(item, type)):
        raise LayersimError(
            f"`at` holds {brief(item)}; it must be names or patterns of sites, numbers of blocks, or a function of a name."
        )
    if isinstance(item, str):
        site = _site_called(sites, site_by_name, item)
        if site is not None:
            return [site]
    matches: Callable[[str], bool] = item if callable(item) else lambda name: fnmatch.fnmatchcase(name, item)
    for names in (site_by_name, sites.other_names):
        # Names that read the same tensor count once.
        by_tensor: dict[tuple[object, ...], Site] = {}
        for name in names:
            site = _site_called(sites, site_by_name, name) if matches(name) else None
            if site is not None:
                by_tensor[_tensor_key(site.point)] = site
        if by_tensor:
            return list(by_tensor.values())
    raise _unknown_name(sites, site_by_name, item)


def _site_called(sites: SiteMap, site_by_name: dict[str, Site], name: str) -> Site | None:
    """The site, head or other hook point called `name`; None if there is none.

    Args:
        sites: the sites of the model.
        site_by_name: the same sites by the names of their hook points.
        name: the name.

    Raises:
        LayersimError: the site and TransformerLens's hook point of this name are different tensors, or it has no such head.
    """
    hook_point = sites.by_name(name)
    site = site_by_name.get(name)
    if site is None and hook_point is not None:
        return Site(hook_point, "")
    if site is None:
        return _numbered_site(sites, site_by_name, name)
    if hook_point is not None and _tensor_key(hook_point) != _tensor_key(site.point):
        raise LayersimError(
            f"`at` is {name!r}; this hook point of the {sites.model} and the family {site.family!r} are different tensors. "
            f"Use at={site.family!r} for the family, which is read at {site.point.module}."
        )
    return site


def _numbered_site(sites: SiteMap, site_by_name: dict[str, Site], name: str) -> Site | None:
    """The head of a site or the run of a module that a name with `[5]` means; None if the name means neither.

    Raises:
        LayersimError: the site has no such head.
    """
    match = _NUMBERED.match(name)
    if match is None:
        return None
    whole_name = match[1]
    number = int(match[2])
    whole = _site_called(sites, site_by_name, whole_name)
    if whole is None:
        return None
    if number < len(whole.heads):
        return Site(whole.head(number), "")
    if not whole.heads and whole.family not in HEAD_FAMILIES:
        return Site(replace(whole.point, name=name, run=number), "")
    reason = "the configuration names no number of heads"
    if whole.heads:
        reason = f"{whole_name} has heads 0 to {len(whole.heads) - 1}"
    raise LayersimError(f"`at` is {name!r}, a head that the model does not have; {reason}.")


def _tensor_key(point: HookPoint) -> tuple[object, ...]:
    """A key that is equal for two hook points if they read the same tensor."""
    part = point.part
    return point.module, point.incoming, point.run, None if part is None else (part.shape, str(part.index))


def _unknown_name(sites: SiteMap, site_by_name: dict[str, Site], item: str | Callable[[str], bool]) -> LayersimError:
    """The error for a name, pattern or function that selects no hook point."""
    families = ", ".join(sites.families())
    if not isinstance(item, str):
        return LayersimError(
            f"`at` is a function that is False for all names, which selects no hook point of {sites.model}; its families are "
            f"{families}, and lsim.sites(model) lists its names."
        )
    suggestions: list[str] = []
    for name, site in site_by_name.items():
        # The end of a TransformerLens name, such as hook_z, stands for a family.
        if name.rpartition(".")[2] == item and site.family not in suggestions:
            suggestions.append(site.family)
    if not suggestions:
        names = list(dict.fromkeys([*sites.families(), *site_by_name, *sites.other_names]))
        suggestions = difflib.get_close_matches(item, names, n=3)
    if suggestions:
        remedy = f"did you mean {' or '.join(map(repr, suggestions))}?"
    else:
        remedy = f"its families are {families}, and lsim.sites(model) lists its names."
    return LayersimError(f"`at` is {item!r}, which selects no hook point of {sites.model}; {remedy}")


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
    numbers: list[int] = []
    for place, name in enumerate(names):
        match = _BLOCK.match(name)
        numbers.append(place if match is None else int(match[1]))
    if isinstance(layer, int) and not isinstance(layer, bool):
        if layer in numbers:
            return numbers.index(layer)
        if -len(names) <= layer < 0:
            return layer % len(names)
    raise LayersimError(
        f"`{argument}` names block {layer!r}; it must be {numbers[0]} to {numbers[-1]}, a negative index from the end, or a "
        f"name such as {names[0]}."
    )


def block_numbers(layers: Layer | Sequence[Layer], names: Sequence[str], argument: str) -> tuple[int, ...]:
    """Indices of one or several blocks in the list of blocks that are read, in the order given.

    Each is found by `block_number`.

    Raises:
        LayersimError: no block is given, one is given twice, or there is no such block.
    """
    items = items_of(layers)
    numbers = tuple(block_number(item, names, argument) for item in items)
    if not numbers or len(set(numbers)) < len(numbers):
        raise LayersimError(f"`{argument}` is {items}; it must name one block or more, each once.")
    return numbers


def blocks_to_read(module: torch.nn.Module, anatomy: Anatomy, layers: list[str] | None, at: Any) -> list[str] | None:
    """Module paths of the blocks that `layers` or `at` chooses; None for the default blocks.

    A name with a stack or a stage chooses this stack of an encoder-decoder or of a model of stages. Families without one belong
    to the blocks that are read by default. Several stages can be read in one call, with names of their stages. In a model with
    unknown blocks, the modules that `at` names are read in place of blocks.

    Args:
        module: the model.
        anatomy: what lies where in it.
        layers: the paths that the user names; then no other stack can be read. None to find them by the layout.
        at: see `find_points`; None for the residual layers.

    Raises:
        LayersimError: `at` names no site, sites of both stacks, sites outside the stack of `layers`, or cross-attention sites
            at the encoder's positions.
    """
    if at is None or anatomy.library == "transformer_lens":
        return layers
    items = items_of(at)
    if anatomy.kind not in ("encoder-decoder", "stages"):
        has_known_blocks = layers is not None or (anatomy.known_stacks and anatomy.kind != "towers")
        return layers if has_known_blocks else _modules_named(module, items)
    # Indices of blocks, and families without a stack, belong to the blocks that are read by default.
    items_of_stacks = [item for item in items if not isinstance(item, int) and item not in SITE_NAMES]
    if not items_of_stacks:
        return layers
    default_blocks = choose_blocks(module, anatomy, layers)
    has_several_stacks = len(anatomy.known_stacks) > 1
    possible_blocks = choose_stacks(module, anatomy, None) if has_several_stacks else default_blocks
    modules = [point.module for point in points_at(site_map(module, possible_blocks), items_of_stacks)]
    for path in modules:
        if has_encoder_positions(path):
            raise LayersimError(
                f"`at` names {path} inside cross-attention, which has an activation for each position of the encoder. Use "
                "'encoder.ln_final' or 'decoder.cross_attn_out'."
            )
    default_stack = default_blocks.stack
    paths_read = modules if len(items_of_stacks) == len(items) else [*modules, *default_blocks.blocks]
    stacks = anatomy.stacks_with(paths_read) or [default_stack]
    if layers is not None and stacks != [default_stack]:
        raise LayersimError(
            f"`at` is {brief(at)}, with sites of {' and '.join(stacks)}, but `layers` has blocks of "
            f"{default_stack or 'several stacks or none'}; both must name the same stack."
        )
    if len(stacks) == 1:
        [stack] = stacks
        return layers if stack == default_stack else list(anatomy.blocks_of(stack))
    if "encoder" in stacks:
        raise LayersimError(
            f"`at` is {brief(at)}, with sites of {' and '.join(stacks)}; it must name sites of one stack, such as "
            "'encoder.attn_out'."
        )
    return layers


def _modules_named(module: torch.nn.Module, items: list[At]) -> list[str] | None:
    """Paths of the modules that names and patterns select; None if an item selects none."""
    paths: list[str] = []
    for path, submodule in module.named_modules():
        # Neither the model itself nor lists of modules.
        if path and not isinstance(submodule, torch.nn.ModuleList | torch.nn.ModuleDict):
            paths.append(path)
    selected: list[str] = []
    for item in items:
        matches = fnmatch.filter(paths, _module_pattern(item)) if isinstance(item, str) else []
        if not matches:
            return None
        selected += matches
    return list(dict.fromkeys(selected))


def _module_pattern(name: str) -> str:
    """The path of a module, or a pattern of paths, in the name of its output, of its input or of one of its runs."""
    match = _NUMBERED.match(name)
    if match is not None:
        name = match[1]
    return name.removesuffix(".input")


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
    axes = _sharded_axes(module)
    sharded = [point.name for point in points if _is_sharded(module, point, axes)]
    if sharded:
        names = ", ".join(sharded[:3])
        if len(sharded) > 3:
            names += f" and {len(sharded) - 3} more"
        raise LayersimError(
            f"`at` names {names}, but tensor parallelism splits these activations over the ranks "
            f"{sorted(peers)}. `at` must name outputs of attention, MLPs or blocks, which each rank holds whole."
        )


def _sharded_axes(module: torch.nn.Module) -> dict[str, int]:
    """The axis along which tensor parallelism splits each weight, by module path."""
    gathered: set[int] = set()
    if is_available():
        from torch.distributed.fsdp import FSDPModule

        # FSDP gathers weights before a module runs, so that activations are whole.
        fsdp_modules = [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
        for fsdp_module in fsdp_modules:
            for parameter in fsdp_module.parameters():
                mesh_axes = getattr(getattr(parameter, "device_mesh", None), "ndim", 1)
                # On a mesh of more axes, tensor parallelism is one of them.
                if mesh_axes == 1:
                    gathered.add(id(parameter))
    axes: dict[str, int] = {}
    for path, submodule in module.named_modules():
        for parameter in submodule.parameters(recurse=False):
            if id(parameter) in gathered:
                continue
            shard_axes = [placement.dim for placement in getattr(parameter, "placements", ()) if placement.is_shard()]
            if shard_axes and parameter.dim() > 1:
                axes[path] = shard_axes[-1]
    return axes


def _is_sharded(module: torch.nn.Module, point: HookPoint, axes: dict[str, int]) -> bool:
    """Whether a hook point lies between a column-sharded and a row-sharded matrix."""
    names = point.module.split(".")
    if not any(name.isdecimal() for name in names[:-1]):
        # Embedding, final norm and head, whose outputs are gathered; or a block itself.
        return False
    if point.module in axes:
        return (axes[point.module] == 0) != point.incoming
    parent = ".".join(names[:-1])
    has_sharded_sibling = any(path.rpartition(".")[0] == parent for path in axes)
    if not has_sharded_sibling:
        return False
    # A block that holds the matrices of its MLP itself, as that of OPT, has norms and attention beside them.
    is_child_of_block = names[-2].isdecimal()
    if not is_child_of_block:
        return True
    has_weights = next(module.get_submodule(point.module).parameters(), None) is not None
    return not has_weights
