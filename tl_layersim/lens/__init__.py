"""The logit lens at every layer: its statistics, the targets, and heads for layers below the last."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
