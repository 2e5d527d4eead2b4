"""Where tokens could exit, and at what price."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.activations.view import reduce
from tl_layersim.architectures.unembed import Unembed
from tl_layersim.core.intervals import headline_intervals, headline_texts
from tl_layersim.data.labels import NO_LABEL

from .. import oracles
from ..inputs.views import from_views, residuals, view
from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import read_logits
from ..running.options import called


def test_effective_depth():
    x = residuals(5)
    result = from_views(lsim.LogitLens(), [view(x)])
    accuracy = result.accuracy.tolist()

    for eps in (0.0, 0.3, 0.9, 0.99, 1.0):
        reached = [i + 1 for i, a in enumerate(accuracy) if a >= 1 - eps]
        assert result.effective_depth(eps) == (reached[0] if reached else len(accuracy))
    with pytest.raises(lsim.LayersimError, match=r"`eps`.* 5"):
        result.effective_depth(5)


def test_thresholds():
    x = [residuals(6, tokens=30)]
    curve = from_views(lsim.ExitCurve(thresholds=(1, 0.5, 0, 0.5)), [view(x[0])])

    assert curve.thresholds == (0.0, 0.5, 1.0)
    assert curve.at(0).exits.tolist() == [30, 0, 0]
    assert curve.at(1).exits.tolist() == [0, 0, 30]
    assert (curve.at(0).speedup, curve.at(1).speedup, curve.at(1).agreement) == (3, 1, 1)
    assert curve.at(0.5).perplexity == curve.perplexity[1]

    expected = oracles.oracle_exit_curve(x, thresholds=(0.0, 0.5, 1.0))
    for name in ("values", "accuracy", "agreement", "perplexity", "speedup"):
        np.testing.assert_allclose(getattr(curve, name), expected[name], rtol=1e-9)
    assert curve.threshold_for(agreement=1.0) == 1.0
    assert curve.threshold_for(agreement=0.0) == 0.0
    with pytest.raises(lsim.LayersimError, match=r"`threshold` is 0\.7; .* 0, 0\.5, 1"):
        curve.at(0.7)
    with pytest.raises(lsim.LayersimError, match=r"accuracy[ =]1\b"):
        curve.threshold_for(accuracy=1.0)
    with pytest.raises(lsim.LayersimError, match=r"`agreement`.*`accuracy`"):
        curve.threshold_for()
    for bad in ((), (1.5,), (-0.1, 0.5)):
        with pytest.raises(lsim.LayersimError, match="`thresholds`"):
            lsim.ExitCurve(thresholds=bad)
    with pytest.raises(lsim.LayersimError, match="`top_k`"):
        lsim.LogitLens(top_k=(0, 5))


def test_accuracy_is_of_the_positions_with_a_target():
    x = residuals(6, tokens=30)
    labels = torch.full((30,), NO_LABEL)
    labels[2::4] = 0
    labels[::4] = torch.tensor([token_layers[-1]["said"] for token_layers in oracles.lens_by_token([x], [None] * 30)])[::4]
    levels = (0.5, 1.0)

    result = from_views(lsim.ExitCurve(thresholds=levels, labels="data"), [view(x, labels=labels)])
    targets = [None if label == NO_LABEL else label for label in labels.tolist()]
    expected = oracles.oracle_exit_curve([x], targets, levels)

    assert expected["accuracy"][-1] == 8 / 15
    for name in ("accuracy", "agreement", "perplexity"):
        np.testing.assert_allclose(getattr(result, name), expected[name], rtol=1e-9)


def test_a_threshold_is_exceeded_and_not_met():
    """Two ids with the same logit have probability 0.5 each, exactly."""
    logits = np.zeros((3, 4, 2))
    logits[:, -1, 1] = 3.0
    target = torch.tensor([1, 1, 1])

    lens = read_logits(logits, target)

    assert (lens["best_prob"][0] == 0.5).all()

    from tl_layersim.analyzers.exit_curve import exit_kernel

    flat = torch.as_tensor(logits).reshape(-1, 2)

    class Table(torch.nn.Module):
        def forward(self, x):
            return flat[x[..., 0].long()]

    index = torch.arange(12, dtype=torch.float64).reshape(3, 4).T[..., None]
    residual = torch.cat([torch.zeros(1, 3, 1, dtype=torch.float64), index])
    where = torch.arange(3)
    unembed = Unembed(None, (Table(),), "every", 1.0, None, None, None)
    whole_view = View(residual, where, where * 0, where, next_token=target, unembed=unembed)
    levels = torch.tensor([0.49, 0.5], dtype=torch.float64)
    out = reduce(
        {"k": lambda v: exit_kernel(v, thresholds=levels, normed=True, labels="next_token", memory_mb=1.0)}, whole_view
    )[1]["k"]
    assert out["exits"].sum(0).tolist() == [[3, 0, 0, 0], [0, 0, 0, 3]]
    # A tie goes to id 0, which is wrong here.
    assert out["correct"].sum(0).tolist() == [0, 3]


def test_a_token_that_is_never_right():
    logits = np.zeros((4, 3, 30))
    logits[..., 5] = 9.0

    lens = read_logits(logits, torch.full((4,), 29))

    assert (lens["before"] == 10).all()
    assert (lens["best"] == 5).all()


def test_a_sure_layer_is_never_surer_than_one():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(200, 3, 300)) - 25).astype(np.float32)
    logits[np.arange(200)[:, None], np.arange(3), rng.integers(0, 300, size=(200, 3))] = rng.uniform(-1, 1, size=(200, 3))

    lens = read_logits(logits, torch.zeros(200).long())

    assert (lens["best_prob"] <= 1).all()
    assert (lens["target_log_prob"] <= 0).all()


def test_a_probability_that_stays_does_not_rise():
    x = np.repeat(residuals(1)[-1:], 4, axis=0)
    result = from_views(lsim.LogitLens(), [view(x)])

    assert result.monotone_share == 0
    assert (result.agreement == 1).all()


def test_a_lucky_threshold_below_a_bad_one_is_not_chosen():
    curve = from_views(lsim.ExitCurve(thresholds=(0.1, 0.5, 1.0)), [view(residuals(6))])
    import dataclasses

    agreement, accuracy = (torch.tensor(x, dtype=torch.float64) for x in ([0.96, 0.5, 1.0], [0.3, 0.4, 0.2]))
    part = {"part_agreement": agreement.expand(2, 3), "part_accuracy": accuracy.expand(2, 3)}
    odd = dataclasses.replace(curve, agreement=agreement, accuracy=accuracy, **part)

    assert odd.threshold_for(agreement=0.95) == 1.0
    assert odd.threshold_for(agreement=0.4) == 0.1
    assert odd.threshold_for(agreement=0.4, accuracy=0.2) == 0.1


def test_the_number_of_thresholds_has_a_limit():
    many = torch.linspace(0, 1, 10_001, dtype=torch.float64).tolist()
    assert len(lsim.ExitCurve(thresholds=many[1:]).thresholds) == 10_000
    with pytest.raises(lsim.LayersimError, match=r"`thresholds`.* 10000 "):
        lsim.ExitCurve(thresholds=many)


@pytest.mark.parametrize("analyzer", [lsim.ExitCurve, lsim.LogitLens])
def test_nothing_is_said_where_no_position_has_a_target(analyzer):
    x = residuals(0, tokens=10)
    with pytest.raises(lsim.LayersimError, match="positions with a target"):
        from_views(analyzer(labels="data"), [view(x, labels=torch.full((10,), NO_LABEL))])

    one_label = torch.full((10,), NO_LABEL)
    one_label[3] = 7
    assert from_views(analyzer(labels="data"), [view(x, labels=one_label)]).targets == 1


@pytest.mark.parametrize("analyzer", [lsim.ExitCurve, lsim.LogitLens])
def test_a_classifier_has_no_next_token(analyzer):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=100, pad_token_id=2
    )
    model = LlamaForSequenceClassification(config).eval()
    with pytest.raises(lsim.LayersimError, match="next token"):
        lsim.analyze(model, list(random_tokens(2, 6)), analyzer())


def test_an_agreement_of_exactly_95_percent_is_enough_for_the_headline():
    result = from_views(lsim.ExitCurve(thresholds=(0.5,)), [view(residuals(0))])
    exact = dataclasses.replace(result, agreement=torch.tensor([0.95], dtype=torch.float64))

    assert exact.headline()["threshold with 95 % agreement"] == 0.5

    below = dataclasses.replace(result, agreement=torch.tensor([0.9499], dtype=torch.float64))
    assert below.headline() == {"agreement at threshold 0.5": 0.9499}


def curve_of(rows: int = 24, **options):
    return called(lsim.analyze, tiny_llama(), random_tokens(rows, 9), lsim.ExitCurve(), **options)["exit_curve"]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_halves_are_rows_whatever_the_batch_size():
    result = curve_of(batch_size=24)
    out = sum(oracles.held_out_rows(24, 0.5))

    assert result.part_exits[:, 0].sum(-1).tolist() == [9 * (24 - out), 9 * out]
    assert torch.equal(result.part_exits.sum(0), result.exits)
    for size in (1, 7):
        assert torch.equal(curve_of(batch_size=size).part_exits, result.part_exits)


def test_a_threshold_is_chosen_on_the_first_half():
    result = curve_of()
    for least in (0.3, 0.6, 0.9):
        chosen = result.threshold_for(agreement=least)
        place = result.thresholds.index(chosen)
        assert result.part_agreement[0, place:].min() >= least
        assert place == 0 or result.part_agreement[0, place - 1] < least
        point = result.at(chosen, held_out=True)
        assert point.agreement == float(result.part_agreement[1, place])
        assert point.exits.tolist() == result.part_exits[1, place].tolist()
        blocks = torch.arange(1, len(point.exits) + 1).double()
        assert point.speedup == float(len(blocks) * point.exits.sum() / (point.exits * blocks).sum())


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_replicates_have_halves_of_their_own():
    result = curve_of(rows=48, intervals=True)
    out = np.array(oracles.held_out_rows(48, 0.5))
    size = 48 // len(result.replicates)

    for number, replicate in enumerate(result.replicates):
        remaining = np.delete(out, np.s_[number * size : (number + 1) * size])
        assert replicate.part_exits[:, 0].sum(-1).tolist() == [9 * (~remaining).sum(), 9 * remaining.sum()]
    assert result.finding()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_packed_rows_are_halved_by_their_tokens():
    model = tiny_llama()
    texts = [" ".join(f"w{t}" for t in row.tolist()) for row in random_tokens(40, 9)]
    model.tokenizer = tiny_tokenizer()

    curves = [
        lsim.analyze(model, lsim.Data(texts, pack=True, seq_len=12, batch_size=size), lsim.ExitCurve())["exit_curve"]
        for size in (4, 9)
    ]

    assert torch.equal(curves[0].part_exits, curves[1].part_exits)
    assert (curves[0].part_exits[:, 0].sum(-1) > 0).all()


def test_one_row_has_no_held_out_half():
    result = curve_of(rows=1)
    assert result.threshold_for(agreement=1.0) <= 1

    with pytest.warns(lsim.LayersimWarning, match=r"`held_out` .*\b1 text\b"):
        assert np.isnan(result.at(1.0, held_out=True).agreement)
    assert result.at(1.0).agreement == 1
    assert result.finding() == ""
    assert "its accuracy" not in result.headline()


def test_rows_of_one_group_have_no_held_out_half():
    data = lsim.Data(random_tokens(24, 9), groups=["one"] * 24)
    result = lsim.analyze(tiny_llama(), data, lsim.ExitCurve())["exit_curve"]
    with pytest.warns(lsim.LayersimWarning, match=r"`held_out` .*\b1 text\b"):
        point = result.at(result.threshold_for(agreement=0.6), held_out=True)

    assert np.isnan([point.agreement, point.accuracy, point.perplexity, point.speedup]).all()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_headline_has_the_interval_of_the_threshold_of_all_rows():
    asked = lsim.ExitCurve(thresholds=tuple(i / 10_000 for i in range(340, 400, 4)), agreement=0.6)
    data = lsim.Data(random_tokens(40, 9), batch_size=1)

    result = lsim.analyze(tiny_llama(), data, asked, intervals=True)["exit_curve"]
    threshold = result.headline()["threshold with 60 % agreement"]

    assert {replicate.lowest_threshold(0.6) for replicate in result.replicates} - {threshold}

    intervals = headline_intervals(result)
    for name, field in (("its agreement on held-out rows", "agreement"), ("its speed-up in blocks", "speedup")):
        expected = result.interval(lambda curve, field=field: getattr(curve.at(threshold, held_out=True), field))
        assert torch.equal(torch.stack(intervals[name][1:3]), torch.stack(expected[1:3]))
    assert headline_texts(result)["its speed-up in blocks"] in result.finding()
    assert "threshold with 60 % agreement" not in intervals
