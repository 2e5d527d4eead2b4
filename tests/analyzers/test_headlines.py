"""The numbers of summary tables and of repr, each from its definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.block_coupling import BlockCouplingResult
from tl_layersim.analyzers.exit_curve import ExitCurveResult

from .. import oracles
from ..inputs.views import from_views, layer_run, residuals, samples, view
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called


def test_the_headline_of_a_trajectory():
    x = residuals(0, layers=5)
    headline = from_views(lsim.Trajectory(), [view(x)]).headline()
    expected = oracles.oracle_trajectory([x])
    norm = np.linalg.norm(x, axis=-1).mean(1)
    growth = np.diff(np.log(np.linalg.norm(x, axis=-1)), axis=0)
    median = np.quantile(growth.var(0) / growth.mean(0) ** 2, 0.5, method="inverted_cdf")

    assert len(headline) == 4
    assert headline["line-shape score (1: a straight line)"] == pytest.approx(float(expected["lss_mean"]))
    assert headline["expodistance, median (0: exponential growth)"] == pytest.approx(median, rel=0.024)
    assert headline["equidistance (0: equal steps)"] == pytest.approx(float(expected["equidistance_mean"]))
    assert headline["norm at the last layer over norm of the embedding"] == pytest.approx(norm[-1] / norm[0])


def test_the_headline_of_cka():
    x = [residuals(i, layers=6, tokens=200) for i in range(2)]
    result = from_views(lsim.CKA(minibatch=200), [samples(b) for b in x])
    headline = result.headline()
    expected = oracles.oracle_cka([b - b.mean(1, keepdims=True) for b in x])

    assert headline["CKA(embedding, last)"] == pytest.approx(expected["values"][0, 5])
    assert headline["CKA(middle layer, last)"] == pytest.approx(expected["values"][3, 5])
    assert headline["CKA(last but one, last)"] == pytest.approx(expected["values"][4, 5])

    least = min(expected["effective_samples"]) / 400
    assert headline["smallest effective fraction of samples"] == pytest.approx(least)


def exit_result(agreement: list[float], thresholds: tuple[float, ...]) -> ExitCurveResult:
    run = layer_run(4)
    count = len(thresholds)
    return ExitCurveResult(
        values=torch.ones(count, 3, dtype=torch.float64),
        accuracy=torch.arange(count, dtype=torch.float64) / 10,
        agreement=torch.tensor(agreement, dtype=torch.float64),
        perplexity=torch.ones(count, dtype=torch.float64),
        speedup=torch.linspace(3, 1, count, dtype=torch.float64),
        part_exits=torch.ones(2, count, 3, dtype=torch.float64),
        part_accuracy=(torch.arange(count, dtype=torch.float64) / 10).expand(2, count),
        part_agreement=torch.tensor([agreement, agreement], dtype=torch.float64),
        part_perplexity=torch.ones(2, count, dtype=torch.float64),
        thresholds=thresholds,
        positions=3,
        targets=3,
        unembedding="",
        layers=run.layers,
        provenance=run.provenance,
    )


def test_the_headline_of_an_exit_curve():
    headline = exit_result([0.5, 0.96, 0.94, 0.95, 1.0], (0.0, 0.5, 0.9, 0.99, 1.0)).headline()
    # 0.5 is a lucky one below a bad one.
    assert headline == {
        "threshold with 95 % agreement": 0.99,
        "its agreement on held-out rows": 0.95,
        "its speed-up in blocks": 1.5,
        "its accuracy": pytest.approx(0.3),
        "accuracy at threshold 1": pytest.approx(0.4),
    }


def test_the_headline_of_an_exit_curve_that_does_not_end_in_agreement():
    headline = exit_result([0.5, 0.96, 0.97, 0.9], (0.0, 0.5, 0.7, 0.9)).headline()
    assert headline == {"agreement at threshold 0.9": 0.9}
    assert exit_result([0.5, 0.94], (0.0, 0.5)).headline() == {"agreement at threshold 0.5": 0.94}


@pytest.mark.light("resid_mid", "heads")
@pytest.mark.parametrize("at", ["resid_mid", "heads", ["q", "z"]])
@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
def test_headlines_speak_of_layers_only_where_sites_are_layers(at):
    options = {"at": "z", "per_head": True} if at == "heads" else {"at": at}
    analyzers = [
        lsim.Cosine(center="none"),
        lsim.CKA(minibatch=8),
        lsim.CCA(),
        lsim.NeuralCollapse(labels=torch.arange(12) % 2),
    ]
    model = tiny_llama()

    report = called(lsim.analyze, model, random_tokens(12, 6), analyzers, **options)
    probed = called(lsim.linear_probe, model, random_tokens(12, 6), lsim.LinearProbe(labels=torch.arange(12) % 2), **options)

    for result in [*report.values(), probed]:
        words = " ".join(result.headline())
        assert result.in_depth_order == (at == "resid_mid")
        assert any(word in words for word in ("last", "middle layer", "embedding")) == (at == "resid_mid"), words
    if at != "resid_mid":
        values = report["cosine"].values
        different = ~torch.eye(len(values), dtype=torch.bool)
        assert list(report["cosine"].headline().values()) == pytest.approx([float(values[different].mean())])


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_headline_of_the_logit_lens_is_of_the_last_block_and_the_middle_one():
    x = residuals(0, layers=6, tokens=60)
    result = from_views(lsim.LogitLens(), [view(x)])
    expected = oracles.oracle_logit_lens([x])

    # Blocks 0 to 4: the middle one is block 2.
    assert result.headline() == pytest.approx(
        {
            "accuracy of the last layer": expected["accuracy"][4],
            "accuracy after block 2": expected["accuracy"][2],
            "perplexity of the last layer": expected["perplexity"][4],
            "agreement of block 2 with the last": expected["agreement"][2],
            "positions that rise at every block (fraction)": float(expected["monotone_share"]),
        }
    )


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_headline_of_saturation_is_the_mean_block_of_tokens():
    x = residuals(1, layers=6, tokens=300)
    result = from_views(lsim.Saturation(), [view(x)])
    expected = oracles.oracle_saturation([x])
    counts = expected["values"]
    mean = sum(block * count for block, count in enumerate(counts)) / 300

    assert 0 < mean < 4

    headline = result.headline()
    assert headline["saturated before the last block (fraction)"] == pytest.approx(1 - counts[-1] / 300)
    assert headline["mean saturation block"] == pytest.approx(mean)

    correlation = float(expected["correlation"])
    assert not math.isnan(correlation)
    assert headline["correlation with the cosine to the last layer"] == pytest.approx(correlation)


def test_without_early_events_there_is_no_correlation_to_speak_of():
    # Every layer says something else than the last.
    x = np.stack([np.tile(oracles.HEAD[word], (20, 1)) for word in (0, 1, 2, 3)]) + 0.0
    result = from_views(lsim.Saturation(), [view(x)])

    assert result.counts.tolist() == [0, 0, 20]
    assert list(result.headline().values()) == [0, 2]


def measured(normalize: bool = True) -> BlockCouplingResult:
    analyzer = lsim.BlockCoupling(k=(3, 2), normalize=normalize)
    return from_views(analyzer, [view(residuals(seed, layers=5, tokens=9)) for seed in range(2)])


def over_pairs(matrix: np.ndarray, which: Callable[[int, int], bool]) -> float:
    return float(np.mean([matrix[a, b] for a, b in itertools.product(range(len(matrix)), repeat=2) if which(a, b)]))


@pytest.mark.parametrize("normalize", [True, False])
def test_the_headline_is_of_pairs_of_different_blocks(normalize):
    result = measured(normalize)
    offset = 1.0 if normalize else 0.0
    values = offset - result.values.numpy()
    null = offset - result.null.numpy()
    expected = [
        over_pairs(values, lambda a, b: a != b),
        over_pairs(null, lambda a, b: a != b),
        over_pairs(values, lambda a, b: abs(a - b) == 1),
    ]
    headline = result.headline()

    assert list(headline.values()) == pytest.approx(expected, rel=1e-12)
    assert next(iter(headline)).startswith(("coupling" if normalize else "-m") + ", k = 3")
    np.testing.assert_allclose(result.coupling, values, rtol=1e-12)
    np.testing.assert_allclose(result.null_coupling, null, rtol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_means_of_a_table_are_in_the_order_of_their_labels(normalize):
    result = measured(normalize)
    means = dict(zip(result.pair_kinds, result.mean_coupling.tolist(), strict=True))
    expected = {"all pairs": result.mean(), "neighbours": result.neighbours(), "random vectors": result.mean("null_coupling")}

    assert means == pytest.approx(expected, rel=1e-12)
    assert len(set(means.values())) == 3


@pytest.mark.parametrize("normalize", [True, False])
def test_means_of_each_k(normalize):
    result = measured(normalize)
    offset = 1.0 if normalize else 0.0

    for number, k in enumerate((3, 2)):
        values = result.by_k[number].numpy()
        null = result.null_by_k[number].numpy()
        for field, matrix in {
            "values": values,
            "null": null,
            "coupling": offset - values,
            "null_coupling": offset - null,
        }.items():
            assert result.mean(field, k) == pytest.approx(over_pairs(matrix, lambda a, b: a != b), rel=1e-12)
    assert result.mean("std") == pytest.approx(over_pairs(result.std.numpy(), lambda a, b: a != b))
    for field, k in (("coupling", 4), ("std", 3), ("defined", 2)):
        with pytest.raises(lsim.LayersimError, match=f"`k`.*{field!r}"):
            result.mean(field, k)


def test_the_mean_over_lengths_is_the_mean_over_prompts():
    """One prompt of 9 tokens and one of 5: octaves 8 to 15 and 4 to 7."""
    views = [view(residuals(0, layers=5, tokens=9)), view(residuals(1, layers=5, tokens=5))]
    result = from_views(lsim.BlockCoupling(k=3), views)

    assert result.lengths == ("4 to 7", "8 to 15")
    assert result.length_count.tolist() == [1, 1]

    alone = [from_views(lsim.BlockCoupling(k=3), [prompt]).mean() for prompt in reversed(views)]
    np.testing.assert_allclose(result.by_length, alone, rtol=1e-12)
    assert result.measured_on("by_length").startswith("1, 1 ")
