"""What was once wrong with fine-tunes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

import tl_layersim as lsim
from tl_layersim.training.losses import layer_weights

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import CE, SHORT, bert, weights_of


class TestWhatWasOnceWrong:
    """Each was found by somebody who tried to break it."""

    def test_gradients_that_stand_there_are_no_part_of_the_first_step(self):
        tokens = random_tokens(10, 6)
        clean = tiny_llama().double()
        dirty = tiny_llama().double()

        (1000 * lsim.training.aligned_loss(dirty, tokens)).backward()
        for model in (clean, dirty):
            lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), replace(SHORT, steps=1, warmup=0))

        assert torch.equal(weights_of(clean), weights_of(dirty))
        assert all(p.grad is None for p in dirty.parameters())

    def test_a_head_that_is_not_the_models_is_refused_in_a_loop_too(self):
        from transformers import ImageGPTConfig, ImageGPTForImageClassification

        class LargestOfPositions(ImageGPTForImageClassification):
            """Its `score`, the name of decoders' heads, classifies the largest values of all positions."""

            def forward(self, input_ids=None, **inputs):
                states = self.transformer(input_ids, **inputs).last_hidden_state
                return SequenceClassifierOutputWithPast(logits=self.score(states.amax(1)))

        torch.manual_seed(0)
        config = ImageGPTConfig(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=4, num_labels=3)
        model = LargestOfPositions(config).eval()

        with pytest.raises(lsim.LayersimError, match="own logits"):
            lsim.training.aligned_loss(model, random_tokens(2, 6), torch.tensor([0, 1]))

    def test_own_heads_keep_the_bias_of_the_models_head(self):
        from transformers import PhiConfig, PhiForCausalLM

        torch.manual_seed(0)
        config = PhiConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=100)
        model = PhiForCausalLM(config).double().eval()
        with torch.no_grad():
            model.lm_head.bias.normal_(0, 3)
        tokens = random_tokens(2, 8)
        training = lsim.AlignedTraining(objective="multi-head", schedule="always", kl=1.0, steps=1, lr=1e-12)

        result = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), training, eval_data=tokens)
        hidden = model(tokens, output_hidden_states=True).hidden_states
        x = [hidden[i] if i == 3 else model.model.final_layernorm(hidden[i]) for i in (1, 2, 3)]
        logits = [model.lm_head(part)[:, :-1].flatten(0, 1) for part in x]
        right = tokens[:, 1:].flatten()
        losses = [CE(z, right) for z in logits]

        assert result.values[-1].tolist() == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-6)

        weights = layer_weights("linear", 3)
        last = logits[2].log_softmax(-1)
        kl = [(last.exp() * (last - z.log_softmax(-1))).sum(-1).mean() for z in logits[:2]]
        expected = sum(w * loss for w, loss in zip(weights, losses, strict=True))
        expected = expected + sum(w * part for w, part in zip(weights, kl, strict=False))
        assert float(result.loss[0]) == pytest.approx(float(expected.detach()), rel=1e-6)

    def test_a_row_classifier_reads_where_transformers_reads(self):
        """The last token that is not the padding id, though the mask has more: padding and end are one id in GPT-2."""
        from transformers import GPT2Config, GPT2ForSequenceClassification

        torch.manual_seed(0)
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, num_labels=3, pad_token_id=2)
        model = GPT2ForSequenceClassification(config).double().eval()
        tokens = random_tokens(4, 8)
        tokens[:, -1] = 2
        tokens[1, -3:] = 2
        labels = torch.tensor([0, 1, 2, 1])

        loss = lsim.training.aligned_loss(model, tokens, labels, weights=[0, 1])

        assert float(loss.detach()) == pytest.approx(float(model(tokens, labels=labels).loss.detach()), rel=1e-6)

        mask = torch.ones_like(tokens)
        mask[1, 5:] = 0
        changed_tokens = tokens.clone()
        changed_tokens[1, 5:] = 9
        padded = lsim.training.aligned_loss(model, changed_tokens, labels, weights=[0, 1], attention_mask=mask)
        assert float(padded.detach()) == pytest.approx(
            float(model(tokens, attention_mask=mask, labels=labels).loss.detach()), rel=1e-6
        )

    def test_second_sentences_are_read(self):
        rows = [{"input_ids": [3, 4, 5, 6], "token_type_ids": [0, 0, 1, 1], "label": i % 3} for i in range(6)]
        pairs = lsim.finetune_aligned(bert(), lsim.Data(rows, batch_size=2), SHORT)
        for row in rows:
            row["token_type_ids"] = [0] * 4
        single = lsim.finetune_aligned(bert(), lsim.Data(rows, batch_size=2), SHORT)

        assert not torch.equal(pairs.values, single.values)
        assert pairs.provenance.data != single.provenance.data

    def test_a_checkpoint_knows_what_learns(self, tmp_path):
        path = tmp_path / "run.safetensors"
        tokens = random_tokens(10, 6)

        lsim.finetune_aligned(tiny_llama(), lsim.Data(tokens, batch_size=2), SHORT, checkpoint=path)
        model = tiny_llama()
        model.model.embed_tokens.weight.requires_grad_(False)

        with pytest.raises(lsim.LayersimError, match="another run"):
            lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), SHORT, checkpoint=path)

        lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), SHORT)
        assert torch.equal(model.model.embed_tokens.weight, tiny_llama().model.embed_tokens.weight)

    def test_broken_weights_are_not_kept(self, tmp_path):
        path = tmp_path / "run.safetensors"
        with pytest.raises(lsim.LayersimError, match="loss is"):
            lsim.finetune_aligned(
                tiny_llama(), lsim.Data(random_tokens(10, 6), batch_size=2), replace(SHORT, lr=1e30, clip=1e30), checkpoint=path
            )
        assert not path.exists()

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "model").write_text("something")
        with pytest.raises(lsim.LayersimError, match=r"`save_to`.*model"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, save_to=tmp_path / "model"))

    def test_models_with_adapters_are_neither_saved_nor_given_more(self, tmp_path):
        peft = pytest.importorskip("peft")
        model = tiny_llama()
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))

        for name, value in (("save_to", tmp_path / "m"), ("lora", peft.LoraConfig(target_modules=["q_proj"]))):
            with pytest.raises(lsim.LayersimError, match=f"`{name}`"):
                lsim.finetune_aligned(model, random_tokens(10, 6), replace(SHORT, **{name: value}))

    def test_a_bridge_of_parts_that_nobody_can_join_still_learns(self):
        from transformer_lens.model_bridge.sources import build_bridge_from_module
        from transformers import Phi3Config, Phi3ForCausalLM

        def make():
            torch.manual_seed(0)
            config = Phi3Config(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
                vocab_size=100, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            return Phi3ForCausalLM(config).eval()

        hf = make()
        bridge = build_bridge_from_module(hf, "Phi3ForCausalLM", hf_config=hf.config)
        tokens = random_tokens(10, 6)

        losses = lsim.finetune_aligned(bridge, lsim.Data(tokens, batch_size=2), SHORT).loss
        expected = lsim.finetune_aligned(make(), lsim.Data(tokens, batch_size=2), SHORT).loss

        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)

    def test_heads_of_an_earlier_run_do_not_stay(self, tmp_path):
        tokens = random_tokens(10, 6)
        for objective in ("multi-head", "aligned"):
            training = replace(SHORT, objective=objective, save_to=tmp_path / "m")
            lsim.finetune_aligned(tiny_llama(), lsim.Data(tokens, batch_size=2), training)
        assert not (tmp_path / "m" / "heads.safetensors").exists()
