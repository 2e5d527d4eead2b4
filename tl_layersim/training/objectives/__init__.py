"""Training objectives, one file for each value of `AlignedTraining.objective`.

A new subclass of `Objective` goes into a new file of this folder. No other file changes.

An objective is a module, so that `DistributedDataParallel` and autocast can wrap its forward pass.

Examples:
    >>> sorted(OBJECTIVES.all())[:2]
    ['aligned', 'cka-reg']
"""

from .cosine_reg import CosineRegularisedObjective
from .objective import OBJECTIVES, Objective

__all__ = [
    "OBJECTIVES",
    "CosineRegularisedObjective",
    "Objective",
]
