"""Models of this process: where their activations are read, their blocks, their final norm and unembedding."""

from .block_call import BlockCall
from .hooks import eval_mode
from .model_info import Model, ServerOffer, layer_names
from .source import PartialSums, Source
from .unembed import Head, Unembed
from .view import Kernel, View, place, reduce

__all__ = [
    "BlockCall",
    "Head",
    "Kernel",
    "Model",
    "PartialSums",
    "ServerOffer",
    "Source",
    "Unembed",
    "View",
    "eval_mode",
    "layer_names",
    "place",
    "reduce",
]
