"""Names of sites: their parts, their wording, and their order by depth."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

FINAL_NORM = "ln_final.hook_normalized"
_SITE = re.compile(
    r"(?:(encoder|decoder|text|vision)\.)?(?:blocks\.(\d+)\.([\w.]*hook_\w+)(?:\[(\d+)\])?|" + re.escape(FINAL_NORM) + ")"
)
# Ends of the places that have heads; at others, a number in brackets is that of a run of the block.
_PLACES_OF_HEADS = ("hook_q", "hook_k", "hook_v", "hook_z")
# Places within a block; others are in parallel.
_DEPTHS = {"resid_pre": 0, "attn_out": 1, "mixer_out": 1, "resid_mid": 2, "mlp_out": 3, "resid_post": 4}


class SiteParts(NamedTuple):
    """Parts of a site's TransformerLens name.

    Attributes:
        stack: "encoder", "decoder", "text" or "vision"; "" for a model with one stack.
        block: number of the block, as text; "" for the final norm.
        place: rest of the name after the block, such as "hook_attn_out".
        head: number of the head, as text; "" for other sites.
    """

    stack: str
    block: str
    place: str
    head: str


def parse_site(name: str) -> SiteParts | None:
    """The parts of a TransformerLens name; None for other names, such as that of one of several runs of a block.

    Examples:
        >>> parse_site("blocks.3.attn.hook_z[5]"), parse_site("blocks.3.hook_resid_post[1]")
        (SiteParts(stack='', block='3', place='attn.hook_z', head='5'), None)
    """
    match = _SITE.fullmatch(name)
    if match is None:
        return None
    stack, block, place, head = match.groups("")
    if head and not place.endswith(_PLACES_OF_HEADS):
        return None
    return SiteParts(stack, block, place or FINAL_NORM, head)


def site_in_words(name: str) -> str:
    """A site in words, such as "the embedding" or "block 3".

    Examples:
        >>> site_in_words("blocks.0.hook_resid_pre"), site_in_words("encoder.blocks.3.hook_resid_post")
        ('the embedding', 'encoder block 3')
        >>> site_in_words("blocks.2.hook_attn_out"), site_in_words("blocks.2.attn.hook_z[5]"), site_in_words("model.norm")
        ('attn_out of block 2', 'head L2H5 (z)', 'model.norm')
    """
    site = parse_site(name)
    if site is None or not site.block:
        return name
    stack, block, place, head = site
    place = place.rpartition("hook_")[2]
    of_stack = f" of the {stack}" if stack else ""
    block_in_words = f"{stack} block {block}" if stack else f"block {block}"
    if head:
        return f"head L{block}H{head} ({place}){of_stack}"
    if place == "resid_post":
        return block_in_words
    if place == "resid_pre" and block == "0":
        return f"the embedding{of_stack}"
    if place == "resid_pre":
        return f"the input of {block_in_words}"
    return f"{place} of {block_in_words}"


def in_depth_order(sites: Sequence[str]) -> bool:
    """Whether sites are in order of depth in one stack. Heads of one block, or sites of two families, are not.

    Sites that are named by the paths of modules are in the order of the forward pass.

    Examples:
        >>> in_depth_order(["blocks.0.hook_resid_pre", "blocks.0.hook_resid_mid", "blocks.0.hook_resid_post"])
        True
        >>> in_depth_order(["blocks.0.attn.hook_z[0]", "blocks.1.attn.hook_z[0]"])
        False
        >>> in_depth_order(["blocks.0.hook_attn_out", "blocks.1.hook_attn_out", "blocks.0.hook_mlp_out"])
        False
    """
    parsed = [site for site in map(parse_site, sites) if site is not None and site.block]
    stacks = {site.stack for site in parsed}
    if len(stacks) > 1 or any(site.head for site in parsed):
        return False
    return all(depth < next_depth for depth, next_depth in itertools.pairwise(map(_depth, parsed)))


def _depth(site: SiteParts) -> tuple[int, int]:
    """Sort key of a site within its stack: index of the block, and rank in the block."""
    return int(site.block), _DEPTHS.get(site.place.rpartition("hook_")[2], 2)


def depth_key(site: Any) -> Any:
    """Sort key of a site by depth; None for a label that names no block.

    The key is the stack, the block and the place in the block.

    Examples:
        >>> depth_key("blocks.3.hook_resid_post") > depth_key("blocks.0.hook_resid_post"), depth_key("model.norm")
        (True, None)
    """
    parts = parse_site(site) if isinstance(site, str) else None
    if parts is None or not parts.block:
        return None
    return (parts.stack, *_depth(parts))
