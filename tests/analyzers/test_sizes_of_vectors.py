"""Vectors of any finite size in float32: their squares overflow above 1.8e19 and vanish below 1e-23."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.norms import activation_sizes
from tl_layersim.jacobians.jacobian_products import reproduces
from tl_layersim.training.objectives import CosineRegularisedObjective

from .. import oracles
from ..inputs.views import from_views, residuals, view, view_for

SIZES = (1e-30, 1.0, 1e25)
# An analyzer, its oracle, and the fields in the unit of the vectors.
CASES = {
    "raw cosine": (lsim.Cosine(center="none"), lambda x: oracles.oracle_cosine([x], "none"), set()),
    "centred cosine": (lsim.Cosine(), lambda x: oracles.oracle_cosine([x]), {"mean"}),
    "trajectory": (
        lsim.Trajectory(),
        lambda x: oracles.oracle_trajectory([x]),
        {"values", "update_norm"},
    ),
    "contribution": (lsim.Contribution(), lambda x: oracles.oracle_contribution([x]), set()),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_measures_of_vectors_of_any_size(case, size):
    analyzer, oracle, in_unit = CASES[case]
    x = residuals(0).astype(np.float32)

    result = from_views(analyzer, [view_for(analyzer, x * np.float32(size))])
    expected = oracle(x.astype(np.float64))

    # Quantiles of histograms over decades are tested for themselves.
    for name in [field for field in expected if "quantiles" not in field]:
        value = getattr(result, name) / (size if name in in_unit else 1)
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("size", SIZES)
def test_comparisons_of_vectors_of_any_size(size):
    x = torch.as_tensor(residuals(0).astype(np.float32))
    large = x * size
    second = x[1] * size

    assert reproduces(large, large, torch.float32)
    assert not reproduces(large, 1.1 * large, torch.float32)
    # These blocks are not homogeneous, so that the effects depend on the size.
    assert from_views(lsim.SkipEffect(keep_first=0), [view(large.numpy(), unembed=None)]).values.isfinite().sum() == 3

    stub = SimpleNamespace(stream=SimpleNamespace(n_layers=2), weights=(1.0, 1.0))
    second.requires_grad_()
    loss = CosineRegularisedObjective._distance(stub, {1: second, 2: large[2]})
    cosine = torch.nn.functional.cosine_similarity(x[1].double(), x[2].double(), dim=-1)
    assert float(loss.detach()) == pytest.approx(float(1 - cosine.mean()), abs=1e-5)

    loss.backward()
    assert bool((second.grad != 0).any())

    plain, scaled = (activation_sizes(view(y.numpy())) for y in (x, large))
    for name, value in plain.items():
        power = 4 if "^4" in name else 2 if "^2" in name or "variance" in name else 0
        np.testing.assert_allclose(scaled[name], value * size**power, rtol=1e-4, err_msg=name)
