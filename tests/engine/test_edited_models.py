"""Analyzers over data on a model that was edited by `model.edit()`, against a Hugging Face model with hooks."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama
from ..user_loops.test_trace_probe import TOKENS, differences, hooked, traced

ANALYZERS = [
    lsim.Cosine(),
    lsim.CKA(minibatch=32),
    lsim.CCA(),
    lsim.Contribution(),
    lsim.EffectiveRank(),
    lsim.ExitCurve(),
    lsim.LinearPredictivity(),
    lsim.LinearProbe(),
    lsim.LogitLens(),
    lsim.MutualKNN(),
    lsim.NeuralCollapse(),
    lsim.Procrustes(),
    lsim.RSA(),
    lsim.Saturation(),
    lsim.TaskMetrics(),
    lsim.Trajectory(),
]
PAIRS = [lsim.CCA(), lsim.CKA(minibatch=32), lsim.LinearPredictivity(), lsim.MutualKNN(), lsim.Procrustes(), lsim.RSA()]
IGNORED = pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")


def edited(model, scale=0.5):
    with model.edit() as (_, changed):
        changed.model.layers[1].mlp.output[:] = changed.model.layers[1].mlp.output * scale
    return changed


@IGNORED
@pytest.mark.parametrize("remote", [False, "local"])
@pytest.mark.parametrize("analyzer", ANALYZERS, ids=lambda one: type(one).__name__)
def test_an_edited_model_equals_a_hooked_one_to_the_last_bit(analyzer, remote):
    module = tiny_llama()
    report = lsim.analyze(lsim.open_model(edited(traced(module)), remote=remote), TOKENS, analyzer)
    assert differences(report, hooked(module, TOKENS, analyzer, 0.5)) == []
    [result] = report.values()
    assert result.provenance.changes.startswith("nnsight edit")


@IGNORED
@pytest.mark.parametrize("analyzer", PAIRS, ids=lambda one: type(one).__name__)
def test_comparison_with_an_edited_model(analyzer):
    module = tiny_llama()
    model = traced(module)
    found = lsim.compare(model, edited(model), TOKENS, analyzer)
    other = tiny_llama()
    other.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output * 0.5)
    assert differences({"": found}, {"": lsim.compare(module, other, TOKENS, analyzer)}) == []


@pytest.mark.parametrize("analyzer", [lsim.SkipEffect(), lsim.BlockCoupling()], ids=lambda one: type(one).__name__)
def test_analyzers_that_call_blocks_alone_name_the_edit(analyzer):
    with pytest.raises(lsim.LayersimError, match=rf"{type(analyzer).__name__}.*nnsight edit"):
        lsim.analyze(edited(traced(tiny_llama())), random_tokens(2, 6), analyzer)
