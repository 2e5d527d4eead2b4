"""p-values of whole reports, against naive Holm and Benjamini-Hochberg."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import Report
from tl_layersim.core.report_tables import adjusted
from tl_layersim.core.wording import MEANING_OF_MARGINS, equation, headed, p_value_text

from ..models.tiny_models import random_tokens, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")


def holm(p: list[float]) -> list[float]:
    """Every p-value times the number of those that are not smaller, at least that of the smaller ones, at most 1."""
    adjusted_values = [0.0] * len(p)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[place]))
        adjusted_values[place] = largest
    return adjusted_values


def benjamini_hochberg(p: list[float]) -> list[float]:
    """The smallest of n p / rank over all p-values that are not smaller, at most 1."""
    ordered = sorted(p)
    return [min(1.0, *(len(p) * q / (rank + 1) for rank, q in enumerate(ordered) if q >= value)) for value in p]


ORACLES = {"holm": holm, "fdr_bh": benjamini_hochberg}


def check(table, method: str) -> None:
    """The adjusted column is the oracle's over all p-values of the table that are not NaN."""
    p = table["p_value"].to_numpy()
    adjusted_values = table["p_adjusted"].to_numpy()
    defined = ~np.isnan(p)
    np.testing.assert_allclose(adjusted_values[defined], ORACLES[method](p[defined].tolist()), rtol=1e-12)
    assert np.isnan(adjusted_values[~defined]).all()


@pytest.fixture(scope="module")
def report() -> Report:
    analyzers = {
        "cka": lsim.CKA(minibatch=16, permutations=19),
        "fit": lsim.LinearPredictivity(permutations=19),
        "lens": lsim.LogitLens(),
        "plain": lsim.CKA(minibatch=16),
    }
    return lsim.analyze(tiny_llama(), lsim.Data(random_tokens(32, 8), batch_size=16), analyzers)


@pytest.mark.parametrize("method", ["holm", "fdr_bh"])
@pytest.mark.parametrize("seed", range(4))
def test_adjusted_p_values_are_those_of_the_naive_definition(method, seed):
    p = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 4
    p[3] = p[7]
    p[[5, 11]] = math.nan
    defined = ~p.isnan()

    [adjusted_values] = adjusted([(p, False)], method)

    np.testing.assert_allclose(adjusted_values[defined], ORACLES[method](p[defined].tolist()), rtol=1e-12)
    assert adjusted_values.isnan().equal(~defined)


@pytest.mark.parametrize("method", ["holm", "fdr_bh"])
def test_every_test_of_a_report_is_one_line(report, method):
    table = report.p_values(method)
    check(table, method)
    count = len(report["cka"].layers)
    lines = table.groupby(["analyzer", "field"]).size().to_dict()

    assert lines == {
        ("cka", "p_values"): count * (count - 1) // 2,
        ("cka", "max_p_value"): 1,
        # Each direction is a test of its own.
        ("fit", "p_values"): count * (count - 1),
        ("fit", "max_p_value"): 1,
    }
    assert list(table.columns) == ["analyzer", "field", "row_layer", "column_layer", "p_value", "p_adjusted"]

    layers = report["cka"].layers
    for _, line in table[table["field"] == "p_values"].iterrows():
        row = layers.index(line["row_layer"])
        column = layers.index(line["column_layer"])
        assert row != column
        assert line["p_value"] == float(report[line["analyzer"]].p_values[row, column])


def test_nan_stays_and_does_not_count(report):
    p = report["cka"].p_values.clone()
    p[0, 1] = p[1, 0] = math.nan
    changed = Report({"cka": replace(report["cka"], p_values=p)})
    table = changed.p_values()
    all_of_it = Report({"cka": report["cka"]}).p_values()
    check(table, "holm")

    assert len(table) == len(all_of_it)
    assert table["p_adjusted"].isna().sum() == 1
    assert table["p_adjusted"].min() < all_of_it["p_adjusted"].min()


def test_two_models_are_compared_at_every_pair_of_layers():
    """With few permutations all p-values may be equal: such a matrix is symmetric by chance."""
    result = lsim.compare(
        tiny_llama(), tiny_llama(), lsim.Data(random_tokens(32, 8), batch_size=16), lsim.CKA(minibatch=16, permutations=19)
    )
    equal = Report({"cka": replace(result, p_values=torch.full_like(result.p_values, 0.05))})
    for report in (Report({"cka": result}), equal):
        assert len(report.p_values().query("field == 'p_values'")) == result.p_values.numel()


def test_a_report_without_p_values_has_an_empty_table(report):
    table = Report({"lens": report["lens"], "plain": report["plain"]}).p_values()
    assert table.empty
    assert {"analyzer", "field", "p_value", "p_adjusted"} <= set(table.columns)
    with pytest.raises(lsim.LayersimError, match="method"):
        report.p_values("bonferroni")


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("method", ["holm", "fdr_bh"])
def test_a_difference_adjusts_over_each_field(method):
    analyzers = {"lens": lsim.LogitLens(), "cosine": lsim.Cosine(center="none")}
    runs = [
        lsim.analyze(tiny_llama(seed=seed), lsim.Data(random_tokens(16, 8), batch_size=1), analyzers, intervals=True)
        for seed in (0, 1)
    ]
    difference = lsim.difference(*runs, adjust=method)
    families = {}
    for name, node in difference.items():
        for field, array in node.data_vars.items():
            p, corrected = (array.sel(statistic=which).values for which in ("p_value", "p_adjusted"))
            once = np.triu(np.ones_like(p, dtype=bool)) if array.dims[:2] == ("row", "column") else np.ones_like(p, dtype=bool)
            tested = once & ~np.isnan(p)
            np.testing.assert_array_equal(np.isnan(p), np.isnan(corrected))
            key = "headline" if field == "headline" else (name, field)
            families.setdefault(key, []).append((p[tested], corrected[tested]))

    assert len(families) > 4
    for columns in families.values():
        p, corrected = map(np.concatenate, zip(*columns, strict=True))
        np.testing.assert_allclose(corrected, ORACLES[method](p.tolist()), rtol=1e-12)
    # The diagonal of the cosine has no test.
    assert np.isnan(difference["cosine"]["values"].sel(statistic="p_value").values.diagonal()).all()


def test_a_small_p_value_is_printed_as_a_bound():
    assert p_value_text(9.9e-5) == p_value_text(5e-10) == p_value_text(0.0) == "< 0.0001"
    assert [p_value_text(p) for p in (1e-4, 0.0386, 0.5, 1.0)] == ["0.0001", "0.039", "0.5", "1"]
    assert equation("p", p_value_text(1e-9)) == "p < 0.0001"
    assert equation("p", p_value_text(0.25)) == "p = 0.25"


def test_the_meaning_of_margins_is_said_once_and_only_where_they_are():
    assert headed("Title", ["  a = 1", "  b = 2"]) == "Title\n  a = 1\n  b = 2"
    assert headed("Title", ["  a = 1 ± 2", "  b = 2 ± 3"]) == f"Title; {MEANING_OF_MARGINS}\n  a = 1 ± 2\n  b = 2 ± 3"


def test_the_headline_of_a_null_prints_its_p_value_as_all_others(report):
    small = replace(report["cka"], max_p_value=torch.tensor(2e-5, dtype=torch.float64))
    assert repr(small).count(" < 0.0001") == 1
    assert "= <" not in repr(small)
    assert " = 0.05" in repr(report["cka"])
