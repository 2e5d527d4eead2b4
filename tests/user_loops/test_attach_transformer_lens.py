"""attach: TransformerLens models in a user's own loop."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_gpt2
from ..models.wrapped_models import bridge
from ..running.runs import analyzers, hooks


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_hooked_transformer_in_its_own_loop():
    from ..models.wrapped_models import hooked_transformer

    model = hooked_transformer(tiny_gpt2())
    tokens = random_tokens(2, 8)
    before = hooks(model)
    with lsim.attach(model, analyzers()) as probe:
        model(tokens, return_type="loss").backward()
        model.generate(tokens, max_new_tokens=4, stop_at_eos=False, verbose=False)
        model.run_with_cache(tokens)
    assert hooks(model) == before
    assert probe.results()["cosine"].provenance.tokens == 16 + 2 * (8 + 3) + 16


def transformer_lens_models():
    from ..models.wrapped_models import hooked_transformer

    return {"TransformerBridge": lambda: bridge(tiny_gpt2()), "HookedTransformer": lambda: hooked_transformer(tiny_gpt2())}


@pytest.mark.light("run_with_hooks-TransformerBridge", "run_with_cache-TransformerBridge")
@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
@pytest.mark.parametrize("kind", ["TransformerBridge", "HookedTransformer"])
@pytest.mark.parametrize("way", ["run_with_hooks", "run_with_cache", "forward"])
def test_every_way_to_run_a_transformer_lens_model_is_read(kind, way):
    """Some of them call `forward` past the model's own hooks."""
    model = transformer_lens_models()[kind]()
    tokens = random_tokens(2, 8)
    run = {
        "run_with_hooks": lambda: model.run_with_hooks(tokens, fwd_hooks=[]),
        "run_with_cache": lambda: model.run_with_cache(tokens),
        "forward": lambda: model(tokens, return_type="loss"),
    }[way]
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        run()
    found = probe.results()["logit_lens"]
    assert (found.positions, found.targets) == (16, 14)


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_a_hooked_transformer_generates_under_the_lens():
    model = transformer_lens_models()["HookedTransformer"]()
    tokens = random_tokens(2, 8)
    with torch.no_grad(), lsim.attach(model, lsim.Saturation()) as probe:
        model.generate(tokens, max_new_tokens=4, stop_at_eos=False, verbose=False)
    assert probe.results()["saturation"].counts.sum() == 2 * (8 + 3)
