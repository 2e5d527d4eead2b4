"""What several files of tests/analyzers use."""

from __future__ import annotations

import tl_layersim as lsim

from ..tiny_models import tiny_llama


def _described() -> lsim.Model:
    from tl_layersim.remote.open import open_source

    return open_source(tiny_llama()).model
