"""The aligned loss against its formula."""

from __future__ import annotations

import math

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.labels import NO_LABEL
from tl_layersim.training import losses
from tl_layersim.training.losses import layer_weights

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import CE, bert, gemma2, naive, neox, next_of, vit


def gradients(model):
    gradients_of = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients_of


def same_gradients(actual, expected, tolerance):
    assert set(actual) == set(expected)
    for name, mine in actual.items():
        expected_gradient = expected[name]
        size = 0 if expected_gradient is None else float(expected_gradient.abs().max())
        gap = (
            float(((0 if mine is None else mine) - (0 if expected_gradient is None else expected_gradient)).abs().max())
            if size or mine is not None
            else 0
        )
        assert gap <= tolerance * max(size, 1.0), name


class TestWeights:
    @pytest.mark.parametrize("n_layers", [1, 2, 12, 80])
    @pytest.mark.parametrize("weights", ["linear", "uniform"])
    def test_they_sum_to_one(self, weights, n_layers):
        layer_shares = layer_weights(weights, n_layers)
        assert math.isclose(sum(layer_shares), 1, rel_tol=1e-12)

        expected = [2 * l / (n_layers * (n_layers + 1)) for l in range(1, n_layers + 1)]  # noqa: E741
        assert layer_shares == pytest.approx(expected if weights == "linear" else [1 / n_layers] * n_layers)

    @pytest.mark.parametrize("bad", [[0.5, 0.5], [0.5, 0.6, 0.1], [1.5, -0.5, 0.0], [math.nan, 0.5, 0.5]])
    def test_others_are_refused(self, bad):
        with pytest.raises(lsim.LayersimError, match=rf"`weights`.*{bad[0]}.* 3 "):
            layer_weights(bad, 3)


class TestLoss:
    @pytest.mark.light(
        "linear-final-tiny_llama",
        "linear-final-neox",
        "uniform-none-tiny_llama",
        "uniform-none-gemma2",
        "[0.0, 0.25, 0.75]-final-tiny_gpt2",
        "[0.0, 0.25, 0.75]-final-gemma2",
    )
    @pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, neox, gemma2], ids=lambda f: f.__name__)
    @pytest.mark.parametrize(("weights", "norm"), [("linear", "final"), ("uniform", "none"), ([0.0, 0.25, 0.75], "final")])
    def test_value_and_gradients_are_the_formula(self, make, weights, norm):
        model = make().double()
        tokens = random_tokens(3, 11)

        loss = lsim.training.aligned_loss(model, tokens, weights=weights, norm=norm)
        loss.backward()
        chunked = gradients(model)
        parts = layer_weights(weights, 3)
        soft = getattr(model.config, "final_logit_softcapping", None)
        expected = (
            naive(model, tokens, next_of(tokens), parts, norm) if soft is None else capped(model, tokens, parts, norm, soft)
        )
        expected.backward()

        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        same_gradients(chunked, gradients(model), 1e-9)

    def test_few_logits_are_held(self, monkeypatch):
        model = tiny_llama().double()
        tokens = random_tokens(4, 20)
        model.lm_head.bias = torch.nn.Parameter(torch.randn(100).double())

        whole = lsim.training.aligned_loss(model, tokens)
        whole.backward()
        expected = gradients(model)
        sizes = []
        plain = torch.nn.functional.linear
        monkeypatch.setattr(losses, "LOGITS", 700)

        def watched(x, weight, bias=None):
            if len(weight) == 100:
                sizes.append(x.numel() // x.shape[-1])
            return plain(x, weight, bias)

        monkeypatch.setattr(torch.nn.functional, "linear", watched)
        loss = lsim.training.aligned_loss(model, tokens)
        loss.backward()

        assert max(sizes) == 7
        assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-12)
        same_gradients(gradients(model), expected, 1e-10)

    def test_heads_that_are_more_than_a_product(self):
        """A classifier behind BERT's pooler goes another way, to the same numbers."""
        model = bert().double()
        tokens = random_tokens(5, 9)
        labels = torch.tensor([0, 2, NO_LABEL, 1, 1])

        loss = lsim.training.aligned_loss(model, tokens, labels)
        loss.backward()
        actual = gradients(model)
        hidden = model(tokens, output_hidden_states=True).hidden_states
        expected = sum(
            w * CE(model.classifier(model.bert.pooler(hidden[layer])), labels, ignore_index=NO_LABEL)
            for layer, w in enumerate(layer_weights("linear", 3), 1)
        )
        expected.backward()

        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        same_gradients(actual, gradients(model), 1e-9)

    def test_vision(self):
        model = vit().double()
        pixels = torch.randn(4, 3, 8, 8).double()
        labels = torch.tensor([0, 3, 1, 1])

        loss = lsim.training.aligned_loss(model, pixels, labels, weights="uniform")
        loss.backward()
        actual = gradients(model)
        hidden = model(pixels, output_hidden_states=True).hidden_states
        expected = sum(CE(model.classifier(model.vit.layernorm(hidden[layer])[:, 0]), labels) for layer in (1, 2, 3)) / 3
        expected.backward()

        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        same_gradients(actual, gradients(model), 1e-9)

    def test_the_last_token_of_a_row_classifier(self):
        from transformers import LlamaForSequenceClassification

        base = tiny_llama()
        base.config.num_labels = 3
        base.config.pad_token_id = 0
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(base.config).double().eval()
        tokens = random_tokens(3, 8)
        mask = torch.ones(3, 8, dtype=torch.long)
        tokens[1, 5:] = 0
        mask[1, 5:] = 0
        tokens[2, :3] = 0
        mask[2, :3] = 0
        labels = torch.tensor([0, 1, 2])

        loss = lsim.training.aligned_loss(model, tokens, labels, weights=[0.0, 0.0, 1.0], attention_mask=mask)
        expected = model(tokens, attention_mask=mask, labels=labels).loss

        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)

        # Without a mask, the padding id tells which token is the last.
        loss = lsim.training.aligned_loss(model, tokens, labels, weights=[0.0, 0.0, 1.0])
        expected = model(tokens, labels=labels).loss
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_labels_at_padding_do_not_count(self, side):
        model = tiny_llama().double()
        tokens = random_tokens(2, 10)
        mask = torch.ones(2, 10, dtype=torch.long)
        padding = slice(0, 4) if side == "left" else slice(6, None)
        mask[1, padding] = 0
        labels = random_tokens(2, 10, seed=4)
        without = labels.clone()
        without[1, padding] = NO_LABEL

        loss = lsim.training.aligned_loss(model, tokens, labels, attention_mask=mask)
        expected = lsim.training.aligned_loss(model, tokens, without, attention_mask=mask)

        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
        with pytest.raises(lsim.LayersimError, match="`labels`"):
            lsim.training.aligned_loss(model, tokens, torch.where(mask == 1, NO_LABEL, labels), attention_mask=mask)

    def test_padding_changes_nothing(self):
        model = tiny_llama().double()
        tokens = random_tokens(2, 10)
        mask = torch.ones(2, 10, dtype=torch.long)
        mask[1, 6:] = 0

        loss = lsim.training.aligned_loss(model, tokens, attention_mask=mask)
        changed_tokens = tokens.clone()
        changed_tokens[1, 6:] = 7

        assert float(loss.detach()) == pytest.approx(
            float(lsim.training.aligned_loss(model, changed_tokens, attention_mask=mask).detach()), rel=1e-12
        )

        alone = [lsim.training.aligned_loss(model, part).detach() for part in (tokens[:1], tokens[1:, :6])]
        assert float(loss.detach()) == pytest.approx(float((9 * alone[0] + 5 * alone[1]) / 14), rel=1e-10)

    def test_the_last_layer_alone_is_the_models_own_loss(self):
        model = tiny_gpt2()
        tokens = random_tokens(3, 12)

        loss = lsim.training.aligned_loss(model, tokens, weights=[0, 0, 1])

        assert float(loss.detach()) == pytest.approx(float(model(tokens, labels=tokens).loss.detach()), rel=1e-5)

    def test_half_precision_is_summed_in_float32(self):
        model = tiny_llama()
        tokens = random_tokens(3, 12)

        wide = float(lsim.training.aligned_loss(model, tokens).detach())
        loss = lsim.training.aligned_loss(model.bfloat16(), tokens)
        loss.backward()

        assert loss.dtype == torch.float32
        assert float(loss.detach()) == pytest.approx(wide, rel=0.03)
        assert model.lm_head.weight.grad.dtype == torch.bfloat16

    def test_far_logits_are_no_nan(self):
        model = tiny_llama()
        tokens = random_tokens(2, 8)
        with torch.no_grad():
            model.lm_head.weight.mul_(1000)

        loss = lsim.training.aligned_loss(model, tokens)
        loss.backward()

        assert bool(loss.isfinite())
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)

        expected = naive(model, tokens, next_of(tokens), layer_weights("linear", 3))
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)

    def test_no_hook_is_left_and_the_mode_is_kept(self):
        model = tiny_llama().train()
        before = [dict(vars(m)) for m in model.modules()]
        lsim.training.aligned_loss(model, random_tokens(2, 6)).backward()

        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert [set(vars(m)) for m in model.modules()] == [set(names) for names in before]
        assert model.training

    @pytest.mark.parametrize(
        ("labels", "match"),
        [
            (lambda t: t, "^`labels` .*`labels`"),
            (lambda t: t[:, :-1], "`labels`.*2, 7"),
            (lambda t: torch.zeros(len(t), dtype=torch.long), r"`labels`.*\(2,\)"),
            (lambda t: t + 1000, "`labels`.*10.."),
            (lambda t: torch.full_like(t, 100), "`labels`.* 100 .* 99"),
            (lambda t: "data", "`labels`.*data"),
        ],
    )
    def test_labels_that_do_not_fit_are_refused(self, labels, match):
        tokens = random_tokens(2, 8)
        with pytest.raises(lsim.LayersimError, match=match):
            lsim.training.aligned_loss(tiny_llama(), tokens, labels(tokens))

    def test_a_classifier_needs_labels_and_a_model_needs_a_head(self):
        with pytest.raises(lsim.LayersimError, match="`labels` is None"):
            lsim.training.aligned_loss(bert(), random_tokens(2, 8))
        with pytest.raises(lsim.LayersimError, match="no known head"):
            lsim.training.aligned_loss(tiny_llama().model, random_tokens(2, 8))


def capped(model, tokens, weights, norm, cap):
    """The naive loss where logits are capped."""
    out = model(tokens, output_hidden_states=True, use_cache=False)
    total = 0
    for layer, weight in enumerate(weights, 1):
        x = out.hidden_states[layer]
        if layer < len(weights) and norm == "final":
            x = model.model.norm(x)
        logits = cap * torch.tanh(model.lm_head(x) / cap)
        total = total + weight * CE(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return total
