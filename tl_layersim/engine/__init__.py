"""The engine: runs analyzers over data on one model or on two, in this process, in shards, on ranks or on a server."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
