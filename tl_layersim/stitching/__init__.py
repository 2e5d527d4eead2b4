"""Stitching: the lower layers of one model joined by an adapter to the upper layers of another, and the loss it costs."""

from .stitch_results import Interval, StitchGrid, StitchResult
from .stitched_model import StitchedModel

__all__ = [
    "Interval",
    "StitchGrid",
    "StitchResult",
    "StitchedModel",
]
