"""Jacobians by finite differences."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama
from .helpers import family


def test_finite_differences_where_arguments_have_rows_for_heads():
    model = family("bloom", "eager")
    tokens = random_tokens(2, 7)
    exact, near = (
        lsim.analyze(model, tokens, lsim.BlockCoupling(k=4, method=m))["block_coupling"] for m in ("dense", "finite-difference")
    )
    assert float((exact.values - near.values).abs().max()) < 2e-3


def test_finite_differences_in_float64():
    tokens = random_tokens(1, 9)[0]
    exact, near = (
        lsim.prompts.block_jacobians(tiny_llama(dtype=torch.float64), tokens, method=m) for m in ("dense", "finite-difference")
    )
    assert float((exact.values - near.values).norm() / exact.values.norm()) < 1e-3


@pytest.mark.parametrize("method", ["dense", "krylov", "finite-difference"])
def test_jacobians_of_half_precision_are_defined_where_those_of_float32_are(method):
    """They are computed in float32: what the rounding of bfloat16 would drown is defined."""
    tokens, asked = random_tokens(2, 8), lsim.BlockCoupling(k=8, method=method)
    exact, half = (
        lsim.analyze(tiny_llama(dtype=dtype), tokens, asked)["block_coupling"] for dtype in (torch.float32, torch.bfloat16)
    )
    # 8 sqrt(d_model) eps (1 + s_1) in bfloat16 is 0.8 here.
    assert float(exact.singular_values[2, 7]) < 0.5
    assert float(exact.defined.min()) == float(half.defined.min()) == 1.0
    torch.testing.assert_close(half.values, exact.values, rtol=0.1, atol=0.02)


def test_finite_differences_of_what_has_no_effect():
    model = family("mistral")
    found = lsim.prompts.block_jacobians(
        model, random_tokens(1, 11)[0], layers=[1], positions=[(2, 9)], method="finite-difference"
    )
    assert float(found.values.abs().max()) < 1e-2
    assert float(found.step_error.max()) < 0.1


def test_finite_differences_that_measure_rounding_are_refused():
    model = tiny_llama(dtype=torch.bfloat16)
    from tl_layersim.jacobians.supported_blocks import refuse_failed_replay

    none = torch.zeros(2)
    refuse_failed_replay(none, none, torch.tensor([0.0, 0.05]), ("embed", "a", "b"))
    with pytest.raises(lsim.LayersimError, match=r"too coarse(.|\n)*b: 30 %"):
        refuse_failed_replay(none, none, torch.tensor([0.0, 0.3]), ("embed", "a", "b"))
    assert model.dtype == torch.bfloat16
