"""What several files of tests/analyzers use."""

from __future__ import annotations

from tl_layersim.models import Model

from ..tiny_models import tiny_llama


def _described() -> Model:
    from tl_layersim.remote.open import open_source

    return open_source(tiny_llama()).model
