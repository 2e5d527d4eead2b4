"""Kinds of adapters, one class per file; a new file with a subclass of `AdapterKind` is a new kind, without further edits."""

from __future__ import annotations

from functools import cache

from ...core.errors import LayersimError
from ...core.functions import discovered
from ...core.wording import brief
from .kind import AdapterKind


def find_adapter_kinds() -> dict[str, type[AdapterKind]]:
    """All kinds of adapters by name.

    Examples:
        >>> sorted(find_adapter_kinds())
        ['affine', 'affine-norm', 'identity', 'linear']
    """
    return _kinds_in(tuple(__path__))


@cache
def _kinds_in(path: tuple[str, ...]) -> dict[str, type[AdapterKind]]:
    return discovered(__name__, path, AdapterKind)  # type: ignore[type-abstract]  # only its subclasses are instantiated


def adapter_kind(name: object, argument: str = "kind") -> AdapterKind:
    """The kind of adapter with a name.

    Args:
        name: the name.
        argument: the argument that holds it, for the refusal.

    Raises:
        LayersimError: no kind has this name.
    """
    kinds = find_adapter_kinds()
    if isinstance(name, str) and name in kinds:
        return kinds[name]()
    raise LayersimError(f"`{argument}` is {brief(name)}; it must be one of {', '.join(sorted(kinds))}.")
