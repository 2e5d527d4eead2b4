"""Law 3: one tiny model through every source gives one answer; and every known layout is read where it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import tl_layersim as lsim

from . import oracles
from .conftest import hidden_states, random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer, worst

ANALYZERS = ("cosine", "cka", "logit_lens", "saturation", "exit_curve", "trajectory", "neural_collapse")
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
LAYOUTS = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Mistral": GROUPED,
    "Gemma": GROUPED,
    "Gemma2": GROUPED,
    "Gemma3": GROUPED,
    "Mixtral": GROUPED | {"num_local_experts": 4},
    "GPT2": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "GPTNeoX": SMALL,
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 100, "state_size": 4},
    "OPT": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    },
    "Bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 100},
    "Bert": SMALL,
    "MPNet": SMALL,
}
HEADS = {"Bert": "MaskedLM", "MPNet": "MaskedLM"}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def build(family: str):
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**LAYOUTS[family])
    head = HEADS.get(family, "LMHeadModel" if family == "GPT2" else "ForCausalLM")
    head = {"MaskedLM": "ForMaskedLM"}.get(head, head)
    return getattr(transformers, family + head)(config).eval()


def nnsight(module):
    # BERT's modules named `output` collide with nnsight's own attribute, which it says and solves by itself.
    import warnings

    from nnsight import NNsight

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return NNsight(module)


def bridge(module):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    return build_bridge_from_module(module, type(module).__name__, hf_config=module.config)


def transformers_model(module, tmp_path):
    from nnsight.modeling.transformers import TransformersModel

    module.save_pretrained(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    return TransformersModel(str(tmp_path / "model"), task="text-generation", tokenizer=tokenizer, dtype=torch.float32)


def hooked_transformer(module):
    """TransformerLens 3's own model with the weights of a GPT-2, unprocessed."""
    import transformer_lens as tl

    try:
        tl.HookedTransformer  # noqa: B018 (TransformerLens 4 raises ImportError, which hasattr lets through)
    except ImportError:
        pytest.skip("TransformerLens 4 has no HookedTransformer; make test-tl3 runs this")
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

    c = module.config
    config = tl.HookedTransformerConfig(
        n_layers=c.n_layer,
        d_model=c.n_embd,
        n_ctx=c.n_positions,
        d_head=c.n_embd // c.n_head,
        n_heads=c.n_head,
        d_mlp=4 * c.n_embd,
        d_vocab=c.vocab_size,
        act_fn="gelu_new",
        eps=c.layer_norm_epsilon,
        normalization_type="LN",
        use_attn_scale=True,
        device="cpu",
    )
    model = tl.HookedTransformer(config)
    model.load_state_dict(convert_gpt2_weights(module, config), strict=False)
    return model


SOURCES = {
    "NNsight": lambda make, tmp: (nnsight(make()), {}),
    "NNsight remote=local": lambda make, tmp: (nnsight(make()), {"remote": "local"}),
    "TransformersModel": lambda make, tmp: (transformers_model(make(), tmp), {}),
    "TransformersModel remote=local": lambda make, tmp: (transformers_model(make(), tmp), {"remote": "local"}),
    "TransformerBridge": lambda make, tmp: (bridge(make()), {}),
    "NNsight(TransformerBridge)": lambda make, tmp: (nnsight(bridge(make())), {}),
}


@pytest.fixture(scope="module")
def data():
    mask = torch.ones(6, 20, dtype=torch.int64)
    mask[3, 12:] = 0
    mask[4, :5] = 0
    return {"input_ids": random_tokens(6, 20), "attention_mask": mask}


def run(model, data, **options):
    every = [
        lsim.Cosine(),
        lsim.CKA(minibatch=16),
        # One source's norm rounds unlike another's: where a layer changes a choice, none of these near ties may be in the data.
        lsim.LogitLens(),
        lsim.Saturation(),
        lsim.ExitCurve(),
        lsim.Trajectory(),
        lsim.NeuralCollapse(),
    ]
    return lsim.analyze(model, data, every, **options)


def run_residual(model, data, **options):
    """Analyzers of the residual alone, for models that have no head, or none that speaks at every position."""
    return lsim.analyze(model, data, [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.Trajectory()], **options)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_one_answer(source, make, data, tmp_path):
    expected = run(make(), data)
    model, options = SOURCES[source](make, tmp_path)
    found = run(model, data, **options)
    for name in ANALYZERS:
        np.testing.assert_allclose(found[name].values, expected[name].values, atol=1e-6, rtol=1e-6)
        assert found[name].layers == expected[name].layers
        assert found[name].provenance.data == expected[name].provenance.data
        assert found[name].provenance.tokens == 6 * 20 - 8 - 5


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_hooked_transformer_gives_the_same_answer_and_says_its_basis(data):
    module = tiny_gpt2()
    expected = run(module, data)
    model = hooked_transformer(module)
    found = run(model, data)
    for name in ANALYZERS:
        np.testing.assert_allclose(found[name].values, expected[name].values, atol=1e-6, rtol=1e-6)
    assert found["logit_lens"].unembedding == "unembed(ln_final(x))"
    assert found["cka"].provenance.basis == "HookedTransformer, layer norms not folded, writing weights not centred"
    model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
    folded = run(model, data)["cka"]
    assert folded.provenance.basis == "HookedTransformer, layer norms folded, writing weights centred"


def test_compatibility_mode_is_recorded_and_changes_the_basis(data):
    model = bridge(tiny_gpt2())
    raw = run(model, data)
    model.enable_compatibility_mode()
    processed = run(model, data)
    assert raw["cosine"].provenance.basis == "raw weights, before the final norm"
    assert processed["cosine"].provenance.basis == "TransformerBridge, compatibility mode"
    # Centred writing weights take the mean over d_model away: another basis, other numbers.
    assert worst(raw["cosine"], processed["cosine"]) > 1e-4


@pytest.mark.parametrize("family", LAYOUTS)
def test_known_layouts_are_read_after_each_block(family, data):
    """Against the model's own hidden states; these end with the final norm, so the last one comes from a hook."""
    model = build(family)
    rows = [row[mask.bool()] for row, mask in zip(data["input_ids"], data["attention_mask"], strict=True)]
    states = []
    for row in rows:
        last = []
        blocks = next(m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
        handle = blocks[-1].register_forward_hook(lambda m, a, o, seen=last: seen.append(o[0] if isinstance(o, tuple) else o))
        with torch.no_grad():
            hidden = model(row[None], output_hidden_states=True).hidden_states
            if family == "Mamba":
                # It lists what leaves each block; the others list what enters.
                hidden = (model.get_input_embeddings()(row[None]), *hidden)
        handle.remove()
        states.append(torch.stack([*[h[0] for h in hidden[:3]], last[0][0]]).double().numpy())
    expected = oracles.oracle_cosine(states)
    found = lsim.analyze(model, data, "cosine")["cosine"]
    np.testing.assert_allclose(found.values, expected["values"], atol=2e-6)
    np.testing.assert_allclose(found.norm_ratio, expected["norm_ratio"], rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*trained to say the token at a masked")
@pytest.mark.parametrize("family", ["Gemma3", "Qwen2", "MPNet", "GPTNeoX"])
def test_nnsight_reads_known_layouts_too(family, data):
    expected = run(build(family), data)
    found = run(nnsight(build(family)), data)
    for name in ANALYZERS:
        np.testing.assert_allclose(found[name].values, expected[name].values, atol=1e-6, rtol=1e-6)


def test_post_norm_models_say_so(data):
    assert "post-norm" in run_residual(build("Bert"), data)["cka"].provenance.basis


def test_layers_can_be_named_for_any_module(data):
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(100, 16)
            self.stem = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16) for name in "abc"})

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for part in self.stem.values():
                x = x + part(x)
            return x

    paths = ["stem.a", "stem.b", "stem.c"]
    tokens = random_tokens()
    plain = lsim.analyze(Own(), tokens, "cka", layers=paths)["cka"]
    traced = lsim.analyze(nnsight(Own()), tokens, "cka", layers=paths)["cka"]
    assert plain.values.shape == (4, 4)
    assert worst(plain, traced) < 1e-5


def test_a_wrapped_module_is_on_no_server():
    with pytest.raises(lsim.LayersimError, match=r"on no server(.|\n)*TransformersModel"):
        lsim.analyze(nnsight(tiny_llama()), random_tokens(), "cka", remote=True)


def test_a_path_that_does_not_exist_names_the_nearest():
    with pytest.raises(lsim.LayersimError, match=r"no module at this path(.|\n)*did you mean 'model\.layers\.1'"):
        lsim.analyze(tiny_llama(), random_tokens(), "cka", layers=["model.layers.0", "model.layer.1"])


def test_what_cannot_be_read_is_refused_with_what_can():
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16, vocab_size=100, d_kv=8)
    )
    with pytest.raises(lsim.LayersimError, match=r"encoder-decoder(.|\n)*Llama, Mistral"):
        lsim.analyze(t5, random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match=r"no model that can be read(.|\n)*HookedTransformer(.|\n)*from_pretrained"):
        lsim.analyze("gpt2", random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match="Only nnsight models can be run elsewhere"):
        lsim.analyze(tiny_llama(), random_tokens(), "cka", remote=True)
    with pytest.raises(lsim.LayersimError, match="layers of Linear are not known"):
        lsim.analyze(torch.nn.Linear(3, 3), random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match="have their own layers"):
        lsim.analyze(bridge(tiny_llama()), random_tokens(), "cka", layers=["blocks.0"])


def test_the_model_is_left_as_it_was(data):
    model = tiny_llama()
    model.model.layers[1].train()
    modes = [m.training for m in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forwards = [m.forward for m in model.modules()]
    run(model, data)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.forward for m in model.modules()] == forwards
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_dropout_is_off_while_measuring(data):
    torch.manual_seed(0)
    model = tiny_gpt2().train()
    assert worst(run(model, data)["cosine"], run(tiny_gpt2(), data)["cosine"]) == 0
    assert model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_it_is_summed(dtype):
    model = tiny_llama(dtype=dtype)
    rows = list(random_tokens(4, 20))
    states = [hidden_states(model, row) for row in rows]
    expected = oracles.oracle_cosine(states)
    found = lsim.analyze(model, rows, "cosine", batch_size=1)["cosine"]
    np.testing.assert_allclose(found.values, expected["values"], atol=2e-6)
    assert found.provenance.dtype == str(dtype)


def test_float64_models_are_measured_in_float64():
    model = tiny_llama(dtype=torch.float64)
    rows = list(random_tokens(4, 20))
    expected = oracles.oracle_cosine([hidden_states(model, row) for row in rows])
    found = lsim.analyze(model, rows, "cosine", batch_size=1)["cosine"]
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-13)


def test_autocast_around_the_call_does_not_reach_the_sums(data):
    model = tiny_llama()
    from tl_layersim.source import reduce

    seen = []

    def kernel(view):
        x = view.residual[1]
        seen.append((x @ x.T).dtype)
        return {"n": torch.tensor(1)}

    source_view = __import__("tl_layersim.sources.hooked", fromlist=["HookedSource"]).HookedSource(model)
    from tl_layersim.data import Batches

    batch = next(iter(Batches(data, source_view.model, 8, None, False, None, 0, True, None)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reduce({"k": kernel}, source_view.collect(batch))
    assert seen == [torch.float32]


def test_layers_on_several_devices_are_gathered():
    """`place` is what gathers; a second device that every machine has is `meta`'s opposite number, so both are faked on CPU."""
    from tl_layersim.source import place

    keep = torch.tensor([0, 2])
    first = torch.arange(12.0).view(1, 3, 4)
    buffer = place(None, 0, 2, first, keep)
    buffer = place(buffer, 1, 2, (first + 1).to(torch.bfloat16), keep)
    assert buffer.dtype == torch.float32
    assert buffer.tolist() == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[1, 2, 3, 4], [9, 10, 11, 12]]]


def test_blocks_that_are_no_residual_are_refused():
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(100, 8)
            self.wide = torch.nn.Linear(8, 9)
            self.pool = torch.nn.AdaptiveAvgPool1d(1)

        def forward(self, tokens):
            return self.pool(self.wide(self.words(tokens)))

    for layers in (["wide"], ["wide", "pool"]):
        with pytest.raises(ValueError, match=r"residual layer 1 has shape \(8, 20, 9\); expected batch x pos x 8"):
            lsim.analyze(Own(), random_tokens(), "cka", layers=layers)


def test_one_layer_and_one_row():
    found = run(tiny_llama(layers=1), random_tokens(1, 20))
    assert found["cosine"].values.shape == (2, 2)
    assert found["cosine"].norm_ratio.shape == (1,)


def test_dropout_that_a_bridge_does_not_list_is_off_too():
    """GPT-2's embedding dropout belongs to the model inside."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    inner = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, embd_pdrop=0.5))
    model = bridge(inner).train()
    first, second = (lsim.analyze(model, random_tokens(), "cosine")["cosine"].values for _ in range(2))
    assert torch.equal(first, second)
    assert model.original_model.transformer.drop.training
