"""attach: the same sums from a user's own loop, the lens and new beginnings among them, and nothing of the model changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.runs import analyzers, each_model, hooks, lenses, logits


@pytest.mark.light("Hugging Face")
@each_model
def test_it_sums_what_analyze_sums(make):
    model = make()
    tokens = random_tokens(6, 15)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        for rows in tokens.split(2):
            model(rows)
    found = probe.results()
    expected = lsim.analyze(model, lsim.Data(tokens, batch_size=2), analyzers())
    for name in expected:
        assert worst(found[name], expected[name]) < 1e-6
        assert found[name].provenance.tokens == 90


@each_model
def test_outputs_gradients_and_hooks_are_untouched(make):
    tokens = random_tokens(4, 12)

    def step(model):
        model.zero_grad()
        out = logits(model, tokens)
        out.square().mean().backward()
        return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model = make()
    plain_out, plain_grads = step(model)
    # Counted after a first pass: a bridge wires hooks of its own in it.
    before = hooks(model)
    with lsim.attach(model, [*analyzers(), *lenses()]) as probe:
        out, grads = step(model)
    assert torch.equal(out, plain_out)
    assert len(grads) == len(plain_grads) > 0
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))
    assert hooks(model) == before
    assert probe.results()["cosine"].provenance.tokens == 48


@each_model
def test_no_hook_is_left_after_an_exception(make):
    model = make()
    model(random_tokens(1, 5))
    before = hooks(model)

    def loop():
        with lsim.attach(model, analyzers()):
            model(random_tokens(1, 5))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop()
    assert hooks(model) == before


def test_single_positions_are_gathered_into_minibatches():
    model = tiny_llama()
    tokens = random_tokens(4, 40)
    with torch.no_grad(), lsim.attach(model, lsim.CKA(minibatch=10)) as probe:
        past = None
        for i in range(40):
            past = model(tokens[:, i : i + 1], past_key_values=past, use_cache=True).past_key_values
    # All steps are of four rows, whose pairs of tokens are left out.
    found = probe.results()["cka"]
    expected = lsim.analyze(model, tokens, lsim.CKA(minibatch=10))["cka"]
    assert (found.minibatches, found.samples, found.texts) == (16, 160, 4)
    assert worst(found, expected) < 1e-5


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_rows_that_are_generated_for_long_need_no_more_memory():
    model = tiny_llama()
    tokens = random_tokens(4, 150)
    with torch.no_grad(), lsim.attach(model, lsim.CKA(minibatch=40)) as probe:
        past = None
        waiting = []
        for i in range(150):
            past = model(tokens[:, i : i + 1], past_key_values=past, use_cache=True).past_key_values
            waiting.append(len(probe._waiting["cka"]))
    assert max(waiting) == 63
    # Pools of 64 tokens of each row.
    assert probe.results()["cka"].samples == 240 + 240 + 80


def test_mixed_precision():
    model = tiny_llama()
    tokens = random_tokens(4, 12)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), lsim.attach(model, analyzers()) as probe:
        model(tokens)
        inside = probe.results()
    full = lsim.analyze(model, tokens, analyzers())
    assert 1e-7 < worst(inside["cka"], full["cka"]) < 0.05
    assert torch.allclose(inside["cosine"].values.diagonal(), torch.ones(4, dtype=torch.float64), atol=1e-6)


def test_what_needs_two_passes_is_refused_with_what_does_not():
    with (
        pytest.raises(lsim.LayersimError, match=r"^Cosine .*Cosine\(center=\"none\"\)"),
        lsim.attach(tiny_llama(), lsim.Cosine()),
    ):
        pass
    mean = lsim.analyze(tiny_llama(), random_tokens(), "cosine")["cosine"].mean
    model = tiny_llama()
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center=mean)) as probe:
        model(random_tokens())
    assert worst(probe.results()["cosine"], lsim.analyze(model, random_tokens(), "cosine")["cosine"]) < 1e-12


def test_nothing_seen_and_not_a_number():
    model = tiny_llama()
    with lsim.attach(model, analyzers()) as probe:
        pass
    with pytest.raises(lsim.LayersimError, match=r"model\.forward\(tokens\)"):
        probe.results()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("inf")
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(random_tokens())
    with pytest.raises(lsim.LayersimError, match=r"NaN or infinite in forward pass 1(.|\n)*blocks\.2\.hook_resid_post"):
        probe.results()


def test_asking_for_results_does_not_change_them():
    model = tiny_llama()
    tokens = random_tokens(4, 40)
    quiet = []
    asked = []
    for seen, ask in ((quiet, False), (asked, True)):
        with torch.no_grad(), lsim.attach(model, lsim.CKA(minibatch=16)) as probe:
            for part in tokens.split(5, dim=1):
                model(part)
                if ask and probe._tokens >= 4:
                    probe.results()
        seen.append(probe.results()["cka"])
    assert worst(quiet[0], asked[0]) == 0
    assert quiet[0].minibatches == asked[0].minibatches == 10


def test_rows_are_not_made_of_single_steps():
    model = tiny_llama()
    tokens = random_tokens(2, 6)
    with torch.no_grad(), lsim.attach(model, lsim.CKA(level="sequence")) as probe:
        model(tokens)
        model(tokens[:, :1])
    with pytest.raises(lsim.LayersimError, match=r"CKA\(level=\"token\"\)"):
        probe.results()


def test_labels_of_the_data_are_no_part_of_a_loop():
    model = tiny_llama()
    for labels in ("data", torch.zeros(4).long()):
        with (
            pytest.raises(lsim.LayersimError, match=r"^LogitLens .*labels="),
            lsim.attach(model, lsim.LogitLens(labels=labels)),
        ):
            pass


def test_next_tokens_survive_the_gathering_of_views():
    """Every other position counts; what follows it is attended to, and counts as its next token, in one pass or in two."""
    model = tiny_llama()
    tokens = random_tokens(4, 20) % 5 + 3
    runs = []
    for parts in ([tokens], list(tokens.split(2))):
        with torch.no_grad(), lsim.attach(model, lsim.NeuralCollapse(classes=(3, 4, 5))) as probe:
            for part in parts:
                probe.mask = torch.arange(20)[None].expand(len(part), -1) % 2 == 0
                model(part, attention_mask=torch.ones_like(part))
        runs.append(probe.results()["neural_collapse"])
    assert worst(*runs) < 1e-9
    assert runs[0].samples.sum() == sum(int((tokens[:, 1::2] == c).sum()) for c in (3, 4, 5))


@pytest.mark.light("Hugging Face")
@each_model
def test_the_lens_in_a_loop_equals_the_lens_of_a_run(make):
    tokens = random_tokens(4, 12)
    expected = lsim.analyze(make(), lsim.Data(tokens, batch_size=2), lenses())
    model = make()
    with torch.no_grad(), lsim.attach(model, lenses()) as probe:
        for part in tokens.split(2):
            model(part)
    found = probe.results()
    for name in expected:
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-6, atol=1e-6)


def test_the_lens_uses_the_weights_of_the_pass_and_not_of_a_later_one():
    """The optimizer changes the head before a probe that gathers tokens would have asked it."""
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    expected = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    with lsim.attach(model, lsim.LogitLens()) as probe:
        model(tokens)
        with torch.no_grad():
            model.lm_head.weight.mul_(0)
    assert worst(probe.results()["logit_lens"], expected) < 1e-5


def test_the_lens_under_autocast_is_compared_with_what_autocast_explains():
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, lsim.Saturation()) as probe, torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens)
    assert probe.results()["saturation"].counts.sum() == 24


def test_a_head_that_says_something_else_is_refused_in_a_loop():
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    model.lm_head.register_forward_hook(lambda _m, _x, out: 2 * out)
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model(tokens)
    with pytest.raises(lsim.LayersimError, match=r"lm_head\(model\.norm.* \d.*unembed="):
        probe.results()


def test_a_stack_without_its_head_cannot_be_checked():
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model.model(tokens)
    with pytest.raises(lsim.LayersimError, match=r"\b1\b.*`with`"):
        probe.results()


def test_the_lens_while_the_model_generates():
    """Single steps have a prediction and no next token yet."""
    model = tiny_llama()
    tokens = random_tokens(2, 6)
    with torch.no_grad(), lsim.attach(model, [lsim.Saturation(), lsim.LogitLens()]) as probe:
        model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2)
    found = probe.results()
    assert found["saturation"].counts.sum() == 2 * (6 + 4)
    assert (found["logit_lens"].positions, found["logit_lens"].targets) == (20, 10)


def test_a_lens_beside_other_sites_is_that_of_analyze():
    model = tiny_llama()
    tokens = random_tokens(4, 12)
    with torch.no_grad(), lsim.attach(model, [lsim.LogitLens(), lsim.Contribution()]) as probe:
        model(tokens)
    expected = lsim.analyze(model, tokens, [lsim.LogitLens(), lsim.Contribution()])
    found = probe.results()
    assert torch.equal(found["logit_lens"].cross_entropy, expected["logit_lens"].cross_entropy)
    assert torch.equal(found["contribution"].relative_norm, expected["contribution"].relative_norm)


ANALYZERS = {"cosine": lsim.Cosine(center="none"), "lens": lsim.LogitLens()}
pytestmark = pytest.mark.filterwarnings("ignore:Intervals of .* rest on")


def epoch(seed):
    return random_tokens(8, 16, seed=seed).split(2)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("intervals", [False, True])
def test_results_after_a_reset_are_those_of_a_probe_that_begins_there(intervals):
    model = tiny_llama()
    with lsim.attach(model, ANALYZERS, intervals=intervals) as probe:
        for number in range(3):
            for rows in epoch(number):
                model(rows)
            found = probe.results()
            with lsim.attach(tiny_llama(), ANALYZERS, intervals=intervals) as own:
                other = own._source.module
                for rows in epoch(number):
                    other(rows)
            for name, result in own.results().items():
                for field in result.tensor_fields():
                    assert torch.equal(getattr(found[name], field).nan_to_num(), getattr(result, field).nan_to_num())
                assert found[name].provenance.data == result.provenance.data
                assert found[name].provenance.tokens == result.provenance.tokens == 128
                assert len(found[name].block_tokens) == len(result.block_tokens)
            assert probe.headline() == pytest.approx(found.headline(), nan_ok=True)
            probe.reset()
            with pytest.raises(lsim.LayersimError, match="measured nothing"):
                probe.results()
    assert hooks(model) == 0


def test_the_mask_stays_and_results_inside_the_loop_change_nothing():
    model = tiny_llama()
    rows = random_tokens(2, 16)
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        probe.mask = torch.arange(16).expand(2, 16) < 4
        model(rows)
        probe.reset()
        model(rows)
        assert probe.results()["cosine"].provenance.tokens == 8
        probe.results()
        model(rows)
    assert probe.results()["cosine"].provenance.tokens == 16


def test_an_error_stays():
    model = tiny_llama()
    rows = random_tokens(2, 16)
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        probe.mask = torch.ones(3, 3, dtype=torch.bool)
        model(rows)
        probe.mask = None
        probe.reset()
        model(rows)
    assert probe.headline() == {}
    with pytest.raises(lsim.LayersimError, match="mask"):
        probe.results()
