"""The numbers of summary tables and of repr, each from its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.exit_curve import ExitCurveResult

from .. import oracles
from ..options import called
from ..tiny_models import random_tokens, tiny_llama
from ..views import from_views, layer_run, residuals, samples, view


def test_the_headline_of_a_trajectory():
    x = residuals(0, layers=5)
    found = from_views(lsim.Trajectory(), [view(x)]).headline()
    expected = oracles.oracle_trajectory([x])
    norm = np.linalg.norm(x, axis=-1).mean(1)
    growth = np.diff(np.log(np.linalg.norm(x, axis=-1)), axis=0)
    median = np.quantile(growth.var(0) / growth.mean(0) ** 2, 0.5, method="inverted_cdf")
    assert len(found) == 4
    assert found["line-shape score (1: a straight line)"] == pytest.approx(float(expected["lss_mean"]))
    assert found["expodistance, median (0: exponential growth)"] == pytest.approx(median, rel=0.024)
    assert found["equidistance (0: equal steps)"] == pytest.approx(float(expected["equidistance_mean"]))
    assert found["norm at the last layer over norm of the embedding"] == pytest.approx(norm[-1] / norm[0])


def test_the_headline_of_cka():
    x = [residuals(i, layers=6, tokens=200) for i in range(2)]
    result = from_views(lsim.CKA(minibatch=200), [samples(b) for b in x])
    found = result.headline()
    expected = oracles.oracle_cka([b - b.mean(1, keepdims=True) for b in x])
    assert found["CKA(embedding, last)"] == pytest.approx(expected["values"][0, 5])
    assert found["CKA(middle layer, last)"] == pytest.approx(expected["values"][3, 5])
    assert found["CKA(last but one, last)"] == pytest.approx(expected["values"][4, 5])
    least = min(expected["effective_samples"]) / 400
    assert found["smallest effective fraction of samples"] == pytest.approx(least)


def exit_result(agreement: list[float], thresholds: tuple[float, ...]) -> ExitCurveResult:
    run, count = layer_run(4), len(thresholds)
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
    found = exit_result([0.5, 0.96, 0.94, 0.95, 1.0], (0.0, 0.5, 0.9, 0.99, 1.0)).headline()
    # 0.5 is a lucky one below a bad one.
    assert found == {
        "threshold with 95 % agreement": 0.99,
        "its agreement on held-out rows": 0.95,
        "its speed-up in blocks": 1.5,
        "its accuracy": pytest.approx(0.3),
        "accuracy at the highest threshold": pytest.approx(0.4),
    }


def test_the_headline_of_an_exit_curve_that_does_not_end_in_agreement():
    found = exit_result([0.5, 0.96, 0.97, 0.9], (0.0, 0.5, 0.7, 0.9)).headline()
    assert found["threshold with 95 % agreement"] == 0.7
    assert found["its accuracy"] == pytest.approx(0.2)
    assert exit_result([0.5, 0.94], (0.0, 0.5)).headline() == {"agreement at threshold 0.5": 0.94}


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
