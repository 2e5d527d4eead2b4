"""Malformed models, data and options on the command line: refused by name, without a traceback, and no code runs."""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import tl_layersim as lsim

from ..models.tiny_models import tiny_llama, tiny_tokenizer
from .helpers import run


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("it ran",)


def config(**changes):
    def change(folder):
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | changes))

    return change


def weights(change):
    def write(folder):
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return write


def pickled(save):
    def write(folder):
        (folder / "model.safetensors").unlink()
        save({"lm_head.weight": Code()}, folder / "pytorch_model.bin")

    return write


MODELS = {
    "truncated": weights(lambda blob: blob[: len(blob) // 2]),
    "a few bytes": weights(lambda blob: blob[:5]),
    "a huge header": weights(lambda blob: (2**62).to_bytes(8, "little") + blob[8:]),
    "code in a pickle": pickled(lambda weights, path: path.write_bytes(pickle.dumps(weights))),
    "code in a zip": pickled(torch.save),
    "hidden_size": config(hidden_size=-1),
    "num_attention_heads": config(num_attention_heads=0),
    "vocab_size": config(vocab_size=0),
    "architectures": config(architectures=[3]),
    "dtype": config(dtype="nope"),
    "deep": lambda folder: (folder / "config.json").write_text("[" * 100000 + "]" * 100000),
    "tokenizer": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """A copy of the model, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for path in saved.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in range(3, 90)))
    return tmp_path / "model"


def refused(*arguments):
    error = run(*arguments).exception
    assert isinstance(error, lsim.LayersimError), repr(error)
    return error


@pytest.mark.light("truncated", "code in a pickle", "num_attention_heads", "architectures", "tokenizer")
@pytest.mark.parametrize("malform", MODELS.values(), ids=MODELS)
def test_a_malformed_model_is_refused(malform, folder):
    malform(folder)
    error = refused("report", "--model", "model", "--data", "text.txt", "--analyzers", "cosine")
    assert str(error).startswith("`--model`")
    assert " model" in str(error)
    assert not os.path.exists("it ran")


def test_weights_that_the_files_lack_are_told(folder):
    call = ("report", "--model", "model", "--data", "text.txt", "--analyzers", "cosine")
    path = folder / "model.safetensors"
    held = load_file(path)
    save_file({name: value for name, value in held.items() if name != "lm_head.weight"}, path, {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        headless = run(*call)
    assert headless.exit_code == 0
    assert re.search(r"1 weight\b.*lm_head", headless.stderr)
    # Numbers of random blocks would be those of no model.
    config(num_hidden_layers=4)(folder)
    assert re.search(r"^`--model`.*10 weights.*lm_head\.weight, model\.layers\.3\.", str(refused(*call)))


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json", "dataset_info.json"])
@pytest.mark.parametrize("text", ["{", '{"_data_files": 3, "splits": 3}'])
def test_malformed_data_is_refused(name, text, tmp_path):
    for own in ("state.json", "dataset_info.json", name):
        (tmp_path / own).write_text(text)
    assert str(tmp_path) in str(refused("report", "--data", tmp_path, "--out", tmp_path / "out"))


YAML = {
    "latin": "at: caf\xe9".encode("latin-1"),
}


@pytest.mark.parametrize("text", YAML.values(), ids=YAML)
def test_malformed_options_are_refused(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refused("report", "--config", path, "--out", tmp_path / "out")
    assert str(error).startswith(f"`--config` is {path}")


COMMANDS = {
    "report": ("report", "--model"),
    "estimate": ("estimate",),
    "train": ("train", "--save-to", "tuned", "--data", "text.txt"),
    "stitch": ("stitch", "model"),
    "exits": ("exits",),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_huge_batch_is_refused(command, folder):
    error = refused(*command, "model", "--batch-size", 10**30, "--seq-len", 16)
    assert str(error).startswith("`--batch-size`")
    assert str(10**30) in str(error)
