"""Where measures of similarity disagree: shared and different dimensions of large variance, and massive samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..inputs.views import from_views, view

pytestmark = pytest.mark.filterwarnings("ignore:.*(CKA is dominated|CCA rests).*:UserWarning")

MEASURES = {
    "cka": (lsim.CKA(estimator="exact"), "values"),
    "rsa": (lsim.RSA(minibatch=400), "values"),
    "knn": (lsim.MutualKNN(minibatch=400), "values"),
    "procrustes": (lsim.Procrustes(), "values"),
    "cca": (lsim.CCA(), "values"),
    "svcca": (lsim.CCA(), "svcca"),
}


def similarities(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    pair_view = view(np.stack([x, y]), np.arange(len(x)), rows=len(x), row=torch.arange(len(x)))
    return {name: float(getattr(from_views(measure, [pair_view]), field)[0, 1]) for name, (measure, field) in MEASURES.items()}


def unrelated() -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng, rng.normal(size=(400, 8)), rng.normal(size=(400, 8))


def test_a_shared_dimension_of_large_variance():
    rng, x, y = unrelated()
    x[:, 0] = y[:, 0] = 50 * rng.normal(size=400)
    result = similarities(x, y)

    assert min(result["cka"], result["procrustes"], result["svcca"]) > 0.95
    assert max(result["cca"], result["knn"]) < 0.4


def test_different_dimensions_of_large_variance():
    _, x, _ = unrelated()
    y = x.copy()
    x[:, 1] *= 100
    y[:, 0] *= 100
    result = similarities(x, y)

    assert result["cca"] > 0.999
    assert max(abs(result["cka"]), result["procrustes"]) < 0.2


def test_a_few_massive_samples():
    rng, x, y = unrelated()
    x[:4] = y[:4] = 500 * rng.normal(size=(4, 8))
    result = similarities(x, y)

    assert min(result["cka"], result["procrustes"]) > 0.95
    assert max(abs(result["rsa"]), result["knn"]) < 0.15
