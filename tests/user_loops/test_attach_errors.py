"""attach never ends the loop that it watches: what goes wrong is raised by results(), and nothing of the model changes."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

import tl_layersim as lsim
from tl_layersim.analyzers import Analyzer

from ..inputs.views import worst
from ..models.input_models import OwnBlocks
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge
from ..running.runs import analyzers, hooks, lenses, logits

COSINE = lsim.Cosine(center="none")
MODELS = {"Hugging Face": tiny_llama, "TransformerBridge": lambda: bridge(tiny_gpt2())}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def broken(view):
    raise RuntimeError("no kernel")


@dataclass(frozen=True)
class Broken(Analyzer):
    name: ClassVar[str] = "broken"

    def kernel(self, first):
        return broken

    def compute(self, sums, run):
        raise AssertionError


@pytest.mark.light("1")
@pytest.mark.parametrize("count", [1, 200])
def test_an_analyzer_that_fails_is_reported_by_results(count):
    """At once, and with the tokens that are gathered before they are reduced."""
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        expected = model(tokens).logits
        with lsim.attach(model, [COSINE, Broken()]) as probe:
            for _ in range(count):
                assert torch.equal(model(tokens).logits, expected)
    with pytest.raises(lsim.LayersimError, match="RuntimeError: no kernel") as error:
        probe.results()
    assert isinstance(error.value.__cause__, RuntimeError)


def test_a_pass_that_ends_early_is_said_with_the_last_site():
    model = bridge(tiny_llama())
    tokens = random_tokens(2, 9)
    with torch.no_grad(), lsim.attach(model, COSINE) as probe:
        model.run_with_cache(tokens, stop_at_layer=2)
    with pytest.raises(lsim.LayersimError, match=r"ended after blocks\.1\.hook_resid_post.*\b4 sites.*at=") as refused:
        probe.results()
    assert "stop_at_layer" in str(refused.value)
    reached = [f"blocks.0.hook_resid_{end}" for end in ("pre", "post")]
    with torch.no_grad(), lsim.attach(model, COSINE, at=reached) as probe:
        model.run_with_cache(tokens, stop_at_layer=1)
    assert probe.results()["cosine"].layers == tuple(reached)
    with torch.no_grad(), lsim.attach(model, COSINE) as probe:
        model(tokens)
        probe.reset()
        with pytest.raises(lsim.LayersimError, match="no forward pass ran"):
            probe.results()


def test_activations_of_two_axes_are_refused_by_results():
    model = OwnBlocks()
    layers = [f"parts.{i}" for i in range(3)]
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=layers), COSINE) as probe:
        assert model(random_tokens(1, 9)[0]).shape == (9, 8)
    with pytest.raises(lsim.LayersimError, match=r"\(9,\).* 9 x 1 "):
        probe.results()


def test_attach_without_with_says_what_to_do():
    model = tiny_llama()
    probe = lsim.attach(model, COSINE)
    model(random_tokens(1, 5))
    assert hooks(model) == 0
    with pytest.raises(lsim.LayersimError, match=r"`with`.*model\.forward\(tokens\)"):
        probe.results()
    with torch.no_grad(), probe:
        model(random_tokens(1, 5))
    assert probe.results()["cosine"].provenance.tokens == 5
    with pytest.raises(lsim.LayersimError, match="was already attached"), probe:
        pass


def test_a_change_of_dtype_inside_attach_is_measured_and_recorded():
    model = tiny_llama()
    tokens = random_tokens(4, 12)
    with torch.no_grad(), lsim.attach(model, [lsim.LogitLens(), COSINE]) as probe:
        model(tokens)
        model.to(torch.bfloat16)
        model(tokens)
    found = probe.results()
    assert found["logit_lens"].provenance.dtype == "torch.float32, then torch.bfloat16"
    runs = [lsim.analyze(tiny_llama(dtype=d), tokens, lsim.LogitLens())["logit_lens"] for d in (torch.float32, torch.bfloat16)]
    mean = sum(run.cross_entropy for run in runs) / 2
    torch.testing.assert_close(found["logit_lens"].cross_entropy, mean, rtol=0, atol=2e-4)
    assert found["cosine"].provenance.tokens == 96


def test_a_head_that_is_replaced_inside_attach_does_not_end_the_loop():
    model = tiny_llama()
    tokens = random_tokens(4, 12)
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model(tokens)
        model.lm_head = torch.nn.Identity()
        assert model(tokens).logits.shape == (4, 12, 32)
    with pytest.raises(lsim.LayersimError):
        probe.results()


class Quartered(LlamaForCausalLM):
    """A model that multiplies the output of its head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 0.25 * output.logits
        return output


def test_a_lens_of_logits_that_the_model_multiplies_is_refused():
    model = tiny_llama()
    tokens = random_tokens(4, 12)
    model.__class__ = Quartered
    with lsim.attach(model, lsim.LogitLens()) as probe, torch.no_grad():
        logits = model(tokens).logits.double()
    with pytest.raises(lsim.LayersimError, match=r"0\.25 times"):
        probe.results()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    found = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"].cross_entropy[-1]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_a_pass_that_cannot_be_read_does_not_keep_its_activations():
    import gc
    import weakref

    model = OwnBlocks()
    seen = []
    model.parts[0].register_forward_hook(lambda _m, args, _o: seen.append(weakref.ref(args[0])))
    with lsim.attach(lsim.open_model(model, layers=["parts.0", "parts.1", "parts.2"]), COSINE) as probe:
        model(random_tokens(1, 9)[0])
    gc.collect()
    assert seen[0]() is None
    with pytest.raises(lsim.LayersimError):
        probe.results()


@each_model
def test_attaching_changes_neither_state_nor_random_numbers_nor_modes(make):
    model = make().train()
    tokens = random_tokens(2, 12)
    logits(model, tokens)
    state = copy.deepcopy({name: value.clone() for name, value in model.state_dict().items()})
    kept = {name: (set(vars(m)), m.training) for name, m in model.named_modules()}
    before = hooks(model)
    random = torch.get_rng_state()
    with torch.no_grad(), lsim.attach(model, lenses()) as probe:
        assert torch.equal(torch.get_rng_state(), random)
        logits(model.eval(), tokens)
        model.train()
        assert torch.equal(torch.get_rng_state(), random)
        probe.results()
    assert hooks(model) == before
    assert {name: (set(vars(m)), m.training) for name, m in model.named_modules()} == kept
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_gradients_are_the_same_when_the_probe_fails():
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    plain = torch.autograd.grad(model(tokens).logits.square().mean(), [*model.parameters()])
    with lsim.attach(model, [COSINE, Broken()]) as probe:
        probe.mask = torch.ones(7, 7)
        found = torch.autograd.grad(model(tokens).logits.square().mean(), [*model.parameters()])
    assert probe.headline() == {}
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_every_kind_of_misfit_leaves_the_loop_alone():
    model = tiny_llama()
    tokens = random_tokens(2, 6)
    ways = {
        "mask": lambda: model(tokens, attention_mask=torch.zeros(2, 1, 6, 6)),
        "inputs": lambda: model(inputs_embeds=torch.randn(2, 6, 32), attention_mask=torch.ones(2, 6)),
        "nothing": lambda: model(tokens[:, :0]) if tokens[:, :0].numel() else None,
        "functional": lambda: torch.func.functional_call(model, dict(model.named_parameters()), (tokens,)),
        "vmap": lambda: torch.func.vmap(lambda x: x + model.model.layers[0].mlp(x))(torch.randn(2, 3, 32)),
        "meta": lambda: copy.deepcopy(model).to("meta")(tokens.to("meta")),
    }
    for way in ways.values():
        with torch.no_grad(), lsim.attach(model, [*analyzers(), lsim.Saturation()]):
            way()
    assert hooks(model) == 0
    assert worst(lsim.analyze(model, tokens, COSINE)["cosine"], lsim.analyze(tiny_llama(), tokens, COSINE)["cosine"]) == 0


@pytest.mark.heavy("torch.compile")
@pytest.mark.parametrize("warmed", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models(fullgraph, warmed):
    torch._dynamo.reset()
    model = tiny_llama()
    tokens = random_tokens(2, 8)
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


@pytest.mark.heavy("torch.compile")
def test_the_original_module_of_a_compiled_model_is_measured():
    torch._dynamo.reset()
    model = tiny_llama()
    tokens = random_tokens(4, 8)
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
    model = tiny_llama()
    tokens = random_tokens(2, 8)
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
    model = tiny_llama()
    tokens = random_tokens(2, 8)
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
