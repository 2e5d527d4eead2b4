"""`plot_sweep`: a figure of any field of many models over training steps, model sizes or depth."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..analyzers.block_coupling import BlockCouplingResult
from ..core.argument_checks import typed
from ..core.bounds import OpenFraction
from ..core.errors import LayersimError
from ..core.results import Result
from ..core.wording import amount
from .score_relation import same_coupling_options
from .sweep_curves import FieldCurve, field_curve, field_number
from .sweep_results import Sweep, quantity_of, sweep_keys

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
else:
    # plotly is imported when a figure is made: a check of the type at every call would import it first.
    Figure = Any


@typed
def plot_sweep(
    results: Mapping[Any, Any],
    analyzer: str | None = None,
    field: str | None = None,
    *,
    over: Literal["key", "depth", "both"] = "key",
    select: dict[str, Any] | None = None,
    key_title: str | None = None,
    title: str | None = None,
    level: OpenFraction = 0.95,
) -> Figure:
    """A figure of a field over training steps or model sizes, over depth, or over both.

    Bands of up to three lines are confidence intervals, where the models were measured with `intervals=True`; intervals of more
    lines are shown where the pointer is.

    Args:
        results: a `Sweep`, or a mapping from training steps, sizes or names to results of one analyzer. Numbers that span two
            decades or more have a logarithmic axis, at whose left end a key of 0 stands.
        analyzer: name of the analyzer, of a `Sweep` of several.
        field: name of a tensor field or words of a headline. None takes the `values` of a result; of `BlockCoupling` the mean
            coupling of all pairs of blocks, of neighbours and of random vectors.
        over: "key" draws a line for each layer over the keys; "depth" a line for each model over relative depth, for models of
            different depths too; "both" a heat map of layers by keys.
        select: labels of further axes of the field by axis, as in `Sweep.numbers`.
        key_title: what the keys are, with their unit, such as "Training step" or "Parameters"; by default "Model".
        title: of the figure; by default the quantity in words, and what the keys are.
        level: of the bands.

    Returns:
        A plotly figure.

    Raises:
        LayersimError: there are no results, no such field, the field has no layers, or models of different depths have no
            common heat map.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), figure 1 b, coupling over training, and figure 25, line-shape score over training.

    Examples:
        >>> import tl_layersim as lsim
        >>> found = lsim.sweep({0: lsim.demo_model(), 1000: lsim.demo_model()}, lsim.demo_text()[:2], lsim.Cosine())
        >>> figure = lsim.plot_sweep(found, "cosine", "to_last", over="depth")
        >>> figure.layout.xaxis.title.text, figure.layout.yaxis.title.text
        ('Relative depth (0: first site, 1: last)', 'Cosine similarity')
    """
    from ..reporting.sweeps import KeyAxis

    own = _results_of(results, analyzer)
    keys = list(own)
    axis = KeyAxis(keys, key_title or "Model")
    first = own[keys[0]]
    if isinstance(first, BlockCouplingResult):
        same_coupling_options(list(own.values()))
        if field is None and over == "key":
            return _with_models(_coupling(own, axis, title or f"Coupling of blocks{_by(axis)}", level), own, level)
    field = field or ("coupling" if isinstance(first, BlockCouplingResult) else "values")
    curves = [field_curve(result, field, select or {}, level) for result in own.values()]
    titles = (title or _title(first, field, curves[0].words) + _by(axis), quantity_of(first, field))
    return _with_models(_figure(curves, axis, over, titles), own, level)


def _with_models(fig: Figure, results: Mapping[Any, Result], level: float) -> Figure:
    """The figure with the number of models, of the tokens that each was measured on, and the level of its bands."""
    from ..reporting.style import with_subtitle

    tokens = sorted({result.provenance.tokens for result in results.values()})
    each = " to ".join(f"{number:,}" for number in dict.fromkeys((tokens[0], tokens[-1])))
    parts = [amount(len(results), "model"), f"{each} tokens each"]
    if any(trace.fill == "toself" for trace in fig.data if trace.type == "scatter"):
        parts.append(f"bands: {100 * level:g} % intervals of each point")
    return with_subtitle(fig, " · ".join(parts))


def _by(axis: Any) -> str:
    """What the keys are, at the end of a title, in small letters and without a unit."""
    keys = html.escape(axis.title.partition(" (")[0])
    return f", by {keys if keys[:2].isupper() else keys[:1].lower() + keys[1:]}"


def _title(result: Result, field: str, words: str) -> str:
    """The title of a field's picture in reports, or the quantity, with what was taken of the field's other axes."""
    from ..reporting.site_labels import site_words

    return site_words(result.layers, result.declared(field).title) + (f" ({words})" if words else "")


def _results_of(results: Any, analyzer: str | None) -> dict[Any, Any]:
    """The results by key, in the order of numbers."""
    if isinstance(results, Sweep):
        if analyzer is None and len(results.analyzers) != 1:
            raise LayersimError(
                f"`analyzer` is None; it must be one of {', '.join(results.analyzers) or 'none'}, the analyzers of the sweep."
            )
        results = results.results(analyzer or results.analyzers[0])
    elif analyzer is not None:
        raise LayersimError(f"`analyzer` is {analyzer!r}; it is for a Sweep, and `results` holds results.")
    keys = sweep_keys(results, "results")
    own = dict(zip(keys, results.values(), strict=True))
    kinds = {type(one).__name__ for one in own.values()}
    if len(kinds) != 1 or not isinstance(own[keys[0]], Result):
        raise LayersimError(
            f"`results` holds {', '.join(sorted(kinds)) or 'no results'}; it must hold results of one analyzer."
        )
    return own if isinstance(keys[0], str) else {key: own[key] for key in sorted(own)}


def _coupling(results: Mapping[Any, BlockCouplingResult], axis: Any, title: str, level: float) -> Figure:
    from ..reporting.style import BLUE, GREY, ORANGE
    from ..reporting.sweeps import Line, lines_over_keys

    series = (
        ("all pairs", lambda one: one.mean(), BLUE, "solid"),
        ("neighbours", lambda one: one.neighbours(), ORANGE, "solid"),
        ("random vectors", lambda one: one.mean("null_coupling"), GREY, "dash"),
    )
    lines = []
    for name, function, colour, dash in series:
        points = [field_number(result, function, None, {}, level) for result in results.values()]
        lines.append(Line(name, *_values_and_ends(points), colour, dash))
    return lines_over_keys(lines, axis, (title, "Coupling"), by_depth=False)


def _values_and_ends(points: list[FieldCurve]) -> tuple[list[float], list[float] | None, list[float] | None]:
    """Values and ends of intervals of single numbers; no ends where a point has none."""
    values = [float(point.values) for point in points]
    if any(point.low is None or point.high is None for point in points):
        return values, None, None
    return values, [float(point.low) for point in points], [float(point.high) for point in points]  # type: ignore[arg-type]


def _figure(curves: list[FieldCurve], axis: Any, over: str, titles: tuple[str, str]) -> Figure:
    from ..reporting.style import BLUE, ordered_colour
    from ..reporting.sweeps import heatmap_over_keys, lines_over_depth, lines_over_keys

    if not curves[0].sites:
        if over != "key":
            raise LayersimError(f'`over` is {over!r}; it must be "key" for a field that is one number for each model.')
        return lines_over_keys([_line_of("", [*curves], BLUE)], axis, titles, by_depth=False)
    if over == "depth":
        return lines_over_depth([(one.depth, one.sites, *_ends(one)) for one in curves], axis, titles)
    sites = [one.sites for one in curves]
    if over == "both":
        if any(own != sites[0] for own in sites):
            raise LayersimError(
                '`over` is "both", which needs models with the same layers; they have '
                f"{', '.join(str(len(own)) for own in sites)} sites."
            )
        return heatmap_over_keys([one.values.tolist() for one in curves], sites[0], axis, titles)
    names = dict.fromkeys(site for own in sites for site in own)
    lines = []
    for name in names:
        at = [own.index(name) if name in own else None for own in sites]
        depths = [one.depth[n] for one, n in zip(curves, at, strict=True) if n is not None]
        points = [_at_site(one, n) for one, n in zip(curves, at, strict=True)]
        lines.append(_line_of(name, points, ordered_colour(depths[0])))
    return lines_over_keys(lines, axis, titles, by_depth=True)


def _at_site(curve: FieldCurve, number: int | None) -> FieldCurve | None:
    """One site of a curve as a single number; None where the curve has no such site."""
    if number is None:
        return None
    low, high = (None if end is None else end[number] for end in (curve.low, curve.high))
    return FieldCurve((), (), curve.values[number], low, high, curve.words)


def _line_of(name: str, points: list[FieldCurve | None], colour: str) -> Any:
    from ..reporting.sweeps import Line

    nothing = float("nan")
    values = [nothing if one is None else float(one.values) for one in points]
    known = [one for one in points if one is not None]
    low: list[float] | None = None
    high: list[float] | None = None
    if all(one.low is not None for one in known):
        low, high = ([nothing if one is None else float(getattr(one, side)) for one in points] for side in ("low", "high"))
    return Line(name, values, low, high, colour, "solid")


def _ends(curve: FieldCurve) -> tuple[Any, Any, Any]:
    values, low, high = (None if end is None else end.tolist() for end in (curve.values, curve.low, curve.high))
    return values, low, high
