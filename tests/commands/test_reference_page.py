"""The reference of the command line in the documentation is that of the commands."""

from __future__ import annotations

import re

from .reference_page import PAGE, text_of_page

GUIDE = PAGE.parents[1] / "command_line.md"


def test_the_reference_has_every_option():
    """`python -m tests.commands.reference_page` writes it anew."""
    assert PAGE.read_text() == text_of_page()


def test_the_guide_names_options_that_exist():
    known = set(re.findall(r"--[a-z-]+[a-z]", text_of_page())) | {"--version", "--traceback", "--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z-]+[a-z]", GUIDE.read_text()))
    assert named <= known | {"--array"}
    assert len(named) > 15
