"""Activations of one batch: views, buffers of sites, pools of rows, recorded block calls."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
