"""Sources: opened models, which run batches and pass activations to the functions of analyzers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
