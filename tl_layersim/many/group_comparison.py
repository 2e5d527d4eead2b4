"""Groups of models: distances within and between groups, tests of their exchangeability and spread, and dendrogram."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.arguments import PositiveInt, typed
from ..core.errors import LayersimError
from ..core.intervals import field_named
from ..core.report_tables import is_symmetric
from ..core.results import Result
from ..core.wording import with_article
from .compare_grid import ModelGrid, group_labels

if TYPE_CHECKING:
    import plotly.graph_objects
    import xarray

# Number of relabelings in a chunk.
AT_ONCE = 4096


@typed
def compare_groups(
    table: Any, groups: Any = None, *, field: str = "values", relabelings: PositiveInt = 100_000, seed: int = 0
) -> xarray.Dataset:
    """Compare distances within and between groups of models, with a permutation test and a test of equal spread.

    The permutation test asks whether models could be exchanged between groups. A small `p_value` says that groups differ in
    their centre, in their spread, or in both: two groups with one centre, of which one is more spread, are not exchangeable.
    `spread_p_value` tells these apart: a small p_value with a large spread_p_value is a difference of centres. If both are
    small, compare the `spread` of the groups before you speak of a distance between them.

    Distances of a pair that differ by direction, such as stitching penalties, count in both directions. The distances of one
    model are not independent of each other, so the standard deviations describe spread and are no standard errors. The test
    relabels whole models and allows for that.

    Args:
        table: a `ModelGrid`, a `StitchGrid`, or distances `model model ...` as an xarray.DataArray or a pandas.DataFrame; for
            similarities, pass their negative. Each entry of further axes, such as sites or stitch points, is compared on its
            own.
        groups: a mapping from names of models to groups, or a list in the order of the models. Default: the groups of the grid.
        field: the field of a grid to compare: `"by_site"` of a `ModelGrid` shows at which sites groups differ,
            `"accuracy_penalty"` of a `StitchGrid` the accuracy that is lost.
        relabelings: largest number of relabelings. If there are no more than this, all are evaluated: two groups of ten models
            have 92,378. Else this many are drawn at random.
        seed: random seed of the relabelings.

    Returns:
        A Dataset, float64. Over `comparison` ("within groups", "between groups", then each group of two or more models, then
        each two groups, in both directions if distances have one) and further axes of the table:

        - `mean`, and `sd` over pairs of different models, divided by their number less 1; `count`, the number of pairs.
        - `difference`: the mean distance between groups minus the mean distance within groups.
        - `p_value`: the fraction of relabelings, with the sizes of the groups kept, whose difference is at least as large (for
          `"by_site"`, which holds similarities such as CKA, at least as small). Relabelings that only exchange the names of
          groups count once. With random relabelings, it is (1 + number as large) / (1 + number drawn), because the given
          labels count as one more. P-values of several sites are not adjusted for their number. NaN if a distance is not
          defined.
        - `spread`: for each group of two or more models, the mean distance of its models to their centroid in
          principal-coordinate space; NaN for other comparisons.
        - `spread_p_value`: p-value of the test that all groups have the same spread (PERMDISP), which permutes the
          distances to the centroids. NaN if fewer than two groups have two models, if none has three, or if a distance is
          not defined.
        - `smallest_p`: the smallest possible p-value with this number of models or of random relabelings.
        - `mean_low`, `mean_high`, `difference_low`, `difference_high`: 95 % intervals, if the grid was measured with
          `intervals=True`. The p-value is computed from all data.

        The attribute `relabelings` is the number of relabelings; `exact` is 1 if these are all.

    Raises:
        LayersimError: groups do not fit the models, or the table has no further axes and a distance is not defined.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 4, appendix B, figures 2 and 8. Anderson 2006, Distance-based tests for
        homogeneity of multivariate dispersions.

    Examples:
        Of the 3 ways to divide four models into pairs, one separates the groups.

        >>> import pandas
        >>> import tl_layersim as lsim
        >>> points = pandas.Series([0.0, 1.0, 10.0, 11.0], index=[*"abcd"])
        >>> distances = pandas.DataFrame({name: (points - at).abs() for name, at in points.items()})
        >>> found = lsim.many.compare_groups(distances, ["low", "low", "high", "high"])
        >>> float(found["difference"]), round(float(found["p_value"]), 3), found.attrs["relabelings"]
        (9.0, 0.333, 3)
    """
    import numpy as np
    import xarray

    array, names = distances_between(table, field)
    labels = group_labels(_chosen_groups(table, groups), names)
    values = torch.tensor(array.values, dtype=torch.float64)
    further_axes = array.dims[2:]
    comparisons = pairs_by_groups(labels, not is_symmetric(values))
    group_pairs, pairs = zip(*comparisons.values(), strict=True)
    # Similarities of sites, such as CKA, are smaller between more different models.
    are_similarities = isinstance(table, ModelGrid) and field == "by_site"
    sign = -1 if are_similarities else 1
    # `model model` for each entry of the further axes.
    matrices = (sign * values).reshape(len(names), len(names), -1).unbind(-1)
    tests = [permutation_test(matrix.contiguous(), labels, relabelings, seed) for matrix in matrices]
    # Similarities have no principal coordinates; 1 - similarity has.
    spread_tests = [spread_test(matrix + int(are_similarities), labels, relabelings, seed) for matrix in matrices]

    def statistics(distances: Tensor) -> Tensor:
        """Mean distance of each comparison; then the mean between groups minus the mean within groups."""
        means = torch.stack([distances[tuple(index)].mean(0) for index in pairs])
        return torch.cat([means, means[1:2] - means[:1]])

    counts = []
    deviations = []
    for index in pairs:
        distances = values[tuple(index)]
        counts.append(len(distances))
        # A single pair has no standard deviation.
        deviations.append(distances.std(0) if len(distances) > 1 else distances[0] * math.nan)
    spreads = []
    for name in comparisons:
        spreads.append([test.spreads.get(name, math.nan) for test in spread_tests])
    axes = ("comparison", *further_axes)
    shape = values.shape[2:]
    variables: dict[str, Any] = {
        "mean": (axes, statistics(values)[:-1].numpy(), array.attrs),
        "sd": (axes, torch.stack(deviations).numpy()),
        "count": ("comparison", counts),
        "difference": (further_axes, np.reshape([sign * test.difference for test in tests], shape)),
        "p_value": (further_axes, np.reshape([test.p_value for test in tests], shape)),
        "spread": (axes, np.reshape(spreads, (-1, *shape))),
        "spread_p_value": (further_axes, np.reshape([test.p_value for test in spread_tests], shape)),
        "smallest_p": tests[0].smallest_p,
    }
    if isinstance(table, Result) and table.has_intervals:
        ends = table.interval(lambda result: statistics(getattr(result, field_named(table, field))))
        for name, end in (("low", ends.low), ("high", ends.high)):
            variables[f"mean_{name}"] = (axes, end[:-1].numpy())
            variables[f"difference_{name}"] = (further_axes, end[-1].numpy())
    coords: dict[Any, Any] = {}
    for axis, coordinate in array.coords.items():
        # Names of models label no axis of the table.
        if set(coordinate.dims) <= set(further_axes):
            coords[axis] = coordinate
    coords["first_group"] = ("comparison", [first for first, _ in group_pairs])
    coords["second_group"] = ("comparison", [second for _, second in group_pairs])
    attrs = {"relabelings": tests[0].relabelings, "exact": int(tests[0].exact), "seed": seed}
    return xarray.Dataset(variables, {"comparison": list(comparisons), **coords}, attrs)


@typed
def dendrogram(table: Any, groups: Any = None) -> plotly.graph_objects.Figure:
    """Draw the hierarchical clustering of models by average linkage.

    The distance of two models is the mean of both directions. A direction below 0, such as the penalty of a stitch that gains,
    counts as 0 in this mean: else penalties of +0.01 and -0.01 would make two models equal. Links within one group have the
    colour of the group.

    Args:
        table: a `ModelGrid`, or distances `model model` as an xarray.DataArray or a pandas.DataFrame.
        groups: see `compare_groups`. Default: the groups of the grid, or none.

    Raises:
        LayersimError: a distance is not a finite number, or the table has further axes.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 4.

    Examples:
        >>> import pandas
        >>> import tl_layersim as lsim
        >>> distances = pandas.DataFrame([[0.0, 1.0, 4.0], [1.0, 0.0, 6.0], [4.0, 6.0, 0.0]], columns=[*"abc"], index=[*"abc"])
        >>> sorted(float(max(link.y)) for link in lsim.many.dendrogram(distances).data)
        [1.0, 5.0]
    """
    from ..reporting.many_model_figures import tree_of_models
    from ..reporting.style import with_provenance

    array, names = distances_between(table)
    if array.ndim > 2:
        raise LayersimError(
            f"`table` has the axes {' x '.join(map(str, array.dims))}; it must have two. Select a label of "
            f"{array.dims[2]}, or take the mean over it."
        )
    chosen = _chosen_groups(table, groups)
    labels = () if chosen is None else group_labels(chosen, names)
    fig = tree_of_models(array, names, labels)
    return with_provenance(fig, table.provenance) if isinstance(table, Result) else fig


def _chosen_groups(table: Any, groups: Any) -> Any:
    """Return `groups`; by default the groups of a grid."""
    if groups is None and isinstance(table, Result):
        return getattr(table, "groups", ()) or None
    return groups


def distances_between(table: Any, field: str = "values") -> tuple[xarray.DataArray, tuple[str, ...]]:
    """Convert a grid or a table to an array (`model model ...`); also return the names of the models.

    Args:
        table: a grid, a DataArray or a DataFrame.
        field: the field of a grid.

    Raises:
        LayersimError: the first two axes do not name the same models; or there are no further axes, and a distance between two
            models is not finite.
    """
    import numpy as np
    import xarray

    if isinstance(table, Result):
        name = field_named(table, field)
        declared = table.declared(field)
        coords = {axis: list(table.coordinates(axis)) for axis in declared.axes}
        attrs = {"long_name": declared.label, "units": declared.unit}
        if not getattr(table, name).numel():
            raise LayersimError(f"`field` is {field!r}, which is empty: the models have different numbers of sites.")
        array = xarray.DataArray(getattr(table, name).numpy(), coords, declared.axes, attrs=attrs)
    elif isinstance(table, xarray.Dataset | xarray.DataTree):
        raise LayersimError(f"`table` is {with_article(type(table).__name__)}; it must be a grid, a DataArray or a DataFrame.")
    else:
        array = xarray.DataArray(table)
    sides = [tuple(map(str, array[dim].values)) for dim in array.dims[:2]]
    if len(sides) < 2 or sides[0] != sides[1]:
        raise LayersimError(
            f"`table` has the axes {', '.join(map(str, array.dims)) or 'none'}; the first two must name the same models, in "
            "the same order."
        )
    array = array.astype(float)
    undefined = [(a, b) for a, b in np.argwhere(~np.isfinite(array.values))[:, :2] if a != b]
    if undefined and array.ndim == 2:
        pairs = ", ".join(f"{sides[0][a]} and {sides[0][b]}" for a, b in undefined[:3])
        raise LayersimError(
            f"The distance is not a finite number for {pairs}. Leave out these models, or the sites at which the measure is "
            "not defined, such as the embedding."
        )
    return array, sides[0]


def pairs_by_groups(labels: Sequence[str], directed: bool) -> dict[str, tuple[tuple[str, str], Tensor]]:
    """Pairs of different models within each group and between groups: a dict by the comparison's name.

    Values hold the names of the two groups, and the pairs as row and column indices (`2 pair`).

    The first two comparisons, within groups and between groups, are of all groups: "" stands for these.

    Args:
        labels: the group of each model.
        directed: whether both orders of a pair count as pairs.
    """
    names = list(dict.fromkeys(labels))
    choose_two = permutations if directed else combinations
    pairs = torch.tensor(list(choose_two(range(len(labels)), 2))).T
    numbers = torch.tensor([names.index(label) for label in labels])
    # By pair, the groups of the model of the row and of the model of the column.
    first, second = numbers[pairs]
    group_pairs = [(name, name) for name in names if labels.count(name) > 1]
    group_pairs += choose_two(names, 2)
    comparisons = {
        "within groups": (("", ""), pairs[:, first == second]),
        "between groups": (("", ""), pairs[:, first != second]),
    }
    for a, b in group_pairs:
        number_a = names.index(a)
        number_b = names.index(b)
        of_groups = (first == number_a) & (second == number_b)
        if not directed:
            of_groups |= (first == number_b) & (second == number_a)
        if a == b:
            name = f"within {a}"
        elif directed:
            name = f"{a} into {b}"
        else:
            name = f"{a} and {b}"
        if name in comparisons:
            raise LayersimError(
                f"`groups` has the groups {', '.join(names)}; two comparisons would both be named {name!r}. Rename a group."
            )
        comparisons[name] = ((a, b), pairs[:, of_groups])
    return comparisons


class PermutationResult(NamedTuple):
    """Result of a permutation test: difference, p-value and number of relabelings."""

    difference: float
    p_value: float
    relabelings: int
    exact: bool
    smallest_p: float


def permutation_test(distances: Tensor, labels: Sequence[str], most: int, seed: int) -> PermutationResult:
    """Permutation test: do distances between groups exceed distances within groups?

    Args:
        distances: `model model`, float64; the diagonal is not used.
        labels: the group of each model.
        most: largest number of relabelings. If there are no more than this, all are evaluated; else this many are drawn at
            random.
        seed: random seed of the relabelings.

    Examples:
        Of the 3 ways to divide four models into pairs, one separates the groups.

        >>> points = torch.tensor([0.0, 1.0, 10.0, 11.0]).double()
        >>> test = permutation_test((points[:, None] - points).abs(), ["a", "a", "b", "b"], 1000, 0)
        >>> test.difference, test.relabelings, round(test.p_value, 3) == round(test.smallest_p, 3) == 0.333
        (9.0, 3, True)
    """
    names = list(dict.fromkeys(labels))
    sizes = sorted(labels.count(name) for name in names)
    count = math.factorial(len(labels))
    for size in sizes:
        count //= math.factorial(size)
    for size in set(sizes):
        count //= math.factorial(sizes.count(size))
    exact = count <= most
    numbers = torch.tensor([names.index(label) for label in labels])
    [difference] = _mean_differences(distances, numbers[None], len(names)).tolist()
    # Sums of the same distances in another order differ by rounding.
    least = difference - 1e-10 * float(distances.clone().fill_diagonal_(0).abs().max())
    as_large = 0
    chunks = _all_relabelings(sizes) if exact else _random_relabelings(numbers, most, seed)
    for relabelings in chunks:
        as_large += int((_mean_differences(distances, relabelings, len(names)) >= least).sum())
    if exact:
        p_value = as_large / count
        smallest = 1 / count
    else:
        # The given labels count as one more.
        p_value = (1 + as_large) / (1 + most)
        smallest = 1 / (1 + most)
    if not math.isfinite(difference):
        p_value = math.nan
    return PermutationResult(difference, p_value, count if exact else most, exact, smallest)


class SpreadTest(NamedTuple):
    """Result of a test of equal spread: mean distance to the centroid by comparison ("within a"), and p-value."""

    spreads: dict[str, float]
    p_value: float


def spread_test(distances: Tensor, labels: Sequence[str], permutations: int, seed: int) -> SpreadTest:
    """Test that groups have the same spread (PERMDISP): an F test of the distances of models to the centroids of their groups.

    The distances to the centroids are those of principal coordinates, whose axes of negative variance are subtracted. Groups of
    a single model have no spread. The distances of a group are divided by sqrt(1 - 1 / n): a centroid is nearer to the models
    that it is computed from than the true centre, the more so the smaller the group. The permuted residuals are those of the
    hypothesis that all groups have one spread. With 5 models in each group, 6 to 9 % of equal spreads have p <= .05.

    Args:
        distances: `model model`, float64; both directions are averaged and the diagonal is not used. Negative distances count
            as 0.
        labels: the group of each model.
        permutations: number of random permutations.
        seed: random seed of the permutations.

    Source:
        Anderson 2006, Distance-based tests for homogeneity of multivariate dispersions, equation 5. Stier, Geange, Hanson and
        Bolker 2013 for the factor of small groups.

    Examples:
        The distances to the centroids are 1 in one group and 10 in the other, before the factor of sqrt(2).

        >>> points = torch.tensor([0.0, 2.0, 30.0, 50.0]).double()
        >>> found = spread_test((points[:, None] - points).abs(), ["a", "a", "b", "b"], 99, 0)
        >>> {name: round(spread, 3) for name, spread in found.spreads.items()}
        {'within a': 1.414, 'within b': 14.142}
    """
    names = [name for name in dict.fromkeys(labels) if labels.count(name) > 1]
    symmetric = ((distances + distances.T) / 2).clamp(min=0).fill_diagonal_(0)
    if not names or not bool(symmetric.isfinite().all()):
        return SpreadTest({}, math.nan)
    # By group, the distance of each model to the centroid.
    to_centroid = []
    for name in names:
        members = torch.tensor([number for number, label in enumerate(labels) if label == name])
        to_centroid.append(_distances_to_centroid(symmetric[members][:, members]))
    spreads = {}
    for name, group_distances in zip(names, to_centroid, strict=True):
        spreads[f"within {name}"] = float(group_distances.mean())
    values = torch.cat(to_centroid)
    deviations = values - values.mean()
    # Two models are equally far from their centroid, so the test needs a group of three or more.
    if len(names) < 2 or len(values) <= 2 * len(names) or not float(deviations.norm()) > 1e-10 * float(values.norm()):
        return SpreadTest(spreads, math.nan)
    sizes = [len(group_distances) for group_distances in to_centroid]
    group = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
    observed = float(_f_ratios(values[None], group, sizes))
    generator = torch.Generator().manual_seed(seed)
    as_large = 0
    for start in range(0, permutations, AT_ONCE):
        order = torch.rand(min(AT_ONCE, permutations - start), len(values), generator=generator).argsort(1)
        # Sums of the same numbers in another order differ by rounding.
        as_large += int((_f_ratios(values[order], group, sizes) >= observed * (1 - 1e-10)).sum())
    return SpreadTest(spreads, (1 + as_large) / (1 + permutations))


def _distances_to_centroid(distances: Tensor) -> Tensor:
    """Distance of each model of a group to the group's centroid in principal-coordinate space, corrected for the group's size.

    The squared distance of a model to the centroid is its mean squared distance to the models of the group, itself included,
    less half the mean of all squared distances. It equals the sum of squares over principal coordinates, with those of
    imaginary axes subtracted.

    Args:
        distances: `model model`, symmetric, with zeros on the diagonal.
    """
    squared = distances.square()
    to_centroid = squared.mean(1) - squared.mean() / 2
    return to_centroid.abs().sqrt() / math.sqrt(1 - 1 / len(distances))


def _f_ratios(values: Tensor, group: Tensor, sizes: Sequence[int]) -> Tensor:
    """F ratio of a one-way analysis of variance, for each row of `values`.

    Args:
        values: `permutation model`.
        group: number of the group of each model.
        sizes: number of models of each group.
    """
    members = torch.nn.functional.one_hot(group, len(sizes)).to(values)
    means = values @ members / torch.tensor(sizes, dtype=values.dtype)
    within = (values - means[:, group]).square().sum(1) / (len(group) - len(sizes))
    deviations = (means - values.mean(1, keepdim=True)).square() @ torch.tensor(sizes, dtype=values.dtype)
    return deviations / (len(sizes) - 1) / within


def _mean_differences(distances: Tensor, labels: Tensor, groups: int) -> Tensor:
    """Mean distance between groups minus mean distance within groups, for each row of `labels`."""
    apart = distances.clone().fill_diagonal_(0)
    members = torch.nn.functional.one_hot(labels, groups).to(apart)
    inside = torch.einsum("rmg,rmg->r", torch.einsum("mn,rng->rmg", apart, members), members)
    sizes = members[0].sum(0)
    within = (sizes * (sizes - 1)).sum()
    between = len(apart) * (len(apart) - 1) - within
    difference: Tensor = (apart.sum() - inside) / between - inside / within
    return difference


def _all_relabelings(sizes: list[int]) -> Iterator[Tensor]:
    """Yield group labels (`relabeling model`) of all divisions into groups of these sizes, in chunks."""
    rows = _divisions(tuple(range(sum(sizes))), tuple(sizes))
    while chunk := list(islice(rows, AT_ONCE)):
        yield torch.tensor(chunk)


def _divisions(models: tuple[int, ...], sizes: tuple[int, ...], group: int = 0) -> Iterator[list[int]]:
    """Yield each division of models into groups of these sizes, as labels."""
    # The first model's group comes first, so that each division is found once.
    if not sizes:
        yield []
        return
    for size in dict.fromkeys(sizes):
        remaining_sizes = list(sizes)
        remaining_sizes.remove(size)
        for further_members in combinations(range(1, len(models)), size - 1):
            members = {0, *further_members}
            remaining_models = tuple(model for number, model in enumerate(models) if number not in members)
            for labels in _divisions(remaining_models, tuple(remaining_sizes), group + 1):
                remaining_labels = iter(labels)
                yield [group if number in members else next(remaining_labels) for number in range(len(models))]


def _random_relabelings(labels: Tensor, number: int, seed: int) -> Iterator[Tensor]:
    """Yield randomly permuted group labels (`relabeling model`) in chunks."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, number, AT_ONCE):
        order = torch.rand(min(AT_ONCE, number - start), len(labels), generator=generator).argsort(1)
        yield labels[order]
