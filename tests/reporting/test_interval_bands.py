"""Intervals in figures: the ends that `Result.interval` gives, at the points that they belong to; and on the page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from plotly.colors import hex_to_rgb
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.core import Result, axes
from tl_layersim.core.intervals import headline_margins, headline_texts
from tl_layersim.reporting.lines_and_bars import Ends, add_band, hover_texts, interval_ends
from tl_layersim.reporting.style import ordered_colours

from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import assert_whiskers, bands, line_of, texts

BLOCKS = 5


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Shown(Result):
    """A field for each kind of figure."""

    values_name = "curve"
    values: Tensor = axes("residual")
    by_threshold: Tensor = axes("threshold")
    by_name: Tensor = axes("name")
    by_label: Tensor = axes("label")
    few: Tensor = axes("threshold", "layer")
    many: Tensor = axes("label", "layer")
    spectrum: Tensor = axes("layer", "direction")
    quantile: Tensor = axes("quantile", "residual")
    sublayer: Tensor = axes("sublayer", within=(-1, 1))
    wide_sublayer: Tensor = axes("sublayer")
    matrix: Tensor = axes("row", "column")
    thresholds: tuple[float, ...] = (0.2, 0.9)
    names: tuple[str, ...] = ("short", "long")
    labels: tuple[int, ...] = (9, 3, 7, 1, 8, 2)
    directions: tuple[int, ...] = (1, 2)
    quantiles: tuple[float, ...] = (0.1, 0.5, 0.8)
    sublayers: tuple[str, ...] = tuple(f"blocks.{i}.hook_{kind}_out" for i in range(3) for kind in ("attn", "mlp"))

    def baselines(self, field: str) -> dict[str, float]:
        return {"chance": 0.5} if field == "values" else {}

    def headline(self) -> dict[str, float]:
        return {"the first number": float(self.values[0]), "a count": 4.0 + self.values[1].numel()}


SIZES = {"residual": 4, "row": 4, "column": 4, "layer": 3, "threshold": 2, "name": 2, "label": 6, "direction": 2}
SIZES |= {"quantile": 3, "sublayer": 6}


def shown(seed: int, near: Shown | None = None) -> Shown:
    generator = torch.Generator().manual_seed(seed)
    fields = {}
    for name, own in Shown.tensor_fields().items():
        drawn = torch.rand([SIZES[axis] for axis in own], dtype=torch.float64, generator=generator)
        fields[name] = 0.3 + drawn / 2 if near is None else getattr(near, name) + drawn / 20
    if near is None:
        fields["wide_sublayer"][1] = 60.0
        # Near 0, so that the lower end is below 0.
        fields["wide_sublayer"][2] = 0.01
    layers = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3)))
    return Shown(layers=layers, provenance=provenance(), **fields)


@pytest.fixture(scope="module")
def result() -> Shown:
    whole = shown(0)
    return whole.with_replicates(tuple(shown(n, whole) for n in range(1, BLOCKS + 1)), (3, 4, 5, 4, 3))


@pytest.fixture(scope="module")
def plain(result) -> Shown:
    return replace(result, replicates=(), block_tokens=())


def ends_of(result: Result, what: Any) -> tuple[np.ndarray, np.ndarray]:
    _, low, high, _ = result.interval(what)
    assert bool((low < high).all())
    return low.numpy(), high.numpy()


def assert_band(band: Any, low: np.ndarray, high: np.ndarray, x: list[float]) -> None:
    """Forth along the upper ends, back along the lower ones."""
    assert list(band.x) == [*x, *x[::-1]]
    np.testing.assert_array_equal(np.array(band.y, dtype=float), [*high, *low[::-1]])
    assert band.showlegend is False
    assert band.hoverinfo == "skip"


@pytest.mark.parametrize(("field", "x"), [("curve", [0, 1, 2, 3]), ("by_threshold", [0.2, 0.9])])
def test_a_curve_has_a_band_below_its_line(result, field, x):
    fig = result.plot(field)
    low, high = ends_of(result, field)
    [band] = bands(fig)
    assert_band(band, low, high, x)
    # Drawn before the line, in its colour, nearly transparent.
    assert fig.data[0] is band
    assert band.fillcolor == "rgba(0, 114, 178, 0.16)"
    line = fig.data[1]
    assert line.legendgroup == band.legendgroup
    assert [own[1] for own in line.customdata] == texts(low, high)
    names = result.layers if field == "curve" else result.thresholds
    assert [own[0] for own in line.customdata] == list(names)
    assert line.hovertemplate.startswith("%{customdata[0]}<br>%{y:.4f}%{customdata[1]}<extra>")
    assert line.error_y.array is None


def test_the_baseline_of_a_curve_with_a_band_spans_the_curve(result):
    fig = result.plot("curve")
    assert list(line_of(fig, "chance: 0.5").x) == [0, 3]


@pytest.mark.parametrize("field", ["by_name", "by_label"])
def test_points_over_names_have_whiskers(result, field):
    fig = result.plot(field)
    low, high = ends_of(result, field)
    assert len(fig.data) == 1
    assert_whiskers(fig.data[0].error_y, getattr(result, field).numpy(), low, high)
    assert [own[1] for own in fig.data[0].customdata] == texts(low, high)
    assert list(fig.layout.xaxis.ticktext) == [str(name) for name in result.coordinates(field.removeprefix("by_"))]


def test_a_single_point_has_whiskers(result):
    cut = [replace(one, layers=one.layers[:1], **_first_only(one)) for one in (result, *result.replicates)]
    one = replace(cut[0], replicates=()).with_replicates(tuple(cut[1:]), result.block_tokens)
    fig = one.plot("curve")
    assert bands(fig) == []
    assert_whiskers(fig.data[0].error_y, one.values.numpy(), *ends_of(one, "curve"))


def _first_only(result: Shown) -> dict[str, Tensor]:
    own = {"values": result.values[:1], "quantile": result.quantile[:, :1], "matrix": result.matrix[:1, :1]}
    return own | {"few": result.few[:, :0], "many": result.many[:, :0], "spectrum": result.spectrum[:0]}


def test_each_of_a_few_series_has_its_band(result):
    fig = result.plot("few")
    low, high = ends_of(result, "few")
    for n, band in enumerate(bands(fig)):
        assert_band(band, low[n], high[n], [0, 1, 2])
        line = line_of(fig, f"threshold {result.thresholds[n]}")
        assert line.legendgroup == band.legendgroup
        assert [own[1] for own in line.customdata] == texts(low[n], high[n])
    # The lower threshold is darker, and each band has the colour of its line.
    colours = [line_of(fig, f"threshold {threshold}").line.color for threshold in result.thresholds]
    assert colours == ordered_colours(2)
    assert [band.fillcolor for band in bands(fig)] == [f"rgba{(*hex_to_rgb(colour), 0.16)}" for colour in colours]


def test_spectra_have_a_band_for_each_direction(result):
    fig = result.plot("spectrum")
    low, high = ends_of(result, "spectrum")
    assert fig.layout.yaxis.type == "log"
    assert len(bands(fig)) == 2
    for n, band in enumerate(bands(fig)):
        assert_band(band, low[:, n], high[:, n], [0, 1, 2])
        assert [own[1] for own in line_of(fig, f"direction {n + 1}").customdata] == texts(low[:, n], high[:, n])


def test_quantiles_are_bands_around_the_median_which_has_whiskers(result):
    fig = result.plot("quantile")
    low, high = ends_of(result, "quantile")
    assert bands(fig) == []
    lower, upper, median = fig.data
    assert (lower.fill, upper.fill, median.fill) == (None, "tonexty", None)
    for n, line in ((0, lower), (2, upper), (1, median)):
        np.testing.assert_array_equal(line.y, result.quantile[n].numpy())
        assert [own[1] for own in line.customdata] == texts(low[n], high[n])
    assert upper.error_y.array is None
    assert_whiskers(median.error_y, result.quantile[1].numpy(), low[1], high[1])


def test_sublayers_have_bands_in_their_colours(result):
    fig = result.plot("sublayer")
    low, high = ends_of(result, "sublayer")
    attention, mlp = bands(fig)
    assert_band(attention, low[::2], high[::2], [0, 1, 2])
    assert_band(mlp, low[1::2], high[1::2], [0, 1, 2])
    assert (attention.fillcolor, mlp.fillcolor) == ("rgba(0, 114, 178, 0.16)", "rgba(213, 94, 0, 0.16)")
    line = line_of(fig, "MLP")
    assert [tuple(own) for own in line.customdata] == list(
        zip(result.sublayers[1::2], texts(low[1::2], high[1::2]), strict=True)
    )
    assert (line.legendgroup, attention.legendgroup) == ("MLP", "Attention")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_sublayers_without_a_value_at_an_end_leave_the_names_of_the_others(result):
    """As a run over some blocks, of which the first has none."""
    values = result.sublayer.clone()
    values[:2] = torch.nan
    for one in (replace(result, sublayer=values), replace(result, sublayer=values, replicates=(), block_tokens=())):
        line = line_of(one.plot("sublayer"), "MLP")
        assert list(line.y) == values[3::2].tolist()
        assert [own if isinstance(own, str) else own[0] for own in line.customdata] == list(result.sublayers[3::2])


def test_a_lower_end_below_zero_is_cut_on_a_logarithmic_axis(result):
    fig = result.plot("wide_sublayer")
    low, high = ends_of(result, "wide_sublayer")
    assert fig.layout.yaxis.type == "log"
    assert low[2] < 0
    drawn = low.copy()
    drawn[2] = 0.005
    assert_band(bands(fig)[0], drawn[::2], high[::2], [0, 1, 2])
    assert_band(bands(fig)[1], low[1::2], high[1::2], [0, 1, 2])
    assert [own[1] for own in line_of(fig, "Attention").customdata] == texts(low[::2], high[::2])


def test_cells_of_heat_maps_name_their_intervals(result):
    low, high = ends_of(result, "matrix")
    heat = result.plot("matrix").data[0]
    for i, row in enumerate(heat.customdata):
        assert [cell[2] for cell in row] == texts(low[i], high[i])
        assert [tuple(cell[:2]) for cell in row] == [(result.layers[i], column) for column in result.layers]
    low, high = ends_of(result, "many")
    heat = result.plot("many").data[0]
    for i, row in enumerate(heat.customdata):
        assert [tuple(cell[1:]) for cell in row] == list(zip(result.layers[1:], texts(low[i], high[i]), strict=True))


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("field", ["curve", *list(Shown.tensor_fields())[1:]])
def test_without_intervals_a_figure_has_the_same_points_and_nothing_else(result, plain, field):
    own, other = (one.plot(field).to_plotly_json() for one in (result, plain))
    kept = [trace for trace in own["data"] if trace.get("fill") != "toself"]
    for trace, before in zip(kept, other["data"], strict=True):
        # Quantiles are filled and grouped without intervals too.
        assert not {"error_y"} & before.keys()
        assert field == "quantile" or not {"legendgroup", "fill"} & before.keys()
        assert "%{customdata[2]}" not in before.get("hovertemplate", "")
        assert " to " not in str(before.get("customdata"))
        # With intervals, the text at a point is that of a figure without them and the interval.
        names = trace.pop("customdata", None), before.pop("customdata", None)
        if names[1] is not None and field != "matrix":
            first = [[list(cell[:2]) for cell in row] for row in names[0]] if field == "many" else [row[0] for row in names[0]]
            assert first == [[list(cell) for cell in row] for row in names[1]] if field == "many" else first == list(names[1])
        for added in ("error_y", "legendgroup", "hovertemplate"):
            trace.pop(added, None)
        for added in ("legendgroup", "hovertemplate"):
            before.pop(added, None)
        assert str(trace) == str(before)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_single_block_draws_nothing(plain):
    one = replace(plain, block_tokens=(7,))
    fig = one.plot("curve")
    assert bands(fig) == []
    assert [own[1] for own in fig.data[0].customdata] == [""] * 4
    # A bar of length 0 would claim a value that is known exactly.
    bars = one.plot("by_name").data[0].error_y
    assert np.isnan(bars.array).all()
    assert np.isnan(bars.arrayminus).all()


def test_a_band_leaves_a_gap_where_an_end_is_unknown():
    import plotly.graph_objects as go

    low, high = np.array([1.0, 2, np.nan, 4, 5]), np.array([2.0, 3, 9, np.inf, 7])
    fig = go.Figure()
    add_band(fig, [0, 1, 2, 3, 4], Ends(low, high), "#010203")
    [band] = fig.data
    assert list(band.x) == [0, 1, 1, 0, None, 4, 4]
    assert list(band.y) == [2, 3, 2, 1, None, 7, 5]
    assert (band.fillcolor, band.line.color) == ("rgba(1, 2, 3, 0.16)", "rgba(1, 2, 3, 0.22)")
    assert hover_texts(Ends(low, high)).tolist() == [
        " (1.0000 to 2.0000)",
        " (2.0000 to 3.0000)",
        "",
        "",
        " (5.0000 to 7.0000)",
    ]


def test_the_page_says_what_the_intervals_are(result, plain, tmp_path):
    other = replace(plain, block_tokens=())
    page = lsim.Report({"one": result, "two": other}).to_html(tmp_path / "r.html").read_text()
    assert "5 contiguous blocks" in page
    margin = headline_margins(result)["the first number"]
    value = f"{float(result.values[0]):.4g} ± {margin:.2g}"
    found = result.interval(lambda one: one.values[0])
    assert margin == pytest.approx(float(found.high - found.low) / 2)
    assert f'<td class="number">{value}</td>' in page
    # A count has no interval.
    assert '<td class="number">5</td>' in page
    assert headline_texts(other) == {"the first number": f"{float(result.values[0]):.4g}", "a count": "5"}
    page = lsim.Report({"two": other}).to_html(tmp_path / "s.html").read_text()
    assert "±" not in page.split("<table>")[1].split("</table>")[0]


def test_a_margin_of_rounding_is_not_shown(plain):
    moved = tuple(replace(plain, values=plain.values * (1 + 1e-15 * n)) for n in range(BLOCKS))
    same = plain.with_replicates(moved, (1,) * BLOCKS)
    assert headline_margins(same)["the first number"] < 1e-12
    assert "±" not in headline_texts(same)["the first number"]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_field_without_interval_is_drawn_without():
    """p-values, and the mean that a first pass determines."""
    cka = lsim.CKA(minibatch=16, permutations=19)
    result = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(256, 8), batch_size=16), [cka], intervals=True)["cka"]
    assert interval_ends(result, "p_values") is None
    assert interval_ends(result, "calibrated") is not None
    assert result.plot("p_values").data[0].z is not None
    assert "p_values_low" not in result.to_frame("p_values")
    assert "calibrated_low" in result.to_frame("calibrated")
