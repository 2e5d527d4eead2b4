"""Distances within and between groups of models, and a permutation test of their difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.intervals import headline_lines, headline_margins, with_replicates
from ..core.results import Result, axes
from ..core.wording import brief, equation, headed, p_value_text

if TYPE_CHECKING:
    import plotly.graph_objects

# Number of relabelings that are evaluated at once.
AT_ONCE = 4096


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GroupComparison(Result):
    """Distances between models of the same group and between models of different groups, with a permutation test.

    Tensors are float64. Distances of a pair that differ by direction, such as stitching penalties, count in both directions.
    The distances of one model are not independent of each other, so the standard deviations describe spread and are no
    standard errors; the test relabels whole models and allows for that.

    Attributes:
        values: `comparison`, mean distance over pairs of different models: "within groups" and "between groups", then of each
            group of two or more models, then of each two groups (and both directions where distances have one).
        sd: `comparison`, standard deviation over pairs, divided by their number less 1; NaN for one pair.
        count: `comparison`, number of pairs.
        distances: `row_model column_model`, all distances.
        comparisons: labels of the comparisons.
        models: names of the models.
        groups: the group of each model.
        difference: mean between groups minus mean within groups.
        p_value: the fraction of relabelings of the models, with the sizes of the groups kept, whose difference is at least as
            large. Relabelings that only exchange the names of groups count once. Where not all are evaluated, the given labels
            count as one more relabeling: (1 + number as large) / (1 + number drawn).
        relabelings: number of relabelings behind the p-value; all there are if `exact`, else random ones.
        exact: whether all relabelings were evaluated.
        smallest_p: the smallest p-value that so many models, or so many random relabelings, can give.
        quantity: the distance in words, with its unit.
    """

    file_kind: ClassVar[str] = "group_comparison"
    values_name = "mean"
    values: Float64[Tensor, " comparison"] = axes(
        "comparison",
        label="Mean distance of two models",
        title="Distances within and between groups",
        caption="Distances of all pairs of models, by the groups of the two (Brown et al. 2023, figure 8). Groups differ "
        "where the distances between them are larger than those within each.",
    )
    sd: Float64[Tensor, " comparison"] = axes(
        "comparison",
        label="Standard deviation over pairs of models",
        title="Spread of the distances over pairs of models",
        within=(0, math.inf),
    )
    count: Float64[Tensor, " comparison"] = axes(
        "comparison", label="Pairs of models", title="Pairs of models in each comparison", within=(0, math.inf)
    )
    distances: Float64[Tensor, "row_model column_model"] = axes("row_model", "column_model", label="Distance of two models")
    comparisons: tuple[str, ...]
    models: tuple[str, ...]
    groups: tuple[str, ...]
    difference: float
    p_value: float
    relabelings: int
    exact: bool
    smallest_p: float
    quantity: str

    @property
    def row_models(self) -> tuple[str, ...]:
        """Names of the models."""
        return self.models

    @property
    def column_models(self) -> tuple[str, ...]:
        """Names of the models."""
        return self.models

    def headline(self) -> dict[str, float]:
        return {
            "mean within groups": float(self.values[0]),
            "mean between groups": float(self.values[1]),
            "difference": self.difference,
            f"p ({self.relabelings:,} {'relabelings' if self.exact else 'random relabelings'})": self.p_value,
            "  smallest possible p": self.smallest_p,
        }

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {self.groups.count(name)} models" for name in dict.fromkeys(self.groups))
        return headed(f"GroupComparison({sizes})", [f"  {line}" for line in headline_lines(self)])

    @typed
    def plot(self, field: str = "mean") -> plotly.graph_objects.Figure:
        """The distances of all pairs by the groups of the two models; or another field as of any result."""
        from ..reporting.interval_bands import interval_ends
        from ..reporting.models import group_distances
        from ..reporting.style import described

        if field not in ("mean", "values"):
            return super().plot(field)
        members = pairs_by_groups(self.groups, have_directions(self.distances))
        series = {name: self.distances[tuple(index)].numpy() for name, index in members.items()}
        of = "relabelings" if self.exact else "random relabelings"
        margin = headline_margins(self).get("difference", math.nan)
        difference = f"{self.difference:.3g}" + (f" ± {margin:.2g} (half of the 95 % interval)" if margin > 0 else "")
        p = equation("p", p_value_text(self.p_value))
        test = f"difference of means {difference}, {p} ({self.relabelings:,} {of})"
        all_ends = interval_ends(self, "distances")
        ends = all_ends and {name: all_ends.at(tuple(index.numpy())) for name, index in members.items()}
        inside = [name.startswith("within ") for name in series]
        return described(group_distances(series, inside, self.quantity, test, ends), self.provenance)


class Permutations(NamedTuple):
    """A permutation test of the difference of means between and within groups, see `GroupComparison`."""

    difference: float
    p_value: float
    relabelings: int
    exact: bool
    smallest_p: float


def group_labels(groups: Any, models: Sequence[str]) -> tuple[str, ...]:
    """The group of each model as text.

    Args:
        groups: a mapping from names of models to groups, or groups in the order of the models.
        models: names of the models.

    Raises:
        LayersimError: a model has no group, or the groups cannot be compared.
    """
    if isinstance(groups, Mapping) and set(groups) == set(models):
        groups = [groups[name] for name in models]
    if isinstance(groups, str) or not isinstance(groups, Sequence) or len(groups) != len(models):
        raise LayersimError(
            f"`groups` is {brief(groups)}; it must name the group of each of the {len(models)} models, as a mapping from "
            f"{', '.join(models[:6])}{', ...' if len(models) > 6 else ''}, or as a list in their order."
        )
    labels = tuple(str(group) for group in groups)
    sizes = [labels.count(name) for name in dict.fromkeys(labels)]
    if len(sizes) < 2 or max(sizes) < 2:
        raise LayersimError(
            f"`groups` has groups of {', '.join(map(str, sizes))} models; it must have two groups or more, one of them with "
            "two models or more."
        )
    return labels


def chosen_groups(given: Any, known: tuple[str, ...], models: Sequence[str]) -> tuple[str, ...]:
    """The groups that a method was called with, or else those that the models were compared with.

    Args:
        given: the argument `groups`, see `group_labels`.
        known: the groups of the result, or none.
        models: names of the models.

    Raises:
        LayersimError: there are no groups.
    """
    labels = known if given is None else group_labels(given, models)
    if not labels:
        raise LayersimError("`groups` is None, and the models were compared without groups.")
    return labels


def compare_groups(
    matrix: Result, labels: tuple[str, ...], about: tuple[tuple[str, ...], str], most: int, seed: int
) -> GroupComparison:
    """The distances within and between groups, and the permutation test.

    Where the matrix has intervals, so have the distances, their means and the difference; the p-value is of all data.

    Args:
        matrix: the result that holds the distances, `model model`.
        labels: the group of each model.
        about: names of the models, and the distance in words.
        most: largest number of relabelings.
        seed: of random relabelings.
    """
    models, quantity = about
    distances = matrix.values
    different = ~torch.eye(len(models), dtype=torch.bool)
    directed = have_directions(distances)
    pairs = pairs_by_groups(labels, directed)
    own = torch.tensor([[one == other for other in labels] for one in labels])
    members = {"within groups": own & different, "between groups": ~own}
    test = permutation_test(distances, labels, most, seed)
    options = matrix.provenance.options | {"relabelings": most, "relabeling_seed": seed}

    def comparison(one: Result) -> GroupComparison:
        each = [one.values[mask if directed else mask.triu()] for mask in members.values()]
        each += [one.values[tuple(index)] for index in pairs.values()]
        means = torch.stack([group.mean() for group in each])
        return GroupComparison(
            values=means,
            sd=torch.stack([group.std() if len(group) > 1 else group.new_tensor(math.nan) for group in each]),
            count=torch.tensor([len(group) for group in each], dtype=torch.float64),
            distances=one.values,
            comparisons=(*members, *pairs),
            models=models,
            groups=labels,
            quantity=quantity,
            layers=(),
            provenance=replace(one.provenance, options=options),
            **test._asdict() | ({} if one is matrix else {"difference": float(means[1] - means[0])}),
        )

    found: GroupComparison = with_replicates(comparison(matrix), tuple(map(comparison, matrix.replicates)), matrix.block_tokens)
    return found


def have_directions(values: Tensor) -> bool:
    """Whether values of pairs of different models depend on the order of the two by more than rounding.

    Args:
        values: `model model` or `model model site`.
    """
    different = ~torch.eye(len(values), dtype=torch.bool)
    there, back = values[different], values.transpose(0, 1)[different]
    # A sum over a transposed matrix adds in another order; of differences that cancel, rounding is that of the largest value.
    largest = float(there.nan_to_num(0, 0, 0).abs().max())
    return not torch.allclose(there, back, rtol=1e-6, atol=1e-9 * largest, equal_nan=True)


def pairs_by_groups(labels: Sequence[str], directed: bool) -> dict[str, Tensor]:
    """Rows and columns of the pairs of different models, `2 pair`, by the groups of the two.

    Args:
        labels: the group of each model.
        directed: whether both orders of a pair are listed.
    """
    names = list(dict.fromkeys(labels))
    chosen = {f"within {name}": (name, name) for name in names if labels.count(name) > 1}
    for a, b in permutations(names, 2) if directed else combinations(names, 2):
        chosen[f"{a} into {b}" if directed else f"{a} and {b}"] = (a, b)
    pairs = permutations(range(len(labels)), 2) if directed else combinations(range(len(labels)), 2)
    numbers: dict[tuple[str, str], list[tuple[int, int]]] = {groups: [] for groups in chosen.values()}
    for i, j in pairs:
        found = (labels[i], labels[j])
        numbers[found if found in numbers else found[::-1]].append((i, j))
    return {name: torch.tensor(numbers[groups]).T for name, groups in chosen.items()}


def permutation_test(distances: Tensor, labels: Sequence[str], most: int, seed: int) -> Permutations:
    """Test whether distances between groups exceed those within groups by more than for other labels of the models.

    Args:
        distances: `model model`, float64; the diagonal is not used.
        labels: the group of each model.
        most: all relabelings are evaluated if there are at most so many, else so many random ones.
        seed: of random relabelings.

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
    return Permutations(
        difference,
        larger / number if exact else (1 + larger) / (1 + number),
        number,
        exact,
        1 / count if exact else 1 / (1 + number),
    )


def _mean_differences(distances: Tensor, labels: Tensor, groups: int) -> Tensor:
    """Mean distance between groups minus mean distance within groups, for each row of labels."""
    apart = distances.clone().fill_diagonal_(0)
    members = torch.nn.functional.one_hot(labels, groups).to(apart)
    inside = torch.einsum("rmg,rmg->r", torch.einsum("mn,rng->rmg", apart, members), members)
    sizes = members[0].sum(0)
    within = (sizes * (sizes - 1)).sum()
    between = len(apart) * (len(apart) - 1) - within
    difference: Tensor = (apart.sum() - inside) / between - inside / within
    return difference


def _all_relabelings(sizes: list[int]) -> Iterator[Tensor]:
    """All divisions of models into groups of these sizes, each once, as rows of labels, some at a time."""
    rows = _divisions(tuple(range(sum(sizes))), tuple(sizes))
    while chunk := list(islice(rows, AT_ONCE)):
        yield torch.tensor(chunk)


def _divisions(models: tuple[int, ...], sizes: tuple[int, ...], group: int = 0) -> Iterator[list[int]]:
    """Labels of the models for every division into groups of the sizes; the first model's group is drawn first."""
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
    """Random permutations of the labels, as rows, some at a time."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, number, AT_ONCE):
        order = torch.rand(min(AT_ONCE, number - start), len(labels), generator=generator).argsort(1)
        yield labels[order]
