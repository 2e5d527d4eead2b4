"""Runs analyzers over data on one model or on two.

The model runs in this process, on several ranks, in shards, on Ray or on a server.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
