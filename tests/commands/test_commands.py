"""Each further command does what the function of the package does, and writes it."""

from __future__ import annotations

import importlib
import math
import re

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core.intervals import headline_texts

from ..running.options import called
from .helpers import FEW, NUMBERS, SHORT, done, run

READ = {"max_tokens": 512, "seq_len": 64, "pack": True}


def refused(*arguments):
    """The message of a command that ends with status 2."""
    ended = run(*arguments)
    assert ended.exit_code == 2, (ended.output, ended.exception)
    assert "Traceback" not in ended.output
    return str(ended.exception) if isinstance(ended.exception, lsim.LayersimError) else ended.output


def read(folder):
    return lsim.load(folder / "report.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A report with intervals."""
    out = tmp_path_factory.mktemp("saved")
    reading = ["--max-tokens", 1024, "--seq-len", 8, "--option", "cka.minibatch=64"]
    done("report", *reading, "--intervals", *NUMBERS, "--out", out)
    return out


def test_compare(tmp_path):
    found = done("compare", "demo", "demo-aligned", *SHORT, "--format", "html", "--out", tmp_path)
    expected = called(lsim.compare, lsim.demo_model(), lsim.demo_model(aligned=True), lsim.demo_text(), lsim.CKA(), **READ)
    assert torch.equal(read(tmp_path)["cka"].values, expected.values)
    assert "CKA(first model's embedding, second's last)" in found.output
    assert (tmp_path / "report.html").exists()


def test_exits(tmp_path):
    found = done("exits", "demo-aligned", *SHORT, "--agreement", 0.9, "--out", tmp_path)
    options = READ | {"analyzers": "exit_curve"}
    curve = called(lsim.analyze, lsim.demo_model(aligned=True), lsim.demo_text(), **options)["exit_curve"]
    assert torch.equal(read(tmp_path)["exit_curve"].agreement, curve.agreement)
    chosen = curve.threshold_for(agreement=0.9)
    [row] = [line for line in found.stdout.splitlines() if line.endswith("*")]
    point = curve.at(chosen)
    assert row.split()[:3] == [f"{chosen:g}", f"{point.speedup:.4g}", f"{point.agreement:.4g}"]
    assert re.search(rf"\* .*threshold {chosen:g}\b", found.stdout)
    assert read(tmp_path)["exit_curve"].headline()["threshold with 90 % agreement"] == chosen
    again = done("exits", "--config", tmp_path / "run.yaml", "--out", tmp_path / "again")
    assert again.stdout.splitlines()[:-4] == found.stdout.splitlines()[:-4]
    assert refused("exits", "--agreement", 95, "--out", tmp_path / "no").startswith("`--agreement` of ExitCurve is 95")
    none = done("exits", "demo", *SHORT, "--thresholds", "0.1,0.2", "--out", tmp_path)
    assert "No measured threshold reaches an agreement of 0.95" in none.stdout


def test_stitch(tmp_path):
    done("stitch", "demo", "demo-aligned", "--at", "4:6", "--fit", "lstsq", *SHORT, "--out", tmp_path)
    models = lsim.demo_model(), lsim.demo_model(aligned=True)
    expected = called(lsim.stitch, *models, lsim.demo_text(), at=(4, 6), fit="lstsq", **READ)
    found = read(tmp_path)["stitch"]
    assert found.penalty == expected.penalty
    assert found.layers == expected.layers
    done("stitch", "--config", tmp_path / "run.yaml", "--out", tmp_path / "again")
    assert read(tmp_path / "again")["stitch"].penalty == expected.penalty
    points = ["--at", "2:2", "--at", "6:6", "--at", "2:2"]
    done("stitch", "demo", "demo-aligned", "--adapter", "identity", *points, *SHORT, "--out", tmp_path)
    assert read(tmp_path)["stitch"].values.shape == (2, 2, 2)
    assert refused("stitch", "demo", "demo", "--at", "4", "--out", tmp_path / "no").startswith("`--at` is '4'")
    options = ["--at", "4:4", "--fit", "lstsq", "--steps", 5, *SHORT]
    assert "`training`" in refused("stitch", "demo", "demo", *options, "--out", tmp_path / "no")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_settings_of_the_papers(tmp_path):
    few = ["--steps", 3, *SHORT]
    done("train", "demo", "--paper", *few, "--save-to", tmp_path / "model", "--out", tmp_path / "train")
    done("stitch", "demo", "demo-aligned", "--paper", "--at", "4:4", *few, "--out", tmp_path / "stitch")
    again = ["--config", tmp_path / "train" / "run.yaml", "--save-to", tmp_path / "again", "--out", tmp_path / "train again"]
    done("train", *again)
    done("stitch", "demo", "demo-aligned", "--config", tmp_path / "stitch" / "run.yaml", "--out", tmp_path / "stitch again")
    first, second = (read(tmp_path / name)["training"] for name in ("train", "train again"))
    options = first.provenance.options
    assert [options[name] for name in ("steps", "norm", "clip", "lr", "schedule")] == [3, "none", math.inf, 2e-5, "alternating"]
    assert torch.equal(second.values, first.values)
    found = read(tmp_path / "stitch")["stitch"]
    assert (found.kind, found.fit, len(found.curve)) == ("affine-norm", "sgd", 3)
    assert found.provenance.options["training"]["relative"] is False
    assert read(tmp_path / "stitch again")["stitch"].penalty == found.penalty


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_train(tmp_path):
    options = ["--steps", 2, "--lr", 1e-3, "--max-tokens", 1024, "--seq-len", 64, "--batch-size", 2, *NUMBERS]
    done("train", "demo", *options, "--save-to", tmp_path / "deep" / "model", "--out", tmp_path)
    training = lsim.AlignedTraining(steps=2, lr=1e-3)
    reading = READ | {"max_tokens": 1024, "batch_size": 2}
    expected = called(lsim.finetune_aligned, lsim.demo_model(), lsim.demo_text(), training, **reading)
    assert torch.equal(read(tmp_path)["training"].values, expected.values)
    # The saved model is one that commands take.
    done("report", "--model", tmp_path / "deep" / "model", *SHORT, "--analyzers", "cka", "--out", tmp_path / "report")
    assert run("train", "demo").exit_code == 2
    assert re.match(r"`--steps`.* 0\b", refused("train", "demo", "--steps", 0, "--save-to", tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "./nothing", "--lora", "0", "--save-to", "new"), "`--lora` is 0"),
        (("compare", "./nothing", "./nothing", "--analyzers", "cosine"), "Cosine "),
    ],
    ids=["train", "compare"],
)
def test_options_are_checked_before_a_model_is_loaded(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(*arguments, "--out", "out").startswith(says)
    assert not (tmp_path / "out").exists()


def test_train_names_the_data_that_is_missing(tmp_path):
    message = refused("train", "demo", "--eval-data", "./nothing.txt", "--save-to", tmp_path / "new", "--out", tmp_path)
    assert message.startswith("`--eval-data` is ./nothing.txt")


def test_show(saved, tmp_path):
    shown = done("show", saved / "report.safetensors", "--html", tmp_path / "page.html").stdout
    assert (tmp_path / "page.html").exists()
    report = read(saved)
    for name, result in report.items():
        for number, text in headline_texts(result).items():
            cells = " +".join(map(re.escape, (name, number.strip(), *text.split(" ± "))))
            assert re.search(rf"^{cells} *$", shown, re.M), number
        assert f"{name}.values" in shown
    assert "± 95 %" in shown
    assert re.search(rf"^data +{report['cka'].provenance.data}$", shown, re.M)
    table = done("show", saved / "report.safetensors", "--table", "cosine.norm_ratio").stdout.splitlines()
    frame = report["cosine"].to_frame("norm_ratio")
    assert table[0].split() == list(frame.columns)
    assert "norm_ratio_low" in frame.columns
    assert len(table) == 1 + len(frame)
    report["cka"].save(tmp_path / "cka.safetensors")
    assert "CKA(embedding, last)" in done("show", tmp_path / "cka.safetensors").stdout
    assert refused("show", saved / "report.safetensors", "--table", "cca.values").startswith("`--table` is cca.values")


def test_show_lists_the_warnings_of_a_run(saved, tmp_path):
    from dataclasses import replace

    report = read(saved)

    def with_warnings(result, *warnings):
        return replace(result, provenance=replace(result.provenance, warnings=warnings))

    warned = with_warnings(report["cka"], "Too few of [them].")
    lsim.Report({"cosine": with_warnings(report["cosine"]), "cka": warned}).save(tmp_path / "warned.safetensors")
    shown = done("show", tmp_path / "warned.safetensors").stdout
    assert re.search(r"^cka\.warning +Too few of \[them\]\.$", shown, re.M)
    assert "cosine.warning" not in shown


@pytest.mark.parametrize("command", ["report", "estimate"])
def test_no_site_is_not_the_default(command, tmp_path):
    """As where a variable of a shell is empty."""
    assert refused(command, "--at", "", *(["--out", tmp_path / "out"] if command == "report" else [])).startswith("`--at`")


def test_estimate():
    shown = done("estimate", "demo", "--tokens", 100000, "--analyzers", "cka", "--option", "cka.minibatch=64")
    cost = lsim.estimate(lsim.demo_model().config, lsim.CKA(minibatch=64), tokens=100000)
    assert [line.split(None, 1) for line in shown.stdout.splitlines()[2:]] == [
        [name.strip(), text] for name, text in cost.rows()
    ]
    assert refused("estimate", "--dtype", "bfloat16").startswith("`--dtype` is bfloat16")
    assert " is ./nothing" in refused("estimate", "./nothing")


@pytest.mark.heavy("a measured time")
def test_the_time_of_a_batch_is_measured():
    assert "measured on one batch" in done("estimate", "--time", "--seq-len", 32, "--batch-size", 2).stdout


def test_what_has_no_effect_beside_a_shard_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option, value in (("--out", "x"), ("--format", "html")):
        assert refused("report", "--shard", "0/2", option, value).startswith(f"`{option}` is ")
    assert list(tmp_path.iterdir()) == []


def test_errors_of_merge_are_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done("report", "--max-tokens", 300, "--batch-size", 1, "--option", "cosine.center=none", "--shard", "0/2")
    assert "1 of 2" in refused("merge", "parts")
    with pytest.raises(lsim.LayersimError, match=r"kind 'shard'.*'report'"):
        lsim.load("parts/part-0-of-2.safetensors")


def test_an_unknown_format_is_refused_before_the_run(tmp_path):
    assert refused("report", "--format", "htm", "--out", tmp_path / "out").startswith("`--format` is htm")
    assert not (tmp_path / "out").exists()


def test_every_format_is_written(tmp_path):
    import pandas

    shown = done("report", *SHORT, "--analyzers", "cka", "--format", "json,csv", "--out", tmp_path)
    written = ["report.csv", "report.json", "report.safetensors", "run.yaml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == written
    assert all(str(tmp_path / name) in shown.stdout for name in written)
    table, expected = pandas.read_csv(tmp_path / "report.csv"), read(tmp_path).to_frame()
    assert list(table.columns) == list(expected.columns)
    assert len(table) == len(expected)
    assert '"headline"' in (tmp_path / "report.json").read_text()


OWN = """
from dataclasses import dataclass
import tl_layersim as lsim

@dataclass(frozen=True)
class Mine(lsim.Cosine):
    \"\"\"Cosine similarity of my own.\"\"\"
    name = "mine"
"""


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_an_analyzer_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    options = ["--analyzers", "mine.py:Mine,cka", "--option", "mine.center=none"]
    done("report", *SHORT, *options, "--out", "out")
    expected = called(lsim.analyze, lsim.demo_model(), lsim.demo_text(), analyzers=lsim.Cosine(center="none"), **READ)
    assert torch.equal(read(tmp_path / "out")["mine"].values, expected["cosine"].values)
    # Code runs only where the command line names it.
    assert refused("report", "--config", "out/run.yaml", "--out", "again").startswith("`--analyzers`")
    done("report", "--config", "out/run.yaml", "--analyzers", "mine.py:Mine,cka", "--out", "again")
    for part in range(2):
        done("report", *FEW, *options, "--shard", f"{part}/2", "--save-to", f"{part}.safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("mine").Mine(center="none")
    merged = lsim.merge(["0.safetensors", "1.safetensors"], analyzers=[own, "cka"])
    assert torch.allclose(merged["mine"].values, expected["cosine"].values)
    (tmp_path / "wrong.py").write_text("class Needs:\n    def __init__(self, power): ...\n")
    (tmp_path / "broken.py").write_text("class (")
    for name, says in (("wrong.py:Needs", "power"), ("wrong.py:No", "No"), ("broken.py:X", "SyntaxError")):
        ended = run("report", *SHORT, "--analyzers", name)
        assert ended.exit_code == 2
        assert says in str(ended.exception)
    for wrong in ("other.py:Mine", "mine.py:Other"):
        assert refused("report", "--analyzers", wrong).startswith(f"`--analyzers` is {wrong}")


def test_the_options_of_an_analyzer_are_listed():
    listed = done("analyzers", "cka").stdout.splitlines()
    rows = {line.split()[0]: line.split()[1] for line in listed[1:]}
    assert rows["cka.seed"] == "0"
    assert run("analyzers", "nothing").exit_code == 2
