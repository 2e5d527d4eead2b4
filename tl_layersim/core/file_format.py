"""The file format: safetensors with a JSON header and a checksum, written atomically."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from .errors import LayersimError, excerpt
from .wording import brief

FORMAT = 3
# Name of the file of a report in the folder that the command line or the hub makes.
REPORT_FILE = "report.safetensors"
HEADER = "tl_layersim"
CHECKSUM = "tl_layersim.sha256"
# Names of dtypes in safetensors.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Files of a model's weights, as from_pretrained finds them, and of its heads.
MODEL_FILES = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "heads.safetensors")
# Seconds after which an unfinished file counts as left behind by a killed process.
ABANDONED = 3600.0
# Exceptions that a malformed header raises while it is parsed.
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, RecursionError, OverflowError)


def write(path: str | os.PathLike[str], kind: str, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a file with its checksum. An interrupted write leaves the old file unchanged.

    Args:
        path: path of the file.
        kind: kind of the file, such as "result" or "checkpoint".
        header: plain data, stored as JSON.
        tensors: tensors by name.

    Raises:
        OSError: the file cannot be written (missing folder, full disk); an older file at `path` is unchanged.
    """
    text = json.dumps({"format": FORMAT, "kind": kind, **header}, allow_nan=True)
    # Wide dtypes first, so that each tensor is aligned to its dtype.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    tensors_on_cpu = {name: tensors[name].detach().cpu() for name in names}
    entries: dict[str, Any] = {"__metadata__": {HEADER: text, CHECKSUM: checksum(text, tensors_on_cpu)}}
    begin = 0
    for name, tensor in tensors_on_cpu.items():
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    front = json.dumps(entries).encode()
    # The tensors after it begin at a multiple of 8 bytes.
    front += b" " * (-len(front) % 8)
    # safetensors' own writer would leave a temporary file of unknown name when killed.
    with replacing(path) as file:
        file.write(len(front).to_bytes(8, "little") + front)
        for tensor in tensors_on_cpu.values():
            file.write(_bytes_of_tensor(tensor))
    return Path(path)


def checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex digits) of a header and all tensors: their names, dtypes, shapes and bytes.

    Args:
        text: the header.
        tensors: tensors by name.
    """
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes_of_tensor(tensor))
    return digest.hexdigest()


def _bytes_of_tensor(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def by_first_name(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Group tensors by the part of their names before the first slash.

    Args:
        names: names of the parts.
        tensors: tensors of the file.

    Raises:
        KeyError: a tensor belongs to no part.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    return parts


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context manager that opens a temporary file and, when it exits, moves the file to `path` atomically.

    A killed process leaves a hidden file beside `path`, which a later write removes. A link at `path` is replaced; its target
    is not written to.

    Raises:
        OSError: the file cannot be written; an older file at `path` is unchanged.
    """
    path = Path(path)
    if not _may_be_replaced(path):
        raise OSError(f"Could not write {path}: it exists and is not a file. Pass another path.")
    if not os.path.isdir(path.parent):
        raise FileNotFoundError(f"Could not write {path}: the folder {path.parent} does not exist.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"Could not write {path}: {error.strerror or error}. An older file at this path is unchanged.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    _remove_abandoned(path)


@contextmanager
def replacing_model(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that makes a temporary folder and, when it exits, moves the files in it to `folder`.

    Files of a model that was in `folder` before are then removed; other files in it are kept. After an error, or an interrupt,
    `folder` is unchanged.

    Args:
        folder: existing or new.

    Raises:
        OSError: the files cannot be written; `folder` is unchanged.
    """
    folder = Path(folder).resolve()
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.is_dir():
            written = {path.name for path in temporary.iterdir()}
            for path in temporary.iterdir():
                os.replace(path, folder / path.name)
            earlier_files: list[Path] = []
            for pattern in MODEL_FILES:
                earlier_files += [path for path in folder.glob(pattern) if path.name not in written]
            for path in earlier_files:
                path.unlink()
        else:
            os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(f"Could not write {folder}: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _may_be_replaced(path: Path) -> bool:
    """True if nothing is at a path, or only a file or a link."""
    # Those of `Path` raise an error for a path that may not be looked up.
    return os.path.islink(path) or os.path.isfile(path) or not os.path.exists(path)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files that killed processes left beside `path`."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()


def refuse_unwritable(path: str | os.PathLike[str] | None, argument: str) -> None:
    """Raise an error before a run if a path cannot be written to.

    Args:
        path: path of the file; None is accepted.
        argument: name of the argument that holds the path, for messages.

    Raises:
        LayersimError: the folder does not exist or is not writable, or `path` is not a file.
    """
    if path is None:
        return
    path = Path(path)
    refuse_unwritable_folder(path.parent, argument)
    if not _may_be_replaced(path):
        raise LayersimError(f"`{argument}` is {str(path)!r}; it must be the path of a file, new or existing.")


def refuse_unwritable_folder(folder: Path, argument: str) -> None:
    """Raise an error before a run if a folder cannot be written to.

    Args:
        folder: the folder.
        argument: name of the argument that holds the path, for messages.

    Raises:
        LayersimError: the folder does not exist or is not writable; the message gives the system's reason.
    """
    if not os.path.isdir(folder):
        raise LayersimError(f"`{argument}` names a folder that does not exist: {folder}.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LayersimError(
            f"`{argument}` names a folder that cannot be written to: {folder} ({error.strerror or error})."
        ) from error


def read(path: str | os.PathLike[str], kinds: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the header and the tensors of a file.

    Args:
        path: path of the file.
        kinds: the kinds of file that are accepted.

    Raises:
        FileNotFoundError: the file does not exist.
        LayersimError: the file is truncated, changed since it was written, of another program or kind, or of another format.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist.")
    if not os.path.isfile(path):
        report_file = path / REPORT_FILE
        remedy = f"its file {report_file}" if report_file.is_file() else "the path of the file that was written"
        raise FileNotFoundError(f"{path} is not a file. Pass {remedy}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get(HEADER, "null")
            header = json.loads(text)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, *MALFORMED) as error:
        raise LayersimError(
            f"{path} cannot be read: it has {path.stat().st_size} bytes and is truncated or not a safetensors file "
            f"({excerpt(str(error), 300)}). Copy the file again, or run the analysis again."
        ) from error
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str) or type(header.get("format")) is not int:
        raise LayersimError(
            f"{path} is a safetensors file of another program and holds {brief(list(tensors))}; it must be a file "
            "that tl_layersim wrote."
        )
    if header["format"] != FORMAT:
        age = "a newer" if header["format"] > FORMAT else "an older"
        raise LayersimError(
            f"{path} was written by {age} tl_layersim, in format {header['format']}; this version reads format {FORMAT}."
        )
    if metadata.get(CHECKSUM) != checksum(text, tensors):
        raise LayersimError(
            f"{path} has changed since it was written: its checksum differs. "
            "Copy the file again, or run the analysis again; delete it if it is a checkpoint."
        )
    if header["kind"] not in kinds:
        raise LayersimError(f"{path} is a file of kind {header['kind']!r}; the kind must be {' or '.join(map(repr, kinds))}.")
    return header, tensors


@contextmanager
def reading(path: str | os.PathLike[str], content: str, remedy: str) -> Iterator[None]:
    """Context manager that turns errors of a malformed file into a `LayersimError`.

    Args:
        path: path of the file.
        content: the expected content, such as "a complete checkpoint".
        remedy: the remedy, as a sentence without its full stop.

    Raises:
        LayersimError: a part of the file is missing, or of another type.
    """
    try:
        yield
    except LayersimError as error:
        if str(path) in str(error):
            raise
        raise _malformed(path, content, remedy, str(error)) from error
    except MALFORMED as error:
        raise _malformed(path, content, remedy, f"{type(error).__name__}: {error}") from error


def _malformed(path: str | os.PathLike[str], content: str, remedy: str, reason: str) -> LayersimError:
    return LayersimError(f"{path} is not {content} ({excerpt(reason, 300)}). {remedy}.")
