"""`sweep`: one analysis of many models or checkpoints in turn."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from tqdm.auto import tqdm

from ..analyzers.analyzer import Analyzer
from ..core.arguments import FilePath, typed
from ..core.code_digests import ValueNames
from ..core.distributed import failing_together, rank_and_size
from ..core.errors import LayersimError, warn
from ..core.file_format import refuse_unwritable_folder
from ..core.results import Report
from ..core.resumable_file import ResumableFile, differences, plain
from ..core.wording import amount, brief
from ..data.batches import state_of
from ..data.data import Data
from ..data.source_content import content_digest
from ..engine.analyze_and_compare import BaselineArgument, analyze
from ..engine.run_arguments import AnalyzersArgument, choose_analyzers, refuse_unknown_functions
from ..engine.run_files import recipe_of
from ..engine.run_identity import identity_of, modules_here
from ..engine.site_plan import DEFAULT, AtArgument
from ..remote.open_model import open_source
from ..sources.computation import computation_of
from ..sources.open_local import OpenedModel, is_nnsight
from ..sources.out_of_memory import release_memory
from ..sources.shared_modules import refuse_one_model


class SweepRecord:
    """The file in the folder of a sweep that identifies the sweep: its analyzers, options, data and models.

    Args:
        folder: the folder; it is made if its parent exists.
        analyzers: the analyzers, by name.
        data: the data.
        options: options of `analyze`.

    Raises:
        LayersimError: the folder cannot be written to, or holds another sweep.
    """

    def __init__(self, folder: Path, analyzers: Mapping[str, Analyzer], data: Data, options: Mapping[str, Any]) -> None:
        if folder.parent.is_dir() and not folder.exists():
            folder.mkdir(exist_ok=True)
        refuse_unwritable_folder(folder, "checkpoint")
        for analyzer in analyzers.values():
            refuse_unknown_functions(analyzer, "checkpoint")
        # Of a stream that `max_tokens` ends, only what the models have read counts.
        self._is_cut = data.max_tokens is not None and _is_stream(data.source)
        reading = data.record() | {"tokenizer": state_of(data.tokenizer, with_vocabulary=True)}
        identity = {
            "analyzers": {name: recipe_of(analyzer) for name, analyzer in analyzers.items()},
            "options": {name: ValueNames().named(value) for name, value in sorted(options.items())} | reading,
            "data": "a stream" if self._is_cut else data_digest(data.source)[:12],
            # Models that functions load are not loaded again to be compared.
            "computation": computation_of([]),
            "version": version("tl_layersim"),
        }
        self._data = data
        self._file = ResumableFile(folder / "sweep.safetensors", "sweep_folder", identity)
        # Number of items that were read of a stream, and their digest.
        self._items = 0
        self._digest = ""
        # By the text of a key, the identity of a model that was given loaded.
        self._models: dict[str, Any] = {}
        if self._file.resume(self._restore) is None:
            self._write()
        elif self._is_cut and data_digest(data.source, self._items)[:12] != self._digest:
            raise LayersimError(
                f"`data` has other items among the first {self._items}; it must be the data of the sweep in {folder}. Pass "
                "another folder as `checkpoint`."
            )

    def _restore(self, notes: Mapping[str, Any], _tensors: Any) -> bool:
        self._items = notes["items"]
        self._digest = notes["digest"]
        self._models = dict(notes["models"])
        return True

    def _write(self) -> None:
        if rank_and_size()[0] == 0:
            self._file.write({"items": self._items, "digest": self._digest, "models": self._models}, {})

    def refuse_other_model(self, key: Any, model: Any) -> None:
        """Raise an error if a finished model that is given loaded is not the model of its report.

        Args:
            key: key of the model.
            model: the model, or a function that loads it, which is assumed to load the same.
        """
        recorded = self._models.get(repr(key))
        if recorded is None or is_loader(model):
            return
        identity = _identity_of_model(model)
        if recorded != identity:
            entries, recorded_entries = differences(identity, recorded)
            raise LayersimError(
                f"`models` has {entries} for {key!r}; it must have the model of the report, {recorded_entries}."
            )

    def add(self, key: Any, model: Any) -> None:
        """Record a model that is finished, and how much of a stream was read.

        Args:
            key: key of the model.
            model: the model, or a function that loads it.
        """
        if not is_loader(model):
            self._models[repr(key)] = _identity_of_model(model)
        if self._is_cut and self._data.items_read > self._items:
            self._items = self._data.items_read
            self._digest = data_digest(self._data.source, self._items)[:12]
        self._write()


def _identity_of_model(model: Any) -> Any:
    opened = OpenedModel.of(model)
    if opened.on_server:
        return None
    source = open_source(opened)
    return plain(identity_of([source.model], modules_here([source]), None))


def _report_file(folder: Path, key: Any) -> Path:
    # The digest tells apart keys that differ only in characters that a file name cannot hold.
    name = re.sub(r"[^\w.-]", "_", str(key))[:60]
    return folder / f"model-{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:6]}.safetensors"


def data_digest(source: Any, items: int | None = None) -> str:
    """SHA-256 of the content of data, 64 hex digits.

    Args:
        source: data as `analyze` takes it.
        items: number of items that count, from the beginning of an iterable; None for all.
    """
    if items is None and not _is_data_set(source):
        whole_digest = content_digest(source)
        if whole_digest is not None:
            return whole_digest
    is_one_item = isinstance(source, str | Mapping | torch.Tensor | np.ndarray) or not isinstance(source, Iterable)
    names = ValueNames()
    digest = hashlib.sha256()
    for item in [source] if is_one_item else islice(iter(source), items):
        item_digest = content_digest(item) or names.digest("", item)
        digest.update(item_digest.encode())
    return digest.hexdigest()


def _is_stream(source: Any) -> bool:
    """Whether data is an iterable whose length is not known."""
    return isinstance(source, Iterable) and not hasattr(source, "__len__")


def _is_data_set(source: Any) -> bool:
    # The fingerprint of a data set of Hugging Face may differ between processes.
    return hasattr(source, "column_names") and hasattr(source, "features")


class SweepError(LayersimError):
    """A model of a sweep could not be measured.

    Attributes:
        reports: reports of the models before it, by key.
    """

    reports: dict[Any, Report]


@failing_together()
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
    checkpoint: FilePath | None = None,
) -> dict[Any, Report]:
    """Run the same analysis on many models or checkpoints in turn: a training run, model sizes or fine-tunes.

    A model may be given as a function that loads it. It is loaded when its turn comes and freed before the next one is
    loaded, so that memory holds one model. A model that is given loaded is used as it is.

    Args:
        models: a mapping from training steps, model sizes or names to models, or to functions without arguments that load a
            model, such as `functools.partial(load, step)`. Do not write `lambda: load(step)` in a loop: each function would
            load the last step.
        data: as in `analyze`; it is read once for each model, so pass a list, not a generator.
        analyzers: as in `analyze`.
        at: see `analyze`; the next three options are the same.
        per_head: see `analyze`.
        intervals: see `analyze`.
        baseline: see `analyze`.
        checkpoint: a folder that keeps the report of each finished model, in a file that `load` reads. The same call continues
            with the next model, and within a model from its partial sums. Models may be added. The model that a function loads
            is assumed to be the same.

    Returns:
        The report of each model by its key; `stack` makes one labelled table of them.

    Raises:
        LayersimError: `models` has a name or a path, or a model and its own adapters; the folder belongs to another sweep, or
            `data` can be read only once.
        SweepError: a model could not be loaded or measured; `error.reports` holds the reports of the models before it.

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
    chosen = choose_analyzers(analyzers)
    data = Data.of(data)
    options = {"at": at, "per_head": per_head, "intervals": intervals, "baseline": baseline}
    # Keys of NumPy or torch become Python numbers.
    models = {key.item() if hasattr(key, "item") else key: model for key, model in models.items()}
    keys = list(models)
    for key, model in models.items():
        if isinstance(model, str | os.PathLike):
            raise LayersimError(f"`models` has {brief(model)} for {key!r}; it must have a model, or a function that loads one.")
    loaded = {f"models[{key!r}]": model for key, model in models.items() if not is_loader(model)}
    refuse_one_model(loaded)
    if data.read_once:
        raise LayersimError("`data` can be read only once, but a sweep reads `data` for each model. Pass list(data).")
    files: dict[Any, Path | None] = dict.fromkeys(keys)
    record: SweepRecord | None = None
    if checkpoint is not None:
        record = SweepRecord(Path(checkpoint), chosen, data, options)
        files = {key: _report_file(Path(checkpoint), key) for key in keys}
    reports = {}
    for key, file in files.items():
        if file is not None and file.exists():
            reports[key] = Report.load(file)
    bar = tqdm(keys, desc="models", unit="model", disable=None if rank_and_size()[0] == 0 else True)
    for key, model in zip(bar, models.values(), strict=True):
        bar.set_postfix_str(str(key))
        if key in reports:
            if record is not None:
                record.refuse_other_model(key, model)
            continue
        try:
            reports[key] = _measure_model(model, data, chosen, files[key], options)
            # The report is in memory already: a full disk loses only the file.
            _write_report(reports[key], files[key])
            if record is not None:
                record.add(key, model)
        except BaseException as error:
            folder = "" if checkpoint is None else f" in {checkpoint}; the same call continues from there"
            number = f"Model {key!r} is number {keys.index(key) + 1} of {len(keys)}."
            progress = f"{number} The reports of {amount(len(reports), 'model')} are kept{folder}."
            if not isinstance(error, Exception):
                # An interrupt keeps its type: a caller may wait for it.
                error.add_note(progress if folder else f"Model {key!r} was not finished. checkpoint= keeps finished models.")
                raise
            reason = error if isinstance(error, LayersimError) else f"{type(error).__name__}: {error}"
            remedy = " They are in error.reports." if reports else ""
            sweep_error = SweepError(f"Model {key!r} of `models` could not be measured: {reason}\n{progress}{remedy}")
            sweep_error.reports = {finished: reports[finished] for finished in keys if finished in reports}
            raise sweep_error from error
    in_order = {key: reports[key] for key in keys}
    _warn_of_same_weights(in_order, [key for key, model in models.items() if is_loader(model)])
    return in_order


def is_loader(model: Any) -> bool:
    """Whether a value of `models` is a function that loads a model.

    Args:
        model: the value.
    """
    # Models are callable too.
    return callable(model) and not isinstance(model, Module) and not is_nnsight(model)


def _measure_model(
    model: Any, data: Data, analyzers: Mapping[str, Analyzer], file: Path | None, options: Mapping[str, Any]
) -> Report:
    """Measure a model; if `model` is a function, load the model before and free it afterwards."""
    loads = is_loader(model)
    if loads:
        model = model()
    checkpoint = None if file is None else file.with_suffix(".partial")
    opened = OpenedModel.of(model, "models")
    report: Report = analyze(opened, data, analyzers, checkpoint=checkpoint, **options)
    if loads:
        # Models have reference cycles, which reference counting does not free.
        del model, opened
        release_memory()
    return report


def _write_report(report: Report, file: Path | None) -> None:
    """Write the report of a model, and remove the checkpoint of its analysis."""
    if file is None:
        return
    rank, _ = rank_and_size()
    if rank == 0:
        report.save(file)
    checkpoint = file.with_suffix(".partial")
    # Each rank has a checkpoint of its own, see `run_analysis`.
    rank_checkpoint = Path(f"{checkpoint}.rank{rank}") if rank else checkpoint
    rank_checkpoint.unlink(missing_ok=True)


def _warn_of_same_weights(reports: Mapping[Any, Report], loader_keys: list[Any]) -> None:
    """Warn if several functions load the same weights."""
    # Lambdas that a loop makes share its variable.
    by_weights = defaultdict(list)
    for key in loader_keys:
        provenance = next(iter(reports[key].values())).provenance
        if provenance.weights_hash:
            by_weights[provenance.weights_hash].append(key)
    for keys in by_weights.values():
        if len(keys) > 1:
            names = ", ".join(map(repr, keys[:4]))
            if len(keys) > 4:
                names += ", ..."
            warn(
                f"The models {names} of the sweep have the same weights. Lambdas in a loop all use the last value of the loop "
                "variable; use functools.partial(load, step)."
            )
