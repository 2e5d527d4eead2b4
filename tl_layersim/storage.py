"""One file format for results and checkpoints: safetensors with JSON in its header, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import LayersimError

FORMAT = 1
HEADER = "tl_layersim"


def write(path: str | os.PathLike[str], kind: str, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write one file: first beside its place, then moved there, so that an interrupted write leaves the old file.

    Raises:
        OSError: the file cannot be written (no such folder, disk full); an older file at `path` is untouched.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"No folder {path.parent} to write {path.name} to: make it first, or pass another path.")
    text = json.dumps({"format": FORMAT, "kind": kind, **header}, allow_nan=True)
    # safetensors wants at least one tensor's worth of contiguous memory per name, shared storage is refused.
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file(contiguous, temporary, metadata={HEADER: text})
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"Could not write {path}: {error}. What stood there before is unchanged; free some space or pass another path."
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def read(path: str | os.PathLike[str], kinds: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of a file of one of `kinds`.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: it is truncated, not ours, of another kind, or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}: pass the path that was given to save().")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError, OSError) as error:
        raise LayersimError(
            f"{path} cannot be read: it is truncated or not a safetensors file ({error}).",
            given=f"{path.stat().st_size} bytes",
            expected="a whole file written by save()",
            do="copy the file again, or run the analysis again",
        ) from error
    if not isinstance(header, dict) or "kind" not in header:
        raise LayersimError(
            f"{path} is a safetensors file, but not one of tl_layersim.",
            given=f"tensors {list(tensors)[:5]}",
            expected=f"a file written by save() ({' or '.join(kinds)})",
            do="pass the path that was given to save()",
        )
    if header["format"] > FORMAT:
        raise LayersimError(
            f"{path} was written by a newer tl_layersim.",
            given=f"format {header['format']}",
            expected=f"format {FORMAT} or older",
            do="pip install --upgrade tl_layersim",
        )
    if header["kind"] not in kinds:
        raise LayersimError(
            f"{path} holds another kind of data.",
            given=header["kind"],
            expected=" or ".join(kinds),
            do="lsim.load() for results and reports, lsim.load_run() for runs that were sent off, checkpoint= for checkpoints",
        )
    return header, tensors
