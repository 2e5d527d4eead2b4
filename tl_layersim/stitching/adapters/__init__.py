"""Adapters from the front model's residual stream to the back model's, one file for each kind.

A new subclass of `AdapterKind` goes into a new file of this folder. No other file changes.

Examples:
    >>> sorted(ADAPTER_KINDS.all())
    ['affine', 'affine-norm', 'identity', 'linear']
"""

from .adapter import Adapter
from .adapter_kind import ADAPTER_KINDS, AdapterKind
from .affine import Affine
from .affine_norm import AffineNorm
from .identity import Identity
from .linear import Linear

__all__ = [
    "ADAPTER_KINDS",
    "Adapter",
    "AdapterKind",
    "Affine",
    "AffineNorm",
    "Identity",
    "Linear",
]
