"""Activations of one batch: the view that kernels read, the samples of its sites, pools of rows, and calls of blocks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
