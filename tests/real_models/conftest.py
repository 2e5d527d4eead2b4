"""A real model and a real text, where they are at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from .files import optional_real
from .helpers import load


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.heavy("a real model"))


@pytest.fixture(scope="session")
def wikitext() -> list[str]:
    text = optional_real("sets", "wikitext-2/test.txt").read_text()
    return [line for line in text.splitlines() if len(line) > 200][:60]


@pytest.fixture(scope="session")
def stories15m():
    return load("stories15M")
