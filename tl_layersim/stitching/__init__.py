"""Stitching: the lower layers of one model joined by an adapter to the upper layers of another, and the loss that this costs.

Other packages may import `StitchedModel` (`stitched_model`).
"""

from .results import Interval, StitchGrid, StitchResult
from .stitched_model import StitchedModel

__all__ = [
    "Interval",
    "StitchGrid",
    "StitchResult",
    "StitchedModel",
]
