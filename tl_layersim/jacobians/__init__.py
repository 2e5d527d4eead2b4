"""Jacobians of blocks: products with them, their singular vectors, and their coupling.

Other packages may import:

* `coupling`: `couple`, `Connections`, `CouplingOptions`, `DRAWS`, `chunks_of`, `jacobian_of`, `miscoupling`, `pick_method`
* `replay`: `reproduces`
* `supported_blocks`: `need_calls`, `refuse_failed_replay`, `refuse_post_norm`
"""

from .jacobian import Jacobian

__all__ = [
    "Jacobian",
]
