"""Early exit: each token leaves the model at the first layer whose exit rule it meets; the layers above it do not run.

Other packages import `EarlyExit` from `api`. Exit rules are in `rules`, one class per file, found by name.
"""

from .costs import ExitPlan
from .results import ExitLogits, Generated

__all__ = [
    "ExitLogits",
    "ExitPlan",
    "Generated",
]
