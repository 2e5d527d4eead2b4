"""Exit rules: one module per rule, found automatically by `exit_rules`."""

from __future__ import annotations

from ...core.errors import LayersimError
from ...core.functions import discovered
from .exit_rule import ExitRule


def exit_rules() -> dict[str, type[ExitRule]]:
    """All exit rules by name: the subclasses of `ExitRule` that the modules of this package define.

    Examples:
        >>> sorted(exit_rules())
        ['cosine', 'margin', 'max-prob', 'patience']
    """
    return discovered(__name__, __path__, ExitRule)  # type: ignore[type-abstract]


def exit_rule(name: str) -> type[ExitRule]:
    """The exit rule with a name.

    Raises:
        LayersimError: no rule has this name.
    """
    rules = exit_rules()
    if name not in rules:
        raise LayersimError(f"`rule` is {name!r}; it must be one of {', '.join(map(repr, sorted(rules)))}.")
    return rules[name]
