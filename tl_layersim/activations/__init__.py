"""Activations of one batch: reading them at sites, drawing samples from many rows, and running blocks again."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
