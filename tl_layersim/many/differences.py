"""`difference`: the difference of two runs, with an interval and a p-value for every field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import OpenFraction, typed
from ..core.errors import LayersimError, warn
from ..core.intervals import (
    ROUNDING_ERROR,
    Uncertainty,
    aligned,
    chance_error,
    has_margin,
    p_value_from_error,
    refuse_no_blocks,
    t_interval,
    with_and_without_blocks,
)
from ..core.report_tables import BLOCK_AXES, SITE_AXES, Correction, adjusted, is_symmetric
from ..core.result_declarations import Declaration, declarations
from ..core.results import Report, Result
from ..core.wording import with_article

STATISTICS = ("first", "second", "difference", "low", "high", "se", "p_value", "p_adjusted")
DEPTH = "Relative depth"
# Options that follow from the model or the data, not from a choice of the user.
OF_MODEL_OR_DATA = (
    "tokenizer",
    "processor",
    "main_input",
    "layers",
    "unembed",
    "remote",
    "verify",
    "own_bos",
    "masked_by_pad_id",
    "cut_texts",
)


@typed
def difference(
    first: Report | Result,
    second: Report | Result,
    what: Callable[[Any], Any] | None = None,
    *,
    relative_depth: bool = False,
    level: OpenFraction = 0.95,
    adjust: Correction = "holm",
) -> Any:
    """Difference of two runs, second minus first, with an interval and a p-value for every field.

    Runs on the same data in the same blocks are paired. Their difference is computed again without each block
    (delete-one-block jackknife, Student's t corrected for skewness). Other runs count as independent: their squared errors and
    third moments add up, with the degrees of freedom of Welch and Satterthwaite. If one run has fewer texts than the other, its
    error is at least that of as many texts of the other run: 16 texts may all miss rare large losses that 256 texts show. If
    the smaller sample truly varies less from text to text, the test is therefore less powerful than Welch's.

    The p-value is that of a two-sided t test of a difference of 0. If no block changes the difference, as on the diagonal of a
    similarity, p is NaN.

    Args:
        first: a report or a result of a run with `intervals=True`.
        second: a report or a result of another run. Analyzers that only one of two reports has are left out, with a warning.
        what: function of a result, as it was measured, that returns a number or a tensor, such as
            `lambda result: result.distance()`. None for all fields.
        relative_depth: compare models with different layers at relative depths: the first site has depth 0, the last one depth
            1, and sites are evenly spaced between. The model with more sites is interpolated linearly at the depths of the
            other one. Without it, results at different sites raise an error. On the diagonal of a similarity matrix,
            interpolated values are below 1 between two sites, so that differences there mean nothing.
        level: confidence level of the intervals.
        adjust: correction of p-values for their number in each field: "holm" bounds the probability of any false finding (Holm
            1979); "fdr_bh" bounds the expected fraction of false findings (Benjamini and Hochberg 1995). The two halves of a
            symmetric matrix count once. Headline numbers are corrected over all headline numbers of the call.

    Returns:
        For two results, an `xarray.Dataset` with a variable for each field that both have with the same labels, over the axes
        of the field and `statistic`: "first", "second", "difference", the ends "low" and "high" of its interval, its standard
        error "se", "p_value" and "p_adjusted". The variable `headline` has the headline numbers, `quantity statistic`.
        Attributes name both models, and say whether the runs are paired. For two reports, an `xarray.DataTree` of such
        datasets; with `what`, an `xarray.DataArray`.

    Raises:
        LayersimError: the results are of different classes or sites, or a run kept no blocks.

    Source:
        Wolter 2007, Introduction to Variance Estimation, chapter 4; Welch 1947; Hall 1992, On the removal of skewness by
        transformation.

    Examples:
        >>> import tl_layersim as lsim
        >>> data = lsim.Data(lsim.demo_text()[:16], batch_size=1)
        >>> models = [lsim.demo_model(aligned=own) for own in (False, True)]
        >>> runs = [lsim.analyze(model, data, lsim.LogitLens(), intervals=True) for model in models]
        >>> found = lsim.difference(*runs)["logit_lens"]
        >>> found["accuracy"].dims, found.attrs["paired"]
        (('layer', 'statistic'), 1)
        >>> bool((found["accuracy"].sel(statistic="p_adjusted") < 0.05).any())
        True
        >>> gain = lambda lens: lens.accuracy[-1] - lens.accuracy[0]
        >>> lsim.difference(runs[0]["logit_lens"], runs[1]["logit_lens"], gain).sel(statistic="difference").item() < 0
        True
    """
    import xarray

    if isinstance(first, Report) and isinstance(second, Report) and what is None:
        pairs = _shared_results(first, second)
    elif isinstance(first, Result) and type(first) is type(second):
        pairs = {"": (first, second)}
    else:
        raise LayersimError(
            f"`first` is {with_article(type(first).__name__)} and `second` is {with_article(type(second).__name__)}; they must "
            "be two results of one class or, without `what`, two reports."
        )
    tables = {}
    for name, pair in pairs.items():
        models = [result.provenance.model for result in pair]
        paired = _are_paired(*pair, relative_depth)
        about = {"first": models[0], "second": models[1], "paired": int(paired), "level": level}
        arrays = {}
        for field, (values, labels, attrs) in _variables(*pair, what, paired, relative_depth, level).items():
            arrays[field] = xarray.DataArray(values.numpy(), labels, tuple(labels), attrs=attrs | about)
        tables[name] = xarray.Dataset(arrays, attrs=about)
    _warn_of_options(list(pairs.values()))
    _adjust_p_values(tables, adjust)
    if what is not None:
        return tables[""]["what"].rename(None)
    return tables[""] if "" in tables else xarray.DataTree.from_dict(tables)


def _adjust_p_values(tables: Mapping[str, Any], adjust: Correction) -> None:
    """Set "p_adjusted" in the tables. Headline numbers of all tables are corrected together, and each field by itself."""
    families: dict[Any, list[Any]] = {}
    for name, table in tables.items():
        for variable, array in table.items():
            family = "headline" if variable == "headline" else (name, variable)
            families.setdefault(family, []).append(array)
    for arrays in families.values():
        p_values = []
        for array in arrays:
            p = torch.tensor(array.sel(statistic="p_value").values)
            # Symmetry is seen in the values: small p-values of both halves may differ by more than rounding.
            are_symmetric = all(is_symmetric(torch.tensor(array.sel(statistic=run).values)) for run in ("first", "second"))
            p_values.append((p, are_symmetric))
        for array, corrected in zip(arrays, adjusted(p_values, adjust), strict=True):
            array.loc[{"statistic": "p_adjusted"}] = corrected.numpy()


def _shared_results(first: Report, second: Report) -> dict[str, tuple[Result, Result]]:
    """The two results of each analyzer that both reports have: a dict by the analyzer's name."""
    alone = [name for name in first if name not in second]
    alone += [name for name in second if name not in first]
    names = [name for name in first if name in second]
    if not names:
        raise LayersimError(
            f"`first` and `second` have no analyzer in common: `first` has {', '.join(first) or 'none'}, and "
            f"`second` has {', '.join(second) or 'none'}."
        )
    if alone:
        warn(f"The difference leaves out the analyzers that only one of the two reports has: {', '.join(map(repr, alone))}.")
    for name in names:
        if type(first[name]) is not type(second[name]):
            classes = " and ".join(with_article(type(report[name]).__name__) for report in (first, second))
            raise LayersimError(f"`first` and `second` hold results of different classes under {name!r}: {classes}.")
    # A result that is undefined without some block has no intervals; its run warned of this.
    with_intervals = [name for name in names if first[name].has_intervals and second[name].has_intervals]
    if with_intervals and len(with_intervals) < len(names):
        without = ", ".join(repr(name) for name in names if name not in with_intervals)
        warn(f"The difference leaves out results without intervals: {without}.")
    # If no result has intervals, `_are_paired` says so of the first.
    return {name: (first[name], second[name]) for name in with_intervals or names}


def _are_paired(first: Result, second: Result, relative_depth: bool) -> bool:
    """Whether two results have the same data, split into the same jackknife blocks.

    Raises:
        LayersimError: a result has no intervals, or the results were measured at different sites.
    """
    for result in (first, second):
        refuse_no_blocks(result)
    for axis in () if relative_depth else ("row", "column"):
        first_sites = sites_along(first, axis)
        second_sites = sites_along(second, axis)
        if first_sites != second_sites:
            raise LayersimError(
                f"`first` and `second` were measured at different sites ({first.provenance.model}: "
                f"{_shown_labels(first_sites)}; {second.provenance.model}: {_shown_labels(second_sites)}). Pass "
                "relative_depth=True, or the same `at` to both runs."
            )
    same_data = first.provenance.data == second.provenance.data
    same_blocks = first.block_tokens == second.block_tokens
    paired = same_data and same_blocks and len(first.replicates) == len(second.replicates)
    if not paired and same_data and first.provenance.tokens == second.provenance.tokens:
        warn(
            f"The runs split the same data into different jackknife blocks ({len(first.block_tokens)} and "
            f"{len(second.block_tokens)} blocks). The difference is therefore not paired, and its interval is wider. Pass the "
            "same groups= and batch_size= to both runs."
        )
    return paired


def _warn_of_options(pairs: list[tuple[Result, Result]]) -> None:
    """Warn if two runs differ in an option that the user chose."""
    differing: dict[str, str] = {}
    for first, second in pairs:
        first_options = first.provenance.options
        second_options = second.provenance.options
        for name in {**first_options, **second_options}:
            first_value = first_options.get(name)
            second_value = second_options.get(name)
            if name not in OF_MODEL_OR_DATA and first_value != second_value:
                differing[name] = f"{name} ({first_value!r} and {second_value!r})"
    if differing:
        texts = ", ".join(differing.values())
        warn(f"The runs also differ in these options, which may cause a part of the difference: {texts}.")


def _statistics(
    first: Any,
    second: Any,
    function: Callable[[Any, Any], Any],
    paired: bool,
    level: float,
    counts: Declaration | None = None,
    bounded: Declaration | None = None,
) -> Tensor:
    """Difference of a number or a tensor between two results, with its interval and p-value.

    The last axis of the output is `STATISTICS`. P-values are not adjusted.

    Args:
        first: result of the first run, with its replicates.
        second: result of the second run, with its replicates.
        function: function of a result on all data, and of this result or one of its replicates, that returns a number or a
            tensor, of the same shape for both results.
        paired: whether block j of one run has the same data as block j of the other.
        level: confidence level of the intervals.
        counts: declaration of the field that is read, for a field of counts.
        bounded: declaration of the field that is read, for fractions that may be at a bound by chance.
    """
    a, without_a = with_and_without_blocks(first, partial(function, first), counts)
    b, without_b = with_and_without_blocks(second, partial(function, second), counts)
    uncertainty_a = Uncertainty.of(a, without_a)
    uncertainty_b = Uncertainty.of(b, without_b)
    # Errors by chance of fractions at a bound, where the blocks show no error.
    chance_a = torch.zeros_like(a)
    chance_b = torch.zeros_like(b)
    if bounded is not None:
        chance_a = chance_error(first, bounded, a, uncertainty_a.error, uncertainty_a.degrees, level)
        chance_b = chance_error(second, bounded, b, uncertainty_b.error, uncertainty_b.degrees, level)
    if paired:
        joint = Uncertainty.of(b - a, without_b - without_a)
        # Two fractions at the same bound by chance may differ in other texts.
        joint = joint._replace(error=joint.error.maximum(torch.minimum(chance_a, chance_b).where(a == b, 0.0)))
    else:
        uncertainty_a = uncertainty_a._replace(error=uncertainty_a.error.maximum(chance_a))
        uncertainty_b = uncertainty_b._replace(error=uncertainty_b.error.maximum(chance_b))
        ratio = _ratio_of_texts(first, second)
        if ratio > 1:
            uncertainty_a = uncertainty_a.at_least(uncertainty_b, ratio)
        if ratio < 1:
            uncertainty_b = uncertainty_b.at_least(uncertainty_a, 1 / ratio)
        joint = uncertainty_b.of_difference(uncertainty_a)
    # Ones on the diagonal of a similarity differ by rounding only.
    rounding = ROUNDING_ERROR * torch.maximum(a.abs(), b.abs())
    is_rounding = (joint.error <= rounding) & ((b - a).abs() <= rounding)
    error = joint.error.where(~is_rounding, 0.0)
    b = b.where(~is_rounding, a)
    p = p_value_from_error(b - a, error, joint.degrees, joint.skewness)
    # The difference, the ends of its interval and its error.
    interval = t_interval(b - a, error, joint.degrees, level, skewness=joint.skewness)
    return torch.stack([a, b, *interval, p, p], -1)


def _ratio_of_texts(first: Result, second: Result) -> float:
    """How many times as much data the second run has: 1 unless it has both more texts and more tokens, or fewer of both."""
    text_ratio = second.provenance.texts / first.provenance.texts
    token_ratio = second.provenance.tokens / first.provenance.tokens
    # Texts of other lengths differ in their variance: the ratio nearer to 1 counts.
    smaller = min(text_ratio, token_ratio)
    larger = max(text_ratio, token_ratio)
    if smaller > 1:
        return smaller
    if larger < 1:
        return larger
    return 1.0


def _variables(
    first: Result, second: Result, what: Callable[[Any], Any] | None, paired: bool, relative_depth: bool, level: float
) -> dict[str, tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """Statistics of the difference of two results, for each shared field and the headline numbers.

    Returns a dict from field names to statistics, axis labels and attributes.

    With `what`, only its values are compared.
    """
    compare = partial(_statistics, first, second, paired=paired, level=level)
    # Labels of the last axis.
    statistic = {"statistic": list(STATISTICS)}
    if what is not None:
        first_shape = tuple(torch.as_tensor(what(first)).shape)
        second_shape = tuple(torch.as_tensor(what(second)).shape)
        if first_shape != second_shape:
            raise LayersimError(
                f"`what` returns shapes {first_shape} and {second_shape} for the two results; the shapes must be equal."
            )
        shape_labels = {f"dim_{number}": range(size) for number, size in enumerate(first_shape)}
        return {"what": (compare(lambda whole, result: what(result)), shape_labels | statistic, {})}
    variables: dict[str, tuple[Tensor, dict[str, Any], dict[str, Any]]] = {}
    for field, declared in declarations(second).items():
        # By axis of sites, the number of sites of the model with fewer.
        grids = {}
        if relative_depth:
            for axis in declared.axes:
                if axis in SITE_AXES:
                    grids[axis] = min(len(sites_along(first, axis)), len(sites_along(second, axis)))
        further_axes = [axis for axis in declared.axes if axis not in grids]
        same_labels = all(first.coordinates(axis) == second.coordinates(axis) for axis in further_axes)
        if declared.within is None or not same_labels or bool(getattr(second, field).isnan().all()):
            continue
        labels: dict[str, Any] = {}
        for axis in declared.axes:
            if axis in grids:
                labels[axis] = (axis, list(depths(grids[axis], axis)), {"long_name": DEPTH})
            else:
                labels[axis] = list(second.coordinates(axis))
        attrs = {"long_name": declared.label}
        if declared.unit:
            attrs["units"] = declared.unit
        # An interpolated fraction is no fraction of texts.
        bounded = None if grids else declared
        values = compare(partial(_values_of_field, field, grids), counts=declared, bounded=bounded)
        variables[declared.name] = (values, labels | statistic, attrs)
    # By the id of a result or a replicate: headlines may take long, and every name reads all of them.
    headlines: dict[int, dict[str, float]] = {}
    for whole in (first, second):
        for result in (whole, *whole.replicates):
            headlines[id(result)] = result.headline()
    names = [name for name in headlines[id(first)] if name in headlines[id(second)] and has_margin(name)]
    if names:
        by_name = [compare(partial(_headline, headlines, name)) for name in names]
        variables["headline"] = (torch.stack(by_name), {"quantity": names} | statistic, {})
    return variables


def _headline(headlines: dict[int, dict[str, float]], name: str, whole: Result, result: Result) -> float:
    return headlines[id(result)].get(name, math.nan)


def _values_of_field(field: str, grids: dict[str, int], whole: Result, result: Result) -> Tensor:
    """Values of a field, interpolated to common relative depths along the axes in `grids`."""
    values = aligned(result, whole, field)
    for dim, axis in enumerate(result.tensor_fields()[field]):
        if axis in grids:
            values = at_depths(values, dim, len(sites_along(result, axis)), grids[axis], axis)
    return values


def _shown_labels(names: tuple[Any, ...]) -> str:
    """Labels as text for a message: all labels, or their number, the first and the last."""
    if len(names) < 4:
        return ", ".join(map(str, names)) or "none"
    return f"{len(names)} from {names[0]} to {names[-1]}"


def sites_along(result: Result, axis: str) -> tuple[str, ...]:
    """Names of all measured sites, including a first site that the axis leaves out.

    Args:
        result: any result.
        axis: one of `SITE_AXES`.
    """
    return result.coordinates("column" if axis == "column" else "row")


def depths(sites: int, axis: str) -> tuple[float, ...]:
    """Relative depths of the sites along an axis, from 0 to 1.

    Args:
        sites: number of sites of the model.
        axis: name of the axis; an axis of blocks starts after the first site.

    Examples:
        >>> depths(3, "residual"), depths(3, "layer")
        ((0.0, 0.5, 1.0), (0.5, 1.0))
    """
    return tuple(site / max(sites - 1, 1) for site in range(axis in BLOCK_AXES, sites))


def at_depths(values: Tensor, dim: int, sites: int, grid: int, axis: str) -> Tensor:
    """Interpolate values linearly at the relative depths of a model with fewer sites.

    Args:
        values: values with the axis at `dim`.
        dim: index of the axis.
        sites: number of sites of the model.
        grid: number of sites of the other model, at most `sites`.
        axis: name of the axis; an axis of blocks starts after the first site.

    Raises:
        LayersimError: the other model has a single site.

    Examples:
        >>> at_depths(torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0]).double(), 0, 5, 3, "residual")
        tensor([ 0.,  4., 16.], dtype=torch.float64)
    """
    if sites == grid:
        return values
    if grid < 2:
        raise LayersimError(
            f"`relative_depth` is True, but one model has a single site and the other {sites}. A single site has no relative "
            "depth; `at` must name two sites or more of each model."
        )
    first = int(axis in BLOCK_AXES)
    place = torch.arange(first, grid) * (sites - 1)
    # Integer arithmetic: at a depth of both models, a NaN of the next site must not enter.
    low = place // (grid - 1) - first
    fraction = (place % (grid - 1)).double() / (grid - 1)
    high = (low + 1).clamp(max=values.shape[dim] - 1)
    fraction = fraction.view(-1, *[1] * (values.dim() - dim - 1))
    below = values.index_select(dim, low)
    above = values.index_select(dim, high)
    return below.where(fraction == 0, below + fraction * (above - below))
