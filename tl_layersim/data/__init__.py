"""Data of any accepted kind as rows of tokens, batches and labels.

Other packages may import from these modules:

* `options`: `DataOptions`, the settings of reading; `batches`: `Batch`, `Batches`; `cached_batches`: `CachedBatches`
* `positions`: `Positions`, the rule that selects the positions that are measured
* `readers`: `Row`; `columns`: names of columns, and the refusal of columns that would not reach the model
* `labels`: `NO_LABEL`, classes of tokens and rows; `missing_mask`: masks from padding ids
* `digest`: the SHA-256 of rows
"""

from .batches import Batch

__all__ = [
    "Batch",
]
