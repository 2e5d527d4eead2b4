"""What several files of tests/analyzers use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tl_layersim.activations.view import reduce
from tl_layersim.analyzers import Analyzer
from tl_layersim.core import Sums
from tl_layersim.sources import ModelDescription

from ..inputs.views import layer_run, view
from ..models.tiny_models import tiny_llama


def _described() -> ModelDescription:
    from tl_layersim.remote.open_model import open_source

    return open_source(tiny_llama()).model


def between(analyzer: Analyzer, xs: list[np.ndarray], ys: list[np.ndarray]) -> Any:
    """The result of two models whose batches are given; every sample is a row of the data."""
    kernel = analyzer.kernel(Sums())
    sums = Sums()
    for x, y in zip(xs, ys, strict=True):
        views = (view(z, row=torch.arange(z.shape[1])) for z in (x, y))
        sums = sums + Sums.of(reduce({"k": kernel}, *views)[1]["k"])
    return analyzer.compute(sums, layer_run(len(xs[0]), len(ys[0])))


def rotation(width: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]


def map_of_condition(width: int, condition: float) -> np.ndarray:
    """An invertible linear map that is no rotation."""
    return rotation(width) * np.geomspace(1, condition, width) @ rotation(width, 1)
