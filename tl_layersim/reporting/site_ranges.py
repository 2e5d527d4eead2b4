"""Sites in words: ranges of names, for text beside figures."""

from __future__ import annotations

from .site_labels import STREAM, parse_site

# Names that are listed one by one.
MOST_LISTED = 6


def is_stream(names: tuple[str, ...]) -> bool:
    """Whether all sites are inputs and outputs of blocks.

    Args:
        names: of the sites.
    """
    return all((site := parse_site(name)) is not None and site.place in STREAM for name in names)


def site_ranges(names: tuple[str, ...]) -> str:
    """The number of sites and the names of the first and the last of each family.

    The input of block 0 and the outputs of all blocks are one family, the residual stream.

    Args:
        names: of the sites.

    Examples:
        >>> site_ranges(tuple(f"blocks.{i}.hook_attn_out" for i in range(32)))
        '32 sites: blocks.0.hook_attn_out to blocks.31.hook_attn_out'
        >>> site_ranges(("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post", "model.norm"))
        '4 sites: blocks.0.hook_resid_pre to blocks.1.hook_resid_post, model.norm'
    """
    families: dict[tuple[str, str], list[str]] = {}
    for name in names:
        site = parse_site(name)
        place = "" if site is None else "stream" if site.place in STREAM else site.place
        families.setdefault(("", "") if site is None else (site.stack, place), []).append(name)
    parts: list[str] = []
    for (_, place), own in families.items():
        if place and len(own) > 1:
            parts.append(f"{own[0]} to {own[-1]}")
        elif len(own) > MOST_LISTED:
            parts += [*own[: MOST_LISTED - 1], "...", own[-1]]
        else:
            parts += own
    return f"{len(names)} site{'s' if len(names) > 1 else ''}: {', '.join(parts)}"
