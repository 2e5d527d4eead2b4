"""How numbers of models relate to a score, over models."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
import xarray
from scipy.stats import t as student
from statsmodels.api import OLS

import tl_layersim as lsim
from tl_layersim.many import plot_adjacency

from ..inputs.views import from_views, residuals, view

NAMES = ("a", "b", "c", "d", "e")


def residuals_of(y, predictors):
    """What a least-squares fit with intercept leaves, from the normal equations in float64."""
    design = np.column_stack([np.ones(len(y)), predictors])
    return y - design @ np.linalg.solve(design.T @ design, design.T @ y)


class TestOnePredictor:
    def test_it_is_the_least_squares_line(self):
        x = np.array([0.1, 0.15, 0.3, 0.32, 0.5])
        y = np.array([30.0, 41.0, 38.0, 55.0, 60.0])

        relation = lsim.many.relate(dict(zip(NAMES, x, strict=True)), dict(zip(NAMES, y, strict=True)), confidence=0.9)
        [line] = relation.to_frame().to_dict("records")
        slope = np.cov(x, y, bias=True)[0, 1] / x.var()
        residual = y - y.mean() - slope * (x - x.mean())
        error = np.sqrt(residual @ residual / 3 / ((x - x.mean()) ** 2).sum())
        margin = student.ppf(0.95, 3) * error
        expected = {"coefficient": slope, "se": error, "low": slope - margin, "high": slope + margin}
        expected["p_value"] = 2 * student.sf(slope / error, 3)

        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert relation.intercept == pytest.approx(y.mean() - slope * x.mean())
        assert relation.r_squared == pytest.approx(1 - residual @ residual / ((y - y.mean()) ** 2).sum())

        at = relation.band().iloc[10]
        spread = np.sqrt(residual @ residual / 3 * (1 / 5 + (at["value"] - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()))
        np.testing.assert_allclose(at["high"] - at["fit"], student.ppf(0.95, 3) * spread, rtol=1e-9)
        assert relation.predictors.index.tolist() == list(NAMES)
        np.testing.assert_array_equal(relation.plot().data[-1].y, y)

    def test_couplings_of_models_are_a_variable_of_their_table(self):
        results = {str(seed): from_views(lsim.BlockCoupling(k=3), [view(residuals(seed)[:, :9])]) for seed in range(3)}
        coupling = lsim.stack(results, "model")["mean_coupling"].sel(pair_kind="all pairs")
        relation = lsim.many.relate(coupling, {"0": 1.0, "1": 2.0, "2": 4.0})
        off_diagonal = ~torch.eye(3, dtype=torch.bool)

        np.testing.assert_allclose(
            relation.predictors.squeeze(), [float((1 - r.values)[off_diagonal].mean()) for r in results.values()]
        )

    def test_what_has_no_fit_is_refused(self):
        good = {"a": 1, "b": 2, "c": 4}
        three = pandas.DataFrame({"x": [1.0, 2, 3, 4, 6], "y": [1.0, 1, 2, 2, 9], "z": [1.0, 1, 2, 2, 9]})

        for values, scores, options, match in (
            ({"a": 1, "b": 2}, {"a": 1, "b": 2}, {}, r"`values`.*\b2 points"),
            ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "d": 3}, {}, "`values`.*`scores`.*c, d"),
            ({"a": 1, "b": 1, "c": 1}, good, {}, r"`values`.*`scores`.*\[1\.0, 1\.0, 1\.0\]"),
            ({"a": 1, "b": float("nan"), "c": 1}, good, {}, "`values`.*`scores`.*nan"),
            ({"a": 0.1, "b": 0.1 + 1e-14, "c": 0.1}, good, {}, r"`values`.*`scores`.*\[0\.1"),
            ({"a": 1e9, "b": 1e9 + 1e-4, "c": 1e9}, good, {}, r"`values`.*`scores`.*\[1000000000"),
            (good, {"a": 1, "b": 1, "c": 1}, {}, r"`values`.*`scores`.*\[1\.0, 1\.0, 1\.0\]"),
            (torch.tensor([3.0, 1.0, 2.0, 5.0]), [1.0, 3.0, 2.0], {}, r"`values`.*`scores`.*\b3\b"),
            (good, good, {"confidence": 1}, r"`confidence`.*1"),
            (three[["x", "y"]], range(5), {"shape": "exponential"}, "`shape`.*2"),
            (three[["y", "z"]], [1, 2, 3, 5, 4], {}, "`values`.*y, z"),
            (three.assign(z=three["x"] + 2 * three["y"]), [1, 2, 3, 5, 4], {}, "`values`.*x, y, z"),
            (three.set_axis(["x", "x", "z"], axis=1), range(5), {}, "`values`.*x, x, z"),
            (three.set_axis([1, "1", "z"], axis=1), range(5), {}, "`values`.*1, 1, z"),
            (three, [1, 2, 3, 5], {}, "`values` and `scores`.*4"),
            (three[:4], [1, 2, 3, 5], {}, "`values`.*4.*3"),
        ):
            with pytest.raises(lsim.LayersimError, match=match):
                lsim.many.relate(values, scores, **options)
        with pytest.raises(KeyError, match="w"):
            lsim.many.relate(good, {"a": 1, "b": 2, "c": 3}).plot("w")

    def test_small_values_may_differ_by_little(self):
        assert lsim.many.relate({"a": 1e-12, "b": 2e-12, "c": 3e-12}, {"a": 1, "b": 2, "c": 3}).r_squared == pytest.approx(1)

    def test_names_are_those_of_series_and_of_labelled_tables(self):
        series = pandas.Series([1.0, 2.0, 4.0], index=[0, 10, 100], name="Loss (nats)")
        relation = lsim.many.relate(series, {100: 1.0, 10: 3.0, 0: 4.0})

        assert relation.scores.tolist() == [4.0, 3.0, 1.0]
        assert (relation.predictors.columns.tolist(), relation.scores.name) == (["Loss (nats)"], "Score")
        assert relation.plot().layout.xaxis.title.text == "Loss (nats)"

        words = {"long_name": "Accuracy", "units": "fraction"}
        array = xarray.DataArray([0.1, 0.5, 0.3], {"step": [0, 10, 100], "layer": "x"}, ("step",), attrs=words)
        relation = lsim.many.relate(series, array)
        assert (relation.scores.tolist(), relation.scores.name) == ([0.1, 0.5, 0.3], "Accuracy (fraction)")

    def test_correlations_are_those_of_their_formulas(self):
        x = np.array([1.0, 2.0, 3.0, 4.0, 50.0])
        y = np.array([2.0, 1.0, 4.0, 4.0, 5.0])

        [line] = lsim.many.relate(x, y).to_frame().to_dict("records")

        assert line["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
        assert line["partial"] == pytest.approx(line["pearson"], abs=1e-12)
        # Ranks of y with a tie: 2, 1, 3.5, 3.5, 5.
        assert line["spearman"] == pytest.approx(np.corrcoef([1, 2, 3, 4, 5], [2, 1, 3.5, 3.5, 5])[0, 1], abs=1e-12)
        assert line["pearson_p"] == pytest.approx(line["p_value"], rel=1e-9)
        assert 0 < line["spearman_p"] < 0.1

    def test_an_exponential_minimises_squared_errors_of_the_scores(self):
        x = np.array([0.1, 0.2, 0.35, 0.4, 0.6])
        y = np.array([31.0, 35.0, 52.0, 50.0, 88.0])

        relation = lsim.many.relate(x, y, shape="exponential", confidence=0.9)
        [line] = relation.to_frame().to_dict("records")
        a = relation.intercept
        b = line["coefficient"]
        fit = a * np.exp(b * x)
        jacobian = np.column_stack([np.exp(b * x), x * fit])

        # At the least squares, errors are orthogonal to the derivatives.
        np.testing.assert_allclose(jacobian.T @ (y - fit), 0, atol=1e-4)

        residual_sum = ((y - fit) ** 2).sum()
        assert relation.r_squared == pytest.approx(1 - residual_sum / ((y - y.mean()) ** 2).sum(), abs=1e-9)

        covariance = np.linalg.inv(jacobian.T @ jacobian) * residual_sum / 3
        error = np.sqrt(covariance[1, 1])
        expected = [error, b - student.ppf(0.95, 3) * error, 2 * student.sf(b / error, 3)]
        assert [line["se"], line["low"], line["p_value"]] == pytest.approx(expected, rel=1e-4)

        at = relation.band().iloc[7]
        gradient = np.array([np.exp(b * at["value"]), at["value"] * a * np.exp(b * at["value"])])
        margin = student.ppf(0.95, 3) * np.sqrt(gradient @ covariance @ gradient)
        expected = [gradient[0] * a, gradient[0] * a - margin, gradient[0] * a + margin]
        np.testing.assert_allclose(at[["fit", "low", "high"]], expected, rtol=1e-4)

        falling = lsim.many.relate(x, 100 * np.exp(-3 * x), shape="exponential")
        assert (falling.intercept, falling.to_frame()["coefficient"].item()) == pytest.approx((100, -3))
        assert falling.r_squared == pytest.approx(1)

    def test_many_points_carry_no_names(self):
        x = np.arange(30.0)
        assert lsim.many.relate(x, x**2).plot().data[-1].mode == "markers"
        assert lsim.many.relate(x[:24], x[:24] ** 2).plot().data[-1].mode == "markers+text"


class TestSeveralPredictors:
    def test_partial_correlations_are_those_of_residuals_and_p_values_those_of_statsmodels(self):
        random = np.random.default_rng(0)
        x = random.normal(size=(20, 3)) @ np.array([[1, 0.6, 0.0], [0, 1, 0.3], [0, 0, 1]])
        y = x @ np.array([1.0, -0.5, 0.0]) + random.normal(size=20)
        frame = pandas.DataFrame(x, columns=["coupling", "size", "loss"], index=[f"m{n}" for n in range(20)])

        relation = lsim.many.relate(frame, dict(zip(reversed(frame.index), y[::-1], strict=True)))
        table = relation.to_frame()

        assert table.index.tolist() == ["coupling", "size", "loss"]
        for n, name in enumerate(table.index):
            remaining = np.delete(x, n, axis=1)
            expected = np.corrcoef(residuals_of(x[:, n], remaining), residuals_of(y, remaining))[0, 1]
            assert table.loc[name, "partial"] == pytest.approx(expected, abs=1e-12)
            # The test of a partial correlation is that of the coefficient.
            t = expected * np.sqrt(16 / (1 - expected**2))
            assert table.loc[name, "p_value"] == pytest.approx(2 * student.sf(abs(t), 16), rel=1e-8)
            assert table.loc[name, "pearson"] == pytest.approx(np.corrcoef(x[:, n], y)[0, 1], abs=1e-12)

        statsmodels_fit = OLS.from_formula("y ~ coupling + size + loss", frame.assign(y=y)).fit()
        for column, expected in (
            ("coefficient", statsmodels_fit.params),
            ("se", statsmodels_fit.bse),
            ("p_value", statsmodels_fit.pvalues),
        ):
            np.testing.assert_allclose(table[column], expected[1:], rtol=1e-9)
        np.testing.assert_allclose(table[["low", "high"]], statsmodels_fit.conf_int()[1:], rtol=1e-9)
        assert relation.r_squared == pytest.approx(statsmodels_fit.rsquared)
        assert relation.fit.f_pvalue == pytest.approx(statsmodels_fit.f_pvalue)

    def test_the_population_is_recovered(self):
        """Two correlated predictors, of which only one moves the score: the other has a correlation, and no partial one."""
        random = np.random.default_rng(1)
        first = random.normal(size=20_000)
        second = 0.8 * first + 0.6 * random.normal(size=20_000)
        score = 3 + 2 * first + random.normal(size=20_000)

        table = lsim.many.relate(pandas.DataFrame({"first": first, "second": second}), score).to_frame()

        np.testing.assert_allclose(table["coefficient"], [2, 0], atol=0.05)
        np.testing.assert_allclose(table["pearson"], [2 / np.sqrt(5), 1.6 / np.sqrt(5)], atol=0.01)
        # Given the second, 0.36 of the variance of the first is left.
        np.testing.assert_allclose(table["partial"], [1.2 / np.sqrt(1.44 + 1), 0], atol=0.02)

    @pytest.mark.heavy("a simulation")
    def test_p_values_are_uniform_where_nothing_is_there(self):
        random = np.random.default_rng(2)
        p = []

        for _ in range(400):
            x = random.normal(size=(9, 2))
            x[:, 1] += x[:, 0]
            p.append(lsim.many.relate(pandas.DataFrame(x), x[:, 0] + random.normal(size=9)).to_frame()["p_value"].iloc[1])

        assert 0.03 <= np.mean(np.array(p) < 0.05) <= 0.07

    def test_the_figure_of_one_predictor_holds_the_others_at_their_means(self):
        random = np.random.default_rng(3)
        frame = pandas.DataFrame(random.normal(size=(12, 2)), columns=["a", "b"])

        relation = lsim.many.relate(frame, frame["a"] + 2 * frame["b"] + random.normal(size=12))

        for name in ("a", "b"):
            points = relation.plot(name).data[-1]
            band = relation.band(name)
            slope = relation.to_frame().loc[name, "coefficient"]
            np.testing.assert_allclose(np.diff(band["fit"]) / np.diff(band["value"]), slope)
            at_mean = np.interp(frame[name].mean(), band["value"], band["fit"])
            assert at_mean == pytest.approx(relation.scores.mean())
            # Distances from the line are the residuals of the whole fit.
            line = at_mean + slope * (np.array(points.x) - frame[name].mean())
            np.testing.assert_allclose(np.array(points.y) - line, relation.fit.resid, atol=1e-12)


class TestCoupling:
    def test_the_graph_of_blocks(self):
        result = from_views(lsim.BlockCoupling(k=3), [view(residuals(1)[:, :9])])
        graph = plot_adjacency(result)

        assert list(graph.data[-1].text) == ["0", "1", "2"]

        edges = {frozenset(edge[:2]): edge[2] for edge in graph.data[-3].customdata}
        chance = (result.null[0, 2] - result.values[0, 2]) / result.null[0, 2]
        back = (result.null[2, 0] - result.values[2, 0]) / result.null[2, 0]
        expected = max(0.0, float(chance + back) / 2)
        assert abs(edges[frozenset(("blocks.0.hook_resid_post", "blocks.2.hook_resid_post"))] - expected) < 1e-12

        whole = {frozenset(edge[:2]): edge[2] for edge in plot_adjacency(result, beyond_chance=False).data[-3].customdata}
        mean_coupling = float(result.coupling[0, 2] + result.coupling[2, 0]) / 2
        assert abs(whole[frozenset(("blocks.0.hook_resid_post", "blocks.2.hook_resid_post"))] - mean_coupling) < 1e-12

        raw = from_views(lsim.BlockCoupling(k=3, normalize=False), [view(residuals(1)[:, :9])])
        with pytest.raises(lsim.LayersimError, match=r"`result`.*normalize=False"):
            plot_adjacency(raw)
        assert raw.mean() < 0
