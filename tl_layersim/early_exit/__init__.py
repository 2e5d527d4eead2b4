"""Early exit: each token leaves the model at the first layer that meets its exit rule."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
