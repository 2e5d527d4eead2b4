"""Sites of Hugging Face and plain torch models, by the layouts of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .blocks import final_norm, head_counts, is_last_stack, layout_of, lists_of_blocks, module_sites, nearest_config
from .hook_points import HEAD_FAMILIES, SITE_NAMES, HookPoint, Part, Site, SiteMap, StreamSum, fused_parts, site_name
from .layouts import BlockLayout, ModuleTensor, input_of, output_of

UNKNOWN = "its architecture is not in the table of hook points; name its modules by their paths"
NO_NORM = "it has no final norm that reads every position"


# Of blocks without a row in the table.
UNKNOWN_LAYOUT = BlockLayout((), {}, sums=(), final=(), lacks=dict.fromkeys(SITE_NAMES, UNKNOWN))


def module_site_map(
    module: torch.nn.Module, blocks: Sequence[str], watched: Mapping[str, BlockLayout] | None = None
) -> SiteMap:
    """The sites of a Hugging Face or plain torch model.

    Args:
        module: the model.
        blocks: module paths of its blocks.
        watched: layouts of blocks that a forward pass has shown, by path, for blocks that are missing in the table.
    """
    watched = watched or {}
    stacks = {path: stack for stack, path in lists_of_blocks(module).items()}
    lists: dict[str, list[str]] = {}
    for block in blocks:
        lists.setdefault(block.rpartition(".")[0], []).append(block)
    layouts = {path: _layout(module, own) for path, own in lists.items()}
    lacks: dict[str, str] = {}
    sites: list[Site] = []
    sums: list[StreamSum] = []
    if any(layouts[path] is None and path not in stacks for path in lists):
        # Modules that may not be blocks.
        first, *names = module_sites(blocks)
        sites = [Site(HookPoint(first, blocks[0], True), "resid_pre", first=True)]
        sites += [Site(HookPoint(name, path), "resid_post") for name, path in zip(names, blocks, strict=True)]
        lacks, lists = dict.fromkeys(SITE_NAMES, UNKNOWN), {}
    for parent, own in lists.items():
        table = layouts[parent]
        layout = table or UNKNOWN_LAYOUT
        by_block = [layout if table is not None else watched.get(path, layout) for path in own]
        prefix = f"{stacks[parent]}." if stacks.get(parent) else ""
        lacks |= dict.fromkeys(SITE_NAMES, "its blocks have none") | {"ln_final": NO_NORM} | dict(layout.lacks)
        for block_layout in by_block:
            lacks |= dict(block_layout.lacks)
        config = nearest_config(module, own[0])
        fused = layout.fused(config) if callable(layout.fused) else layout.fused
        more = stack_sites(prefix, own, by_block, head_counts(config, layout.head_count), fused)
        sites, sums = sites + more[0], sums + more[1]
        ends = prefix == "encoder." or is_last_stack(module, own)
        final = final_norm(module, own[0], layout) if ends else None
        if final is not None:
            sites.append(Site(HookPoint(site_name("ln_final", 0, prefix), final), "ln_final"))
    have = {site.family for site in sites}
    return SiteMap(
        type(module).__name__,
        tuple(sites),
        {family: reason for family, reason in lacks.items() if family not in have},
        tuple(sums),
        lambda name: point_at(module, name),
        tuple(name for name, _ in module.named_modules() if name),
    )


def _layout(module: torch.nn.Module, blocks: Sequence[str]) -> BlockLayout | None:
    """The layout of all blocks in a list; None if it is unknown or the blocks differ."""
    found = [layout_of(module.get_submodule(path), nearest_config(module, path)) for path in blocks]
    numbered = all(path.rpartition(".")[2].isdecimal() for path in blocks)
    return found[0] if numbered and all(layout is found[0] for layout in found) else None


def _point(name: str, path: str, tensor: ModuleTensor, part: Part | None = None) -> HookPoint:
    """The hook point of a tensor in a block, by default named after its module."""
    module = f"{path}.{tensor.path}".rstrip(".")
    own_name = module + ".input" * tensor.incoming
    if tensor.multiplier != 1.0:
        own_name = f"{tensor.multiplier:g} {own_name}"
    return HookPoint(name or own_name, module, tensor.incoming, part, multiplier=tensor.multiplier)


def stack_sites(
    prefix: str, blocks: Sequence[str], layouts: Sequence[BlockLayout], heads: tuple[int, int], fused: str
) -> tuple[list[Site], list[StreamSum]]:
    """The sites and stream sums in the blocks of one stack, without the final norm.

    Args:
        prefix: prefix of the site names; "" in a model with one stack.
        blocks: module paths of the blocks, which end in their numbers.
        layouts: layout of each block.
        heads: number of heads and of key-value heads; zero if unknown.
        fused: see `BlockLayout.fused`.
    """
    sites: list[Site] = []
    sums: list[StreamSum] = []
    for path, layout in zip(blocks, layouts, strict=True):
        tensors = {"resid_pre": input_of(""), "resid_post": output_of(""), **layout.tensors}
        number = int(path.rpartition(".")[2])
        points: dict[str, HookPoint] = {}
        for family in SITE_NAMES:
            if family not in tensors or (family in "qkv" and fused and not heads[0]):
                continue
            part: Part | None = None
            count = heads[family in "kv"] if family in HEAD_FAMILIES else 0
            each = tuple(Part((count, -1), (head,)) for head in range(count))
            if family in "qkv" and fused:
                part, each = fused_parts(fused, family, *heads)
            points[family] = _point(site_name(family, number, prefix), path, tensors[family], part)
            first = family == "resid_pre" and path == blocks[0]
            sites.append(Site(points[family], family, number, each, first))
        for total, terms in layout.sums:
            if points.keys() >= {term for term in (total, *terms) if isinstance(term, str)}:
                whole, *parts = (points[term] if isinstance(term, str) else _point("", path, term) for term in (total, *terms))
                sums.append(StreamSum(whole, tuple(parts)))
    return sites, sums


def point_at(module: torch.nn.Module, name: str) -> HookPoint | None:
    """The hook point of a module's output ("path") or input ("path.input"); None without such a module."""
    for path, incoming in ((name, False), (name.removesuffix(".input"), name.endswith(".input"))):
        try:
            found = module.get_submodule(path) if path else None
        except AttributeError:
            continue
        if found is not None and not isinstance(found, torch.nn.ModuleList | torch.nn.ModuleDict):
            return HookPoint(name, path, incoming)
    return None
