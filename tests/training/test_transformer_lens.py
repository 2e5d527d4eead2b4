"""Fine-tunes of TransformerLens models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import SHORT, dropping, neox


class TestTransformerLens:
    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("make", [tiny_gpt2, neox, tiny_llama], ids=lambda f: f.__name__)
    def test_a_bridge_trains_as_the_model_inside(self, make, tmp_path):
        """Also where query, key and value are one weight, which a bridge holds in three copies that learn."""
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        hf = dropping(make(), 0.0)
        bridge = build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config)
        tokens = random_tokens(12, 7)
        probe = random_tokens(2, 9, seed=5)

        with pytest.raises(lsim.LayersimError, match=r"TransformerBridge.*`save_to`"):
            lsim.finetune_aligned(bridge, tokens, replace(SHORT, save_to=tmp_path / "m"))

        result = lsim.finetune_aligned(bridge, lsim.Data(tokens, batch_size=3), SHORT)
        plain = dropping(make(), 0.0)
        expected = lsim.finetune_aligned(plain, lsim.Data(tokens, batch_size=3), SHORT)
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(bridge(probe), plain(probe).logits, rtol=1e-2, atol=1e-2)
        assert float((plain(probe).logits - make()(probe).logits).abs().max().detach()) > 1e-2

    def test_hooked_transformer(self, tmp_path):
        try:
            from transformer_lens import HookedTransformer, HookedTransformerConfig
        except ImportError:
            pytest.skip("TransformerLens 4 has no HookedTransformer")
        config = HookedTransformerConfig(
            n_layers=3, d_model=32, n_ctx=32, d_head=8, n_heads=4, d_vocab=100, act_fn="gelu", seed=0
        )
        model = HookedTransformer(config)

        result = lsim.finetune_aligned(model, lsim.Data(random_tokens(20, 7), batch_size=4), replace(SHORT, steps=30))

        assert float(result.loss[-1]) < float(result.loss[0])
        with pytest.raises(lsim.LayersimError, match=r"HookedTransformer.*`save_to`"):
            lsim.finetune_aligned(model, random_tokens(10, 6), replace(SHORT, save_to=tmp_path / "m"))
