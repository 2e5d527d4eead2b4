"""tl_layersim: how do a transformer's layers relate to each other, and to another model's layers?

Importing this package imports nothing else: every name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis.attach import Probe, attach
    from .analysis.capabilities import Capabilities, capabilities
    from .analysis.engine import analyze, compare
    from .analysis.one_prompt import PredictionGrid, TrajectoryPCA, prediction_grid, trajectory_pca
    from .analysis.one_prompt_jacobian_results import BlockJacobians, CouplingMatrices
    from .analysis.one_prompt_jacobians import block_jacobians, coupling_matrices
    from .analysis.regression import Relation, plot_adjacency, plot_sweep, relate
    from .analysis.remote_run import RemoteRun, load_run
    from .analyzers import find_analyzers
    from .analyzers.base import Analyzer, Exchange, Run, need_head, need_tokens
    from .analyzers.block_coupling import BlockCoupling, BlockCouplingResult
    from .analyzers.cka import CKA, CKAResult
    from .analyzers.cosine import Cosine, CosineResult
    from .analyzers.exit_curve import ExitCurve, ExitCurveResult, ExitPoint
    from .analyzers.logit_lens import LogitLens, LogitLensResult
    from .analyzers.neural_collapse import NeuralCollapse, NeuralCollapseResult
    from .analyzers.saturation import Saturation, SaturationResult
    from .analyzers.trajectory import Spread, Trajectory, TrajectoryResult
    from .core.errors import LayersimError, LayersimWarning
    from .core.histogram import quantiles_from_histogram
    from .core.provenance import Provenance
    from .core.results import LayerCurve, LayerMatrix, Picture, Report, Result, axes, load, load_report
    from .core.sums import Sums
    from .data.batches import Batch
    from .demo import demo_model, demo_text
    from .early_exit.api import EarlyExit
    from .early_exit.costs import ExitCosts, ExitPlan
    from .early_exit.frequent_tokens import frequent_tokens
    from .early_exit.results import ExitLogits, Generated
    from .early_exit.truncate import truncate
    from .models.adapter import Adapter
    from .models.block_call import BlockCall
    from .models.hooks import eval_mode
    from .models.model_info import Model, ServerOffer, layer_names
    from .models.source import PartialSums, Source
    from .models.unembed import Head, Unembed
    from .models.view import Kernel, View, place, reduce
    from .stitching.api import stitch, stitch_grid
    from .stitching.fitting import StitchTraining
    from .stitching.results import Interval, StitchGrid, StitchResult
    from .stitching.stitched_model import StitchedModel
    from .training.adapter_api import train_adapters
    from .training.adapters import AlignedAdapters
    from .training.aligned_loss import aligned_loss
    from .training.api import finetune_aligned
    from .training.comparison import evaluate_layers
    from .training.comparison_results import GenerationQuality, LayerChange
    from .training.results import AlignedResult
    from .training.settings import AlignedTraining
    from .training.trainer import AlignedTrainer

_HOME = {
    "analysis.attach": (
        "Probe",
        "attach",
    ),
    "analysis.capabilities": (
        "Capabilities",
        "capabilities",
    ),
    "analysis.engine": (
        "analyze",
        "compare",
    ),
    "analysis.one_prompt": (
        "PredictionGrid",
        "TrajectoryPCA",
        "prediction_grid",
        "trajectory_pca",
    ),
    "analysis.one_prompt_jacobian_results": (
        "BlockJacobians",
        "CouplingMatrices",
    ),
    "analysis.one_prompt_jacobians": (
        "block_jacobians",
        "coupling_matrices",
    ),
    "analysis.regression": (
        "Relation",
        "plot_adjacency",
        "plot_sweep",
        "relate",
    ),
    "analysis.remote_run": (
        "RemoteRun",
        "load_run",
    ),
    "analyzers": ("find_analyzers",),
    "analyzers.base": (
        "Analyzer",
        "Exchange",
        "Run",
        "need_head",
        "need_tokens",
    ),
    "core.errors": (
        "LayersimError",
        "LayersimWarning",
    ),
    "core.histogram": ("quantiles_from_histogram",),
    "core.provenance": ("Provenance",),
    "core.results": (
        "LayerCurve",
        "LayerMatrix",
        "Picture",
        "Report",
        "Result",
        "axes",
        "load",
        "load_report",
    ),
    "core.sums": ("Sums",),
    "data.batches": ("Batch",),
    "demo": (
        "demo_model",
        "demo_text",
    ),
    "early_exit.api": ("EarlyExit",),
    "early_exit.costs": (
        "ExitCosts",
        "ExitPlan",
    ),
    "early_exit.frequent_tokens": ("frequent_tokens",),
    "early_exit.results": (
        "ExitLogits",
        "Generated",
    ),
    "early_exit.truncate": ("truncate",),
    "models.adapter": ("Adapter",),
    "models.block_call": ("BlockCall",),
    "models.hooks": ("eval_mode",),
    "models.model_info": (
        "Model",
        "ServerOffer",
        "layer_names",
    ),
    "models.source": (
        "PartialSums",
        "Source",
    ),
    "models.unembed": (
        "Head",
        "Unembed",
    ),
    "models.view": (
        "Kernel",
        "View",
        "place",
        "reduce",
    ),
    "stitching.api": (
        "stitch",
        "stitch_grid",
    ),
    "stitching.fitting": ("StitchTraining",),
    "stitching.results": (
        "Interval",
        "StitchGrid",
        "StitchResult",
    ),
    "stitching.stitched_model": ("StitchedModel",),
    "training.adapter_api": ("train_adapters",),
    "training.adapters": ("AlignedAdapters",),
    "training.aligned_loss": ("aligned_loss",),
    "training.api": ("finetune_aligned",),
    "training.comparison": ("evaluate_layers",),
    "training.comparison_results": (
        "GenerationQuality",
        "LayerChange",
    ),
    "training.results": ("AlignedResult",),
    "training.settings": ("AlignedTraining",),
    "training.trainer": ("AlignedTrainer",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "CKA",
    "Adapter",
    "AlignedAdapters",
    "AlignedResult",
    "AlignedTrainer",
    "AlignedTraining",
    "Analyzer",
    "Batch",
    "BlockCall",
    "BlockCoupling",
    "BlockCouplingResult",
    "BlockJacobians",
    "CKAResult",
    "Capabilities",
    "Cosine",
    "CosineResult",
    "CouplingMatrices",
    "EarlyExit",
    "Exchange",
    "ExitCosts",
    "ExitCurve",
    "ExitCurveResult",
    "ExitLogits",
    "ExitPlan",
    "ExitPoint",
    "Generated",
    "GenerationQuality",
    "Head",
    "Interval",
    "Kernel",
    "LayerChange",
    "LayerCurve",
    "LayerMatrix",
    "LayersimError",
    "LayersimWarning",
    "LogitLens",
    "LogitLensResult",
    "Model",
    "NeuralCollapse",
    "NeuralCollapseResult",
    "PartialSums",
    "Picture",
    "PredictionGrid",
    "Probe",
    "Provenance",
    "Relation",
    "RemoteRun",
    "Report",
    "Result",
    "Run",
    "Saturation",
    "SaturationResult",
    "ServerOffer",
    "Source",
    "Spread",
    "StitchGrid",
    "StitchResult",
    "StitchTraining",
    "StitchedModel",
    "Sums",
    "Trajectory",
    "TrajectoryPCA",
    "TrajectoryResult",
    "Unembed",
    "View",
    "aligned_loss",
    "analyze",
    "attach",
    "axes",
    "block_jacobians",
    "capabilities",
    "compare",
    "coupling_matrices",
    "demo_model",
    "demo_text",
    "eval_mode",
    "evaluate_layers",
    "find_analyzers",
    "finetune_aligned",
    "frequent_tokens",
    "layer_names",
    "load",
    "load_report",
    "load_run",
    "need_head",
    "need_tokens",
    "place",
    "plot_adjacency",
    "plot_sweep",
    "prediction_grid",
    "quantiles_from_histogram",
    "reduce",
    "relate",
    "stitch",
    "stitch_grid",
    "train_adapters",
    "trajectory_pca",
    "truncate",
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
        value = _from_analyzers(name)
    globals()[name] = value
    return value


def _from_analyzers(name: str) -> Any:
    """An analyzer, or a class of its file: a new file in `analyzers/` needs no line here."""
    from .analyzers import find_analyzers

    for cls in find_analyzers().values():
        found = vars(importlib.import_module(cls.__module__)).get(name)
        if isinstance(found, type) and found.__module__ == cls.__module__:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
