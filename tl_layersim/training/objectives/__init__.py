"""Training objectives: a module in this package with a subclass of `Objective` is a new objective, without further edits.

Examples:
    >>> sorted(OBJECTIVES.all())[:2]
    ['aligned', 'cka-reg']
"""

from ...core.functions import Registry
from .objective import Objective

OBJECTIVES = Registry(__name__, Objective, "objective")
