"""What several files of tests/core use."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve, file_format
from tl_layersim.core.resumable_file import ResumableFile
from tl_layersim.engine import submitted_runs
from tl_layersim.engine.run_files import tallies_of
from tl_layersim.stitching.fitting import Progress

from ..inputs.views import provenance

FILES = Path(__file__).parents[1] / "files" / "written"
RESULTS = sorted(path.name for path in FILES.glob("*.safetensors") if path.name != "heads.safetensors")


def read_checkpoint(path: Path) -> Any:
    """All that a call takes from a file of its own before it goes on."""
    header, _ = file_format.read(path, ("checkpoint", "stitches", "training", "remote_run"))
    kind = header["kind"]
    identity = header.get("identity")
    if kind == "checkpoint":
        return ResumableFile(path, kind, identity).read(tallies_of)
    if kind == "stitches":
        return Progress(path, identity).states
    if kind == "training":
        return ResumableFile(path, kind, identity).read(lambda _, tensors: tensors["curve"].tolist())
    return ResumableFile(path, kind).read(submitted_runs.parsed)


CHECKPOINTS = sorted(path.name for path in FILES.iterdir() if path.suffix in (".checkpoint", ".run"))


def load(path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lsim.LayersimWarning)
        return lsim.load(path)


def curve(n: int = 3) -> LayerCurve:
    return LayerCurve(
        values=torch.arange(n, dtype=torch.float64), layers=tuple(f"blocks.{i}.x" for i in range(n)), provenance=provenance()
    )
