"""Analyzers: the measures of how layers relate, one file each.

Analyzers are discovered in this folder and in installed packages with the entry point `tl_layersim.analyzers`.

Other packages may import `find_analyzers` from here, and from these modules:

* `base`: `Analyzer`, `Exchange`, `Run`, `SiteNeed`, `code_digest`, `need_head`, `need_tokens`
* `probe_kernels`: `control_classes`, `control_part`
* `text_options`: `with_options`
* `block_coupling`, `cka`, `cosine`, `exit_curve`, `linear_probe`, `logit_lens`, `mutual_knn`, `neural_collapse`, `rsa`,
  `saturation`, `task_metrics`: analyzers and their results
"""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: kernels import torch alone.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
