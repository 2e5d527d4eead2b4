"""Jacobians of blocks: products, singular vectors and coupling."""

from .jacobian_operator import Jacobian

__all__ = [
    "Jacobian",
]
