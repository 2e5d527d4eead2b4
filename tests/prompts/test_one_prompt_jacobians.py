"""Jacobians and coupling of one prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import worst
from ..jacobians.helpers import calls_of, naive
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called


def test_positions_may_be_an_array():
    model, tokens = tiny_llama(), random_tokens(1, 5)[0]
    listed = lsim.prompts.block_jacobians(model, tokens, layers=[0], positions=[0, -1])
    pairs = lsim.prompts.block_jacobians(model, tokens, layers=[0], positions=[(0, 4)])
    assert torch.equal(
        lsim.prompts.block_jacobians(model, tokens, layers=[0], positions=np.array([0, -1])).values, listed.values
    )
    assert torch.equal(
        lsim.prompts.block_jacobians(model, tokens, layers=[0], positions=torch.tensor([[0, 4]])).values, pairs.values
    )


class TestPrompt:
    def test_jacobians_of_one_prompt(self):
        model, tokens = tiny_llama(), random_tokens(1, 9)
        call = calls_of(model, lambda: model(tokens, use_cache=False))[2]
        found = lsim.prompts.block_jacobians(model, tokens[0], layers=[0, -1], positions=[(2, 6), (6, 2), 3, (0, -1)])
        assert (found.blocks, found.pairs) == (
            ("blocks.0.hook_resid_post", "blocks.2.hook_resid_post"),
            ("2 > 6", "6 > 2", "3 > 3", "0 > 8"),
        )
        for number, pair in enumerate([(2, 6), None, (3, 3), (0, 8)]):
            expected = torch.zeros(32, 32) if pair is None else naive(call, 0, *pair)
            torch.testing.assert_close(found.values[1, number].float(), expected.float(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.singular_values[1, 0], np.linalg.svd(found.values[1, 0])[1], atol=1e-9)
        assert float(found.values[:, 1].abs().max()) == 0

    def test_finite_differences_of_one_prompt(self):
        model, tokens = tiny_llama(), random_tokens(1, 9)
        exact, near = (
            lsim.prompts.block_jacobians(model, tokens[0], positions=[(2, 6), -1], method=m)
            for m in ("dense", "finite-difference")
        )
        off = (exact.values - near.values).flatten(1).norm(dim=1) / exact.values.flatten(1).norm(dim=1)
        assert float(off.max()) < 2e-3
        assert bool((off < 3 * near.step_error).all())

    @pytest.mark.light(
        "depth-{'token': 3}-[(0, 3, 3), (1, 3, 3), (2, 3, 3)]",
        "fixed-output-{'layers': [2], 'positions': [0, 3, 5]}-[(2, 0, 5), (2, 3, 5), (2, 5, 5)]",
    )
    @pytest.mark.parametrize(
        ("along", "more", "where"),
        [
            ("depth", {"token": 3}, [(0, 3, 3), (1, 3, 3), (2, 3, 3)]),
            ("self", {"layers": [0, 2], "positions": [1, 4]}, [(0, 1, 1), (0, 4, 4), (2, 1, 1), (2, 4, 4)]),
            ("fixed-input", {"positions": [0, 3, 5]}, [(1, 0, 0), (1, 0, 3), (1, 0, 5)]),
            ("fixed-output", {"layers": [2], "positions": [0, 3, 5]}, [(2, 0, 5), (2, 3, 5), (2, 5, 5)]),
        ],
    )
    def test_coupling_matrices_are_those_of_the_formula(self, along, more, where):
        model, tokens = tiny_llama(dtype=torch.float64), random_tokens(1, 6)
        found = called(lsim.prompts.coupling_matrices, model, tokens[0], along=along, k=4, **more)
        assert found.connections == tuple(f"{block}: {a} > {b}" for block, a, b in where)
        calls = calls_of(model, lambda: model(tokens, use_cache=False))
        js = [naive(calls[block], 0, a, b).numpy() for block, a, b in where]
        for i, a in enumerate(js):
            np.testing.assert_allclose(found.singular_values[i], np.linalg.svd(a)[1][:4], rtol=1e-8)
            for j, b in enumerate(js):
                expected = oracles.coupling_matrix(a, b, 4)
                # Singular vectors have no sign of their own: u and v turn together.
                np.testing.assert_allclose(np.abs(found.matrices[i, j]), np.abs(expected), atol=1e-7)
                np.testing.assert_allclose(found.values[i, j], oracles.miscoupling(expected), atol=1e-7)
                (ua, _, va), (ub, _, vb) = np.linalg.svd(a), np.linalg.svd(b)
                products = (ub.T @ ua, vb @ va.T, vb @ ua)
                for side, product in enumerate(products):
                    np.testing.assert_allclose(np.abs(found.bases[side, i, j]), np.abs(product[:4, :4]), atol=1e-6)

    def test_what_cannot_be_asked_is_refused(self):
        model, tokens = tiny_llama(), random_tokens(1, 9)[0]
        for match, call in {
            "no effect on earlier": lambda: lsim.prompts.coupling_matrices(
                model, tokens, along="fixed-input", token=3, positions=[1]
            ),
            "position is 9; .* 0 to 8": lambda: lsim.prompts.coupling_matrices(model, tokens, token=9),
            "`layers`.*3": lambda: lsim.prompts.block_jacobians(model, tokens, layers=[3]),
            r"`layers` is \[0, -3\]": lambda: lsim.prompts.block_jacobians(model, tokens, layers=[0, -3]),
            "`positions`.*'first'": lambda: lsim.prompts.block_jacobians(model, tokens, positions=["first"]),
            "`k` is 33": lambda: lsim.prompts.coupling_matrices(model, tokens, k=33),
            "`k`.*coupling_matrices is 1,": lambda: lsim.prompts.coupling_matrices(model, tokens, k=1),
            "`token` is 1": lambda: lsim.prompts.coupling_matrices(model, tokens, along="self", token=1),
            r"`positions` is \[1\]": lambda: lsim.prompts.coupling_matrices(model, tokens, positions=[1]),
            r"^`positions` is \[\];": lambda: lsim.prompts.coupling_matrices(model, tokens, along="self", positions=[]),
            r"`positions` is \[\];": lambda: lsim.prompts.block_jacobians(model, tokens, positions=[]),
            r"`positions`.*\('a', 1\)": lambda: lsim.prompts.block_jacobians(model, tokens, positions=[("a", 1)]),
            r"`positions`.*\(8, 8\)": lambda: lsim.prompts.coupling_matrices(model, tokens, along="self", positions=[-1, 8]),
            r"`positions`.*\(0, 0\)": lambda: lsim.prompts.block_jacobians(model, tokens, positions=[0, -9]),
            "`memory_mb`.*nan": lambda: lsim.prompts.block_jacobians(model, tokens, memory_mb=float("nan")),
        }.items():
            with pytest.raises(lsim.LayersimError, match=match):
                call()

    def test_they_survive_a_file_and_are_drawn(self, tmp_path):
        model, tokens = tiny_llama(), random_tokens(1, 5)[0]
        for found in (
            lsim.prompts.block_jacobians(model, tokens, layers=[0]),
            lsim.prompts.coupling_matrices(model, tokens, k=3),
        ):
            again_ = lsim.load(found.save(tmp_path / "one.safetensors"))
            assert worst(found, again_) == 0
            assert found.plot().data
            assert found.headline()
