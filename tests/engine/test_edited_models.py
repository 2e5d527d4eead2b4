"""Analyzers over data on a model that was edited by `model.edit()`, against a Hugging Face model with hooks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..models.tiny_models import random_tokens, tiny_llama
from ..user_loops.test_trace_probe import TOKENS, differences, hooked, traced

ANALYZERS = [
    lsim.Cosine(),
    lsim.CKA(minibatch=32),
    lsim.CCA(),
    lsim.Contribution(),
    lsim.EffectiveRank(),
    lsim.ExitCurve(),
    lsim.LinearPredictivity(),
    lsim.LinearProbe(),
    lsim.LogitLens(),
    lsim.MutualKNN(),
    lsim.NeuralCollapse(),
    lsim.Procrustes(),
    lsim.RSA(),
    lsim.Saturation(),
    lsim.TaskMetrics(),
    lsim.Trajectory(),
]
PAIRS = [lsim.CCA(), lsim.CKA(minibatch=32), lsim.LinearPredictivity(), lsim.MutualKNN(), lsim.Procrustes(), lsim.RSA()]
IGNORED = pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")


def edited(model, scale=0.5):
    with model.edit() as (_, changed):
        changed.model.layers[1].mlp.output[:] = changed.model.layers[1].mlp.output * scale
    return changed


@pytest.mark.heavy("seconds, where faster tests reach the same")
@IGNORED
@pytest.mark.parametrize("remote", [False, "local"])
def test_an_edited_model_equals_a_hooked_one_to_the_last_bit(remote):
    module = tiny_llama()
    report = lsim.analyze(lsim.open_model(edited(traced(module)), remote=remote), TOKENS, ANALYZERS)
    assert len(report) == len(ANALYZERS)
    assert differences(report, hooked(module, TOKENS, ANALYZERS, 0.5)) == []
    for result in report.values():
        assert result.provenance.changes.startswith("nnsight edit")


@pytest.mark.heavy("seconds, where faster tests reach the same")
@IGNORED
def test_comparison_with_an_edited_model():
    module = tiny_llama()
    model = traced(module)
    result = lsim.compare(model, edited(model), TOKENS, PAIRS)
    assert len(result) == len(PAIRS)

    halved = tiny_llama()
    halved.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output * 0.5)
    assert differences(result, lsim.compare(module, halved, TOKENS, PAIRS)) == []


@pytest.mark.parametrize(
    "analyzer",
    [lsim.SkipEffect(), lsim.BlockCoupling(method="finite-difference")],
    ids=lambda analyzer: type(analyzer).__name__,
)
def test_analyzers_that_call_blocks_alone_name_the_edit(analyzer):
    with pytest.raises(lsim.LayersimError, match=rf"{type(analyzer).__name__}.*nnsight edit"):
        lsim.analyze(edited(traced(tiny_llama())), random_tokens(2, 6), analyzer)


def steered(model):
    """Edits inside a block, of its output, and of the input of the next block."""
    with model.edit() as (_, changed):
        changed.model.layers[0].mlp.output[:] = changed.model.layers[0].mlp.output * 0.5
        changed.model.layers[1].output[:] += 0.3
        changed.model.layers[2].input[:] += 0.2
    return changed


def jacobians(tokens):
    """Of the blocks of a steered model at the last token, `block d d`, by perturbing the input of hooked blocks."""
    module = tiny_llama(dtype=torch.float64)
    layers = module.model.layers
    layers[0].mlp.register_forward_hook(lambda _module, _args, output: output * 0.5)
    layers[1].register_forward_hook(lambda _module, _args, output: output + 0.3)
    layers[2].register_forward_pre_hook(lambda _module, args: (args[0] + 0.2, *args[1:]))
    matrices = []
    for layer in layers:
        entries = []
        outputs = []

        def change(_module, args, entries=entries, shift=None):
            entries.append(args[0][0, -1].detach())
            moved = args[0].clone()
            moved[0, -1] = moved[0, -1] + (0 if shift is None else shift)
            return (moved, *args[1:])

        def branch(shift, layer=layer, change=change, outputs=outputs):
            handles = [
                layer.register_forward_pre_hook(lambda m, args: change(m, args, shift=shift)),
                layer.register_forward_hook(lambda _module, _args, output: outputs.append(output)),
            ]
            module(tokens, use_cache=False)
            for handle in handles:
                handle.remove()
            return outputs[-1][0, -1] - shift

        matrices.append(torch.autograd.functional.jacobian(branch, torch.zeros(32, dtype=torch.float64)).numpy())
    return matrices


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("remote", [False, "local"])
@pytest.mark.parametrize("method", ["dense", "krylov"])
def test_coupling_of_an_edited_model_is_that_of_its_jacobians(method, remote):
    rows = random_tokens(2, 6)
    source = lsim.open_model(steered(traced(tiny_llama(dtype=torch.float64))), remote=remote)
    result = lsim.analyze(source, rows, lsim.BlockCoupling(k=4, method=method))["block_coupling"]
    of_rows = [jacobians(row[None]) for row in rows]
    expected = [[[oracles.miscoupling(oracles.coupling_matrix(a, b, 4)) for b in js] for a in js] for js in of_rows]
    spectra = [[np.linalg.svd(a)[1][:4] for a in js] for js in of_rows]

    np.testing.assert_allclose(result.values, np.mean(expected, 0), atol=1e-6 if method == "krylov" else 1e-9)
    np.testing.assert_allclose(result.singular_values, np.mean(spectra, 0), rtol=1e-6 if method == "krylov" else 1e-9)
    assert result.provenance.changes.startswith("nnsight edit")


@pytest.mark.parametrize("method", ["dense", "krylov"])
def test_jacobians_between_tokens_of_an_edited_model(method):
    module = tiny_llama(dtype=torch.float64)
    tokens = random_tokens(1, 6)
    options = {"along": "fixed-input", "token": 2, "layers": [1], "k": 4, "method": method}
    coupling = lsim.prompts.coupling_matrices(edited(traced(module)), tokens, **options)
    module.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output * 0.5)

    np.testing.assert_allclose(coupling.matrices, lsim.prompts.coupling_matrices(module, tokens, **options).matrices, atol=1e-9)


def scaled(block):
    block.output[:] *= 0.2


def copied(block):
    block.output[:] = block.output * 0.2


def replaced(block):
    block.output = block.output * 0.2


def zeroed(block):
    block.output[:] = 0


def constant(block):
    block.output = torch.zeros(2, 6, 32)


@pytest.mark.parametrize("change", [scaled, copied, replaced, zeroed, constant])
def test_coupling_of_an_edited_model_whose_block_has_no_skip_connection(change):
    model = traced(tiny_llama())
    with model.edit() as (_, changed):
        change(changed.model.layers[1])
    with pytest.raises(lsim.LayersimError, match=r"blocks\.1\.hook_resid_post"):
        lsim.analyze(changed, random_tokens(2, 6), lsim.BlockCoupling(k=4))


def test_coupling_of_an_edited_model_in_half_precision():
    with pytest.raises(lsim.LayersimError, match=r"bfloat16.*BlockCoupling"):
        lsim.analyze(edited(traced(tiny_llama(dtype=torch.bfloat16))), random_tokens(2, 6), lsim.BlockCoupling(k=4))
