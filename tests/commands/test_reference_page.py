"""The reference of the command line in the documentation is that of the commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import tl_layersim as lsim
from tl_layersim.commands.options import flag

from .reference_page import COMMANDS, PAGE, text_of_page

GUIDE = PAGE.parents[1] / "command_line.md"


def test_the_reference_has_every_option():
    """`python -m tests.commands.reference_page` writes it anew."""
    assert PAGE.read_text() == text_of_page()


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
    known = set(re.findall(r"--[a-z-]+[a-z]", text_of_page())) | {"--version", "--traceback", "--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z-]+[a-z]", GUIDE.read_text()))
    assert named <= known | {"--array"}
    assert len(named) > 15
