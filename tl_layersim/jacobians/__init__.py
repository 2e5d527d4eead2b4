"""Jacobians of blocks: products, singular vectors, coupling."""

from .products import Jacobian

__all__ = [
    "Jacobian",
]
