"""What the command line prints: drawn and coloured in a terminal, plain in a pipe."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import tl_layersim as lsim
from tl_layersim import cli
from tl_layersim.commands import output

from .helpers import done, run

COMMANDS = ("report", "exits", "estimate", "compare", "stitch", "train", "show", "merge", "analyzers", "sites")
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
    output.print_table(("site", "value"), [(LONG, 1.5), ("b[0]", 2)], "Title")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{'site':<{len(LONG)}}  value", f"{LONG}  1.5", f"{'b[0]':<{len(LONG)}}  2"]


def test_a_table_in_a_terminal_is_drawn_and_whole(capsys, terminal):
    output.print_table(("site", "value"), [(LONG, 1.5), ("b[0]", 2)], "Title", numbers=("value",))
    drawn = capsys.readouterr().out
    assert "\x1b[" in drawn
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert "Title" in plain
    assert "─" in plain
    assert max(map(len, plain.splitlines())) <= 80
    # Folded over several lines, with no letter lost.
    assert plain.count("x") == 120
    assert "b[0]" in plain


def test_an_error_is_a_panel_in_a_terminal_and_text_in_a_pipe(capsys, terminal, monkeypatch):
    error = lsim.LayersimError("`--at` is [red].")
    output.print_error(error)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    assert "╭─ Error" in drawn
    assert "`--at` is [red]." in drawn
    monkeypatch.delenv("TTY_COMPATIBLE")
    output.print_error(error)
    assert capsys.readouterr().err == f"Error: {error}\n"


@pytest.mark.light("report", "compare", "show", "sites")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_examples_that_exist(command, terminal):
    shown, _, examples = re.sub(r"\x1b\[[0-9;]*m", "", done(command, "--help").stdout).partition("Examples:")
    lines = examples.split("\n")[1:-1]
    # Not wrapped at 80 columns.
    assert all(line.startswith(f"tl-layersim {command}") for line in lines)
    assert all(re.search(rf"{option}\b", shown) for line in lines for option in re.findall(r" (--[a-z-]+)", line))


def test_the_first_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from tl_layersim.cli import main; main(['--help'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_options_have_the_defaults_of_python():
    from dataclasses import fields

    from tl_layersim.commands import measure, stitch_and_train

    for command, cls, own in (
        (measure.report_on_model, lsim.Data, {"pack"}),
        (stitch_and_train.stitch_models, lsim.stitching.StitchTraining, set()),
        (stitch_and_train.train_model, lsim.AlignedTraining, {"save_to", "lora"}),
    ):
        options, defaults = command.__signature__.parameters, {one.name: one.default for one in fields(cls)}
        shared = {name for name in options.keys() & defaults.keys() if not isinstance(options[name].default, list)} - own
        assert len(shared) > 5
        assert {name: options[name].default for name in shared} == {name: defaults[name] for name in shared}


def test_the_version():
    assert done("--version").stdout == f"tl-layersim {lsim.__version__}\n"


def test_a_wrong_option_and_a_refusal_end_with_status_2(tmp_path, monkeypatch):
    assert run("report", "--nope").exit_code == 2
    monkeypatch.setattr("sys.argv", ["tl-layersim", "report", "--device", "gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


def test_an_error_of_another_kind_keeps_its_traceback(monkeypatch):
    def broken(*_):
        raise ValueError("broken")

    monkeypatch.setattr("sys.argv", ["tl-layersim", "show", "nothing.safetensors"])
    monkeypatch.setattr("tl_layersim.load", broken)
    with pytest.raises(ValueError, match="broken"):
        cli.main()


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tl-layersim", "show", "nothing.safetensors"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("Error: nothing.safetensors ")
    monkeypatch.setattr("sys.argv", ["tl-layersim", "--traceback", "show", "nothing.safetensors"])
    with pytest.raises(FileNotFoundError):
        cli.main()


def test_a_warning_is_one_line_without_code(monkeypatch, capsys, tmp_path):
    import warnings

    monkeypatch.setattr("sys.argv", ["tl-layersim", "analyzers"])

    def warned(*_, **__):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            cli.warnings.warn("its numbers may differ", lsim.LayersimWarning, stacklevel=1)

    monkeypatch.setattr(cli, "app", warned)
    shown = cli.warnings.showwarning
    cli.main()
    assert capsys.readouterr().err == "Warning: its numbers may differ\n"
    assert cli.warnings.showwarning is shown
