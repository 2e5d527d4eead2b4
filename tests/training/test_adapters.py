"""Trained adapters: applied in traces and by hooks, saved and loaded."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training.adapter_training import AlignedAdapters

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import equal, hooked, traced, train

# Random tokens have nothing in common.
pytestmark = pytest.mark.filterwarnings("ignore:On held-out data the aligned loss rose")

D = 32
L = 3


@pytest.mark.light("False-tiny_llama")
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("remote", [False, "local"])
def test_applied_in_a_trace_as_by_hooks(make, remote, tmp_path):
    module = make()
    tokens = random_tokens(2, 9)

    result = train(traced(module), at=[1], lr=0.05)
    result.save(tmp_path / "adapters.safetensors")
    result = lsim.load(tmp_path / "adapters.safetensors")
    with torch.no_grad(), hooked(module, [], None, None) as plain:
        module(tokens)
    with torch.no_grad(), hooked(module, [1], result.down, result.up) as captured:
        expected = module(tokens).logits
    model = traced(module)
    blocks = model.model.layers if make is tiny_llama else model.transformer.h
    with torch.no_grad(), model.trace(remote=remote) as tracer:
        with tracer.invoke(tokens):
            result.apply(model)
            logits = model.lm_head.output.save()
        with tracer.invoke():
            low = blocks[0].output.save()
            middle = blocks[1].output.save()
            high = blocks[2].output.save()

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for layer_output, hook, before, changed in zip((low, middle, high), captured, plain, (False, True, True), strict=True):
        torch.testing.assert_close(layer_output, hook, rtol=0, atol=1e-5)
        assert torch.equal(layer_output, before) != changed

    # Nothing stays.
    with torch.no_grad(), hooked(module, [], None, None) as restored:
        module(tokens)
    assert all(torch.equal(a, b) for a, b in zip(plain, restored, strict=True))


def test_applied_at_each_step_of_generation():
    module = tiny_llama()
    tokens = random_tokens(1, 9)
    model = traced(module)

    result = train(traced(module), lr=0.1, steps=8)
    with model.generate(max_new_tokens=4, do_sample=False) as tracer:
        with tracer.invoke(tokens):
            for _step in tracer.iter[:4]:
                result.apply(model)
        with tracer.invoke():
            written = tracer.result.save()
    with torch.no_grad(), hooked(module, list(result.blocks), result.down, result.up):
        expected = module.generate(tokens, max_new_tokens=4, do_sample=False)

    assert torch.equal(written, expected)


def test_saved_and_loaded_exactly(tmp_path):
    result = train(traced(), at=["blocks.0.hook_resid_post", 2])
    path = result.save(tmp_path / "adapters.safetensors")

    # Two adapters of rank 3 in float32, and words.
    assert path.stat().st_size < 2 * 2 * 3 * D * 4 + 10_000

    loaded = lsim.load(path)
    assert isinstance(loaded, AlignedAdapters)
    assert equal(result, loaded)
    assert loaded.adapters == ("blocks.0.hook_resid_post", "blocks.2.hook_resid_post")
    assert (loaded.weights, loaded.blocks, loaded.paths) == (result.weights, result.blocks, result.paths)
    assert loaded.provenance == result.provenance
    assert result.down.dtype == torch.float32


@pytest.mark.heavy("a server")
@pytest.mark.parametrize("remote", [False, "local"])
def test_the_simulation_of_a_server_gives_the_same(remote):
    assert equal(train(traced()), train(traced(), remote=remote))


def test_a_wrapped_module_is_traced_too():
    from nnsight import NNsight

    assert equal(train(traced()), train(NNsight(tiny_llama()), tokenizer=tiny_tokenizer()))
