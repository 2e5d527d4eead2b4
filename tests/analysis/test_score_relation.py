"""How one number of a model relates to another, over models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analysis import plot_adjacency

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
        assert list(found.to_frame()["name"]) == list(self.NAMES)

    def test_results_are_taken_by_their_mean(self):
        results = {str(seed): from_views(lsim.BlockCoupling(k=3), [view(residuals(seed)[:, :9])]) for seed in range(3)}
        found = lsim.relate(results, {"0": 1.0, "1": 2.0, "2": 4.0})
        other = ~torch.eye(3, dtype=torch.bool)
        np.testing.assert_allclose(found.values, [float((1 - r.values)[other].mean()) for r in results.values()])

    def test_what_has_no_line_is_refused(self):
        for couplings, scores, match in (
            ({"a": 1, "b": 2}, {"a": 1, "b": 2}, r"`results`.*\b2\b"),
            ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "d": 3}, "`results`.*`scores`.*c, d"),
            ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}, r"`results`.*`scores`.*\[1\.0, 1\.0, 1\.0\]"),
            ({"a": 1, "b": float("nan"), "c": 1}, {"a": 1, "b": 2, "c": 3}, "`results`.*`scores`.*nan"),
            ({"a": 0.1, "b": 0.1 + 1e-14, "c": 0.1}, {"a": 1, "b": 2, "c": 3}, r"`results`.*`scores`.*\[0\.1"),
            ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1, "c": 1}, r"`results`.*`scores`.*\[1\.0, 1\.0, 1\.0\]"),
        ):
            with pytest.raises(lsim.LayersimError, match=match):
                lsim.relate(couplings, scores)

    def test_small_values_may_differ_by_little(self):
        fit = lsim.relate({"a": 1e-12, "b": 2e-12, "c": 3e-12}, {"a": 1, "b": 2, "c": 3})
        assert fit.r_squared == pytest.approx(1)
        with pytest.raises(lsim.LayersimError, match=r"`results`.*`scores`.*\[1000000000"):
            lsim.relate({"a": 1e9, "b": 1e9 + 1e-4, "c": 1e9}, {"a": 1, "b": 2, "c": 3})

    def test_names_may_be_numbers_and_results_a_series(self):
        import pandas

        series = pandas.Series([1.0, 2.0, 4.0], index=[0, 10, 100], name="Loss (nats)")
        found = lsim.relate(series, {100: 1.0, 10: 3.0, 0: 4.0})
        assert found.names == ("0", "10", "100")
        assert found.scores.tolist() == [4.0, 3.0, 1.0]
        assert (found.quantity, found.score) == ("Loss (nats)", "Score")
        assert found.plot().layout.xaxis.title.text == "Loss (nats)"
        assert lsim.relate(series, series * 2, quantity="x", score="y").to_frame()["fit"].tolist() == pytest.approx([2, 4, 8])

    def test_prompts_are_sequences(self):
        x, y = torch.tensor([3.0, 1.0, 2.0, 5.0]), [1.0, 3.0, 2.0, 0.5]
        found = lsim.relate(x, y)
        assert found.names == ("0", "1", "2", "3")
        assert found.values.tolist() == [3.0, 1.0, 2.0, 5.0]
        with pytest.raises(lsim.LayersimError, match=r"`results`.*`scores`.*\b3\b"):
            lsim.relate(x, y[:3])

    def test_correlations_are_those_of_their_formulas(self):
        x, y = np.array([1.0, 2.0, 3.0, 4.0, 50.0]), np.array([2.0, 1.0, 4.0, 4.0, 5.0])
        found = lsim.relate(x, y)
        assert found.pearson == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
        # Ranks of y with a tie: 2, 1, 3.5, 3.5, 5.
        assert found.spearman == pytest.approx(np.corrcoef([1, 2, 3, 4, 5], [2, 1, 3.5, 3.5, 5])[0, 1], abs=1e-12)
        assert found.pearson_p == pytest.approx(found.p_value, rel=1e-9)
        assert 0 < found.spearman_p < 0.1
        assert f"Pearson {found.pearson:.3f}, Spearman {found.spearman:.3f}" in repr(found)

    def test_an_exponential_minimises_squared_errors_of_the_scores(self):
        from scipy.stats import t as student

        x = np.array([0.1, 0.2, 0.35, 0.4, 0.6])
        y = np.array([31.0, 35.0, 52.0, 50.0, 88.0])
        found = lsim.relate(x, y, shape="exponential", confidence=0.9)
        a, b = found.intercept, found.slope
        fit = a * np.exp(b * x)
        jacobian = np.column_stack([np.exp(b * x), x * fit])
        # At the least squares, errors are orthogonal to the derivatives.
        np.testing.assert_allclose(jacobian.T @ (y - fit), 0, atol=1e-4)
        rest = ((y - fit) ** 2).sum()
        assert found.r_squared == pytest.approx(1 - rest / ((y - y.mean()) ** 2).sum(), abs=1e-9)
        covariance = np.linalg.inv(jacobian.T @ jacobian) * rest / 3
        assert found.p_value == pytest.approx(2 * student.sf(b / np.sqrt(covariance[1, 1]), 3), rel=1e-4)
        at = found.band[7].numpy()
        gradient = np.array([np.exp(b * at[0]), at[0] * a * np.exp(b * at[0])])
        margin = student.ppf(0.95, 3) * np.sqrt(gradient @ covariance @ gradient)
        np.testing.assert_allclose(at[1:], [gradient[0] * a, gradient[0] * a - margin, gradient[0] * a + margin], rtol=1e-4)
        np.testing.assert_allclose(found.to_frame()["fit"], fit)
        assert "exp(" in repr(found)
        falling = lsim.relate(x, 100 * np.exp(-3 * x), shape="exponential")
        assert (falling.intercept, falling.slope) == pytest.approx((100, -3))
        assert falling.r_squared == pytest.approx(1)

    def test_the_confidence_is_a_fraction(self):
        good = {"a": 1, "b": 2, "c": 4}
        with pytest.raises(lsim.LayersimError, match=r"`confidence`.*1"):
            lsim.relate(good, good, confidence=1)

    def test_many_points_carry_no_names(self):
        x = np.arange(30.0)
        assert lsim.relate(x, x**2).plot().data[-1].mode == "markers"
        assert lsim.relate(x[:24], x[:24] ** 2).plot().data[-1].mode == "markers+text"

    def test_the_figure_says_what_band_and_labels_are(self):
        x = np.arange(30.0)
        words = lsim.relate(x, x**2, confidence=0.9).plot().layout.title.subtitle.text.replace("<br>", " ")
        assert words.endswith("30 points · band: 90 % interval of the line")
        few = lsim.relate(x[:24], np.exp(x[:24] / 9), shape="exponential").plot().layout.title.subtitle.text
        assert few.replace("<br>", " ").endswith("band: 95 % interval of the curve · labels: names of the points")


class TestCoupling:
    def test_the_graph_of_blocks(self):
        found = from_views(lsim.BlockCoupling(k=3), [view(residuals(1)[:, :9])])
        graph = plot_adjacency(found)
        assert list(graph.data[-1].text) == ["0", "1", "2"]
        edges = {frozenset(one[:2]): one[2] for one in graph.data[-3].customdata}
        chance = (found.null[0, 2] - found.values[0, 2]) / found.null[0, 2]
        back = (found.null[2, 0] - found.values[2, 0]) / found.null[2, 0]
        expected = max(0.0, float(chance + back) / 2)
        assert abs(edges[frozenset(("blocks.0.hook_resid_post", "blocks.2.hook_resid_post"))] - expected) < 1e-12
        raw = from_views(lsim.BlockCoupling(k=3, normalize=False), [view(residuals(1)[:, :9])])
        with pytest.raises(lsim.LayersimError, match=r"`result`.*normalize=False"):
            plot_adjacency(raw)
        assert raw.mean() < 0

    def test_other_options_are_refused(self):
        one, raw = (from_views(lsim.BlockCoupling(k=3, normalize=n), [view(residuals(1)[:, :9])]) for n in (True, False))
        with pytest.raises(lsim.LayersimError, match=r"`results`.*False.*True"):
            lsim.relate({"a": one, "b": raw, "c": one}, {"a": 1, "b": 2, "c": 3})
