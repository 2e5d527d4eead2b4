"""What early exit cannot do is refused."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core.errors import LayersimTypeError
from tl_layersim.early_exit.early_exit import EarlyExit
from tl_layersim.early_exit.truncate import truncate

from ..models.tiny_models import VOCABULARY, random_tokens, tiny_llama, tiny_tokenizer
from ..training.helpers import bert, vit


class TestRefusals:
    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_settings(self):
        model = tiny_llama(4)
        for options, words in (
            ({"threshold": 1.5}, "`threshold`.*1.5"),
            ({"threshold": -0.1}, "`threshold`.*-0.1"),
            ({"threshold": 0.9, "rule": "patience"}, "`threshold`.*0.9"),
            ({"threshold": 1.5, "rule": "patience"}, "`threshold`.*1.5"),
            ({"at": 3}, "`at` is 3"),
            ({"at": (0, -1)}, r"`at` is \(0, -1\)"),
            ({"at": (4,)}, "`at`.*4"),
            ({"at": (2, -2)}, "`at`.*2, -2"),
            ({"at": "some"}, "`at`.*some"),
            ({"rule": "entropy"}, "`rule`.*entropy"),
            ({"curve": "x"}, "`curve`.*x"),
            ({"shortlist": [1]}, r"`shortlist`.*\[1\]"),
            ({"shortlist": [1, 1]}, r"`shortlist`.*\[1, 1\]"),
            ({"shortlist": [1, VOCABULARY]}, rf"`shortlist`.*{VOCABULARY}"),
            ({"shortlist": [1, 2], "rule": "cosine"}, "`shortlist`.*cosine"),
        ):
            with pytest.raises(lsim.LayersimError, match=words):
                EarlyExit(model, **options)

    def test_ids_outside_the_vocabulary(self):
        early = EarlyExit(tiny_llama(2), threshold=0.5)
        tokens = random_tokens(2, 6)
        for wrong in (VOCABULARY, -1):
            tokens[1, 5] = wrong
            with pytest.raises(lsim.LayersimError, match=rf"`tokens` .*{wrong}.*{VOCABULARY - 1}"):
                early.logits(tokens)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_generation(self):
        early = EarlyExit(tiny_llama(4))
        tokens = random_tokens(2, 6)
        for prompt, options, words in (
            (tokens, {"max_new_tokens": 0}, "`max_new_tokens`.*0"),
            (tokens, {"max_new_tokens": 60}, "`max_new_tokens`.*60"),
            (tokens, {"temperature": 2.0}, "`temperature`.*2.0.*do_sample"),
            (tokens, {"do_sample": True, "top_p": 0.0}, "`top_p`.*0.0"),
            (tokens, {"attention_mask": torch.zeros(2, 6)}, "`prompt`"),
            ([], {}, "`prompt` has 0 texts"),
            ("w3", {"attention_mask": torch.ones(1, 1)}, "`attention_mask`"),
            ("w3", {}, "tokenizer"),
        ):
            with pytest.raises(lsim.LayersimError, match=words):
                early.generate(prompt, **options)
        # The last new token needs no room of its own.
        assert early.generate(tokens, max_new_tokens=59, eos_token_id=()).tokens[0].shape == (59,)
        with pytest.raises(lsim.LayersimError, match=r"`tokens`.*2, 3, 8, 8"):
            early.logits(torch.randn(2, 3, 8, 8))

        mask = torch.ones(2, 6)
        mask[1] = 0
        with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.* 1"):
            early.logits(tokens, mask)

    def test_texts_without_tokens_or_beyond_the_context(self):
        model = tiny_llama(4)
        model.tokenizer = tiny_tokenizer()
        early = EarlyExit(model)
        long = " ".join(["w3"] * 200)

        with pytest.raises(lsim.LayersimError, match=r"`prompt` has 2 texts, 1 of them"):
            early.generate(["w3 w4", ""])
        for _ in range(8):
            with pytest.raises(lsim.LayersimError, match=r"`prompt`.*\['w3', 3\]"):
                early.generate(["w3", 3])
        with pytest.raises(lsim.LayersimError, match=r"`prompt`.* 201 tokens"):
            early.generate(["w3 w4", long])

    def test_images_of_another_size(self):
        with pytest.raises(lsim.LayersimError, match=r"ViT.*pixel_values"):
            EarlyExit(vit(), threshold=0.3, at=(0,)).logits(torch.randn(2, 3, 64, 64))

    def test_images_in_another_form(self):
        early = EarlyExit(vit(), threshold=0.3, at=(0,))
        images = torch.randn(2, 3, 8, 8)
        for data in ({"pixel_values": images}, list(images), images[0], random_tokens(2, 6)):
            with pytest.raises(lsim.LayersimError, match=r"`tokens`(.|\n)*`batch channel height width`"):
                early.logits(data)
        assert early.logits(tokens=images).logits.shape == (2, 4)
        with pytest.raises(lsim.LayersimError, match="`attention_mask`"):
            early.logits(images, torch.ones(2, 5))

    def test_texts_in_another_form(self):
        early = EarlyExit(bert(), threshold=0.3, at=(0,))
        for data in ("a text", ["a text"], {"input_ids": random_tokens(2, 6)}):
            with pytest.raises(LayersimTypeError, match=r"`tokens`(.|\n)*`batch pos`"):
                early.logits(data)

    def test_classifiers_do_not_generate(self):
        for model in (vit(), bert()):
            with pytest.raises(lsim.LayersimError, match=f"{type(model).__name__} .*`model`"):
                EarlyExit(model, at=(0,)).generate(random_tokens(2, 6))

    def test_models(self):
        model = tiny_llama(3)
        with pytest.raises(lsim.LayersimError, match="no known head"):
            EarlyExit(model.model)
        with pytest.raises(lsim.LayersimError, match="`model` is 'gpt2'"):
            EarlyExit("gpt2")

        # Weights that accelerate keeps elsewhere.
        spread_out = pytest.importorskip("accelerate").cpu_offload(tiny_llama(3))
        with pytest.raises(lsim.LayersimError, match=r"`model`.*meta.*device_map="):
            EarlyExit(spread_out)

        stitched = lsim.stitch(model, model, random_tokens(4, 6), at=(0, 0), adapter="identity").model
        with pytest.raises(lsim.LayersimError, match=r"`model`.*StitchedModel"):
            EarlyExit(stitched)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_models_of_other_libraries(self):
        import nnsight
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        handle = nnsight.NNsight(tiny_llama(3))
        with pytest.raises(lsim.LayersimError, match=r"`model`.*NNsight"):
            EarlyExit(handle)
        model = tiny_llama(3)
        bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)
        with pytest.raises(lsim.LayersimError, match=r"`model`.*TransformerBridge"):
            EarlyExit(bridge)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_recurrent_models(self):
        import transformers

        torch.manual_seed(0)
        small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0}
        mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**small)).eval()
        tokens = random_tokens(2, 7)
        early = EarlyExit(mamba, 0.0, at=(1,))
        with torch.no_grad():
            assert torch.allclose(early.logits(tokens).logits, truncate(mamba, 2)(tokens).logits, atol=1e-5)
        with pytest.raises(lsim.LayersimError, match="cannot generate"):
            early.generate(tokens)
        config = transformers.Qwen3NextConfig(
            **small, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
        )
        hybrid = transformers.Qwen3NextForCausalLM(config).eval()
        early = EarlyExit(hybrid, 1.0, at=(0,))
        with torch.no_grad():
            assert torch.allclose(early.logits(tokens).logits, hybrid(tokens, use_cache=False).logits, atol=1e-5)
        with pytest.raises(lsim.LayersimError, match="Qwen3NextForCausalLM"):
            early.generate(tokens)

    def test_a_model_that_does_not_run_in_parts(self):
        model = tiny_llama(3)

        class Counting(torch.nn.Module):
            """A block that keeps state of its own."""

            def __init__(self, inner):
                super().__init__()
                self.inner, self.calls = inner, 0

            def forward(self, x, *args, **kwargs):
                self.calls += 1
                return self.inner(x, *args, **kwargs) + self.calls

        model.model.layers[2] = Counting(model.model.layers[2])
        with pytest.raises(lsim.LayersimError, match="gives different logits"):
            EarlyExit(model, at=(0, 1))


def test_a_threshold_is_refused_with_the_range_of_the_rule():
    with pytest.raises(lsim.LayersimError, match=r"`threshold`.* 2; .*-1 and 1"):
        EarlyExit(tiny_llama(), threshold=2, rule="cosine")
    with pytest.raises(lsim.LayersimError, match=r"`threshold`.* 95; .*0 and 1"):
        EarlyExit(tiny_llama(), threshold=95)
