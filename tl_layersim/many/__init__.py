"""Many models, checkpoints or runs: all pairs, sweeps, groups, differences, relations to scores, and figures of tables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
