"""Differences of two runs, against naive loops and scipy."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from jaxtyping import Float64
from scipy import stats
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.analysis.relative_depth import at_depths, depths
from tl_layersim.core import LayerMatrix, Report, axes
from tl_layersim.core.p_values import adjusted
from tl_layersim.core.wording import MEANING_OF_MARGINS, equation, p_value_text

from ..tiny_models import random_tokens, tiny_llama
from ..views import provenance

pytestmark = pytest.mark.filterwarnings("ignore:CKA (rests|is dominated).*:UserWarning")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Measured(LayerMatrix):
    """A result with a matrix, a curve by block, a curve of quantiles and a number."""

    values: Float64[Tensor, "row column"] = axes("row", "column", within=(-1, 1))
    curve: Float64[Tensor, " layer"] = axes("layer")
    spread: Float64[Tensor, "quantile row"] = axes("quantile", "residual")
    number: Float64[Tensor, ""] = axes()
    fixed: Float64[Tensor, " row"] = axes("residual", within=None)
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
            layers=names,
            column_layers=names,
            provenance=about,
            quantiles=more.get("quantiles", (0.1, 0.9)),
        )

    whole = one(0.0)
    each = tuple(one(0.01) for _ in range(blocks))
    return dataclasses.replace(whole, replicates=each, block_tokens=tokens or tuple(10 + j % 3 for j in range(blocks)))


def naive_paired(first: Measured, second: Measured, read, level: float = 0.95):
    """Value, ends, error and p of one number, block by block."""
    g = len(first.replicates)
    value, total = read(second) - read(first), 0.0
    without = [read(second.replicates[j]) - read(first.replicates[j]) for j in range(g)]
    for one in without:
        total += (one - sum(without) / g) ** 2
    error = math.sqrt((g - 1) / g * total)
    t = stats.t(g - 1)
    return value, value - t.ppf((1 + level) / 2) * error, value + t.ppf((1 + level) / 2) * error, 2 * t.sf(abs(value) / error)


def test_a_paired_difference_is_the_jackknife_of_the_differences():
    first, second = measured(1, shared=3.0), measured(2, shift=0.02, shared=3.0)
    found = lsim.difference(first, second)
    assert found.paired
    for i, j in ((0, 0), (0, 3), (2, 1)):
        expected = naive_paired(first, second, lambda one, i=i, j=j: float(one.values[i, j]), level=0.9)
        ends = found.interval("values", level=0.9)
        assert [float(end[i, j]) for end in ends[:3]] == pytest.approx(expected[:3], rel=1e-9)
        assert float(found.p_value("values")[i, j]) == pytest.approx(expected[3], rel=1e-9)
    expected = naive_paired(first, second, Measured.distance)
    ends = found.interval(lambda one: one.distance())
    assert [float(end) for end in ends[:3]] == pytest.approx(expected[:3], rel=1e-9)
    assert float(found.p_value(lambda one: one.distance())) == pytest.approx(expected[3], rel=1e-9)
    # What both runs have in common cancels.
    assert float(ends.error) < float(second.interval(lambda one: one.distance()).error) / 2


def test_an_unpaired_difference_is_welchs():
    first, second = measured(1, data="one", blocks=17), measured(2, data="other", blocks=25, shift=0.01)
    found = lsim.difference(first, second)
    assert not found.paired
    a, b = (float(result.interval("curve").error[1]) for result in (first, second))
    degrees = (a**2 + b**2) ** 2 / (a**4 / 16 + b**4 / 24)
    error = math.sqrt(a**2 + b**2)
    value = float(second.curve[1] - first.curve[1])
    ends = found.interval("curve")
    assert float(ends.error[1]) == pytest.approx(error, rel=1e-12)
    margin = stats.t.ppf(0.975, degrees) * error
    assert [float(end[1]) for end in ends[:3]] == pytest.approx([value, value - margin, value + margin], rel=1e-9)
    assert float(found.p_value("curve")[1]) == pytest.approx(2 * stats.t.sf(abs(value) / error, degrees), rel=1e-9)


def test_runs_are_paired_only_on_the_same_data_in_the_same_blocks():
    one = measured(1)
    assert lsim.difference(one, measured(2)).paired
    assert not lsim.difference(one, measured(2, data="two")).paired
    with pytest.warns(UserWarning, match=r"in other blocks.*Pass the same batch_size="):
        assert not lsim.difference(one, measured(2, tokens=tuple(range(5, 22)))).paired
    with pytest.warns(UserWarning, match="17 and 20"):
        lsim.difference(one, measured(2, blocks=20))


def test_a_table_has_a_line_for_each_entry():
    first, second = measured(1), measured(2, shift=0.004)
    found = lsim.difference(first, second)
    table = found.to_frame("values", level=0.9)
    names = ["row_layer", "column_layer", "first", "second", "difference", "low", "high", "p_value", "p_adjusted"]
    assert list(table.columns) == names
    assert table["row_layer"].cat.categories.tolist() == list(first.layers)
    ends = found.interval("values", level=0.9)
    np.testing.assert_array_equal(table["low"], ends.low.flatten())
    np.testing.assert_array_equal(table["high"], ends.high.flatten())
    np.testing.assert_array_equal(table["difference"], table["second"] - table["first"])
    np.testing.assert_array_equal(table["p_value"], found.p_value().flatten())
    assert list(found.to_frame("spread").columns[:2]) == ["quantile", "layer"]
    assert len(found.to_frame("number")) == 1
    # Ten different entries of a symmetric matrix of 4 x 4.
    p = table["p_value"].to_numpy()
    assert table["p_adjusted"].min() == pytest.approx(min(1, 10 * p.min()))


def test_p_values_are_corrected_as_by_hand():
    p = torch.tensor([0.01, 0.04, math.nan, 0.03]).double()
    # Holm: the smallest times 3, the next times 2, never below the one first.
    assert adjusted(p, "holm").tolist() == pytest.approx([0.03, 0.06, math.nan, 0.06], nan_ok=True)
    assert adjusted(p, "fdr_bh").tolist() == pytest.approx([0.03, 0.04, math.nan, 0.04], nan_ok=True)
    assert adjusted(p * math.nan, "holm").isnan().all()
    square = torch.tensor([[0.01, 0.02], [0.02, math.nan]]).double()
    assert adjusted(square, "holm").tolist() == [pytest.approx([0.02, 0.02]), pytest.approx([0.02, math.nan], nan_ok=True)]
    other = torch.tensor([[0.01, 0.02], [0.03, 0.5]]).double()
    assert adjusted(other, "holm")[0, 0] == pytest.approx(0.04)
    with pytest.raises(lsim.LayersimError, match="adjust"):
        lsim.difference(measured(1), measured(2)).to_frame(adjust="bonferroni")


def test_what_no_block_changes_has_no_p_value():
    one = measured(1)
    found = lsim.difference(one, one)
    assert found.p_value().isnan().all()
    assert found.interval().low.eq(0).all()
    assert found.to_frame()["p_adjusted"].isna().all()


def test_rounding_is_no_finding():
    """As on the diagonal of a similarity, which is 1 up to the last bit."""
    one = measured(1)
    up = [replace(each, values=each.values * (1 + 2**-52)) for each in (one, *one.replicates)]
    other = replace(up[0], replicates=tuple(up[1:]))
    assert not torch.equal(other.values, one.values)
    found = lsim.difference(one, other)
    assert found.interval().value.eq(0).all()
    assert found.p_value().isnan().all()


def test_other_sites_are_refused_unless_relative_depth_is_asked_for():
    first, second = measured(1, count=4), measured(2, count=6)
    with pytest.raises(lsim.LayersimError, match=r"`first`.*`second`") as refusal:
        lsim.difference(first, second)
    assert "model-1: 4 from" in str(refusal.value)
    assert "model-2: 6 from" in str(refusal.value)
    assert "relative_depth=True" in str(refusal.value)
    columns = tuple(f"other.{name}" for name in sites(4))
    with pytest.raises(lsim.LayersimError, match=r"`first`.*`second`"):
        lsim.difference(first, dataclasses.replace(measured(2), column_layers=columns))


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
    with pytest.raises(lsim.LayersimError, match="single site"):
        at_depths(values, 0, 6, 1, "row")


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
        assert [float(end[i, j]) for end in found.interval()[:3]] == pytest.approx(expected[:3], rel=1e-9)
    table = found.to_frame()
    assert list(table.columns[:2]) == ["row_depth", "column_depth"]
    assert sorted(set(table["row_depth"])) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert list(found.to_frame("curve").columns[:1]) == ["depth"]
    assert found.to_frame("curve")["depth"].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    # A function receives the results as they were measured.
    shapes = []
    found.interval(lambda one: shapes.append(one.values.shape) or one.distance())
    assert {(4, 4), (6, 6)} == set(shapes)
    with pytest.raises(lsim.LayersimError, match=r"`what`.*\(., .\) and \(., .\)"):
        found.interval(lambda one: one.values)


def test_other_labels_and_fields_are_refused():
    first, second = measured(1), measured(2, quantiles=(0.2, 0.8))
    found = lsim.difference(first, second)
    with pytest.raises(lsim.LayersimError, match=r"`spread`.*'quantile'"):
        found.interval("spread")
    with pytest.raises(lsim.LayersimError, match="no tensor field 'spred'"):
        found.p_value("spred")
    with pytest.raises(lsim.LayersimError, match=r"^Measured\.fixed "):
        found.to_frame("fixed")
    for wrong in (0.0, 1.0):
        with pytest.raises(lsim.LayersimError, match="`level`"):
            found.interval(level=wrong)
        with pytest.raises(lsim.LayersimError, match="`level`"):
            found.to_frame(level=wrong)


def test_results_without_blocks_or_of_other_classes_are_refused():
    one = measured(1)
    plain = dataclasses.replace(one, replicates=(), block_tokens=())
    for pair in ((plain, one), (one, plain)):
        with pytest.raises(lsim.LayersimError, match="intervals=True"):
            lsim.difference(*pair)
    matrix = LayerMatrix(
        values=one.values, layers=one.layers, column_layers=one.layers, provenance=one.provenance,
        replicates=one.replicates, block_tokens=one.block_tokens,
    )  # fmt: skip
    for pair in ((one, matrix), (Report({"a": one}), one), (one, Report({"a": one}))):
        with pytest.raises(lsim.LayersimError, match=r"`first`.*`second`"):
            lsim.difference(*pair)
    with pytest.raises(lsim.LayersimError, match=r"`first`.*`second`.*LayerMatrix"):
        lsim.difference(Report({"a": one}), Report({"a": matrix}))


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
    assert len(found) == 2
    messages = " ".join(str(one.message) for one in record)
    assert "Only one of the two reports has 'c', 'e'" in messages
    assert "Results without intervals are left out of the difference: 'd'" in messages
    assert found["b"].interval().value.equal(lsim.difference(first["b"], second["b"]).interval().value)
    table = found.summary()
    assert table["analyzer"].tolist() == ["a"] * 3 + ["b"] * 3
    assert table["quantity"].tolist()[:3] == ["distance", "first of 4", "sites"]
    p = table["p_value"].dropna()
    assert table["p_adjusted"].min() == pytest.approx(min(1, len(p) * p.min()))
    assert table["p_adjusted"].isna().tolist() == [False, False, True] * 2
    text = repr(found)
    assert "model-6 minus model-1, paired" in text
    printed = [float(line.split("(p = ")[1].rstrip(")")) for line in text.splitlines() if "(p = " in line]
    assert printed == [float(f"{own:.2g}") for own in table["p_adjusted"].dropna() if own >= 1e-4]
    assert text.count("(p < 0.0001)") == len(p) - len(printed)
    assert "  b: distance: 0.09 -> 0.1024, +0.0124 ± " in text
    assert "  a: sites: 3 -> 3, +0" in text.splitlines()
    with pytest.raises(lsim.LayersimError, match=r"`first` and `second`.*a; b"):
        lsim.difference(Report({"a": measured(1)}), Report({"b": measured(2)}))
    with pytest.raises(lsim.LayersimError, match="intervals=True"):
        lsim.difference(Report({"a": plain}), Report({"a": plain}))


def test_the_text_of_a_difference_names_models_and_headlines():
    found = lsim.difference(measured(1), measured(2, data="two", blocks=20, shift=0.02))
    line_of_models, distance = repr(found).splitlines()[:2]
    title, meaning, _ = line_of_models.split("; ")
    assert title == "Difference(Measured, model-2 minus model-1, unpaired, 17 and 20 blocks)"
    assert meaning == MEANING_OF_MARGINS
    ends = found.interval(lambda one: one.distance())
    # Holm over the two numbers with a margin.
    p = found.summary()["p_value"].dropna().tolist()
    own = float(found.p_value(Measured.distance))
    assert len(p) == 2
    assert p[0] == pytest.approx(own)
    expected = min(1.0, 2 * own) if own == min(p) else max(own, min(1.0, 2 * min(p)))
    assert f"± {float(ends.high - ends.low) / 2:.2g} ({equation('p', p_value_text(expected))})" in distance
    assert "paired over 17 blocks" in repr(lsim.difference(measured(1), measured(2)))
    line = found.summary().iloc[0]
    assert [line[name] for name in ("first", "second", "difference")] == pytest.approx([0.09, 0.1024, 0.0124])
    assert [line["low"], line["high"]] == pytest.approx([float(ends.low), float(ends.high)])
    # Headline numbers of only one of the two are left out.
    deeper = lsim.difference(measured(1), measured(2, count=6), relative_depth=True)
    assert deeper.summary()["quantity"].tolist() == ["distance", "sites"]


def test_figures_show_the_difference_and_where_it_is_certain():
    first, second = measured(1), measured(2, shift=0.9)
    found = lsim.difference(first, second)
    heat = found.plot("values").data[0]
    np.testing.assert_array_equal(np.array(heat.z), found.interval().value)
    assert heat.zmin == -heat.zmax
    assert all(">•<" in text for text in np.array(heat.text).flatten())
    assert set(np.array(lsim.difference(first, first).plot().data[0].text).flatten()) == {""}
    high, low, line = found.plot("curve", level=0.9).data
    ends = found.interval("curve", level=0.9)
    for trace, end in zip((line, low, high), ends[:3], strict=True):
        np.testing.assert_array_equal(trace.y, end)
    assert len(found.plot("spread").data) == 6
    deep = lsim.difference(first, measured(2, count=6), relative_depth=True).plot("values")
    assert deep.layout.xaxis.ticktext == ("0.00", "0.33", "0.67", "1.00")
    with pytest.raises(lsim.LayersimError, match=r"`field`.*0 axes"):
        found.plot("number")


def test_two_models_on_the_same_texts_are_paired():
    data = [random_tokens(1, 8 + i % 5, seed=i)[0] for i in range(272)]
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16), lsim.LogitLens()]
    runs = [lsim.analyze(tiny_llama(seed=seed), lsim.Data(data, batch_size=16), analyzers, intervals=True) for seed in (0, 1)]
    found = lsim.difference(*runs)
    assert list(found) == ["cosine", "cka", "logit_lens"]
    assert all(one.paired for one in found.values())
    assert found["cosine"].p_value().diagonal().isnan().all()
    ends = found["logit_lens"].interval("entropy")
    replicates = torch.stack(
        [b.entropy - a.entropy for a, b in zip(*(run["logit_lens"].replicates for run in runs), strict=True)]
    )
    value = runs[1]["logit_lens"].entropy - runs[0]["logit_lens"].entropy
    error = ((replicates - replicates.mean(0)) ** 2).sum(0).mul(16 / 17).sqrt()
    torch.testing.assert_close(ends.error, error)
    assert bool((ends.low < value).all())
