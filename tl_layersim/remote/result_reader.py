"""Reads what an NDIF server returns: plain data and dense tensors, of a limited size. No code of the server runs.

Results are files of `torch.save`, compressed by Zstandard. Sizes are compared with a limit before memory is allocated, and
`torch.load` is not used: it allocates what a file announces, and can run code or read beyond the end of a record.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import in_words
from .failures import DamagedAnswer, UnsafeAnswer, server_text

# Compressed bytes that are decompressed at a time; at most 128 kB come out of 4 bytes.
BYTES_AT_A_TIME = 1024
# Largest numbers of instructions, of values and of nested containers in a result; a run has some thousand values.
MOST_INSTRUCTIONS = 1_000_000
MOST_RESULT_VALUES = 200_000
DEEPEST_RESULT = 16
RESULT_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
# The instructions of pickle that plain data and tensors need.
ALLOWED = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID"),
}


@dataclass(frozen=True)
class _Storage:
    """A storage of tensors: its record in the file, its dtype and its number of values."""

    record: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in the file that was not read yet."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def decompressed(content: bytes, largest: int) -> bytes:
    """Decompress a Zstandard frame of at most `largest` bytes.

    Raises:
        DamagedAnswer: the frame is empty, incomplete or unreadable.
        UnsafeAnswer: the frame holds more bytes.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor().decompressobj()
    size = 0
    parts: list[bytes] = []
    for start in range(0, len(content), BYTES_AT_A_TIME):
        if decompressor.eof:
            break
        try:
            parts.append(decompressor.decompress(content[start : start + BYTES_AT_A_TIME]))
        except zstandard.ZstdError:
            raise DamagedAnswer(f"the {len(content)} bytes of the result cannot be decompressed") from None
        size += len(parts[-1])
        refuse_larger(size, largest)
    if not decompressor.eof:
        raise DamagedAnswer(f"the result was cut off after {len(content)} bytes")
    return b"".join(parts)


def refuse_larger(size: int, largest: int) -> None:
    """Raise `UnsafeAnswer` if an answer holds more bytes than its request can return."""
    if size > largest:
        raise UnsafeAnswer(f"holds more than the {in_words(largest)} that this request can return")


def read_result(content: bytes, largest: int) -> Any:
    """Read a file of `torch.save` that holds plain data and dense tensors.

    Args:
        content: the file.
        largest: largest number of bytes of all tensors.

    Returns:
        Dicts, lists, tuples, texts, bytes, numbers and new, contiguous CPU tensors.

    Raises:
        DamagedAnswer: the file is empty, incomplete or unreadable.
        UnsafeAnswer: the file holds other objects, or larger tensors.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            return _File(file, largest).value()
    except (UnsafeAnswer, DamagedAnswer):
        raise
    except Exception as error:
        # Any error of Python's readers means that the file is none of `torch.save`, or that bytes are missing.
        detail = server_text(f"{type(error).__name__}: {error}", most=100)
        raise DamagedAnswer(f"the {len(content)} bytes of the result are no file of torch.save ({detail})") from None


class _File:
    """A file of `torch.save` that is being read.

    Args:
        file: the archive.
        largest: largest number of bytes of all tensors.
    """

    def __init__(self, file: zipfile.ZipFile, largest: int) -> None:
        self._file = file
        self._largest = largest
        self._entries = {info.filename: info for info in file.infolist()}
        [self._pickle] = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        self._folder = self._pickle.partition("/")[0]
        self._values = 0
        # Bytes of the tensors so far.
        self._tensor_bytes = 0
        # Bytes of the storages so far, each of which is read once.
        self._storage_bytes = 0
        self._storages: dict[_Storage, Tensor] = {}

    def value(self) -> Any:
        """The value in the file."""
        order = self._entries.get(f"{self._folder}/byteorder")
        if order is not None and self._read(order.filename).decode() != sys.byteorder:
            raise UnsafeAnswer("has another order of bytes than this machine")
        instructions = self._read(self._pickle)
        _refuse_instructions(instructions)
        unpickler = _PlainUnpickler(io.BytesIO(instructions))
        unpickler.storage_of = self._storage
        return self._built(unpickler.load(), 0)

    def _read(self, name: str) -> bytes:
        """Read a record. Records of `torch.save` are not compressed, so they are no larger than the file."""
        if self._entries[name].compress_type != zipfile.ZIP_STORED:
            raise UnsafeAnswer("holds compressed records")
        return self._file.read(name)

    def _storage(self, key: Any) -> _Storage:
        kind, dtype, record, _, count = key
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(record, str) or not _is_size(count):
            raise ValueError("a storage of another form")
        return _Storage(f"{self._folder}/data/{record}", dtype, count)

    def _built(self, value: Any, depth: int) -> Any:
        """Replace the stored tensors in nested containers by tensors.

        Containers may be shared in the file; each place where they occur counts.
        """
        self._values += 1
        if depth > DEEPEST_RESULT or self._values > MOST_RESULT_VALUES:
            raise UnsafeAnswer(
                f"holds more than {MOST_RESULT_VALUES:,} values, or containers that are nested more than {DEEPEST_RESULT} deep"
            )
        if isinstance(value, dict) and type(value) is dict:
            if not all(isinstance(name, str) for name in value):
                raise UnsafeAnswer("holds names that are no texts")
            return {name: self._built(item, depth + 1) for name, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._built(item, depth + 1) for item in value)
        if isinstance(value, _StoredTensor):
            return self._tensor(value)
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        raise UnsafeAnswer(f"holds {type(value).__name__} objects")

    def _tensor(self, stored: _StoredTensor) -> Tensor:
        storage = stored.storage
        size = math.prod(stored.shape) * storage.dtype.itemsize
        # Before memory is allocated: many tensors may share a few values of a storage.
        self._tensor_bytes += size
        refuse_larger(self._tensor_bytes, self._largest)
        if not size:
            return torch.empty(stored.shape, dtype=storage.dtype)
        # Index of the last value in the storage.
        last = stored.offset
        for length, stride in zip(stored.shape, stored.strides, strict=True):
            last += (length - 1) * stride
        if last >= storage.count:
            raise ValueError("a tensor beyond the end of its storage")
        values = self._storage_values(storage).as_strided(stored.shape, stored.strides, stored.offset)
        return values.clone(memory_format=torch.contiguous_format)

    def _storage_values(self, storage: _Storage) -> Tensor:
        """All values of a storage, as one axis."""
        if storage not in self._storages:
            size = self._entries[storage.record].file_size
            if size != storage.count * storage.dtype.itemsize:
                raise ValueError("a storage of another size than its record")
            self._storage_bytes += size
            refuse_larger(self._storage_bytes, self._largest)
            record = bytearray(self._read(storage.record))
            # Bytes other than 0 and 1 are no bools.
            is_bool = storage.dtype == torch.bool
            values = torch.frombuffer(record, dtype=torch.uint8 if is_bool else storage.dtype)
            self._storages[storage] = values != 0 if is_bool else values
        return self._storages[storage]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _refuse_instructions(instructions: bytes) -> None:
    """Raise an error for instructions of pickle that could build other objects, or allocate more than the file holds."""
    for number, (instruction, argument, _) in enumerate(pickletools.genops(instructions)):
        if instruction.name not in ALLOWED:
            raise UnsafeAnswer(f"holds the instruction {instruction.name}, which plain data does not need")
        memo_index = argument if instruction.name == "LONG_BINPUT" and isinstance(argument, int) else 0
        # The memory of the unpickler grows with the index.
        if max(number, memo_index) > MOST_INSTRUCTIONS:
            raise UnsafeAnswer(f"holds more than {MOST_INSTRUCTIONS:,} instructions")


def _rebuilt(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = None, metadata: Any = None
) -> _StoredTensor:
    """In place of torch's function of the same arguments: describe a tensor."""
    if not isinstance(storage, _Storage) or type(shape) is not tuple or type(strides) is not tuple:
        raise ValueError("a tensor of another form")
    if len(shape) != len(strides) or len(shape) > DEEPEST_RESULT or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor of another form")
    return _StoredTensor(storage, offset, shape, strides)


def _encoded(text: Any, encoding: Any) -> bytes:
    """In place of Python's function, with which old protocols of pickle write bytes."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes of another form")
    return text.encode("latin1")


def _status(name: Any) -> str:
    """In place of nnsight's class of the states of a job: the name of the state."""
    return str(name)


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain data and descriptions of tensors; every other class or function is refused."""

    storage_of: Callable[[Any], _Storage]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in RESULT_DTYPES:
            return RESULT_DTYPES[name]
        functions = {
            ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
            # Of a tensor's hooks, which are always empty.
            ("collections", "OrderedDict"): OrderedDict,
            ("nnsight.schema.response", "Status"): _status,
            ("_codecs", "encode"): _encoded,
        }
        if (module, name) not in functions:
            full_name = server_text(f"{module}.{name}", most=100)
            raise UnsafeAnswer(f"holds {full_name}, which is neither plain data nor a dense tensor")
        return functions[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        return self.storage_of(pid)
