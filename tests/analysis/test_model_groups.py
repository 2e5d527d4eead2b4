"""Distances within and between groups of models, against their definitions in plain Python."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analysis.group_curves import group_curves
from tl_layersim.analysis.model_groups import have_directions, permutation_test
from tl_layersim.analysis.model_matrix import ModelMatrix
from tl_layersim.core import Provenance


def matrix(values: torch.Tensor, groups: tuple[str, ...] = ()) -> ModelMatrix:
    empty = dict.fromkeys(("config_hash", "weights_hash", "source", "basis", "dtype", "data"), "")
    record = Provenance(model="m", tokens=1, sequences=1, batches=1, seed=None, options={}, versions={}, seconds=0.0, **empty)
    names = tuple(f"m{n}" for n in range(len(values)))
    return ModelMatrix(values=values, models=names, groups=groups, quantity="Distance", layers=(), provenance=record)


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


def test_groups_far_apart_have_the_smallest_p():
    points = torch.tensor([0.0, 0.1, 0.3, 9.0, 9.2, 9.3], dtype=torch.float64)
    found = matrix((points[:, None] - points).abs()).compare_groups([*"aaabbb"])
    assert found.relabelings == 10
    assert found.p_value == found.smallest_p == 0.1
    # Ten models a group: the setting of Brown et al.
    points = torch.cat([torch.arange(10), 100 + torch.arange(10)]).double()
    found = matrix((points[:, None] - points).abs()).compare_groups(["top"] * 10 + ["bottom"] * 10)
    assert (found.relabelings, found.exact) == (92_378, True)
    assert found.p_value == pytest.approx(1 / 92_378)


@pytest.mark.parametrize("directed", [False, True])
def test_means_and_deviations(directed):
    labels, d = "abacb", distances(5, directed=directed)
    found = matrix(d).compare_groups([*labels])
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
    assert found.comparisons == tuple(expected)
    for number, values in enumerate(expected.values()):
        assert float(found.values[number]) == pytest.approx(statistics.fmean(values))
        assert float(found.count[number]) == len(values)
        sd = statistics.stdev(values) if len(values) > 1 else math.nan
        assert float(found.sd[number]) == pytest.approx(sd, nan_ok=True)


def test_a_group_of_one_has_no_pair_within():
    found = matrix(distances(3)).compare_groups({"m0": "a", "m1": "a", "m2": "b"})
    assert found.comparisons == ("within groups", "between groups", "within a", "a and b")
    assert found.count.tolist() == [1, 2, 1, 2]
    assert math.isnan(float(found.sd[0]))
    assert len([trace for trace in found.plot().data if trace.type == "box"]) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_distances_that_are_not_finite_are_named(tmp_path, value):
    d = distances(4)
    d[1, 2] = d[2, 1] = value
    broken = matrix(d, ("a", "a", "b", "b"))
    with pytest.raises(lsim.LayersimError, match=r"m1.*m2"):
        broken.compare_groups()
    with pytest.raises(lsim.LayersimError, match=r"m1.*m2"):
        broken.plot("dendrogram")
    assert broken.order == (0, 1, 2, 3)
    assert broken.plot().data[0].z.shape == (4, 4)
    # A page leaves out the figures that cannot be drawn.
    lsim.Report({"models": broken}).to_html(tmp_path / "page.html")
    assert broken.to_frame("groups").empty
    assert broken.to_frame("dendrogram").empty


def test_distances_of_models_to_themselves_are_not_used():
    d = distances(5, seed=2)
    found = matrix(d).compare_groups([*"aabbb"])
    unknown = matrix(d.clone().fill_diagonal_(math.nan)).compare_groups([*"aabbb"])
    assert permutation_test(unknown.distances, "aabbb", 1000, 0) == permutation_test(d, "aabbb", 1000, 0)
    assert permutation_test(d.clone().fill_diagonal_(1e12), "aabbb", 1000, 0) == permutation_test(d, "aabbb", 1000, 0)
    assert (unknown.comparisons, unknown.p_value) == (found.comparisons, found.p_value)
    assert torch.equal(unknown.count, found.count)
    assert torch.equal(unknown.sd.nan_to_num(), found.sd.nan_to_num())
    assert len(unknown.plot().data) == len(found.plot().data)


def test_an_infinite_distance_is_named():
    d = distances(4)
    d[0, 3] = d[3, 0] = math.inf
    with pytest.raises(lsim.LayersimError, match=r"m0.*m3"):
        matrix(d).compare_groups([*"aabb"])


def test_rounding_gives_pairs_no_direction():
    d = distances(5, seed=1)
    rounded = d + torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-15
    found, expected = matrix(rounded).compare_groups([*"aabbb"]), matrix(d).compare_groups([*"aabbb"])
    assert found.comparisons == expected.comparisons
    assert found.count.tolist() == expected.count.tolist() == [4, 6, 1, 3, 6]
    assert torch.allclose(found.sd, expected.sd, equal_nan=True)
    # Distances that are 0 but for rounding, beside others.
    d[0, 1], d[1, 0] = 1e-12, -1e-12
    assert not have_directions(d)
    d[0, 1] = 1e-4
    assert have_directions(d)
    # Of curves by layer, a value may be undefined in both orders.
    curves = torch.stack([distances(4), rounded[:4, :4]], dim=-1)
    curves[0, 1, 0] = curves[1, 0, 0] = math.nan
    assert not have_directions(curves)
    curves[1, 0, 0] = 0.5
    assert have_directions(curves)


def test_headlines_are_of_different_models():
    d = distances(4) + 1.0
    d.fill_diagonal_(0.5)
    pairs = [float(d[pair]) for pair in itertools.permutations(range(4), 2)]
    assert matrix(d).headline() == {"smallest distance of two models": min(pairs), "largest": max(pairs)}
    # Two groups of two models: 0.9 and 0.5 within, 0.8 and 0.9 between.
    same = torch.tensor([[a == b for b in "aabb"] for a in "aabb"])
    curves = torch.stack([torch.where(same, 0.9, 0.8), torch.where(same, 0.5, 0.9)], -1).double()
    found = group_curves(matrix(d), lambda one: curves, ("a", "a", "b", "b"), ("first", "second"), "CKA")
    [(name, value)] = found.headline().items()
    assert name.endswith("at second")
    assert value == pytest.approx(0.4)
    # [CLS] is one vector at the embedding, where CKA is not defined.
    curves = torch.cat([torch.full((4, 4, 1), math.nan), curves], -1)
    found = group_curves(matrix(d), lambda one: curves, ("a", "a", "b", "b"), ("embedding", "first", "second"), "CKA")
    assert found.headline() == {name: value}


def test_a_result_like_others(tmp_path):
    found = matrix(distances(4)).compare_groups([0, 0, 1, 1], seed=5)
    assert found.groups == ("0", "0", "1", "1")
    assert found.provenance.options == {"relabelings": 100_000, "relabeling_seed": 5}
    again = lsim.load(found.save(tmp_path / "groups.safetensors"))
    assert torch.equal(again.values, found.values)
    assert (again.p_value, again.relabelings, again.comparisons) == (found.p_value, found.relabelings, found.comparisons)
    assert "p (3 relabelings)" in repr(found)
    table = found.to_frame()
    assert list(table.columns) == ["comparison", "mean", "sd", "count"]
    assert len(found.to_frame("distances")) == 16
    figure = found.plot()
    assert "p = " in figure.layout.title.subtitle.text
    assert figure.layout.yaxis.title.text == "Distance"
    assert "within and between groups" in lsim.Report({"groups": found}).to_html(tmp_path / "page.html").read_text()


def test_clusters_are_average_linkage():
    d = distances(5, directed=True)
    both = (d + d.T) / 2
    members = {n: [n] for n in range(5)}
    for step, (a, b, height, count) in enumerate(matrix(d).clusters()):
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
    for a, b, height, _ in matrix(d).clusters()[:1]:
        each = {
            (i, j): (max(0.0, float(d[i, j])) + max(0.0, float(d[j, i]))) / 2 for i, j in itertools.combinations(range(5), 2)
        }
        assert height == pytest.approx(min(each.values()))
        assert each[tuple(sorted((int(a), int(b))))] == pytest.approx(height)
    # A gain in one direction does not make up for a loss in the other.
    opposite = torch.tensor([[0.0, 0.0072], [-0.0072, 0.0]], dtype=torch.float64)
    assert matrix(opposite).clusters()[0, 2] == pytest.approx(0.0036)
    assert matrix(-opposite).clusters()[0, 2] == pytest.approx(0.0036)
    assert matrix(-opposite.abs()).clusters()[0, 2] == 0.0
    below = "directions below 0 count as 0"
    assert below in matrix(opposite).plot("dendrogram").layout.title.subtitle.text
    assert below not in matrix(opposite.abs()).plot("dendrogram").layout.title.subtitle.text


def test_lines_of_groups_differ_by_colour_dash_and_marker():
    d = torch.stack([distances(6, directed=True)] * 2, -1)

    def looks(labels: str) -> dict[str, tuple[str, str, str]]:
        found = group_curves(matrix(d[..., 0]), lambda one: d, tuple(labels), ("first", "second"), "Penalty")
        lines = [trace for trace in found.plot().data if trace.name in found.comparisons]
        return {line.name: (line.line.color, line.line.dash, line.marker.symbol) for line in lines}

    many = looks("aabbcc")
    assert len(many) == len(set(many.values())) == 9
    inside, between = ({look[0] for name, look in many.items() if name.startswith("within ") == own} for own in (True, False))
    assert not inside & between
    # Lines that lie on each other.
    few = looks("aaabbb")
    for one, other in (("within a", "within b"), ("a into b", "b into a")):
        assert all(a != b for a, b in zip(few[one], few[other], strict=True))
