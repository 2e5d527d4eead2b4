"""Early exit: a token leaves the model at the first layer that is sure, and the layers above it do not run."""

from .costs import ExitPlan
from .results import ExitLogits, Generated

__all__ = [
    "ExitLogits",
    "ExitPlan",
    "Generated",
]
