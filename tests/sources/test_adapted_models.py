"""Models with adapters of peft: how they are opened, and comparisons of one model with itself."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import hidden_states, random_tokens, tiny_gpt2, tiny_llama

TOKENS = random_tokens(12, 16)


def adapted(base, **options):
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options
    return peft.get_peft_model(base, peft.LoraConfig(**settings)).eval()


def merged(tuned):
    """A plain copy of a model with its adapters."""
    return copy.deepcopy(tuned).merge_and_unload()


MEASURES = [lsim.Cosine(), lsim.CKA(minibatch=8), lsim.LogitLens()]
CHANGES = {
    "attention": {},
    "every linear layer": {"target_modules": "all-linear"},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "an adapted head": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"use_dora": True},
}


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_a_peft_model_is_measured_like_its_merged_copy(name):
    tuned = adapted(tiny_llama(), **CHANGES[name])
    if "trained" in name:
        with torch.no_grad():
            tuned.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-2)
    found, expected = lsim.analyze(tuned, TOKENS, MEASURES), lsim.analyze(merged(tuned), TOKENS, MEASURES)
    for key, result in expected.items():
        assert torch.allclose(found[key].values, result.values, atol=1e-4), key
    plain = lsim.analyze(tiny_llama(), TOKENS, lsim.LogitLens())["logit_lens"]
    assert not torch.allclose(found["logit_lens"].values, plain.values, atol=1e-3)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore")
def test_a_peft_model_is_attached_exits_and_trains_like_its_base():
    tuned = adapted(tiny_llama())
    plain = merged(tuned)
    with lsim.attach(tuned, lsim.Cosine(center="none")) as probe:
        tuned(input_ids=TOKENS)
    expected = lsim.analyze(plain, TOKENS, lsim.Cosine(center="none"))["cosine"]
    assert torch.allclose(probe.results()["cosine"].values, expected.values, atol=1e-5)
    early, own = (lsim.EarlyExit(model, 0.1, at="all") for model in (tuned, plain))
    assert torch.equal(early.logits(TOKENS).exits, own.logits(TOKENS).exits)
    said = early.generate(TOKENS[:2, :5], max_new_tokens=5, eos_token_id=())
    assert [row.tolist() for row in said.tokens] == [
        row.tolist() for row in own.generate(TOKENS[:2, :5], max_new_tokens=5, eos_token_id=()).tokens
    ]
    loss = lsim.training.aligned_loss(tuned, TOKENS)
    loss.backward()
    assert float(loss) == pytest.approx(float(lsim.training.aligned_loss(plain, TOKENS)), rel=1e-5)
    assert any(parameter.grad is not None for name, parameter in tuned.named_parameters() if "lora" in name)


def test_named_blocks_may_have_the_paths_of_the_wrapper():
    tuned = adapted(tiny_llama())
    opened = lsim.open_model(tuned, layers=[f"base_model.model.model.layers.{i}" for i in (0, 1)])
    own = hidden_states(tuned.base_model.model, TOKENS[0])
    with lsim.attach(opened, lsim.Trajectory()) as probe:
        tuned(input_ids=TOKENS[:1])
    norms = probe.results()["trajectory"].norm.numpy()
    assert norms == pytest.approx((own[:3] ** 2).sum(-1).mean(1) ** 0.5, rel=0.1)


def test_soft_prompts_are_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(lsim.LayersimError, match="PeftModel"):
        lsim.analyze(peft.get_peft_model(tiny_llama(), config), TOKENS, lsim.CKA())


class TestOneModel:
    effect = lsim.InterventionEffect()

    @pytest.mark.parametrize("opened", [False, True])
    def test_a_base_and_its_adapters_are_refused(self, opened):
        base = tiny_llama()
        clean = copy.deepcopy(base)
        tuned = adapted(base)
        given = lsim.open_model(tuned) if opened else tuned
        with pytest.raises(lsim.LayersimError, match=r"`model_a`.*`model_b`"):
            lsim.compare(base, given, TOKENS, self.effect)
        with pytest.raises(lsim.LayersimError, match=r"models\['a'\].*models\['b'\]"):
            lsim.compare_grid({"clean": clean, "a": base, "b": given}, TOKENS, lsim.CKA(minibatch=8))
        with pytest.raises(lsim.LayersimError, match=r"models\['a'\].*models\['b'\]"):
            lsim.sweep({"clean": clean, "a": base, "b": given}, TOKENS, lsim.LogitLens())
        with pytest.raises(lsim.LayersimError, match=r"`before`.*`after`"):
            lsim.evaluate_layers(base, given, TOKENS)
        with pytest.raises(lsim.LayersimError, match=r"`front`.*`back`"):
            lsim.stitch(base, given, TOKENS, at=(1, 1), adapter="identity")
        change = lsim.compare(clean, given, TOKENS, self.effect).relative_change
        assert change[0] == 0
        assert bool((change[1:] > 0.01).all())

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_two_adapters_of_one_base_are_refused(self):
        base = tiny_llama()
        first, second = adapted(base), adapted(base, target_modules=["o_proj"])
        with pytest.raises(lsim.LayersimError, match=r"`model_a`.*`model_b`"):
            lsim.compare(first, second, TOKENS, self.effect)

    def test_the_base_inside_a_peft_model_warns(self):
        base = tiny_llama()
        tuned = adapted(base)
        with pytest.warns(lsim.LayersimWarning, match=r"`model_a`.*`model_b`"):
            lsim.compare(base, tuned.base_model.model, TOKENS, self.effect)

    def test_a_model_that_shares_its_blocks_with_a_hooked_one_warns(self):
        base = tiny_gpt2()
        other = copy.copy(base)
        other.transformer.h[1].register_forward_hook(lambda _m, _a, output: output)
        with pytest.warns(lsim.LayersimWarning, match=r"`model_a`.*`model_b`"):
            lsim.compare(base, other, TOKENS, self.effect)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_a_model_with_itself_and_copies_do_not_warn(self):
        base = tiny_llama()
        twin = copy.deepcopy(base)
        # Shared embeddings are no shared blocks.
        twin.model.embed_tokens = base.model.embed_tokens
        for other in (base, twin, lsim.open_model(base)):
            assert float(lsim.compare(base, other, TOKENS, self.effect).relative_change.max()) == 0
