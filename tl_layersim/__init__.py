"""Similarity between the layers of a transformer, and between the layers of two transformers.

The names here are those that users call. Authors of analyzers and sources import `View`, `Sums`, `Analyzer` and the like from
the subpackages. Importing this package imports nothing else: every name is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis.api import analyze, compare
    from .analysis.attach import attach
    from .analysis.coupling_across_models import plot_adjacency
    from .analysis.detection import detection_by_layer
    from .analysis.device_speeds import Devices
    from .analysis.differences import difference
    from .analysis.estimate import estimate
    from .analysis.exponential_fits import exponential_fit
    from .analysis.grid_api import compare_grid
    from .analysis.linear_probes import linear_probe
    from .analysis.logistic_probe import LogisticProbe
    from .analysis.merging import merge
    from .analysis.one_prompt_figures import prediction_grid, trajectory_pca
    from .analysis.one_prompt_jacobians import block_jacobians, coupling_matrices
    from .analysis.overlays import overlay
    from .analysis.score_relation import relate
    from .analysis.server_capabilities import capabilities
    from .analysis.submitted_run import load_run
    from .analysis.sweep_api import sweep
    from .analysis.sweep_figures import plot_sweep
    from .analysis.tower_similarity import tower_similarity
    from .analysis.zero_shot import zero_shot, zero_shot_classifier
    from .analyzers import find_analyzers
    from .analyzers.block_coupling import BlockCoupling
    from .analyzers.cca import CCA
    from .analyzers.cka import CKA
    from .analyzers.contribution import Contribution
    from .analyzers.cosine import Cosine
    from .analyzers.effective_rank import EffectiveRank
    from .analyzers.exit_curve import ExitCurve
    from .analyzers.linear_predictivity import LinearPredictivity
    from .analyzers.linear_probe import LinearProbe
    from .analyzers.logit_lens import LogitLens
    from .analyzers.mutual_knn import MutualKNN
    from .analyzers.neural_collapse import NeuralCollapse
    from .analyzers.procrustes import Procrustes
    from .analyzers.rsa import RSA
    from .analyzers.saturation import Saturation
    from .analyzers.skip_effect import SkipEffect
    from .analyzers.task_metrics import TaskMetrics
    from .analyzers.trajectory import Trajectory
    from .core.errors import LayersimError, LayersimWarning
    from .core.results import Report, Result, load, load_report
    from .data.data import Data
    from .demo import demo_images, demo_model, demo_text, demo_vision_model
    from .early_exit.api import EarlyExit
    from .early_exit.costs import ExitCosts
    from .early_exit.frequent_tokens import frequent_tokens
    from .early_exit.truncate import truncate
    from .models.exit_heads import ExitHeads
    from .models.hooks import eval_mode
    from .models.site_table import sites
    from .models.untrained import untrained
    from .remote.open import open_model
    from .stitching.adapter import Adapter
    from .stitching.api import stitch, stitch_grid
    from .stitching.fitting import StitchTraining
    from .training.adapter_api import train_adapters
    from .training.adapters import AlignedAdapters
    from .training.aligned_loss import aligned_loss
    from .training.api import finetune_aligned
    from .training.hugging_face_trainer import AlignedTrainer
    from .training.layer_evaluation import Continuations, evaluate_layers
    from .training.settings import AlignedTraining

_HOME = {
    "analysis.attach": ("attach",),
    "analysis.server_capabilities": ("capabilities",),
    "analysis.api": ("analyze", "compare"),
    "analysis.grid_api": ("compare_grid",),
    "analysis.linear_probes": ("linear_probe",),
    "analysis.logistic_probe": ("LogisticProbe",),
    "analysis.merging": ("merge",),
    "analysis.one_prompt_figures": ("prediction_grid", "trajectory_pca"),
    "analysis.one_prompt_jacobians": ("block_jacobians", "coupling_matrices"),
    "analysis.detection": ("detection_by_layer",),
    "analysis.coupling_across_models": ("plot_adjacency",),
    "analysis.differences": ("difference",),
    "analysis.device_speeds": ("Devices",),
    "analysis.estimate": ("estimate",),
    "analysis.exponential_fits": ("exponential_fit",),
    "analysis.overlays": ("overlay",),
    "analysis.score_relation": ("relate",),
    "analysis.sweep_api": ("sweep",),
    "analysis.sweep_figures": ("plot_sweep",),
    "analysis.submitted_run": ("load_run",),
    "analysis.tower_similarity": ("tower_similarity",),
    "analysis.zero_shot": ("zero_shot", "zero_shot_classifier"),
    "analyzers": ("find_analyzers",),
    "core.errors": ("LayersimError", "LayersimWarning"),
    "core.results": ("Report", "Result", "load", "load_report"),
    "data.data": ("Data",),
    "demo": ("demo_images", "demo_model", "demo_text", "demo_vision_model"),
    "early_exit.api": ("EarlyExit",),
    "early_exit.costs": ("ExitCosts",),
    "early_exit.frequent_tokens": ("frequent_tokens",),
    "early_exit.truncate": ("truncate",),
    "models.exit_heads": ("ExitHeads",),
    "models.hooks": ("eval_mode",),
    "models.site_table": ("sites",),
    "models.untrained": ("untrained",),
    "remote.open": ("open_model",),
    "stitching.adapter": ("Adapter",),
    "stitching.api": ("stitch", "stitch_grid"),
    "stitching.fitting": ("StitchTraining",),
    "training.adapter_api": ("train_adapters",),
    "training.adapters": ("AlignedAdapters",),
    "training.aligned_loss": ("aligned_loss",),
    "training.api": ("finetune_aligned",),
    "training.layer_evaluation": ("Continuations", "evaluate_layers"),
    "training.settings": ("AlignedTraining",),
    "training.hugging_face_trainer": ("AlignedTrainer",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "CCA",
    "CKA",
    "RSA",
    "Adapter",
    "AlignedAdapters",
    "AlignedTrainer",
    "AlignedTraining",
    "BlockCoupling",
    "Continuations",
    "Contribution",
    "Cosine",
    "Data",
    "Devices",
    "EarlyExit",
    "EffectiveRank",
    "ExitCosts",
    "ExitCurve",
    "ExitHeads",
    "LayersimError",
    "LayersimWarning",
    "LinearPredictivity",
    "LinearProbe",
    "LogisticProbe",
    "LogitLens",
    "MutualKNN",
    "NeuralCollapse",
    "Procrustes",
    "Report",
    "Result",
    "Saturation",
    "SkipEffect",
    "StitchTraining",
    "TaskMetrics",
    "Trajectory",
    "aligned_loss",
    "analyze",
    "attach",
    "block_jacobians",
    "capabilities",
    "compare",
    "compare_grid",
    "coupling_matrices",
    "demo_images",
    "demo_model",
    "demo_text",
    "demo_vision_model",
    "detection_by_layer",
    "difference",
    "estimate",
    "eval_mode",
    "evaluate_layers",
    "exponential_fit",
    "find_analyzers",
    "finetune_aligned",
    "frequent_tokens",
    "linear_probe",
    "load",
    "load_report",
    "load_run",
    "merge",
    "open_model",
    "overlay",
    "plot_adjacency",
    "plot_sweep",
    "prediction_grid",
    "relate",
    "sites",
    "stitch",
    "stitch_grid",
    "sweep",
    "tower_similarity",
    "train_adapters",
    "trajectory_pca",
    "truncate",
    "untrained",
    "zero_shot",
    "zero_shot_classifier",
]


def __getattr__(name: str) -> Any:
    if not name[0].isalpha():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULE:
        value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
        if _MODULE[name] == "core.results":
            # A file that holds a result of another package's analyzer can only be read where its class is known.
            importlib.import_module(".analyzers", __name__).find_analyzers()
    else:
        value = _analyzer(name)
    globals()[name] = value
    return value


def _analyzer(name: str) -> Any:
    """The analyzer class named `name`; new files in `analyzers/` are found without a change to this module."""
    from .analyzers import find_analyzers

    for cls in find_analyzers().values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
