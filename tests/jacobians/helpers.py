"""Blocks of every family, and their Jacobians by plain derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from tl_layersim.activations.block_call import BlockCall, Widened, again, record_call
from tl_layersim.architectures import find_stacks

from ..models.tiny_models import random_tokens

MEMORY = 200.0


def family(name: str, attention: str = "sdpa"):
    """A small random model of a layout, with weights large enough that blocks change the stream."""
    import transformers as hf

    wide = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    wide |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": attention}
    grouped = wide | {"num_key_value_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": attention}
    gpt = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64} | ids
    torch.manual_seed(0)
    model = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt)),
        "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**wide)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**grouped, head_dim=12)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**grouped, head_dim=12, sliding_window=4)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**grouped, head_dim=12, sliding_window=4)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**grouped, sliding_window=4)),
        "opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                hidden_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=96,
                vocab_size=100,
                word_embed_proj_dim=48,
                **ids,
            )
        ),
        "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=48, n_layer=2, n_head=4, vocab_size=100, **ids)),
        "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(hidden_size=48, num_hidden_layers=2, vocab_size=100)),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def calls_of(model, run) -> tuple[BlockCall, ...]:
    """What the blocks of a plain model were given, read by hooks of the test's own."""
    found, given, handles = [], {}, []
    for path in find_stacks(model, None):
        block = model.get_submodule(path)
        handles.append(block.register_forward_pre_hook(lambda m, a, k: given.update({m: (a, k)}), with_kwargs=True))
        handles.append(block.register_forward_hook(lambda m, a, o: found.append(record_call(m, *given[m], o))))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return tuple(found)


def padded_run(model):
    tokens = random_tokens(3, 11)
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[1, 8:] = 0
    return lambda: model(tokens, attention_mask=mask, use_cache=False)


def naive(call: BlockCall, row: int, t_in: int, t_out: int) -> Tensor:
    """One backward pass of the whole block for each output, in float64."""
    hidden = call.hidden.double()
    x = hidden[row, t_in].clone().requires_grad_()
    with Widened(call.block, torch.float64):
        full = hidden.index_put((torch.tensor([row]), torch.tensor([t_in])), x[None])
        y = again(call, full)[row, t_out] - (x if t_in == t_out else 0)
        rows = [torch.autograd.grad(one, x, retain_graph=True)[0] for one in y]
    return torch.stack(rows)
