"""Files of options that are hostile or wrong: refused quickly, with status 2, before a model is opened."""

from __future__ import annotations

import functools
import os
import random
import warnings

import pytest

import tl_layersim as lsim
from tl_layersim.commands import bounded_yaml

from .helpers import run

ALIASES = "\n".join(["analyzers:", "- &a0 [x, x]", *(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))])
NESTED = "[" * 2000 + "]" * 2000
# By kind: the content, and the text that the message must hold.
MALFORMED = {
    "aliases": (ALIASES, "a0"),
    "an alias as a key": ("? &a max_tokens\n: 3\n*a : 4", "a"),
    "a merge key": ("base: &b {seq_len: 8}\n<<: *b", "b"),
    "an alias without an anchor": ("option: *nothing", "nothing"),
    "deep lists": (f"option: {NESTED}", ""),
    "deep mappings": ("option: " + "{a: " * 500 + "x" + "}" * 500, ""),
    "deep block": ("\n".join(" " * n + "a:" for n in range(400)), ""),
    "open lists": ("option: " + "[" * 5000, ""),
    "a huge file": ("max_tokens: 1\n#" + "x" * 10_000_000, f"{bounded_yaml.LARGEST_FILE:,}"),
    "many values": ("option: [" + "a," * 20_000 + "]", f"{bounded_yaml.MOST_VALUES:,}"),
    "a repeated key": ("seq_len: 8\nseq_len: 9", "seq_len"),
    "a repeated option": ("seq_len: 8\nseq-len: 9", "seq_len"),
    "a list as a key": ("[a, b]: c", ""),
    "a mapping as a key": ("{a: b}: c", ""),
    "a tag of Python": ("model: !!python/object/apply:os.system [ls]", "python"),
    "a tag of a type": ("seq_len: !!int 8", "int"),
    "binary": ("data: !!binary aGVsbG8=", "binary"),
    "two documents": ("seq_len: 8\n---\nseq_len: 9", ""),
    "a zero byte": ('data: "a\\0b"', ""),
    "an escape of the terminal": ('data: "\\e[31m"', ""),
    "half a pair": ('data: "\\ud800"', ""),
    "not UTF-8": (b"at: caf\xe9", "UTF-8"),
    "UTF-16": ("seq_len: 8".encode("utf-16"), "UTF-8"),
    "random bytes": (random.Random(0).randbytes(5000), ""),
    "a control character": (b"at: \x01", ""),
    "a text": ("some words", ""),
    "a list": ("- seq_len", ""),
    "nothing": ("", ""),
    "a null": ("null", ""),
}


def refused(folder, *arguments):
    ended = run(*arguments, "--out", folder / "out")
    assert ended.exit_code == 2, (ended.output[-300:], ended.exception)
    assert isinstance(ended.exception, lsim.LayersimError), repr(ended.exception)
    assert "Traceback" not in ended.output
    assert not (folder / "out").exists()
    return str(ended.exception)


@pytest.fixture(autouse=True)
def without_measuring(monkeypatch):
    """A model that is opened before the file is refused is an error."""

    # A command reads its options from the parameters of `open_model` once, at its first use.
    @functools.wraps(lsim.open_model)
    def opened(*_, **__):
        raise AssertionError("the model was opened")

    monkeypatch.setattr(lsim, "open_model", opened)


@pytest.mark.light("aliases", "deep mappings", "a repeated key", "a zero byte", "random bytes", "a null")
@pytest.mark.parametrize(("content", "named"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_refused(content, named, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(tmp_path, "report", "--config", path)
    assert message.startswith(f"`--config` is {path}")
    assert named in message
    assert len(message) < 1000


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/full", ".", "no/such/file", "pipe", "a" * 300, "a\udcffb"])
def test_what_is_no_readable_file_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert "`--config`" in refused(tmp_path, "report", "--config", name)


WRONG_TYPES = {
    "a list for one value": ("seq_len: [8]", "`--seq-len`"),
    "a mapping for one value": ("model: {a: b}", "`--model`"),
    "a list of lists": ("option: [[a]]", "`--option`"),
    "a mapping for a list": ("analyzers: {cka: 1}", "`--analyzers`"),
    "lists in analyzers": ("analyzers: [cka, [cosine]]", "`--analyzers`"),
    "a list for data": ("data: [a, b]", "`--data`"),
    "a mapping for a server": ("server: {a: b}", "`--server`"),
    "a list for a command": ("command: [report]", "`command`"),
    "a text for the record": ("record: x", "`record`"),
    "a list for the record": ("record: [1]", "`record`"),
    "a list in the record": ("record: {data: [a]}", "record.data"),
    "a text for versions": ("record: {versions: 3}", "record.versions"),
    "a list of versions": ("record: {versions: [a]}", "record.versions"),
    "a mapping in versions": ("record: {versions: {torch: {a: b}}}", "--config"),
}


@pytest.mark.parametrize(("line", "named"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_a_value_of_another_type_is_refused(line, named, tmp_path):
    (tmp_path / "run.yaml").write_text(line)
    assert named in refused(tmp_path, "report", "--config", tmp_path / "run.yaml")


MISSPELT = {
    "an option": ("max_token: 3", "max_tokens"),
    "another option": ("analyzer: cka", "analyzers"),
    "of data": ("seqlen: 8", "seq_len"),
    "of the record": ("record: {weigths: a}", "weights"),
    "an analyzer": ("analyzers: [cka]\noption: ['ck.minibatch=3']", "cka.minibatch"),
    "an option of an analyzer": ("analyzers: [cka]\noption: ['cka.minibach=3']", "cka.minibatch"),
    "an option of another analyzer": ("analyzers: [cka]\noption: ['cosine.centre=none']", "cosine.center"),
    "an analyzer in a list": ("analyzers: [cosine]\noption: ['cosine.center=none', 'cka.minibatc=3']", "cka.minibatch"),
}


@pytest.mark.parametrize(("lines", "meant"), MISSPELT.values(), ids=MISSPELT)
def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(lines, meant, tmp_path):
    (tmp_path / "run.yaml").write_text(lines)
    assert f"Did you mean {meant}?" in refused(tmp_path, "report", "--config", tmp_path / "run.yaml")


@pytest.mark.parametrize("setting", ["/no/own.py:A.minibatch=3", "minibatch=3", "cka.minibatch", "", "=", "."])
def test_a_setting_of_no_analyzer_is_refused(setting, tmp_path):
    (tmp_path / "run.yaml").write_text(f"analyzers: [cka]\noption: ['{setting}']")
    assert "`--option`" in refused(tmp_path, "report", "--config", tmp_path / "run.yaml")


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(
    "value", ["[" * 5000, "-" * 5000 + "1", "(" * 300 + ")" * 300, "nan", "Infinity", "1e999", '{"a": 1}', "9" * 6000]
)
def test_a_value_of_an_option_is_bounded(value, tmp_path):
    message = refused(tmp_path, "report", "--analyzers", "cka", "--option", f"cka.minibatch={value}")
    assert "`minibatch`" in message
    assert len(message) < 1000


WRONG_VALUES = (
    *("max_tokens: .inf", "max_tokens: nan", "max_tokens: 1.5", "max_tokens: -1", "max_tokens: 1e400", "max_tokens: ''"),
    *("seq_len: 2026-01-01", "seq_len: 0x10", "seq_len: null", "seq_len: 1:30", "batch_size: true", "batch_size: 0"),
    *("intervals: maybe", "pack: [yes]", "column: []", "analyzers: []", "analyzers: ''", "device: moon"),
    *("dtype: float8", "baseline: trained", "format: docx", "at: []", "data: no/such/file"),
)


@pytest.mark.light(
    "max_tokens: .inf",
    "max_tokens: 1.5",
    "max_tokens: 1e400",
    "seq_len: 2026-01-01",
    "seq_len: 0x10",
    "seq_len: 1:30",
    "batch_size: 0",
    "pack: [yes]",
    "analyzers: []",
    "analyzers: ''",
    "dtype: float8",
    "format: docx",
    "data: no/such/file",
)
@pytest.mark.parametrize("line", WRONG_VALUES)
def test_a_wrong_value_is_refused(line, tmp_path):
    (tmp_path / "run.yaml").write_text(line)
    ended = run("report", "--config", tmp_path / "run.yaml", "--out", tmp_path / "out")
    assert ended.exit_code == 2, (ended.output[-300:], ended.exception)
    assert "Traceback" not in ended.output
    option = line.partition(":")[0]
    assert option in ended.output.replace("-", "_")


def test_an_option_of_an_analyzer_of_the_users_own_is_verified(tmp_path):
    (tmp_path / "own.py").write_text(
        "import dataclasses\nimport tl_layersim as lsim\n\n@dataclasses.dataclass(frozen=True, eq=False)\n"
        "class Own(lsim.Cosine):\n    name = 'own'\n"
    )
    (tmp_path / "run.yaml").write_text("option: ['own.centre=none']")
    call = ("report", "--config", tmp_path / "run.yaml", "--analyzers", f"{tmp_path / 'own.py'}:Own")
    assert "Did you mean own.center?" in refused(tmp_path, *call)
    # Without the file, whose code a file of options must not run, the names are not known.
    (tmp_path / "run.yaml").write_text(f"analyzers: ['{tmp_path / 'own.py'}:Own']\noption: ['own.center=none']")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ended = run("report", "--config", tmp_path / "run.yaml", "--analyzers", "cka", "--out", tmp_path / "out")
    assert "own.center=none" in ended.stderr
    assert isinstance(ended.exception, AssertionError)


def test_the_run_file_of_shards_is_verified(tmp_path):
    (tmp_path / "a.safetensors").write_text("")
    (tmp_path / "a.yaml").write_text("seq_len: [8]")
    assert "`--seq-len`" in str(run("merge", tmp_path / "a.safetensors", "--out", tmp_path / "out").exception)
    (tmp_path / "a.yaml").write_text(ALIASES)
    assert str(tmp_path / "a.yaml") in str(run("merge", tmp_path / "a.safetensors", "--out", tmp_path / "out").exception)
