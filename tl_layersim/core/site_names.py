"""Names of sites: in words, and their order by depth."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

_SITE_NAME = re.compile(r"(?:(encoder|decoder|text|vision)\.)?blocks\.(\d+)\.(?:[\w.]*hook_)(\w+)(?:\[(\d+)\])?")
# Places within a block; others are in parallel.
_DEPTHS = {"resid_pre": 0, "attn_out": 1, "resid_mid": 2, "mlp_out": 3, "resid_post": 4}


def site_in_words(name: str) -> str:
    """Name a site in words, as in "the embedding" or "block 3".

    Examples:
        >>> site_in_words("blocks.0.hook_resid_pre"), site_in_words("encoder.blocks.3.hook_resid_post")
        ('the embedding', 'encoder block 3')
        >>> site_in_words("blocks.2.hook_attn_out"), site_in_words("blocks.2.attn.hook_z[5]"), site_in_words("model.norm")
        ('attn_out of block 2', 'head L2H5 (z)', 'model.norm')
    """
    match = _SITE_NAME.fullmatch(name)
    if match is None:
        return name
    stack, block, place, head = match.groups()
    whole = f"{stack} block {block}" if stack else f"block {block}"
    if head is not None:
        return f"head L{block}H{head} ({place})" + (f" of the {stack}" if stack else "")
    if place == "resid_post":
        return whole
    if place == "resid_pre":
        return f"the input of {whole}" if block != "0" else f"the embedding of the {stack}" if stack else "the embedding"
    return f"{place} of {whole}"


def in_depth_order(sites: Sequence[str]) -> bool:
    """Whether the sites are ordered by depth in one stack; heads of one block, or two families, are not.

    Sites that are named by the paths of modules are in the order of the forward pass.

    Examples:
        >>> in_depth_order(["blocks.0.hook_resid_pre", "blocks.0.hook_resid_mid", "blocks.0.hook_resid_post"])
        True
        >>> in_depth_order(["blocks.0.attn.hook_z[0]", "blocks.1.attn.hook_z[0]"])
        False
        >>> in_depth_order(["blocks.0.hook_attn_out", "blocks.1.hook_attn_out", "blocks.0.hook_mlp_out"])
        False
    """
    places = [match.groups() for match in map(_SITE_NAME.fullmatch, sites) if match]
    depths = [(int(block), _DEPTHS.get(place, 2)) for _, block, place, _ in places]
    return (
        len({stack for stack, *_ in places}) < 2
        and all(head is None for *_, head in places)
        and all(before < after for before, after in itertools.pairwise(depths))
    )


def depth_key(site: Any) -> Any:
    """Sort key of a site by depth: its stack, block and place in the block. None for labels that are not sites.

    Examples:
        >>> depth_key("blocks.3.hook_resid_post") > depth_key("blocks.0.hook_resid_post"), depth_key("model.norm")
        (True, None)
    """
    match = _SITE_NAME.fullmatch(site) if isinstance(site, str) else None
    return match and (match[1] or "", int(match[2]), _DEPTHS.get(match[3], 2))
