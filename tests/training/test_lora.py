"""Fine-tunes of LoRA adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import SHORT


class TestLora:
    def config(self):
        peft = pytest.importorskip("peft")
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)

    def test_only_adapters_learn_and_are_merged(self, tmp_path):
        from transformers import AutoModelForCausalLM

        model = tiny_llama()
        before = tiny_llama()
        training = replace(SHORT, lora=self.config(), save_to=tmp_path / "m", lr=0.05)

        result = lsim.finetune_aligned(model, lsim.Data(random_tokens(20, 8), batch_size=2), training)

        assert result.provenance.options["lora"]["r"] == "4"

        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in before.named_parameters()]
        assert all(p.requires_grad for p in model.parameters())

        changed = {
            name.split(".")[-2]
            for (name, a), b in zip(model.named_parameters(), before.parameters(), strict=True)
            if not torch.equal(a, b)
        }
        assert changed == {"q_proj", "down_proj"}

        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        tokens = random_tokens(2, 9)
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)

    @pytest.mark.parametrize("lora", [8, {"r": 4}])
    def test_other_things_are_refused(self, lora):
        pytest.importorskip("peft")
        with pytest.raises(lsim.LayersimError, match=r"`lora`.*(8|dict)"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, lora=lora))

    def test_a_bridge_is_refused(self):
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        model = tiny_llama()
        bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)
        with pytest.raises(lsim.LayersimError, match=r"`lora`.*TransformerBridge"):
            lsim.finetune_aligned(bridge, random_tokens(10, 6), replace(SHORT, lora=self.config()))
