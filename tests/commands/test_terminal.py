"""What the command line prints: drawn and coloured in a terminal, plain in a pipe."""

from __future__ import annotations

import pty
import re
import subprocess
import sys

import pytest

import tl_layersim as lsim
from tl_layersim import cli
from tl_layersim.commands import tables
from tl_layersim.commands.command import in_options
from tl_layersim.commands.examples import EXAMPLES

from .helpers import done, run

COMMANDS = tuple(EXAMPLES)
LONG = "blocks.0.attn." + "x" * 120


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_table_in_a_pipe_is_neither_wrapped_nor_cut(capsys):
    tables.print_table(("site", "value"), [(LONG, 1.5), ("b[0]", 2)], "Title")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{'site':<{len(LONG)}}  value", f"{LONG}  1.5", f"{'b[0]':<{len(LONG)}}  2"]


def test_a_table_in_a_terminal_is_drawn_and_whole(capsys, terminal):
    tables.print_table(("site", "value"), [(LONG, 1.5), ("b[0]", 2)], "Title", numbers=("value",))
    drawn = capsys.readouterr().out
    assert "\x1b[" in drawn
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert "Title" in plain
    assert "─" in plain
    assert max(map(len, plain.splitlines())) <= 80
    # Folded over several lines, with no letter lost.
    assert plain.count("x") == 120
    assert "b[0]" in plain


def test_no_colour_where_the_environment_says_so(capsys, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    tables.print_table(("site", "value"), [("a", 1)])
    assert not re.search(r"\x1b\[3\d", capsys.readouterr().out)


def test_an_error_is_a_panel_in_a_terminal_and_text_in_a_pipe(capsys, terminal, monkeypatch):
    error = lsim.LayersimError("`--at` is wrong.", given="[red]", expected="a site", do="--at z")
    tables.print_error(error)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    assert "╭─ Error" in drawn
    assert re.search(r"given: +\[red\](.|\n)*expected: a site(.|\n)*do: +--at z", drawn)
    monkeypatch.delenv("TTY_COMPATIBLE")
    tables.print_error(error)
    assert capsys.readouterr().err == f"Error: {error}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_examples_that_exist(command):
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done(command, "--help").stdout)
    assert "Examples" in shown
    for line in EXAMPLES[command]:
        # Not wrapped at 80 columns.
        assert f" {line} " in shown
        named = set(re.findall(r" (--[a-z-]+)", line))
        assert all(re.search(rf"{option}\b", shown.split("Examples")[0]) for option in named), line


def test_options_of_a_report_stand_in_panels():
    shown = done("report", "--help").stdout
    assert [name for name in re.findall(r"╭─ (\w+) ─", shown) if name != "Options"] == [
        "Model",
        "Data",
        "Measures",
        "Run",
        "Output",
    ]


def test_the_first_help_has_a_line_for_each_command():
    shown = done("--help").stdout
    for command in COMMANDS:
        assert len(re.findall(rf"^│ {command} +\S.*\.\s*│$", shown, re.M)) == 1, command


def test_the_version():
    assert done("--version").stdout == f"tl-layersim {lsim.__version__}\n"


def test_a_wrong_option_and_a_refusal_end_with_status_2(tmp_path, monkeypatch):
    assert run("report", "--nope").exit_code == 2
    monkeypatch.setattr("sys.argv", ["tl-layersim", "report", "--device", "gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


def test_an_error_of_ours_keeps_its_traceback(monkeypatch, capsys):
    def broken(*_):
        raise ValueError("broken")

    monkeypatch.setattr("sys.argv", ["tl-layersim", "show", "nothing.safetensors"])
    monkeypatch.setattr("tl_layersim.load", broken)
    with pytest.raises(ValueError, match="broken"):
        cli.main()
    assert "bug" in capsys.readouterr().err


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tl-layersim", "show", "nothing.safetensors"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("Error: The file nothing.safetensors does not exist")
    monkeypatch.setattr("sys.argv", ["tl-layersim", "--traceback", "show", "nothing.safetensors"])
    with pytest.raises(FileNotFoundError):
        cli.main()


def test_a_warning_is_one_line_without_code(monkeypatch, capsys, tmp_path):
    import warnings

    monkeypatch.setattr("sys.argv", ["tl-layersim", "analyzers"])

    def warned():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            cli.warnings.warn("its numbers may differ", lsim.LayersimWarning, stacklevel=1)

    monkeypatch.setattr(cli, "app", warned)
    shown = cli.warnings.showwarning
    cli.main()
    assert capsys.readouterr().err == "Warning: its numbers may differ\n"
    assert cli.warnings.showwarning is shown


def test_a_real_terminal_gets_a_drawn_table():
    """The command itself, whose output is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from tl_layersim.cli import main; main()", "analyzers"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs)
    chunks = []
    import os

    os.close(theirs)
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:
        # Linux ends a terminal whose other side is closed with an error.
        pass
    assert process.wait() == 0
    text = b"".join(chunks).decode()
    assert "─" in text
    assert "cosine" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("`seq_len` must be at least 2.", "`--seq-len` must be at least 2."),
        ("leave out seq_len=", "leave out --seq-len"),
        ("intervals=True, shard=(1, 64)", "--intervals, --shard 1/64"),
        ("at=['z', 'q'] and at='z'", "--at ['z', 'q'] and --at z"),
        ("column=(first, second) with a tokenizer", "--column first,second with a tokenizer"),
        ("pack=False", "no --pack"),
        ("lsim.analyze(model, data, at='z')", "lsim.analyze(model, data, at='z')"),
        ("a/seq_len/file.txt", "a/seq_len/file.txt"),
    ],
)
def test_errors_name_options(text, says):
    flags = {
        "seq_len": "--seq-len",
        "intervals": "--intervals",
        "shard": "--shard",
        "at": "--at",
        "pack": "--pack",
        "column": "--column",
    }
    error = in_options(lsim.LayersimError(text, given=1, expected="x", do="y"), flags)
    assert error.what == says
