"""Jacobians of blocks: products with them, their singular vectors and their coupling."""

from .jacobian_operator import Jacobian

__all__ = [
    "Jacobian",
]
