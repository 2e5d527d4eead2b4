"""Folder of a sweep that can be continued: the reports of the models that were measured, and the record of the call."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

from ..analyzers.base import Analyzer, code_digest
from ..core.distributed import rank_and_size
from ..core.function_code import digest_of_code
from ..core.results import Report
from ..core.resumable_file import ResumableFile
from ..core.storage import refuse_unwritable_folder
from ..data.data import OPTIONS, Data

# Rows of the data that identify it, with its length: all of a large data set would have to be read.
CHECKED_ROWS = 1000


class SweepFolder:
    """Reports of finished models as files in a folder; without a path, nothing is kept.

    Args:
        path: of the folder, which is made where it does not exist; None for none.
        analyzers: by name.
        data: of the call.
        options: further keywords of the call.

    Raises:
        LayersimError: the folder cannot be written to, or holds another sweep.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        analyzers: Mapping[str, Analyzer],
        data: Data,
        options: Mapping[str, Any],
    ) -> None:
        self.path = None if path is None else Path(path)
        if self.path is None:
            return
        if self.path.parent.is_dir() and not self.path.exists():
            self.path.mkdir()
        refuse_unwritable_folder(self.path, "checkpoint")
        reading = {name: getattr(data, name) for name in (*OPTIONS, "tokenizer")}
        identity = {
            "analyzers": {
                name: [type(analyzer).__name__, analyzer.options(), code_digest(analyzer)]
                for name, analyzer in analyzers.items()
            },
            "options": {name: _option_text(value) for name, value in sorted({**options, **reading}.items())},
            "data": data_digest(data.source),
            "version": version("tl_layersim"),
        }
        record = ResumableFile(self.path / "sweep.safetensors", "sweep_folder", identity)
        if record.resume(lambda notes, tensors: True) is None and rank_and_size()[0] == 0:
            record.write({}, {})

    def report(self, key: int | float | str) -> Report | None:
        """The report of a model that was measured before; None for another model.

        Args:
            key: of the model.
        """
        if self.path is None or not (path := self._file(key)).exists():
            return None
        return Report.load(path)

    def partial(self, key: int | float | str) -> Path | None:
        """The checkpoint file of the analysis of one model.

        Args:
            key: of the model.
        """
        return None if self.path is None else self._file(key).with_suffix(".partial")

    def keep(self, key: int | float | str, report: Report) -> None:
        """Write the report of a model, and remove the checkpoint file of its analysis.

        Args:
            key: of the model.
            report: of the model.
        """
        partial = self.partial(key)
        if partial is None:
            return
        rank = rank_and_size()[0]
        if rank == 0:
            report.save(self._file(key))
        Path(f"{partial}.rank{rank}" if rank else partial).unlink(missing_ok=True)

    def _file(self, key: int | float | str) -> Path:
        assert self.path is not None
        # The digest tells keys apart that differ in signs which file names cannot have.
        name = re.sub(r"[^\w.-]", "_", str(key))[:60]
        return self.path / f"model-{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:6]}.safetensors"


def data_digest(data: Any) -> str:
    """SHA-256 of the first rows of some data and of its length, 12 hex digits.

    Args:
        data: as `analyze` takes it.
    """
    digest = hashlib.sha256()
    whole = isinstance(data, str | Mapping | torch.Tensor | np.ndarray)
    for row in [data] if whole else islice(iter(data), CHECKED_ROWS):
        _add(digest, row)
    if not whole and hasattr(data, "__len__"):
        digest.update(str(len(data)).encode())
    return digest.hexdigest()[:12]


def _add(digest: Any, item: Any) -> None:
    """Add an item of data to a running hash."""
    if isinstance(item, torch.Tensor):
        digest.update(f"{item.dtype} {tuple(item.shape)} ".encode())
        digest.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(item, Mapping):
        for name in sorted(item, key=str):
            digest.update(f"{name!r}:".encode())
            _add(digest, item[name])
    elif isinstance(item, str | int | float | bool | bytes | None):
        digest.update(f"{type(item).__name__} {item!r},".encode())
    elif hasattr(item, "tobytes"):
        # Arrays of NumPy, and images.
        shape = getattr(item, "shape", getattr(item, "size", ""))
        digest.update(f"{type(item).__name__} {shape} ".encode() + item.tobytes())
    elif isinstance(item, Iterable):
        digest.update(b"[")
        for one in item:
            _add(digest, one)
        digest.update(b"]")
    else:
        digest.update(type(item).__name__.encode())


def _option_text(value: Any) -> Any:
    """An option of a call as JSON holds it: functions by their code, other objects by their class."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, slice):
        return f"slice({value.start}, {value.stop}, {value.step})"
    if isinstance(value, FunctionType):
        return f"{value.__qualname__} {digest_of_code([value])}"
    if isinstance(value, Mapping):
        return {json.dumps(_option_text(name)): _option_text(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_option_text(one) for one in value]
    return type(value).__name__
