"""Check that values which were read from a file have the types that a dataclass declares for its fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def refuse_other_types(cls: type[Any], values: Mapping[str, Any]) -> None:
    """Refuse values that are not of their fields' types, items of tuples and mappings included.

    Raises:
        TypeError: names the field.
    """
    try:
        hints = get_type_hints(cls)
    except NameError:
        # A class outside this package whose annotations name what was imported for type checkers alone.
        return
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            raise TypeError(f"{name} is {str(value)[:100]!r}, not of type {hints[name]}")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items())
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint in (int, float):
        # True is an int in Python, and a whole number is a float in JSON.
        return type(value) is hint or (hint is float and type(value) is int)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)
