"""Random models small enough to be run hundreds of times, their tokenizer and tokens."""

from __future__ import annotations

import copy

import numpy as np
import torch

VOCABULARY = 100


def tiny_llama(layers: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A random Llama of the usual layout, small enough to be run hundreds of times."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    # Larger weights than the default, so that blocks change the stream by more than rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model.to(dtype)


def noisy(model: torch.nn.Module, seed: int, size: float = 0.05) -> torch.nn.Module:
    """A copy of a model with a little noise on its weights."""
    own, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in own.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(size * parameter.abs().mean() * noise)
    return own


def tiny_gpt2(seed: int = 0):
    """A random GPT-2: absolute positions, layer norms with biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def tiny_tokenizer(words: int = VOCABULARY):
    """Words w3, w4, ... as single tokens; `<s>` 1, `</s>` 2 and padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def random_tokens(rows: int = 8, length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def hidden_states(model, tokens: torch.Tensor) -> np.ndarray:
    """`layer token d_model` in float64 for one row, read by hooks of the test's own."""
    base = model.model if hasattr(model, "model") else model.transformer
    blocks = base.layers if hasattr(base, "layers") else base.h
    seen = []
    handles = [blocks[0].register_forward_pre_hook(lambda m, a: seen.append(a[0]))]
    handles += [b.register_forward_hook(lambda m, a, o: seen.append(o[0] if isinstance(o, tuple) else o)) for b in blocks]
    with torch.no_grad():
        model(tokens[None])
    for handle in handles:
        handle.remove()
    return torch.stack([h[0] for h in seen]).double().numpy()


FAMILIES = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "gemma2": ("Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}),
    "neox": ("GPTNeoXForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {}),
    "falcon": ("FalconForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "mpt": ("MptForCausalLM", {}),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 4}),
    "phi": ("PhiForCausalLM", {}),
    "bert": ("BertForMaskedLM", {}),
    "mpnet": ("MPNetForMaskedLM", {}),
}


def family(name: str, seed: int = 0):
    import transformers

    head, more = FAMILIES[name]
    cls = getattr(transformers, head)
    config = cls.config_class()
    wanted = {
        "hidden_size": 32, "n_embd": 32, "d_model": 32, "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3,
        "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "intermediate_size": 48, "vocab_size": 100,
        "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    settings = {key: value for key, value in wanted.items() if hasattr(config, key)} | more
    torch.manual_seed(seed)
    return cls(cls.config_class(**settings)).eval()


def name_of_rule(rule):
    """The id of a test's parameter: a function's address differs between the processes that run the tests."""
    return getattr(rule, "__name__", str(rule))
