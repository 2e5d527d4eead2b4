"""Confidence intervals by the delete-one-block jackknife and Student's t; quantiles of histograms."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .arguments import typed
from .errors import LayersimError
from .result_declarations import declarations
from .wording import equation, number_text, p_value_text, rounded_to_margin

# Words in the names of headline numbers that are extremes, or thresholds which the data choose.
EXTREME = re.compile(r"\b(largest|smallest|highest|lowest|maximum)\b|^threshold")

Term = TypeVar("Term")

# The quantiles that results report.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@typed
def quantiles_from_histogram(histogram: Tensor, low: float, high: float, quantiles: tuple[float, ...]) -> Tensor:
    """Quantiles from a histogram with equal bins between `low` and `high`.

    Values are assumed to be uniform within a bin, so the error is below one bin width.

    Args:
        histogram: counts, `... bin`.
        low: left edge of the first bin.
        high: right edge of the last bin.
        quantiles: each between 0 and 1.

    Returns:
        `quantile ...`, float64; NaN if a histogram is empty.

    Examples:
        >>> quantiles_from_histogram(torch.tensor([[1, 1, 1, 1]]), 0.0, 4.0, (0.5,))
        tensor([[2.]], dtype=torch.float64)
    """
    bins = histogram.shape[-1]
    counts = histogram.to(torch.float64)
    cumulative = counts.cumsum(-1)
    total = cumulative[..., -1:]
    out = []
    for quantile in quantiles:
        target = quantile * total
        # The first bin that is not empty and whose cumulative count reaches the target.
        index = ((cumulative < target) | (cumulative == 0)).sum(-1, keepdim=True).clamp(max=bins - 1)
        before = cumulative.gather(-1, index) - counts.gather(-1, index)
        fraction = (target - before) / counts.gather(-1, index)
        out.append((low + (index + fraction) * ((high - low) / bins)).squeeze(-1).masked_fill(total.squeeze(-1) == 0, math.nan))
    return torch.stack(out)


# A change below this fraction of a number is rounding: the number does not depend on the block.
ROUNDING_ERROR = 1e-12
UNBOUNDED = (-math.inf, math.inf)


class ConfidenceInterval(NamedTuple):
    """A statistic with its confidence interval and standard error. All are float64 tensors of one shape.

    Attributes:
        value: the statistic on all data.
        low: lower end.
        high: upper end.
        error: standard error.
    """

    value: Tensor
    low: Tensor
    high: Tensor
    error: Tensor


def leave_one_out(
    terms: Sequence[Term], add: Callable[[Term, Term], Term], before: Term | None = None, after: Term | None = None
) -> Iterator[Term]:
    """Yield, for each term in order, the sum of all other terms.

    Nothing is subtracted, so a sum does not depend on the left-out term, to the last bit. Halves are summed before quarters:
    about n log2(n) additions, and log2(n) sums held at a time.

    Args:
        terms: two or more.
        add: adds two terms.
        before: a further term that each sum begins with; None for none.
        after: a further term that each sum ends with; None for none.

    Examples:
        >>> list(leave_one_out(["a", "b", "c"], lambda a, b: a + b))
        ['bc', 'ac', 'ab']
    """
    if len(terms) == 1:
        rest = before if after is None else after if before is None else add(before, after)
        assert rest is not None
        yield rest
        return
    left, right = terms[: len(terms) // 2], terms[len(terms) // 2 :]
    total = functools.reduce(add, right)
    yield from leave_one_out(left, add, before, total if after is None else add(total, after))
    total = functools.reduce(add, left)
    yield from leave_one_out(right, add, total if before is None else add(before, total), after)


def standard_error(value: Tensor, replicates: Tensor) -> Tensor:
    r"""Standard error of a statistic by the delete-one-block jackknife.

    $$\mathrm{se}^2 = \frac{g - 1}{g} \sum_{j=1}^{g} \Big(\hat\theta_{(j)} - \frac{1}{g} \sum_i \hat\theta_{(i)}\Big)^2$$

    with the statistic without each of the g blocks. It is about their mean: a bias that depends on the number of samples, as of
    CCA and of effective ranks, is common to all of them and to another sample of the same size.

    Blocks hold equally many batches of texts, so they are alike as draws, and numbers of tokens are part of what is drawn.
    Formulas with these numbers (Busing, Meijer and van der Leeden 1999) suppose that a block has a variance in proportion to
    its tokens: errors are too small where long texts have more, as with random effects of texts and in sums over pairs of
    tokens. `benchmarks/coverage.py` measures this.

    Args:
        value: the statistic on all data.
        replicates: `block ...`, the statistic without each block.

    Returns:
        The standard error in the shape of `value`; NaN for fewer than two blocks, and where a value is not finite.

    Source:
        Wolter 2007, Introduction to Variance Estimation, chapter 4.

    Examples:
        The mean of 1, 2, 3 has the textbook's standard error, 1 / sqrt(3).

        >>> replicates = torch.tensor([2.5, 2.0, 1.5]).double()
        >>> round(float(standard_error(torch.tensor(2.0).double(), replicates)) * 3 ** 0.5, 9)
        1.0
    """
    count = len(replicates)
    if count < 2:
        return torch.full_like(value, math.nan)
    # Differences from the statistic come first: a statistic that no block changes has an error of exactly 0.
    deviation = replicates - value
    error: Tensor = ((deviation - deviation.mean(0)).square().sum(0) * ((count - 1) / count)).sqrt()
    # A value that is not finite has no error.
    return error.where(error.isfinite(), math.nan)


def degrees_of_freedom(value: Tensor, replicates: Tensor) -> Tensor:
    """Degrees of freedom of a jackknife error. This is the number of blocks that change the statistic, minus one.

    A block without held-out rows changes none of their statistics.

    Args:
        value: the statistic on all data.
        replicates: `block ...`, the statistic without each block.

    Returns:
        In the shape of `value`; NaN if only one block changes the statistic; the number of blocks minus one if none does.

    Examples:
        Two of four blocks change the statistic.

        >>> without = torch.tensor([0.5, 0.5, 0.4, 0.6]).double()
        >>> float(degrees_of_freedom(torch.tensor(0.5).double(), without))
        1.0
    """
    deviation = (replicates - value).abs()
    rounding = torch.maximum(ROUNDING_ERROR * value.abs(), 1e-9 * deviation.amax(0)) if len(replicates) else value
    changed = (deviation > rounding).sum(0).double()
    degrees = (changed - 1).where(changed != 1, math.nan)
    # A constant has an interval without width.
    return degrees.where(changed > 0, float(max(len(replicates) - 1, 1)))


def t_interval(
    value: Tensor,
    error: Tensor,
    degrees: Tensor,
    level: float,
    within: tuple[float, float] = UNBOUNDED,
    rows: tuple[float, float] = (math.inf, math.inf),
) -> ConfidenceInterval:
    """Student's t interval of a statistic. It is symmetric on a scale without bounds, such as the log-odds.

    The scale is log((x - a) / (b - x)) for a quantity between a and b, and log(x - a) or -log(b - x) for one with a single
    bound. Errors are carried over by the derivative. So the interval of a rare fraction or of a similarity near 1 is longer on
    the side away from the bound, and no end has to be cut, except at a value that is a bound itself.

    Args:
        value: the statistic.
        error: its standard error.
        degrees: degrees of freedom of each error; an interval without any is NaN.
        level: confidence level, such as 0.95.
        within: bounds of the statistic.
        rows: for fractions, the number of rows of the data, for each bound that all samples may reach by chance; infinite for
            another bound. A fraction at such a bound has Wilson's interval, for the number of independent samples that the
            entry with the largest design effect is worth, or for the rows if no entry has an error.

    Source:
        Wilson 1927, Probable inference, the law of succession, and statistical inference. Effective number of samples
        p (1 - p) / error²: Korn and Graubard 1998, Confidence intervals for proportions with small expected number of
        positive counts estimated from survey data.

    Examples:
        >>> one = torch.tensor(0.02).double()
        >>> t_interval(one, one / 2, 15 * torch.ones(1).double(), 0.95, within=(0, 1)).high.round(decimals=3)
        tensor([0.0570], dtype=torch.float64)

        No event in 64 rows.

        >>> none = torch.zeros(1).double()
        >>> t_interval(none, none, none + 15, 0.95, within=(0, 1), rows=(64, 64)).high.round(decimals=3)
        tensor([0.0660], dtype=torch.float64)
    """
    from scipy.stats import t

    low, high = within
    quantile = torch.as_tensor(t.ppf(0.5 + level / 2, degrees.numpy()))
    margin = quantile * error
    plain = ((value - margin).clamp(min=low), (value + margin).clamp(max=high))
    inside = (value > low) & (value < high)
    if math.isfinite(low) or math.isfinite(high):
        # The derivative of the scale is a sum over both bounds; an infinite bound adds 0.
        step = margin * (1 / (value - low) + 1 / (high - value))
        plain = (
            _moved(value, -step, low, high).where(inside, plain[0]),
            _moved(value, step, low, high).where(inside, plain[1]),
        )
    least, most = plain
    if min(rows) < math.inf:
        worth = ((value - low) * (high - value) / error.square())[inside & (error > 0)]
        samples = float(worth.min()) if len(worth) else min(rows)
        width = (high - low) * quantile.square() / (quantile.square() + samples)
        most = (low + width).where((value == low) & math.isfinite(rows[0]), most)
        least = (high - width).where((value == high) & math.isfinite(rows[1]), least)
    # A value may exceed a bound by rounding; its interval contains it nevertheless.
    least, most = torch.minimum(least, value), torch.maximum(most, value)
    return ConfidenceInterval(value, least.where(~margin.isnan(), math.nan), most.where(~margin.isnan(), math.nan), error)


def _moved(x: Tensor, step: Tensor, low: float, high: float) -> Tensor:
    """Move x by a step on the log or log-odds scale of `t_interval`."""
    if math.isinf(high):
        return low + (x - low) * step.exp()
    if math.isinf(low):
        return high - (high - x) * (-step).exp()
    # The scale is log-odds. This form keeps the digits of small fractions.
    odds = (x - low) / (high - x) * step.exp()
    return torch.where(odds.isinf(), high, low + (high - low) * odds / (1 + odds))


def neighbour_correlation(replicates: Tensor) -> Tensor:
    """Lag-1 autocorrelation of the jackknife replicates of a statistic. It is near 0 if blocks are independent.

    Args:
        replicates: `block ...`, the statistic without each block, in the order of the data.

    Returns:
        In the shape of the statistic; NaN if no block changes it.

    Examples:
        A drift through the data.

        >>> round(float(neighbour_correlation(torch.linspace(0, 1, 16).double())), 2)
        0.81
    """
    deviation = replicates - replicates.mean(0)
    return (deviation[1:] * deviation[:-1]).sum(0) / deviation.square().sum(0)


def p_value_from_error(value: Tensor, error: Tensor, degrees: Tensor) -> Tensor:
    """Two-sided p-value of a t test that a statistic is 0. NaN if the standard error is 0 or NaN.

    Args:
        value: the statistic.
        error: its standard error.
        degrees: degrees of freedom of each error.

    Examples:
        >>> one = torch.tensor(1.0).double()
        >>> round(float(p_value_from_error(2.0 * one, one, 9 * one)), 4)
        0.0766
    """
    from scipy.stats import t

    ratio = (value / error).abs().where(error > 0, math.nan)
    return torch.as_tensor(2 * t.sf(ratio.numpy(), degrees.numpy()), dtype=torch.float64)


def welch_degrees(errors: tuple[Tensor, Tensor], degrees: tuple[Tensor, Tensor]) -> Tensor:
    """Welch-Satterthwaite degrees of freedom of a difference of two independent statistics.

    Args:
        errors: standard errors of the two.
        degrees: degrees of freedom of the two.

    Examples:
        Equal errors from equally many blocks: all degrees of both.

        >>> one = torch.tensor(1.0).double()
        >>> float(welch_degrees((one, one), (15 * one, 15 * one)))
        30.0
    """
    a, b = (error.square() for error in errors)
    joint = (a + b).square() / (a.square() / degrees[0] + b.square() / degrees[1])
    # Without any error every number of degrees gives the same interval.
    return joint.where(a + b != 0, degrees[0] + degrees[1])


def interval_of(result: Any, what: str | Callable[[Any], Any], level: float) -> ConfidenceInterval:
    """Confidence interval of a tensor field, or of a function of the result. It implements `Result.interval`."""
    refuse_no_blocks(result)
    if isinstance(what, str):
        field, own = field_named(result, what), result.declared(what)
        if own.within is None:
            others = ", ".join(name for name, bounds in bounds_of(result).items() if bounds is not None)
            raise LayersimError(f"{type(result).__name__}.{what} has no interval; fields with intervals: {others or 'none'}.")
        parts = with_and_without_blocks(result, lambda one: aligned(one, result, field), own.out_of)
        low, high = (result.provenance.texts if bound in own.by_chance else math.inf for bound in own.within)
        return _interval(*parts, level, own.within, (low, high))
    found = function_interval(result, what, level)
    if found is None:
        raise LayersimError(
            f"The function passed to `interval` returns {number_text(float(what(result)))}, which has no interval: a maximum, "
            "minimum, index or count jumps if a part of the data is left out. Return a mean, a difference, or an entry at a "
            "fixed index."
        )
    return found


def function_interval(result: Any, function: Callable[[Any], Any], level: float) -> ConfidenceInterval | None:
    """Confidence interval of a function of a result.

    If the function returns an entry of a field, the interval of the field is used.

    Args:
        result: the result with its replicates.
        function: takes a result and returns a number or a tensor.
        level: confidence level.

    Returns:
        None for a number that jumps when a part of the data is left out: a maximum, an index or a whole number.
    """
    # An index or a count has no interval, also if no block changes it.
    if not torch.as_tensor(function(result)).is_floating_point():
        return None
    return _number_interval(result, *with_and_without_blocks(result, function), level)


def _number_interval(result: Any, value: Tensor, replicates: Tensor, level: float) -> ConfidenceInterval | None:
    """Confidence interval of one number.

    If the number is the same entry of a field in all replicates, the interval of the field is used.

    Args:
        result: the result with its replicates.
        value: the number on all data.
        replicates: the number without each block.
        level: confidence level.

    Returns:
        None for a number that jumps when a part of the data is left out: a whole number, or an entry of a field whose index
        differs between replicates, such as the largest entry.
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
    # A number at a bound may be in several fields. Fields that reach the bound by chance have intervals with a width.
    field, place = min(places, key=lambda one: float(value) not in result.declared(one[0]).by_chance)
    if result.declared(field).within is None:
        return _interval(value, replicates, level)
    return ConfidenceInterval(*(part.reshape(-1)[place] for part in interval_of(result, field, level)))


def field_named(result: Any, name: str) -> str:
    """Attribute name of the tensor field with a given name in tables.

    Args:
        result: the result, or its class.
        name: name of the field in tables; "values" is allowed too.

    Raises:
        LayersimError: the result has no such field.
    """
    named = {own.name: field for field, own in declarations(result).items()} | {"values": "values"}
    if name not in named:
        raise LayersimError(f"{type(result).__name__} has no tensor field {name!r}; it has {', '.join(named)}.")
    return named[name]


def aligned(replicate: Any, result: Any, field: str) -> Tensor:
    """Values of a jackknife replicate's field, in the order of the full result's labels.

    Labels that occur only in the left-out data have NaN.

    Args:
        replicate: the result without one jackknife block, or the result itself.
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


def bounds_of(result: Any) -> dict[str, tuple[float, float] | None]:
    """Lower and upper bound of each tensor field, by name; None for a field without intervals."""
    return {name: own.within for name, own in declarations(result).items()}


def _interval(
    value: Tensor,
    replicates: Tensor,
    level: float,
    within: tuple[float, float] = UNBOUNDED,
    rows: tuple[float, float] = (math.inf, math.inf),
) -> ConfidenceInterval:
    error = standard_error(value, replicates)
    return t_interval(value, error, degrees_of_freedom(value, replicates), level, within, rows)


def with_and_without_blocks(result: Any, function: Callable[[Any], Any], out_of: str = "") -> tuple[Tensor, Tensor]:
    """Value of a function on the full result, and on each jackknife replicate (`block ...`). Both are float64.

    Args:
        result: the result with its replicates.
        function: takes a result and returns a number or a tensor.
        out_of: for counts, the attribute whose sum is their total. The counts of a replicate are scaled to the total of all
            data, because a replicate has fewer samples.

    Raises:
        LayersimError: the function returns different shapes for different blocks.
    """
    value, *each = (torch.as_tensor(function(one), dtype=torch.float64) for one in (result, *result.replicates))
    for one in each:
        if one.shape != value.shape:
            raise LayersimError(
                f"The function passed to `interval` returns shape {tuple(value.shape)} on all data and shape "
                f"{tuple(one.shape)} without one jackknife block; the shape must not depend on the data."
            )
    if out_of:
        total, *rest = (
            torch.as_tensor(getattr(one, out_of), dtype=torch.float64).sum() for one in (result, *result.replicates)
        )
        each = [one * (total / own) for one, own in zip(each, rest, strict=True)]
    return value, torch.stack(each) if each else value.new_zeros(0, *value.shape)


def headline_lines(result: Any) -> list[str]:
    """The headline numbers of a result as lines of text."""
    return [equation(name, text) for name, text in headline_texts(result).items()]


def headline_texts(result: Any) -> dict[str, str]:
    """The headline numbers as text, with ± half their 95 % intervals."""
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
    """A number as text, rounded to the precision of its margin. A margin of the size of rounding errors is left out.

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
    """Half the width of each headline number's 95 % interval. Empty if the result has no intervals."""
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
        # A number without a width is a count. A fraction that is 0 or 1 by chance has the interval of its field.
        if found is not None and bool(found.low < found.high):
            intervals[name] = found
    return intervals


def has_margin(headline: str) -> bool:
    """Whether the headline number with this description can have an interval. p-values and extremes over layers have none."""
    return not is_p_value(headline) and EXTREME.search(headline) is None


def is_p_value(headline: str) -> bool:
    """Whether the headline number with this description is a p-value."""
    return headline.startswith(("p-value", "p ("))


def refuse_no_blocks(result: Any) -> None:
    """Raise an error if a result has no intervals."""
    if not result.has_intervals:
        raise LayersimError(f"{type(result).__name__} has no intervals. Pass `intervals=True` to `analyze`.")


def with_margin(result: Any, what: Callable[[Any], Any], percent: bool = False) -> str:
    """A number of a result as text, with ± half its 95 % interval. Without intervals, the number stands alone.

    Args:
        result: a result with or without intervals.
        what: takes the result and returns the number.
        percent: whether to write the number as a percentage.
    """
    margin = math.nan
    if result.has_intervals and (found := function_interval(result, what, 0.95)) is not None:
        margin = float(found.high - found.low) / 2
    return margin_text(float(what(result)), margin, percent)
