"""Every known layout as a tiny model, and every kind of wrapper around one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.architectures.unembed import Unembed
from tl_layersim.lens.statistics import read_lens

from ..running.options import called
from .tiny_models import hidden_states, tiny_tokenizer

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
    tokenizer, task = tiny_tokenizer(), "text-generation"
    if "MaskedLM" in type(module).__name__:
        tokenizer.mask_token, task = "<unk>", "fill-mask"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformersModel(str(tmp_path / "model"), task=task, tokenizer=tokenizer, dtype=torch.float32)


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
    return called(lsim.analyze, model, data, every, **options)


LENSES = (lsim.LogitLens, lsim.Saturation, lsim.ExitCurve)


def tables(model, rows):
    """States `layer token d_model` of a model, by hooks of the test's own, and the right answers."""
    states = [hidden_states(model, row) for row in rows]
    targets = [t for row in rows for t in (*row[1:].tolist(), None)]
    return np.concatenate(states, axis=1), targets


def by_hand(model, states, norm=True):
    """`layer token vocabulary`, float64, by a copy of the model's own norm and head."""
    import copy

    twin = copy.deepcopy(model).double()
    base = twin.model if hasattr(twin, "model") else twin.transformer
    final = base.norm if hasattr(base, "norm") else base.ln_f
    out = []
    with torch.no_grad():
        for layer in range(1, len(states)):
            x = torch.as_tensor(states[layer])
            out.append(twin.lm_head(final(x) if norm or layer == len(states) - 1 else x).numpy())
    return np.stack(out)


def lively(model, seed=0):
    """Norms that are not ones and a head whose logits matter, so that a wrong head cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.rand(parameter.shape, generator=generator))
            elif "head" in name or "embed" in name or "wte" in name:
                parameter.mul_(8)
    return model


def read_logits(logits: np.ndarray, target: torch.Tensor, memory_mb: float = 128.0) -> dict[str, torch.Tensor]:
    """`read_lens` of given logits: the residual is an index, and the head looks it up."""
    tokens, layers, words = logits.shape
    flat = torch.as_tensor(logits).reshape(-1, words)

    class Table(torch.nn.Module):
        def forward(self, x):
            return flat[x[..., 0].long()]

    index = torch.arange(tokens * layers, dtype=torch.float64).reshape(tokens, layers).T[..., None]
    residual = torch.cat([torch.zeros(1, tokens, 1, dtype=torch.float64), index])
    unembed = Unembed(None, (Table(),), "every", 1.0, None, None, None)
    one = View(residual, torch.zeros(tokens).long(), torch.zeros(tokens).long(), torch.arange(tokens), unembed=unembed)
    return read_lens(one, target, True, memory_mb, 5, "t")
