"""Jacobians of blocks: products, singular vectors, coupling."""
