"""Arrays in memory or in files, of which some rows are read at a time.

Files are read by offset and not mapped into memory, so that memory holds only the rows that are read. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import LayersimError, excerpt
from .site_names import depth_key
from .wording import brief

# NumPy's types of the dtypes in safetensors; bfloat16 is read as whole numbers of the same size.
NUMPY_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "BOOL": "|b1",
}
# Kinds of NumPy's numbers: floats, signed and unsigned integers, bools.
KINDS_OF_NUMBERS = "fiub"
# Names of tensors of this package beside vectors in a file, such as the rows that these belong to, begin with it.
RESERVED = "tl_layersim."


class Array(ABC):
    """Numbers `row ...`, in memory or in a file, of which some rows are read at a time."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype in which rows are read: floats as they are, integers as floats that hold each of them exactly."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """The rows `start` to `stop - 1` as floats.

        Args:
            start: index of the first row.
            stop: index of the row after the last.
        """


@dataclass(frozen=True, eq=False)
class TensorArray(Array):
    """A tensor, on any device."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.values.dtype
        return dtype if dtype.is_floating_point else _float_for(dtype.itemsize)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.values.detach()[start:stop].to(self.dtype)


@dataclass(frozen=True, eq=False)
class NumpyArray(Array):
    """An array of NumPy."""

    values: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.values.shape
        return shape

    @property
    def dtype(self) -> torch.dtype:
        return _torch_type(self.values.dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        return _as_floats(self.values[start:stop])


@dataclass(frozen=True, eq=False)
class FileArray(Array):
    """Numbers in a file.

    Attributes:
        path: path of the file.
        offset: number of bytes before the first row.
        of_all: shape of all rows.
        numpy_type: type of the numbers in NumPy.
        is_bfloat16: whether the numbers are whole numbers with the bits of bfloat16.
    """

    path: Path
    offset: int
    of_all: tuple[int, ...]
    numpy_type: np.dtype[Any]
    is_bfloat16: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of_all

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_bfloat16 else _torch_type(self.numpy_type)

    def rows(self, start: int, stop: int) -> Tensor:
        numbers_of_row = math.prod(self.shape[1:])
        offset = self.offset + start * numbers_of_row * self.numpy_type.itemsize
        count = (stop - start) * numbers_of_row
        numbers = np.fromfile(self.path, self.numpy_type, count, offset=offset)
        if len(numbers) < count:
            raise LayersimError(f"{self.path} ends before row {stop}; it has been cut since it was opened.")
        numbers = numbers.reshape(stop - start, *self.shape[1:])
        return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16) if self.is_bfloat16 else _as_floats(numbers)


def _torch_type(numpy_type: np.dtype[Any]) -> torch.dtype:
    """Dtype in which numbers of NumPy are read, see `Array.dtype`."""
    if numpy_type.kind == "f":
        return {2: torch.float16, 4: torch.float32}.get(numpy_type.itemsize, torch.float64)
    return _float_for(numpy_type.itemsize)


def _as_floats(values: np.ndarray[Any, Any]) -> Tensor:
    """A copy as a tensor of floats, in the byte order of this machine."""
    name = str(_torch_type(values.dtype)).removeprefix("torch.")
    return torch.from_numpy(np.array(values, dtype=name, order="C"))


def _float_for(itemsize: int) -> torch.dtype:
    """Float that holds every integer of a size exactly, up to 2^53."""
    return torch.float32 if itemsize <= 2 else torch.float64


def as_array(values: Any, name: str) -> Array:
    """Convert a tensor, an array or a table of numbers to an `Array`. Numbers are not copied.

    Args:
        values: a tensor, an array or a memory map of NumPy, a table of pandas, or an object that NumPy takes as an array.
        name: the argument that holds the values, for messages.

    Raises:
        LayersimError: the values are no numbers.
    """
    if isinstance(values, Tensor):
        if values.is_complex() or values.layout != torch.strided:
            raise _no_numbers(name, values)
        return TensorArray(values)
    if hasattr(values, "columns") and hasattr(values, "to_numpy"):
        values = _numbers_of_table(values, name)
    if not hasattr(values, "__array__"):
        raise _no_numbers(name, values)
    if isinstance(values, np.memmap) and is_whole_file(values):
        path = Path(os.fspath(values.filename))  # type: ignore[arg-type]  # a path, see `is_whole_file`
        return FileArray(path, values.offset, values.shape, values.dtype)
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise LayersimError(f"`{name}` has masked entries; pass the whole vectors, and leave out positions by `mask`.")
    array = np.asarray(values)
    if array.dtype.kind not in KINDS_OF_NUMBERS:
        raise _no_numbers(name, values)
    return NumpyArray(array)


def is_whole_file(values: np.memmap[Any, Any]) -> bool:
    """Whether a memory map holds the numbers of its file in order, and not a part of them or changes of its own.

    Args:
        values: the memory map.
    """
    # A part of a memory map keeps the offset of the whole, and has the whole as its base.
    is_part = not isinstance(values.base, mmap.mmap)
    return not is_part and values.mode != "c" and values.filename is not None and values.flags.c_contiguous


def _numbers_of_table(table: Any, name: str) -> np.ndarray[Any, Any]:
    """The numbers of a table of pandas; missing ones are NaN."""
    from pandas.api.types import is_numeric_dtype

    for column, dtype in table.dtypes.items():
        if not is_numeric_dtype(dtype):
            raise LayersimError(f"`{name}` has the column {column!r} of {dtype}; all columns must be numbers.")
    numbers: np.ndarray[Any, Any] = table.to_numpy()
    if numbers.dtype == object:
        numbers = table.to_numpy(dtype="float64", na_value=np.nan)
    return numbers


def _no_numbers(name: str, values: Any) -> LayersimError:
    return LayersimError(f"`{name}` is {brief(values)}; it must be real numbers in an array, a tensor or a table of pandas.")


def open_arrays(path: str | os.PathLike[str], name: str) -> dict[str, Array]:
    """The arrays of a `.safetensors` file, a `.npz` file or a folder of `.npy` files, by name.

    Arrays of a `.npz` file are read into memory. They are in the order of the file, as are those of a file of `lsim.vectors`;
    others are in the order of their names, see `in_site_order`.

    Args:
        path: path of the file or the folder.
        name: the argument that holds the path, for messages.

    Raises:
        LayersimError: the file is of another kind or cannot be read, or holds objects.
    """
    path = Path(path)
    if not path.exists():
        raise LayersimError(f"`{name}` is {str(path)!r}, which does not exist.")
    try:
        if path.is_dir():
            stems = [file.stem for file in path.glob("*.npy")]
            return {stem: _npy_file(path / f"{stem}.npy") for stem in in_site_order(stems)}
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {key: as_array(archive[key], f"{name}[{key!r}]") for key in archive.files}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        if isinstance(error, LayersimError):
            raise
        raise LayersimError(f"`{name}` is {str(path)!r}, which cannot be read: {excerpt(str(error), 200)}") from error
    raise LayersimError(
        f"`{name}` is {str(path)!r}; it must be a .safetensors file, a .npz file or a folder of .npy files. Pass a single .npy "
        'file as {"name": numpy.load(path, mmap_mode="r")}.'
    )


def _npy_file(path: Path) -> Array:
    return as_array(np.load(path, mmap_mode="r", allow_pickle=False), str(path))


def _safetensors(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file, which the library has verified."""
    with safe_open(path, framework="np"):
        # Opening a file verifies its header.
        pass
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header: dict[str, Any] = json.loads(raw.read(length))
    header.pop("__metadata__", None)
    names = in_site_order(header)
    if any(name.startswith(RESERVED) for name in header):
        # Sites lie in the order in which the model computes them.
        names = sorted(header, key=lambda name: header[name]["data_offsets"])
    arrays: dict[str, Array] = {}
    for name in names:
        entry = header[name]
        if entry["dtype"] not in NUMPY_TYPES:
            raise LayersimError(f"{path} has {name!r} of dtype {entry['dtype']}; it must be one of {', '.join(NUMPY_TYPES)}.")
        arrays[name] = FileArray(
            path,
            8 + length + entry["data_offsets"][0],
            tuple(entry["shape"]),
            np.dtype(NUMPY_TYPES[entry["dtype"]]),
            is_bfloat16=entry["dtype"] == "BF16",
        )
    return arrays


def in_site_order(names: Iterable[str]) -> list[str]:
    """Names of sites in the order of depth if all are names of TransformerLens; else in alphabetical order, numbers by size.

    Args:
        names: the names.

    Examples:
        >>> in_site_order(["layer 10", "layer 9"])
        ['layer 9', 'layer 10']
        >>> in_site_order(["blocks.0.hook_resid_post", "blocks.0.hook_resid_pre"])
        ['blocks.0.hook_resid_pre', 'blocks.0.hook_resid_post']
    """
    names = list(names)
    depths = {name: depth_key(name) for name in names}
    if None not in depths.values():
        return sorted(names, key=lambda name: (depths[name], _with_numbers(name)))
    return sorted(names, key=_with_numbers)


def _with_numbers(name: str) -> list[tuple[bool, int, str]]:
    """Sort key of a name, in which numbers are in the order of their size."""
    parts = []
    for part in re.findall(r"\d+|\D+", name):
        is_number = part.isdecimal()
        parts.append((not is_number, int(part) if is_number else 0, part))
    return parts
