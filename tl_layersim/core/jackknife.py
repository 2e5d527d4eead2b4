"""Statistics of sums: the delete-one-block jackknife with its t interval, and quantiles from histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .arguments import typed

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


Term = TypeVar("Term")
# A change below this fraction of a number is rounding: the number does not depend on the block.
ROUNDING_ERROR = 1e-12
UNBOUNDED = (-math.inf, math.inf)


class ConfidenceInterval(NamedTuple):
    """A statistic with its confidence interval: float64 tensors of equal shape.

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


def leave_one_out(terms: Sequence[Term], add: Callable[[Term, Term], Term]) -> Iterator[Term]:
    """For each term in order, the sum of all other terms.

    Nothing is subtracted, so a sum does not depend on the left-out term, to the last bit. Halves are summed before quarters:
    about n log2(n) additions, and log2(n) sums held at a time.

    Args:
        terms: two or more.
        add: adds two terms.

    Examples:
        >>> list(leave_one_out(["a", "b", "c"], lambda a, b: a + b))
        ['bc', 'ac', 'ab']
    """
    yield from _without_each(list(terms), None, None, add)


def _without_each(
    terms: list[Term], before: Term | None, after: Term | None, add: Callable[[Term, Term], Term]
) -> Iterator[Term]:
    """For each term, the sum of `before`, all other terms, and `after`; None stands for no term."""
    if len(terms) == 1:
        rest = before if after is None else after if before is None else add(before, after)
        assert rest is not None
        yield rest
        return
    left, right = terms[: len(terms) // 2], terms[len(terms) // 2 :]
    total = _total(right, add)
    yield from _without_each(left, before, total if after is None else add(total, after), add)
    total = _total(left, add)
    yield from _without_each(right, total if before is None else add(before, total), after, add)


def _total(terms: list[Term], add: Callable[[Term, Term], Term]) -> Term:
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


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
        The standard error of a mean of 1, 2, 3 is that of the textbook, 1 / sqrt(3).

        >>> replicates = torch.tensor([2.5, 2.0, 1.5]).double()
        >>> round(float(standard_error(torch.tensor(2.0).double(), replicates)) * 3 ** 0.5, 9)
        1.0
    """
    count = len(replicates)
    if count < 2:
        return torch.full_like(value, math.nan)
    # Differences from the statistic first: what no block changes has an error of exactly 0.
    deviation = replicates - value
    error: Tensor = ((deviation - deviation.mean(0)).square().sum(0) * ((count - 1) / count)).sqrt()
    # Where the value is not finite, no deviation from it is.
    return error.where(error.isfinite(), math.nan)


def degrees_of_freedom(value: Tensor, replicates: Tensor) -> Tensor:
    """Degrees of freedom of a jackknife error: the number of blocks that change the statistic, minus one.

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
    """Student's t interval of a statistic, symmetric on a transformed scale without bounds, such as the log-odds.

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
        # The derivative of the scale is the sum over both bounds; that of no bound is 0.
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
    """Move x by a step on the scale of `t_interval`."""
    if math.isinf(high):
        return low + (x - low) * step.exp()
    if math.isinf(low):
        return high - (high - x) * (-step).exp()
    # Of log odds; the form keeps the digits of small fractions.
    odds = (x - low) / (high - x) * step.exp()
    return torch.where(odds.isinf(), high, low + (high - low) * odds / (1 + odds))


def neighbour_correlation(replicates: Tensor) -> Tensor:
    """Correlation between neighbouring blocks' contributions to a statistic; near 0 if blocks are independent.

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
    """Two-sided p-value of Student's t test that a statistic is 0; NaN if the standard error is 0 or NaN.

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
    """Degrees of freedom of the difference of two independent statistics, after Welch and Satterthwaite.

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
