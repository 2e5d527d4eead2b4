"""Curves over depth and single numbers from fields of results, for figures, tables and regressions over many models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.intervals import bounds_of, function_interval, has_margin
from ..core.results import Result
from ..core.wording import brief

# Axes on which the first label is taken where nothing is selected: the first k, the largest singular value.
FIRST = ("k", "direction")
LAST = -1


@dataclass(frozen=True)
class FieldCurve:
    """A field of one result as numbers over sites, or as one number.

    Attributes:
        sites: names of the sites; none for one number.
        depth: relative depth of each site, from 0 at the first site of the result to 1 at the last.
        values: `site`, or one number; float64.
        low: lower ends of the intervals; None without intervals.
        high: upper ends.
        words: what was taken of the field's other axes, such as "median over tokens"; "" for nothing.
    """

    sites: tuple[str, ...]
    depth: tuple[float, ...]
    values: Tensor
    low: Tensor | None
    high: Tensor | None
    words: str


@dataclass(frozen=True)
class _Part:
    """The part of a field that is taken: how its tensor becomes `site` or `site other`, and the words for it."""

    field: str
    sites: tuple[str, ...]
    take: Callable[[Tensor], Tensor]
    words: str
    averaged: bool


def field_curve(result: Result, field: str, select: Mapping[str, Any], level: float = 0.95) -> FieldCurve:
    """A field over sites; a single number for a field without sites, and for a headline number.

    Args:
        result: whose field.
        field: name of a tensor field, or the words of a headline number.
        select: by axis, the label that is taken of it.
        level: of the intervals.

    Raises:
        LayersimError: the result has no such field, or the field has an axis of which no label is selected.
    """
    if field in result.headline():
        return _headline(result, field, level)
    part = _part(result, field, select)
    low: Tensor | None
    high: Tensor | None
    if bounds_of(result)[part.field] is None:
        value, low, high = _row_means(part.take(getattr(result, part.field))), None, None
    elif not part.averaged and result.has_intervals:
        # By the name of the field, whose bounds its intervals keep to.
        found = result.interval(part.field, level)
        value, low, high = part.take(found.value), part.take(found.low), part.take(found.high)
    else:
        value, low, high = _value_and_ends(result, lambda one: _row_means(part.take(getattr(one, part.field))), level)
    depth = tuple(relative_depth(result, site) for site in part.sites)
    return FieldCurve(part.sites, depth, value, low, high, part.words)


def field_number(
    result: Result, field: str | Callable[[Any], Any], layer: int | str | None, select: Mapping[str, Any], level: float = 0.95
) -> FieldCurve:
    """One number of a result: a field at one site, its mean over sites, a headline number, or what a function returns.

    Args:
        result: of one model.
        field: name of a tensor field, the words of a headline number, or a function of the result.
        layer: the site, by its name or its number; None for the mean over sites, without undefined values.
        select: by axis, the label that is taken of it.
        level: of the intervals.

    Raises:
        LayersimError: see `field_curve`; or the field has no such site.
    """
    if not isinstance(field, str):
        return _single(result, field, "", level)
    if field in result.headline():
        return _headline(result, field, level)
    part = _part(result, field, select)
    if bounds_of(result)[part.field] is None and not part.sites:
        return FieldCurve((), (), part.take(getattr(result, part.field)).nanmean(), None, None, part.words)
    if not part.sites or layer is None:
        mean = "mean over pairs of different blocks" if part.averaged else "mean over layers" if part.sites else ""
        words = mean if part.averaged else ", ".join(filter(None, (part.words, mean)))
        return _single(result, lambda one: part.take(getattr(one, part.field)).nanmean(), words, level)
    curve = field_curve(result, field, select, level)
    at = _label_number(layer, part.sites, "layer")
    low, high = (None if end is None else end[at] for end in (curve.low, curve.high))
    words = ", ".join(filter(None, (part.words, part.sites[at])))
    return FieldCurve((), (), curve.values[at], low, high, words)


def relative_depth(result: Result, site: str) -> float:
    """Position of a site among those of a result: 0 for the first and 1 for the last.

    Args:
        result: whose `layers` hold the site.
        site: its name.
    """
    return result.layers.index(site) / max(len(result.layers) - 1, 1)


def site_axes(result: Result, field: str) -> list[str]:
    """The axes of a field whose labels are sites of the result, in order.

    Args:
        result: whose field.
        field: name of a tensor field.
    """
    return [axis for axis in field_axes(result, field) if _is_sites(result, axis)]


def field_axes(result: Result, field: str) -> tuple[str, ...]:
    """The axes of a field, in order.

    Args:
        result: whose field.
        field: name of a tensor field.

    Raises:
        LayersimError: the result has no such field.
    """
    return held_field(result, field)[1]


def _headline(result: Result, name: str, level: float) -> FieldCurve:
    """A headline number; without an interval where its name says a place that depends on the data."""
    if not has_margin(name):
        return FieldCurve((), (), _single_number(result.headline()[name]), None, None, "")
    return _single(result, lambda one: one.headline().get(name, math.nan), "", level)


def _single_number(value: Any) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _single(result: Result, function: Callable[[Any], Any], words: str, level: float) -> FieldCurve:
    value, low, high = _value_and_ends(result, lambda one: _single_number(function(one)), level)
    return FieldCurve((), (), value, low, high, words)


def _value_and_ends(
    result: Result, function: Callable[[Any], Any], level: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if result.has_intervals and (found := function_interval(result, function, level)) is not None:
        return found.value, found.low, found.high
    return torch.as_tensor(function(result), dtype=torch.float64), None, None


def _row_means(values: Tensor) -> Tensor:
    """Means over the second axis of a matrix, without undefined values; a curve as it is."""
    return values.nanmean(-1) if values.dim() == 2 else values


def held_field(result: Result, field: str) -> tuple[str, tuple[str, ...]]:
    """The attribute that holds a field, and the field's axes.

    Args:
        result: whose field.
        field: name of a tensor field.

    Raises:
        LayersimError: the result has no such field.
    """
    held = result.tensor_fields()
    name = "values" if field == result.values_name else field
    if name not in held:
        known = [result.values_name if one == "values" else one for one in held]
        raise LayersimError(
            f"`field` is {field!r}; {type(result).__name__} has {', '.join(known)}; or the headlines "
            f"{', '.join(map(repr, result.headline())) or 'none'}."
        )
    return name, held[name]


def _is_sites(result: Result, axis: str) -> bool:
    labels = result.coordinates(axis)
    return len(labels) > 0 and all(label in result.layers for label in labels)


def _part(result: Result, field: str, select: Mapping[str, Any]) -> _Part:
    name, names = held_field(result, field)
    unknown = [axis for axis in select if axis not in names]
    if unknown:
        raise LayersimError(
            f"`select` names {unknown[0]!r}; {field!r} of {type(result).__name__} has {', '.join(names) or 'no axes'}."
        )
    kept = next((axis for axis in names if _is_sites(result, axis) and axis not in select), None)
    numbers: dict[str, int] = {}
    words: list[str] = []
    averaged = False
    for axis in names:
        labels = result.coordinates(axis)
        if axis == kept:
            continue
        if axis in select:
            numbers[axis] = _label_number(select[axis], labels, axis)
            words.append(f"{axis.replace('_', ' ')} {labels[numbers[axis]]}")
        elif axis == "quantile" and 0.5 in labels:
            numbers[axis] = labels.index(0.5)
            words.append("median over tokens")
        elif axis == "column_block" and kept == "row_block":
            averaged = True
            words.append("mean over the other blocks")
        elif _is_sites(result, axis):
            numbers[axis] = len(labels) + LAST
            words.append("with the last layer")
        elif axis in FIRST:
            numbers[axis] = 0
            words.append(f"{axis} {labels[0]}")
        else:
            raise LayersimError(
                f"`select` must name a label of {axis!r} for {field!r} of {type(result).__name__}: {_choices(labels)}."
            )
    index = tuple(numbers.get(axis, slice(None)) for axis in names)

    def take(values: Tensor) -> Tensor:
        taken = values[index]
        if averaged:
            # A block is coupled with itself in every model.
            taken = taken.masked_fill(torch.eye(len(taken), dtype=torch.bool), torch.nan)
        return taken

    return _Part(name, () if kept is None else result.coordinates(kept), take, ", ".join(words), averaged)


def _label_number(label: Any, labels: tuple[Any, ...], axis: str) -> int:
    """The position of a label on an axis; sites may be given by their number, negative ones from the end."""
    if label in labels:
        return labels.index(label)
    by_number = all(isinstance(one, str) for one in labels) and isinstance(label, int) and not isinstance(label, bool)
    if by_number and -len(labels) <= label < len(labels):
        return int(label) % len(labels)
    raise LayersimError(
        f"`{axis}` is {brief(label)}; it must be one of {_choices(labels)}"
        + (f", or a number from {-len(labels)} to {len(labels) - 1}." if all(isinstance(one, str) for one in labels) else ".")
    )


def _choices(labels: tuple[Any, ...]) -> str:
    """The first labels of an axis, for messages."""
    return ", ".join(map(repr, labels[:12])) + (", ..." if len(labels) > 12 else "")
