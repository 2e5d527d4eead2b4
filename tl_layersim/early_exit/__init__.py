"""Early exit: each token leaves the model at the first layer whose exit rule it meets; the layers above it do not run."""

from .arguments import frequent_tokens
from .exit_plan import ExitPlan
from .exit_results import ExitLogits, Generated

__all__ = [
    "ExitLogits",
    "ExitPlan",
    "Generated",
    "frequent_tokens",
]
