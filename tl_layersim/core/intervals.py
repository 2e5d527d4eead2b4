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
from .result_declarations import Declaration, declarations
from .wording import brief, equation, number_text, p_value_text, rounded_to_margin

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
    width = (high - low) / bins
    is_empty = total.squeeze(-1) == 0
    # Cumulative counts ascend, so the number of bins below a target is found by bisection.
    targets = torch.tensor(quantiles, dtype=torch.float64, device=total.device) * total
    empty_bins = torch.searchsorted(cumulative, torch.zeros_like(total), right=True)
    # The first bin that is not empty and whose cumulative count reaches the target.
    index = torch.searchsorted(cumulative, targets).maximum(empty_bins).clamp(max=bins - 1)
    count = counts.gather(-1, index)
    count_before = cumulative.gather(-1, index) - count
    fraction = (targets - count_before) / count
    values = low + (index + fraction) * width
    return values.masked_fill(is_empty[..., None], math.nan).movedim(-1, 0).contiguous()


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
        assert before is not None or after is not None
        if before is not None and after is not None:
            yield add(before, after)
        elif before is not None:
            yield before
        elif after is not None:
            yield after
        return
    middle = len(terms) // 2
    first_half = terms[:middle]
    second_half = terms[middle:]
    # The terms of the first half are left out one by one, so all of the second half follows them, and the other way round.
    total = functools.reduce(add, second_half)
    yield from leave_one_out(first_half, add, before, total if after is None else add(total, after))
    total = functools.reduce(add, first_half)
    yield from leave_one_out(second_half, add, total if before is None else add(before, total), after)


def standard_error(value: Tensor, replicates: Tensor) -> Tensor:
    r"""Standard error of a statistic by the delete-one-block jackknife.

    $$\mathrm{se}^2 = \frac{g - 1}{g} \sum_{j=1}^{g} \Big(\hat\theta_{(j)} - \frac{1}{g} \sum_i \hat\theta_{(i)}\Big)^2$$

    with the statistic without each of the g blocks. It is about their mean: a bias that depends on the number of samples, as of
    CCA and of effective ranks, is common to all of them and to another sample of the same size.

    Blocks hold equally many batches of texts, so they are alike as draws, and numbers of tokens are part of what is drawn.
    Formulas with these numbers (Busing, Meijer and van der Leeden 1999) suppose that a block has a variance in proportion to
    its tokens: errors are too small where long texts have more, as with random effects of texts and in sums over pairs of
    tokens. `benchmarks/studies/coverage.py` measures this.

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
    squares = (deviation - deviation.mean(0)).square()
    error: Tensor = (squares.sum(0) * ((count - 1) / count)).sqrt()
    # A value that is not finite has no error.
    return error.where(error.isfinite(), math.nan)


class Skewness(NamedTuple):
    """Skewness of a statistic (`skewness_of`), and the degrees of freedom of its error (`effective_degrees`)."""

    skew: Tensor
    degrees: Tensor


def skewness_of(value: Tensor, replicates: Tensor) -> Tensor:
    r"""Skewness of a statistic, from its jackknife replicates: near 0 if the blocks' contributions are symmetric.

    $$s = \frac{\sum_j d_j^3}{\big(\sum_j d_j^2\big)^{3/2}}, \qquad
    d_j = \frac{1}{g} \sum_i \hat\theta_{(i)} - \hat\theta_{(j)}$$

    For a mean of g numbers it is the sample's coefficient of skewness over the root of g.

    Args:
        value: the statistic on all data.
        replicates: `block ...`, the statistic without each block.

    Returns:
        In the shape of `value`, between -1 and 1; 0 if no block changes the statistic.

    Examples:
        The mean of 0, 0, 0, 0, 5.

        >>> without = torch.tensor([1.25, 1.25, 1.25, 1.25, 0.0]).double()
        >>> round(float(skewness_of(torch.tensor(1.0).double(), without)), 3)
        0.671
    """
    if len(replicates) < 2:
        return torch.zeros_like(value)
    deviation = replicates - value
    contributions = deviation.mean(0) - deviation
    ratio: Tensor = contributions.pow(3).sum(0) / contributions.square().sum(0).pow(1.5)
    return ratio.where(ratio.isfinite(), 0.0)


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
    # The largest of no deviations is not defined.
    rounding = torch.maximum(ROUNDING_ERROR * value.abs(), 1e-9 * deviation.amax(0)) if len(replicates) else value
    changed = (deviation > rounding).sum(0).double()
    degrees = (changed - 1).where(changed != 1, math.nan)
    # A constant has an interval without width.
    return degrees.where(changed > 0, float(max(len(replicates) - 1, 1)))


def effective_degrees(value: Tensor, replicates: Tensor) -> Tensor:
    r"""Degrees of freedom of a jackknife error that a few blocks may make up.

    $$\nu = \min\Big(k - 1, \frac{2 k}{\kappa - 1}\Big)$$

    with the number k of blocks that change the statistic and the kurtosis κ of their contributions, 3 for normal ones. If a few
    long texts or rare large losses make up most of the error, it is as uncertain as one of fewer blocks.

    Args:
        value: the statistic on all data.
        replicates: `block ...`, the statistic without each block.

    Returns:
        In the shape of `value`; NaN where `degrees_of_freedom` is.

    Source:
        Satterthwaite 1946, An approximate distribution of estimates of variance components; the variance of a sample variance
        of k numbers is (κ - 1) / k times its square.

    Examples:
        One of sixteen blocks makes up most of the error.

        >>> without = torch.tensor([0.4] + 14 * [0.501] + [0.502]).double()
        >>> round(float(effective_degrees(torch.tensor(0.5).double(), without)), 1)
        2.4
    """
    degrees = degrees_of_freedom(value, replicates)
    if len(replicates) < 2:
        return degrees
    deviation = replicates - value
    squares = (deviation - deviation.mean(0)).square()
    changed = degrees + 1
    kurtosis = changed * squares.square().sum(0) / squares.sum(0).square()
    # Contributions of one size have a kurtosis of 1 and leave no doubt about the error. A constant has none.
    effective = (2 * changed / (kurtosis - 1)).where(kurtosis > 1, math.inf)
    return torch.minimum(degrees, effective)


def symmetrised(ratio: Tensor, skew: Tensor | float) -> Tensor:
    r"""Hall's transformation of the ratio of a statistic's deviation to its error, which then is nearly Student's t.

    $$g(t) = t + \frac{s}{3} t^2 + \frac{s^2}{27} t^3 + \frac{s}{6}$$

    It is monotone, and undoes that a skewed statistic and its error depend on each other.

    Args:
        ratio: (statistic - its true value) / standard error.
        skew: skewness s of the statistic, see `skewness_of`.

    Source:
        Hall 1992, On the removal of skewness by transformation.
    """
    skew = torch.as_tensor(skew, dtype=torch.float64)
    return ratio + skew / 3 * ratio.square() + skew.square() / 27 * ratio.pow(3) + skew / 6


def ratio_at(quantile: Tensor, skew: Tensor | float) -> Tensor:
    """Inverse of `symmetrised`: the ratio of deviation to error whose transformation is a quantile of Student's t.

    Args:
        quantile: the quantile.
        skew: skewness of the statistic.

    Examples:
        >>> skew = torch.tensor(0.4).double()
        >>> round(float(symmetrised(ratio_at(torch.tensor(2.0).double(), skew), skew)), 9)
        2.0
    """
    skew = torch.as_tensor(skew, dtype=torch.float64)
    shifted = quantile - skew / 6
    cube = 1 + skew * shifted
    root = cube.sign() * cube.abs().pow(1 / 3)
    # root - 1 = (cube - 1) / (root² + root + 1), which keeps its digits for a small skewness.
    return 3 * shifted / (root.square() + root + 1)


def t_interval(
    value: Tensor,
    error: Tensor,
    degrees: Tensor,
    level: float,
    within: tuple[float | Tensor, float | Tensor] = UNBOUNDED,
    rows: tuple[float | Tensor, float | Tensor] = (math.inf, math.inf),
    skewness: Skewness | None = None,
) -> ConfidenceInterval:
    """Student's t interval of a statistic, on a scale without bounds, corrected for skewness.

    The scale is log((x - a) / (b - x)) for a quantity between a and b, and log(x - a) or -log(b - x) for one with a single
    bound. Errors are carried over by the derivative. So the interval of a rare fraction or of a similarity near 1 is longer on
    the side away from the bound, and no end has to be cut, except at a value that is a bound itself.

    With `skewness`, each end is the farther one of this interval and of Hall's interval for skewed statistics, unless Hall's
    end lies beyond a bound. Few texts show too little of the skewness of their kind, so neither is long enough alone
    (`benchmarks/studies/coverage.py`).

    Args:
        value: the statistic.
        error: its standard error.
        degrees: degrees of freedom of each error; an interval without any is NaN.
        level: confidence level, such as 0.95.
        within: bounds of the statistic.
        rows: for fractions, the number of independent units, such as texts, for each bound that all samples may reach by
            chance; infinite for another bound. A fraction at such a bound has Wilson's interval, for as many independent
            samples as the entry with the largest design effect is worth, but for no more than these units.
        skewness: skewness of the statistic and the effective degrees of its error.

    Source:
        Hall 1992, On the removal of skewness by transformation. Wilson 1927, Probable inference, the law of succession, and
        statistical inference. Effective number of samples p (1 - p) / error²: Korn and Graubard 1998, Confidence intervals for
        proportions with small expected number of positive counts estimated from survey data.

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

    lower_bound = torch.as_tensor(within[0], dtype=torch.float64)
    upper_bound = torch.as_tensor(within[1], dtype=torch.float64)
    quantile = torch.as_tensor(t.ppf(0.5 + level / 2, degrees.numpy()))
    margin = quantile * error
    # The derivative of the scale is a sum over both bounds; an infinite bound adds 0.
    step = margin * (1 / (value - lower_bound) + 1 / (upper_bound - value))
    is_inside = (value > lower_bound) & (value < upper_bound)
    has_scale = is_inside & (lower_bound.isfinite() | upper_bound.isfinite())
    low = _moved_on_scale(value, -step, lower_bound, upper_bound)
    low = low.where(has_scale, (value - margin).maximum(lower_bound))
    high = _moved_on_scale(value, step, lower_bound, upper_bound)
    high = high.where(has_scale, (value + margin).minimum(upper_bound))
    if skewness is not None:
        skewed_quantile = torch.as_tensor(t.ppf(0.5 + level / 2, skewness.degrees.numpy()))
        # The true value lies below the statistic where the statistic is too large.
        skewed_low = value - ratio_at(skewed_quantile, skewness.skew) * error
        skewed_high = value - ratio_at(-skewed_quantile, skewness.skew) * error
        low = torch.minimum(low, skewed_low.where(skewed_low > lower_bound, low))
        high = torch.maximum(high, skewed_high.where(skewed_high < upper_bound, high))
    margin_at_lower, margin_at_upper = chance_margins(value, error, quantile, within, rows)
    high = high.where(margin_at_lower == 0, lower_bound + margin_at_lower)
    low = low.where(margin_at_upper == 0, upper_bound - margin_at_upper)
    # A value may exceed a bound by rounding; its interval contains it nevertheless.
    low = torch.minimum(low, value)
    high = torch.maximum(high, value)
    has_margin = ~margin.isnan()
    return ConfidenceInterval(value, low.where(has_margin, math.nan), high.where(has_margin, math.nan), error)


def chance_margins(
    value: Tensor,
    error: Tensor,
    quantile: Tensor,
    within: tuple[float | Tensor, float | Tensor],
    rows: tuple[float | Tensor, float | Tensor],
) -> tuple[Tensor, Tensor]:
    """Widths of Wilson's intervals of fractions that are at their lower or at their upper bound by chance; 0 elsewhere.

    Args:
        value: the fractions.
        error: their standard errors.
        quantile: quantile of Student's t.
        within: bounds of the fractions.
        rows: numbers of independent units, see `t_interval`.
    """
    low = torch.as_tensor(within[0], dtype=torch.float64)
    high = torch.as_tensor(within[1], dtype=torch.float64)
    units_at_low = torch.as_tensor(rows[0], dtype=torch.float64).expand_as(value)
    units_at_high = torch.as_tensor(rows[1], dtype=torch.float64).expand_as(value)
    zero = torch.zeros_like(value)
    if not bool((units_at_low.isfinite() | units_at_high.isfinite()).any()):
        return zero, zero
    has_error = (value > low) & (value < high) & (error > 0)
    effective_samples = ((value - low) * (high - value) / error.square())[has_error]
    most_samples = float(effective_samples.min()) if len(effective_samples) else math.inf
    square = quantile.square()
    margin_at_low = (high - low) * square / (square + units_at_low.clamp(max=most_samples))
    margin_at_high = (high - low) * square / (square + units_at_high.clamp(max=most_samples))
    return (
        margin_at_low.where((value == low) & units_at_low.isfinite(), zero),
        margin_at_high.where((value == high) & units_at_high.isfinite(), zero),
    )


def _moved_on_scale(x: Tensor, step: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Move x by a step on the log or log-odds scale of `t_interval`."""
    above_low = low + (x - low) * step.exp()
    below_high = high - (high - x) * (-step).exp()
    # The scale of two bounds is log-odds. This form keeps the digits of small fractions.
    odds = (x - low) / (high - x) * step.exp()
    between = torch.where(odds.isinf(), high, low + (high - low) * odds / (1 + odds))
    with_upper_bound = torch.where(low.isinf(), below_high, between)
    return torch.where(high.isinf(), above_low, with_upper_bound)


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


def p_value_from_error(value: Tensor, error: Tensor, degrees: Tensor, skewness: Skewness | None = None) -> Tensor:
    """Two-sided p-value of a t test that a statistic is 0. NaN if the standard error is 0 or NaN.

    It is at most 1 - level exactly if the `t_interval` of the statistic, without bounds, does not contain 0.

    Args:
        value: the statistic.
        error: its standard error.
        degrees: degrees of freedom of each error.
        skewness: skewness of the statistic and the effective degrees of its error.

    Examples:
        >>> one = torch.tensor(1.0).double()
        >>> round(float(p_value_from_error(2.0 * one, one, 9 * one)), 4)
        0.0766
    """
    from scipy.stats import t

    ratio = (value / error).where(error > 0, math.nan)
    p = torch.as_tensor(2 * t.sf(ratio.abs().numpy(), degrees.numpy()), dtype=torch.float64)
    if skewness is None:
        return p
    corrected = symmetrised(ratio, skewness.skew)
    # Below 0 on the other side of the statistic's centre, where nothing is rejected.
    distance = (corrected * ratio.sign()).clamp(min=0)
    corrected_p = torch.as_tensor(2 * t.sf(distance.numpy(), skewness.degrees.numpy()), dtype=torch.float64)
    return p.maximum(corrected_p)


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
    a = errors[0].square()
    b = errors[1].square()
    joint = (a + b).square() / (a.square() / degrees[0] + b.square() / degrees[1])
    # Without any error every number of degrees gives the same interval.
    return joint.where(a + b != 0, degrees[0] + degrees[1])


class Uncertainty(NamedTuple):
    """Standard error of a statistic, the degrees of freedom of the error, and the skewness of the statistic."""

    error: Tensor
    degrees: Tensor
    skewness: Skewness

    @classmethod
    def of(cls, value: Tensor, replicates: Tensor) -> Uncertainty:
        """The uncertainty of a statistic, from its jackknife replicates.

        Args:
            value: the statistic on all data.
            replicates: `block ...`, the statistic without each block.
        """
        skewness = Skewness(skewness_of(value, replicates), effective_degrees(value, replicates))
        return cls(standard_error(value, replicates), degrees_of_freedom(value, replicates), skewness)

    def at_least(self, other: Uncertainty, ratio: float) -> Uncertainty:
        """This uncertainty, or that of a sample of the other's texts with as many texts as this one, if it is larger.

        A few texts may all miss what is rare, such as large losses, and their error misses it too. The larger sample shows it.

        Args:
            other: uncertainty of the same statistic in a larger sample.
            ratio: number of texts of the other sample over that of this one.
        """
        error = other.error * math.sqrt(ratio)
        skew = (other.skewness.skew * math.sqrt(ratio)).clamp(-1, 1)
        is_larger = error > self.error
        skewness = Skewness(
            skew.where(is_larger, self.skewness.skew),
            other.skewness.degrees.where(is_larger, self.skewness.degrees),
        )
        return Uncertainty(error.where(is_larger, self.error), other.degrees.where(is_larger, self.degrees), skewness)

    def of_difference(self, subtracted: Uncertainty) -> Uncertainty:
        """Uncertainty of this statistic minus an independent one. Squared errors and third moments add up.

        Args:
            subtracted: uncertainty of the other statistic.
        """
        errors = (self.error, subtracted.error)
        error = (errors[0].square() + errors[1].square()).sqrt()
        third_moment = self.skewness.skew * errors[0].pow(3) - subtracted.skewness.skew * errors[1].pow(3)
        skew = (third_moment / error.pow(3)).where(error > 0, 0.0)
        degrees = welch_degrees(errors, (self.degrees, subtracted.degrees))
        effective = welch_degrees(errors, (self.skewness.degrees, subtracted.skewness.degrees))
        return Uncertainty(error, degrees, Skewness(skew, effective))


def interval_of(result: Any, what: str | Callable[[Any], Any], level: float) -> ConfidenceInterval:
    """Confidence interval of a tensor field, or of a function of the result. It implements `Result.interval`."""
    refuse_no_blocks(result)
    if isinstance(what, str):
        return _field_interval(result, what, level)
    interval = function_interval(result, what, level)
    if interval is None:
        raise LayersimError(
            f"The function passed to `interval` returns {number_text(float(what(result)))}, which has no interval: a maximum, "
            "minimum, index or count jumps if a part of the data is left out. Return a mean, a difference, or an entry at a "
            "fixed index."
        )
    return interval


def _field_interval(result: Any, name: str, level: float) -> ConfidenceInterval:
    field = field_named(result, name)
    declared = result.declared(name)
    if declared.within is None:
        fields = ", ".join(field for field, bounds in bounds_of(result).items() if bounds is not None)
        raise LayersimError(f"{type(result).__name__}.{name} has no interval; fields with intervals: {fields or 'none'}.")
    value, replicates = with_and_without_blocks(result, functools.partial(aligned, result=result, field=field), declared)
    if not declared.out_of:
        return jackknife_interval(value, replicates, level, declared.within, unit_counts_at_bounds(result, declared))
    total = declared.total(result)
    low, high = declared.within
    # A count is at most its total.
    within = (low / total, torch.as_tensor(high).minimum(total) / total)
    fraction = jackknife_interval(value / total, replicates / total, level, within, unit_counts_at_bounds(result, declared))
    return ConfidenceInterval(value, fraction.low * total, fraction.high * total, fraction.error * total)


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
    values = torch.cat([value[None], replicates]) if len(replicates) else value[None]
    if value.dim() or not bool(values.isfinite().all()):
        return jackknife_interval(value, replicates, level)
    if bool((values != value).any()) and bool((values == values.round()).all()):
        return None
    # Fields with an entry that is the number in all replicates, with the index of the entry.
    entries: list[tuple[str, int]] = []
    jumps = False
    for field in bounds_of(result):
        tensors = [getattr(part, field) for part in (result, *result.replicates)]
        if len({tensor.shape for tensor in tensors}) > 1:
            continue
        is_equal = torch.stack([tensor.reshape(-1) for tensor in tensors]) == values[:, None]
        indices = is_equal.all(0).nonzero()
        if len(indices):
            entries.append((field, int(indices[0])))
        if bool(is_equal.any(1).all()):
            jumps = True
    if not entries:
        return None if jumps else jackknife_interval(value, replicates, level)
    # A number at a bound may be in several fields. Fields that reach the bound by chance have intervals with a width.
    field, index = min(entries, key=lambda entry: not result.declared(entry[0]).by_chance)
    if result.declared(field).within is None:
        return jackknife_interval(value, replicates, level)
    interval = interval_of(result, field, level)
    return ConfidenceInterval(*(tensor.reshape(-1)[index] for tensor in interval))


def field_named(result: Any, name: str) -> str:
    """Attribute name of the tensor field with a given name in tables.

    Args:
        result: the result, or its class.
        name: name of the field in tables; "values" is allowed too.

    Raises:
        LayersimError: the result has no such field.
    """
    attributes = {declared.name: attribute for attribute, declared in declarations(result).items()}
    attributes["values"] = "values"
    if not isinstance(name, str) or name not in attributes:
        raise LayersimError(f"`field` is {brief(name)}; {type(result).__name__} has the fields {', '.join(attributes)}.")
    return attributes[name]


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
        labels = result.coordinates(axis)
        replicate_labels = replicate.coordinates(axis)
        if labels == replicate_labels:
            continue
        # One more entry, after the others, for the labels that the replicate lacks.
        undefined = values.new_full((*values.shape[:dim], 1, *values.shape[dim + 1 :]), math.nan)
        indices = []
        for label in labels:
            indices.append(replicate_labels.index(label) if label in replicate_labels else len(replicate_labels))
        values = torch.cat([values, undefined], dim).index_select(dim, torch.tensor(indices))
    return values


def bounds_of(result: Any) -> dict[str, tuple[float, float] | None]:
    """Lower and upper bound of each tensor field, by name; None for a field without intervals."""
    return {name: declared.within for name, declared in declarations(result).items()}


def chance_error(result: Any, declared: Declaration, value: Tensor, error: Tensor, degrees: Tensor, level: float) -> Tensor:
    """Standard error that gives Wilson's interval to fractions that are at a bound by chance; 0 for other entries.

    Args:
        result: the result.
        declared: the declaration of the field.
        value: the field.
        error: its jackknife error, which is 0 at a bound.
        degrees: degrees of freedom of the error.
        level: level of the interval.
    """
    from scipy.stats import t

    if not declared.by_chance or declared.within is None:
        return torch.zeros_like(value)
    total = torch.ones(()).double()
    within = declared.within
    if declared.out_of:
        total = declared.total(result)
        within = (0.0, 1.0)
    quantile = torch.as_tensor(t.ppf(0.5 + level / 2, degrees.numpy()))
    at_low, at_high = chance_margins(value / total, error / total, quantile, within, unit_counts_at_bounds(result, declared))
    return (at_low + at_high) * total / quantile


def unit_counts_at_bounds(result: Any, declared: Declaration) -> tuple[Tensor, Tensor]:
    """Number of independent units behind each entry of a field, for its lower and its upper bound.

    It is infinite at a bound that no sample reaches by chance, and for entries that are at a bound by definition.

    Args:
        result: the result.
        declared: the declaration of the field.
    """
    texts = torch.tensor(float(result.provenance.texts), dtype=torch.float64)
    units = texts if declared.units is None else texts.minimum(declared.units(result))
    if declared.certain is not None:
        units = torch.where(declared.certain(result), math.inf, units)
    never = torch.tensor(math.inf, dtype=torch.float64)
    low, high = declared.within or UNBOUNDED
    # A count reaches its total where the fraction reaches 1.
    if declared.out_of:
        high = 1
    return (units if low in declared.by_chance else never, units if high in declared.by_chance else never)


def jackknife_interval(
    value: Tensor,
    replicates: Tensor,
    level: float,
    within: tuple[float | Tensor, float | Tensor] = UNBOUNDED,
    rows: tuple[float | Tensor, float | Tensor] = (math.inf, math.inf),
) -> ConfidenceInterval:
    """Confidence interval of a statistic, from its jackknife replicates.

    Args:
        value: the statistic on all data.
        replicates: `block ...`, the statistic without each block.
        level: confidence level.
        within: bounds of the statistic, see `t_interval`.
        rows: numbers of independent units, see `t_interval`.
    """
    error, degrees, skewness = Uncertainty.of(value, replicates)
    return t_interval(value, error, degrees, level, within, rows, skewness)


def with_and_without_blocks(
    result: Any, function: Callable[[Any], Any], declared: Declaration | None = None
) -> tuple[Tensor, Tensor]:
    """Value of a function on the full result, and on each jackknife replicate (`block ...`). Both are float64.

    Args:
        result: the result with its replicates.
        function: takes a result and returns a number or a tensor.
        declared: declaration of the field that the function returns; None for another function. Counts of a replicate are
            scaled to the total of all data, because a replicate has fewer samples.

    Raises:
        LayersimError: the function returns different shapes for different blocks.
    """
    value = torch.as_tensor(function(result), dtype=torch.float64)
    replicates = [torch.as_tensor(function(replicate), dtype=torch.float64) for replicate in result.replicates]
    for replicate_value in replicates:
        if replicate_value.shape != value.shape:
            raise LayersimError(
                f"The function passed to `interval` returns shape {tuple(value.shape)} on all data and shape "
                f"{tuple(replicate_value.shape)} without one jackknife block; the shape must not depend on the data."
            )
    if declared is not None and declared.out_of:
        total = declared.total(result)
        for number, replicate in enumerate(result.replicates):
            replicates[number] = replicates[number] * (total / declared.total(replicate))
    return value, torch.stack(replicates) if replicates else value.new_zeros(0, *value.shape)


def headline_lines(result: Any) -> list[str]:
    """The headline numbers of a result as lines of text."""
    return [equation(name, text) for name, text in headline_texts(result).items()]


def headline_texts(result: Any) -> dict[str, str]:
    """The headline numbers as text, with ± half their 95 % intervals."""
    margins = headline_margins(result)
    headlines_of_untrained = [untrained.headline() for untrained in result.untrained]
    texts = {}
    for name, value in result.headline().items():
        text = p_value_text(value) if is_p_value(name) else margin_text(value, margins.get(name, math.nan))
        values_of_untrained = [headline[name] for headline in headlines_of_untrained if name in headline]
        if values_of_untrained:
            text += f" (untrained: {number_text(sum(values_of_untrained) / len(values_of_untrained))})"
        texts[name] = text
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
    return {name: float(interval.high - interval.low) / 2 for name, interval in headline_intervals(result).items()}


def headline_intervals(result: Any) -> dict[str, ConfidenceInterval]:
    """The 95 % intervals of the headline numbers; empty if the result has no intervals.

    A number that is whole on all data and on every part of it is a count, such as of prompts, and has no interval. A p-value
    has none either, nor an extreme over layers: the jackknife fails where another layer is the largest in other data. An entry
    of a field has the interval of the field.
    """
    if not result.has_intervals:
        return {}
    headlines_of_replicates = [replicate.headline() for replicate in result.replicates]
    intervals = {}
    for name, number in result.headline().items():
        if not has_margin(name):
            continue
        value = torch.tensor(number, dtype=torch.float64)
        replicates = [headline.get(name, math.nan) for headline in headlines_of_replicates]
        interval = _number_interval(result, value, torch.tensor(replicates, dtype=torch.float64), 0.95)
        # A number without a width is a count. A fraction that is 0 or 1 by chance has the interval of its field.
        if interval is not None and bool(interval.low < interval.high):
            intervals[name] = interval
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
    if result.has_intervals:
        interval = function_interval(result, what, 0.95)
        if interval is not None:
            margin = float(interval.high - interval.low) / 2
    return margin_text(float(what(result)), margin, percent)
