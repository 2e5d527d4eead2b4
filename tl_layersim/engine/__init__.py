"""The engine: analyzers over data on one model or two, here, in shards, on ranks, on a server, now or later."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
