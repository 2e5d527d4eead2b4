"""Objectives of a fine-tune: divergences, regularisers, heads of their own, checkpointing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.lens import ExitHeads
from tl_layersim.training.losses import layer_weights
from tl_layersim.training.objectives import OBJECTIVES
from tl_layersim.training.residual_stream import TrainingBatch, open_residual_stream

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import CE, SHORT, dropping, next_of, weights_of


class TestObjectives:
    @pytest.mark.parametrize(
        ("options", "steps"),
        [({}, (0, 1)), ({"cosine_over": "attended"}, (0, 1)), ({"schedule": "alternating"}, (1,))],
    )
    def test_cosine_regulariser(self, options, steps):
        model = tiny_llama().double()
        tokens = random_tokens(2, 8)
        attended = torch.arange(8) < torch.tensor([[8], [5]])
        targets = next_of(tokens).masked_fill(~attended, -100)
        targets[1, 4] = targets[0, 2] = -100
        training = lsim.AlignedTraining(objective="cosine-reg", beta=0.7, **options)
        objective = OBJECTIVES.named("cosine-reg")(open_residual_stream(model), training)
        mask = {"attention_mask": attended.long()}
        hidden: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda _m, _a, o: hidden.append((o if isinstance(o, torch.Tensor) else o[0]).detach()))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            logits = model(tokens, **mask).logits
        for handle in handles:
            handle.remove()
        counted = attended if "cosine_over" in options else targets != -100
        unit = [x[counted] / x[counted].norm(dim=-1, keepdim=True) for x in hidden]
        distance = sum(2 * l / 12 * (1 - (unit[l - 1] * unit[2]).sum(-1).mean()) for l in (1, 2))  # noqa: E741
        expected = CE(logits.flatten(0, 1), targets.flatten(), ignore_index=-100) + 0.7 * distance

        for step in steps:
            loss = objective(TrainingBatch(tokens, mask, targets, attended), step) / (targets != -100).sum()
            assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-13)
        assert training.options()["schedule"] == options.get("schedule", "always")

    def test_cka_regulariser(self):
        """Few samples and many: one has products of samples, the other of dimensions."""
        for rows in (2, 9):
            model = tiny_llama().double()
            tokens = random_tokens(rows, 8)
            training = lsim.AlignedTraining(objective="cka-reg", beta=0.7)
            objective = OBJECTIVES.named("cka-reg")(open_residual_stream(model), training)
            out = model(tokens, output_hidden_states=True)
            targets = next_of(tokens)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model.model, "norm", torch.nn.Identity())
                hidden = [x[:, :-1].flatten(0, 1) for x in model(tokens, output_hidden_states=True).hidden_states[1:]]
            x = [layer - layer.mean(0) for layer in hidden]
            gram = [layer @ layer.T for layer in x]
            cka = [torch.trace(g @ gram[2]) / (g.norm() * gram[2].norm()) for g in gram]
            expected = CE(out.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            expected = expected + 0.7 * sum(2 * number / 12 * (1 - cka[number - 1]) for number in (1, 2))
            loss = objective(TrainingBatch(tokens, {}, targets, None), 0) / (targets != -100).sum()
            assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
            loss.backward()
            # One layer of samples without targets has no CKA, and no NaN.
            none = objective(TrainingBatch(tokens, {}, targets.fill_(-100), None), 0)
            assert float(none.detach()) == 0

    def test_heads_of_their_own(self, tmp_path):
        model = tiny_llama().double()
        tokens = random_tokens(2, 8)
        training = lsim.AlignedTraining(
            objective="multi-head", schedule="always", kl=0.5, steps=2, lr=1e-2, save_to=tmp_path / "m"
        )

        result = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), training, eval_data=tokens)
        twin = tiny_llama().double()
        hidden = twin(tokens, output_hidden_states=True).hidden_states
        logits = [twin.lm_head(hidden[i] if i == 3 else twin.model.norm(hidden[i]))[:, :-1].flatten(0, 1) for i in (1, 2, 3)]
        right = tokens[:, 1:].flatten()
        expected = sum(w * CE(z, right) for z, w in zip(logits, layer_weights("linear", 3), strict=True))
        last = logits[2].log_softmax(-1)
        expected = expected + 0.5 * sum(
            w * (last.exp() * (last - z.log_softmax(-1))).sum(-1).mean()
            for z, w in zip(logits[:2], layer_weights("linear", 3), strict=False)
        )

        assert float(result.loss[0]) == pytest.approx(float(expected.detach()), rel=1e-7)

        heads = ExitHeads.load(tmp_path / "m" / "heads.safetensors")
        assert torch.equal(heads.weight, result.heads.weight)
        assert heads.bias is None
        assert not torch.equal(*heads.weight)

        x = model.model.norm(model(tokens, output_hidden_states=True).hidden_states[1])
        loss = CE((x @ heads.weight[0].T)[:, :-1].flatten(0, 1), right)
        assert float(result.values[-1, 0]) == pytest.approx(float(loss.detach()), rel=1e-7)

    def test_standard_is_the_last_layer_at_every_step(self):
        tokens = random_tokens(10, 7)
        a = tiny_llama().double()
        b = tiny_llama().double()

        lsim.finetune_aligned(a, lsim.Data(tokens, batch_size=2), lsim.AlignedTraining(objective="standard", steps=3, lr=1e-2))
        training = lsim.AlignedTraining(weights=[0, 0, 1], schedule="always", steps=3, lr=1e-2)
        lsim.finetune_aligned(b, lsim.Data(tokens, batch_size=2), training)

        assert torch.equal(weights_of(a), weights_of(b))

    @pytest.mark.light("aligned")
    @pytest.mark.parametrize("objective", ["aligned", "cosine-reg", "multi-head"])
    def test_gradient_checkpointing_changes_no_number(self, objective):
        losses = []
        for twice in (False, True):
            model = dropping(tiny_gpt2()).double()
            training = replace(SHORT, objective=objective, gradient_checkpointing=twice)
            losses.append(
                (lsim.finetune_aligned(model, lsim.Data(random_tokens(10, 6), batch_size=2), training).loss, weights_of(model))
            )
            assert not model.is_gradient_checkpointing
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-12)
