"""Sites of Hugging Face and plain torch models, by the layouts of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .anatomy import Anatomy
from .blocks import final_norm, head_counts, module_sites
from .hook_points import HEAD_FAMILIES, SITE_NAMES, HookPoint, Part, Site, SiteMap, StreamSum, fused_parts, site_name
from .layouts import BlockLayout, ModuleTensor, Term, input_of, output_of

NOT_IN_TABLE = "its architecture is not in the table of hook points; name its modules by their paths"
NO_NORM = "it has no final norm that reads every position"


# Of blocks without a row in the table.
UNKNOWN_LAYOUT = BlockLayout((), {}, sums=(), final=(), lacks=dict.fromkeys(SITE_NAMES, NOT_IN_TABLE))


def module_site_map(module: torch.nn.Module, anatomy: Anatomy) -> SiteMap:
    """The sites of the measured blocks of a Hugging Face or plain torch model.

    Args:
        module: the model.
        anatomy: what lies where in it.
    """
    blocks = anatomy.blocks
    watched = {} if anatomy.watched is None else anatomy.watched.layouts
    stacks = {stack.list_path: stack.name for stack in anatomy.known_stacks.values()}
    lists: dict[str, list[str]] = {}
    for block in blocks:
        lists.setdefault(block.rpartition(".")[0], []).append(block)
    layouts = {list_path: _common_layout(anatomy, paths) for list_path, paths in lists.items()}
    lacks: dict[str, str] = {}
    sites: list[Site] = []
    sums: list[StreamSum] = []
    if any(layouts[list_path] is None and list_path not in stacks for list_path in lists):
        # Modules that may not be blocks.
        input_name, *output_names = module_sites(blocks)
        sites.append(Site(HookPoint(input_name, blocks[0], True), "resid_pre", first=True))
        for name, path in zip(output_names, blocks, strict=True):
            sites.append(Site(HookPoint(name, path), "resid_post"))
        lacks = dict.fromkeys(SITE_NAMES, NOT_IN_TABLE)
        lists = {}
    for list_path, paths in lists.items():
        table_layout = layouts[list_path]
        layout = table_layout or UNKNOWN_LAYOUT
        block_layouts = [layout] * len(paths)
        if table_layout is None:
            block_layouts = [watched.get(path, layout) for path in paths]
        prefix = f"{stacks[list_path]}." if stacks.get(list_path) else ""
        lacks |= dict.fromkeys(SITE_NAMES, "its blocks have none")
        lacks["ln_final"] = NO_NORM
        for reasons in (layout.lacks, *(block_layout.lacks for block_layout in block_layouts)):
            lacks |= reasons
        config = anatomy.configs[paths[0]]
        fused = layout.fused(config) if callable(layout.fused) else layout.fused
        heads = head_counts(config, layout.head_count)
        sites_of_stack, sums_of_stack = stack_sites(prefix, paths, block_layouts, heads, fused)
        sites += sites_of_stack
        sums += sums_of_stack
        # An encoder ends in a norm of its own; of stages, only the last one does.
        may_end_in_norm = prefix == "encoder." or anatomy.is_last_stack(paths)
        norm_path = final_norm(module, paths[0], layout) if may_end_in_norm else None
        if norm_path is not None:
            sites.append(Site(HookPoint(site_name("ln_final", 0, prefix), norm_path), "ln_final"))
    present = {site.family for site in sites}
    return SiteMap(
        anatomy.model,
        tuple(sites),
        {family: reason for family, reason in lacks.items() if family not in present},
        tuple(sums),
        lambda name: point_at(module, name),
        tuple(name for name, _ in module.named_modules() if name),
    )


def _common_layout(anatomy: Anatomy, blocks: Sequence[str]) -> BlockLayout | None:
    """The layout of all blocks in a list; None if it is unknown or the blocks differ."""
    layouts = [anatomy.layouts[path] for path in blocks]
    are_numbered = all(path.rpartition(".")[2].isdecimal() for path in blocks)
    are_same = all(layout is layouts[0] for layout in layouts)
    return layouts[0] if are_numbered and are_same else None


def _point(name: str, path: str, tensor: ModuleTensor, part: Part | None = None) -> HookPoint:
    """The hook point of a tensor in a block, by default named after its module."""
    module = f"{path}.{tensor.path}".rstrip(".")
    if not name:
        name = f"{module}.input" if tensor.incoming else module
        if tensor.multiplier != 1.0:
            name = f"{tensor.multiplier:g} {name}"
    return HookPoint(name, module, tensor.incoming, part, multiplier=tensor.multiplier)


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
    head_count, key_value_head_count = heads
    sites: list[Site] = []
    sums: list[StreamSum] = []
    for path, layout in zip(blocks, layouts, strict=True):
        tensors = {"resid_pre": input_of(""), "resid_post": output_of(""), **layout.tensors}
        number = int(path.rpartition(".")[2])
        points: dict[str, HookPoint] = {}
        for family in SITE_NAMES:
            # The number of heads divides a fused projection.
            if family not in tensors or (family in "qkv" and fused and not head_count):
                continue
            part: Part | None = None
            count = 0
            if family in HEAD_FAMILIES:
                count = key_value_head_count if family in ("k", "v") else head_count
            head_parts = tuple(Part((count, -1), (head,)) for head in range(count))
            if family in "qkv" and fused:
                part, head_parts = fused_parts(fused, family, head_count, key_value_head_count)
            points[family] = _point(site_name(family, number, prefix), path, tensors[family], part)
            is_first = family == "resid_pre" and path == blocks[0]
            sites.append(Site(points[family], family, number, head_parts, is_first))
        for total, terms in layout.sums:
            families = {term for term in (total, *terms) if isinstance(term, str)}
            if points.keys() >= families:
                total_point = _point_of_term(total, path, points)
                term_points = tuple(_point_of_term(term, path, points) for term in terms)
                sums.append(StreamSum(total_point, term_points))
    return sites, sums


def _point_of_term(term: Term, path: str, points: Mapping[str, HookPoint]) -> HookPoint:
    """The hook point of a term of a sum in a block.

    Args:
        term: a family, or a tensor that belongs to none.
        path: path of the block.
        points: the hook points of the block, by family.
    """
    return points[term] if isinstance(term, str) else _point("", path, term)


def point_at(module: torch.nn.Module, name: str) -> HookPoint | None:
    """The hook point of a module's output ("path") or input ("path.input"); None without such a module."""
    for path, incoming in ((name, False), (name.removesuffix(".input"), name.endswith(".input"))):
        try:
            submodule = module.get_submodule(path) if path else None
        except AttributeError:
            continue
        # A list of modules is not called.
        if submodule is not None and not isinstance(submodule, torch.nn.ModuleList | torch.nn.ModuleDict):
            return HookPoint(name, path, incoming)
    return None
