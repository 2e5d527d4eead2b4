"""Vision models: the two towers of a CLIP, zero-shot classifiers, and detectors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
