"""Objectives of a fine-tune: divergences, regularisers, heads of their own, checkpointing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training.losses import layer_weights

from ..tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import CE, SHORT, dropping, weights_of


class TestObjectives:
    def test_cosine_regulariser(self):
        model, tokens = tiny_llama().double(), random_tokens(2, 8)
        training = lsim.AlignedTraining(objective="cosine-reg", schedule="always", beta=0.7, steps=1, lr=1e-9)
        result = lsim.finetune_aligned(model, tokens, training, eval_data=tokens, batch_size=2)
        out = tiny_llama().double()
        last: list[torch.Tensor] = []
        out.model.layers[-1].register_forward_hook(lambda _m, _a, o: last.append(o if isinstance(o, torch.Tensor) else o[0]))
        found = out(tokens, output_hidden_states=True, labels=tokens)
        expected = found.loss + 0.7 * sum(
            w * (1 - torch.nn.functional.cosine_similarity(found.hidden_states[layer], last[0], dim=-1)).mean()
            for layer, w in zip((1, 2), layer_weights("linear", 3), strict=False)
        )
        assert float(result.loss[0]) == pytest.approx(float(expected.detach()), rel=1e-7)

    def test_heads_of_their_own(self, tmp_path):
        model, tokens = tiny_llama().double(), random_tokens(2, 8)
        training = lsim.AlignedTraining(
            objective="multi-head", schedule="always", kl=0.5, steps=2, lr=1e-2, save_to=tmp_path / "m"
        )
        result = lsim.finetune_aligned(model, tokens, training, eval_data=tokens, batch_size=2)
        other = tiny_llama().double()
        hidden = other(tokens, output_hidden_states=True).hidden_states
        logits = [other.lm_head(hidden[i] if i == 3 else other.model.norm(hidden[i]))[:, :-1].flatten(0, 1) for i in (1, 2, 3)]
        right = tokens[:, 1:].flatten()
        expected = sum(w * CE(z, right) for z, w in zip(logits, layer_weights("linear", 3), strict=True))
        last = logits[2].log_softmax(-1)
        expected = expected + 0.5 * sum(
            w * (last.exp() * (last - z.log_softmax(-1))).sum(-1).mean()
            for z, w in zip(logits[:2], layer_weights("linear", 3), strict=False)
        )
        assert float(result.loss[0]) == pytest.approx(float(expected.detach()), rel=1e-7)
        heads = lsim.ExitHeads.load(tmp_path / "m" / "heads.safetensors")
        assert torch.equal(heads.weight, result.heads.weight)
        assert heads.bias is None
        assert not torch.equal(*heads.weight)
        x = model.model.norm(model(tokens, output_hidden_states=True).hidden_states[1])
        loss = CE((x @ heads.weight[0].T)[:, :-1].flatten(0, 1), right)
        assert float(result.values[-1, 0]) == pytest.approx(float(loss.detach()), rel=1e-7)

    def test_no_gradient_of_the_divergence_reaches_the_last_layer(self):
        """With the paper's term alone at work on the last head, its weights do not move."""
        model, tokens = tiny_llama().double(), random_tokens(2, 8)
        from tl_layersim.training.objectives.multi_head import MultiHeadObjective
        from tl_layersim.training.residual_stream import open_residual_stream

        objective = MultiHeadObjective(
            open_residual_stream(model, None, None), lsim.AlignedTraining(objective="multi-head", kl=1.0)
        )
        last = torch.randn(5, 32).double().requires_grad_()
        x = torch.randn(5, 32).double().requires_grad_()
        objective._divergence(last, x, objective.head_of(1)).backward()
        assert last.grad is None
        assert float(x.grad.abs().max()) > 0
        assert tokens.shape == (2, 8)

    def test_standard_is_the_last_layer_at_every_step(self):
        tokens = random_tokens(10, 7)
        a, b = tiny_llama().double(), tiny_llama().double()
        lsim.finetune_aligned(a, tokens, lsim.AlignedTraining(objective="standard", steps=3, lr=1e-2), batch_size=2)
        own = lsim.AlignedTraining(weights=[0, 0, 1], schedule="always", steps=3, lr=1e-2)
        lsim.finetune_aligned(b, tokens, own, batch_size=2)
        assert torch.equal(weights_of(a), weights_of(b))

    @pytest.mark.parametrize("objective", ["aligned", "cosine-reg", "multi-head"])
    def test_gradient_checkpointing_changes_no_number(self, objective):
        found = []
        for twice in (False, True):
            model = dropping(tiny_gpt2()).double()
            training = replace(SHORT, objective=objective, gradient_checkpointing=twice)
            found.append((lsim.finetune_aligned(model, random_tokens(10, 6), training, batch_size=2).loss, weights_of(model)))
            assert not model.is_gradient_checkpointing
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)

    def test_bfloat16_is_near_float32(self):
        found = [
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, mixed_precision=how), batch_size=2).loss
            for how in ("no", "bf16")
        ]
        assert not torch.equal(*found)
        torch.testing.assert_close(*found, rtol=0.05, atol=0.05)
