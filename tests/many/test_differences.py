"""Differences of two runs, against naive loops and scipy."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray
from jaxtyping import Float64
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.core import LayerMatrix, Report, axes
from tl_layersim.core.report_tables import adjusted, is_symmetric
from tl_layersim.many.differences import at_depths, depths
from tl_layersim.reporting.difference_and_fit_figures import difference_figure

from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama
from ..oracles import skewness


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Measured(LayerMatrix):
    """A result with a matrix, a curve by block, a curve of quantiles and a number."""

    values: Float64[Tensor, "row column"] = axes("row", "column", within=(-1, 1))
    curve: Float64[Tensor, " layer"] = axes("layer")
    spread: Float64[Tensor, "quantile row"] = axes("quantile", "residual")
    number: Float64[Tensor, ""] = axes()
    fixed: Float64[Tensor, " row"] = axes("residual", within=None)
    unmeasured: Float64[Tensor, " row"] = axes("residual")
    quantiles: tuple[float, ...] = (0.1, 0.9)

    def distance(self) -> float:
        return float(self.values[0, -1]) ** 2

    def headline(self) -> dict[str, float]:
        return {"distance": self.distance(), f"first of {len(self.layers)}": float(self.curve[0]), "sites": 3.0}


def sites(count: int) -> tuple[str, ...]:
    return ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(count - 1)))


def measured(
    seed: int,
    blocks: int = 17,
    count: int = 4,
    data: str = "one",
    shift: float = 0.0,
    shared: float = 0.0,
    options: dict | None = None,
    tokens: tuple[int, ...] | None = None,
    **more,
) -> Measured:
    """A result whose replicates scatter at random, partly together with those of other results."""
    own, common = np.random.default_rng(seed), np.random.default_rng(99)
    about = dataclasses.replace(provenance(), data=data, options=options or {"minibatch": 4}, model=f"model-{seed}")

    def one(scatter: float) -> Measured:
        def draw(*shape: int) -> Tensor:
            jitter = own.normal(size=shape) + shared * common.normal(size=shape)
            return torch.tensor(0.3 + shift + scatter * jitter)

        matrix = draw(count, count)
        names = more.get("names", sites(count))
        return Measured(
            values=(matrix + matrix.T) / 2,
            curve=draw(count - 1),
            spread=draw(2, count),
            number=draw(),
            fixed=torch.zeros(count).double(),
            unmeasured=torch.full((count,), math.nan).double(),
            layers=names,
            column_layers=names,
            provenance=about,
            quantiles=more.get("quantiles", (0.1, 0.9)),
        )

    whole = one(0.0)
    each = tuple(one(0.01) for _ in range(blocks))
    return dataclasses.replace(whole, replicates=each, block_tokens=tokens or tuple(10 + j % 3 for j in range(blocks)))


def statistics(array: xarray.DataArray, *names: str) -> list[float]:
    """Some statistics of one entry."""
    return [array.sel(statistic=name).item() for name in names]


def naive_paired(first: Measured, second: Measured, read, level: float = 0.95):
    """Value, ends, standard error and p of one number, block by block."""
    g = len(first.replicates)
    value = read(second) - read(first)
    without = [read(second.replicates[j]) - read(first.replicates[j]) for j in range(g)]
    error, skew, effective = skewness.moments(without)
    ends = skewness.ends(value, error, g - 1, skew, effective, level)
    return value, *ends, error, skewness.p_value(value, error, g - 1, skew, effective)


ENDS = ("difference", "low", "high", "se", "p_value")


def test_a_paired_difference_is_the_jackknife_of_the_differences():
    first, second = measured(1, shared=3.0), measured(2, shift=0.02, shared=3.0)
    found = lsim.difference(first, second, level=0.9)
    assert found.attrs == {"first": "model-1", "second": "model-2", "paired": 1, "level": 0.9}
    for i, j in ((0, 0), (0, 3), (2, 1)):
        expected = naive_paired(first, second, lambda one, i=i, j=j: float(one.values[i, j]), level=0.9)
        cell = found["values"].isel(row=i, column=j)
        assert statistics(cell, *ENDS) == pytest.approx(expected, rel=1e-9)
        assert statistics(cell, "first", "second") == [float(first.values[i, j]), float(second.values[i, j])]
    expected = naive_paired(first, second, Measured.distance)
    distance = lsim.difference(first, second, Measured.distance)
    assert distance.dims == ("statistic",)
    assert statistics(distance, *ENDS) == pytest.approx(expected, rel=1e-9)
    # What both runs have in common cancels.
    assert statistics(distance, "se")[0] < float(second.interval(lambda one: one.distance()).error) / 2
    both = lsim.difference(first, second, lambda one: one.curve[:2])
    np.testing.assert_array_equal(both, lsim.difference(first, second)["curve"][:2].drop_vars("layer"))


def test_blocks_that_change_both_runs_alike_have_no_degree_of_freedom():
    first = measured(1)
    moved = [0.2 + 0.01 * (j + 1) * (-1) ** j * (j < 9) for j in range(17)]
    second = replace(
        first,
        number=first.number + 0.2,
        replicates=tuple(replace(one, number=one.number + by) for one, by in zip(first.replicates, moved, strict=True)),
    )
    found = lsim.difference(first, second)["number"]
    value, error, p = statistics(found, "difference", "se", "p_value")
    _, skew, effective = skewness.moments(moved, changed=9)
    assert p == pytest.approx(skewness.p_value(value, error, 8, skew, effective), rel=1e-6)


def test_an_unpaired_difference_is_welchs():
    first, second = measured(1, data="one", blocks=17), measured(2, data="other", blocks=25, shift=0.01)
    found = lsim.difference(first, second)
    assert found.attrs["paired"] == 0
    (a, skew_a, effective_a), (b, skew_b, effective_b) = (
        skewness.moments([float(one.curve[1]) for one in result.replicates]) for result in (first, second)
    )

    def welch(degrees_a: float, degrees_b: float) -> float:
        return (a**2 + b**2) ** 2 / (a**4 / degrees_a + b**4 / degrees_b)

    error = math.sqrt(a**2 + b**2)
    skew = (skew_b * b**3 - skew_a * a**3) / error**3
    value = float(second.curve[1] - first.curve[1])
    known = (value, error, welch(16, 24), skew, welch(effective_a, effective_b))
    expected = [value, *skewness.ends(*known), error, skewness.p_value(*known)]
    assert statistics(found["curve"][1], *ENDS) == pytest.approx(expected, rel=1e-9)


def scattered(scatter: float, texts: int, seed: int = 0, value: float = 0.5) -> Measured:
    """A result of so many texts of 10 tokens, whose replicates scatter about the value."""
    whole = measured(seed, blocks=16, data=f"data {seed} of {texts}")
    about = dataclasses.replace(whole.provenance, texts=texts, tokens=10 * texts)
    numbers = value + scatter * np.random.default_rng(seed).normal(size=16)
    each = tuple(
        replace(one, number=torch.tensor(x), provenance=about) for one, x in zip(whole.replicates, numbers, strict=True)
    )
    return replace(whole, number=torch.tensor(value).double(), replicates=each, provenance=about)


@pytest.mark.parametrize("turned", [False, True])
def test_the_smaller_of_two_samples_has_at_least_the_error_of_the_larger_one_for_as_many_texts(turned):
    few, many = scattered(0.001, 16), scattered(0.01, 256, seed=1)
    pair = (many, few) if turned else (few, many)
    own, other = (skewness.moments([float(one.number) for one in result.replicates])[0] for result in (few, many))
    assert own < 4 * other
    found = statistics(lsim.difference(*pair)["number"], "se")[0]
    assert found == pytest.approx(math.hypot(4 * other, other), rel=1e-9)
    # A larger error of its own is kept, and so are errors of equally many texts.
    varied = scattered(0.1, 16)
    own = skewness.moments([float(one.number) for one in varied.replicates])[0]
    assert statistics(lsim.difference(varied, many)["number"], "se")[0] == pytest.approx(math.hypot(own, other), rel=1e-9)
    alike = scattered(0.001, 256)
    own = skewness.moments([float(one.number) for one in alike.replicates])[0]
    assert statistics(lsim.difference(alike, many)["number"], "se")[0] == pytest.approx(math.hypot(own, other), rel=1e-9)


@pytest.mark.heavy("a simulation")
def test_few_skewed_texts_do_not_differ_from_many_of_their_kind():
    """Losses of 10 in 5 % of texts: in 44 % of samples of 16 texts none is seen."""
    rng = np.random.default_rng(0)

    def sample(texts: int) -> Measured:
        losses = np.where(rng.random(texts) < 0.05, 10.0, 0.5 + 0.1 * rng.normal(size=texts)).reshape(16, -1)
        means = (losses.sum() - losses.sum(1)) / (losses.size - losses.shape[1])
        found = scattered(1.0, texts)
        each = tuple(replace(one, number=torch.tensor(x)) for one, x in zip(found.replicates, means, strict=True))
        return replace(found, number=torch.tensor(losses.mean()), replicates=each)

    rejected = [statistics(lsim.difference(sample(16), sample(256))["number"], "p_value")[0] <= 0.05 for _ in range(40)]
    assert sum(rejected) <= 3


def test_runs_are_paired_only_on_the_same_data_in_the_same_blocks():
    one = measured(1)
    assert lsim.difference(one, measured(2)).attrs["paired"]
    assert not lsim.difference(one, measured(2, data="two")).attrs["paired"]
    with pytest.warns(UserWarning, match="batch_size="):
        assert not lsim.difference(one, measured(2, tokens=tuple(range(5, 22)))).attrs["paired"]
    with pytest.warns(UserWarning, match="17 and 20"):
        lsim.difference(one, measured(2, blocks=20))


def test_the_table_has_a_variable_for_each_field_that_can_be_compared(tmp_path):
    first, second = measured(1), measured(2, shift=0.004)
    found = lsim.difference(first, second)
    assert {name: array.dims[:-1] for name, array in found.items()} == {
        "values": ("row", "column"),
        "curve": ("layer",),
        "spread": ("quantile", "residual"),
        "number": (),
        "headline": ("quantity",),
    }
    assert found["row"].values.tolist() == list(first.layers)
    assert found["curve"].attrs["long_name"] == "Curve"
    np.testing.assert_array_equal(
        found["values"].sel(statistic="difference"),
        found["values"].sel(statistic="second") - found["values"].sel(statistic="first"),
    )
    # Ten different entries of a symmetric matrix of 4 x 4.
    p, corrected = (found["values"].sel(statistic=name).values for name in ("p_value", "p_adjusted"))
    assert corrected.min() == pytest.approx(min(1, 10 * p.min()))
    np.testing.assert_array_equal(corrected, corrected.T)
    table = found["headline"].to_pandas()
    assert table.index.tolist() == ["distance", "first of 4", "sites"]
    assert table.loc["distance", ["first", "second", "difference"]].tolist() == pytest.approx([0.09, 0.304**2, 0.304**2 - 0.09])
    assert table["p_adjusted"].isna().tolist() == [False, False, True]
    found.to_netcdf(tmp_path / "x.nc")
    xarray.testing.assert_identical(xarray.load_dataset(tmp_path / "x.nc"), found)
    # Other labels, and headline numbers of only one of the two, are left out.
    assert "spread" not in lsim.difference(first, measured(2, quantiles=(0.2, 0.8)))
    deeper = lsim.difference(first, measured(2, count=6), relative_depth=True)
    assert deeper["quantity"].values.tolist() == ["distance", "sites"]


def test_p_values_are_corrected_as_by_hand():
    p = torch.tensor([0.01, 0.04, math.nan, 0.03]).double()
    # Holm: the smallest times 3, the next times 2, never below the one first.
    assert adjusted([(p, False)], "holm")[0].tolist() == pytest.approx([0.03, 0.06, math.nan, 0.06], nan_ok=True)
    assert adjusted([(p, False)], "fdr_bh")[0].tolist() == pytest.approx([0.03, 0.04, math.nan, 0.04], nan_ok=True)
    assert adjusted([(p * math.nan, False)], "holm")[0].isnan().all()
    square = torch.tensor([[0.01, 0.02], [0.02, math.nan]]).double()
    assert adjusted([(square, True)], "holm")[0].tolist() == [
        pytest.approx([0.02, 0.02]),
        pytest.approx([0.02, math.nan], nan_ok=True),
    ]
    other = torch.tensor([[0.01, 0.02], [0.03, 0.5]]).double()
    assert adjusted([(other, False)], "holm")[0][0, 0] == pytest.approx(0.04)


def test_halves_of_a_measure_that_is_symmetric_but_for_rounding_count_once():
    noise = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-10
    values = torch.tensor([[1, 0.3, 0.5, 0.2], [0.3, 1, 0.4, 0.1], [0.5, 0.4, 1, 0.6], [0.2, 0.1, 0.6, 1]]).double()
    assert is_symmetric(values + noise)
    assert not is_symmetric(values + 1e4 * noise)
    p = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 50
    found = adjusted([(p, True)], "holm")[0]
    np.testing.assert_allclose(
        found[p.triu(1) > 0], adjusted([(p.where(p.triu() > 0, math.nan), False)], "holm")[0][p.triu(1) > 0]
    )
    assert bool((found == found.T).all())


def test_entries_that_are_zero_but_for_rounding_are_symmetric():
    def rounded(one):
        values = one.values.clone()
        values[0, 1], values[1, 0] = 1e-17, -1e-17
        return replace(one, values=values)

    found = lsim.difference(rounded(measured(1)), rounded(measured(2, shift=0.3)))["values"]
    p, corrected = (found.sel(statistic=name).values for name in ("p_value", "p_adjusted"))
    # Of 10 pairs of layers, with themselves and with one another.
    assert corrected.min() == pytest.approx(10 * p.min(), rel=1e-9)


def test_what_no_block_changes_has_no_p_value():
    one = measured(1)
    found = lsim.difference(one, one)["values"]
    assert bool(found.sel(statistic=["p_value", "p_adjusted"]).isnull().all())
    assert bool((found.sel(statistic=["difference", "low", "high", "se"]) == 0).all())


def test_rounding_is_no_finding():
    """As on the diagonal of a similarity, which is 1 up to the last bit."""
    one = measured(1)
    up = [replace(each, values=each.values * (1 + 2**-52)) for each in (one, *one.replicates)]
    other = replace(up[0], replicates=tuple(up[1:]))
    assert not torch.equal(other.values, one.values)
    found = lsim.difference(one, other)["values"]
    assert bool((found.sel(statistic="difference") == 0).all())
    assert bool(found.sel(statistic="p_value").isnull().all())


def test_values_are_interpolated_at_relative_depths():
    values = torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0, 25.0]).double()
    expected = np.interp(np.arange(4) / 3, np.arange(6) / 5, values)
    np.testing.assert_allclose(at_depths(values, 0, 6, 4, "residual"), expected)
    # A curve by block begins second the first block: at 1/5 and 1/3.
    expected = np.interp(np.arange(1, 4) / 3, np.arange(1, 6) / 5, values[1:])
    np.testing.assert_allclose(at_depths(values[1:], 0, 6, 4, "layer"), expected)
    assert depths(4, "layer") == pytest.approx((1 / 3, 2 / 3, 1))
    assert depths(1, "residual") == (0.0,)
    # Where both models have a site, its neighbours do not matter.
    holes = torch.tensor([[0.0, math.nan, 2.0, math.inf, 4.0]]).double()
    assert at_depths(holes, 1, 5, 3, "row").tolist() == [[0.0, 2.0, 4.0]]
    assert at_depths(values, 0, 6, 6, "row") is values


@pytest.mark.parametrize("turned", [False, True])
def test_models_of_other_depths_are_compared_on_a_common_grid(turned):
    pair = [measured(1, count=4), measured(2, count=6, shift=0.02)]
    first, second = pair[::-1] if turned else pair
    found = lsim.difference(first, second, relative_depth=True)

    def grid(one: Measured) -> np.ndarray:
        """The matrix at depths 0, 1/3, 2/3 and 1, row by row and then column by column."""
        places, own = np.arange(4) / 3, np.linspace(0, 1, len(one.layers))
        rows = np.stack([np.interp(places, own, column) for column in one.values.numpy().T], axis=1)
        return np.stack([np.interp(places, own, row) for row in rows])

    for i, j in ((0, 3), (1, 2)):
        expected = naive_paired(first, second, lambda one, i=i, j=j: float(grid(one)[i, j]))
        assert statistics(found["values"].isel(row=i, column=j), *ENDS) == pytest.approx(expected, rel=1e-9)
    assert found["row"].values.tolist() == found["column"].values.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert found["layer"].values.tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    # A function receives the results as they were measured.
    shapes = []
    lsim.difference(first, second, lambda one: shapes.append(one.values.shape) or one.distance(), relative_depth=True)
    assert {(4, 4), (6, 6)} == set(shapes)


def test_what_cannot_be_compared_is_refused():
    one, deep = measured(1), measured(2, count=6)
    plain = dataclasses.replace(one, replicates=(), block_tokens=())
    matrix = LayerMatrix(
        values=one.values, layers=one.layers, column_layers=one.layers, provenance=one.provenance,
        replicates=one.replicates, block_tokens=one.block_tokens,
    )  # fmt: skip
    columns = dataclasses.replace(measured(2), column_layers=tuple(f"other.{name}" for name in sites(4)))
    for first, second, options, match in (
        (one, deep, {}, "model-1: 4 from.*model-2: 6 from.*relative_depth=True"),
        (one, columns, {}, "`first`.*`second`"),
        (plain, one, {}, "intervals=True"),
        (one, plain, {}, "intervals=True"),
        (Report({"a": plain}), Report({"a": plain}), {}, "intervals=True"),
        (one, matrix, {}, "`first`.*Measured.*`second`.*LayerMatrix"),
        (Report({"a": one}), one, {}, "`first`.*`second`"),
        (one, Report({"a": one}), {}, "`first`.*`second`"),
        (Report({"a": one}), Report({"a": one}), {"what": Measured.distance}, "`what`"),
        (Report({"a": one}), Report({"a": matrix}), {}, "`first` and `second`.*'a'.*LayerMatrix"),
        (Report({"a": one}), Report({"b": measured(2)}), {}, "`first` and `second`.*`first` has a,.*`second` has b"),
        (one, deep, {"what": lambda own: own.values, "relative_depth": True}, r"`what`.*\(4, 4\) and \(6, 6\)"),
        (one, one, {"level": 0.0}, "`level`"),
        (one, one, {"level": 1.0}, "`level`"),
        (one, one, {"adjust": "bonferroni"}, "`adjust`"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(lsim.LayersimError, match=match):
                lsim.difference(first, second, **options)


def test_options_that_differ_are_named():
    with pytest.warns(UserWarning, match=r"minibatch \(4 and 8\), seed \(None and 1\)"):
        lsim.difference(measured(1), measured(2, options={"minibatch": 8, "seed": 1, "tokenizer": "x"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lsim.difference(measured(1), measured(2, options={"minibatch": 4, "tokenizer": "x", "own_bos": 3}))


def test_reports_are_compared_analyzer_by_analyzer():
    plain = dataclasses.replace(measured(5), replicates=(), block_tokens=())
    first = Report({"a": measured(1), "b": measured(3), "c": measured(4), "d": plain})
    second = Report({"b": measured(2, shift=0.02), "a": measured(6), "e": measured(7), "d": measured(8)})
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        found = lsim.difference(first, second)
    assert list(found) == ["a", "b"]
    messages = " ".join(str(one.message) for one in record)
    assert "'c', 'e'" in messages
    assert ": 'd'" in messages
    own = lsim.difference(first["b"], second["b"])
    xarray.testing.assert_identical(found["b"].to_dataset().drop_vars("headline"), own.drop_vars("headline"))
    # Headline numbers of all results are corrected together.
    p, corrected = (
        np.concatenate([found[name]["headline"].sel(statistic=which).values for name in "ab"])
        for which in ("p_value", "p_adjusted")
    )
    known = ~np.isnan(p)
    np.testing.assert_array_equal(corrected[known], adjusted([(torch.tensor(p[known]), False)], "holm")[0])


def test_figures_show_the_difference_and_where_it_is_certain():
    first, second = measured(1), measured(2, shift=0.9)
    found = lsim.difference(first, second, level=0.9)
    [heat] = difference_figure(found["values"]).data
    np.testing.assert_array_equal(np.array(heat.z), found["values"].sel(statistic="difference"))
    assert heat.zmin == -heat.zmax
    assert all("•" in text and "0.9" in text for text in np.array(heat.text).flatten())
    # Equal cells have neither a number nor a colour.
    [same] = difference_figure(lsim.difference(first, first)["values"]).data
    assert set(np.array(same.text).flatten()) == {""}
    assert np.isnan(np.array(same.z)).all()
    band, line = difference_figure(found["curve"]).data
    np.testing.assert_array_equal(line.y, found["curve"].sel(statistic="difference"))
    ends = [found["curve"].sel(statistic=name).values for name in ("low", "high")]
    np.testing.assert_array_equal(band.y, [*ends[1], *ends[0][::-1]])
    assert len(difference_figure(found["spread"]).data) == 4
    deep = difference_figure(lsim.difference(first, measured(2, count=6), relative_depth=True)["values"])
    assert deep.layout.xaxis.ticktext == ("0.00", "0.33", "0.67", "1.00")
    titles = [
        difference_figure(lsim.difference(first, measured(2, count=count), relative_depth=count > 4)["curve"]).layout.title.text
        for count in (4, 6)
    ]
    assert titles[0] == titles[1]
    with pytest.raises(lsim.LayersimError, match="'number' has 0 axes"):
        difference_figure(found["number"])


@pytest.mark.heavy("many runs")
def test_five_lines_have_the_bands_that_the_subtitle_names(llama):
    data = lsim.Data(random_tokens(20, 8), batch_size=1)
    first, second = (lsim.analyze(one, data, lsim.Cosine(), intervals=True)["cosine"] for one in (llama, tiny_llama(seed=1)))
    fig = difference_figure(lsim.difference(first, second)["to_last"])
    assert len(fig.data) == 10
    assert [trace.fill for trace in fig.data] == ["toself"] * 5 + [None] * 5
    assert "band" in fig.layout.title.subtitle.text


def test_dots_are_of_corrected_p_values():
    found = lsim.difference(measured(1), measured(2, shift=0.12))["values"]
    p, corrected = (found.sel(statistic=name).values for name in ("p_value", "p_adjusted"))
    assert ((p < 0.05) & (corrected >= 0.05)).any()
    [heat] = difference_figure(found).data
    assert [["•" in text for text in row] for row in heat.text] == (corrected < 0.05).tolist()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_two_models_on_the_same_texts_are_paired():
    data = [random_tokens(1, 8 + i % 5, seed=i)[0] for i in range(272)]
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16), lsim.LogitLens()]
    runs = [lsim.analyze(tiny_llama(seed=seed), lsim.Data(data, batch_size=16), analyzers, intervals=True) for seed in (0, 1)]
    found = lsim.difference(*runs)
    assert list(found) == ["cosine", "cka", "logit_lens"]
    assert all(one.attrs["paired"] for one in found.values())
    assert np.isnan(found["cosine"]["values"].sel(statistic="p_value").values.diagonal()).all()
    replicates = torch.stack(
        [b.entropy - a.entropy for a, b in zip(*(run["logit_lens"].replicates for run in runs), strict=True)]
    )
    error = ((replicates - replicates.mean(0)) ** 2).sum(0).mul(16 / 17).sqrt()
    np.testing.assert_allclose(found["logit_lens"]["entropy"].sel(statistic="se"), error, rtol=1e-9)
