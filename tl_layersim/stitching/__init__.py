"""Stitching: an adapter joins the lower layers of one model to the upper layers of another."""

from .stitch_results import Interval, StitchGrid, StitchResult
from .stitched_model import StitchedModel

__all__ = [
    "Interval",
    "StitchGrid",
    "StitchResult",
    "StitchedModel",
]
