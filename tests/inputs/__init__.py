"""Activations that no model made: views of written-down numbers, their blocks, and texts with known population values."""
