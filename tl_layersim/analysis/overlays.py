"""`overlay`: one field of several runs in one figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.argument_checks import typed
from ..core.bounds import OpenFraction
from ..core.errors import LayersimError
from ..core.provenance import JOINT
from ..core.results import Report, Result, load
from ..core.wording import brief
from .relative_depth import SITE_AXES
from .sweep_curves import FieldCurve, field_curve, held_field
from .sweep_results import quantity_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
else:
    # plotly is imported when a figure is made: a check of the type at every call would import it first.
    Figure = Any


@typed
def overlay(
    runs: Mapping[Any, Any] | list[Any] | tuple[Any, ...],
    analyzer: str | None = None,
    field: str = "values",
    *,
    select: dict[str, Any] | None = None,
    title: str | None = None,
    level: OpenFraction = 0.95,
) -> Figure:
    """Draw one field of several runs in one figure: curves as lines with bands, matrices side by side with one colour scale.

    Runs with sites of the same names share an axis of sites; others are drawn over relative depth. A line is named after the
    model of its run, and after its file or its number where models have the same name. Bands are confidence intervals of runs
    with `intervals=True`.

    Args:
        runs: a list of reports, results, or paths of their files; or a mapping from names to these.
        analyzer: name of the analyzer in the reports; not for results.
        field: name of a tensor field over sites, or over pairs of sites.
        select: labels of further axes of the field by axis, as in `plot_sweep`. A label of one of two axes of sites makes
            a curve of a matrix.
        title: of the figure; by default that of the field.
        level: of the intervals of curves.

    Returns:
        A plotly figure.

    Raises:
        LayersimError: a run lacks the analyzer or the field, the runs are results of different classes, or the field is over
            no sites.

    Examples:
        >>> import tl_layersim as lsim
        >>> texts, measures = lsim.demo_text()[:4], [lsim.Cosine(), lsim.CKA()]
        >>> runs = {"standard": lsim.analyze(lsim.demo_model(), texts, measures)}
        >>> runs["aligned"] = lsim.analyze(lsim.demo_model(aligned=True), texts, measures)
        >>> figure = lsim.overlay(runs, "cosine", "to_last")
        >>> [line.name for line in figure.data], figure.layout.yaxis.title.text
        (['standard', 'aligned'], 'Cosine similarity')
        >>> len(lsim.overlay(runs, "cka").data)
        2
    """
    from ..reporting.interval_bands import Ends
    from ..reporting.overlays import RunCurve, overlaid_curves, overlaid_heatmaps

    results = _results(runs, analyzer)
    first = next(iter(results.values()))
    held, axes = held_field(first, field)
    shown = first.values_name if held == "values" else held
    quantity, note = quantity_of(first, shown), _data(list(results.values()))
    chosen = select or {}
    if len(axes) == 2 and not chosen and all(_over_sites(axis) for axis in axes):
        return overlaid_heatmaps(results, shown, axes, (title or _overlay_title(first, shown, ""), quantity), note)
    curves = {name: field_curve(result, shown, chosen, level) for name, result in results.items()}
    if not all(curve.sites for curve in curves.values()):
        known = ", ".join(_fields_over_sites(first)) or "none"
        raise LayersimError(
            f"`field` is {field!r}, which is not over sites; fields of {type(first).__name__} that are: {known}."
        )
    drawn = [
        RunCurve(name, one.sites, one.depth, one.values.numpy(), None if ends is None else Ends(*ends))
        for name, one in curves.items()
        for ends in (_interval_ends(one),)
    ]
    words = next(iter(curves.values())).words
    return overlaid_curves(drawn, title or _overlay_title(first, shown, words), quantity, note)


def _results(runs: Mapping[Any, Any] | Sequence[Any], analyzer: str | None) -> dict[str, Result]:
    """The results by the name of their run."""
    keys = [str(key) for key in runs] if isinstance(runs, Mapping) else []
    given = list(runs.values()) if isinstance(runs, Mapping) else list(runs)
    opened = [load(run) if isinstance(run, str | os.PathLike) else run for run in given]
    if analyzer is not None and opened and all(isinstance(run, Result) for run in opened):
        raise LayersimError(f"`analyzer` is {analyzer!r}; it is for reports, and `runs` holds results.")
    found = [_result(run, analyzer) for run in opened]
    kinds = dict.fromkeys(type(one).__name__ for one in found)
    if len(kinds) != 1:
        raise LayersimError(f"`runs` holds {', '.join(kinds) or 'no runs'}; it must hold runs of one analyzer.")
    return dict(zip(keys or _run_names(found, given), found, strict=True))


def _result(run: Any, analyzer: str | None) -> Result:
    """The result of one run."""
    if isinstance(run, Result):
        return run
    if not isinstance(run, Report):
        raise LayersimError(f"`runs` contains {brief(run)}; it must hold reports, results, or paths of their files.")
    if analyzer is None and len(run) == 1:
        [analyzer] = run
    if analyzer is None or analyzer not in run:
        raise LayersimError(
            f"`analyzer` is {analyzer!r}; it must be one of {', '.join(map(repr, run)) or 'none'}, the results of a report."
        )
    found: Result = run[analyzer]
    return found


def _run_names(results: list[Result], given: list[Any]) -> list[str]:
    """Names of runs: their models, with the file or the number of the run where models have the same name."""
    from ..reporting.style import model_name

    models = [" and ".join(model_name(part) for part in one.provenance.model.split(JOINT)) for one in results]
    files = [Path(run).name if isinstance(run, str | os.PathLike) else "" for run in given]
    names = []
    for n, (model, file) in enumerate(zip(models, files, strict=True)):
        alike = [m for m, other in enumerate(models) if other == model]
        known = file and [files[m] for m in alike].count(file) == 1
        names.append(model if len(alike) == 1 else f"{model} ({file if known else f'run {n + 1}'})")
    return names


def _fields_over_sites(result: Result) -> list[str]:
    fields = result.tensor_fields().items()
    return [
        result.values_name if name == "values" else name for name, axes in fields if any(_over_sites(axis) for axis in axes)
    ]


def _over_sites(axis: str) -> bool:
    return axis in (*SITE_AXES, "vision_layer", "text_layer", "other_vision_layer", "other_text_layer")


def _overlay_title(result: Result, field: str, words: str) -> str:
    """The title of the field's own figure, with what was taken of the field's other axes."""
    from ..reporting.figures import title_of

    return title_of(result, field).partition(" (")[0] + (f" ({words})" if words else "")


def _data(results: list[Result]) -> str:
    """On what the runs were made, in words."""
    tokens = [one.provenance.tokens for one in results]
    if len({one.provenance.data for one in results}) == 1:
        return f"the same {tokens[0]:,} tokens in every run"
    return f"different data: {', '.join(f'{number:,}' for number in tokens)} tokens"


def _interval_ends(curve: FieldCurve) -> tuple[Any, Any] | None:
    return None if curve.low is None or curve.high is None else (curve.low.numpy(), curve.high.numpy())
