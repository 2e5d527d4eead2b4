"""Analyses of one prompt: predictions of each layer, paths of tokens through the layers, and Jacobians of blocks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
