"""Attributes that a collection of results lacks and its results have: the error names the result to ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def missing_attribute(owner: object, what: str, attribute: str, results: Mapping[str, Any]) -> AttributeError:
    """The error for an attribute that a collection of results does not have.

    Args:
        owner: the collection.
        what: the collection in words, such as "A report".
        attribute: the name that was asked for.
        results: by the expression that gives the result, such as `report["cka"]`.
    """
    having = [text for text, result in results.items() if attribute in _attributes(result)]
    name = type(owner).__name__
    if having:
        shown = " or ".join(f"{text}.{attribute}" for text in having[:3])
        hint = f"{what} holds results, which have it: {shown}"
    else:
        hint = f"{what} holds results: {', '.join(list(results)[:3]) or 'none'}"
    # An AttributeError, because hasattr and copy ask for attributes that do not exist.
    return AttributeError(f"{name!r} object has no attribute {attribute!r}. {hint}.", name=attribute, obj=owner)


def _attributes(result: Any) -> set[str]:
    return {*dir(type(result)), *(field.name for field in fields(result))}
