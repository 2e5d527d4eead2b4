"""Reports as one tidy table, as CSV and JSON, and as numbers for loggers."""

from __future__ import annotations

import json
import math
import re

import pandas
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve, Report

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import FILES, RESULTS

pytestmark = pytest.mark.filterwarnings("ignore:Intervals of .* rest on")


@pytest.fixture(scope="module")
def report():
    analyzers = {"raw": lsim.LogitLens(norm="none"), "cka": lsim.CKA(minibatch=8), "exits": "exit_curve", "cosine": "cosine"}
    return lsim.analyze(tiny_llama(), lsim.Data(random_tokens(8, 16), batch_size=2), analyzers, intervals=True)


@pytest.fixture(scope="module")
def table(report):
    return report.to_frame()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_every_number_of_every_field_is_one_line(report, table):
    for name, result in report.items():
        for field, axes in result.tensor_fields().items():
            values = getattr(result, field)
            shown = result.values_name if field == "values" else field
            lines = table[(table["analyzer"] == name) & (table["field"] == shown)]
            if bool(values.isnan().all()):
                assert lines.empty, "a field that was not measured"
                continue
            assert torch.equal(torch.tensor(lines["value"].to_numpy()).nan_to_num(), values.reshape(-1).nan_to_num()), shown
            assert len(axes) == lines.drop(columns=["analyzer", "field", "value", "low", "high", "se"]).notna().any().sum()
    assert not table.empty


def test_a_line_has_its_labels_and_its_interval(report, table):
    interval = report["raw"].interval("accuracy")
    lines = table.query("analyzer == 'raw' and field == 'accuracy'")
    assert list(lines["layer"]) == list(report["raw"].layers[1:])
    for column, values in (("low", interval.low), ("high", interval.high), ("se", interval.error)):
        assert torch.equal(torch.tensor(lines[column].to_numpy()), values)

    [line] = table.query("analyzer == 'cka' and field == 'values'")[["row_layer", "column_layer", "value"]].values[[1]].tolist()
    assert line == [*report["cka"].layers[:2], float(report["cka"].values[0, 1])]
    # The first pass determines the mean, which has no interval.
    assert table.query("field == 'mean'")["low"].isna().all()
    assert list(table.columns[:5]) == ["analyzer", "field", "layer", "row_layer", "column_layer"]
    assert list(table.columns[-4:]) == ["value", "low", "high", "se"]


def test_layers_are_ordered_as_in_the_model(table):
    order = list(table["layer"].cat.categories)
    assert table["layer"].cat.ordered
    assert order[0].endswith("hook_resid_pre"), "of a curve that has it, although the first result has blocks only"
    assert order == sorted(order, key=lambda name: (int(re.findall(r"\d+", name)[0]), "post" in name))

    wide = table.query("analyzer == 'cka' and field == 'values'").pivot(
        index="row_layer", columns="column_layer", values="value"
    )
    assert list(wide.index) == [name for name in table["row_layer"].cat.categories if name in set(wide.index)]


def test_without_intervals_there_are_no_such_columns_and_an_empty_report_is_an_empty_table():
    report = lsim.analyze(tiny_llama(), random_tokens(2, 8), "cosine")
    assert {"low", "high", "se"}.isdisjoint(report.to_frame().columns)
    assert list(Report({}).to_frame().columns) == ["analyzer", "field", "value"]
    assert Report({}).headline() == {}


def test_labels_of_other_results_stand_after_their_predecessors_in_either_order(report):
    def curve(*names):
        values = torch.zeros(len(names), dtype=torch.float64)
        return LayerCurve(values=values, layers=names, provenance=report["cka"].provenance)

    short = curve("a", "x")
    long = curve("a", "b", "c")
    for results in ({"s": short, "l": long}, {"l": long, "s": short}):
        assert list(Report(results).to_frame()["layer"].cat.categories) == ["a", "x", "b", "c"]


def test_csv_is_the_table(report, table, tmp_path):
    path = report.to_csv(tmp_path / "report.csv")
    again = pandas.read_csv(path, float_precision="round_trip")
    assert list(again.columns) == list(table.columns)
    assert again["value"].equals(table["value"])
    assert list(again["row_layer"].dropna()) == list(table["row_layer"].dropna())


def test_json_is_strict_exact_and_has_the_provenance(report, table, tmp_path):
    path = report.to_json(tmp_path / "report.json")

    def refuse(constant):
        raise AssertionError(constant)

    plain = json.loads(path.read_text(), parse_constant=refuse)
    assert plain["provenance"]["raw"]["options"]["norm"] == "none"
    assert plain["provenance"]["cka"]["data"] == report["cka"].provenance.data
    assert plain["results"]["exits"] == "ExitCurveResult"
    assert plain["headline"] == {key: None if math.isnan(value) else value for key, value in report.headline().items()}
    again = pandas.read_json(path, orient="table", precise_float=True)
    pandas.testing.assert_frame_equal(again, table, check_exact=True, check_dtype=False, check_categorical=False)
    assert list(again["layer"].cat.categories) == list(table["layer"].cat.categories)


def test_numbers_that_json_lacks_are_null(report, tmp_path):
    curve = LayerCurve(
        values=torch.tensor([math.nan, math.inf, 1.0], dtype=torch.float64),
        layers=("a", "b", "c"),
        provenance=report["cka"].provenance,
    )
    plain = json.loads(Report({"own": curve}).to_json(tmp_path / "x.json").read_text())
    assert [line["value"] for line in plain["data"]] == [None, None, 1.0]


@pytest.mark.light("to_csv")
@pytest.mark.parametrize("write", ["to_csv", "to_json"])
def test_a_file_is_written_whole_or_not_at_all(report, tmp_path, monkeypatch, write):
    path = tmp_path / "report"
    path.write_text("mine")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tl_layersim.core.file_format.os.fsync", full)
    with pytest.raises(OSError, match="unchanged"):
        getattr(report, write)(path)
    assert path.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report"]


class Logger:
    """A stand-in for wandb, which takes a flat dict of numbers, and for MLflow, which is strict about names."""

    def __init__(self):
        self.lines = []

    def log(self, numbers, step):
        assert all(re.fullmatch(r"[\w./ -]+", name, re.ASCII) for name in numbers)
        assert all(type(value) is float for value in numbers.values())
        self.lines.append((step, dict(numbers)))


def test_headline_numbers_go_to_a_logger(report):
    logger = Logger()
    logger.log(report.headline(), step=3)
    [(step, numbers)] = logger.lines
    assert step == 3

    texts = [(name, text, value) for name, result in report.items() for text, value in result.headline().items()]
    values = {key: value for key, value in numbers.items() if not key.endswith(("_low", "_high"))}
    assert list(values.values()) == pytest.approx([float(value) for _, _, value in texts], nan_ok=True)
    assert [key.split("/")[0] for key in values] == [name for name, _, _ in texts]

    ends = report["raw"].interval(lambda result: result.accuracy[-1])
    key = "raw/accuracy_of_the_last_layer"
    assert (numbers[f"{key}_low"], numbers[f"{key}_high"]) == (float(ends.low), float(ends.high))
    assert numbers["cka/cka_last_but_one_last"] == float(report["cka"].values[-2, -1])


def test_names_of_headline_numbers_do_not_change_with_the_numbers(report):
    class Own(lsim.Result):
        def headline(self):
            return self.numbers

    names = []
    for numbers in (
        {"lowest rank, at blocks.0 (width 8)": 1.0, "rank (1: full)": 2.0, "rank (2: half)": 3},
        {"lowest rank, at blocks.3 (width 8)": 1.5, "rank (1: full)": 2.5, "rank (2: half)": 4},
    ):
        result = object.__new__(Own)
        vars(result)["numbers"] = numbers
        names.append(list(Report({"r": result}).headline()))
    assert names[0] == names[1] == ["r/lowest_rank", "r/rank", "r/rank_2_half"]


def test_headline_numbers_go_to_tensorboard(report, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        for name, value in report.headline().items():
            writer.add_scalar(name, value, 1)
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a/b", "", "/"])
def test_a_name_that_a_file_cannot_hold_is_refused(report, name):
    with pytest.raises(lsim.LayersimError, match=repr(name)):
        Report({name: report["cka"]})


def test_a_report_is_copied_and_pickled(report):
    import copy
    import pickle

    assert list(copy.deepcopy(report)) == list(pickle.loads(pickle.dumps(report))) == list(report)


@pytest.mark.light("report.safetensors", "prediction_grid.safetensors", "stitch.safetensors", "trajectory.safetensors")
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_every_kind_have_a_table(name, tmp_path):
    loaded = lsim.load(FILES / name)
    report = loaded if isinstance(loaded, Report) else Report({"own": loaded})
    table = report.to_frame()
    again = pandas.read_json(report.to_json(tmp_path / "x.json"), orient="table", precise_float=True)

    assert list(again.columns) == list(table.columns)
    # A field of one of these files is infinite, which JSON cannot hold.
    assert again["value"].equals(table["value"].replace([math.inf, -math.inf], math.nan))
    assert len(pandas.read_csv(report.to_csv(tmp_path / "x.csv"))) == len(table) > 0
    assert len(report.headline()) == sum(len(result.headline()) for result in report.values())
