"""Similarity between the layers of a transformer, and between the layers of two transformers.

The names here are those that users call. `__init__.pyi` lists them, each with its module, after packages such as `many`, which
have rarer functions (`lsim.many.relate`). What authors of analyzers and sources import is in the other packages. Every name is
loaded at its first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.3.0"
