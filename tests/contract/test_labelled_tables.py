"""Laws of tables, over every analyzer that is found, and of tables of many runs."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.core import LayerMatrix

from ..inputs.views import from_views, provenance, residuals, view_for
from ..models.tiny_models import random_tokens, tiny_llama

ANALYZERS = sorted(find_analyzers().items())
LABELS = [n % 3 for n in range(256)]


@pytest.fixture(scope="module")
def measured():
    """Every analyzer of one model, with intervals; the measures that need labels or text with none."""
    labelled = {"linear_probe": lsim.LinearProbe(labels=LABELS), "neural_collapse": lsim.NeuralCollapse(labels=LABELS)}
    sized = {"cka": lsim.CKA(minibatch=16), "block_coupling": lsim.BlockCoupling(k=3)}
    chosen = {name: (labelled | sized).get(name) or cls() for name, cls in ANALYZERS if cls().needs.models != "two"}
    del chosen["task_metrics"]
    return lsim.analyze(tiny_llama(), lsim.Data(random_tokens(256, 8), batch_size=16), chosen, intervals=True)


def check(result, table):
    held = {result.values_name if name == "values" else name: name for name in result.tensor_fields()}
    expected = {}
    for name, field in held.items():
        values = getattr(result, field)
        if values.numel() and not values.isnan().all():
            expected[name] = (values, field)
            if result.has_intervals and result.declared(field).within is not None:
                interval = result.interval(field)
                ends = {"low": interval.low, "high": interval.high, "se": interval.error}
                expected |= {f"{name}_{end}": (bounds, field) for end, bounds in ends.items()}
    assert list(table.data_vars) == list(expected)
    for name, (values, field) in expected.items():
        declaration = result.declared(field)
        assert table[name].dims == declaration.axes
        assert (table[name].attrs["long_name"], table[name].attrs.get("units", "")) == (declaration.label, declaration.unit)
        for axis in declaration.axes:
            assert table[axis].values.tolist() == list(result.coordinates(axis))
        np.testing.assert_array_equal(table[name].values, values)
    assert all(isinstance(value, str | int | float) for value in table.attrs.values())
    assert json.loads(table.attrs["options"]) == json.loads(json.dumps(result.provenance.options))


@pytest.mark.parametrize(("name", "cls"), ANALYZERS, ids=[name for name, _ in ANALYZERS])
def test_a_table_holds_the_fields_of_a_result(name, cls):
    result = from_views(cls(), [view_for(cls, residuals(seed, tokens=size)) for seed, size in enumerate((12, 30, 7))])
    check(result, result.to_xarray())


@pytest.mark.heavy("a run of every analyzer with intervals")
def test_a_report_has_a_table_for_each_result_with_intervals(measured, tmp_path):
    tables = measured.to_xarray()
    assert list(tables.children) == list(measured)

    for name, result in measured.items():
        check(result, tables[name].to_dataset())
    tables["cka"].to_dataset().to_netcdf(tmp_path / "cka.nc")
    stacked = lsim.stack({1: measured, 2: measured}, "step")

    assert list(stacked.children) == list(measured)
    for name, result in measured.items():
        field = result.values_name
        np.testing.assert_array_equal(stacked[name][field].sel(step=2).values, result.values)
        assert stacked[name][field].dims[0] == "step"


def test_untrained_models_have_their_mean():
    result = lsim.analyze(tiny_llama(), random_tokens(8), lsim.Cosine(), baseline="untrained")["cosine"]
    np.testing.assert_array_equal(result.to_xarray()["values_untrained"].values, result.of_untrained("values").mean(0))


def test_runs_of_other_depths_are_joined_in_the_order_of_the_model():
    models = {"deep": tiny_llama(12), "shallow": tiny_llama(3, seed=1)}
    reports = {name: lsim.analyze(model, random_tokens(4), lsim.Trajectory()) for name, model in models.items()}
    table = lsim.stack({name: reports[name] for name in ("shallow", "deep")}, "model")["trajectory"]
    assert table["model"].values.tolist() == ["shallow", "deep"]
    assert table["layer"].values.tolist() == list(reports["deep"]["trajectory"].layers[1:])

    growth = table["growth"].sel(model="shallow")
    np.testing.assert_array_equal(growth.values[:3], reports["shallow"]["trajectory"].growth)
    assert growth.isnull().values.tolist() == [False] * 3 + [True] * 9

    depth = table["residual_depth"]
    assert depth.dims == ("model", "residual")
    np.testing.assert_allclose(depth.sel(model="shallow").values[:4], [0, 1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(table["layer_depth"].sel(model="deep").values, [n / 12 for n in range(1, 13)])

    # Models of one depth share theirs.
    stacked_alike = lsim.stack(dict.fromkeys("ab", reports["deep"]["trajectory"]))
    assert (stacked_alike["residual_depth"].dims, stacked_alike["norm"].dims) == (("residual",), ("run", "residual"))

    # At common depths, with xarray alone.
    norm = table["norm"].sel(model="deep").swap_dims(residual="residual_depth").interp(residual_depth=[0, 1 / 24, 1])
    norms = reports["deep"]["trajectory"].norm
    np.testing.assert_allclose(norm.values, [norms[0], (norms[0] + norms[1]) / 2, norms[-1]])


def test_rows_and_columns_have_the_depths_of_their_own_model():
    names = ("blocks.0.hook_resid_pre", *(f"blocks.{n}.hook_resid_post" for n in range(4)))
    values = torch.zeros(5, 3, dtype=torch.float64)
    matrix = LayerMatrix(values=values, layers=names, column_layers=names[:3], provenance=provenance())
    table = matrix.to_xarray()

    np.testing.assert_allclose(table["row_depth"], [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(table["column_depth"], [0, 0.5, 1])


def test_attributes_of_all_runs_are_kept_and_other_options_are_noticed():
    tokens = random_tokens(8)
    first, second = (lsim.analyze(tiny_llama(seed=n), tokens, lsim.BlockCoupling(k=3)) for n in (0, 1))
    table = lsim.stack({np.int64(0): first, 1: second}, "step")["block_coupling"]
    assert table.attrs["tokens"] == first["block_coupling"].provenance.tokens
    assert "weights_hash" not in table.attrs
    assert table["step"].values.tolist() == [0, 1]

    other_options = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=2))
    with pytest.warns(lsim.LayersimWarning, match=r"'block_coupling'.* k \(3, 2\)"):
        lsim.stack({"a": first, "b": other_options})


def test_what_cannot_be_stacked_is_refused():
    report = lsim.analyze(tiny_llama(), random_tokens(4), [lsim.Cosine(), lsim.CKA(minibatch=8)])
    for runs, dim, match in (
        ({}, "run", "`runs`"),
        ({"a": 3}, "run", "`runs`.* int"),
        ({"a": report, "b": report["cka"]}, "run", "`runs`.* CKAResult, Report"),
        ({"a": report}, "row", "`dim`.*'row'.*'c"),
        ({"a": report["cka"]}, "values", "`dim`.*'values'"),
    ):
        with pytest.raises(lsim.LayersimError, match=match):
            lsim.stack(runs, dim)


@pytest.mark.filterwarnings("ignore:The runs of:tl_layersim.LayersimWarning")
def test_sites_that_no_run_has_together_are_in_the_order_of_their_blocks():
    runs = {
        at: lsim.analyze(tiny_llama(4), random_tokens(), lsim.Cosine(center="none"), at=list(at)) for at in ((0, 3), (1, 2))
    }
    table = lsim.stack({str(key): run for key, run in runs.items()})["cosine"]

    assert table["row"].values.tolist() == [f"blocks.{n}.hook_resid_post" for n in range(4)]
    with pytest.raises(lsim.LayersimError, match="CosineResult"):
        lsim.stack(
            {"a": runs[0, 3]["cosine"], "b": lsim.analyze(tiny_llama(), random_tokens(), lsim.LogitLens())["logit_lens"]}
        )


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(("name", "cls"), ANALYZERS, ids=[name for name, _ in ANALYZERS])
def test_a_table_survives_csv_and_json_and_headlines_have_plain_names(name, cls, tmp_path):
    result = from_views(cls(), [view_for(cls, residuals(seed, tokens=size)) for seed, size in enumerate((12, 30, 7))])
    report = lsim.Report({name: result})
    table = report.to_frame()
    assert len(table) == sum(
        tensor.numel() for tensor in map(vars(result).get, result.tensor_fields()) if not bool(tensor.isnan().all())
    )
    assert not table.duplicated([column for column in table if column != "value"]).any(), "labels tell all numbers apart"

    again = pandas.read_json(report.to_json(tmp_path / "x.json"), orient="table", precise_float=True)
    pandas.testing.assert_frame_equal(again, table, check_exact=True, check_dtype=False, check_categorical=False)
    json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda constant: pytest.fail(constant))
    again = pandas.read_csv(report.to_csv(tmp_path / "x.csv"), float_precision="round_trip")
    pandas.testing.assert_series_equal(again["value"], table["value"], check_exact=True)

    numbers = report.headline()
    assert len(numbers) == len(result.headline())
    assert all(re.fullmatch(rf"{name}/[a-z0-9][a-z0-9_]*", key) for key in numbers)
    assert lsim.load(report.save(tmp_path / "x.safetensors")).headline() == pytest.approx(numbers, nan_ok=True)
