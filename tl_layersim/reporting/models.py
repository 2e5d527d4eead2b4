"""Figures of many models: heat map of models by models, dendrogram, and means within and between groups."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from ..core.wording import equation, number_text, p_value_text
from .colour_scales import about_zero, scale_within
from .heat_map import HeatMapAxis, heat_map
from .interval_bands import Ends
from .lines import Series, lines
from .site_labels import quantity_with_unit
from .style import DARK, DASHES, GREY, PALETTE, SYMBOLS, styled, with_room_for_legend, with_subtitle

if TYPE_CHECKING:
    import xarray

# Distances of a model to itself are 0 up to this.
OWN_DISTANCE = 1e-9
# Longest names below a heat map of models that are not turned; most letters side by side below a dendrogram.
UPRIGHT, ACROSS = 2, 70


def clusters(distances: Any) -> Any:
    """Average linkage of models, `merge 4`, as `scipy.cluster.hierarchy.linkage` returns it.

    The distance of two models is the mean over both directions, each at least 0.

    Args:
        distances: `model model`, an array.
    """
    from scipy.cluster.hierarchy import linkage

    above = np.clip(distances, 0, None)
    both = (above + above.T) / 2
    return linkage(both[np.triu_indices(len(both), 1)], method="average", optimal_ordering=True)


def model_heatmap(grid: Any, title: str, quantity: str, ends: Ends | None = None) -> go.Figure:
    """Heat map of models by models, with similar models side by side. Names have the colours of their groups.

    Args:
        grid: a `ModelGrid`.
        title: of the figure.
        quantity: title of the colour bar.
        ends: of the intervals of the values; None without intervals.
    """
    from scipy.cluster.hierarchy import leaves_list

    values = grid.values.numpy()
    known = bool(np.isfinite(values[~np.eye(len(values), dtype=bool)]).all())
    order = leaves_list(clusters(values)) if known else np.arange(len(values))
    values, ends = values[order][:, order], ends and ends.at(np.ix_(order, order))
    names = tuple(grid.models[n] for n in order)
    groups = [grid.groups[n] for n in order] if grid.groups else []
    scale = about_zero(values) if np.nanmin(values) < -OWN_DISTANCE else scale_within(values, (-math.inf, math.inf))
    side = HeatMapAxis(names, "Model", list(names))
    fig = heat_map(values, (side, side), scale, (title, quantity), ends=ends, decimals=2)
    ticks = {"tickvals": list(range(len(names))), "ticktext": _coloured(names, groups)}
    fig.update_xaxes(tickangle=-90 if max(map(len, names)) > UPRIGHT else 0, **ticks).update_yaxes(**ticks)
    return styled(_with_groups(fig, groups), title)


def tree_of_models(array: xarray.DataArray, names: Sequence[str], groups: Sequence[str]) -> go.Figure:
    """Dendrogram of models. A link that joins models of one group has the colour of the group.

    Args:
        array: distances, `model model`, finite off the diagonal.
        names: of the models.
        groups: of the models, or none.
    """
    from scipy.cluster.hierarchy import dendrogram

    merges = clusters(array.values)
    below = [{group} for group in groups or [""] * len(names)]
    for first, second in merges[:, :2].astype(int):
        below.append(below[first] | below[second])
    colours = [_colours(groups).get("".join(one), GREY) if len(one) == 1 else GREY for one in below]
    drawn = dendrogram(merges, no_plot=True, link_color_func=lambda n: colours[n])
    fig = go.Figure()
    for x, y, colour in zip(drawn["icoord"], drawn["dcoord"], drawn["color_list"], strict=True):
        fig.add_scatter(x=x, y=y, mode="lines", line={"color": colour, "width": 2}, hoverinfo="y", showlegend=False)
    order = drawn["leaves"]
    ticktext = _coloured([names[n] for n in order], [groups[n] for n in order] if groups else [])
    # Leaves stand at 5, 15, 25, ...
    places = {"tickmode": "array", "tickvals": [10 * n + 5 for n in range(len(names))], "range": [0, 10 * len(names)]}
    turned = -45 if sum(len(name) + 2 for name in names) > ACROSS else 0
    fig.update_xaxes(title="Model", ticktext=ticktext, tickangle=turned, showgrid=False, **places)
    fig.update_yaxes(title=quantity_with_unit(array.attrs, "Distance"), rangemode="tozero")
    fig = styled(_with_groups(fig, groups), "Dendrogram of the models")
    return with_subtitle(fig, "directions below 0 count as 0" if bool((array < -OWN_DISTANCE).any()) else "")


def group_figure(found: xarray.Dataset) -> go.Figure:
    """Means within and between groups of models: lines over sites with bands, or points with whiskers, of one deviation.

    A comparison within a group has the colour of the group in other figures of the models, one between groups is dark or grey.

    Args:
        found: what `compare_groups` returns.
    """
    # The first two comparisons are of all groups together.
    found = found.isel(comparison=slice(2, None)).transpose("comparison", ...)
    names, firsts, seconds = (found[one].values.tolist() for one in ("comparison", "first_group", "second_group"))
    further = [str(dim) for dim in found["mean"].dims[1:]]
    mean, sd = found["mean"].values, found["sd"].fillna(0).values
    labels = tuple(map(str, found[further[0]].values)) if further else tuple(names)
    # A stitch point joins other layers in each model.
    joined = any("," in label for label in labels) and bool(further)
    if joined:
        labels = tuple(str(n + 1) for n in range(len(labels)))
    if not further:
        mean = np.where(np.eye(len(names), dtype=bool), mean, np.nan)
    colours, series, between = _colours(firsts + seconds), [], 0
    for n, name in enumerate(names):
        within = firsts[n] == seconds[n]
        between += not within
        colour, look = (colours[firsts[n]], 0) if within else ((DARK, GREY)[between % 2], between)
        dash, symbol = DASHES[look % len(DASHES)], SYMBOLS[look % len(SYMBOLS)]
        series.append(Series(html.escape(name), mean[n], Ends(mean[n] - sd[n], mean[n] + sd[n]), colour, symbol, dash))
    title = f"{found['mean'].attrs.get('long_name', 'Distance')} within and between groups"
    fig = lines(labels, series, title, quantity_with_unit(found["mean"].attrs, "Distance"), "site" if further else "comparison")
    fig.update_layout(showlegend=bool(further)).update_yaxes(rangemode="normal")
    if joined:
        fig.update_xaxes(title="Stitch point")
    if further:
        return with_subtitle(with_room_for_legend(fig), "Bands: standard deviation over pairs of models")
    p, drawn = equation("p", p_value_text(float(found["p_value"]))), "" if found.attrs["exact"] else "random "
    test = f"{float(found['difference']):.3g}, {html.escape(p)} ({found.attrs['relabelings']:,} {drawn}relabelings, "
    test += f"smallest possible {number_text(float(found['smallest_p']))})"
    return with_subtitle(fig, f"Whiskers: standard deviation over pairs of models. Difference of means {test}")


def _coloured(names: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Names in the colours of their groups."""
    colours = _colours(groups)
    shown = zip(map(html.escape, names), groups or [""] * len(names), strict=True)
    return [f'<span style="color:{colours[group]}">{name}</span>' if group in colours else name for name, group in shown]


def _colours(groups: Sequence[str]) -> dict[str, str]:
    """A colour for each group, by its place among the sorted groups."""
    return {group: PALETTE[n % len(PALETTE)] for n, group in enumerate(sorted(set(groups)))}


def _with_groups(fig: go.Figure, groups: Sequence[str]) -> go.Figure:
    """The figure with a legend of the groups, if there are any."""
    for group, colour in _colours(groups).items():
        marker = {"color": colour, "size": 10, "symbol": "square"}
        # Dark pages find by `meta` that these colours are those of tick labels, and change both.
        entry = {"name": html.escape(group), "marker": marker, "showlegend": True, "meta": "tick labels"}
        fig.add_scatter(x=[None], y=[None], mode="markers", **entry)
    # There is nothing that a click could hide.
    return fig.update_layout(showlegend=bool(groups), legend={"itemclick": False, "itemdoubleclick": False})
