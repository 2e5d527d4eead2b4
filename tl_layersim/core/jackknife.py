"""Delete-one-block jackknife: standard error and t interval of a statistic, from its values without each block of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Term = TypeVar("Term")


class ConfidenceInterval(NamedTuple):
    """A statistic with its confidence interval, as float64 tensors of one shape.

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
    """For each term, the sum of all others, in the order of the terms.

    Nothing is subtracted, so that what only one term contains is absent from the sum without it, up to the last bit. Halves are
    summed before quarters: about n log2(n) additions, and log2(n) sums held at a time.

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
    """The sums of `before`, all terms but one, and `after`; None stands for no term."""
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


def t_interval(
    value: Tensor, error: Tensor, blocks: int, level: float, within: tuple[float, float] = (-math.inf, math.inf)
) -> ConfidenceInterval:
    """Student's t interval about a statistic, cut at the bounds of the quantity.

    Args:
        value: the statistic.
        error: its standard error.
        blocks: number of blocks behind the error; the interval has one degree of freedom fewer.
        level: of confidence, such as 0.95.
        within: bounds that no value can exceed.
    """
    return interval_from_error(value, error, torch.full_like(error, blocks - 1), level, within)


def interval_from_error(
    value: Tensor, error: Tensor, degrees: Tensor, level: float, within: tuple[float, float] = (-math.inf, math.inf)
) -> ConfidenceInterval:
    """Student's t interval about a statistic, from its standard error and degrees of freedom.

    Args:
        value: the statistic.
        error: its standard error.
        degrees: of freedom of each error; an interval without any is NaN.
        level: of confidence.
        within: bounds that no value can exceed.
    """
    from scipy.stats import t

    margin = torch.as_tensor(t.ppf(0.5 + level / 2, degrees.numpy())) * error
    # A value may exceed a bound by rounding; its interval contains it nevertheless.
    low = torch.minimum((value - margin).clamp(min=within[0]), value)
    high = torch.maximum((value + margin).clamp(max=within[1]), value)
    return ConfidenceInterval(value, low.where(~margin.isnan(), math.nan), high.where(~margin.isnan(), math.nan), error)


def p_value_from_error(value: Tensor, error: Tensor, degrees: Tensor) -> Tensor:
    """Two-sided p-value of Student's t test that a statistic is 0; NaN where the standard error is 0 or NaN.

    Args:
        value: the statistic.
        error: its standard error.
        degrees: of freedom of each error.

    Examples:
        >>> one = torch.tensor(1.0).double()
        >>> round(float(p_value_from_error(2.0 * one, one, 9 * one)), 4)
        0.0766
    """
    from scipy.stats import t

    ratio = (value / error).abs().where(error > 0, math.nan)
    return torch.as_tensor(2 * t.sf(ratio.numpy(), degrees.numpy()), dtype=torch.float64)


def welch_degrees(errors: tuple[Tensor, Tensor], blocks: tuple[int, int]) -> Tensor:
    """Degrees of freedom of the difference of two independent statistics, after Welch and Satterthwaite.

    Args:
        errors: standard errors of the two.
        blocks: number of blocks behind each, two or more.

    Examples:
        Equal errors from equally many blocks: all degrees of both.

        >>> one = torch.tensor(1.0).double()
        >>> float(welch_degrees((one, one), (16, 16)))
        30.0
    """
    a, b = (error.square() for error in errors)
    degrees = (a + b).square() / (a.square() / (blocks[0] - 1) + b.square() / (blocks[1] - 1))
    # Without any error every number of degrees gives the same interval.
    return degrees.where(a + b != 0, float(sum(blocks) - 2))
