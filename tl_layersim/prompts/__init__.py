"""Analysis of one prompt: figures of predictions and of the tokens' paths, and Jacobians of blocks between tokens."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
