"""`compare_grid`: compares all pairs of many models; each model runs once per batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack, get_type_hints, overload

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.row_pools import AnyKernel, PoolKernel
from ..activations.view import Kernel
from ..analyzers.analyzer import Analyzer, Exchange, Run, code_digest
from ..analyzers.needs import Needs
from ..core.arguments import FilePath, typed
from ..core.distributed import failing_together
from ..core.errors import LayersimError, as_argument, recorded_warnings, warn
from ..core.result_declarations import Declaration, result_class
from ..core.results import Report, Result, axes
from ..core.sums import Sums
from ..core.wording import amount, brief
from ..engine.analyze_and_compare import BaselineArgument, SeveralAnalyzers, SharedKeywords, opened_analysis, run_with_baseline
from ..engine.report_assembly import record_of_models
from ..engine.run_arguments import choose_analyzers, is_several, refuse_no_comparison
from ..engine.run_description import Analysis
from ..engine.site_plan import DEFAULT, AtArgument
from ..engine.vectors_as_data import data_of_call
from ..sources.model_description import ModelDescription
from ..sources.open_local import OpenedModel
from ..sources.shared_modules import refuse_one_model
from ..sources.vectors import VectorSource

# Option that identifies the analyzer in a checkpoint; results do not record it.
IDENTITY = "analyzer"


@result_class
class ModelGrid(Result):
    """Distances between all pairs of models; `grid["a", "b"]` is the result of one pair.

    Input of `tl_layersim.many.compare_groups` and `tl_layersim.many.dendrogram`.

    Attributes:
        values: `row_model column_model`, float64; for CKA, `CKAResult.distance`. The order of the two models may matter. NaN
            for an undefined distance.
        by_site: `row_model column_model site`, values of equal sites of every two models, such as CKA(H_l, H'_l). Empty if the
            models have different numbers of sites. For intervals see `grid["a", "b"].interval()`.
        models: names of the models.
        groups: the group of each model; empty without groups.
        sites: names of the sites in the first model.
        quantity: the distance in words, with its unit.
        results: results of the pairs by the indices of the two models, as "0 1". For a symmetric measure each pair appears
            once.
    """

    values_name = "distance"
    values: Float64[Tensor, "row_model column_model"] = axes(
        "row_model",
        "column_model",
        label="Distance",
        title="Distances between models",
        caption="Distance between two models, layer by layer; for CKA, the square root of the summed squared "
        "angles arccos(CKA) of equal layers (Brown et al. 2023, equation 2). Similar models stand side by side, by average "
        "linkage.",
    )
    by_site: Float64[Tensor, "row_model column_model site"] = axes(
        "row_model", "column_model", "site", title="Values of equal sites", within=None
    )
    models: tuple[str, ...]
    groups: tuple[str, ...]
    sites: tuple[str, ...]
    quantity: str
    results: Report

    def coordinates(self, axis: str) -> tuple[Any, ...]:
        return self.models if axis in ("row_model", "column_model") else super().coordinates(axis)

    def declared(self, field: str = "values") -> Declaration:
        declared = super().declared(field)
        if "site" in declared.axes:
            pair = next(iter(self.results.values())).declared()
            return replace(declared, label=pair.label, unit=pair.unit)
        label, _, unit = self.quantity.partition(" (")
        return replace(declared, label=label, unit=unit.removesuffix(")"))

    def with_halves(self, first: Any, second: Any) -> Any:
        pairs = {}
        for name, result in self.results.items():
            pairs[name] = result.with_halves(first.results[name], second.results[name])
        return replace(self, results=Report(pairs))

    def with_replicates(self, replicates: tuple[Any, ...], block_tokens: tuple[int, ...]) -> Result:
        pairs = {}
        for name, result in self.results.items():
            pair_replicates = tuple(grid.results[name] for grid in replicates)
            pairs[name] = result.with_replicates(pair_replicates, block_tokens)
        return replace(self, results=Report(pairs), replicates=replicates, block_tokens=block_tokens)

    def with_twins(self, twins: Sequence[Any]) -> Any:
        pairs = {}
        for name, result in self.results.items():
            pairs[name] = result.with_twins([twin.results[name] for twin in twins])
        return replace(self, results=Report(pairs), untrained=tuple(twins))

    def headline(self) -> dict[str, float]:
        values = self.values[~torch.eye(len(self.models), dtype=torch.bool)]
        return {"smallest distance of two models": float(values.min()), "largest": float(values.max())}

    def __getitem__(self, pair: tuple[str, str]) -> Any:
        """Result of `compare` for two models.

        Args:
            pair: names of the models that give the rows and the columns.

        Raises:
            LayersimError: a name is not a name of one of the models.
        """
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(name in self.models for name in pair):
            raise LayersimError(f"{pair!r} is no pair of models; index the grid by two of {', '.join(map(repr, self.models))}.")
        return either_order(self.results, self.models.index(pair[0]), self.models.index(pair[1]))


def either_order(results: Mapping[str, Any], row: int, column: int) -> Any:
    """Result of a pair of models, transposed if only the other order is available.

    Args:
        results: results by the indices of the two models.
        row: index of the model of the rows.
        column: index of the model of the columns.
    """
    result = results.get(f"{row} {column}")
    if result is None:
        return results[f"{column} {row}"].transposed()
    return result


def group_labels(groups: Any, models: Sequence[str]) -> tuple[str, ...]:
    """Group of each model, as text.

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
            f"`groups` is {brief(groups)}; it must give the group of each of the {len(models)} models "
            f"({', '.join(models[:6])}{', ...' if len(models) > 6 else ''}), as a mapping or as a list in this order."
        )
    labels = tuple(str(group) for group in groups)
    sizes = [labels.count(name) for name in dict.fromkeys(labels)]
    if len(sizes) < 2 or max(sizes) < 2:
        raise LayersimError(
            f"`groups` has groups of size {', '.join(map(str, sizes))}; it must have two groups or more, at least one of them "
            "with two models or more."
        )
    return labels


def _of_measure(name: str, default: Any = None) -> Any:
    """Property that returns the attribute `name` of the measure, or `default`."""
    return property(lambda pairs: getattr(pairs.measure, name, default))


@dataclass(frozen=True, eq=False, repr=False)
class AllPairs(Analyzer):
    """Applies an analyzer of two models to all pairs of many models, and to each model with itself.

    The kernel takes the views of all models and sums over all pairs; the result is a `ModelGrid`. Cross-model statistics of the
    measure are computed once for each model and batch.

    Attributes:
        measure: the analyzer of two models.
        models: names of the models.
        groups: the group of each model; empty for none.
        distance: function that computes the distance of a pair from its result; None for the result's own `distance`.
    """

    measure: Analyzer
    models: tuple[str, ...]
    groups: tuple[str, ...] = ()
    distance: Callable[[Any], float] | None = None

    name = _of_measure("name")
    seed = _of_measure("seed")
    max_memory_gb = _of_measure("max_memory_gb", math.inf)

    def __post_init__(self) -> None:
        if self.distance is None and not hasattr(_result_class(self.measure), "distance"):
            raise LayersimError(
                f"`distance` is None, but the result of {type(self.measure).__name__} has no distance. Pass a function of the "
                "result, such as lambda result: 1 - float(result.values.diagonal().mean())."
            )

    def __repr__(self) -> str:
        return repr(self.measure)

    @property
    def needs(self) -> Needs:
        return replace(self.measure.needs, one_model_at_a_time=self.measure.exchange() is not None)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of model indices, equal ones included: one order for a symmetric measure, else both orders."""
        numbers = range(len(self.models))
        pairs = []
        for row in numbers:
            for column in numbers[row:] if self.measure.needs.symmetric else numbers:
                pairs.append((row, column))
        return pairs

    def check_sites(self, *models: ModelDescription) -> None:
        self.measure.check_sites(*models)
        if self.distance is None and len({len(model.layers) for model in models}) > 1:
            named = zip(self.models, models, strict=True)
            site_counts = ", ".join(f"{name}: {len(model.layers)}" for name, model in named)
            raise LayersimError(
                f"The models have different numbers of sites ({site_counts}), but the distance pairs sites with the same "
                "index. Pass `distance`, or choose equally many sites of each model with `at`."
            )

    def check(self, *models: ModelDescription) -> None:
        self.measure.check(*models)

    def check_batch(self, batch: Any, model: ModelDescription) -> None:
        self.measure.check_batch(batch, model)

    def compute_seconds(self, model: ModelDescription) -> float:
        models = len(self.models)
        return models * (models - 1) / 2 * self.measure.compute_seconds(model)

    def options(self) -> dict[str, Any]:
        cls = type(self.measure)
        return self.measure.options() | {IDENTITY: [f"{cls.__module__}.{cls.__qualname__}", code_digest(self.measure)]}

    def first_kernel(self) -> Kernel | None:
        kernel = self.measure.first_kernel()
        if kernel is None or self.needs.first_pass == "data":
            return kernel
        return partial(all_pairs_kernel, kernels=dict.fromkeys(self.pairs, kernel))

    def kernel(self, first: Sums) -> AnyKernel:
        kernels: Any = {pair: self.measure.kernel(self._first(first, pair)) for pair in self.pairs}
        return partial(all_pairs_kernel, kernels=kernels)

    def pool_kernel(self, first: Sums) -> PoolKernel | None:
        kernel = self.measure.pool_kernel(first)
        if kernel is None:
            return None
        return replace(kernel, sums=partial(all_pairs_of_pools, pairs=self.pairs, sums=kernel.sums))

    def pool_need(self, density: float) -> int:
        return self.measure.pool_need(density)

    def exchange(self) -> Exchange | None:
        exchange = self.measure.exchange()
        if exchange is None:
            return None
        return replace(exchange, join=partial(all_pairs_kernel, kernels=dict.fromkeys(self.pairs, exchange.join)))

    def _distance(self, result: Any) -> float:
        """Distance of two models from their result.

        Raises:
            LayersimError: the user's function fails, or returns no number.
        """
        if self.distance is None:
            return float(result.distance())
        try:
            return float(self.distance(result))
        except (TypeError, ValueError, AttributeError) as error:
            raise LayersimError(
                f"`distance` is {brief(self.distance)}, which gives no number for a {type(result).__name__}: {error}"
            ) from error

    def compute(self, sums: Sums, run: Run) -> ModelGrid:
        numbers = range(len(self.models))
        options = {name: value for name, value in run.provenance.options.items() if name != IDENTITY}
        run = replace(run, provenance=replace(run.provenance, options=options))
        with recorded_warnings(issued=False) as warned:
            results = {f"{a} {b}": self._result(sums, run, (a, b)) for a, b in self.pairs}
        if warned:
            text = warned[0]
            if len(warned) > 1:
                text += f" {len(warned) - 1} more warnings concern other pairs of the {len(numbers)} models."
            warn(text)
        pair_results = [either_order(results, row, column) for row in numbers for column in numbers]
        distances = [self._distance(result) for result in pair_results]
        sites = pair_results[0].layers
        same_sites = all(result.values.shape == (len(sites), len(sites)) for result in pair_results)
        # Models of different depth have no equal sites.
        by_site = [result.values.diagonal() if same_sites else result.values.new_zeros(0) for result in pair_results]
        quantity = "Distance"
        if self.distance is None:
            quantity = getattr(_result_class(self.measure), "distance_name", quantity)
        shape = (len(numbers), len(numbers))
        return ModelGrid(
            values=torch.tensor(distances, dtype=torch.float64).reshape(shape),
            by_site=torch.stack(by_site).reshape(*shape, len(by_site[0])),
            models=self.models,
            groups=self.groups,
            sites=sites if same_sites else (),
            quantity=quantity,
            results=Report(results),
            layers=(),
            provenance=run.provenance,
        )

    def _first(self, first: Sums, pair: tuple[int, int]) -> Sums:
        return first if self.needs.first_pass == "data" else sums_of_pair(first, pair)

    def _result(self, sums: Sums, run: Run, pair: tuple[int, int]) -> Result:
        models = tuple(run.models[number] for number in pair)
        provenance = replace(run.provenance, **record_of_models(models))
        try:
            pair_run = Run(models, provenance, self._first(run.first, pair))
            return self.measure.compute(sums_of_pair(sums, pair), pair_run)
        except LayersimError as error:
            names = " and ".join(self.models[number] for number in pair)
            raise LayersimError(f"{names}: {error}") from error


def _result_class(analyzer: Analyzer) -> Any:
    """Class of an analyzer's result, by the annotation of `compute`; None if unknown."""
    try:
        return get_type_hints(type(analyzer).compute).get("return")
    except NameError:
        return None


def all_pairs_kernel(*views: Any, kernels: Mapping[tuple[int, int], Callable[..., dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Compute the sums of all pairs of models over one batch, with the kernel of each pair.

    Names of sums begin with the indices of the pair.

    Args:
        *views: the view of each model on the same tokens, or its statistics of one batch.
        kernels: the kernels of two views, or the functions that join two statistics (see `Exchange`), by pair.
    """
    return _named_by_pair({(a, b): kernel(views[a], views[b]) for (a, b), kernel in kernels.items()})


def all_pairs_of_pools(
    sides: Sequence[Tensor],
    widths: Sequence[tuple[int, ...]],
    *about: Any,
    pairs: list[tuple[int, int]],
    sums: Callable[..., dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Compute the sums of all pairs of models over samples from several forward passes (a pool).

    Names of sums begin with the indices of the pair.

    Args:
        sides: samples of each model.
        widths: widths of the sites of each model.
        *about: samples and draws, see `PoolKernel`.
        pairs: indices of the models of each pair.
        sums: function that sums over a pool, see `PoolKernel`.
    """
    outputs = {}
    for a, b in pairs:
        outputs[a, b] = sums([sides[a], sides[b]], [widths[a], widths[b]], *about)
    return _named_by_pair(outputs)


def _named_by_pair(outputs: Mapping[tuple[int, int], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Name the sums of each pair after the indices of its models."""
    named = {}
    for (a, b), sums in outputs.items():
        for name, value in sums.items():
            named[f"{a} {b}/{name}"] = value
    return named


def sums_of_pair(sums: Sums, pair: tuple[int, int]) -> Sums:
    """Select the sums of one pair from the sums of all pairs.

    Args:
        sums: sums of all pairs; may be empty.
        pair: indices of the two models.
    """
    prefix = f"{pair[0]} {pair[1]}/"
    fields = {}
    for name, value in sums.fields.items():
        if name.startswith(prefix):
            fields[name.removeprefix(prefix)] = value
    return Sums(fields)


class _Grid(SharedKeywords, total=False):
    groups: Any
    distance: Callable[[Any], Any] | None


@overload
def compare_grid(models: Mapping[str, Any], data: Any, analyzer: Analyzer | str, **options: Unpack[_Grid]) -> ModelGrid: ...
@overload
def compare_grid(models: Mapping[str, Any], data: Any, analyzer: SeveralAnalyzers, **options: Unpack[_Grid]) -> Report: ...
@overload
def compare_grid(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
    models: Mapping[str, VectorSource], *, analyzer: Analyzer | str, **options: Unpack[_Grid]
) -> ModelGrid: ...
@overload
def compare_grid(models: Mapping[str, VectorSource], *, analyzer: SeveralAnalyzers, **options: Unpack[_Grid]) -> Report: ...
@failing_together()
@typed
def compare_grid(
    models: Mapping[str, Any],
    data: Any = None,
    analyzer: Any = None,
    *,
    groups: Any = None,
    distance: Callable[[Any], Any] | None = None,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    baseline: BaselineArgument = None,
    checkpoint: FilePath | None = None,
) -> ModelGrid | Report:
    r"""Compare all pairs of several models on the same tokens.

    Each model runs once per batch, and every pair has the same result as in `compare`. For minibatch CKA, the centred Gram
    matrices of each model are computed once per batch and joined for all pairs. Beside the models' own memory, a batch then
    needs 8 n bytes for each token and site of each model, n = `minibatch`. The exact estimator, and measures without such
    statistics, hold the activations of all models on one batch. Memory does not grow with the data.

    The distance of two models is the `distance` of their result; for CKA, equation 2 of Brown et al.,

    $$\sqrt{\sum_{l=1}^{L} \arccos(\mathrm{CKA}(H_l, H'_l))^2},$$

    over models of equal depth. Models of different depths, and analyzers without a distance, need `distance`.

    Args:
        models: a mapping from names to models, kinds as in `analyze`; servers return statistics as in `compare`.
        data: as in `analyze`, tokenised once, by the tokenizer of the first model that has one. One rule of positions holds for
            all models. Leave it out for sources of vectors.
        analyzer: an analyzer that compares models, such as `CKA()`, or its name; or several: a list, or a mapping from names as
            in `analyze`.
        groups: a mapping from names of models to groups, or a list of groups in the order of the models, for
            `compare_groups` and the figures of the result.
        distance: function that computes the distance of a pair from the result of `compare`; 0 for equal models.
        at: the sites to read in all models, see `analyze`.
        per_head: see `analyze`.
        intervals: see `analyze`.
        baseline: see `compare`; distances between untrained twins of all models are in the results' `untrained`.
        checkpoint: see `analyze`.

    Returns:
        A `ModelGrid`: distances `row_model column_model`, `grid["a", "b"]` for the result of a pair, and a heat map; input of
        `compare_groups` and `dendrogram`. For a list or a mapping of analyzers, a `Report` with the grid of each.

    Raises:
        LayersimError: there are fewer than two models, they have different tokenizers or depths, or the analyzer does not
            compare models.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 4, appendix C.2, equation 2, figures 2 and 8.

    Examples:
        >>> import tl_layersim as lsim
        >>> models = {name: lsim.demo_model() for name in "abc"}
        >>> grid = lsim.compare_grid(models, lsim.demo_text()[:4], lsim.CKA(minibatch=64))
        >>> grid.values.shape, bool(grid.values.max() < 1e-3), grid["a", "c"].values.shape
        (torch.Size([3, 3]), True, torch.Size([9, 9]))
    """
    names = tuple(models)
    if len(names) < 2:
        raise LayersimError(f"`models` holds {amount(len(names), 'model')}; it must hold two or more, each with its own name.")
    labels = () if groups is None else group_labels(groups, names)
    with as_argument("analyzers", "analyzer"):
        chosen = choose_analyzers(analyzer)
    refuse_no_comparison(chosen)
    refuse_one_model({f"models[{name!r}]": models[name] for name in names})
    for_all_pairs: dict[str, Analyzer] = {}
    for name, measure in chosen.items():
        for_all_pairs[name] = AllPairs(measure, names, labels, distance)

    opened_models = [OpenedModel.of(models[name], f"models {name!r}") for name in names]
    data = data_of_call(data, opened_models)

    def prepare(opened: Sequence[OpenedModel]) -> Analysis:
        return replace(opened_analysis(opened, data, chosen, at, per_head, intervals), analyzers=for_all_pairs)

    report = run_with_baseline(opened_models, data, prepare, baseline, checkpoint)
    return report if is_several(analyzer) else next(iter(report.values()))
