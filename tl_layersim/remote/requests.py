"""Requests to a server: number of batches, size in bytes, and shipped source code."""

from __future__ import annotations

import io
import itertools
import linecache
import sys
import tokenize
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType
from typing import Any

import psutil
import torch

from ..activations.row_pools import AnyKernel
from ..core.code_digests import called_by, codes_in, plain_constants
from ..core.errors import LayersimError
from ..core.sums import Sums, next_size, texts_in_block
from ..data.batches import Batch
from ..sources.nnsight import own_function, shippable
from .traces import submit

# Seconds of a request; at most a quarter of the operator's limit, if that is known.
SECONDS_PER_REQUEST = 10.0
# Maximum number of batches in a request, a power of two.
MOST_BATCHES = 64


class RequestSchedule:
    """Chooses the number of batches per request, by a token limit or by time.

    Args:
        most_tokens: maximum number of positions in a request; None to choose the number of batches by time.

    Attributes:
        most_batches: maximum number of batches in a request; it is lowered if the server ends a job because of its time limit.
        lowered: number of times that `most_batches` was lowered.
    """

    def __init__(self, most_tokens: int | None) -> None:
        self.most_tokens = most_tokens
        self.most_batches = MOST_BATCHES
        self.lowered = 0
        self._seconds_per_batch: float | None = None

    def refuse_larger(self, rows: int, positions: int) -> None:
        """Raise an error if a forward pass exceeds `tokens_per_request`."""
        if self.most_tokens is not None and positions > self.most_tokens:
            width = positions // rows
            largest_batch_size = self.most_tokens // width
            remedy = f"at least {positions}"
            if largest_batch_size:
                remedy += f", or batch_size={largest_batch_size}"
            raise LayersimError(
                f"`tokens_per_request` is {self.most_tokens}, but one forward pass has {rows} rows of {width} tokens. Use "
                f"{remedy}."
            )

    def groups(
        self,
        batches: Iterator[Batch],
        start: int,
        most_tokens: int | None,
        affordable: Callable[[], int],
        first_block: int | None,
        returned: deque[Batch],
    ) -> Iterator[list[Batch]]:
        """Group batches into requests of 2^k batches; the last request may hold fewer.

        Yields an empty list if no batches are left.

        Args:
            batches: the batches, in order.
            start: number of texts before these batches.
            most_tokens: maximum number of positions in a request; None for no limit.
            affordable: function that returns the maximum number of batches by time.
            first_block: number of texts in the first block of the data; None if the run keeps no blocks. A request holds at
                most one block, or a single batch.
            returned: batches of the last groups that are grouped again, before all others.
        """
        # Batches that were read and are not in a group yet.
        ahead: deque[Batch] = deque(itertools.islice(batches, 1))
        texts = max(1, ahead[0].capacity) if ahead else 1
        # Number of batches before the next group.
        index = start // texts
        while True:
            index -= len(returned)
            ahead.extendleft(reversed(returned))
            returned.clear()
            most_batches = affordable()
            if first_block is not None:
                batches_in_block = texts_in_block(index * texts, first_block) // texts
                most_batches = max(1, min(most_batches, batches_in_block))
            size = next_size(index, most_batches)
            ahead.extend(itertools.islice(batches, max(0, size - len(ahead))))
            for batch in ahead:
                self.refuse_larger(*batch.pass_size)
            count = 0
            tokens = 0
            for batch in itertools.islice(ahead, size):
                tokens += batch.tokens.numel()
                # A group holds one batch at least.
                if count and most_tokens is not None and tokens > most_tokens:
                    break
                count += 1
            if count < len(ahead):
                # The largest power of two: only the last group of the data may have another size.
                count = 1 << (count.bit_length() - 1)
            yield [ahead.popleft() for _ in range(count)]
            index += count

    def affordable(self, job_limit: float | None) -> int:
        """Maximum number of batches in the next request.

        Args:
            job_limit: the operator's time limit for a job in seconds; None if unknown.
        """
        if self.most_tokens is not None:
            return self.most_batches
        if self._seconds_per_batch is None:
            return 1
        seconds = SECONDS_PER_REQUEST if job_limit is None else min(SECONDS_PER_REQUEST, job_limit / 4)
        return max(1, min(self.most_batches, int(seconds / self._seconds_per_batch)))

    def measure(self, seconds: float, count: int) -> None:
        """Record how long a job with this number of batches took."""
        self._seconds_per_batch = max(seconds, 1e-3) / count

    def lower(self, most_batches: int) -> None:
        """Limit later requests to fewer batches, after a job took too long."""
        if most_batches < self.most_batches:
            self.most_batches = most_batches
            self.lowered += 1


# Width of sites whose width is not known.
UNKNOWN_SITE_WIDTH = 8192
# Smallest number of matrices of the width of a site that a site may have.
FEWEST_MATRICES = 16


def largest_sums(group: Sequence[Batch], kernels: int, sites: int, width: int, classes: int, joined: bool, least: int) -> int:
    """Largest number of bytes of the sums of a request.

    The largest sums are matrices of the width of a site for each pair of sites, and vectors of this width for each class. If
    the sums of leaves are not added, kernels may also return matrices of the samples.

    Args:
        group: batches of the request.
        kernels: number of kernels.
        sites: number of sites.
        width: width of the widest site; 0 if not known.
        classes: number of classes, such as the size of the vocabulary.
        joined: whether the sums of leaves are added.
        least: smallest limit.
    """
    leaves = sum(batch.leaf_texts // batch.leaf for batch in group)
    samples = 0 if joined else max(int(batch.counted.sum()) for batch in group)
    width = width or UNKNOWN_SITE_WIDTH
    numbers = sites * (max(sites, FEWEST_MATRICES) * max(width, samples) ** 2 + classes * width)
    # Twice as many, because a kernel may return several of them; but sums that do not fit into memory help nobody.
    free: int = psutil.virtual_memory().available
    return max(least, min(least + 2 * 8 * leaves * kernels * numbers, free // 2))


# Zstandard level of nnsight's requests.
REQUEST_LEVEL = 6
# Zstandard level of NDIF's results.
RESULT_LEVEL = 3


def packed_request(kernels: Mapping[str, AnyKernel]) -> int:
    """Compressed size in bytes of a request without its batches: kernels and source code.

    Args:
        kernels: kernels of the data pass, by name.
    """
    import nnsight
    from nnsight.intervention.serialization import dumps

    nnsight.register("tl_layersim")
    return _packed(dumps((submit, shippable(kernels))), REQUEST_LEVEL)


def packed_result(sites: Sequence[str], sums: Mapping[str, Sums]) -> int:
    """Compressed size in bytes of a request's result.

    Args:
        sites: the sites that are read.
        sums: sums by kernel.
    """
    buffer = io.BytesIO()
    counts = [torch.zeros((), dtype=torch.int64) for _ in sites]
    out = {name: dict(kernel_sums.fields) for name, kernel_sums in sums.items()}
    # A ticket, a checksum and one part, as `sealed` and `submit` make them.
    torch.save({"found": ("0" * 32, 0, [(0, (counts, out))])}, buffer)
    return _packed(buffer.getvalue(), RESULT_LEVEL)


def _packed(data: bytes, level: int) -> int:
    import zstandard

    return len(zstandard.ZstdCompressor(level=level).compress(data))


class ShippedSource:
    """Source code that requests send to the server; each file is read once in a run."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, None, list[str], str]] = {}
        self._checked: set[FunctionType] = set()

    @contextmanager
    def in_place(self, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Context manager that puts this source code into Python's `linecache`.

        Args:
            kernels: functions that are shipped, by name.

        Raises:
            LayersimError: the file of a kernel has changed since it was imported.
        """
        functions = {name: own_function(kernel) for name, kernel in kernels.items()}
        roots = {"tl_layersim", *(function.__module__.split(".")[0] for function in functions.values())}
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if not path or not path.endswith(".py") or path in self._entries:
                continue
            if module.__name__.split(".")[0] in roots:
                with tokenize.open(path) as file:
                    lines = file.readlines()
                # Size, time of modification, lines and path, as `linecache` keeps them.
                self._entries[path] = (sum(map(len, lines)), None, lines, path)
        for name, function in functions.items():
            self._refuse_other_code(name, function)
        # `linecache` never compares an entry without a modification time with its file.
        earlier_entries = {path: linecache.cache.get(path) for path in self._entries}
        linecache.cache.update(self._entries)
        try:
            yield
        finally:
            for path, entry in earlier_entries.items():
                if entry is None:
                    linecache.cache.pop(path, None)
                else:
                    linecache.cache[path] = entry

    def _refuse_other_code(self, name: str, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType) or function in self._checked:
            return
        self._checked.add(function)
        path = function.__code__.co_filename
        if path not in self._entries:
            # Code from a notebook or a console has no file that could change.
            return
        _, _, lines, _ = self._entries[path]
        on_disk = {}
        # A file that Python cannot read has changed.
        with suppress(SyntaxError):
            module_code = compile("".join(lines), path, "exec", dont_inherit=True)
            on_disk = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(module_code)}
        # The functions that a kernel calls are shipped with it.
        for called in called_by([function]):
            code = called.__code__
            if code.co_filename != path or _is_same_code(code, on_disk.get((code.co_qualname, code.co_firstlineno))):
                continue
            raise LayersimError(
                f"The kernel of {name!r} uses {called.__qualname__}, whose file {path} has changed since its import. Use "
                "importlib.reload(module), or restart Python."
            )


def _is_same_code(imported: CodeType, on_disk: CodeType | None) -> bool:
    if on_disk is None or imported.co_code != on_disk.co_code or imported.co_names != on_disk.co_names:
        return False
    return plain_constants(imported) == plain_constants(on_disk)
