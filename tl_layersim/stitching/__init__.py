"""Stitching: is what one model's lower layers say of any use to another model's upper layers?"""

from .results import Interval, StitchGrid, StitchResult
from .stitched_model import StitchedModel

__all__ = [
    "Interval",
    "StitchGrid",
    "StitchResult",
    "StitchedModel",
]
