"""File format of results and checkpoints: safetensors with JSON and a checksum in its header, written whole or not at all."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from .errors import LayersimError, warn

# Format 1 had no checksum, and named the modules of result classes.
FORMAT = 2
HEADER, CHECKSUM = "tl_layersim", "tl_layersim.sha256"
# As safetensors names them.
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
# Unfinished files of this age belong to no process that still writes them.
ABANDONED = 3600.0
# What reading a header raises that is not what a writer of this package makes of it.
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, RecursionError, OverflowError)


def write(path: str | os.PathLike[str], kind: str, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write one file with its checksum; an interrupted write leaves the old file.

    Raises:
        OSError: the file cannot be written (no such folder, disk full); an older file at `path` is untouched.
    """
    text = json.dumps({"format": FORMAT, "kind": kind, **header}, allow_nan=True)
    # Wide numbers first, so that each tensor begins where its dtype can be read.
    held = {name: tensors[name].detach().cpu() for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))}
    entries: dict[str, Any] = {"__metadata__": {HEADER: text, CHECKSUM: checksum(text, held)}}
    end = 0
    for name, tensor in held.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    front = json.dumps(entries).encode()
    front += b" " * (-len(front) % 8)
    # Not safetensors' own writer: what it leaves beside the file when it is killed has a name that nobody can tell.
    with replacing(path) as file:
        file.write(len(front).to_bytes(8, "little") + front)
        for tensor in held.values():
            file.write(_bytes(tensor))
    return Path(path)


def checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256, in hex digits, of a header and of names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """An empty file to write to, which takes the place of `path` in one step when the block ends without an error.

    Where the system can, the file has no name in the folder until it is whole, so that a killed process leaves nothing. A link
    at `path` is replaced; the file that it leads to is not written to.

    Raises:
        OSError: the file cannot be written; what stood at `path` is untouched.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"No folder {path.parent} to write {path.name} to: make it first, or pass another path.")
    if not _replaceable(path):
        raise OSError(f"Could not write {path}: what is there is no file. Pass another path.")
    named = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        handle, nameless = _open(named)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
            if nameless:
                # Given a folder, os.link follows the link to the nameless file.
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.link(f"/proc/self/fd/{handle}", named.name, dst_dir_fd=folder, follow_symlinks=True)
                finally:
                    os.close(folder)
        os.replace(named, path)
    except OSError as error:
        raise OSError(
            f"Could not write {path}: {error}. What stood there before is unchanged; free some space or pass another path.",
        ) from error
    finally:
        with suppress(OSError):
            named.unlink(missing_ok=True)
    _remove_abandoned(path)


def _open(named: Path) -> tuple[int, bool]:
    """A new file, open for writing, and whether it has no name."""
    # macOS and Windows have no nameless files, some file systems of Linux have none either.
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):
            return os.open(named.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), True
    return os.open(named, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666), False


def _replaceable(path: Path) -> bool:
    """Whether there is nothing, a file or a link; a device such as /dev/null must not be replaced."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left beside `path`."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()


def refuse_unwritable(path: str | os.PathLike[str] | None, argument: str) -> None:
    """Refuse, before anything is computed, a file that cannot be written at its end.

    Args:
        path: of the file, None where there is none to write.
        argument: that named it.

    Raises:
        LayersimError: there is no such folder, or no file can be made in it, or something else stands at `path`.
    """
    if path is None:
        return
    path = Path(path)
    if not path.parent.is_dir():
        raise LayersimError(
            f"`{argument}` names a file in a folder that does not exist.",
            given=str(path),
            expected="a path in a folder that exists",
            do=f"mkdir {path.parent}",
        )
    if not _replaceable(path):
        raise LayersimError(
            f"`{argument}` names something that is no file.",
            given=str(path),
            expected="the path of a file, new or old",
            do=f"{argument}={str(path / 'run.safetensors')!r}" if path.is_dir() else "another path",
        )
    refuse_unwritable_folder(path.parent, argument)


def refuse_unwritable_folder(folder: Path, argument: str) -> None:
    """Refuse, before anything is computed, a folder in which no file can be made.

    Raises:
        LayersimError: it does not exist, or the system's reason.
    """
    if not folder.is_dir():
        raise LayersimError(
            f"`{argument}` names a folder that does not exist.",
            given=str(folder),
            expected="a folder that exists",
            do=f"mkdir {folder}",
        )
    probe = folder / f".tl_layersim.{uuid.uuid4().hex[:12]}.part"
    try:
        handle, nameless = _open(probe)
        os.close(handle)
        if not nameless:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise LayersimError(
            f"`{argument}` names a folder that cannot be written to.",
            given=f"{folder}: {error.strerror or error}",
            expected="a folder in which files can be made",
            do="pass a path in another folder, or change its permissions",
        ) from error


def read(path: str | os.PathLike[str], kinds: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of a file of one of `kinds`.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: it is truncated, changed since it was written, not ours, of another kind, or of a newer format.

    Warns:
        LayersimWarning: it is of format 1, which has no checksum.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}: pass the path that was given to save().")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get(HEADER, "null")
            header = json.loads(text)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, *MALFORMED) as error:
        raise LayersimError(
            f"{path} cannot be read: it is truncated or not a safetensors file ({str(error)[:300]}).",
            given=f"{path.stat().st_size} bytes",
            expected="a whole file written by save()",
            do="copy the file again, or run the analysis again",
        ) from error
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str) or type(header.get("format")) is not int:
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
    old = header["format"] == 1 and CHECKSUM not in metadata
    if not old and metadata.get(CHECKSUM) != checksum(text, tensors):
        raise LayersimError(
            f"{path} is not as it was written: its checksum is another one.",
            given=f"SHA-256 {checksum(text, tensors)[:12]}...",
            expected=f"{str(metadata.get(CHECKSUM))[:12]}..., as the file says",
            do="copy the file again, or run the analysis again; delete it if it is a checkpoint",
        )
    if header["kind"] not in kinds:
        raise LayersimError(
            f"{path} holds another kind of data.",
            given=header["kind"],
            expected=" or ".join(kinds),
            do="lsim.load() for results and reports, lsim.load_run() for runs that were sent off, checkpoint= for checkpoints",
        )
    if old:
        warn(
            f"{path} was written by tl_layersim 0.1, without a checksum: a bit that changed since then would not be noticed. "
            "What is saved now has one."
        )
    return header, tensors


@contextmanager
def reading(path: str | os.PathLike[str], what: str, do: str) -> Iterator[None]:
    """Turn what a malformed header raises while it is taken apart into a refusal that names the file.

    Args:
        path: of the file.
        what: the file ought to be, such as "a whole checkpoint".
        do: what helps.

    Raises:
        LayersimError: something is missing in the file, or of another type.
    """
    try:
        yield
    except LayersimError as error:
        if str(path) in error.what:
            raise
        raise _malformed(path, what, do, f"{error.what} {error.given}") from error
    except MALFORMED as error:
        raise _malformed(path, what, do, f"{type(error).__name__}: {error}") from error


def _malformed(path: str | os.PathLike[str], what: str, do: str, given: str) -> LayersimError:
    return LayersimError(f"{path} is not {what}.", given=given[:300], expected="a file as it was written", do=do)
