"""Models cut off at a layer."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.early_exit.early_exit import EarlyExit
from tl_layersim.early_exit.truncate import truncate

from ..models.tiny_models import family, random_tokens, tiny_gpt2, tiny_llama
from .helpers import classifier, layers_of


class TestTruncate:
    @pytest.mark.light("llama", "opt", "gptj")
    @pytest.mark.parametrize("name", ["llama", "gemma3", "neox", "opt", "falcon", "bloom", "gptj"])
    def test_says_what_the_lens_says(self, name):
        model = family(name)
        before = copy.deepcopy(model.state_dict())
        short = truncate(model, 2)
        assert type(short) is type(model)
        assert short.config.num_hidden_layers == 2
        assert model.config.num_hidden_layers == 3

        tokens = random_tokens(2, 9)
        always = EarlyExit(model, 0.0, at=(1,))
        with torch.no_grad():
            expected = short(tokens).logits

        assert torch.allclose(expected, always.logits(tokens).logits, atol=1e-5)

        said = short.generate(tokens[:1], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 9:]
        assert said.tolist() == always.generate(tokens[:1], max_new_tokens=5, eos_token_id=()).tokens[0].tolist()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert {p.data_ptr() for p in short.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_gpt2_and_classifiers(self):
        model = tiny_gpt2()
        assert truncate(model, 1).config.n_layer == 1

        stream_of, lens = layers_of(model)
        tokens = random_tokens(1, 6)
        with torch.no_grad():
            assert torch.allclose(truncate(model, 1)(tokens).logits, lens(stream_of(input_ids=tokens)[1]), atol=1e-5)
        for name in ("bert", "vit"):
            big, inputs, _ = classifier(name)
            with torch.no_grad():
                logits = truncate(big, 2)(inputs).logits
            assert torch.allclose(logits, EarlyExit(big, 0.0, at=(1,)).logits(inputs).logits, atol=1e-5)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_saved_and_loaded(self, tmp_path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        demo = lsim.demo_model()
        state = torch.get_rng_state()
        short = truncate(demo, 5, save_to=tmp_path / "short")
        assert torch.equal(torch.get_rng_state(), state)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype=torch.float32)
        tokens = random_tokens(2, 9)
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, short(tokens).logits)
        assert AutoTokenizer.from_pretrained(tmp_path / "short").encode("Once") == demo.tokenizer.encode("Once")

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_an_opened_model(self):
        model = tiny_llama(3)
        tokens = random_tokens(2, 9)

        opened = lsim.open_model(model, layers=[f"model.layers.{i}" for i in range(3)], unembed=["model.norm", "lm_head"])
        with torch.no_grad():
            assert torch.equal(truncate(opened, 2)(tokens).logits, truncate(model, 2)(tokens).logits)
        early = EarlyExit(opened, 0.0, at=(1,))

        assert early.model is model
        assert torch.equal(early.logits(tokens).logits, EarlyExit(model, 0.0, at=(1,)).logits(tokens).logits)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_a_model_of_which_a_bridge_was_made(self):
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        tokens = random_tokens(2, 9)
        for model, name in ((tiny_llama(3), "LlamaForCausalLM"), (tiny_gpt2(), "GPT2LMHeadModel")):
            with torch.no_grad():
                expected = truncate(model, 2)(tokens).logits
                build_bridge_from_module(model, name, hf_config=model.config)
                assert torch.equal(truncate(model, 2)(tokens).logits, expected)

    def test_half_precision(self):
        model = tiny_llama(3, torch.bfloat16)
        short = truncate(model, 2)
        assert short.dtype == torch.bfloat16
        assert short.model.rotary_emb.inv_freq.dtype == model.model.rotary_emb.inv_freq.dtype

    def test_refusals(self):
        for n_layers in (0, 4):
            with pytest.raises(lsim.LayersimError, match=f"`n_layers`.*{n_layers}"):
                truncate(tiny_llama(3), n_layers)

        module = torch.nn.Module()
        module.layers = torch.nn.ModuleList([torch.nn.Identity()])
        with pytest.raises(lsim.LayersimError):
            truncate(module, 1)

    def test_sharded_weights_are_refused(self, monkeypatch):
        monkeypatch.setattr("tl_layersim.early_exit.truncate.weight_peers", lambda module: frozenset({0, 1}))
        with pytest.raises(lsim.LayersimError, match=r"`model`.*\[0, 1\]"):
            truncate(tiny_llama(3), 2)


SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def zamba():
    kinds = ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"]
    sizes = {"n_mamba_heads": 2, "attention_head_dim": 16, "mamba_dt_rank": 4, "layers_block_type": kinds}
    return transformers.ZambaForCausalLM(transformers.ZambaConfig(**SMALL, **sizes, num_hidden_layers=6))


def recurrent_gemma():
    sizes = {"num_hidden_layers": 6, "lru_width": 32, "attention_window_size": 4}
    return transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**SMALL, **sizes))


def gemma4():
    sizes = {"head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8}
    sizes |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 4}
    kinds = ["sliding_attention", "full_attention"] * 2
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SMALL, **sizes, layer_types=kinds))


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 32},
        **{"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 8},
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ForCTC(config)


def test_lists_by_layer_and_shared_keys_are_cut_along(tmp_path):
    torch.manual_seed(0)
    model = gemma4().eval()
    tokens = random_tokens(2, 9)

    with torch.no_grad():
        expected = model.lm_head(model.model.norm(model(tokens, output_hidden_states=True).hidden_states[2]))
        short = truncate(model, 2, save_to=tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert short.config.num_kv_shared_layers == 0
        assert torch.allclose(again(tokens).logits, expected, atol=1e-5)


@pytest.mark.parametrize("kept", [1, 3])
def test_a_configuration_that_changes_on_loading_is_refused(kept):
    # The last block of a Gemma 4 is one of full attention, whatever its configuration says.
    with pytest.raises(lsim.LayersimError, match=rf"`n_layers` is {kept}.*layer_types"):
        truncate(gemma4().eval(), kept)


@pytest.mark.parametrize("make", [zamba, recurrent_gemma, wav2vec2])
def test_errors_of_a_model_are_refusals(make):
    torch.manual_seed(0)
    with pytest.raises(lsim.LayersimError, match=r"2|input_values"):
        truncate(make().eval(), 2)


def test_inputs_that_are_no_tokens_are_refused_by_name():
    with pytest.raises(lsim.LayersimError, match="`input_values`"):
        EarlyExit(wav2vec2().eval(), 0.5)


def test_a_point_at_which_blocks_need_those_below_is_refused():
    torch.manual_seed(0)
    model = gemma4().eval()
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_post"):
        lsim.stitch(model, model, random_tokens(10, 14), at=(0, 0), adapter="identity")


def test_a_copy_whose_blocks_depend_on_their_number_is_refused():
    """Its last block alone is another function."""
    model = tiny_llama(4)

    class Depends(type(model)):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.model.layers[0].register_forward_hook(lambda _m, _args, output: output * config.num_hidden_layers)

    torch.manual_seed(0)
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_post"):
        truncate(Depends(model.config).eval(), 2)
