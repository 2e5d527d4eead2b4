"""Sites of Hugging Face and plain torch models: module inputs and outputs, by the layout of the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .blocks import (
    blocks_in,
    final_norm,
    find_blocks,
    head_counts,
    is_last_stack,
    layout_of,
    lists_by_stack,
    locate,
    nearest_config,
)
from .layouts import TOWER_MODULES, BlockLayout, ModuleTensor, Term, input_of, output_of
from .points import HEAD_FAMILIES, SITE_NAMES, HookPoint, Part, Site, SiteMap, StreamSum, fused_parts, separate_heads, site_name

UNKNOWN = "its blocks are of an architecture whose hook points are not in the table: name its modules by their paths"
NO_NORM = "it has no final norm that reads every position"


@dataclass(frozen=True)
class BlockStack:
    """Consecutive blocks on one residual stream.

    Attributes:
        prefix: prefix of the site names; "" in a model with one stack.
        blocks: module paths of the blocks.
        numbers: indices of the blocks; empty if the modules may not be blocks.
    """

    prefix: str
    blocks: tuple[str, ...]
    numbers: tuple[int, ...]


def find_stacks(module: torch.nn.Module, layers: list[str] | None) -> list[str]:
    """Module paths of a model's blocks in all of its stacks: one, encoder and decoder, both towers, or all stages.

    Args:
        module: the model.
        layers: the paths that the user names; None to find them by the layout.

    Raises:
        LayersimError: see `find_blocks`.
    """
    if layers is not None:
        return find_blocks(module, layers)
    lists = list(_several_stacks(module))
    return [block for path in lists for block in blocks_in(module, path)] if lists else find_blocks(module, None)


def _several_stacks(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the module lists of blocks, each with its site prefix, in a model with several stacks; else empty."""
    towers = _towers(module)
    return {path: f"{stack}." for stack, path in lists_by_stack(module).items()} or (towers if len(towers) == 2 else {})


def _towers(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the module lists of blocks in CLIP's towers, each with its site prefix."""
    lists = [path for path, sub in module.named_modules() if isinstance(sub, torch.nn.ModuleList) and len(sub)]
    ends = {f".{child}.encoder.layers": f"{tower}." for tower, child in TOWER_MODULES.items()}
    return {path: prefix for end, prefix in ends.items() for path in lists if f".{path}".endswith(end)}


def _stacks(module: torch.nn.Module, blocks: Sequence[str]) -> Iterator[BlockStack]:
    """Group blocks by stack."""
    several = _several_stacks(module)
    lists: dict[str, list[str]] = {}
    for path in blocks:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    names = dict(module.named_modules())
    if all(isinstance(names.get(parent), torch.nn.ModuleList) for parent in lists):
        for parent, paths in lists.items():
            numbers = tuple(int(path.rpartition(".")[2]) for path in paths)
            known = parent in several or _layout(module, paths) is not None
            known = known or (len(lists) == 1 and locate(module, paths, True)[0][0].endswith(".hook_resid_pre"))
            yield BlockStack(several.get(parent, ""), tuple(paths), numbers if known else ())
    else:
        yield BlockStack("", tuple(blocks), ())


def _layout(module: torch.nn.Module, blocks: Sequence[str]) -> BlockLayout | None:
    """The common layout of some blocks; None if the table has none, or the layouts differ."""
    found = [layout_of(module.get_submodule(path), nearest_config(module, path)) for path in blocks]
    return found[0] if found and all(layout is found[0] for layout in found) else None


def module_site_map(module: torch.nn.Module, blocks: Sequence[str]) -> SiteMap:
    """The sites of a Hugging Face or plain torch model.

    Args:
        module: the model.
        blocks: module paths of its blocks.
    """
    sites: list[Site] = []
    sums: list[StreamSum] = []
    lacks: dict[str, str] = {}
    for stack in _stacks(module, blocks):
        layout = _layout(module, stack.blocks) if stack.numbers else None
        if layout is None:
            sites += _residual_sites(module, stack)
            lacks |= dict.fromkeys(SITE_NAMES, UNKNOWN)
            continue
        config = nearest_config(module, stack.blocks[0])
        heads = head_counts(config, layout.head_count)
        fused = layout.fused(config) if callable(layout.fused) else layout.fused
        lacks |= dict.fromkeys(SITE_NAMES, "its blocks have none") | {"ln_final": NO_NORM} | dict(layout.lacks)
        for number, path in zip(stack.numbers, stack.blocks, strict=True):
            sites += _block_sites(stack, number, path, layout, fused, heads)
            sums += _block_sums(stack, number, path, layout)
        ends = is_last_stack(module, list(stack.blocks)) or stack.prefix == "encoder."
        final = final_norm(module, stack.blocks[0], layout) if ends else None
        if final is not None:
            sites.append(Site(HookPoint(site_name("ln_final", 0, stack.prefix), final), "ln_final"))
    have = {site.family for site in sites}
    names = tuple(name for name, _ in module.named_modules() if name)
    return SiteMap(
        type(module).__name__,
        tuple(sites),
        {family: reason for family, reason in lacks.items() if family not in have},
        tuple(sums),
        lambda name: point_at(module, name),
        names,
    )


def _residual_sites(module: torch.nn.Module, stack: BlockStack) -> list[Site]:
    """The sites of a stack without a known layout, or of modules that may not be blocks."""
    if stack.numbers:
        pairs = zip(stack.numbers, stack.blocks, strict=True)
        return [
            site
            for number, path in pairs
            for site in (
                Site(
                    _point("resid_pre", stack, number, path, input_of("")), "resid_pre", number, first=path == stack.blocks[0]
                ),
                Site(_point("resid_post", stack, number, path, output_of("")), "resid_post", number),
            )
        ]
    names, _ = locate(module, list(stack.blocks), True)
    first = Site(HookPoint(names[0], stack.blocks[0], True), "resid_pre", first=True)
    return [first, *(Site(HookPoint(name, path), "resid_post") for name, path in zip(names[1:], stack.blocks, strict=True))]


def _tensors(layout: BlockLayout) -> dict[str, ModuleTensor]:
    """The tensor of each family of a block, in the order of computation."""
    tensors = {"resid_pre": input_of(""), "resid_post": output_of(""), **layout.tensors}
    return {family: tensors[family] for family in SITE_NAMES if family in tensors}


def _point(family: str, stack: BlockStack, number: int, path: str, tensor: ModuleTensor, part: Part | None = None) -> HookPoint:
    module = f"{path}.{tensor.path}".rstrip(".")
    return HookPoint(site_name(family, number, stack.prefix), module, tensor.incoming, part)


def _block_sites(
    stack: BlockStack, number: int, path: str, layout: BlockLayout, fused: str, heads: tuple[int, int]
) -> Iterator[Site]:
    for family, tensor in _tensors(layout).items():
        part: Part | None = None
        each: tuple[Part, ...] = ()
        if family in HEAD_FAMILIES:
            is_fused = bool(fused) and family != "z"
            if is_fused and not heads[0]:
                continue
            part, each = fused_parts(fused, family, *heads) if is_fused else (None, separate_heads(heads[family in "kv"]))
        first = family == "resid_pre" and path == stack.blocks[0]
        yield Site(_point(family, stack, number, path, tensor, part), family, number, each, first)


def _block_sums(stack: BlockStack, number: int, path: str, layout: BlockLayout) -> Iterator[StreamSum]:
    tensors = _tensors(layout)

    def point(term: Term) -> HookPoint:
        if isinstance(term, str):
            return _point(term, stack, number, path, tensors[term])
        module = f"{path}.{term.path}"
        return HookPoint(f"{module}.input" if term.incoming else module, module, term.incoming)

    for total, terms in layout.sums:
        yield StreamSum(point(total), tuple(point(term) for term in terms), number)


def point_at(module: torch.nn.Module, name: str) -> HookPoint | None:
    """The hook point of a module's output ("path") or input ("path.input"); None if there is no such module."""
    for path, incoming in ((name, False), (name.removesuffix(".input"), name.endswith(".input"))):
        try:
            found = module.get_submodule(path) if path else None
        except AttributeError:
            continue
        if found is not None and not isinstance(found, torch.nn.ModuleList | torch.nn.ModuleDict):
            return HookPoint(name, path, incoming)
    return None
