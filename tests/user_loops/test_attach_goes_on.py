"""attach: nothing that the probe meets ends the user's loop."""

from __future__ import annotations

import warnings

import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama


@pytest.mark.parametrize("warmed", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models(fullgraph, warmed):
    torch._dynamo.reset()
    model, tokens = tiny_llama(), random_tokens(2, 8)
    compiled = torch.compile(model, fullgraph=fullgraph, backend="eager")
    measured = not fullgraph and not warmed
    with torch.no_grad():
        expected = model(tokens).logits
        if warmed:
            compiled(tokens)
        with warnings.catch_warnings(record=True) as said, lsim.attach(model, lsim.Cosine(center="none")) as probe:
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.equal(compiled(tokens).logits, expected)
                assert bool(probe.headline()) == measured
        about = [str(each.message) for each in said if issubclass(each.category, lsim.LayersimWarning)]
        assert len(about) == (not measured)
        if measured:
            assert probe.results()["cosine"].provenance.tokens == 32
        else:
            with pytest.raises(lsim.LayersimError, match="force_eager"):
                probe.results()
        with torch.compiler.set_stance("force_eager"), lsim.attach(model, lsim.Cosine(center="none")) as probe:
            compiled(tokens)
        assert probe.results()["cosine"].provenance.tokens == 16


def test_the_original_module_of_a_compiled_model_is_measured():
    torch._dynamo.reset()
    model, tokens = tiny_llama(), random_tokens(4, 8)
    expected = lsim.analyze(model, tokens, lsim.CKA(level="token"))["cka"].values
    compiled = torch.compile(model, backend="eager")
    paths = [f"_orig_mod.model.layers.{i}" for i in range(3)]
    with pytest.warns(lsim.LayersimWarning, match="LlamaForCausalLM"):
        named = lsim.open_model(compiled, layers=paths)
    with pytest.warns(lsim.LayersimWarning, match="LlamaForCausalLM"):
        probe = lsim.attach(compiled, lsim.CKA(level="token"))
    with probe, torch.no_grad():
        compiled(tokens)
    inside = tiny_llama()
    inside.compile(fullgraph=True, backend="eager")
    reports = [probe.results(), *(lsim.analyze(one, tokens, lsim.CKA(level="token")) for one in (named, inside))]
    assert [torch.equal(report["cka"].values, expected) for report in reports] == [True] * 3


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_that_is_replaced_in_the_loop_is_told(block):
    model, tokens = tiny_llama(), random_tokens(2, 8)
    with lsim.attach(model, lsim.Cosine(center="none")) as probe, torch.no_grad():
        model(tokens)
        model.model.layers[block] = tiny_llama(seed=1).model.layers[block]
        with pytest.warns(lsim.LayersimWarning, match=rf"blocks\.{block}\.hook_resid"):
            model(tokens)
        with warnings.catch_warnings(action="error"):
            model(tokens)
    assert probe.results()["cosine"].provenance.tokens == 16


def test_headlines_begin_with_what_is_defined():
    model = tiny_llama()
    probe = lsim.attach(model, [lsim.Cosine(center="none"), lsim.CKA(), lsim.LogitLens()])
    assert probe.headline() == {}
    kinds = []
    with probe, torch.no_grad():
        assert probe.headline() == {}
        for _ in range(4):
            model(random_tokens(2, 8))
            kinds.append({name.split("/")[0] for name in probe.headline()})
        assert probe.headline() == probe.results().headline()
        probe.reset()
        assert probe.headline() == {}
    assert kinds == [{"cosine", "logit_lens"}, *[{"cosine", "cka", "logit_lens"}] * 3]


@pytest.mark.parametrize("action", ["default", "error"])
def test_an_error_of_the_probe_is_told_once_and_the_loop_goes_on(action):
    model, tokens = tiny_llama(), random_tokens(2, 8)
    with warnings.catch_warnings(record=action == "default") as said, torch.no_grad():
        warnings.simplefilter(action)
        with lsim.attach(model, lsim.Cosine(center="none")) as probe:
            for _ in range(3):
                probe.mask = torch.ones(1, 3)
                model(tokens)
                assert probe.headline() == {}
    assert said is None or [str(each.message).count("`probe.mask`") for each in said] == [1]
    with pytest.raises(lsim.LayersimError, match=r"`probe\.mask`"):
        probe.results()
