"""tl_layersim: how do a transformer's layers relate to each other, and to another model's layers?

Importing this package imports nothing else: every name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import Adapter
    from .analyzer import Analyzer, Exchange, Run, need_head, need_tokens
    from .analyzers import find_analyzers
    from .analyzers.block_coupling import BlockCoupling, BlockCouplingResult
    from .analyzers.cka import CKA, CKAResult
    from .analyzers.collapse import NeuralCollapse, NeuralCollapseResult
    from .analyzers.cosine import Cosine, CosineResult
    from .analyzers.exit_curve import ExitCurve, ExitCurveResult, ExitPoint
    from .analyzers.logit_lens import LogitLens, LogitLensResult
    from .analyzers.saturation import Saturation, SaturationResult
    from .analyzers.trajectory import Spread, Trajectory, TrajectoryResult
    from .blocks import BlockJacobians, CouplingMatrices, block_jacobians, coupling_matrices
    from .calls import BlockCall
    from .capability import Capabilities, capabilities
    from .data import Batch
    from .demo import demo_model, demo_text
    from .early_exit.costs import ExitCosts, ExitPlan
    from .early_exit.results import ExitLogits, Generated
    from .early_exit.run import EarlyExit
    from .early_exit.shortlist import frequent_tokens
    from .early_exit.truncate import truncate
    from .engine import analyze, compare
    from .errors import LayersimError, LayersimWarning
    from .jobs import RemoteRun, load_run
    from .probe import Probe, attach
    from .prompt import PredictionGrid, TrajectoryPCA, prediction_grid, trajectory_pca
    from .relation import Relation, plot_adjacency, plot_sweep, relate
    from .results import (
        LayerCurve,
        LayerMatrix,
        Picture,
        Provenance,
        Report,
        Result,
        axes,
        load,
        load_report,
        quantiles_from_histogram,
    )
    from .source import Kernel, Model, Offer, Part, Source, View, eval_mode, layer_names, place, reduce
    from .sources.stitched import StitchedModel
    from .stitching.results import Interval, StitchGrid, StitchResult
    from .stitching.run import stitch, stitch_grid
    from .stitching.training import StitchTraining
    from .sums import Sums
    from .training.adapters import AlignedAdapters
    from .training.aligned_adapters import train_adapters
    from .training.evaluate import evaluate_layers
    from .training.evaluation import GenerationQuality, LayerChange
    from .training.losses import aligned_loss
    from .training.results import AlignedResult
    from .training.run import finetune_aligned
    from .training.settings import AlignedTraining
    from .training.trainer import AlignedTrainer
    from .unembed import Head, Unembed

_HOME = {
    "adapter": ("Adapter",),
    "engine": ("analyze", "compare"),
    "analyzer": ("Analyzer", "Exchange", "Run", "need_head", "need_tokens"),
    "analyzers": ("find_analyzers",),
    "blocks": ("BlockJacobians", "CouplingMatrices", "block_jacobians", "coupling_matrices"),
    "calls": ("BlockCall",),
    "capability": ("Capabilities", "capabilities"),
    "data": ("Batch",),
    "demo": ("demo_model", "demo_text"),
    "early_exit.costs": ("ExitCosts", "ExitPlan"),
    "early_exit.results": ("ExitLogits", "Generated"),
    "early_exit.run": ("EarlyExit",),
    "early_exit.shortlist": ("frequent_tokens",),
    "early_exit.truncate": ("truncate",),
    "jobs": ("RemoteRun", "load_run"),
    "errors": ("LayersimError", "LayersimWarning"),
    "probe": ("Probe", "attach"),
    "prompt": ("PredictionGrid", "TrajectoryPCA", "prediction_grid", "trajectory_pca"),
    "relation": ("Relation", "plot_adjacency", "plot_sweep", "relate"),
    "results": (
        "LayerCurve",
        "LayerMatrix",
        "Picture",
        "Provenance",
        "Report",
        "Result",
        "axes",
        "load",
        "load_report",
        "quantiles_from_histogram",
    ),
    "source": ("Kernel", "Model", "Offer", "Part", "Source", "View", "eval_mode", "layer_names", "place", "reduce"),
    "sources.stitched": ("StitchedModel",),
    "stitching.results": ("Interval", "StitchGrid", "StitchResult"),
    "stitching.run": ("stitch", "stitch_grid"),
    "stitching.training": ("StitchTraining",),
    "sums": ("Sums",),
    "training.adapters": ("AlignedAdapters",),
    "training.aligned_adapters": ("train_adapters",),
    "training.evaluate": ("evaluate_layers",),
    "training.evaluation": ("GenerationQuality", "LayerChange"),
    "training.losses": ("aligned_loss",),
    "training.results": ("AlignedResult",),
    "training.run": ("finetune_aligned",),
    "training.settings": ("AlignedTraining",),
    "training.trainer": ("AlignedTrainer",),
    "unembed": ("Head", "Unembed"),
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
    "Offer",
    "Part",
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
        if _MODULE[name] == "results":
            # A file of results can only be read where the classes of results are known.
            importlib.import_module(".analyzers", __name__).find_analyzers()
            for module in ("blocks", "stitching.results", "training.adapters", "training.evaluation", "training.results"):
                importlib.import_module(f".{module}", __name__)
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
