"""Block coupling over several prompts at once: positions counted from each start, few tokens, and errors per prompt."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.core import Sums
from tl_layersim.jacobians.supported_blocks import TOO_COARSE

from ..tiny_models import random_tokens, tiny_llama
from ..views import from_views, layer_run, residuals, view


@pytest.mark.parametrize("positions", [(0,), (3,), (1, -2)])
def test_positions_count_from_the_start_of_each_prompt(positions):
    """Three prompts in one batch give what they give one by one."""
    model, rows = tiny_llama().double(), [random_tokens(1, length, seed=length)[0] for length in (6, 9, 7)]
    analyzer = lsim.BlockCoupling(k=4, tokens=positions)
    together = lsim.analyze(model, lsim.Data(rows, batch_size=3), analyzer)["block_coupling"]
    alone = lsim.analyze(model, lsim.Data(rows, batch_size=1), analyzer)["block_coupling"]
    assert together.prompts == alone.prompts == 3 * len(positions)
    for name in ("values", "null", "singular_values", "singular_values_std"):
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
