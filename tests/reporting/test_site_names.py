"""The main finding of a result in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve
from tl_layersim.core.intervals import with_margin
from tl_layersim.core.wording import number_text
from tl_layersim.reporting.html import finding, in_columns

from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama


def test_a_result_without_words_of_its_own_has_its_headline():
    class Own(LayerCurve):
        def headline(self):
            return {"first number": 2.0, "second": 0.25, "third": 1.0}

    curve = Own(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance())
    assert finding(curve) == "First number: 2; second: 0.25."
    assert in_columns(curve) == ((), [])


@pytest.fixture(scope="module")
def report():
    chosen = [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve(), lsim.Trajectory(), lsim.SkipEffect(), lsim.EffectiveRank()]
    return lsim.analyze(tiny_llama(), lsim.Data(random_tokens(20, 9), batch_size=1), chosen, intervals=True)


def test_analyzers_have_words_of_their_own(report):
    texts = {name: finding(result) for name, result in report.items()}
    assert texts["saturation"].startswith(with_margin(report["saturation"], lambda one: one.early_share, percent=True))
    lens = report["logit_lens"]
    first = next(block for block in range(3) if bool((lens.agreement[block:] >= 0.5).all()))
    assert first == 2
    assert texts["logit_lens"].startswith("No block before the last gives the final prediction at 50 % of the positions")
    early = replace(lens, agreement=torch.tensor([0.25, 0.75, 1.0], dtype=torch.float64))
    assert finding(early).startswith("From block 1 on, the prediction is mostly the last layer's")
    # Nothing to say where the first block has the last one's answers already.
    assert replace(lens, agreement=torch.tensor([0.75, 0.75, 1.0], dtype=torch.float64)).finding() == ""
    assert " times that at the first" in texts["trajectory"]
    mean = with_margin(report["skip_effect"], lambda one: one.values.nanmean())
    assert texts["skip_effect"].startswith(f"Skipping a block changes what later blocks add by a relative {mean}")
    rank = report["effective_rank"]
    lowest = int(rank.values.argmin())
    assert f"({number_text(float(rank.values[lowest]))} of " in texts["effective_rank"]
    threshold = report["exit_curve"].threshold_for(agreement=0.95)
    assert texts["exit_curve"].startswith(f"Early exit at a top probability of {threshold:g} agrees")
    plain = replace(report["saturation"], replicates=(), block_tokens=())
    assert "±" not in finding(plain)


def test_two_models_are_compared_with_the_margin_of_their_difference():
    tokens = random_tokens(12, 9)
    layers = lsim.evaluate_layers(tiny_llama(), tiny_llama(seed=1), tokens)["layers"]
    models, lines = in_columns(layers)
    assert models == ("before", "after")
    name, before, after, change = lines[0]
    assert name == "perplexity of the last layer"
    difference = float(layers.perplexity[1, -1] - layers.perplexity[0, -1])
    assert change == f"{difference:+.4g}"
    assert finding(layers).startswith(f"before → after: perplexity of the last layer {before} → {after}; ")
