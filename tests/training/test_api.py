"""Whole fine-tunes: steps by hand, looks, what is left of a model afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training.losses import layer_weights

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import CE, SHORT, dropping, naive, next_of, weights_of


class TestRun:
    def test_a_run_is_adamw_by_hand(self):
        """The whole training once more, from the formula, with the model's own forward pass."""
        tokens = random_tokens(10, 7)
        training = lsim.AlignedTraining(steps=5, lr=1e-2, warmup=2, weight_decay=0.1, clip=0.5, seed=3)
        model = tiny_llama().double()

        result = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), training)
        twin = tiny_llama().double()
        groups = [
            {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in twin.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW(groups, lr=1e-2)
        train = tokens[:9]
        curve = []
        for step in range(5):
            orders = [torch.randperm(9, generator=torch.Generator().manual_seed(3 * 1_000_003 + turn)) for turn in range(2)]
            rows = train[torch.cat(orders)[step * 2 : step * 2 + 2]]
            weights = [0, 0, 1] if step % 2 == 0 else layer_weights("linear", 3)
            loss = naive(twin, rows, next_of(rows), weights)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            for group in optimiser.param_groups:
                group["lr"] = 1e-2 * ((step + 1) / 2 if step < 2 else (5 - step) / 3)
            optimiser.step()
            curve.append(float(loss.detach()))

        assert result.loss.tolist() == pytest.approx(curve, rel=1e-7)
        torch.testing.assert_close(weights_of(model), weights_of(twin), rtol=1e-4, atol=1e-5)

        held_out = tokens[9:]
        hidden = twin(held_out, output_hidden_states=True).hidden_states
        for layer in (1, 2, 3):
            x = hidden[layer] if layer == 3 else twin.model.norm(hidden[layer])
            logits = twin.lm_head(x)[:, :-1].flatten(0, 1)
            assert float(result.values[-1, layer - 1]) == pytest.approx(
                float(CE(logits, held_out[:, 1:].flatten()).detach()), rel=1e-6
            )
            right = (logits.argmax(-1) == held_out[:, 1:].flatten()).double().mean()
            assert float(result.accuracy[-1, layer - 1]) == pytest.approx(float(right))

    def test_looks_are_before_in_between_and_after(self):
        result = lsim.finetune_aligned(
            tiny_llama(), lsim.Data(random_tokens(20, 6), batch_size=2), replace(SHORT, eval_every=4)
        )
        assert result.looks == (0, 4, 6)
        assert result.values.shape == (3, 3)
        assert len(result.loss) == 6
        assert result.plot().data
        assert result.plot("loss").data
        assert float(result.values[-1].mean()) != float(result.values[0].mean())

    def test_the_model_is_left_as_it_was_found(self):
        model = dropping(tiny_gpt2())
        model.transformer.h[1].train()
        modes = {name: part.training for name, part in model.named_modules()}
        lsim.finetune_aligned(model, lsim.Data(random_tokens(10, 6), batch_size=2), SHORT)

        assert {name: part.training for name, part in model.named_modules()} == modes
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert all(p.grad is None for p in model.parameters())

    def test_the_result_survives_a_file(self, tmp_path):
        result = lsim.finetune_aligned(tiny_llama(), lsim.Data(random_tokens(10, 6), batch_size=2), SHORT)
        loaded = lsim.load(result.save(tmp_path / "run.safetensors"))

        assert torch.equal(loaded.values, result.values)
        assert loaded.looks == result.looks
        assert loaded.provenance == result.provenance

    def test_dropout_depends_on_the_seed_alone(self):
        losses = []
        for noise in (1, 2):
            torch.manual_seed(noise)
            losses.append(
                lsim.finetune_aligned(dropping(tiny_gpt2()), lsim.Data(random_tokens(10, 6), batch_size=2), SHORT).loss
            )

        assert torch.equal(losses[0], losses[1])

        other_seed = lsim.finetune_aligned(
            dropping(tiny_gpt2()), lsim.Data(random_tokens(10, 6), batch_size=2), replace(SHORT, seed=1)
        ).loss
        assert not torch.equal(losses[0], other_seed)

    def test_a_loss_that_is_not_finite_ends_the_run(self):
        with pytest.raises(lsim.LayersimError, match=r"The loss is .* at step"):
            lsim.finetune_aligned(
                tiny_llama(), lsim.Data(random_tokens(10, 6), batch_size=2), replace(SHORT, lr=1e30, clip=1e30, steps=8)
            )

    def test_texts_labels_and_data_that_cannot_be_parted(self):
        model = tiny_llama()
        texts = ["w3 w4 w5 w6", "w7 w8 w9"] * 4

        result = lsim.finetune_aligned(model, lsim.Data(texts, tokenizer=tiny_tokenizer(), batch_size=2), SHORT)

        assert result.provenance.options["train_rows"] == 7
        with pytest.raises(lsim.LayersimError, match=r"`data`.* 1 .*eval_data="):
            lsim.finetune_aligned(model, random_tokens(1, 6), SHORT)
        with pytest.raises(lsim.LayersimError, match=r"`data` .*no position"):
            lsim.finetune_aligned(model, random_tokens(4, 1), SHORT)

    def test_raw_data_is_read_eight_rows_at_a_time(self):
        tokens = random_tokens(20, 6)
        raw = lsim.finetune_aligned(tiny_llama(), tokens, SHORT)
        tokenised = lsim.finetune_aligned(tiny_llama(), lsim.Data(tokens, batch_size=8), SHORT)

        assert torch.equal(raw.loss, tokenised.loss)
        assert raw.provenance.options == tokenised.provenance.options
        assert raw.provenance.options["batch_size"] == 8

    def test_positions_without_a_target(self):
        tokens = random_tokens(20, 6)
        labels = torch.full((20, 6), -100)
        labels[:, 2:4] = random_tokens(20, 2, seed=1)

        expected = lsim.finetune_aligned(tiny_llama(), lsim.Data({"input_ids": tokens, "labels": labels}), SHORT, labels="data")
        labels[:, 4:] = 3
        data = lsim.Data({"input_ids": tokens, "labels": labels}, positions=slice(2, 4))

        assert torch.equal(lsim.finetune_aligned(tiny_llama(), data, SHORT, labels="data").loss, expected.loss)
        with pytest.raises(lsim.LayersimError, match="`positions` is 'mean'"):
            lsim.finetune_aligned(tiny_llama(), lsim.Data(tokens, positions="mean"), SHORT)

    def test_float16_is_refused(self):
        with pytest.raises(lsim.LayersimError, match="float16"):
            lsim.finetune_aligned(tiny_llama(dtype=torch.float16), random_tokens(10, 6), SHORT)

    def test_a_nnsight_model_is_refused(self):
        import nnsight

        model = nnsight.NNsight(tiny_llama())
        with pytest.raises(lsim.LayersimError, match=r"`model`.*NNsight.*train_adapters"):
            lsim.finetune_aligned(model, random_tokens(10, 6), SHORT)
