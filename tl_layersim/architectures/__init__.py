"""Tables of architectures: where the blocks, heads and hook points of a model are."""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: kernels import torch alone.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
