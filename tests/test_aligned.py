"""Aligned training: the loss against its formula, the schedule, runs that resume, and models that can be loaded again."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.source import NO_LABEL
from tl_layersim.training import losses
from tl_layersim.training.losses import layer_weights
from tl_layersim.training.objective import Objective
from tl_layersim.training.stream import Piece, open_stream

from .conftest import random_tokens, tiny_gpt2, tiny_llama

CE = torch.nn.functional.cross_entropy


def naive(model, tokens, targets, weights, norm="final"):
    """Equation 5 in float64, with all logits of all layers, from the model's own hidden states."""
    out = model(tokens, output_hidden_states=True, use_cache=False)
    base = model.base_model
    final = getattr(base, "norm", None) or getattr(base, "ln_f", None) or base.final_layer_norm
    total = 0
    for layer, weight in enumerate(weights, 1):
        x = out.hidden_states[layer]
        if layer < len(weights):
            # Hugging Face's last hidden state has its norm already.
            x = final(x) if norm == "final" else x
        logits = model.get_output_embeddings()(x)
        total = total + weight * CE(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_LABEL)
    return total


def next_of(tokens):
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], NO_LABEL)], 1)


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(3)
    config = GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=100,
        max_position_embeddings=64,
    )
    return GPTNeoXForCausalLM(config).eval()


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(4)
    config = Gemma2Config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=8,
        vocab_size=100,
        max_position_embeddings=64,
        final_logit_softcapping=5.0,
    )
    return Gemma2ForCausalLM(config).eval()


def bert(labels=3):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(5)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=100,
        max_position_embeddings=64,
        initializer_range=0.15,
        num_labels=labels,
    )
    return BertForSequenceClassification(config).eval()


def vit(labels=4):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(6)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        num_channels=3,
        initializer_range=0.15,
        num_labels=labels,
    )
    return ViTForImageClassification(config).eval()


def gradients(model):
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def same_gradients(ours, theirs, tolerance):
    assert set(ours) == set(theirs)
    for name, mine in ours.items():
        other = theirs[name]
        size = 0 if other is None else float(other.abs().max())
        gap = (
            float(((0 if mine is None else mine) - (0 if other is None else other)).abs().max())
            if size or mine is not None
            else 0
        )
        assert gap <= tolerance * max(size, 1.0), name


class TestWeights:
    @pytest.mark.parametrize("n_layers", [1, 2, 12, 80])
    @pytest.mark.parametrize("weights", ["linear", "uniform"])
    def test_they_sum_to_one(self, weights, n_layers):
        found = layer_weights(weights, n_layers)
        assert math.isclose(sum(found), 1, rel_tol=1e-12)
        expected = [2 * l / (n_layers * (n_layers + 1)) for l in range(1, n_layers + 1)]  # noqa: E741
        assert found == pytest.approx(expected if weights == "linear" else [1 / n_layers] * n_layers)

    @pytest.mark.parametrize("bad", [[0.5, 0.5], [0.5, 0.6, 0.1], [1.5, -0.5, 0.0], [math.nan, 0.5, 0.5]])
    def test_others_are_refused(self, bad):
        with pytest.raises(lsim.LayersimError, match="do not belong"):
            layer_weights(bad, 3)


class TestLoss:
    @pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, neox, gemma2], ids=lambda f: f.__name__)
    @pytest.mark.parametrize(("weights", "norm"), [("linear", "final"), ("uniform", "none"), ([0.0, 0.25, 0.75], "final")])
    def test_value_and_gradients_are_the_formula(self, make, weights, norm):
        model = make().double()
        tokens = random_tokens(3, 11)
        loss = lsim.aligned_loss(model, tokens, weights=weights, norm=norm)
        loss.backward()
        ours = gradients(model)
        parts = layer_weights(weights, 3)
        soft = getattr(model.config, "final_logit_softcapping", None)
        expected = (
            naive(model, tokens, next_of(tokens), parts, norm) if soft is None else capped(model, tokens, parts, norm, soft)
        )
        expected.backward()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        same_gradients(ours, gradients(model), 1e-9)

    def test_few_logits_are_held(self, monkeypatch):
        model, tokens = tiny_llama().double(), random_tokens(4, 20)
        whole = lsim.aligned_loss(model, tokens)
        whole.backward()
        expected = gradients(model)
        seen = []
        plain = torch.nn.functional.linear
        monkeypatch.setattr(losses, "LOGITS", 700)

        def watched(x, weight, bias=None):
            if len(weight) == 100:
                seen.append(x.numel() // x.shape[-1])
            return plain(x, weight, bias)

        monkeypatch.setattr(torch.nn.functional, "linear", watched)
        loss = lsim.aligned_loss(model, tokens)
        loss.backward()
        assert max(seen) == 7
        assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-12)
        same_gradients(gradients(model), expected, 1e-10)

    def test_it_is_torchs_own_linear_cross_entropy(self):
        if not hasattr(torch.nn.functional, "linear_cross_entropy"):
            pytest.skip("this torch has no linear_cross_entropy")
        model, tokens = tiny_llama(), random_tokens(4, 20)
        stream = open_stream(model, None, None)
        x = torch.randn(50, 32, requires_grad=True)
        wanted = torch.randint(0, 100, (50,))
        ours = losses.summed_loss(stream.unembed, x, wanted, torch.ones(50))
        ours.backward()
        mine, x.grad = x.grad.clone(), None
        theirs = torch.nn.functional.linear_cross_entropy(x, model.lm_head.weight, wanted, reduction="sum")
        theirs.backward()
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
        torch.testing.assert_close(mine, x.grad, rtol=1e-4, atol=1e-6)
        assert tokens.shape == (4, 20)

    def test_heads_that_are_more_than_a_product(self):
        """A classifier behind BERT's pooler goes another way, to the same numbers."""
        model, tokens, labels = bert().double(), random_tokens(5, 9), torch.tensor([0, 2, NO_LABEL, 1, 1])
        loss = lsim.aligned_loss(model, tokens, labels)
        loss.backward()
        ours = gradients(model)
        hidden = model(tokens, output_hidden_states=True).hidden_states
        expected = sum(
            w * CE(model.classifier(model.bert.pooler(hidden[layer])), labels, ignore_index=NO_LABEL)
            for layer, w in enumerate(layer_weights("linear", 3), 1)
        )
        expected.backward()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        same_gradients(ours, gradients(model), 1e-9)

    def test_vision(self):
        model, pixels, labels = vit().double(), torch.randn(4, 3, 8, 8).double(), torch.tensor([0, 3, 1, 1])
        loss = lsim.aligned_loss(model, pixels, labels, weights="uniform")
        loss.backward()
        ours = gradients(model)
        hidden = model(pixels, output_hidden_states=True).hidden_states
        expected = sum(CE(model.classifier(model.vit.layernorm(hidden[layer])[:, 0]), labels) for layer in (1, 2, 3)) / 3
        expected.backward()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        same_gradients(ours, gradients(model), 1e-9)

    def test_the_last_token_of_a_row_classifier(self):
        from transformers import LlamaForSequenceClassification

        base = tiny_llama()
        base.config.num_labels, base.config.pad_token_id = 3, 0
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(base.config).double().eval()
        tokens, mask = random_tokens(3, 8), torch.ones(3, 8, dtype=torch.long)
        tokens[1, 5:], mask[1, 5:] = 0, 0
        labels = torch.tensor([0, 1, 2])
        loss = lsim.aligned_loss(model, tokens, labels, weights=[0.0, 0.0, 1.0], attention_mask=mask)
        expected = model(tokens, attention_mask=mask, labels=labels).loss
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)

    def test_padding_changes_nothing(self):
        model, tokens = tiny_llama().double(), random_tokens(2, 10)
        mask = torch.ones(2, 10, dtype=torch.long)
        mask[1, 6:] = 0
        found = lsim.aligned_loss(model, tokens, attention_mask=mask)
        other = tokens.clone()
        other[1, 6:] = 7
        assert float(found.detach()) == pytest.approx(
            float(lsim.aligned_loss(model, other, attention_mask=mask).detach()), rel=1e-12
        )
        alone = [lsim.aligned_loss(model, part).detach() for part in (tokens[:1], tokens[1:, :6])]
        assert float(found.detach()) == pytest.approx(float((9 * alone[0] + 5 * alone[1]) / 14), rel=1e-10)

    def test_the_last_layer_alone_is_the_models_own_loss(self):
        model, tokens = tiny_gpt2(), random_tokens(3, 12)
        found = lsim.aligned_loss(model, tokens, weights=[0, 0, 1])
        assert float(found.detach()) == pytest.approx(float(model(tokens, labels=tokens).loss.detach()), rel=1e-5)

    def test_half_precision_is_summed_in_float32(self):
        model, tokens = tiny_llama(), random_tokens(3, 12)
        wide = float(lsim.aligned_loss(model, tokens).detach())
        loss = lsim.aligned_loss(model.bfloat16(), tokens)
        loss.backward()
        assert loss.dtype == torch.float32
        assert float(loss.detach()) == pytest.approx(wide, rel=0.03)
        assert model.lm_head.weight.grad.dtype == torch.bfloat16

    def test_one_layer_one_row_two_tokens(self):
        model, tokens = tiny_llama(layers=1), random_tokens(1, 2)
        assert float(lsim.aligned_loss(model, tokens).detach()) == pytest.approx(
            float(model(tokens, labels=tokens).loss.detach()), rel=1e-5
        )

    def test_far_logits_are_no_nan(self):
        model, tokens = tiny_llama(), random_tokens(2, 8)
        with torch.no_grad():
            model.lm_head.weight.mul_(1000)
        loss = lsim.aligned_loss(model, tokens)
        loss.backward()
        assert bool(loss.isfinite())
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        expected = naive(model, tokens, next_of(tokens), layer_weights("linear", 3))
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)

    def test_no_hook_is_left_and_the_mode_is_kept(self):
        model = tiny_llama().train()
        before = [dict(vars(m)) for m in model.modules()]
        lsim.aligned_loss(model, random_tokens(2, 6)).backward()
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert [set(vars(m)) for m in model.modules()] == [set(names) for names in before]
        assert model.training

    @pytest.mark.parametrize(
        ("labels", "match"),
        [
            (lambda t: t, "tokens themselves"),
            (lambda t: t[:, :-1], "do not fit"),
            (lambda t: torch.zeros(len(t), dtype=torch.long), "do not fit"),
            (lambda t: t + 1000, "none of the model's classes"),
            (lambda t: "data", "do not fit"),
        ],
    )
    def test_labels_that_do_not_fit_are_refused(self, labels, match):
        tokens = random_tokens(2, 8)
        with pytest.raises(lsim.LayersimError, match=match):
            lsim.aligned_loss(tiny_llama(), tokens, labels(tokens))

    def test_a_classifier_needs_labels_and_a_model_needs_a_head(self):
        with pytest.raises(lsim.LayersimError, match="asked for labels"):
            lsim.aligned_loss(bert(), random_tokens(2, 8))
        with pytest.raises(lsim.LayersimError, match="no head"):
            lsim.aligned_loss(tiny_llama().model, random_tokens(2, 8))


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


class TestSchedule:
    def test_steps_alternate_from_the_last_layer(self):
        training = lsim.AlignedTraining(steps=6, schedule="alternating")
        assert [len(training.terms(step, 4)) for step in range(6)] == [1, 4, 1, 4, 1, 4]
        assert training.terms(0, 4) == {4: 1.0}
        assert all(len(lsim.AlignedTraining(schedule="always").terms(step, 4)) == 4 for step in range(6))

    def test_steps_are_the_optimisers_whatever_is_accumulated(self, monkeypatch):
        seen = []
        original = Objective.forward
        monkeypatch.setattr(
            Objective, "forward", lambda self, piece, step, run=None: seen.append(step) or original(self, piece, step, run)
        )
        training = lsim.AlignedTraining(steps=3, accumulation=4, lr=1e-3)
        lsim.finetune_aligned(tiny_llama(), random_tokens(30, 6), training, batch_size=2)
        assert seen == [0] * 4 + [1] * 4 + [2] * 4

    def test_accumulation_is_one_larger_batch(self):
        """Rows of different lengths: tokens count alike, not batches."""
        rows = [random_tokens(1, n, seed=n)[0].tolist() for n in (3, 9, 4, 12, 5, 6, 3, 20, 8, 4, 6, 7)]
        data = [{"input_ids": row} for row in rows]
        found = []
        for batch_size, accumulation in ((8, 1), (2, 4)):
            model = tiny_llama().double()
            training = lsim.AlignedTraining(steps=4, lr=1e-2, accumulation=accumulation)
            result = lsim.finetune_aligned(model, data, training, batch_size=batch_size)
            found.append((result.loss, torch.cat([p.detach().flatten() for p in model.parameters()])))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=0)
        torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-7, atol=1e-9)

    @pytest.mark.parametrize("k", [1, 2, 3])
    def test_drawn_layers_are_unbiased(self, k):
        """The mean over all draws that there are is the aligned loss; and each draw is as likely as each other."""
        weights = layer_weights("linear", 4)
        total = dict.fromkeys(range(1, 5), 0.0)
        draws = list(itertools.combinations(range(1, 5), k))
        training = lsim.AlignedTraining(layers_per_step=k, schedule="always")
        counts = dict.fromkeys(draws, 0)
        for step in range(4000):
            terms = training.terms(step, 4)
            counts[tuple(terms)] += 1
            assert all(math.isclose(weight, weights[layer - 1] * 4 / k) for layer, weight in terms.items())
        for draw in draws:
            for layer in draw:
                total[layer] += weights[layer - 1] * 4 / k / len(draws)
        assert list(total.values()) == pytest.approx(weights)
        expected = 4000 / len(draws)
        chi = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi < 25

    def test_drawn_layers_skip_what_is_above_them(self):
        model = tiny_llama(layers=4)
        ran = []
        for number, block in enumerate(model.model.layers):
            block.register_forward_hook(lambda *_, number=number: ran.append(number))
        stream = open_stream(model, None, None)
        tokens = random_tokens(2, 6)
        stream.loss(Piece(tokens, {}, next_of(tokens), None), {2: 1.0}, True)
        assert ran == [0, 1]

    def test_the_rate_rises_and_falls(self):
        training = lsim.AlignedTraining(steps=10, warmup=4, lr=1.0)
        assert [round(training.rate(step), 6) for step in range(10)] == [
            0.25,
            0.5,
            0.75,
            1.0,
            1.0,
            0.833333,
            0.666667,
            0.5,
            0.333333,
            0.166667,
        ]

    @pytest.mark.parametrize(
        "wrong",
        [{"steps": 0}, {"lr": 0}, {"lr": math.inf}, {"warmup": 1000}, {"accumulation": 0}, {"layers_per_step": 0},
         {"eval_every": 0}, {"clip": 0}, {"weight_decay": -1}, {"beta": 2.0}, {"kl": 1.0},
         {"objective": "standard", "layers_per_step": 2}],
    )  # fmt: skip
    def test_what_makes_no_sense_is_refused(self, wrong):
        with pytest.raises(lsim.LayersimError):
            lsim.AlignedTraining(**wrong)
