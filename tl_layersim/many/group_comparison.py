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
    labels = group_labels(_known_groups(table, groups), names)
    values, further = torch.tensor(array.values, dtype=torch.float64), array.dims[2:]
    compared = pairs_by_groups(labels, not is_symmetric(values))
    sides, pairs = zip(*compared.values(), strict=True)
    # Similarities of sites, such as CKA, are smaller between more different models.
    sign = -1 if isinstance(table, ModelGrid) and field == "by_site" else 1
    each = (sign * values).reshape(len(names), len(names), -1).unbind(-1)
    tests = [permutation_test(one.contiguous(), labels, relabelings, seed) for one in each]
    # Similarities have no principal coordinates; 1 - similarity has.
    spreads = [spread_test(one + (sign < 0), labels, relabelings, seed) for one in each]

    def statistics(distances: Tensor) -> Tensor:
        """Mean distance of each comparison; then the mean between groups minus the mean within groups."""
        means = torch.stack([distances[tuple(index)].mean(0) for index in pairs])
        return torch.cat([means, means[1:2] - means[:1]])

    spread = [values[tuple(index)] for index in pairs]
    deviations = [one.std(0) if len(one) > 1 else one[0] * math.nan for one in spread]
    over, shape = ("comparison", *further), values.shape[2:]
    found: dict[str, Any] = {
        "mean": (over, statistics(values)[:-1].numpy(), array.attrs),
        "sd": (over, torch.stack(deviations).numpy()),
        "count": ("comparison", [len(one) for one in spread]),
        "difference": (further, np.reshape([sign * one.difference for one in tests], shape)),
        "p_value": (further, np.reshape([one.p_value for one in tests], shape)),
        "spread": (over, np.reshape([[one.spreads.get(name, math.nan) for one in spreads] for name in compared], (-1, *shape))),
        "spread_p_value": (further, np.reshape([one.p_value for one in spreads], shape)),
        "smallest_p": tests[0].smallest_p,
    }
    if isinstance(table, Result) and table.has_intervals:
        ends = table.interval(lambda one: statistics(getattr(one, field_named(table, field))))
        for name, end in (("low", ends.low), ("high", ends.high)):
            found |= {f"mean_{name}": (over, end[:-1].numpy()), f"difference_{name}": (further, end[-1].numpy())}
    coords = {name: one for name, one in array.coords.items() if set(one.dims) <= set(further)}
    for n, name in enumerate(("first_group", "second_group")):
        coords[name] = ("comparison", [side[n] for side in sides])
    attrs = {"relabelings": tests[0].relabelings, "exact": int(tests[0].exact), "seed": seed}
    return xarray.Dataset(found, {"comparison": list(compared), **coords}, attrs)


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
    given = _known_groups(table, groups)
    fig = tree_of_models(array, names, () if given is None else group_labels(given, names))
    return with_provenance(fig, table.provenance) if isinstance(table, Result) else fig


def _known_groups(table: Any, groups: Any) -> Any:
    """Return `groups`; by default the groups of a grid."""
    return getattr(table, "groups", ()) or None if groups is None and isinstance(table, Result) else groups


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
        name, declared = field_named(table, field), table.declared(field)
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
    names, listed = list(dict.fromkeys(labels)), permutations if directed else combinations
    pairs = torch.tensor(list(listed(range(len(labels)), 2))).T
    numbers = torch.tensor([names.index(label) for label in labels])
    first, second = numbers[pairs]
    found = {"within groups": (("", ""), first == second), "between groups": (("", ""), first != second)}
    for a, b in [(name, name) for name in names if labels.count(name) > 1] + list(listed(names, 2)):
        i, j = names.index(a), names.index(b)
        chosen = (first == i) & (second == j) if directed else ((first == i) & (second == j)) | ((first == j) & (second == i))
        name = f"within {a}" if a == b else f"{a} into {b}" if directed else f"{a} and {b}"
        if name in found:
            raise LayersimError(
                f"`groups` has the groups {', '.join(names)}; two comparisons would both be named {name!r}. Rename a group."
            )
        found[name] = ((a, b), chosen)
    return {name: (groups, pairs[:, chosen]) for name, (groups, chosen) in found.items()}


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
    given = torch.tensor([names.index(label) for label in labels])
    [difference] = _mean_differences(distances, given[None], len(names)).tolist()
    # Sums of the same distances in another order differ by rounding.
    least = difference - 1e-10 * float(distances.clone().fill_diagonal_(0).abs().max())
    larger = 0
    for drawn in _all_relabelings(sizes) if exact else _random_relabelings(given, most, seed):
        larger += int((_mean_differences(distances, drawn, len(names)) >= least).sum())
    number = count if exact else most
    p_value = larger / number if exact else (1 + larger) / (1 + number)
    smallest = 1 / count if exact else 1 / (1 + number)
    return PermutationResult(difference, p_value if math.isfinite(difference) else math.nan, number, exact, smallest)


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
    members = [torch.tensor([number for number, label in enumerate(labels) if label == name]) for name in names]
    symmetric = ((distances + distances.T) / 2).clamp(min=0).fill_diagonal_(0)
    if not names or not bool(symmetric.isfinite().all()):
        return SpreadTest({}, math.nan)
    to_centroid = [_distances_to_centroid(symmetric[own][:, own]) for own in members]
    spreads = {f"within {name}": float(own.mean()) for name, own in zip(names, to_centroid, strict=True)}
    values = torch.cat(to_centroid)
    deviations = values - values.mean()
    # Two models are equally far from their centroid, so the test needs a group of three or more.
    if len(names) < 2 or len(values) <= 2 * len(names) or not float(deviations.norm()) > 1e-10 * float(values.norm()):
        return SpreadTest(spreads, math.nan)
    sizes = [len(own) for own in to_centroid]
    group = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
    observed = float(_f_ratios(values[None], group, sizes))
    generator, larger = torch.Generator().manual_seed(seed), 0
    for start in range(0, permutations, AT_ONCE):
        order = torch.rand(min(AT_ONCE, permutations - start), len(values), generator=generator).argsort(1)
        larger += int((_f_ratios(values[order], group, sizes) >= observed * (1 - 1e-10)).sum())
    return SpreadTest(spreads, (1 + larger) / (1 + permutations))


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
        left = list(sizes)
        left.remove(size)
        for others in combinations(range(1, len(models)), size - 1):
            own = {0, *others}
            rest = tuple(model for n, model in enumerate(models) if n not in own)
            for labels in _divisions(rest, tuple(left), group + 1):
                remaining = iter(labels)
                yield [group if n in own else next(remaining) for n in range(len(models))]


def _random_relabelings(labels: Tensor, number: int, seed: int) -> Iterator[Tensor]:
    """Yield randomly permuted group labels (`relabeling model`) in chunks."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, number, AT_ONCE):
        order = torch.rand(min(AT_ONCE, number - start), len(labels), generator=generator).argsort(1)
        yield labels[order]
