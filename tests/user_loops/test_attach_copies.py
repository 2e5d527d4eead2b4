"""Copies of a model that are made inside attach: they are usable, carry no probe, and leave the probe alone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.processes import finish, started
from ..running.runs import analyzers, hooks


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def observe(*_):
    """A hook of the user."""


WAYS = {"deepcopy": copy.deepcopy, "torch.save": saved, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.light("deepcopy", "pickle")
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_is_made_inside_attach_is_usable_and_does_not_feed_the_probe(way):
    model = tiny_llama()
    tokens = random_tokens(4, 9)
    with torch.no_grad(), lsim.attach(model, [*analyzers(), lsim.LogitLens()]) as probe:
        expected = model(tokens).logits
        copied = WAYS[way](model)
        assert hooks(copied) == 0
        assert torch.equal(copied(tokens).logits, expected)
        model(tokens)
    assert probe.results()["cosine"].provenance.tokens == 72
    # Nor does the copy measure differently by itself.
    for name, found in lsim.analyze(copied, tokens, analyzers()).items():
        assert worst(found, lsim.analyze(model, tokens, analyzers())[name]) == 0
    with torch.no_grad(), lsim.attach(copied, analyzers()) as second:
        copied(tokens)
    assert second.results()["cosine"].provenance.tokens == 36


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_keeps_the_users_hooks_and_takes_new_ones(way):
    """Also a copy of a copy, of a part, and of a model with two probes."""
    model = tiny_llama()
    tokens = random_tokens(4, 9)
    model.model.layers[0].register_forward_hook(observe)
    model.model.layers[1].register_forward_pre_hook(observe, with_kwargs=True)
    before = hooks(model)
    with lsim.attach(model, analyzers()), lsim.attach(model, analyzers()):
        copied = WAYS[way](WAYS[way](model))
        copied_part = WAYS[way](model.model.layers[1])
    assert hooks(model) == hooks(copied) == before == 2
    assert hooks(copied_part) == 1
    seen = []
    copied.model.layers[0].register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.no_grad():
        assert torch.equal(copied(tokens).logits, model(tokens).logits)
    assert len(seen) == 1


def test_an_average_of_weights_over_a_training_and_the_best_model_of_it():
    """Copies at every step, as EMA and early stopping make them."""
    model = tiny_llama()
    tokens = random_tokens(4, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(model)
    with lsim.attach(model, analyzers()) as probe:
        inside = torch.optim.swa_utils.AveragedModel(model)
        best = None
        for _ in range(3):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for each in (average, inside):
                each.update_parameters(model)
            best = copy.deepcopy(model)
            with torch.no_grad():
                best(tokens)
                inside(tokens)
    assert probe.results()["cosine"].provenance.tokens == 3 * 36
    assert hooks(model) == 0


@pytest.mark.heavy("a process of its own")
def test_a_saved_model_is_loaded_where_this_package_is_not(tmp_path):
    model = tiny_llama()
    tokens = random_tokens(4, 9)
    with torch.no_grad(), lsim.attach(model, analyzers()):
        expected = model(tokens).logits
        torch.save((model, tokens, expected), tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "assert 'tl_layersim' not in sys.modules\n"
        "sys.modules['tl_layersim'] = None\n"
        "model, tokens, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(model(tokens).logits, expected)\n"
    )
    finish(started(script, str(tmp_path / "model.pt")))
