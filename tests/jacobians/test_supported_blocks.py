"""Blocks that have no Jacobians, or no skip connection."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..analyzers.helpers import _described
from ..tiny_models import random_tokens, tiny_llama


def tiny_bert():
    from transformers import BertConfig, BertForMaskedLM

    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**small, vocab_size=100)).eval()


class TestRefusals:
    def test_post_norm_blocks(self):
        model = tiny_bert()
        with pytest.raises(lsim.LayersimError, match="no residual branch"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))

    def test_post_norm_blocks_of_a_bridge(self):
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        model = tiny_bert()
        bridge = build_bridge_from_module(model, "BertForMaskedLM", hf_config=model.config)
        with pytest.raises(lsim.LayersimError, match="no residual branch"):
            lsim.prompts.block_jacobians(bridge, random_tokens(1, 9)[0])

    def test_a_sandbox_is_told_of_finite_differences(self):
        from dataclasses import replace

        model = replace(lsim.demo_model() and _described(), calls="values")
        with pytest.raises(lsim.LayersimError, match=r"sandbox(.|\n)*method='finite-difference'"):
            lsim.BlockCoupling().check(model)
        lsim.BlockCoupling(method="finite-difference").check(model)
        with pytest.raises(lsim.LayersimError, match="does not allow"):
            lsim.BlockCoupling().check(replace(model, calls="none"))

    def test_blocks_with_a_state(self):
        model = tiny_llama()
        count = [0]

        def drift(_module, _args, output):
            count[0] += 1
            return output * (1 + 0.1 * count[0])

        handle = model.model.layers[1].register_forward_hook(drift)
        with pytest.raises(lsim.LayersimError, match=r"replayed block differs(.|\n)*blocks\.1\.hook_resid_post"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))
        handle.remove()

    def test_a_probe(self):
        with pytest.raises(lsim.LayersimError, match="cannot be attached"), lsim.attach(tiny_llama(), lsim.BlockCoupling(k=4)):
            pass

    def test_options(self):
        for options in ({"k": 0}, {"k": 1}, {"k": ()}, {"k": (5, 5)}, {"tokens": ()}, {"memory_mb": 0}):
            with pytest.raises(lsim.LayersimError):
                lsim.BlockCoupling(**options)
        with pytest.raises(lsim.LayersimError, match="`k` is 33"):
            lsim.analyze(tiny_llama(), random_tokens(2, 9), lsim.BlockCoupling(k=33))


def test_post_norm_blocks_that_no_name_tells():
    from transformers import BartConfig, BartForCausalLM

    small = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24, "vocab_size": 100}
    model = BartForCausalLM(BartConfig(**small)).eval()
    for method in ("dense", "finite-difference"):
        with pytest.raises(lsim.LayersimError, match="have no residual branch"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4, method=method))
