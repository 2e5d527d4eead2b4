"""Exit rules, one file for each value of `rule`.

A new subclass of `ExitRule` goes into a new file of this folder. No other file changes.

Examples:
    >>> sorted(EXIT_RULES.all())
    ['cosine', 'margin', 'max-prob', 'patience']
"""

from .exit_rule import EXIT_RULES, CheckedTokens, ExitRule, RuleState
from .max_prob import MaxProbRule

__all__ = [
    "EXIT_RULES",
    "CheckedTokens",
    "ExitRule",
    "MaxProbRule",
    "RuleState",
]
