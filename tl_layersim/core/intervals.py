"""Confidence intervals of results by the delete-one-block jackknife."""

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
    """A result with its jackknife replicates, also in the results of reports that its fields hold.

    Args:
        result: the result on all data.
        replicates: the result without each block; none if there is only one block.
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
    """The interval of a field, or of a function of the result, see `Result.interval`."""
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
            f"The function passed to `interval` returns {number_text(float(what(result)))}, a maximum, a minimum, an index or "
            "a count. Such a number has no interval, because it changes in jumps from block to block. Return an entry at a "
            "fixed index, a mean or a difference."
        )
    return found


def function_interval(result: Any, function: Callable[[Any], Any], level: float) -> ConfidenceInterval | None:
    """The interval of a function of a result. If the function returns an entry of a field, the field's interval is used.

    Args:
        result: the result with its replicates.
        function: takes a result and returns a number or a tensor.
        level: confidence level.

    Returns:
        None for a number that changes in jumps from block to block: a maximum, an index or a whole number.
    """
    return _number_interval(result, *with_and_without_blocks(result, function), level)


def _number_interval(result: Any, value: Tensor, replicates: Tensor, level: float) -> ConfidenceInterval | None:
    """The interval of a number. If the number is the same entry of a field in all replicates, the field's interval is used.

    Args:
        result: the result with its replicates.
        value: the number on all data.
        replicates: the number without each block.
        level: confidence level.

    Returns:
        None for a number that changes in jumps from block to block: a whole number, or an entry of a field whose index differs
        between replicates, such as the largest entry.
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
    """The attribute that holds a tensor field.

    Args:
        result: the result, or its class.
        name: name of the field; the name of `values` in tables is one too.

    Raises:
        LayersimError: the result has no such field.
    """
    named = {own.name: field for field, own in declarations(result).items()} | {"values": "values"}
    if name not in named:
        raise LayersimError(f"{type(result).__name__} has no tensor field {name!r}; it has {', '.join(named)}.")
    return named[name]


def bounded_field(result: Any, name: str) -> tuple[str, tuple[float, float]]:
    """The attribute that holds a tensor field, and the bounds of its values.

    Raises:
        LayersimError: the result has no such field, or the field has no intervals.
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
    """A replicate's tensor field, aligned with the result's labels; NaN at labels that occur only in the left-out block.

    Args:
        replicate: the result without one block, or the result itself.
        result: the result on all data.
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
    """Name of the attribute whose sum is the total of a field of counts; "" if the field holds no counts.

    Args:
        result: the result that has the field.
        field: name of the attribute that holds the field.
    """
    return str(result.declared(field).out_of)


def bounds_of(result: Any) -> dict[str, tuple[float, float] | None]:
    """The bounds of each tensor field; None for a field without intervals."""
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
    """A function's value on the result, and on each replicate as `block ...`, in float64.

    Args:
        result: the result with its replicates.
        function: takes a result and returns a number or a tensor.
        out_of: for counts, the attribute whose sum is their total. The counts of a replicate are scaled to the total of all
            data, because a replicate has fewer samples.

    Raises:
        LayersimError: the function returns different shapes for different blocks.
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
    """The headline numbers of a result as text, each with half the width of its 95 % interval if it has one."""
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
    """A number as text, rounded to the precision of its margin if the margin is known and exceeds rounding error.

    Args:
        value: the number.
        margin: half the width of its interval; NaN for none.
        percent: whether to write the number as a percentage.

    Examples:
        >>> margin_text(0.6383, 0.0191, percent=True), margin_text(0.6383, 0.0191), margin_text(0.6383, float("nan"))
        ('63.8 ± 1.9 %', '0.638 ± 0.019', '0.6383')
    """
    if not ROUNDING_ERROR * abs(value) < margin < math.inf:
        return f"{100 * value:.3g} %" if percent else number_text(value)
    if percent:
        return " ± ".join(rounded_to_margin(100 * value, 100 * margin)) + " %"
    return " ± ".join(rounded_to_margin(value, margin))


def headline_margins(result: Any) -> dict[str, float]:
    """Half the width of each headline number's 95 % interval; empty if the result has no intervals."""
    return {name: float(ends.high - ends.low) / 2 for name, ends in headline_intervals(result).items()}


def headline_intervals(result: Any) -> dict[str, ConfidenceInterval]:
    """The 95 % intervals of the headline numbers; empty if the result has no intervals.

    A number that is whole on all data and on every part of it is a count, such as of prompts, and has no interval. A p-value
    has none either, nor an extreme over layers: the jackknife fails where another layer is the largest in other data. An entry
    of a field has the interval of the field.
    """
    value = result.headline() if result.has_intervals else {}
    each = [one.headline() for one in result.replicates]
    intervals = {}
    for name in filter(has_margin, value):
        own = torch.tensor([one.get(name, math.nan) for one in each], dtype=torch.float64)
        whole = torch.tensor(value[name], dtype=torch.float64)
        found = _number_interval(result, whole, own, 0.95)
        # Without a width it is a count; a fraction that is 0 or 1 by chance has the interval of its field.
        if found is not None and bool(found.low < found.high):
            intervals[name] = found
    return intervals


def has_margin(headline: str) -> bool:
    """Whether a headline number may have an interval, by its name: p-values and extremes over layers have none."""
    return not is_p_value(headline) and EXTREME.search(headline) is None


def is_p_value(headline: str) -> bool:
    """Whether a headline number is a p-value, by its name."""
    return headline.startswith(("p-value", "p ("))


def refuse_no_blocks(result: Any) -> None:
    """Raise an error if a result has no intervals."""
    if not result.has_intervals:
        raise LayersimError(
            f"{type(result).__name__} has no intervals: its run kept the sums of all data only. Pass `intervals=True` to "
            "`analyze`."
        )


def _stacked_replicates(value: Tensor, replicates: list[Tensor]) -> Tensor:
    if any(one.shape != value.shape for one in replicates):
        other = next(one for one in replicates if one.shape != value.shape)
        raise LayersimError(
            f"The function passed to `interval` returns shape {tuple(value.shape)} on all data and shape {tuple(other.shape)} "
            "without one block; the shape must not depend on the data."
        )
    return torch.stack(replicates) if replicates else value.new_zeros(0, *value.shape)
