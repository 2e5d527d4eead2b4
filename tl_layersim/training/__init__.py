"""Aligned training: fine-tuning with the loss of every layer, adapters trained with it, and comparison of models by layer.

Training objectives are in `objectives`, one class per file. No other package imports from here.
"""

from .adapter_api import train_adapters
from .adapters import AlignedAdapters
from .layer_evaluation_results import GenerationQuality, LayerChange, MetricChange
from .results import AlignedResult

__all__ = [
    "AlignedAdapters",
    "AlignedResult",
    "GenerationQuality",
    "LayerChange",
    "MetricChange",
    "train_adapters",
]
