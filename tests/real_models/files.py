"""Real weights and texts, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def optional_real(kind: str, name: str) -> Path:
    """A folder of real weights or a file of real text, or a skip with the reason."""
    root = Path(os.environ.get("TL_LAYERSIM_REAL", Path(__file__).parents[3] / "shared"))
    path = root / kind / name
    if not path.exists():
        pytest.skip(f"optional real data: no {kind}/{name}; point TL_LAYERSIM_REAL at a folder that has it")
    return path
