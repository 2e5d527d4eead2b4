"""HSIC itself, with its factor: CKA divides it away."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tl_layersim.analyzers._hsic import GRAM_ROWS, centred, gram_matrices

from .. import oracles
from ..views import residuals


def both(tokens: int = 9) -> tuple[np.ndarray, np.ndarray]:
    x = residuals(0, layers=3, tokens=tokens)
    return x, residuals(1, layers=2, tokens=tokens, width=5) + x[:2, :, :5]


@pytest.mark.parametrize("tokens", [4, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_centred_gram_matrices_multiply_to_the_estimators(biased, tokens):
    x, y = both(tokens)
    a, r_x = centred(gram_matrices(torch.as_tensor(x)), biased)
    b, _ = centred(gram_matrices(torch.as_tensor(y)), biased)
    factor = (tokens - 1) ** 2 if biased else tokens * (tokens - 3)
    hsic = oracles.hsic_0 if biased else oracles.hsic_1
    expected = [[factor * hsic(one @ one.T, other @ other.T) for other in y] for one in x]
    np.testing.assert_allclose(a @ b.T, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(r_x, ((x - x.mean(1, keepdims=True)) ** 2).sum(-1), rtol=1e-12)


@pytest.mark.parametrize("samples", [4, GRAM_ROWS, GRAM_ROWS + 1, 3 * GRAM_ROWS - 5])
def test_gram_matrices_of_any_number_of_samples(samples):
    """Only the upper triangle is multiplied, some rows at a time."""
    x = torch.randn(3, samples, 7, dtype=torch.float64) + 5
    gram = gram_matrices(x)
    centred_x = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(gram, centred_x @ centred_x.mT, rtol=1e-12, atol=1e-12)
