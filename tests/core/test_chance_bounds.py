"""Fractions and counts that are at a bound by chance: their intervals are those of Wilson for as many texts as there are."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from statsmodels.stats.proportion import proportion_confint

import tl_layersim as lsim
from tl_layersim.analyzers.exit_curve import ExitCurveResult
from tl_layersim.analyzers.saturation import SaturationResult
from tl_layersim.analyzers.task_metrics import TaskMetricsResult

from ..inputs.views import provenance

BLOCKS = 16
TEXTS = 64
# Student's t of 15 degrees instead of the normal quantile.
T = 2.131449545559323
LAYERS = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3)))


def about(tokens: int):
    return dataclasses.replace(provenance(), texts=TEXTS, tokens=tokens)


def width(texts: float) -> float:
    """Upper end of Wilson's interval of no event in so many texts."""
    return T**2 / (T**2 + texts)


def test_the_width_is_wilsons():
    from scipy.stats import norm

    z = norm.ppf(0.975)
    assert proportion_confint(0, TEXTS, method="wilson")[1] == pytest.approx(z**2 / (z**2 + TEXTS), abs=1e-12)


def saturation(blocks: list[list[int]]) -> SaturationResult:
    """A result with replicates, from the counts of each block of the data."""

    def result(counts: torch.Tensor) -> SaturationResult:
        return SaturationResult(
            values=counts,
            cumulative=counts.cumsum(0) / counts.sum(),
            early_share=counts[:-1].sum() / counts.sum(),
            cosine_to_last=torch.full((3,), math.nan).double(),
            correlation=torch.tensor(math.nan).double(),
            unembedding="",
            layers=LAYERS,
            provenance=about(int(counts.sum())),
        )

    counts_of_blocks = torch.tensor(blocks).double()
    replicates = tuple(result(counts_of_blocks.sum(0) - block) for block in counts_of_blocks)
    return dataclasses.replace(result(counts_of_blocks.sum(0)), replicates=replicates, block_tokens=(1,) * len(blocks))


def test_a_count_is_its_total_times_the_interval_of_the_fraction():
    # No token saturates at block 0, and half of 48 tokens a block at each of the others.
    measured = saturation([[0, 24 + j % 3, 24 - j % 3] for j in range(BLOCKS)])
    total = BLOCKS * 48
    counts = measured.interval("values")
    cumulative = measured.interval("cumulative")

    assert (float(counts.low[0]), float(counts.value[0])) == (0.0, 0.0)
    # The others are worth more than 64 independent samples.
    assert float(counts.high[0]) == pytest.approx(total * width(TEXTS), rel=1e-9)
    assert float(cumulative.high[0]) == pytest.approx(width(TEXTS), rel=1e-9)
    torch.testing.assert_close(counts.high[1] / total, cumulative.high[1])
    torch.testing.assert_close(counts.low[1] / total, cumulative.low[1])
    assert bool((counts.high < total).all())
    # All tokens have saturated at the last block by definition.
    assert (float(cumulative.low[2]), float(cumulative.high[2])) == (1.0, 1.0)


def test_all_tokens_may_saturate_early_by_chance():
    measured = saturation([[24, 24, 0]] * BLOCKS)
    cumulative = measured.interval("cumulative")
    early = measured.interval("early_share")

    assert float(cumulative.low[1]) == pytest.approx(1 - width(TEXTS), rel=1e-9)
    assert float(early.low) == pytest.approx(1 - width(TEXTS), rel=1e-9)
    assert float(measured.interval("values").high[2]) == pytest.approx(BLOCKS * 48 * width(TEXTS), rel=1e-9)


def test_entries_that_are_worth_less_than_the_texts_bound_a_count():
    # Blocks of the data are of one kind, so 64 texts are worth about 16.
    measured = saturation([[0, 48 * (j % 2), 48 - 48 * (j % 2)] for j in range(BLOCKS)])
    error = float(measured.interval("cumulative").error[1])
    worth = 0.25 / error**2

    assert worth < TEXTS / 3
    assert float(measured.interval("cumulative").high[0]) == pytest.approx(width(worth), rel=1e-9)
    assert float(measured.interval("values").high[0]) == pytest.approx(BLOCKS * 48 * width(worth), rel=1e-9)


def test_the_counts_of_each_threshold_have_a_total_of_their_own():
    counts = [torch.tensor([[[0.0, 12, 12], [0, 0, 24]], [[0.0, 12, 12], [0, 0, 24]]]).double() for _ in range(BLOCKS)]

    def result(parts: torch.Tensor) -> ExitCurveResult:
        halves = torch.ones(2, 2).double()
        return ExitCurveResult(
            values=parts.sum(0),
            accuracy=torch.tensor([0.0, 1.0]).double(),
            agreement=torch.ones(2).double(),
            perplexity=torch.ones(2).double(),
            speedup=torch.ones(2).double(),
            part_exits=parts,
            part_accuracy=halves,
            part_agreement=halves,
            part_perplexity=halves,
            thresholds=(0.9, 1.0),
            positions=int(parts[:, 0].sum()),
            targets=int(parts[:, 0].sum()),
            unembedding="",
            layers=LAYERS,
            provenance=about(int(parts[:, 0].sum())),
        )

    total = torch.stack(counts).sum(0)
    measured = dataclasses.replace(
        result(total), replicates=tuple(result(total - block) for block in counts), block_tokens=(1,) * BLOCKS
    )
    exits = measured.interval("exits")
    tokens = BLOCKS * 48
    assert float(exits.high[0, 0]) == pytest.approx(tokens * width(TEXTS), rel=1e-9)
    # At threshold 1 all blocks run by definition.
    assert exits.low[1].tolist() == exits.high[1].tolist() == [0, 0, tokens]
    agreement = measured.interval("agreement")
    assert agreement.low.tolist() == [pytest.approx(1 - width(TEXTS), rel=1e-9), 1.0]
    # Half of the texts are in each half.
    halves = measured.interval("part_accuracy")
    assert float(halves.low[0, 0]) == pytest.approx(1 - width(TEXTS / 2), rel=1e-9)


def test_the_f1_of_a_rare_class_rests_on_the_texts_of_that_class():
    confusion = torch.tensor([[[61.0, 0.0], [3.0, 0.0]]]).double()

    def result() -> TaskMetricsResult:
        return TaskMetricsResult(
            values=torch.tensor([0.5]).double(),
            accuracy=torch.tensor([1.0]).double(),
            mcc=torch.tensor([1.0]).double(),
            f1_by_class=torch.tensor([[1.0], [0.0]]).double(),
            confusion=confusion,
            labels=(0, 1),
            layers=LAYERS[:2],
            provenance=about(64),
        )

    measured = dataclasses.replace(result(), replicates=(result(),) * BLOCKS, block_tokens=(1,) * BLOCKS)
    by_class = measured.interval("f1_by_class")
    # J of no right prediction among 3, and F1 = 2 J / (1 + J).
    jaccard = width(3)
    assert float(by_class.high[1, 0]) == pytest.approx(2 * jaccard / (1 + jaccard), rel=1e-9)
    assert float(measured.interval("mcc").low) == pytest.approx(1 - 2 * width(TEXTS), rel=1e-9)


def test_two_fractions_at_one_bound_differ_by_no_more_than_wilsons_interval():
    first = saturation([[0, 24, 24]] * BLOCKS)
    second = saturation([[0, 20 + j % 5, 28 - j % 5] for j in range(BLOCKS)])
    difference = lsim.difference(first, second)["cumulative"]
    low, value, high, p = (float(difference[0].sel(statistic=name)) for name in ("low", "difference", "high", "p_value"))

    assert value == 0
    assert high == -low == pytest.approx(width(TEXTS), rel=1e-6)
    assert p == pytest.approx(1.0)
    # The last layer is at 1 by definition.
    assert float(difference[2].sel(statistic="high")) == 0
