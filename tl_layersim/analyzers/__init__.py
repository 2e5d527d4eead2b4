"""Analyzers: the measures of how layers relate, one file each.

Analyzers are discovered in this folder and in installed packages with the entry point `tl_layersim.analyzers`.
"""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: kernels import torch alone.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
