"""One prompt: figures of its predictions and of its tokens' paths, and Jacobians of blocks between its tokens."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
