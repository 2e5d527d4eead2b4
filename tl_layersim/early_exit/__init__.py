"""Early exit: each token leaves the model at the first layer whose exit rule it meets; the layers above it do not run.

Exit rules are in `rules`, one class per file. Other packages may import `EarlyExit` from `api`, and
`generate_from_layers` from `layer_generation`.
"""

from .costs import ExitPlan
from .results import ExitLogits, Generated
from .token_frequencies import frequent_tokens

__all__ = [
    "ExitLogits",
    "ExitPlan",
    "Generated",
    "frequent_tokens",
]
