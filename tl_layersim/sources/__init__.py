"""Sources: models that run batches and give their activations to kernels; their opening, description, identity and checks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
