"""CKA of two models in different places, how minibatches are drawn, and what memory exact estimation needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers._minibatch_pairs import draw_minibatches
from tl_layersim.core import Sums
from tl_layersim.models.view import reduce

from ..tiny_models import random_tokens, tiny_llama
from ..views import residuals, view

OPTIONS = [{"minibatch": 16}, {"minibatch": 16, "estimator": "biased"}, {"minibatch": 5, "level": "sequence"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_models_that_are_apart_give_what_they_give_together(options):
    analyzer = lsim.CKA(**options)
    a = view(residuals(0, tokens=60), rows=12)
    b = view(residuals(1, layers=3, tokens=60, width=5), rows=12)
    exchange = analyzer.exchange()
    assert exchange is not None
    sent = [exchange.kernel(one) for one in (a, b)]
    joined = exchange.join(*(exchange.prepare(one) for one in sent))
    together = reduce({"k": analyzer.kernel(Sums())}, a, b)[1]["k"]
    assert joined.keys() == together.keys()
    for name, value in together.items():
        torch.testing.assert_close(joined[name], value, rtol=1e-12, atol=1e-12)
    # Two or three minibatches, each of them the upper triangle of a Gram matrix for each layer.
    n = analyzer.minibatch
    count = 12 if analyzer.level == "sequence" else 60
    assert sent[0]["pairs"].shape == (count // n, 4, n * (n + 1) // 2)
    assert int(joined["minibatches"]) == count // n
    assert int(joined["samples"]) == count // n * n


@pytest.mark.parametrize("options", OPTIONS)
def test_what_crosses_between_models_is_as_large_as_was_said(options):
    exchange = lsim.CKA(**options).exchange()
    assert exchange is not None
    sent = exchange.kernel(view(residuals(0, tokens=60).astype(np.float32), rows=12))
    assert exchange.size(60, 12, 4) == sum(one.numel() * one.element_size() for one in sent.values()) > 0
    assert exchange.size(3, 1, 4) == exchange.size(0, 0, 4) == 0


def test_a_batch_smaller_than_a_minibatch_crosses_whole():
    exchange = lsim.CKA(minibatch=64).exchange()
    assert exchange is not None
    sent = exchange.kernel(view(residuals(0, tokens=10).astype(np.float32)))["pairs"]
    assert sent.shape == (1, 4, 55)
    assert exchange.size(10, 1, 4) == 4 * 4 * 55 + 8
    assert exchange.kernel(view(residuals(0, tokens=3)))["pairs"].shape == (0, 4, 0)


def test_the_exact_estimator_has_no_minibatches_to_exchange():
    assert lsim.CKA(estimator="exact").exchange() is None


def test_the_order_of_samples_follows_the_tokens_and_the_seed():
    tokens = random_tokens(1, 64)[0]

    def order(of: torch.Tensor, seed: int = 0) -> list[int]:
        return torch.cat(draw_minibatches(of, 64, 16, seed)).tolist()

    assert sorted(order(tokens)) == list(range(64))
    assert order(tokens) == order(tokens.clone())
    other = tokens.clone()
    other[5] += 1
    for one in (other, tokens.flip(0)):
        assert order(one) != order(tokens)
    assert order(tokens, seed=1) != order(tokens)


def test_minibatches_are_whole_and_none_is_smaller_than_four():
    tokens = random_tokens(1, 64)[0]
    assert [len(part) for part in draw_minibatches(tokens, 64, 10, 0)] == [10] * 6
    assert [len(part) for part in draw_minibatches(tokens, 7, 10, 0)] == [7]
    assert [len(part) for part in draw_minibatches(tokens, 4, 10, 0)] == [4]
    assert draw_minibatches(tokens, 3, 10, 0) == []


def test_a_minibatch_of_four_is_enough():
    lsim.CKA(minibatch=4)


def test_exact_needs_three_squares_of_all_layers_in_float64():
    """Four residual layers of width 32: 3 x 8 bytes x (4 x 32)^2 = 393,216 bytes."""
    model, tokens = tiny_llama(), random_tokens()
    lsim.analyze(model, tokens, lsim.CKA(estimator="exact", max_memory_gb=393_216e-9))
    with pytest.raises(lsim.LayersimError, match="max_memory_gb"):
        lsim.analyze(model, tokens, lsim.CKA(estimator="exact", max_memory_gb=393_215e-9))


def test_a_batch_of_three_samples_adds_nothing():
    exchange = lsim.CKA().exchange()
    assert exchange is not None
    small = exchange.prepare(exchange.kernel(view(residuals(0, tokens=3))))
    joined = exchange.join(small, small)
    assert all(int(value.count_nonzero()) == 0 for value in joined.values())
    assert joined["xy"].shape == (4, 4)
