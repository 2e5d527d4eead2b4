"""Data of any accepted kind as rows of tokens, batches and labels.

Other packages may import from these modules:

* `data`: `Data`, data and how it is read; `batches`: `Batch`, `Batches`
* `positions`: `Positions`, the rule that selects the positions that are measured
* `row`: `Row`; `inputs`, `input_rows`: names of further inputs, and their rows; `columns`: tests of what a column holds
* `labels`: `NO_LABEL`, classes of tokens and rows; `missing_mask`: masks from padding ids, and runs of an id at ends of rows
* `notes`: `Notes`, counts of rows that were treated specially; `kept_rows`: rows that are kept for later passes
* `named_data`: `load_data`, data by the name of a file, a folder or a data set
* `annotations`: classes and boxes of the objects in images
* `tensors`: dense tensors of the numbers that users pass, and missing values
* `digest`: the SHA-256 of rows, and their bytes
* `text_rows`: `DEFAULT_SEQ_LEN`, the length at which texts are cut where none is given
"""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: kernels import torch alone.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
