"""Standard errors and intervals against naive loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from tl_layersim.core.intervals import (
    Skewness,
    Uncertainty,
    degrees_of_freedom,
    effective_degrees,
    leave_one_out,
    neighbour_correlation,
    p_value_from_error,
    ratio_at,
    skewness_of,
    standard_error,
    symmetrised,
    t_interval,
    welch_degrees,
)

from ..oracles import skewness


def naive_error(samples: list[np.ndarray], statistic) -> float:
    """The delete-one-block jackknife, as a loop."""
    g = len(samples)
    without = [statistic(np.concatenate(samples[:j] + samples[j + 1 :])) for j in range(g)]
    total = 0.0
    for estimate in without:
        total += (estimate - sum(without) / g) ** 2
    return math.sqrt((g - 1) / g * total)


@pytest.mark.parametrize("sizes", [(5, 5, 5, 5), (7, 3, 9, 4, 6), (1, 8)])
@pytest.mark.parametrize("statistic", [np.mean, np.median, lambda x: np.log(np.var(x) + 1)])
def test_the_standard_error_is_that_of_a_naive_loop(sizes, statistic):
    rng = np.random.default_rng(3)
    samples = [rng.normal(2, 1, size) for size in sizes]
    whole = torch.tensor(statistic(np.concatenate(samples)))
    without = [statistic(np.concatenate(samples[:j] + samples[j + 1 :])) for j in range(len(sizes))]

    error = standard_error(whole, torch.tensor(np.array(without)))

    assert float(error) == pytest.approx(naive_error(samples, statistic), rel=1e-10)


def test_the_standard_error_of_a_mean_of_equal_blocks_is_that_of_the_means_of_blocks():
    means = torch.tensor([1.0, 4.0, 2.5, 7.0]).double()
    without = torch.stack([means[[i for i in range(4) if i != j]].mean() for j in range(4)])
    assert float(standard_error(means.mean(), without)) == pytest.approx(float(means.std() / 2), rel=1e-12)


def test_a_field_keeps_its_shape_and_undefined_entries_are_nan():
    value = torch.tensor([[1.0, math.nan, math.inf], [0.0, 2.0, 3.0]]).double()
    without = torch.stack([value + 0.1, value - 0.1, value]).clone()
    without[1, 1, 2] = math.nan

    error = standard_error(value, without)

    assert error.shape == value.shape
    assert error.isnan().tolist() == [[False, True, True], [False, False, True]]
    assert standard_error(value, without[:1]).isnan().all()


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_the_interval_is_of_students_t(level):
    interval = t_interval(torch.tensor(3.0).double(), torch.tensor(0.5).double(), torch.tensor(6.0), level)
    low, high = stats.t.interval(level, df=6, loc=3.0, scale=0.5)
    assert (float(interval.low), float(interval.high)) == pytest.approx((low, high), rel=1e-12)
    assert (float(interval.value), float(interval.error)) == (3.0, 0.5)


@pytest.mark.parametrize(
    ("within", "scale", "back"),
    [
        ((0, 1), lambda x: np.log(x / (1 - x)), lambda y: 1 / (1 + np.exp(-y))),
        ((-1, 1), np.arctanh, np.tanh),
        ((0, math.inf), np.log, np.exp),
        ((1, math.inf), lambda x: np.log(x - 1), lambda y: 1 + np.exp(y)),
        ((-math.inf, 1), lambda x: -np.log(1 - x), lambda y: 1 - np.exp(-y)),
    ],
)
def test_the_interval_is_symmetric_on_the_scale_of_the_bounds(within, scale, back):
    value = 0.7 if within[0] != 1 else 1.7
    error = 0.2
    step = 1e-6
    on_scale = error * (scale(value + step) - scale(value - step)) / (2 * step)
    margin = stats.t.ppf(0.975, 15) * on_scale
    interval = t_interval(torch.tensor(value).double(), torch.tensor(error).double(), torch.tensor(15.0), 0.95, within)
    expected = sorted([back(scale(value) - margin), back(scale(value) + margin)])

    assert [float(interval.low), float(interval.high)] == pytest.approx(expected, rel=1e-6)
    assert within[0] < float(interval.low) < float(interval.high) < within[1]


def test_an_interval_holds_its_value_at_a_bound_and_is_undefined_without_degrees():
    value = torch.tensor([0.0, 1.0, 1 + 1e-12]).double()
    error = torch.tensor(0.1).double().expand(3)
    interval = t_interval(value, error, torch.tensor(20.0), 0.95, within=(0, 1))
    assert bool((interval.low <= value).all() and (value <= interval.high).all())
    assert interval.low[1:].tolist() == pytest.approx([1 - 0.2086] * 2, abs=1e-4)
    assert t_interval(value, error, torch.tensor(math.nan), 0.95).low.isnan().all()
    assert t_interval(value, error * math.nan, torch.tensor(9.0), 0.95).high.isnan().all()

    # Errors far larger than the distance from a bound.
    wide = t_interval(torch.tensor(1e-9).double(), torch.tensor(0.5).double(), torch.tensor(15.0), 0.95, within=(0, 1))
    assert (float(wide.low), float(wide.high)) == (0.0, 1.0)


def test_a_fraction_that_is_a_bound_by_chance_has_the_interval_of_wilson():
    ends = torch.tensor([0.0, 1.0]).double()
    interval = t_interval(ends, 0 * ends, torch.tensor(1e9), 0.95, within=(0, 1), rows=(64, 64))
    for number, events in enumerate((0, 64)):
        expected = proportion_confint(events, 64, method="wilson")
        assert (float(interval.low[number]), float(interval.high[number])) == pytest.approx(expected, abs=1e-9)

    one_end = t_interval(ends, 0 * ends, torch.tensor(15.0), 0.95, within=(0, 1), rows=(64, math.inf))
    assert float(one_end.high[0]) > 0.06
    assert float(one_end.low[1]) == 1.0


def test_a_fraction_at_a_bound_is_worth_as_many_samples_as_the_others_of_its_field():
    value = torch.tensor([0.0, 0.5, 0.2]).double()
    error = torch.tensor([0.0, 0.05, 0.02]).double()
    by_field = t_interval(value, error, torch.tensor(1e9), 0.95, within=(0, 1), rows=(256, 256))
    # 0.5 (1 - 0.5) / 0.05², fewer than the 400 of the other.
    assert float(by_field.high[0]) == pytest.approx(proportion_confint(0, 100, method="wilson")[1], abs=1e-6)

    # But it is worth no more than there are texts.
    few = t_interval(value, error, torch.tensor(1e9), 0.95, within=(0, 1), rows=(16, 16))
    assert float(few.high[0]) == pytest.approx(proportion_confint(0, 16, method="wilson")[1], abs=1e-6)

    by_entry = torch.tensor([20.0, math.inf, math.inf]).double()
    by_entry_interval = t_interval(value, error, torch.tensor(1e9), 0.95, within=(0, 1), rows=(by_entry, by_entry))
    assert float(by_entry_interval.high[0]) == pytest.approx(proportion_confint(0, 20, method="wilson")[1], abs=1e-6)

    plain = t_interval(value, error, torch.tensor(1e9), 0.95, within=(0, 1))
    assert torch.equal(by_field.high[1:], plain.high[1:])
    assert torch.equal(by_field.low, plain.low)


def test_degrees_count_the_blocks_that_change_a_statistic():
    value = torch.tensor([1.0, 2.0, 0.0]).double()
    without = value.expand(16, 3).clone()
    # Rounding is no change.
    without[5:, 0] += 1e-15
    without[:5, 0] += 0.1
    without[:, 1] += torch.arange(1, 17)

    assert degrees_of_freedom(value, without).tolist() == [4, 15, 15]


def test_the_correlation_of_neighbouring_blocks_is_that_of_a_naive_loop():
    rng = np.random.default_rng(1)
    without = rng.normal(size=(16, 3)).cumsum(0)
    correlations = neighbour_correlation(torch.tensor(without))

    for column in range(3):
        d = without[:, column] - without[:, column].mean()
        assert float(correlations[column]) == pytest.approx(sum(a * b for a, b in itertools.pairwise(d)) / sum(d * d))
    assert neighbour_correlation(torch.ones(16, 3).double()).isnan().all()


@pytest.mark.parametrize("count", [2, 3, 5, 16, 31])
def test_each_sum_leaves_out_one_term_and_keeps_the_order(count):
    letters = [chr(ord("a") + i) for i in range(count)]
    assert list(leave_one_out(letters, lambda a, b: a + b)) == ["".join(x for x in letters if x != y) for y in letters]


def test_few_sums_are_held():
    added = []

    def add(a, b):
        added.append(1)
        return a + b

    assert len(list(leave_one_out([(i,) for i in range(32)], add))) == 32
    assert len(added) < 32 * 8


def test_what_no_block_changes_has_no_error():
    value = torch.tensor([0.1, 1 / 3, 64.0]).double()
    assert standard_error(value, value.expand(17, 3)).tolist() == [0.0, 0.0, 0.0]


def test_p_values_and_degrees_are_those_of_scipy():
    rng = np.random.default_rng(0)
    a = rng.normal(0.5, 2.0, 12)
    b = rng.normal(0, 1, 19)
    errors = tuple(torch.tensor(stats.sem(sample)).double() for sample in (a, b))
    expected = stats.ttest_ind(a, b, equal_var=False)
    degrees = welch_degrees(errors, (torch.tensor(11.0), torch.tensor(18.0)))

    assert float(degrees) == pytest.approx(expected.df, rel=1e-12)

    value = torch.tensor(a.mean() - b.mean())
    error = (errors[0] ** 2 + errors[1] ** 2).sqrt()
    assert float(p_value_from_error(value, error, degrees)) == pytest.approx(expected.pvalue, rel=1e-10)
    assert float(p_value_from_error(-value, error, degrees)) == pytest.approx(expected.pvalue, rel=1e-10)


def test_without_variation_there_is_no_test():
    zero = torch.tensor(0.0).double()
    unit = torch.tensor(1.0).double()
    assert p_value_from_error(unit, zero, 9 * unit).isnan()
    assert p_value_from_error(unit, zero * math.nan, 9 * unit).isnan()
    assert float(welch_degrees((zero, zero), (4 * unit, 6 * unit))) == 10.0
    assert float(welch_degrees((unit, zero), (4 * unit, 6 * unit))) == 4.0


def test_equal_errors_from_unequal_numbers_of_blocks_have_fewer_degrees_than_both_together():
    unit = torch.tensor(1.0).double()
    assert float(welch_degrees((unit, unit), (4 * unit, 6 * unit))) == pytest.approx(4 / (1 / 4 + 1 / 6), rel=1e-12)


def test_a_bias_that_all_parts_share_is_no_error():
    """A statistic that falls with the number of samples, whatever the samples are, varies from sample to sample by nothing."""
    assert float(standard_error(torch.tensor(5.0).double(), torch.full((16,), 5.3).double())) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_moments_and_skewed_intervals_are_those_of_plain_python(seed):
    rng = np.random.default_rng(seed)
    without = 0.5 - 0.01 * rng.exponential(size=16) ** (1 + seed / 2)
    value = torch.tensor(without.mean() + 0.001)
    replicates = torch.tensor(without)
    error, skew, effective = skewness.moments(without.tolist())

    uncertainty = Uncertainty.of(value, replicates)

    assert float(uncertainty.error) == pytest.approx(error, rel=1e-12)
    assert float(uncertainty.skewness.skew) == pytest.approx(skew, rel=1e-9)
    assert float(uncertainty.skewness.degrees) == pytest.approx(effective, rel=1e-9)
    assert float(skewness_of(value, replicates)) == float(uncertainty.skewness.skew)
    assert float(effective_degrees(value, replicates)) == float(uncertainty.skewness.degrees)
    for level in (0.9, 0.99):
        interval = t_interval(value, uncertainty.error, uncertainty.degrees, level, skewness=uncertainty.skewness)
        expected = skewness.ends(float(value), error, 15, skew, effective, level)
        assert (float(interval.low), float(interval.high)) == pytest.approx(expected, rel=1e-9)
    for ratio in (-4, -2, 2, 4):
        difference = ratio * error
        p = float(
            p_value_from_error(
                torch.tensor(difference, dtype=torch.float64), uncertainty.error, uncertainty.degrees, uncertainty.skewness
            )
        )
        assert p == pytest.approx(skewness.p_value(difference, error, 15, skew, effective), rel=1e-9)
        # The p-value and the interval say the same.
        ends = t_interval(
            torch.tensor(difference, dtype=torch.float64),
            uncertainty.error,
            uncertainty.degrees,
            1 - p,
            skewness=uncertainty.skewness,
        )
        assert min(abs(float(ends.low)), abs(float(ends.high))) < 1e-6 * error


@pytest.mark.parametrize("skew", [-1.0, -0.3, 0.0, 1e-9, 0.5, 1.0])
def test_the_transformation_of_a_skewed_ratio_is_inverted(skew):
    quantile = torch.linspace(-6, 6, 13).double()
    ratio = ratio_at(quantile, torch.tensor(skew).double())
    torch.testing.assert_close(symmetrised(ratio, torch.tensor(skew).double()), quantile, rtol=1e-9, atol=1e-9)
    assert bool((ratio.diff() > 0).all())


def test_an_end_of_a_skewed_interval_that_lies_beyond_a_bound_is_that_of_the_scale():
    value, error, degrees = (torch.tensor(x).double() for x in (0.02, 0.02, 15.0))
    plain = t_interval(value, error, degrees, 0.95, within=(0, 1))
    for skew in (0.9, -0.9):
        skewed = t_interval(value, error, degrees, 0.95, (0, 1), skewness=Skewness(torch.tensor(skew).double(), degrees))
        assert 0 < float(skewed.low) <= float(plain.low)
        assert float(plain.high) <= float(skewed.high) < 1


def test_the_error_of_one_long_text_has_few_degrees():
    replicates = torch.tensor([0.4] + [0.5 + 0.0001 * j for j in range(15)]).double()
    assert 2 < float(effective_degrees(torch.tensor(0.5).double(), replicates)) < 3

    # A constant, contributions of one size, and a single block that changes the statistic.
    value = torch.tensor([0.5, 0.5, 0.5]).double()
    without = value.expand(16, 3).clone()
    without[:, 1] += torch.tensor([0.1, -0.1]).repeat(8)
    without[0, 2] += 0.1

    assert effective_degrees(value, without)[:2].tolist() == [15, 15]
    assert effective_degrees(value, without)[2].isnan()


def test_few_texts_whose_length_predicts_the_rate_are_covered():
    """Texts of 2 to 400 tokens whose rate is their length / (length + 40): Student's t alone covers 87 to 90 %."""
    torch.manual_seed(0)
    length = (torch.randn(16, 1000).double() + 3).exp().round().clamp(2, 400)
    rate = length / (length + 40)
    events = torch.distributions.Binomial(length, torch.distributions.Beta(20 * rate, 20 * (1 - rate)).sample()).sample()
    many = (torch.randn(2_000_000).double() + 3).exp().round().clamp(2, 400)
    truth = float((many * many / (many + 40)).sum() / many.sum())
    value = events.sum(0) / length.sum(0)
    without = (events.sum(0) - events) / (length.sum(0) - length)

    error, degrees, skew = Uncertainty.of(value, without)
    shares = [
        float(((interval.low <= truth) & (truth <= interval.high)).double().mean())
        for interval in (
            t_interval(value, error, degrees, 0.95, (0, 1)),
            t_interval(value, error, degrees, 0.95, (0, 1), skewness=skew),
        )
    ]

    assert shares[0] < 0.91
    assert 0.915 < shares[1] < 0.97
