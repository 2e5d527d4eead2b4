"""Tiny models, views made of random numbers, and the optional real models."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch
from hypothesis import settings

import tl_layersim as lsim

from . import oracles
from .own_blocks import own_calls

# The same examples on every machine of continuous integration; new ones wherever a person runs the tests.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

VOCABULARY = 100
# A program of its own, which hides this package from itself.
collect_ignore = ["small_ndif.py"]


def optional_real(kind: str, name: str) -> Path:
    """A folder of real weights or a file of real text, or a skip with the reason."""
    root = Path(os.environ.get("TL_LAYERSIM_REAL", Path(__file__).parents[2] / "shared"))
    path = root / kind / name
    if not path.exists():
        pytest.skip(f"optional real data: no {kind}/{name}; point TL_LAYERSIM_REAL at a folder that has it")
    return path


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


def own_head(weight: np.ndarray = oracles.HEAD, dtype: torch.dtype = torch.float64):
    """A head of its own for views that no model made: a layer norm without weights, and an unembedding."""
    from tl_layersim.unembed import Unembed

    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
    head.weight.data = torch.as_tensor(weight).to(dtype)
    norm = torch.nn.LayerNorm(weight.shape[1], elementwise_affine=False)
    return Unembed(norm, (head,), "every", 1.0, None, dtype, None, head)


def view(x: np.ndarray, tokens: np.ndarray | None = None, rows: int = 1, **more) -> lsim.View:
    """A view of given residuals `layer token d_model`, as one or more rows of equal length."""
    count = x.shape[1]
    ids = torch.as_tensor(oracles.tokens_of(count) if tokens is None else tokens)
    per_row = -(-count // rows)
    x = torch.as_tensor(x)
    more = {"unembed": own_head(dtype=x.dtype), "calls": own_calls(x) if rows == 1 else None} | more
    return lsim.View(x, ids, torch.arange(count) // per_row, torch.arange(count) % per_row, **more)


def residuals(seed: int = 0, layers: int = 4, tokens: int = 40, width: int = 8) -> np.ndarray:
    """A random walk over layers, so that near layers are alike, with a common offset that centring must remove."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(layers, tokens, width)) * (1 + np.arange(layers))[:, None, None]
    return np.cumsum(steps, axis=0) + 2.0


def provenance(**changes) -> lsim.Provenance:
    fields = {
        "model": "m",
        "config_hash": "0",
        "weights_hash": "0",
        "source": "s",
        "basis": "b",
        "dtype": "torch.float32",
        "data": "0",
        "tokens": 1,
        "sequences": 1,
        "batches": 1,
        "seed": None,
        "options": {},
        "versions": {},
        "seconds": 0.0,
    }
    return lsim.Provenance(**(fields | changes))


def layer_run(layers: int, first: lsim.Sums | None = None) -> lsim.Run:
    from tl_layersim.source import layer_names

    names = layer_names(layers - 1)
    return lsim.Run(names, names, provenance(), first or lsim.Sums())


def from_views(analyzer: lsim.Analyzer, views: list[lsim.View]) -> lsim.Result:
    """What an analyzer makes of given batches: both passes, the sums, the result."""
    from tl_layersim.source import reduce

    def total(kernel) -> lsim.Sums:
        sums = lsim.Sums()
        for one in views:
            sums = sums + lsim.Sums.of(reduce({"k": kernel}, one)[1]["k"])
        return sums

    first_kernel = analyzer.first_kernel()
    first = total(first_kernel) if first_kernel is not None else lsim.Sums()
    sums = total(analyzer.kernel(first))
    return analyzer.compute(sums, layer_run(views[0].residual.shape[0], first))


@pytest.fixture(scope="session")
def llama():
    return tiny_llama()


@pytest.fixture(scope="session")
def demo():
    return lsim.demo_model()


def worst(a: lsim.Result, b: lsim.Result) -> float:
    """The largest difference between two results of a kind, over all their fields."""

    def gap(x: torch.Tensor, y: torch.Tensor) -> float:
        assert torch.equal(x.isnan(), y.isnan())
        return float((x - y).nan_to_num(0).abs().max())

    return max(gap(getattr(a, name), getattr(b, name)) for name in a.tensor_fields() if getattr(a, name).numel())
