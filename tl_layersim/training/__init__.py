"""Fine-tuning with the aligned loss, and evaluation of each layer.

Training objectives are in `objectives`, one class per file.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
