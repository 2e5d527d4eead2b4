"""Training that makes every layer speak the last layer's language."""

from .comparison_results import GenerationQuality, LayerChange
from .results import AlignedResult

__all__ = [
    "AlignedResult",
    "GenerationQuality",
    "LayerChange",
]
