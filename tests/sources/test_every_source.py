"""Law 3: one tiny model through every source gives one answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import worst
from ..models.tiny_models import hidden_states, random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import ANALYZERS, bridge, hooked_transformer, nnsight, run, transformers_model

SOURCES = {
    "NNsight": lambda make, tmp: (nnsight(make()), {}),
    "NNsight remote=local": lambda make, tmp: (nnsight(make()), {"remote": "local"}),
    "TransformersModel": lambda make, tmp: (transformers_model(make(), tmp), {}),
    "TransformersModel remote=local": lambda make, tmp: (transformers_model(make(), tmp), {"remote": "local"}),
    "TransformerBridge": lambda make, tmp: (bridge(make()), {}),
    "NNsight(TransformerBridge)": lambda make, tmp: (nnsight(bridge(make())), {}),
}


MODELS = [*((source, tiny_llama) for source in SOURCES), ("TransformerBridge", tiny_gpt2), ("NNsight", tiny_gpt2)]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(("source", "make"), MODELS)
def test_every_source_gives_one_answer(source, make, data, tmp_path):
    expected = run(make(), data)
    model, options = SOURCES[source](make, tmp_path)
    found = run(model, data, **options)
    for name in ANALYZERS:
        np.testing.assert_allclose(found[name].values, expected[name].values, atol=1e-6, rtol=1e-6)
        assert found[name].layers == expected[name].layers
        assert found[name].provenance.data == expected[name].provenance.data
        assert found[name].provenance.tokens == 6 * 20 - 8 - 5


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_hooked_transformer_gives_the_same_answer_and_says_its_basis(data):
    module = tiny_gpt2()
    expected = run(module, data)
    model = hooked_transformer(module)
    found = run(model, data)
    for name in ANALYZERS:
        np.testing.assert_allclose(found[name].values, expected[name].values, atol=1e-6, rtol=1e-6)
    assert found["logit_lens"].unembedding == "unembed(ln_final(x))"
    assert found["cka"].provenance.basis == "HookedTransformer, layer norms not folded, writing weights not centred"
    model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
    folded = run(model, data)["cka"]
    assert folded.provenance.basis == "HookedTransformer, layer norms folded, writing weights centred"


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_compatibility_mode_is_recorded_and_changes_the_basis(data):
    model = bridge(tiny_gpt2())
    raw = run(model, data)
    model.enable_compatibility_mode()
    processed = run(model, data)
    assert raw["cosine"].provenance.basis == "raw weights, before the final norm"
    assert processed["cosine"].provenance.basis == "TransformerBridge, compatibility mode"
    # Centred writing weights take the mean over d_model away: another basis, other numbers.
    assert worst(raw["cosine"], processed["cosine"]) > 1e-4


@pytest.mark.light("model.layers.2-attn_out-False", "lm_head-resid_post-local")
@pytest.mark.parametrize("remote", [False, "local"])
@pytest.mark.parametrize(
    ("path", "at"), [("model.layers.2", "attn_out"), ("model.layers.0", "attn_out"), ("lm_head", "resid_post")]
)
def test_edits_change_what_hooks_would_change_and_may_follow_the_last_site(path, at, remote, data):
    module = tiny_llama()
    with nnsight(module).edit() as (_, edited):
        edited.get(path).output[:] = edited.get(path).output * 0.5 + 1
    found = lsim.analyze(lsim.open_model(edited, remote=remote), data, lsim.Cosine(center="none"), at=at)
    module.get_submodule(path).register_forward_hook(lambda _module, _args, output: output * 0.5 + 1)
    expected = lsim.analyze(module, data, lsim.Cosine(center="none"), at=at)
    np.testing.assert_allclose(found["cosine"].values, expected["cosine"].values, atol=1e-6)


def test_a_wrapped_module_is_on_no_server():
    with pytest.raises(lsim.LayersimError, match=r"`remote` is .*TransformersModel"):
        lsim.analyze(lsim.open_model(nnsight(tiny_llama()), remote=True), random_tokens(), "cka")


def test_a_path_that_does_not_exist_names_the_nearest():
    with pytest.raises(lsim.LayersimError, match=r"`layers` is .*LlamaForCausalLM.*'model\.layers\.1'"):
        lsim.analyze(lsim.open_model(tiny_llama(), layers=["model.layers.0", "model.layer.1"]), random_tokens(), "cka")


def test_the_model_is_left_as_it_was(data):
    model = tiny_llama()
    model.model.layers[1].train()
    modes = [m.training for m in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forwards = [m.forward for m in model.modules()]
    run(model, data)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.forward for m in model.modules()] == forwards
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_dropout_is_off_while_measuring(data):
    torch.manual_seed(0)
    model = tiny_gpt2().train()
    assert worst(run(model, data)["cosine"], run(tiny_gpt2(), data)["cosine"]) == 0
    assert model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_it_is_summed(dtype):
    model = tiny_llama(dtype=dtype)
    rows = list(random_tokens(4, 20))
    states = [hidden_states(model, row) for row in rows]
    expected = oracles.oracle_cosine(states)
    found = lsim.analyze(model, lsim.Data(rows, batch_size=1), "cosine")["cosine"]
    np.testing.assert_allclose(found.values, expected["values"], atol=2e-6)
    assert found.provenance.dtype == str(dtype)


def test_float64_models_are_measured_in_float64():
    model = tiny_llama(dtype=torch.float64)
    rows = list(random_tokens(4, 20))
    expected = oracles.oracle_cosine([hidden_states(model, row) for row in rows])
    found = lsim.analyze(model, lsim.Data(rows, batch_size=1), "cosine")["cosine"]
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-13)


def test_autocast_around_the_call_does_not_reach_the_sums(data):
    from tl_layersim.activations.view import reduce
    from tl_layersim.data.batches import Batches
    from tl_layersim.data.data import Data
    from tl_layersim.sources.hooked_module import HookedSource

    seen = []

    def kernel(view):
        x = view.activations[1]
        seen.append((x @ x.T).dtype)
        return {"n": torch.tensor(1)}

    source = HookedSource(tiny_llama())
    batch = next(iter(Batches(Data(data, batch_size=8), source.model)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reduce({"k": kernel}, source.collect(batch))
    assert seen == [torch.float32]


@pytest.mark.parametrize("remote", [False, "local"])
def test_the_lens_of_an_nnsight_model_agrees_with_its_logits_under_autocast(data, remote):
    model = tiny_llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = lsim.analyze(model, data, lsim.LogitLens())["logit_lens"]
        opened = lsim.open_model(nnsight(model), remote=remote)
        found = lsim.analyze(opened, data, lsim.LogitLens())["logit_lens"]
    np.testing.assert_allclose(found.cross_entropy, expected.cross_entropy, rtol=1e-5)


def test_sites_of_several_dtypes_and_widths_are_gathered():
    from tl_layersim.activations.view import SiteBuffer

    buffer = SiteBuffer(("a", "b", "c"), torch.tensor([0, 2]), (1, 3), pooled=False)
    first = torch.arange(12.0).view(1, 3, 4)
    buffer.put(1, (first[..., :3] + 1).to(torch.bfloat16))
    buffer.put(0, first)
    assert buffer.activations.isnan().any(2).any(1).tolist() == [False, False, True]
    buffer.put(2, first.view(1, 3, 2, 2))
    assert buffer.activations.dtype == torch.float32
    wide = [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert buffer.activations.tolist() == [wide, [[1, 2, 3, 0], [9, 10, 11, 0]], wide]
    assert buffer.widths == (4, 3, 4)


def test_means_of_rows_are_samples():
    from tl_layersim.activations.view import SiteBuffer

    # Row 0 counts positions 1 and 2, row 1 none, row 2 position 0.
    buffer = SiteBuffer(("a",), torch.tensor([1, 2, 6]), (3, 3), pooled=True)
    hidden = torch.arange(18.0).view(3, 3, 2)
    buffer.put(0, hidden)
    assert buffer.activations.tolist() == [[[3.0, 4.0], [12.0, 13.0]]]
    assert buffer.fields()["sequence"].tolist() == [0, 2]
    assert buffer.samples.tolist() == [2, 6]
