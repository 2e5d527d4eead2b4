"""Errors, argument checks, sums, results and files: the base of all other packages. It imports no model library."""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: most need torch, without which the command line prints its help.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
