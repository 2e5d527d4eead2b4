"""Kinds of results: the names of result classes in files, which do not change when a class or its module is renamed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

PACKAGE = __name__.partition(".")[0]
# By kind, which never changes: the class today, and the class as files of format 1 name it.
KINDS = {
    "layer_matrix": ("core.results.LayerMatrix", "results.LayerMatrix"),
    "layer_curve": ("core.results.LayerCurve", "results.LayerCurve"),
    "minibatch_matrix": ("analyzers._minibatch_analyzer.MinibatchMatrix", "analyzers._minibatch_analyzer.MinibatchMatrix"),
    "calibrated_matrix": ("analyzers._permutation_null.CalibratedMatrix", "analyzers._permutation_null.CalibratedMatrix"),
    "cka": ("analyzers.cka.CKAResult", "analyzers.cka.CKAResult"),
    "procrustes": ("analyzers.procrustes.ProcrustesResult", "analyzers.procrustes.ProcrustesResult"),
    "cca": ("analyzers.cca.CCAResult", "analyzers.cca.CCAResult"),
    "linear_predictivity": (
        "analyzers.linear_predictivity.LinearPredictivityResult",
        "analyzers.linear_predictivity.LinearPredictivityResult",
    ),
    "cosine": ("analyzers.cosine.CosineResult", "analyzers.cosine.CosineResult"),
    "block_coupling": ("analyzers.block_coupling.BlockCouplingResult", "analyzers.block_coupling.BlockCouplingResult"),
    "neural_collapse": ("analyzers.neural_collapse.NeuralCollapseResult", "analyzers.collapse.NeuralCollapseResult"),
    "logit_lens": ("analyzers.logit_lens.LogitLensResult", "analyzers.logit_lens.LogitLensResult"),
    "effective_rank": ("analyzers.effective_rank.EffectiveRankResult", "analyzers.effective_rank.EffectiveRankResult"),
    "exit_curve": ("analyzers.exit_curve.ExitCurveResult", "analyzers.exit_curve.ExitCurveResult"),
    "saturation": ("analyzers.saturation.SaturationResult", "analyzers.saturation.SaturationResult"),
    "trajectory": ("analyzers.trajectory.TrajectoryResult", "analyzers.trajectory.TrajectoryResult"),
    "skip_effect": ("analyzers.skip_effect.SkipEffectResult", "analyzers.skip_effect.SkipEffectResult"),
    "contribution": ("analyzers.contribution.ContributionResult", "analyzers.contribution.ContributionResult"),
    "linear_probe": ("analyzers.linear_probe.LinearProbeResult", "analyzers.linear_probe.LinearProbeResult"),
    "task_metrics": ("analyzers.task_metrics.TaskMetricsResult", "analyzers.task_metrics.TaskMetricsResult"),
    "regression_metrics": ("analyzers.task_metrics.RegressionMetricsResult", "analyzers.task_metrics.RegressionMetricsResult"),
    "detection": ("analysis.detection_results.DetectionResult", "analysis.detection_results.DetectionResult"),
    "rsa": ("analyzers.rsa.RSAResult", "analyzers.rsa.RSAResult"),
    "mutual_knn": ("analyzers.mutual_knn.MutualKNNResult", "analyzers.mutual_knn.MutualKNNResult"),
    "prediction_grid": ("analysis.one_prompt_figures.PredictionGrid", "prompt.PredictionGrid"),
    "trajectory_pca": ("analysis.one_prompt_figures.TrajectoryPCA", "prompt.TrajectoryPCA"),
    "model_matrix": ("analysis.model_matrix.ModelMatrix", "analysis.model_matrix.ModelMatrix"),
    "model_grid": ("analysis.model_grid.ModelGrid", "analysis.model_grid.ModelGrid"),
    "group_comparison": ("analysis.model_groups.GroupComparison", "analysis.model_groups.GroupComparison"),
    "group_curves": ("analysis.group_curves.GroupCurves", "analysis.group_curves.GroupCurves"),
    "block_jacobians": ("analysis.one_prompt_jacobian_results.BlockJacobians", "blocks.BlockJacobians"),
    "coupling_matrices": ("analysis.one_prompt_jacobian_results.CouplingMatrices", "blocks.CouplingMatrices"),
    "stitch": ("stitching.results.StitchResult", "stitching.results.StitchResult"),
    "stitch_grid": ("stitching.results.StitchGrid", "stitching.results.StitchGrid"),
    "stitch_penalties": ("stitching.penalties.Penalties", "stitching.penalties.Penalties"),
    "aligned_adapters": ("training.adapters.AlignedAdapters", "training.adapters.AlignedAdapters"),
    "layer_change": ("training.layer_evaluation_results.LayerChange", "training.evaluation.LayerChange"),
    "metric_change": ("training.layer_evaluation_results.MetricChange", "training.layer_evaluation_results.MetricChange"),
    "generation_quality": ("training.layer_evaluation_results.GenerationQuality", "training.evaluation.GenerationQuality"),
    "tower_similarity": (
        "analysis.tower_similarity_result.TowerSimilarity",
        "analysis.tower_similarity_result.TowerSimilarity",
    ),
    "aligned_training": ("training.results.AlignedResult", "training.results.AlignedResult"),
}


def _full(name: str) -> str:
    return f"{PACKAGE}.{':'.join(name.rsplit('.', 1))}"


_KIND_OF = {_full(today): kind for kind, (today, _) in KINDS.items()}
_OLD = {_full(old): kind for kind, (_, old) in KINDS.items()}


def kind_of(cls: type[Any]) -> str:
    """The name of a result class in files: its kind, or module and name for a class that has no kind."""
    return _KIND_OF.get(_path(cls), _path(cls))


def class_of(kind: str, base: type[Any]) -> type[Any] | None:
    """The result class of a kind; None if no imported module defines it. A class is never imported because a file names it.

    Args:
        kind: as `kind_of` returns it, or module and name of a class as in files of format 1.
        base: the base class of all results.
    """
    kind = _OLD.get(kind, kind)
    if kind in KINDS:
        module, name = KINDS[kind][0].rsplit(".", 1)
        found: type[Any] = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
        return found
    # Installed packages declare analyzers, whose results this process may not have imported yet.
    importlib.import_module(f"{PACKAGE}.analyzers").find_analyzers()
    return next((cls for cls in below(base) if _path(cls) == kind), None)


def sweep_class() -> type[Any]:
    """The class of the reports of many models, which a later package defines."""
    found: type[Any] = importlib.import_module(f"{PACKAGE}.analysis.sweep_results").Sweep
    return found


def below(cls: type[Any]) -> Iterator[type[Any]]:
    """All imported subclasses, direct and indirect."""
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
