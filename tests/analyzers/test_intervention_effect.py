"""`InterventionEffect`: the clean and the edited run of one model, against plain hooks and float64 NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import edited as edited_residuals
from ..inputs.views import from_views, residuals, view, worst
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge
from ..running.runs import without_mlp
from ..user_loops.test_trace_probe import traced

MASK = torch.ones(6, 12, dtype=torch.int64)
MASK[1, 7:] = MASK[4, :3] = 0
TOKENS = random_tokens(6, 12)
DATA = lsim.Data({"input_ids": TOKENS, "attention_mask": MASK}, batch_size=2, skip_first=1)
COUNTED = MASK.bool() & (MASK.cumsum(1) > 1)


def residuals_and_logits(model) -> tuple[np.ndarray, list[np.ndarray]]:
    """Residuals `layer token d_model` and lens logits, block by block `token vocabulary`, of a Hugging Face Llama."""
    hidden: list[torch.Tensor] = []
    hooks = [model.model.layers[0].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda _module, _args, output: hidden.append(output)) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=TOKENS, attention_mask=MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0), use_cache=False)
        x = torch.stack([captured[COUNTED] for captured in hidden])
        logits = [model.lm_head(model.model.norm(residual)) for residual in x[1:]]
    for hook in hooks:
        hook.remove()
    return x.double().numpy(), [logit.double().numpy() for logit in logits]


def edited_in_nnsight(model, scale=0.0):
    with model.edit() as (_, edited):
        edited.model.layers[1].mlp.output[:] = edited.model.layers[1].mlp.output * scale
    return edited


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_it_equals_an_oracle_of_plain_hooks():
    clean = tiny_llama()
    edited = without_mlp(clean)
    x, z = residuals_and_logits(clean)
    y, w = residuals_and_logits(edited)
    expected = oracles.effect(x, y, z, w)

    result = lsim.compare(clean, edited, DATA, lsim.InterventionEffect())

    assert result.positions == result.provenance.tokens == int(COUNTED.sum())
    for field, value in expected.items():
        np.testing.assert_allclose(getattr(result, field), value, atol=1e-9, rtol=1e-6, err_msg=field)
    # Nothing changes before the edited block, to the last bit.
    assert result.cosine[:2].tolist() == [1, 1]
    assert result.relative_change[:2].tolist() == [0, 0]
    assert (result.kl_divergence[0], result.top_changed[0]) == (0, 0)
    assert bool((result.relative_change[2:] > 0).all() and (result.kl_divergence[1:] > 0).all())

    # The last layer's lens is the output of the model.
    with torch.no_grad():
        out = [model(input_ids=TOKENS[:1]).logits[0, 1:].double().log_softmax(-1) for model in (clean, edited)]
    alone = lsim.compare(clean, edited, lsim.Data(TOKENS[:1], skip_first=1), lsim.InterventionEffect())
    torch.testing.assert_close(alone.kl_divergence[-1], (out[0].exp() * (out[0] - out[1])).sum(-1).mean(), rtol=1e-5, atol=1e-9)


@pytest.mark.light("Llama")
@pytest.mark.parametrize("make", [lambda: (tiny_llama(),) * 2, lambda: (bridge(tiny_gpt2()),) * 2], ids=["Llama", "bridge"])
def test_no_intervention_has_no_effect(make):
    result = lsim.compare(*make(), DATA, lsim.InterventionEffect(), intervals=True)
    assert (result.cosine == 1).all()
    assert not any(bool(getattr(result, field).any()) for field in result.tensor_fields() if field != "values")
    assert "none" in result.finding()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_all_ways_to_edit_a_model_give_one_answer():
    clean = tiny_llama()
    expected = lsim.compare(clean, without_mlp(clean), DATA, lsim.InterventionEffect(), intervals=True)
    model = traced(tiny_llama())
    pairs = {
        "nnsight": (model, edited_in_nnsight(model)),
        "simulated": tuple(lsim.open_model(edited, remote="local") for edited in (model, edited_in_nnsight(model))),
    }

    for name, pair in pairs.items():
        result = lsim.compare(*pair, DATA, lsim.InterventionEffect(), intervals=True)
        assert worst(result, expected) == 0, name
        torch.testing.assert_close(result.interval("kl_divergence").error, expected.interval("kl_divergence").error)
        assert "nnsight edit" in result.provenance.changes

    bridged = bridge(tiny_llama())
    changed = bridge(tiny_llama())
    changed.blocks[1].mlp.register_forward_hook(lambda _module, _args, output: 0 * output)
    result = lsim.compare(bridged, changed, DATA, lsim.InterventionEffect())
    assert worst(result, expected) < 1e-5


def test_other_sites_and_models_without_a_head():
    clean = tiny_llama()
    edited = without_mlp(clean)

    with pytest.warns(lsim.LayersimWarning, match="blocks.1.hook_mlp_out: 58 of 58"):
        result = lsim.compare(clean, edited, DATA, lsim.InterventionEffect(lens=False), at="mlp_out")

    assert result.relative_change[:2].tolist() == [0, 1]
    assert result.cosine[0] == 1
    assert bool(result.cosine[1].isnan())
    assert bool(result.kl_divergence.isnan().all() and result.saturation_shift.isnan())

    without = [copy.deepcopy(model).model for model in (clean, edited)]
    whole = lsim.compare(clean, edited, DATA, lsim.InterventionEffect())
    bare = lsim.compare(*without, DATA, lsim.InterventionEffect(lens=False))
    assert torch.equal(bare.cosine, whole.cosine)
    assert bare.finding()
    with pytest.raises(lsim.LayersimError, match="InterventionEffect"):
        lsim.compare(*without, DATA, lsim.InterventionEffect())
    with pytest.raises(lsim.LayersimError, match=r"`at`.*mlp_out"):
        lsim.compare(clean, edited, DATA, lsim.InterventionEffect(), at="mlp_out")


def test_tokens_that_are_zero_have_no_relative_change():
    x = residuals(0)
    x[2, 3] = 0

    with pytest.warns(lsim.LayersimWarning, match="1 of 40"):
        result = from_views(lsim.InterventionEffect(lens=False), [view(x)])
    without_fourth = np.delete(x[2], 3, axis=0), np.delete(edited_residuals(x)[2], 3, axis=0)
    change = np.linalg.norm(without_fourth[1] - without_fourth[0], axis=1) / np.linalg.norm(without_fourth[0], axis=1)

    assert float(result.relative_change[2]) == pytest.approx(change.mean())


def test_one_model_is_refused():
    model = tiny_llama()
    analyzer = lsim.InterventionEffect()

    for call in (lambda: lsim.analyze(model, TOKENS, analyzer), lambda: lsim.attach(model, analyzer)):
        with pytest.raises(lsim.LayersimError, match=r"InterventionEffect.*compare\("):
            call()
    with pytest.raises(lsim.LayersimError, match=r"InterventionEffect.*compare\("):
        lsim.estimate(model, analyzer)


def test_another_model_is_refused():
    with pytest.raises(lsim.LayersimError, match="`model_b`"):
        lsim.compare(tiny_llama(), tiny_llama(layers=2), TOKENS, lsim.InterventionEffect())


@pytest.mark.parametrize("part", ["model.norm", "lm_head"])
def test_an_edit_that_the_lens_does_not_follow_is_refused(part):
    clean = tiny_llama()
    edited = tiny_llama()
    edited.get_submodule(part).register_forward_hook(lambda _module, _args, output: 0.5 * output)

    with pytest.raises(lsim.LayersimError, match="logit lens"):
        lsim.compare(clean, edited, DATA, lsim.InterventionEffect())

    unread = lsim.compare(clean, edited, DATA, lsim.InterventionEffect(lens=False))
    np.testing.assert_array_equal(unread.relative_change, 0)
