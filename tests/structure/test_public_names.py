"""Every public name is documented."""

from __future__ import annotations

import inspect

import pytest

import tl_layersim as lsim

from .public_names import public_names


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_documented(name):
    thing = public_names()[name]
    if name == "Kernel":
        return
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            inherited = any(member in vars(base) and getattr(base, member).__doc__ for base in thing.__mro__[1:])
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert value.__doc__ or inherited, f"{name}.{member}"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="LogitLense"):
        lsim.LogitLense  # noqa: B018
    assert set(lsim.__all__) <= set(dir(lsim))
