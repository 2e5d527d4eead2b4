"""Discovery of extensions in a package."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import ClassVar

import pytest

from tl_layersim.core.errors import LayersimError
from tl_layersim.core.registry import Registry


class Base(ABC):
    name: ClassVar[str]

    @abstractmethod
    def call(self): ...


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package of modules, by name, and give its registry."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules: str):
        folder = tmp_path / "found_here"
        folder.mkdir()
        for name in ("", *(f".{name}" for name in modules)):
            monkeypatch.delitem(sys.modules, f"found_here{name}", raising=False)
        for name, text in {"__init__": "", **modules}.items():
            (folder / f"{name}.py").write_text(f"from {__name__} import Base\n{text}" if text else "")
        return Registry("found_here", sys.modules[__name__].Base, "call")

    return write


def test_concrete_classes_are_found_by_name(package):
    registry = package(
        one="class One(Base):\n    name = 'one'\n    def call(self): ...\n",
        two="from found_here.one import One\nclass Half(Base): ...\nclass Two(One):\n    name = 'two'\n",
    )
    assert {name: cls.__name__ for name, cls in registry.all().items()} == {"one": "One", "two": "Two"}
    assert registry.named("two") is registry.all()["two"]
    for name in ("three", "", 2):
        with pytest.raises(LayersimError, match=f"`call` is {name!r}.*one, two"):
            registry.named(name)


@pytest.mark.parametrize("name", ["", "    name = 'one'\n", "    name = 3\n"])
def test_a_class_without_a_name_of_its_own_is_an_error(package, name):
    registry = package(
        one="class One(Base):\n    name = 'one'\n    def call(self): ...\n",
        two=f"class Two(Base):\n{name}    def call(self): ...\n",
    )
    with pytest.raises(TypeError, match=r"`Two\.name` in found_here\.two is (None|'one'|3);"):
        registry.all()
