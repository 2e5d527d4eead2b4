"""`sweep`: one analysis of many models or checkpoints, which are loaded, measured and freed in turn."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch.nn import Module
from tqdm.auto import tqdm

from ..analyzers.base import Analyzer
from ..core.argument_checks import typed
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError, warn
from ..core.results import Report
from ..core.wording import brief, counted
from ..data.data import Data
from ..models.open import is_nnsight
from ..models.out_of_memory import release_memory
from .api import analyze
from .baselines import BaselineArgument
from .site_plan import DEFAULT, AtArgument
from .sweep_folder import SweepFolder
from .validation import AnalyzersArgument, choose_analyzers


class SweepError(LayersimError):
    """A model of a sweep could not be measured.

    Attributes:
        reports: of the models before it, by key.
    """

    reports: dict[Any, Report]


@typed
def sweep(
    models: Mapping[Any, Any],
    data: Any,
    analyzers: AnalyzersArgument,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    baseline: BaselineArgument = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> dict[Any, Report]:
    """Run the same analysis on many models or checkpoints, one after another: a training run, model sizes, fine-tunes.

    A model may be given as a function that loads it. It is loaded when its turn comes and freed before the next one is
    loaded, so that memory holds one model. A model that is given loaded is used as it is.

    Args:
        models: a mapping from training steps, model sizes or names to models, or to functions without arguments that load one,
            such as `functools.partial(load, step)`. In a loop, write no `lambda: load(step)`: each would load the last step.
        data: as in `analyze`; it is read once for each model, so that a generator must be made a list.
        analyzers: as in `analyze`.
        at: see `analyze`, as for the next three.
        per_head: see `analyze`.
        intervals: see `analyze`.
        baseline: see `analyze`.
        checkpoint: a folder for the report of each model that was measured, as a file that `load` reads. The same call
            continues with the next model, within a model from its partial sums. Models may be added. The model behind a key is
            taken to be the same.

    Returns:
        The report of each model by its key. `stack` makes one labelled table of them.

    Raises:
        LayersimError: `models` holds something else, the folder belongs to another sweep, or `data` can be read only once.
        SweepError: a model could not be loaded or measured; `error.reports` holds the reports of those before it.

    Warns:
        LayersimWarning: two functions load models with the same weights.

    Examples:
        >>> from functools import partial
        >>> import tl_layersim as lsim
        >>> loaders = {"plain": partial(lsim.demo_model, False), "aligned": partial(lsim.demo_model, True)}
        >>> found = lsim.sweep(loaders, lsim.Data(lsim.demo_text()[:4], seq_len=32), lsim.LogitLens())
        >>> losses = lsim.stack(found, "model")["logit_lens"]["cross_entropy"].sel(layer="blocks.0.hook_resid_post")
        >>> bool(losses.sel(model="aligned") < losses.sel(model="plain"))
        True
    """
    chosen, data = choose_analyzers(analyzers), Data.of(data)
    options = {"at": at, "per_head": per_head, "intervals": intervals, "baseline": baseline}
    # A key of NumPy or torch is the same number.
    models = {key.item() if hasattr(key, "item") else key: model for key, model in models.items()}
    keys = list(models)
    for key, model in models.items():
        if isinstance(model, str | os.PathLike):
            raise LayersimError(f"`models` has {brief(model)} for {key!r}; it must hold models, or functions that load one.")
    if data.read_once:
        raise LayersimError("`data` can be read only once, and a sweep reads it for each model. Pass list(data).")
    folder = SweepFolder(checkpoint, chosen, data, options)
    reports = {key: report for key in keys if (report := folder.report(key)) is not None}
    _announce_sweep(keys, reports, chosen, folder)
    bar = tqdm(keys, desc="models", unit="model", disable=None if rank_and_size()[0] == 0 else True)
    for key, model in zip(bar, models.values(), strict=True):
        bar.set_postfix_str(str(key))
        if key in reports:
            continue
        try:
            reports[key] = _measure_model(model, data, chosen, folder.partial(key), options)
            folder.keep(key, reports[key])
        except BaseException as error:
            where = f" in {folder.path}; the same call continues from there" if folder.path else ""
            kept = f"Model {key!r} is number {keys.index(key) + 1} of {len(keys)}. Reports of {len(reports)} are kept{where}."
            if not isinstance(error, Exception):
                error.add_note(kept if folder.path else f"Model {key!r} was not finished. checkpoint= keeps finished models.")
                raise
            raise _failed(key, error, {k: reports[k] for k in keys if k in reports}, kept) from error
    found = {key: reports[key] for key in keys}
    _warn_of_same_weights(found, [key for key, model in zip(keys, models.values(), strict=True) if is_loader(model)])
    return found


def is_loader(model: Any) -> bool:
    """Whether a value of `models` is a function that loads a model, and not a model, which can be called too.

    Args:
        model: the value.
    """
    return callable(model) and not isinstance(model, Module) and not is_nnsight(model)


def _measure_model(
    model: Any, data: Data, analyzers: Mapping[str, Analyzer], partial: Any, options: Mapping[str, Any]
) -> Report:
    """The report of a model. A model that is given as a function is loaded before, and freed after it is measured."""
    loads = is_loader(model)
    if loads:
        model = model()
    report: Report = analyze(model, data, analyzers, checkpoint=partial, **options)
    if loads:
        # Models are in reference cycles, which plain counting does not free.
        del model
        release_memory()
    return report


def _announce_sweep(
    keys: list[Any], reports: Mapping[Any, Report], analyzers: Mapping[str, Analyzer], folder: SweepFolder
) -> None:
    """Print the number of models and the names of the analyzers."""
    if rank_and_size()[0] == 0:
        known = f"; {len(reports)} of them were measured before, see {folder.path}" if reports else ""
        tqdm.write(f"sweep: {counted(len(keys), 'model')}, each with {', '.join(analyzers)}{known}", file=sys.stderr)


def _failed(key: Any, error: Exception, measured: dict[Any, Report], kept: str) -> SweepError:
    why = error if isinstance(error, LayersimError) else f"{type(error).__name__}: {error}"
    failed = SweepError(
        f"Model {key!r} of the sweep could not be measured: {why}\n{kept}" + (" They are in error.reports." if measured else "")
    )
    failed.reports = measured
    return failed


def _warn_of_same_weights(found: Mapping[Any, Report], loaded: list[Any]) -> None:
    """Warn of functions that load the same weights, as those of a loop do that share a variable."""
    by_weights = defaultdict(list)
    for key in loaded:
        provenance = next(iter(found[key].values())).provenance
        if provenance.weights_hash:
            by_weights[provenance.weights_hash].append(key)
    for keys in by_weights.values():
        if len(keys) > 1:
            shown = ", ".join(map(repr, keys[:4])) + (", ..." if len(keys) > 4 else "")
            warn(
                f"The models {shown} of the sweep have the same weights. Functions that are made in a loop share its variable: "
                "write functools.partial(load, step) in place of lambda: load(step)."
            )
