"""Python code that comes with a model runs only where the user says so, and the provenance tells."""

from __future__ import annotations

import builtins
import json

import pytest

import tl_layersim as lsim

from ..commands.helpers import run
from ..models.tiny_models import tiny_llama, tiny_tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own_kind"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model with code of its own, which leaves a mark where it runs."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    place = tmp_path / "own"
    tiny_llama().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_kind", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (place / "config.json").write_text(json.dumps(config))
    (place / "own.py").write_text(CODE.format(marker=str(tmp_path / "it ran")))
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in range(3, 90)))
    return place


def report(folder, *options):
    out = folder.parent / "out"
    command = ["report", "--model", str(folder), "--data", str(folder.parent / "text.txt"), "--seq-len", "16"]
    return run(*command, "--analyzers", "cosine", "--out", out, *options), out


def test_code_of_a_model_does_not_run_and_nothing_is_asked(folder, monkeypatch):
    def asked(*_):
        raise AssertionError("a question at the terminal")

    monkeypatch.setattr(builtins, "input", asked)
    outcome, _ = report(folder)
    assert isinstance(outcome.exception, lsim.LayersimError)
    assert str(outcome.exception).startswith("`--model`")
    assert "--trust-remote-code" in str(outcome.exception)
    assert not (folder.parent / "it ran").exists()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_code_of_a_model_runs_where_the_user_says_so_and_the_record_tells(folder):
    outcome, out = report(folder, "--trust-remote-code")
    assert outcome.exit_code == 0, outcome.output
    assert (folder.parent / "it ran").exists()

    provenance = lsim.load(out / "report.safetensors")["cosine"].provenance
    assert "\ntrust_remote_code: true\n" in (out / "run.yaml").read_text()
    assert provenance.source.startswith("OwnForCausalLM")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_file_of_options_does_not_let_code_run(folder):
    file = folder.parent / "run.yaml"
    file.write_text("trust-remote-code: true")
    outcome, _ = report(folder, "--config", str(file))
    assert isinstance(outcome.exception, lsim.LayersimError)
    assert str(file) in str(outcome.exception)
    assert not (folder.parent / "it ran").exists()

    outcome, out = report(folder, "--config", str(file), "--trust-remote-code")
    assert outcome.exit_code == 0, outcome.output
    assert "--config run.yaml --trust-remote-code repeats" in (out / "run.yaml").read_text().splitlines()[0]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_model_of_transformers_says_that_no_code_was_trusted(folder):
    tiny_llama().save_pretrained(folder)
    outcome, out = report(folder)
    assert outcome.exit_code == 0, outcome.output
    assert "\ntrust_remote_code: false\n" in (out / "run.yaml").read_text()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_an_architecture_that_is_no_model_is_not_called(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama", "architectures": ["pipeline"]}))
    outcome, _ = report(folder, "--analyzers", "cka")
    assert outcome.exit_code == 0, outcome.output
