"""Neural collapse at its edges: one class, a class of one sample, memory; and its headline."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.neural_collapse import NeuralCollapseResult

from .. import oracles
from ..inputs.views import from_views, view
from ..models.tiny_models import random_tokens, tiny_llama


def collapse_of(x: np.ndarray, label: list[int], **options) -> NeuralCollapseResult:
    analyzer = lsim.NeuralCollapse(labels="data", level="token", **options)
    return from_views(analyzer, [view(x, labels=torch.tensor(label))])


def test_collapse_that_needs_more_memory_than_its_limit_is_refused():
    """Four residual layers of width 32 need 3 second moments, 3 x 8 bytes x 4 x 32^2 = 98,304 bytes, and copies of them."""
    model = tiny_llama()
    tokens = random_tokens()

    lsim.analyze(model, tokens, lsim.NeuralCollapse(max_memory_gb=0.02))

    with pytest.raises(lsim.LayersimError, match="max_memory_gb"):
        lsim.analyze(model, tokens, lsim.NeuralCollapse(max_memory_gb=98_303e-9))


def test_one_class_alone_is_refused():
    x = np.random.default_rng(0).normal(size=(2, 12, 8))
    with pytest.raises(lsim.LayersimError, match="needs two classes"):
        collapse_of(x, [5] * 12)


def test_a_class_of_one_sample_is_a_class():
    label = [3] * 6 + [1] * 5 + [7]
    x = np.random.default_rng(0).normal(size=(2, 12, 8)) + np.array(label)[:, None]

    result = collapse_of(x, label)

    assert result.labels == (3, 1, 7)

    expected = oracles.oracle_neural_collapse([x], label)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(result, name), value, rtol=1e-8, err_msg=name)


def test_as_many_samples_as_classes_are_refused():
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    with pytest.raises(lsim.LayersimError, match="more samples than classes"):
        collapse_of(x, [0, 1, 2])
    assert collapse_of(np.concatenate([x, x[:, :1] + 1], 1), [0, 1, 2, 0]).samples.tolist() == [2, 1, 1]


@pytest.mark.filterwarnings("ignore:NC1 is not defined:UserWarning")
def test_the_headline_names_the_first_and_the_last_layer():
    label = [0, 1] * 10
    x = np.random.default_rng(0).normal(size=(3, 20, 8)) + np.array(label)[:, None] * np.array([1, 2, 3])[:, None, None]

    result = collapse_of(x, label)
    nc1 = oracles.oracle_neural_collapse([x], label)["values"]
    expected = {"NC1 at the embedding": nc1[0], "NC1 at the last site": nc1[2]}

    assert result.headline() == pytest.approx(expected, rel=1e-8)

    # All samples one point at the first layer: nothing is between the classes there.
    x[0] = 1.0
    result = collapse_of(x, label)
    assert list(result.headline().values()) == [float(result.values[2])]
