"""Singular vectors by a Krylov space."""

from __future__ import annotations

import torch

import tl_layersim as lsim
from tl_layersim.jacobians.coupling import krylov, top_of
from tl_layersim.jacobians.jacobian import Jacobian

from ..tiny_models import random_tokens, tiny_llama
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
