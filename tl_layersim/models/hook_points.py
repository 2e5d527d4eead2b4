"""Resolution of `at=`: families, names, patterns and functions of names become hook points of a model.

A new family is one entry in `SITE_NAMES` and in the layouts that have it; a new layout is one entry in `LAYOUTS`.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

import torch

from ..core.errors import LayersimError
from ..core.wording import brief
from .hook_point import HookPoint
from .layer_numbers import block_number
from .module_sites import module_site_map
from .site_map import HEAD_FAMILIES, Site, SiteMap, StreamSum
from .transformer_lens import is_transformer_lens
from .transformer_lens_sites import transformer_lens_site_map

At = str | int | Callable[[str], bool]
_HEAD = re.compile(r"(.+)\[(\d+)\]$")


def site_map(module: torch.nn.Module, blocks: Sequence[str]) -> SiteMap:
    """The sites of a model.

    Args:
        module: a TransformerLens, Hugging Face or other torch model.
        blocks: module paths of its blocks; not used for TransformerLens models.
    """
    return transformer_lens_site_map(module) if is_transformer_lens(module) else module_site_map(module, blocks)


def find_points(
    module: torch.nn.Module, blocks: Sequence[str], at: At | Sequence[At], per_head: bool = False
) -> tuple[HookPoint, ...]:
    """The hook points that a user asks for.

    Families come in the order in which the model computes them, block by block, also where several are asked for. Names come in
    the order in which they are given. Patterns and functions of names are applied to the names of all families' sites; where
    they match none of these, to the other hook points of a TransformerLens model, or to the module paths of another model.

    Args:
        module: the model.
        blocks: module paths of its blocks, as `find_blocks` or `find_stacks` gives them.
        at: the number of a block, whose output is read, negative from the end; a family, such as "attn_out", or
            "encoder.attn_out" of one stack; a TransformerLens name, with `[5]` for head 5, or a module path; a pattern with
            `*`; a function of a name, which is True for the names to read; or a list of these.
        per_head: whether each head has a hook point of its own.

    Raises:
        LayersimError: a name is not known, a family is not one of the model's, or a hook point is asked for twice.
    """
    known = site_map(module, blocks)
    outputs = [site.point.name for site in known.of_families(["resid_post"]) if not site.first]
    items = [outputs[block_number(item, outputs, "at")] if isinstance(item, int) else item for item in items_of(at)]
    families = [item for item in items if isinstance(item, str) and known.is_family(item)]
    if not items:
        raise LayersimError(f"`at` is {brief(at)}; it must name a site.")
    for family in families:
        _refuse_lacking(known, family)
    found: list[Site | HookPoint] = []
    for item in items:
        if item not in families:
            found += _named(known, item)
        elif item == families[0]:
            # All families together, at the place of the first.
            found += known.of_families(families)
    points = [point for one in found for point in (_by_head(one) if per_head else [_whole(one)])]
    _refuse_twice(points, {site.point.name for site in known.sites})
    return tuple(points)


def items_of(at: At | Sequence[At]) -> list[At]:
    """The argument `at` as a list of numbers, names and functions."""
    return [at] if isinstance(at, str | int) or callable(at) else list(at)


def stream_sums(module: torch.nn.Module, blocks: Sequence[str], families: Iterable[str]) -> tuple[StreamSum, ...]:
    """The identities of the residual stream in which these families are a term or the total.

    They follow from the architecture: where activations that were read do not satisfy them, a site is not what its name says.

    Args:
        module: the model.
        blocks: module paths of its blocks.
        families: families, or names of sites.
    """
    asked = set(families)
    known = site_map(module, blocks)
    names = {site.point.name for site in known.sites if site.family in asked or site.point.name in asked}
    return tuple(one for one in known.sums if names & {point.name for point in (one.total, *one.terms)})


def _whole(one: Site | HookPoint) -> HookPoint:
    return one.point if isinstance(one, Site) else one


def _by_head(one: Site | HookPoint) -> list[HookPoint]:
    """One hook point per head.

    Raises:
        LayersimError: the hook point is not divided into heads.
    """
    if isinstance(one, Site) and one.heads:
        return [one.head(number) for number in range(len(one.heads))]
    if isinstance(one, HookPoint) and _HEAD.match(one.name):
        return [one]
    family = isinstance(one, Site) and one.family
    raise LayersimError(
        f"`per_head` is True, but {_whole(one).name} is not divided into heads; {', '.join(HEAD_FAMILIES)} are"
        + (", in a model whose configuration gives its number of heads." if family in HEAD_FAMILIES else ".")
    )


def _named(known: SiteMap, item: str | Callable[[str], bool]) -> Sequence[Site | HookPoint]:
    """The sites and other hook points that a name, a pattern or a function of names selects.

    Raises:
        LayersimError: there are none.
    """
    sites = {site.point.name: site for site in known.sites}
    if isinstance(item, str) and (item in sites or known.by_name(item) is not None):
        return [_one(known, sites, item)]
    if isinstance(item, str) and (head := _HEAD.match(item)):
        return [_one_head(known, sites, item, head[1], int(head[2]))]
    if isinstance(item, str) and not any(sign in item for sign in "*?"):
        raise _unknown(known, sites, item)
    matches: Callable[[str], bool] = item if callable(item) else lambda name: fnmatch.fnmatchcase(name, item)
    chosen: Iterable[str] = [name for name in sites if matches(name)]
    chosen = chosen or [name for name in known.other_names if matches(name) and known.by_name(name) is not None]
    found = {_tensor_of(_whole(one)): one for one in (_one(known, sites, name) for name in chosen)}
    if not found:
        raise _unknown(known, sites, item)
    return list(found.values())


def _one(known: SiteMap, sites: dict[str, Site], name: str) -> Site | HookPoint:
    """The site or hook point of a name.

    Raises:
        LayersimError: the site and TransformerLens' hook point of this name are two tensors.
    """
    other = known.by_name(name)
    if name not in sites:
        assert other is not None
        return other
    site = sites[name]
    if other is not None and _tensor_of(other) != _tensor_of(site.point):
        raise LayersimError(
            f"`at` is {name!r}, which reads another tensor in this {known.model} than in other models; the family "
            f"{site.family!r} is read at {site.point.module}."
        )
    return site


def _one_head(known: SiteMap, sites: dict[str, Site], name: str, stem: str, number: int) -> HookPoint:
    """The hook point of one head.

    Raises:
        LayersimError: there is no such head.
    """
    if stem not in sites and known.by_name(stem) is None:
        raise _unknown(known, sites, name)
    one = _one(known, sites, stem)
    if isinstance(one, Site) and number < len(one.heads):
        return one.head(number)
    count = len(one.heads) if isinstance(one, Site) else 0
    raise LayersimError(
        f"`at` is {name!r}, a head that the model does not have; "
        + (f"{stem} has heads 0 to {count - 1}." if count else f"only {', '.join(HEAD_FAMILIES)} have heads.")
    )


def _tensor_of(point: HookPoint) -> tuple[object, ...]:
    """The tensor that a hook point reads, which hook points of different names may share."""
    part = point.part
    return point.module, point.incoming, None if part is None else (part.shape, str(part.index))


def _refuse_lacking(known: SiteMap, family: str) -> None:
    """Refuse a family that the model, or the stack that is named, does not have."""
    if not known.of_families([family]):
        stack, _, own = family.rpartition(".")
        reason = known.lacks.get(own, f"the blocks of its {stack} have none")
        raise LayersimError(
            f"`at` is {family!r}, which {known.model} does not have: {reason}."
            + (f" It has {', '.join(known.families())}." if known.families() else "")
        )


def _refuse_twice(points: Sequence[HookPoint], sites: set[str]) -> None:
    """Refuse a hook point that is asked for twice, under one name or two.

    Sites of two families may be one tensor: attention and MLP of some parallel blocks read one norm.
    """
    seen: set[str] = set()
    names: dict[tuple[object, ...], str] = {}
    for point in points:
        name, tensor = point.name, _tensor_of(point)
        before = name if name in seen else names.get(tensor)
        if before is not None and (before == name or not {before, name} <= sites):
            raise LayersimError(
                f"`at` names a hook point twice: {name!r}" + ("." if before == name else f", which is also {before!r}.")
            )
        seen.add(name)
        names[tensor] = name


def _unknown(known: SiteMap, sites: dict[str, Site], item: str | Callable[[str], bool]) -> LayersimError:
    """The error for names that the model does not have."""
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
