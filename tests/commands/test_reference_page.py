"""Options that the documentation, helps and messages name are options of the commands, and the reference has all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import tl_layersim as lsim
from tl_layersim.cli import app
from tl_layersim.commands.options import flag

from ..docs.helpers import ROOT, hook

REFERENCE = hook("command_reference")
COMMANDS = REFERENCE.COMMANDS
GUIDE = ROOT / "docs/command_line.md"


def test_the_reference_has_a_section_for_every_command():
    found = re.findall(r"^## tl-layersim (.*)$", REFERENCE.text_of_page(), re.MULTILINE)
    commands = {name for name in app if not name.startswith("-")}
    assert len(found) == len(set(found))
    assert set(found) == commands


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_reference_has_every_option_with_its_help(command):
    section = REFERENCE.section(command)
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(command.__signature__.parameters)
    for name, option in command.__signature__.parameters.items():
        [row] = [row for row in rows if f"`{flag(name)}`" in row.split(" | ")[0]]
        assert (get_args(option.annotation)[1].help or "").replace("|", r"\|") in row
        assert (" Required." in row) == (option.default is option.empty)


def options_in(text):
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)


def options_of(command):
    names = command.__signature__.parameters
    return {"--help", "--version", "--traceback"} | {flag(name) for name in names} | {flag(f"no_{name}") for name in names}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_names_its_own_options(command):
    """Those of another command are named with it, as in `report --shard`."""
    own = {each.name: options_of(each) for each in COMMANDS}
    text, _, examples = (command.__doc__ or "").partition("Examples:")
    helps = [get_args(option.annotation)[1].help or "" for option in command.__signature__.parameters.values()]
    for part in (text, *helps):
        for other, options in re.findall(r"`(?:tl-layersim )?([a-z]+) (--[^`]*)`", part):
            assert set(options_in(options)) <= own[other], part
        alone = re.sub(r"`(?:tl-layersim )?[a-z]+ --[^`]*`", "", part)
        assert set(options_in(alone)) <= own[command.name], part
    for line in filter(None, map(str.strip, examples.splitlines())):
        _, name, *_ = line.split()
        assert set(options_in(line)) <= own[name], line


def test_every_option_in_a_message_exists():
    known = set().union(*map(options_of, COMMANDS))
    for path in Path(lsim.__file__).parent.rglob("*.py"):
        assert set(options_in(path.read_text())) <= known, path


def test_the_guide_names_options_that_exist():
    known = set(re.findall(r"--[a-z-]+[a-z]", REFERENCE.text_of_page())) | {"--version", "--traceback", "--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z-]+[a-z]", GUIDE.read_text()))
    assert named <= known | {"--array"}
    assert len(named) > 15
