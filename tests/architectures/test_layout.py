"""Every known layout is read where it should be; what cannot be read is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import ANALYZERS, bridge, build, nnsight, run
from ..running.options import called


def run_residual(model, data, **options):
    """Analyzers of the residual alone, for models that have no head, or none that speaks at every position."""
    return called(lsim.analyze, model, data, [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.Trajectory()], **options)


# The hook points of the other layouts are tested against their weights.
@pytest.mark.light("Gemma3", "GPTNeoX", "Mamba", "MPNet")
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mixtral", "GPTNeoX", "Mamba", "OPT", "Bloom", "MPNet"])
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

    result = lsim.analyze(model, data, "cosine")["cosine"]

    np.testing.assert_allclose(result.values, expected["values"], atol=2e-6)
    np.testing.assert_allclose(result.norm_ratio, expected["norm_ratio"], rtol=1e-4)


@pytest.mark.light("MPNet")
@pytest.mark.filterwarnings("ignore:The targets of .* are next tokens")
@pytest.mark.parametrize("family", ["Gemma3", "MPNet"])
def test_nnsight_reads_known_layouts_too(family, data):
    expected = run(build(family), data)
    report = run(nnsight(build(family)), data)
    for name in ANALYZERS:
        np.testing.assert_allclose(report[name].values, expected[name].values, atol=1e-6, rtol=1e-6)


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
    plain = lsim.analyze(lsim.open_model(Own(), layers=paths), tokens, "cka")["cka"]
    traced = lsim.analyze(lsim.open_model(nnsight(Own()), layers=paths), tokens, "cka")["cka"]
    assert plain.values.shape == (4, 4)
    assert worst(plain, traced) < 1e-5


def test_what_cannot_be_read_is_refused_with_what_can():
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16, vocab_size=100, d_kv=8)
    )

    with pytest.raises(lsim.LayersimError, match=r"`data`.*decoder_input_ids.*encoder\.resid_post"):
        lsim.analyze(t5, random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match=r"`model` is .*HookedTransformer.*from_pretrained"):
        lsim.analyze("gpt2", random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match="`remote` is True"):
        lsim.analyze(lsim.open_model(tiny_llama(), remote=True), random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match="layers of Linear are not known"):
        lsim.analyze(torch.nn.Linear(3, 3), random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match="for TransformerLens models"):
        lsim.analyze(lsim.open_model(bridge(tiny_llama()), layers=["blocks.0"]), random_tokens(), "cka")


def test_modules_of_several_widths_are_read_by_cka_and_refused_by_cosine():
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(100, 8)
            self.wide = torch.nn.Linear(8, 9)
            self.pool = torch.nn.AdaptiveAvgPool1d(1)

        def forward(self, tokens):
            return self.pool(self.wide(self.words(tokens)))

    for layers in (["wide"], ["wide", "pool"]):
        assert lsim.analyze(lsim.open_model(Own(), layers=layers), random_tokens(), "cka")["cka"].layers == (
            f"{layers[0]}.input",
            *layers,
        )
        with pytest.raises(lsim.LayersimError, match=r"Cosine.*wide\.input.* 8\b.*wide .*9"):
            lsim.analyze(lsim.open_model(Own(), layers=layers), random_tokens(), lsim.Cosine(center="none"))
