"""Aligned training: fine-tuning and adapter training with the loss of every layer, and evaluation of models by layer.

Training objectives are in `objectives`, one class per file. No other package imports from here.
"""

from .adapters import AlignedAdapters
from .finetune_results import AlignedResult
from .layer_evaluation import GenerationQuality, LayerChange, MetricChange
from .train_adapters import train_adapters

__all__ = [
    "AlignedAdapters",
    "AlignedResult",
    "GenerationQuality",
    "LayerChange",
    "MetricChange",
    "train_adapters",
]
