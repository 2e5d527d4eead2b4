"""Exit rules: a module in this package with a subclass of `ExitRule` is a new rule, without further edits.

Examples:
    >>> sorted(EXIT_RULES.all())
    ['cosine', 'margin', 'max-prob', 'patience']
"""

from ...core.functions import Registry
from .exit_rule import ExitRule

EXIT_RULES = Registry(__name__, ExitRule, "rule")
