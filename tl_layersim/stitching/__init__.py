"""Stitching: the lower layers of one model joined by an adapter to the upper layers of another, and the loss that this costs.

Kinds of adapters are in `adapters`, one class per file. Other packages may import `StitchedModel` from `stitched_model`.
"""

from .intervals import Interval
from .results import StitchGrid, StitchResult
from .stitched_model import StitchedModel

__all__ = [
    "Interval",
    "StitchGrid",
    "StitchResult",
    "StitchedModel",
]
