"""Errors, sums, results and files: what every other package builds on. Imports no model library."""

from .errors import LayersimError, LayersimWarning
from .histogram import quantiles_from_histogram
from .provenance import Provenance
from .results import LayerCurve, LayerMatrix, Picture, Report, Result, axes
from .sums import Sums

__all__ = [
    "LayerCurve",
    "LayerMatrix",
    "LayersimError",
    "LayersimWarning",
    "Picture",
    "Provenance",
    "Report",
    "Result",
    "Sums",
    "axes",
    "quantiles_from_histogram",
]
