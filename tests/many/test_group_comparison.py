"""Distances within and between groups of models, against their definitions in plain Python."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pandas
import pytest
import scipy.stats
import torch
import xarray

import tl_layersim as lsim
from tl_layersim.core.report_tables import is_symmetric
from tl_layersim.many.group_comparison import permutation_test, spread_test
from tl_layersim.reporting.many_model_figures import clusters

from ..inputs.views import from_views, residuals, view


def table(values: torch.Tensor) -> xarray.DataArray:
    names = [f"m{n}" for n in range(len(values))]
    dims = ["row_model", "column_model", "site"][: values.dim()]
    return xarray.DataArray(values.numpy(), dict.fromkeys(dims[:2], names), dims)


def distances(count: int, seed: int = 0, directed: bool = False) -> torch.Tensor:
    drawn = torch.rand(count, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn = drawn if directed else (drawn + drawn.T) / 2
    return drawn.fill_diagonal_(0)


def difference(d: torch.Tensor, labels: tuple[str, ...]) -> float:
    """Mean over ordered pairs of two groups minus mean over ordered pairs of one group."""
    pairs = list(itertools.permutations(range(len(labels)), 2))
    between = [float(d[i, j]) for i, j in pairs if labels[i] != labels[j]]
    within = [float(d[i, j]) for i, j in pairs if labels[i] == labels[j]]
    return statistics.fmean(between) - statistics.fmean(within)


def naive_test(d: torch.Tensor, labels: tuple[str, ...]) -> tuple[float, int]:
    """The p-value and the number of relabelings: distinct divisions of the models into groups of these sizes."""

    def division(order: tuple[str, ...]) -> frozenset[frozenset[int]]:
        return frozenset(frozenset(i for i, one in enumerate(order) if one == name) for name in set(order))

    of_division = {division(order): difference(d, order) for order in set(itertools.permutations(labels))}
    given = difference(d, labels)
    return statistics.fmean(value >= given - 1e-9 for value in of_division.values()), len(of_division)


@pytest.mark.covering
@pytest.mark.parametrize("labels", ["aabb", "aaabbb", "aaab", "aabbc", "aabbcc", "abcdd", "abbbb"])
@pytest.mark.parametrize("directed", [False, True])
def test_the_exact_test_is_its_definition(labels, directed):
    d = distances(len(labels), directed=directed)
    test = permutation_test(d, labels, 100_000, 0)
    p, count = naive_test(d, tuple(labels))
    assert test.exact
    assert test.relabelings == count
    assert test.p_value == pytest.approx(p)
    assert test.smallest_p == pytest.approx(1 / count)
    assert test.difference == pytest.approx(difference(d, tuple(labels)))


def test_ties_count_as_large():
    d = torch.ones(5, 5, dtype=torch.float64).fill_diagonal_(0) / 3
    assert permutation_test(d, "aabbb", 1000, 0).p_value == 1.0
    assert permutation_test(d, "aabbb", 5, 0).p_value == 1.0


def test_random_relabelings_come_near():
    d = distances(8, seed=3)
    labels = "aaaabbbb"
    p, _ = naive_test(d, tuple(labels))
    test = permutation_test(d, labels, 30, 0)
    assert (test.exact, test.relabelings, test.smallest_p) == (False, 30, 1 / 31)
    many = permutation_test(distances(12, seed=3), "a" * 4 + "b" * 4 + "c" * 4, 5000, 0)
    assert many == permutation_test(distances(12, seed=3), "a" * 4 + "b" * 4 + "c" * 4, 5000, 0)
    exact = permutation_test(distances(12, seed=3), "a" * 4 + "b" * 4 + "c" * 4, 10_000, 0)
    assert exact.relabelings == math.factorial(12) // math.factorial(4) ** 3 // 6
    assert many.p_value == pytest.approx(exact.p_value, abs=4 * math.sqrt(exact.p_value / 5000))
    assert test.p_value == pytest.approx(p, abs=0.4)


def test_the_given_labels_count_as_one_more_random_relabeling():
    points = torch.cat([torch.arange(10), 100 + torch.arange(10)]).double()
    apart = permutation_test((points[:, None] - points).abs(), "a" * 10 + "b" * 10, 99, 0)
    assert (apart.exact, apart.p_value, apart.smallest_p) == (False, 0.01, 0.01)


@pytest.mark.heavy("many models")
def test_groups_far_apart_have_the_smallest_p():
    points = torch.tensor([0.0, 0.1, 0.3, 9.0, 9.2, 9.3], dtype=torch.float64)
    found = lsim.many.compare_groups(table((points[:, None] - points).abs()), [*"aaabbb"])
    assert found.attrs["relabelings"] == 10
    assert found["p_value"] == found["smallest_p"] == 0.1
    # Ten models a group: the setting of Brown et al.
    points = torch.cat([torch.arange(10), 100 + torch.arange(10)]).double()
    found = lsim.many.compare_groups(table((points[:, None] - points).abs()), ["top"] * 10 + ["bottom"] * 10)
    assert (found.attrs["relabelings"], found.attrs["exact"]) == (92_378, 1)
    assert float(found["p_value"]) == pytest.approx(1 / 92_378)


@pytest.mark.parametrize("directed", [False, True])
def test_means_and_deviations(directed):
    labels, d = "abacb", distances(5, directed=directed)
    found = lsim.many.compare_groups(table(d), [*labels])
    pairs = list((itertools.permutations if directed else itertools.combinations)(range(5), 2))
    expected = {
        "within groups": [float(d[i, j]) for i, j in pairs if labels[i] == labels[j]],
        "between groups": [float(d[i, j]) for i, j in pairs if labels[i] != labels[j]],
        "within a": [float(d[i, j]) for i, j in pairs if labels[i] == labels[j] == "a"],
        "within b": [float(d[i, j]) for i, j in pairs if labels[i] == labels[j] == "b"],
    }
    for g, h in (itertools.permutations if directed else itertools.combinations)("abc", 2):
        own = [(labels[i], labels[j]) in ([(g, h)] if directed else [(g, h), (h, g)]) for i, j in pairs]
        expected[f"{g} into {h}" if directed else f"{g} and {h}"] = [
            float(d[pair]) for pair, chosen in zip(pairs, own, strict=True) if chosen
        ]
    assert list(found["comparison"].values) == list(expected)
    for name, values in expected.items():
        own = found.sel(comparison=name)
        assert float(own["mean"]) == pytest.approx(statistics.fmean(values))
        assert int(own["count"]) == len(values)
        sd = statistics.stdev(values) if len(values) > 1 else math.nan
        assert float(own["sd"]) == pytest.approx(sd, nan_ok=True)
    assert list(found["first_group"].values[2:4]) == ["a", "b"]


def test_a_group_of_one_has_no_pair_within():
    found = lsim.many.compare_groups(table(distances(3)), {"m0": "a", "m1": "a", "m2": "b"})
    assert list(found["comparison"].values) == ["within groups", "between groups", "within a", "a and b"]
    assert found["count"].values.tolist() == [1, 2, 1, 2]
    assert math.isnan(float(found["sd"][0]))
    assert [trace.name for trace in lsim.plot(found).data] == ["within a", "a and b"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_distances_that_are_not_finite_are_named(value):
    d = distances(4)
    d[1, 2] = d[2, 1] = value
    for call in (lsim.many.compare_groups, lsim.many.dendrogram):
        with pytest.raises(lsim.LayersimError, match=r"m1.*m2"):
            call(table(d), [*"aabb"])


def test_a_site_without_distances_has_no_p_value():
    d = torch.stack([distances(4), distances(4, seed=1)], -1)
    d[1, 2, 0] = d[2, 1, 0] = math.nan
    found = lsim.many.compare_groups(table(d), [*"aabb"])
    assert found["p_value"].isnull().values.tolist() == found["difference"].isnull().values.tolist() == [True, False]
    alone = lsim.many.compare_groups(table(d[..., 1]), [*"aabb"])
    for name in ("difference", "p_value", "count"):
        np.testing.assert_array_equal(found[name].isel(site=1) if "site" in found[name].dims else found[name], alone[name])
    for name in ("mean", "sd"):
        np.testing.assert_allclose(found[name].isel(site=1), alone[name], rtol=1e-12)


def test_distances_of_models_to_themselves_are_not_used():
    d = distances(5, seed=2)
    found = lsim.many.compare_groups(table(d), [*"aabbb"])
    unknown = lsim.many.compare_groups(table(d.clone().fill_diagonal_(math.nan)), [*"aabbb"])
    assert permutation_test(d.clone().fill_diagonal_(1e12), "aabbb", 1000, 0) == permutation_test(d, "aabbb", 1000, 0)
    xarray.testing.assert_identical(found, unknown)


def test_rounding_gives_pairs_no_direction():
    d = distances(5, seed=1)
    rounded = d + torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-15
    found, expected = (lsim.many.compare_groups(table(one), [*"aabbb"]) for one in (rounded, d))
    assert found["count"].values.tolist() == expected["count"].values.tolist() == [4, 6, 1, 3, 6]
    xarray.testing.assert_allclose(found, expected)
    # Distances that are 0 but for rounding, beside others.
    d[0, 1], d[1, 0] = 1e-12, -1e-12
    assert is_symmetric(d)
    d[0, 1] = 1e-4
    assert not is_symmetric(d)
    # Of curves by layer, a value may be undefined in both orders.
    curves = torch.stack([distances(4), rounded[:4, :4]], dim=-1)
    curves[0, 1, 0] = curves[1, 0, 0] = math.nan
    assert is_symmetric(curves)
    curves[1, 0, 0] = 0.5
    assert not is_symmetric(curves)


def test_tables_of_other_kinds():
    d = distances(4)
    frame = table(d).to_pandas()
    found = lsim.many.compare_groups(frame, [0, 0, 1, 1], seed=5)
    xarray.testing.assert_identical(found, lsim.many.compare_groups(table(d), {f"m{n}": n // 2 for n in range(4)}, seed=5))
    assert (found.attrs["seed"], found["first_group"].values.tolist()) == (5, ["", "", "0", "1", "0"])
    for wrong in (frame.iloc[:, :3], frame.iloc[:, ::-1], frame["m0"]):
        with pytest.raises(lsim.LayersimError, match="`table`"):
            lsim.many.compare_groups(wrong, [*"aabb"])
    for grouped in (frame, from_views(lsim.Cosine(center="none"), [view(residuals(1))])):
        with pytest.raises(lsim.LayersimError, match=r"`groups`.*None"):
            lsim.many.compare_groups(grouped)
    with pytest.raises(lsim.LayersimError, match="site"):
        lsim.many.dendrogram(table(torch.stack([d, d], -1)))


def test_clusters_are_average_linkage():
    d = distances(5, directed=True)
    both = (d + d.T) / 2
    members = {n: [n] for n in range(5)}
    for step, (a, b, height, count) in enumerate(clusters(d.numpy())):
        joined = {
            (i, j): statistics.fmean(float(both[x, y]) for x in members[i] for y in members[j])
            for i, j in itertools.combinations(members, 2)
        }
        assert height == pytest.approx(min(joined.values()))
        assert joined[tuple(sorted((int(a), int(b))))] == pytest.approx(height)
        members[5 + step] = members.pop(int(a)) + members.pop(int(b))
        assert len(members[5 + step]) == count


def test_directions_below_zero_are_zero_before_their_mean():
    d = distances(5, directed=True) - 0.5
    d.fill_diagonal_(0)
    assert ((d < 0) & (d + d.T > 0)).any()
    for a, b, height, _ in clusters(d.numpy())[:1]:
        each = {
            (i, j): (max(0.0, float(d[i, j])) + max(0.0, float(d[j, i]))) / 2 for i, j in itertools.combinations(range(5), 2)
        }
        assert height == pytest.approx(min(each.values()))
        assert each[tuple(sorted((int(a), int(b))))] == pytest.approx(height)
    # A gain in one direction does not make up for a loss in the other.
    opposite = torch.tensor([[0.0, 0.0072], [-0.0072, 0.0]], dtype=torch.float64)
    assert clusters((opposite).numpy())[0, 2] == pytest.approx(0.0036)
    assert clusters((-opposite).numpy())[0, 2] == pytest.approx(0.0036)
    assert clusters((-opposite.abs()).numpy())[0, 2] == 0.0
    assert lsim.many.dendrogram(table(opposite)).layout.title.subtitle.text
    assert not lsim.many.dendrogram(table(opposite.abs())).layout.title.subtitle.text


def test_lines_of_groups_differ_by_colour_dash_and_marker():
    d = torch.stack([distances(6, directed=True)] * 2, -1)

    def looks(labels: str) -> dict[str, tuple[str, str, str]]:
        lines = [trace for trace in lsim.plot(lsim.many.compare_groups(table(d), [*labels])).data if trace.name]
        return {line.name: (line.line.color, line.line.dash, line.marker.symbol) for line in lines}

    many, tree = looks("aabbcc"), lsim.many.dendrogram(table(d[..., 0]), [*"aabbcc"])
    assert len(many) == len(set(many.values())) == 9
    inside, between = ({look[0] for name, look in many.items() if name.startswith("within ") == own} for own in (True, False))
    assert not inside & between
    # A colour is one group in all figures.
    legend = {trace.name: trace.marker.color for trace in tree.data if trace.showlegend}
    assert legend == {group: many[f"within {group}"][0] for group in "abc"}
    few = looks("aaabbb")
    assert all(a != b for a, b in zip(few["a into b"], few["b into a"], strict=True))


def test_groups_whose_comparisons_would_have_one_name_are_refused():
    table = pandas.DataFrame(np.ones((4, 4)), index=[*"abcd"], columns=[*"abcd"])
    with pytest.raises(lsim.LayersimError, match="'within groups'"):
        lsim.many.compare_groups(table, ["groups", "groups", "x", "x"])


def principal_coordinate_distances(d: np.ndarray) -> np.ndarray:
    """Distances to the centroid in principal coordinates by eigenvectors, with those of imaginary axes subtracted."""
    centring = np.eye(len(d)) - 1 / len(d)
    values, vectors = np.linalg.eigh(-0.5 * centring @ d**2 @ centring)
    squared = (vectors**2 * values).sum(1)
    return np.sqrt(np.abs(squared)) / math.sqrt(1 - 1 / len(d))


@pytest.mark.parametrize("labels", ["aaabbb", "aaaabbbcc", "aaabbbbd"])
@pytest.mark.parametrize("euclidean", [True, False])
def test_the_spread_of_groups_is_that_of_principal_coordinates(labels, euclidean):
    rng = np.random.default_rng(len(labels))
    points = rng.normal(size=(len(labels), 3)) * np.array([3 if label == "a" else 1 for label in labels])[:, None]
    d = np.linalg.norm(points[:, None] - points, axis=-1) if euclidean else distances(len(labels), directed=True).numpy()
    test = spread_test(torch.tensor(d), labels, 200, 3)
    symmetric = (d + d.T) / 2
    names = [name for name in dict.fromkeys(labels) if labels.count(name) > 1]
    members = [[n for n, label in enumerate(labels) if label == name] for name in names]
    each = [principal_coordinate_distances(symmetric[np.ix_(own, own)]) for own in members]
    assert test.spreads == pytest.approx({f"within {name}": own.mean() for name, own in zip(names, each, strict=True)})
    if euclidean:
        nearest = [np.linalg.norm(points[own] - points[own].mean(0), axis=1) / math.sqrt(1 - 1 / len(own)) for own in members]
        np.testing.assert_allclose(np.concatenate(each), np.concatenate(nearest))
    # The same permutations, with scipy's F ratio.
    values = np.concatenate(each)
    cuts = np.cumsum([len(own) for own in members])[:-1]
    observed = scipy.stats.f_oneway(*each).statistic
    order = torch.rand(200, len(values), generator=torch.Generator().manual_seed(3)).argsort(1).numpy()
    larger = sum(scipy.stats.f_oneway(*np.split(values[one], cuts)).statistic >= observed - 1e-9 for one in order)
    assert test.p_value == pytest.approx((1 + larger) / 201)


def test_spread_and_centre_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    labels = ["a"] * 8 + ["b"] * 8
    points = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    spread, centre = points.clone(), points.clone()
    spread[:8] *= 4
    centre[:8, 0] += 6
    for moved, exchangeable, equal in ((points, True, True), (spread, False, False), (centre, False, True)):
        found = lsim.many.compare_groups(table(torch.cdist(moved, moved)), labels, relabelings=999)
        assert (float(found["p_value"]) > 0.05) == exchangeable
        assert (float(found["spread_p_value"]) > 0.05) == equal
        assert found["spread"].sel(comparison=["within a", "within b"]).notnull().all()
        assert found["spread"].sel(comparison="between groups").isnull()


@pytest.mark.parametrize("labels", ["aabb", "abcc", "aaab"])
def test_groups_too_small_for_a_spread_have_no_p_value(labels):
    assert math.isnan(spread_test(distances(len(labels)), labels, 20, 0).p_value)


def test_the_test_of_spread_is_not_misled_by_the_centre_or_by_the_size_of_groups():
    generator = torch.Generator().manual_seed(1)
    labels = ["a"] * 5 + ["b"] * 10
    small = 0
    for seed in range(200):
        points = torch.randn(15, 5, generator=generator, dtype=torch.float64)
        points[:5, 0] += 5
        small += spread_test(torch.cdist(points, points), labels, 99, seed).p_value <= 0.05
    # 5 % of 200, with three times its error, and what small groups add.
    assert small <= 24
