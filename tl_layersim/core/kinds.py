"""Kinds of results: the names of result classes in files, which do not change when a class or its module is renamed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

PACKAGE = __name__.partition(".")[0]
# By kind, which never changes: the class today, and module and class as files of format 1 name it.
KINDS = {
    "layer_matrix": ("LayerMatrix", "results.LayerMatrix"),
    "layer_curve": ("LayerCurve", "results.LayerCurve"),
    "cka": ("CKAResult", "analyzers.cka.CKAResult"),
    "cosine": ("CosineResult", "analyzers.cosine.CosineResult"),
    "block_coupling": ("BlockCouplingResult", "analyzers.block_coupling.BlockCouplingResult"),
    "neural_collapse": ("NeuralCollapseResult", "analyzers.collapse.NeuralCollapseResult"),
    "logit_lens": ("LogitLensResult", "analyzers.logit_lens.LogitLensResult"),
    "exit_curve": ("ExitCurveResult", "analyzers.exit_curve.ExitCurveResult"),
    "saturation": ("SaturationResult", "analyzers.saturation.SaturationResult"),
    "trajectory": ("TrajectoryResult", "analyzers.trajectory.TrajectoryResult"),
    "prediction_grid": ("PredictionGrid", "prompt.PredictionGrid"),
    "trajectory_pca": ("TrajectoryPCA", "prompt.TrajectoryPCA"),
    "block_jacobians": ("BlockJacobians", "blocks.BlockJacobians"),
    "coupling_matrices": ("CouplingMatrices", "blocks.CouplingMatrices"),
    "stitch": ("StitchResult", "stitching.results.StitchResult"),
    "stitch_grid": ("StitchGrid", "stitching.results.StitchGrid"),
    "aligned_adapters": ("AlignedAdapters", "training.adapters.AlignedAdapters"),
    "layer_change": ("LayerChange", "training.evaluation.LayerChange"),
    "generation_quality": ("GenerationQuality", "training.evaluation.GenerationQuality"),
    "aligned_training": ("AlignedResult", "training.results.AlignedResult"),
}
_KIND_OF = {name: kind for kind, (name, _) in KINDS.items()}
_OLD = {f"{PACKAGE}.{':'.join(old.rsplit('.', 1))}": kind for kind, (_, old) in KINDS.items()}


def kind_of(cls: type[Any]) -> str:
    """The name of a result class in files: its kind, or module and name for a class that has no kind."""
    ours = cls.__module__.split(".")[0] == PACKAGE
    return _KIND_OF.get(cls.__qualname__, _path(cls)) if ours else _path(cls)


def class_of(kind: str, base: type[Any]) -> type[Any] | None:
    """The result class of a kind; None if no imported module defines it. A class is never imported because a file names it.

    Args:
        kind: as `kind_of` returns it, or module and name of a class as in files of format 1.
        base: the base class of all results.
    """
    kind = _OLD.get(kind, kind)
    if kind in KINDS:
        found: type[Any] = getattr(importlib.import_module(PACKAGE), KINDS[kind][0])
        return found
    return next((cls for cls in below(base) if _path(cls) == kind), None)


def below(cls: type[Any]) -> Iterator[type[Any]]:
    """All imported subclasses, direct and indirect."""
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
