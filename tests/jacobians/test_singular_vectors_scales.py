"""Singular vectors by products alone, of matrices of any size and rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tl_layersim.jacobians.coupling import krylov, top_of


class Matrix:
    """A Jacobian that is known."""

    dtype = torch.float64

    def __init__(self, dense: Tensor) -> None:
        self.dense, self.row, self.d_model = dense, torch.zeros(len(dense), dtype=torch.int64), dense.shape[-1]

    def forward(self, directions: Tensor) -> Tensor:
        return self.dense @ directions

    def transposed(self, directions: Tensor) -> Tensor:
        return self.dense.mT @ directions


def drawn(rank: int = 60, samples: int = 2, d: int = 60) -> Tensor:
    """Singular values that fall by a tenth each."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(samples, d, d)))[0] for _ in range(2))
    return torch.as_tensor(u * np.where(np.arange(d) < rank, 0.9 ** np.arange(d), 0.0)) @ torch.as_tensor(v)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_singular_vectors_do_not_depend_on_the_scale(scale):
    dense = drawn()
    found, expected = krylov(Matrix(scale * dense), 4, 0), top_of(dense, 4)
    # The residual is at most 1e-4, its square in the values.
    torch.testing.assert_close(found.s / scale, expected.s, rtol=1e-6, atol=0)
    torch.testing.assert_close((found.u * expected.u).sum(1).abs(), torch.ones(2, 4).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close((found.v * expected.v).sum(1).abs(), torch.ones(2, 4).double(), rtol=0, atol=1e-4)
    assert (found.residual <= 1e-4).all()
    assert found.products == krylov(Matrix(dense), 4, 0).products < 2 * 60


@pytest.mark.parametrize("rank", [1, 3, 12])
def test_a_matrix_of_low_rank_has_no_more_directions(rank):
    dense = drawn(rank)
    found = krylov(Matrix(dense), 5, 0)
    expected = torch.tensor([0.9**i if i < rank else 0.0 for i in range(5)]).double().expand(2, 5)
    torch.testing.assert_close(found.s, expected, rtol=1e-6, atol=1e-12)
    eye = torch.eye(5).double().expand(2, 5, 5)
    for basis in (found.u, found.v):
        torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=1e-10)
