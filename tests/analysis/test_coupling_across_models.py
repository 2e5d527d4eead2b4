"""How one number of a model relates to another, over models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..views import from_views, residuals, view


class TestRelate:
    NAMES = ("a", "b", "c", "d", "e")

    def test_it_is_the_least_squares_line(self):
        from scipy.stats import t as student

        x, y = np.array([0.1, 0.15, 0.3, 0.32, 0.5]), np.array([30.0, 41.0, 38.0, 55.0, 60.0])
        found = lsim.relate(dict(zip(self.NAMES, x, strict=True)), dict(zip(self.NAMES, y, strict=True)), confidence=0.9)
        slope = np.cov(x, y, bias=True)[0, 1] / x.var()
        rest = y - y.mean() - slope * (x - x.mean())
        assert abs(found.slope - slope) < 1e-9
        assert abs(found.r_squared - (1 - rest @ rest / ((y - y.mean()) ** 2).sum())) < 1e-12
        error = np.sqrt(rest @ rest / 3 / ((x - x.mean()) ** 2).sum())
        assert abs(found.p_value - 2 * student.sf(slope / error, 3)) < 1e-9
        at = found.band[10].numpy()
        spread = np.sqrt(rest @ rest / 3 * (1 / 5 + (at[0] - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()))
        np.testing.assert_allclose(at[3] - at[1], student.ppf(0.95, 3) * spread, rtol=1e-9)
        assert len(found.plot().data) == 4
        assert list(found.to_frame()["model"]) == list(self.NAMES)

    def test_results_are_taken_by_their_mean(self):
        results = {str(seed): from_views(lsim.BlockCoupling(k=3), [view(residuals(seed)[:, :9])]) for seed in range(3)}
        found = lsim.relate(results, {"0": 1.0, "1": 2.0, "2": 4.0})
        other = ~torch.eye(3, dtype=torch.bool)
        np.testing.assert_allclose(found.coupling, [float((1 - r.values)[other].mean()) for r in results.values()])

    def test_what_has_no_line_is_refused(self):
        for couplings, scores, match in (
            ({"a": 1, "b": 2}, {"a": 1, "b": 2}, "too few models"),
            ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "d": 3}, "c, d on one side"),
            ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}, "must be finite and differ"),
            ({"a": 1, "b": float("nan"), "c": 1}, {"a": 1, "b": 2, "c": 3}, "must be finite and differ"),
            ({"a": 0.1, "b": 0.1 + 1e-14, "c": 0.1}, {"a": 1, "b": 2, "c": 3}, "must be finite and differ"),
            ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1, "c": 1}, "must be finite and differ"),
            ({"a": None, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 4}, "must contain results of BlockCoupling"),
        ):
            with pytest.raises(lsim.LayersimError, match=match):
                lsim.relate(couplings, scores)

    def test_pictures(self):
        found = from_views(lsim.BlockCoupling(k=3), [view(residuals(1)[:, :9])])
        sweep = lsim.plot_sweep({1: found, 64: found, 512: found})
        assert [line.name for line in sweep.data] == ["all pairs", "neighbours", "random vectors"]
        assert sweep.layout.xaxis.type == "log"
        np.testing.assert_allclose(sweep.data[0].y, [found.mean()] * 3)
        np.testing.assert_allclose(sweep.data[2].y, [1 - found.mean("null")] * 3)
        graph = lsim.plot_adjacency(found)
        assert list(graph.data[-1].text) == ["0", "1", "2"]
        edges = {frozenset(one[:2]): one[2] for one in graph.data[-2].customdata}
        chance = (found.null[0, 2] - found.values[0, 2]) / found.null[0, 2]
        back = (found.null[2, 0] - found.values[2, 0]) / found.null[2, 0]
        expected = max(0.0, float(chance + back) / 2)
        assert abs(edges[frozenset(("blocks.0.hook_resid_post", "blocks.2.hook_resid_post"))] - expected) < 1e-12
        assert "R2" in repr(lsim.relate({"a": 0.1, "b": 0.2, "c": 0.4}, {"a": 1, "b": 2, "c": 3}))
        raw = from_views(lsim.BlockCoupling(k=3, normalize=False), [view(residuals(1)[:, :9])])
        for bad in ({}, {1: found, 2: raw}, {1: found, 2: "x"}):
            with pytest.raises(lsim.LayersimError):
                lsim.plot_sweep(bad)
        with pytest.raises(lsim.LayersimError, match="between 0 and 1"):
            lsim.plot_adjacency(raw)
        assert raw.mean() < 0
        assert lsim.plot_sweep({0: found, 1: found, 512: found}).layout.xaxis.type == "category"
