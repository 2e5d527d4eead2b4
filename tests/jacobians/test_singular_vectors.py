"""Singular vectors by a Krylov space, of blocks and of matrices of any size and rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.jacobians.coupling import krylov, top_of
from tl_layersim.jacobians.jacobian_operator import Jacobian

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import MEMORY, calls_of


class TestKrylov:
    def jacobian(self):
        model = tiny_llama(dtype=torch.float64)
        call = calls_of(model, lambda: model(random_tokens(3, 12), use_cache=False))[1]
        at = torch.full((3,), 11)
        return Jacobian(call, torch.arange(3), at, at, MEMORY)

    def test_it_finds_the_singular_triplets(self):
        with torch.no_grad(), self.jacobian() as jacobian:
            dense, found = top_of(jacobian.dense(), 5), krylov(jacobian, 5, 0)
        torch.testing.assert_close(found.s, dense.s, rtol=1e-7, atol=0)
        for ours, theirs in ((found.u, dense.u), (found.v, dense.v)):
            torch.testing.assert_close((ours * theirs).sum(1).abs(), torch.ones(3, 5, dtype=torch.float64), rtol=0, atol=1e-6)
        torch.testing.assert_close(found.u.mT @ found.u, torch.eye(5, dtype=torch.float64).expand(3, -1, -1))

    def test_it_stops_at_the_full_space(self):
        with torch.no_grad(), self.jacobian() as jacobian:
            found = krylov(jacobian, 32, 0)
            dense = top_of(jacobian.dense(), 32)
        torch.testing.assert_close(found.s, dense.s, rtol=1e-5, atol=0)

    def test_auto_says_what_it_picked(self):
        from tl_layersim.jacobians.coupling import pick_method

        assert pick_method(768, 12, 10) == "dense"
        assert pick_method(4096, 32, 10) == "krylov"
        assert pick_method(4096, 32, 50) == "dense"
        found = lsim.analyze(tiny_llama(), random_tokens(1, 5), lsim.BlockCoupling(k=4))["block_coupling"]
        assert (found.method, found.provenance.options["method"]) == ("dense", "auto")


def test_krylov_of_jacobians_with_empty_rows():
    model = tiny_llama()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight[5:] = 0
            block.mlp.down_proj.weight[5:] = 0
    tokens = random_tokens(2, 9)
    dense, krylov_ = (
        lsim.analyze(model, tokens, lsim.BlockCoupling(k=4, method=m))["block_coupling"] for m in ("dense", "krylov")
    )
    torch.testing.assert_close(dense.singular_values, krylov_.singular_values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense.values, krylov_.values, rtol=0, atol=1e-4)


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
