"""Messages of arguments of a wrong type."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

import tl_layersim as lsim
from tl_layersim.core.arguments import Layer, PositiveInt, typed

from ..models.tiny_models import tiny_llama


@typed
def call(model: object, layers: Sequence[Layer] | None = None, sizes: list[PositiveInt] | None = None) -> None:
    pass


@pytest.mark.light("layers-[1, 2.5]-False", "sizes-[3, 4, -5]-True")
@pytest.mark.parametrize("in_a_terminal", [False, True])
@pytest.mark.parametrize(("name", "value"), [("layers", [1, 2.5]), ("sizes", [3, 4, -5])])
def test_a_wrong_item_of_a_list_is_named_without_the_other_arguments(name, value, in_a_terminal, monkeypatch):
    # beartype colours its messages in a terminal.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: in_a_terminal, raising=False)
    # Types of items are checked at one random item.
    model = tiny_llama()
    said = set()
    for _ in range(40):
        try:
            call(model, **{name: value})
        except lsim.LayersimError as error:
            said.add(str(error))
    [text] = said

    assert text.startswith(f"`{name}` of call is {value}")
    assert len(text) < 120
