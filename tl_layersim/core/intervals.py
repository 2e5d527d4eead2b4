"""Confidence intervals of results, from the same results without each block of the data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .errors import LayersimError
from .fields import declarations
from .jackknife import ROUNDING_ERROR, UNBOUNDED, ConfidenceInterval, degrees_of_freedom, standard_error, t_interval
from .wording import equation, number_text, p_value_text, rounded_to_margin

# Words in the names of headline numbers that are extremes, or that belong to a threshold which the data choose.
EXTREME = re.compile(r"\b(largest|smallest|highest|lowest|maximum)\b|^threshold|^its ")

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


def with_replicates(result: R, replicates: tuple[Any, ...], block_tokens: tuple[int, ...]) -> R:
    """A result with its replicates; results of reports in its fields get theirs too.

    Args:
        result: of all data.
        replicates: results without each block; none if there is one block only.
        block_tokens: number of counted positions in each block.
    """
    nested = {
        f.name: {
            name: with_replicates(one, tuple(getattr(r, f.name)[name] for r in replicates), block_tokens)
            for name, one in own.items()
        }
        for f in fields(result)
        if isinstance(own := getattr(result, f.name), Mapping) and own and all(hasattr(v, "replicates") for v in own.values())
    }
    reports = {name: type(getattr(result, name))(own) for name, own in nested.items()}
    return replace(result, replicates=replicates, block_tokens=block_tokens, **reports)


def interval_of(result: Any, what: str | Callable[[Any], Any], level: float) -> ConfidenceInterval:
    """The interval of a field of a result, or of a function of it, see `Result.interval`."""
    refuse_no_blocks(result)
    if isinstance(what, str):
        field, within = bounded_field(result, what)
        parts = with_and_without_blocks(result, lambda one: aligned(one, result, field), total_of(result, field))
        by_chance, rows = result.declared(field).by_chance, result.provenance.sequences
        low, high = (rows if bound in by_chance else math.inf for bound in within)
        return _interval(*parts, level, within, (low, high))
    found = function_interval(result, what, level)
    if found is None:
        raise LayersimError(
            f"The function of `interval` returns {number_text(float(what(result)))} on all data, a maximum, a minimum, an "
            "index or a count; it has no interval, because it changes in jumps from block to block. Return an entry at a fixed "
            "place, a mean or a difference."
        )
    return found


def function_interval(result: Any, function: Callable[[Any], Any], level: float) -> ConfidenceInterval | None:
    """The interval of a function of a result; that of a field if the function returns an entry of it.

    Args:
        result: with its replicates.
        function: takes a result and returns a number or a tensor.
        level: of confidence.

    Returns:
        None for a number that blocks move by jumps: a maximum, a place or a whole number.
    """
    return _number_interval(result, *with_and_without_blocks(result, function), level)


def _number_interval(result: Any, value: Tensor, replicates: Tensor, level: float) -> ConfidenceInterval | None:
    """The interval of a number; that of a field if the number is one entry of it on all parts of the data.

    Args:
        result: with its replicates.
        value: of all data.
        replicates: without each block.
        level: of confidence.

    Returns:
        None for a number that blocks move by jumps: one that is whole on all parts of the data, or an entry of a field whose
        place depends on the part, as that of the largest entry does.
    """
    each = torch.cat([value[None], replicates]) if len(replicates) else value[None]
    if value.dim() or not bool(each.isfinite().all()):
        return _interval(value, replicates, level)
    if bool((each != value).any()) and bool((each == each.round()).all()):
        return None
    places, jumps = [], False
    for name in bounds_of(result):
        held = [getattr(one, name) for one in (result, *result.replicates)]
        if len({one.shape for one in held}) == 1:
            equal = torch.stack([one.reshape(-1) for one in held]) == each[:, None]
            places += [(name, int(place)) for place in equal.all(0).nonzero()[:1]]
            jumps |= bool(equal.any(1).all())
    if not places:
        return None if jumps else _interval(value, replicates, level)
    # A number at a bound may be in several fields; the interval of one in which it is there by chance has a width.
    field, place = min(places, key=lambda one: float(value) not in result.declared(one[0]).by_chance)
    if result.declared(field).within is None:
        return _interval(value, replicates, level)
    return ConfidenceInterval(*(part.reshape(-1)[place] for part in interval_of(result, field, level)))


def field_named(result: Any, name: str) -> str:
    """The attribute that holds the tensor field of this name.

    Args:
        result: any.
        name: of the field; the name of `values` in tables is one too.

    Raises:
        LayersimError: the result has no such field.
    """
    named = {own.name: field for field, own in declarations(result).items()} | {"values": "values"}
    if name not in named:
        raise LayersimError(f"{type(result).__name__} has no tensor field {name!r}; it has {', '.join(named)}.")
    return named[name]


def bounded_field(result: Any, name: str) -> tuple[str, tuple[float, float]]:
    """The tensor field of this name, and the bounds that its values cannot exceed.

    Args:
        result: any.
        name: see `field_named`.

    Raises:
        LayersimError: the result has no such field, or a field that the main pass holds fixed.
    """
    field = field_named(result, name)
    within = bounds_of(result)[field]
    if within is None:
        raise LayersimError(
            f"{type(result).__name__}.{name} has no interval: it is a p-value, a draw of a null, a maximum, a number of layers "
            "or of directions, a value of one prompt, or determined by the first pass over the data."
        )
    return field, within


def aligned(replicate: Any, result: Any, field: str) -> Tensor:
    """A tensor field of a replicate over the labels of the result; NaN at a label that only the block left out has.

    Args:
        replicate: a result without one block, or the result itself.
        result: of all data.
        field: name of the attribute.
    """
    values: Tensor = getattr(replicate, field)
    for dim, axis in enumerate(result.tensor_fields()[field]):
        labels, own = result.coordinates(axis), replicate.coordinates(axis)
        if labels != own:
            undefined = values.new_full((*values.shape[:dim], 1, *values.shape[dim + 1 :]), math.nan)
            place = torch.tensor([own.index(label) if label in own else len(own) for label in labels])
            values = torch.cat([values, undefined], dim).index_select(dim, place)
    return values


def total_of(result: Any, field: str) -> str:
    """The attribute whose sum the counts of a tensor field are counted out of; "" for a field of other numbers.

    Args:
        result: any.
        field: name of the attribute that holds the field.
    """
    return str(result.declared(field).out_of)


def bounds_of(result: Any) -> dict[str, tuple[float, float] | None]:
    """The bounds of each tensor field of a result, None for a field without interval."""
    return {name: own.within for name, own in declarations(result).items()}


def _interval(
    value: Tensor,
    replicates: Tensor,
    level: float,
    within: tuple[float, float] = UNBOUNDED,
    rows: tuple[float, float] = (math.inf, math.inf),
) -> ConfidenceInterval:
    """See `t_interval`."""
    error = standard_error(value, replicates)
    return t_interval(value, error, degrees_of_freedom(value, replicates), level, within, rows)


def with_and_without_blocks(result: Any, function: Callable[[Any], Any], out_of: str = "") -> tuple[Tensor, Tensor]:
    """A function of a result, and the same of each replicate, `block ...`, in float64.

    Args:
        result: with its replicates.
        function: takes a result and returns a number or a tensor.
        out_of: for counts, the attribute whose sum they are counted out of. Those of a replicate are scaled to the sum of all
            data: without a block there are fewer, however the blocks agree.

    Raises:
        LayersimError: it returns tensors of different shapes for different blocks.
    """
    value = torch.as_tensor(function(result), dtype=torch.float64)
    replicates = _stacked_replicates(value, [torch.as_tensor(function(one), dtype=torch.float64) for one in result.replicates])
    if out_of:
        total, *rest = (
            torch.as_tensor(getattr(one, out_of), dtype=torch.float64).sum() for one in (result, *result.replicates)
        )
        replicates = (
            torch.stack([one * (total / own) for one, own in zip(replicates, rest, strict=True)]) if rest else replicates
        )
    return value, replicates


def headline_lines(result: Any) -> list[str]:
    """The headline numbers of a result as lines of text, see `headline_texts`."""
    return [equation(name, text) for name, text in headline_texts(result).items()]


def headline_texts(result: Any) -> dict[str, str]:
    """The headline numbers of a result as text, each with half the width of its 95 % interval where it has one."""
    margins = headline_margins(result)
    texts = {
        name: p_value_text(value) if is_p_value(name) else margin_text(value, margins.get(name, math.nan))
        for name, value in result.headline().items()
    }
    twins = [one.headline() for one in result.untrained]
    for name in texts if twins else ():
        own = [twin[name] for twin in twins if name in twin]
        texts[name] += f" (untrained: {number_text(sum(own) / len(own))})" if own else ""
    return texts


def margin_text(value: float, margin: float, percent: bool = False) -> str:
    """A number as text, to the precision of its margin where that is known and more than rounding.

    Args:
        value: the number.
        margin: half the width of its interval; NaN for none.
        percent: whether the number is a fraction that is written in per cent.

    Examples:
        >>> margin_text(0.6383, 0.0191, percent=True), margin_text(0.6383, 0.0191), margin_text(0.6383, float("nan"))
        ('63.8 ± 1.9 %', '0.638 ± 0.019', '0.6383')
    """
    if not ROUNDING_ERROR * abs(value) < margin < math.inf:
        return f"{100 * value:.3g} %" if percent else number_text(value)
    if percent:
        return " ± ".join(rounded_to_margin(100 * value, 100 * margin)) + " %"
    return " ± ".join(rounded_to_margin(value, margin))


def headline_margins(result: Any, level: float = 0.95) -> dict[str, float]:
    """Half the width of the interval of each headline number that has one; empty without intervals.

    Args:
        result: with or without replicates.
        level: of confidence.
    """
    return {name: float(ends.high - ends.low) / 2 for name, ends in headline_intervals(result, level).items()}


def headline_intervals(result: Any, level: float = 0.95) -> dict[str, ConfidenceInterval]:
    """The interval of each headline number that has one; empty without intervals.

    A number that is whole on all data and on every part of it is a count, such as of prompts, and has no interval. A p-value
    has none either, nor an extreme over layers: the jackknife fails where another layer is the largest in other data. An entry
    of a field has the interval of the field.

    Args:
        result: with or without replicates.
        level: of confidence.
    """
    value = result.headline() if result.has_intervals else {}
    each = [one.headline() for one in result.replicates]
    intervals = {}
    for name in filter(has_margin, value):
        own = torch.tensor([one.get(name, math.nan) for one in each], dtype=torch.float64)
        whole = torch.tensor(value[name], dtype=torch.float64)
        found = _number_interval(result, whole, own, level)
        # Without a width it is a count; a fraction that is 0 or 1 by chance has the interval of its field.
        if found is not None and bool(found.low < found.high):
            intervals[name] = found
    return intervals


def has_margin(headline: str) -> bool:
    """Whether a headline number may have an interval, by its name: p-values and extremes over layers have none.

    Args:
        headline: the name.
    """
    return not is_p_value(headline) and EXTREME.search(headline) is None


def is_p_value(headline: str) -> bool:
    """Whether a headline number is a p-value, by its name.

    Args:
        headline: the name.
    """
    return headline.startswith(("p-value", "p ("))


def refuse_no_blocks(result: Any) -> None:
    """Refuse a result without blocks.

    Args:
        result: any.
    """
    if not result.has_intervals:
        raise LayersimError(
            f"{type(result).__name__} has no intervals: its run kept the sums of all data only. Pass `intervals=True` to "
            "`analyze`."
        )


def _stacked_replicates(value: Tensor, replicates: list[Tensor]) -> Tensor:
    if any(one.shape != value.shape for one in replicates):
        other = next(one for one in replicates if one.shape != value.shape)
        raise LayersimError(
            f"The function of `interval` returns numbers of shape {tuple(value.shape)} on all data and of {tuple(other.shape)} "
            "without a block; the shape must not depend on the data."
        )
    return torch.stack(replicates) if replicates else value.new_zeros(0, *value.shape)
