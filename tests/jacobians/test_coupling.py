"""Coupling of several prompts at once, and by finite differences: positions, few tokens, and errors per prompt."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.core import Sums
from tl_layersim.jacobians.coupling import Connections, CouplingOptions, couple
from tl_layersim.jacobians.supported_blocks import TOO_COARSE

from ..inputs.views import from_views, layer_run, residuals, view
from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import MEMORY, calls_of, family


def test_couple_relates_connections_of_one_row_only():
    model = tiny_llama()
    calls = calls_of(model, lambda: model(random_tokens(2, 8), use_cache=False))
    at = torch.tensor([[3, 7], [3, 7]])
    options = CouplingOptions((4,), "dense", "signed", MEMORY, 0)
    with torch.no_grad():
        both = couple(calls, Connections(torch.tensor([0, 1]), (1, 1), at, at), options)
        second = couple(calls, Connections(torch.tensor([1]), (1, 1), at[1:], at[1:]), options)
    torch.testing.assert_close(both.off[:, 1:], second.off, rtol=1e-4, atol=1e-5)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("positions", [(0,), (3,), (1, -2)])
def test_positions_count_from_the_start_of_each_prompt(positions):
    """Three prompts in one batch give what they give one by one."""
    model, rows = tiny_llama().double(), [random_tokens(1, length, seed=length)[0] for length in (6, 9, 7)]
    analyzer = lsim.BlockCoupling(k=4, tokens=positions)
    together = lsim.analyze(model, lsim.Data(rows, batch_size=3), analyzer)["block_coupling"]
    alone = lsim.analyze(model, lsim.Data(rows, batch_size=1), analyzer)["block_coupling"]
    assert together.prompts == alone.prompts == 3 * len(positions)
    for name in ("values", "null", "singular_values"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name), rtol=1e-6, atol=1e-8)


def test_the_last_position_can_be_counted_from_the_start():
    model, rows = tiny_llama().double(), random_tokens(3, 7)
    last, sixth = (
        lsim.analyze(model, lsim.Data(rows, batch_size=3), lsim.BlockCoupling(k=4, tokens=p))["block_coupling"]
        for p in ("last", (6,))
    )
    torch.testing.assert_close(last.values, sixth.values, rtol=1e-9, atol=1e-12)


def test_prompts_shorter_than_k_have_k_directions():
    found = from_views(lsim.BlockCoupling(k=5), [view(residuals(0, tokens=3))])
    assert found.ks == (5,)
    assert found.singular_values.shape == (3, 5)
    # More than d_model there are not.
    assert from_views(lsim.BlockCoupling(k=12), [view(residuals(0, tokens=20))]).ks == (8,)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_the_error_of_finite_differences_is_a_mean_over_prompts(factor):
    analyzer = lsim.BlockCoupling(k=3)
    kernel = analyzer.kernel(Sums())
    one = Sums.of(reduce({"k": kernel}, view(residuals(0, tokens=8)))[1]["k"])
    sums = one + one + one + one
    errors = torch.tensor([0.0, 4 * TOO_COARSE * factor, 0.0], dtype=torch.float64)
    sums = Sums({**sums.fields, "step_error": errors})
    if factor < 1:
        assert analyzer.compute(sums, layer_run(4)).step_error.tolist() == pytest.approx((errors / 4).tolist())
    else:
        with pytest.raises(lsim.LayersimError, match=r"too coarse(.|\n)*blocks\.1\.hook_resid_post"):
            analyzer.compute(sums, layer_run(4))


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
