"""Laws of tables and files, over every analyzer that is found."""

from __future__ import annotations

import json
import re

import pandas
import pytest

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.core import Report

from ..views import from_views, residuals, view_for

ANALYZERS = sorted(find_analyzers().items())


@pytest.mark.parametrize(("name", "cls"), ANALYZERS, ids=[name for name, _ in ANALYZERS])
def test_a_table_survives_csv_and_json_and_headlines_have_plain_names(name, cls, tmp_path):
    result = from_views(cls(), [view_for(cls, residuals(seed, tokens=size)) for seed, size in enumerate((12, 30, 7))])
    report = Report({name: result})
    table = report.to_frame()
    assert len(table) == sum(
        own.numel() for own in map(vars(result).get, result.tensor_fields()) if not bool(own.isnan().all())
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
