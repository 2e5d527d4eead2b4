"""Sources: models that run batches and pass activations to kernels; how they are opened, described, identified and checked."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
