"""Training objectives, one class per file, discovered automatically.

Other modules use `find_objectives` and `objective_named`, and the base class `Objective` of `base`.
"""

from __future__ import annotations

from ...core.errors import LayersimError
from ...core.functions import discovered
from .objective import Objective


def find_objectives() -> dict[str, type[Objective]]:
    """All training objectives by name.

    Examples:
        >>> sorted(find_objectives())[:2]
        ['aligned', 'cosine-reg']
    """
    return discovered(__name__, __path__, Objective)  # type: ignore[type-abstract]


def objective_named(name: str) -> type[Objective]:
    """The class of an objective.

    Raises:
        LayersimError: no objective has this name.
    """
    objectives = find_objectives()
    if name not in objectives:
        raise LayersimError(f"`objective` is {name!r}; it must be one of {', '.join(map(repr, sorted(objectives)))}.")
    return objectives[name]
