"""Many models, checkpoints and runs: all pairs, sweeps, groups, differences, relations, and figures of tables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
