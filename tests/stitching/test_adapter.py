"""Adapters and their fit in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import Sums
from tl_layersim.stitching.adapters import ADAPTER_KINDS
from tl_layersim.stitching.fitting import cross_moments, feature_moments, solve


def moments(kind: str, h: torch.Tensor, t: torch.Tensor) -> dict[str, torch.Tensor]:
    """All sums of the closed form, of some tokens."""
    definition = ADAPTER_KINDS.named(kind)()
    return feature_moments(definition.features, h) | cross_moments(definition.features, definition.adds_residual, h, t)


class TestAdapter:
    @pytest.mark.parametrize("kind", ["linear", "affine", "affine-norm"])
    @pytest.mark.parametrize("widths", [(6, 6), (6, 4), (4, 6)])
    def test_closed_form_is_least_squares(self, kind, widths):
        rng = np.random.default_rng(0)
        x, y = (rng.normal(size=(50, d)) * (1 + np.arange(d)) + 3 for d in widths)
        total = Sums()
        for part in (slice(0, 7), slice(7, 50)):
            h, t = torch.as_tensor(x[part]), torch.as_tensor(y[part])
            total = total + Sums.of(moments(kind, h, t))
        weight, bias, explained = solve(total.fields, 0.0, kind != "linear")

        u = x
        if kind == "affine-norm":
            u = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        target = y - x if kind == "affine-norm" and widths[0] == widths[1] else y
        design = u if kind == "linear" else np.hstack([u, np.ones((50, 1))])
        coefficients = np.linalg.lstsq(design, target, rcond=None)[0]
        fit = design @ coefficients
        centre = 0 if kind == "linear" else target.mean(0)
        r2 = 1 - ((target - fit) ** 2).sum() / ((target - centre) ** 2).sum()
        adapter = lsim.stitching.Adapter(kind, weight, bias)
        ours = adapter(torch.as_tensor(x)).numpy() - (y - target)
        np.testing.assert_allclose(ours, fit, atol=1e-9)
        assert explained == pytest.approx(r2, abs=1e-10)

    def test_ridge_is_the_formula(self):
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(30, 5)), rng.normal(size=(30, 3))
        h, t = torch.as_tensor(x), torch.as_tensor(y)
        weight, _, _ = solve(moments("linear", h, t), 0.5, bias=False)
        gram = x.T @ x
        by_hand = np.linalg.solve(gram + 0.5 * np.diag(gram.diagonal()), x.T @ y).T
        np.testing.assert_allclose(weight.numpy(), by_hand, atol=1e-12)

    def test_its_numbers_are_its_own(self):
        weight = torch.eye(2)
        adapter = lsim.stitching.Adapter("linear", weight)
        weight.zero_()
        assert torch.equal(adapter(torch.ones(2)), torch.ones(2))

    def test_a_large_mean_in_a_linear_map(self):
        h = torch.randn(400, 6, dtype=torch.float64) + 1e5
        truth = torch.randn(3, 6, dtype=torch.float64)
        t = h @ truth.T
        weight, _, _ = solve(moments("linear", h, t), 0.0, bias=False)
        torch.testing.assert_close(weight, truth, rtol=0, atol=0.02)

    def test_directions_that_no_token_has_are_left_alone(self):
        x = torch.randn(40, 3, dtype=torch.float64)
        h = torch.cat([x, x[:, :1], torch.zeros(40, 1)], 1).double()
        t = x[:, :2].double()
        weight, _, explained = solve(moments("linear", h, t), 0.0, bias=False)
        assert weight.isfinite().all()
        assert weight[:, 4].abs().max() == 0
        # Twice the same feature shares its weight.
        torch.testing.assert_close(weight[:, 0], weight[:, 3])
        assert explained == pytest.approx(1.0)

    def test_features_of_very_different_sizes(self):
        h = torch.randn(200, 4, dtype=torch.float64) * torch.tensor([1e4, 1.0, 1e-3, 1.0])
        h[::20, 0] += 1e6
        truth = torch.randn(3, 4, dtype=torch.float64)
        t = h @ truth.T + 7
        weight, bias, _ = solve(moments("affine", h, t), 0.0, bias=True)
        torch.testing.assert_close(weight, truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bias, torch.full((3,), 7.0).double(), rtol=1e-5, atol=1e-3)

    @pytest.mark.parametrize(
        "given",
        [
            ("twisted", None, None),
            ("identity", torch.eye(2), None),
            ("linear", None, None),
            ("linear", torch.eye(2), torch.zeros(2)),
            ("affine", torch.eye(2), None),
        ],
    )
    def test_parts_that_do_not_belong_to_the_kind(self, given):
        with pytest.raises(lsim.LayersimError, match=f"kind.*{given[0]}"):
            lsim.stitching.Adapter(*given)

    def test_nothing_of_it_learns(self):
        adapter = lsim.stitching.Adapter("affine", torch.eye(3, requires_grad=True), torch.zeros(3))
        assert not list(adapter.parameters())
        assert not adapter(torch.ones(3)).requires_grad
        x = torch.ones(3, requires_grad=True)
        adapter(x).sum().backward()
        assert x.grad is not None


ADAPTERS = {
    "linear": lambda: lsim.stitching.Adapter("linear", torch.randn(4, 6, dtype=torch.float64)),
    "affine": lambda: lsim.stitching.Adapter("affine", torch.randn(4, 6).double(), torch.randn(4).double()),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_as_a_linear_module_is_exact(kind):
    adapter = ADAPTERS[kind]()
    hidden = torch.randn(3, 5, 6, dtype=torch.float64)
    linear = adapter.to_linear()
    assert type(linear) is torch.nn.Linear
    assert torch.equal(linear(hidden), adapter(hidden))
    assert (linear.bias is None) == (adapter.bias is None)
    # A copy: training it does not change the adapter.
    with torch.no_grad():
        linear.weight.zero_()
    assert bool(adapter.weight.abs().sum() > 0)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_directions_that_are_written_and_read(kind):
    adapter = ADAPTERS[kind]()
    hidden = torch.randn(6, dtype=torch.float64)
    # Decoder directions of an SAE.
    written = torch.randn(7, 6, dtype=torch.float64)
    moved = adapter.transfer(written)
    torch.testing.assert_close(adapter(hidden) + moved, adapter(hidden + written))
    # Probes of the back model.
    probes = torch.randn(7, 4, dtype=torch.float64)
    offset = 0 if adapter.bias is None else probes @ adapter.bias
    torch.testing.assert_close(adapter.transfer(probes, role="read") @ hidden + offset, probes @ adapter(hidden))


def test_what_an_adapter_cannot_move_is_refused():
    normed = lsim.stitching.Adapter("affine-norm", torch.eye(4), torch.zeros(4))
    for call in (normed.to_linear, lambda: normed.transfer(torch.ones(4))):
        with pytest.raises(lsim.LayersimError, match=r"`kind`.*'affine-norm'"):
            call()
    identity = lsim.stitching.Adapter("identity")
    with pytest.raises(lsim.LayersimError, match=r"`kind`.*'identity'"):
        identity.to_linear()
    vectors = torch.randn(2, 4)
    assert torch.equal(identity.transfer(vectors), vectors)
    with pytest.raises(lsim.LayersimError, match=r"`vectors`.* 5.* 6"):
        ADAPTERS["linear"]().transfer(torch.ones(5))
