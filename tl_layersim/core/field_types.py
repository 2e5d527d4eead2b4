"""Type check of values from a file against the declared fields of a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def refuse_other_types(cls: type[Any], values: Mapping[str, Any]) -> None:
    """Refuse values that do not have the declared types, items of tuples and mappings included.

    Args:
        cls: the dataclass.
        values: by field.

    Raises:
        TypeError: names the field.
    """
    try:
        hints = get_type_hints(cls)
    except NameError:
        # A class of another package, with annotations that were imported for type checkers only.
        return
    for name, value in values.items():
        if name in hints and not _is_of_type(value, hints[name]):
            raise TypeError(f"{name} is {str(value)[:100]!r}, not of type {hints[name]}")


def _is_of_type(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return isinstance(value, tuple) and all(_is_of_type(item, inner[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_is_of_type, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(
            _is_of_type(key, inner[0]) and _is_of_type(item, inner[1]) for key, item in value.items()
        )
    if origin in (Union, UnionType):
        return any(_is_of_type(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint in (int, float):
        # isinstance(True, int) holds in Python, and JSON has no difference between 1 and 1.0.
        return type(value) is hint or (hint is float and type(value) is int)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)
