"""`run.yaml`: a run is repeated bit for bit, options of the command line come first, and what is unknown is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import yaml

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.commands.models_and_data import as_settings, with_options

from .helpers import NUMBERS, SHORT, done, run

# Of few tokens.
pytestmark = pytest.mark.filterwarnings("ignore:.*(CKA is dominated|Intervals of .* rest on).*:UserWarning")


def same(first, second):
    """Whether two reports hold the same numbers, to the last bit."""
    assert list(first) == list(second)
    for name, result in first.items():
        for field in result.tensor_fields():
            assert torch.equal(getattr(result, field).nan_to_num(7.0), getattr(second[name], field).nan_to_num(7.0)), field
    return True


def read(folder):
    return lsim.load(folder / "report.safetensors")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_run_is_repeated_bit_for_bit(tmp_path):
    options = [
        "--analyzers",
        "mutual_knn,cka,cosine",
        "--option",
        "cka.minibatch=64",
        "--option",
        "cosine.center=none",
        "--positions",
        "2:-1",
        "--intervals",
    ]
    done("report", *SHORT, *options, "--at", "attn_out, mlp_out", "--batch-size", 1, "--out", tmp_path / "a")
    written = yaml.safe_load((tmp_path / "a" / "run.yaml").read_text())
    assert written["command"] == "report"
    # Defaults stand in the file as the run took them.
    assert written["pack"] is True
    assert written["positions"] == "2:-1"
    assert {"cka.minibatch=64", "cosine.center=none", "cka.seed=0"} <= set(written["option"])
    assert written["record"]["data"] == read(tmp_path / "a")["cka"].provenance.data
    assert written["record"]["versions"]["tl_layersim"] == lsim.__version__
    assert not {"out", "config", "checkpoint"} & set(written)
    again = done("report", "--config", tmp_path / "a" / "run.yaml", "--out", tmp_path / "b")
    assert "numbers may differ" not in again.output
    assert list(read(tmp_path / "b")) == ["mutual_knn", "cka", "cosine"]
    assert same(read(tmp_path / "a"), read(tmp_path / "b"))
    first, second = ((tmp_path / name / "run.yaml").read_text() for name in "ab")
    assert first == second


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:The run in .* used different data")
def test_the_command_line_comes_first(tmp_path):
    done("report", *SHORT, "--option", "cka.minibatch=64", "--option", "cka.seed=3", "--out", tmp_path / "a")
    file = tmp_path / "a" / "run.yaml"
    done(
        "report", "--config", file, "--option", "cka.seed=5", "--max-tokens", 256, "--analyzers", "cka", "--out", tmp_path / "b"
    )
    found = read(tmp_path / "b")
    assert list(found) == ["cka"]
    assert found["cka"].provenance.tokens == 256
    # Options of the file hold where the command line does not set them; those of `cosine` are of no use here.
    assert (found["cka"].provenance.options["seed"], found["cka"].provenance.options["minibatch"]) == (5, 64)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_file_of_a_person_names_options_as_the_command_line_does(tmp_path):
    """Values are text: YAML would read 2:10 as a number in base 60, and no as False."""
    file = tmp_path / "own.yaml"
    lines = ("max-tokens: 300", "seq_len: 64", "analyzers: [effective_rank, cosine]", "option: cosine.center=none")
    file.write_text("\n".join((*lines, "at: z", "per-head: yes", "positions: 2:10", "intervals: no")))
    done("report", "--config", file, *NUMBERS, "--out", tmp_path)
    assert list(read(tmp_path)) == ["effective_rank", "cosine"]
    options = read(tmp_path)["cosine"].provenance.options
    assert (options["max_tokens"], options["seq_len"], options["center"], options["per_head"]) == (300, 64, "none", True)
    assert options["positions"] == "2:10"
    assert not read(tmp_path)["cosine"].has_intervals


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_token: 3", "max_token"),
        ("trustRemoteCode: true", "trustRemoteCode"),
        ("max_tokens: 1.5", "max_tokens"),
        ("- a", "--config"),
        ("a: [", "--config"),
        ("command: compare\nmax_tokens: 300", "compare"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(text, says, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    ended = run("report", "--config", file, "--out", tmp_path / "out")
    assert ended.exit_code == 2
    assert says in ended.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["out: other", "checkpoint: x", "server: http://127.0.0.1:9"])
def test_a_file_writes_no_other_place_and_reaches_no_server(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(line)
    refused = run("report", *SHORT, "--config", "own.yaml").exception
    assert isinstance(refused, lsim.LayersimError)
    option, _, value = line.partition(": ")
    assert f"`--{option}`" in str(refused)
    assert value in str(refused)
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


@pytest.mark.parametrize("name", ["nothing.yaml", "."])
def test_a_file_that_cannot_be_read_is_refused(name, tmp_path):
    refused = run("report", "--config", tmp_path / name).exception
    assert isinstance(refused, lsim.LayersimError)
    assert str(refused).startswith(f"`--config` is {tmp_path / name}")


def test_the_heading_is_a_command_that_runs(tmp_path):
    options = [*SHORT, "--steps", 1]
    done("train", "demo", *options, "--save-to", tmp_path / "one", "--out", tmp_path / "a")
    heading = (tmp_path / "a" / "run.yaml").read_text().splitlines()[0]
    assert heading == "# tl-layersim train --config run.yaml --save-to FOLDER repeats this run."
    words = heading.removeprefix("# tl-layersim ").removesuffix(" repeats this run.")
    words = words.replace("run.yaml", str(tmp_path / "a" / "run.yaml")).replace("FOLDER", str(tmp_path / "two"))
    done(*words.split(), "--out", tmp_path / "b")
    assert same(read(tmp_path / "a"), read(tmp_path / "b"))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_other_data_behind_the_same_name_is_reported(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(lsim.demo_text()[:20]))
    done("report", "--data", text, *SHORT, "--analyzers", "cka", "--out", tmp_path / "a")
    text.write_text("\n\n".join(lsim.demo_text()[20:50]))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert " different data" in done("report", "--config", tmp_path / "a" / "run.yaml", "--out", tmp_path / "a").stderr


def test_no_secret_enters_the_file(tmp_path):
    refused = run("report", "--server", "http://me:secret123@127.0.0.1:9", "--model", "org/name", "--out", tmp_path)
    assert refused.exit_code != 0
    from tl_layersim.commands.options import CommandCall
    from tl_layersim.commands.run_file import write_run_file

    call = CommandCall("report", {}, {"server": "http://me:secret123@127.0.0.1:9"})
    text = write_run_file(tmp_path, "run.yaml", call, {}).read_text()
    assert "secret123" not in text
    assert "http://127.0.0.1:9" in text


@pytest.mark.parametrize("name", sorted(find_analyzers()))
def test_every_analyzer_is_made_again_from_the_text_of_its_options(name):
    analyzer = find_analyzers()[name]()
    again = with_options({name: analyzer}, as_settings(analyzer))[name]
    assert again.options() == analyzer.options()
    assert as_settings(again) == as_settings(analyzer)
    # All but what text cannot hold.
    kept = [setting.split("=")[0].split(".")[1] for setting in as_settings(analyzer)]
    assert set(analyzer.options()) - set(kept) <= {"labels", "heads"}
