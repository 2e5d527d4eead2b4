"""Analyzers: the measures of how layers relate, one file each.

Analyzers are discovered in this folder and in installed packages with the entry point `tl_layersim.analyzers`.

Other packages may import `find_analyzers` from here, and from these modules:

* `base`: `Analyzer`, `Exchange`, `Run`, `SiteNeed`, `code_digest`, `need_head`, `need_tokens`
* `probe_kernels`: `control_classes`, `control_part`
* `text_options`: `with_options`
* `block_coupling`, `cka`, `cosine`, `exit_curve`, `linear_probe`, `logit_lens`, `mutual_knn`, `neural_collapse`, `rsa`,
  `saturation`, `task_metrics`: analyzers and their results
"""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points

from ..core.argument_checks import typed
from ..core.discovery import discovered
from .base import Analyzer, Exchange, Run, SiteNeed, need_head, need_tokens

__all__ = ["Analyzer", "Exchange", "Run", "SiteNeed", "find_analyzers", "need_head", "need_tokens"]

ENTRY_POINT_GROUP = "tl_layersim.analyzers"


@typed
def find_analyzers() -> dict[str, type[Analyzer]]:
    """All analyzers by name: those of this package, then those that installed packages declare as entry points.

    Examples:
        >>> sorted(find_analyzers())[:2]
        ['block_coupling', 'cca']
    """
    analyzers = discovered(__name__, __path__, Analyzer)  # type: ignore[type-abstract]  # only its subclasses are instantiated
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            cls = entry.load()
        except Exception as error:  # an error in another package must not break this one
            warnings.warn(f"The analyzer {entry.name!r} of {entry.value!r} could not be loaded: {error}", stacklevel=2)
            continue
        analyzers.setdefault(cls.name, cls)
    return analyzers
