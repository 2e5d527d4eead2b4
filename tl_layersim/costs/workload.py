"""Workload of one batch of a run: its FLOPs, sums and memory, measured in one run with or without weights."""

from __future__ import annotations

import statistics
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..activations.row_pools import AnyKernel, Draws, PoolKernel, Samples, drawn, plan_batch
from ..activations.view import View, in_full_precision, tokens_alone
from ..analyzers.analyzer import Analyzer
from ..core.sums import Sums, analyzer_of
from ..data.batches import Batch
from ..engine.plan import SitePlan
from ..remote.request_schedule import packed_request, packed_result
from ..sources.hooks import kernels_alone
from ..sources.model import Model
from ..sources.source import CanReadSites, Source, running
from ..sources.without_weights import CPU_ATTENTION, WeightlessSource, without_values


class OperationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Counts FLOPs and live memory of all operations that run inside it, also on the meta device.

    FLOPs are those of `torch.utils.flop_counter`, a multiplication and an addition counted as two. `FlopCounterMode` itself
    does not work with `torch.autograd.grad`, does not count attention on CPUs, and does not count by part. Memory is that of
    the tensors that are alive, as allocators of GPUs count it; workspaces inside an operation are not seen.

    Args:
        weights: existing tensors, which do not count as memory.
        head: tensors whose products count as the part "head".

    Attributes:
        flops: FLOPs by part.
        peak: largest number of bytes, alive at once, of tensors made inside.

    Examples:
        >>> import torch
        >>> with OperationMeter([]) as meter, meter.counting("product"):
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> meter.flops["product"], meter.peak
        (48, 104)
    """

    def __init__(self, weights: Iterable[Tensor], head: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.flops: Counter[str] = Counter()
        self.live, self.peak = 0, 0
        self._part: tuple[str, Any] = "", 1
        self._weights, self._head = _storages(list(weights)), _storages(list(head))
        self._alive: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def counting(self, part: str, share: float = 1) -> Iterator[None]:
        """Context in which FLOPs are counted under a name.

        Args:
            part: the name.
            share: share of the FLOPs to count.
        """
        before, self._part = self._part, (part, share)
        yield
        self._part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, formula = _storages((args, kwargs)), FORMULAS.get(func.overloadpacket)
        out = func(*args, **kwargs)
        if formula is not None:
            part, share = self._part
            self.flops["head" if given.keys() & self._head.keys() else part] += share * formula(*args, **kwargs, out_val=out)
        for key, storage in _storages(out).items():
            if not any(key in known for known in (given, self._alive, self._weights)):
                self._note(key, storage)
        return out

    def _note(self, key: int, storage: Any) -> None:
        """Count the memory of a tensor until it is freed."""
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.live -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention, in which grouped queries share keys and values."""
    count: Any = sdpa_flop_count
    return int(count(query.shape, (*query.shape[:2], *key.shape[2:]), (*query.shape[:2], *value.shape[2:])))


FORMULAS: dict[Any, Any] = {**flop_registry, CPU_ATTENTION: _attention_on_cpu}


def _storages(values: Any) -> dict[int, Any]:
    """The memory of all tensors in nested values, by a key that identifies it."""
    storages = [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {storage._cdata: storage for storage in storages}


# A calibration ends after so many seconds, or so many repeats.
CALIBRATION = 10.0
TIMED_BATCHES = 9
# Measured with an NDIF server on one machine: requests before the passes.
BYTES_OF_OFFER, BYTES_OF_LENS_CHECK, BYTES_OF_STREAM_CHECK = 7_000, 17_000, 35_000


@dataclass(frozen=True)
class Workload:
    """Cost of one batch of a run.

    Attributes:
        model: the description of the model.
        shape: rows and positions of a batch.
        samples: number of counted positions of a batch.
        sites: number of sites to read.
        passes: number of passes over the data that run the model.
        flops: FLOPs of all passes over one batch: "forward" for the blocks, "head" for logits in kernels, and by analyzer.
        sums: bytes of the sums of each kernel, see `analyzer_of`.
        pools: for each kernel that sums over pools, the rows of a pool.
        first_sums: bytes of the first-pass sums that the main pass reads, for each analyzer with a first pass.
        sent: bytes of a request to a server in each pass, without its tokens; empty if the model is not on a server.
        returned: bytes of a reply in each pass; empty if the model is not on a server.
        opening: bytes of each request before the passes; empty if the model is not on a server.
        has_values: whether sums have values, which results are packed by.
        weights: bytes of the parameters and buffers.
        parameters: number of parameters.
        activations: largest number of bytes beside the weights that are alive at once.
        compute_seconds: seconds to compute all results from their sums.
        batch_seconds: measured seconds of all passes over one batch; None without weights.
    """

    model: Model
    shape: tuple[int, int]
    samples: int
    sites: int
    passes: int
    flops: Mapping[str, float]
    sums: Mapping[str, int]
    pools: Mapping[str, int]
    first_sums: Mapping[str, int]
    sent: tuple[int, ...]
    returned: tuple[int, ...]
    opening: tuple[int, ...]
    has_values: bool
    weights: int
    parameters: int
    activations: int
    compute_seconds: float
    batch_seconds: float | None

    @property
    def capacity(self) -> int:
        """Rows of a batch, a power of two: whole pools that run in one or several forward passes."""
        return max([1 << (self.shape[0].bit_length() - 1), *self.pools.values()])


def meter(
    source: Source,
    module: torch.nn.Module,
    batch: Batch,
    analyzers: Mapping[str, Analyzer],
    plan: SitePlan,
    timed: bool,
    remote: bool,
) -> Workload:
    """Run analyzers on one batch, and measure their costs.

    Args:
        source: the source that runs the model; a `WeightlessSource` for a model on the meta device.
        module: the model.
        batch: a batch of the size of the run's batches.
        analyzers: the analyzers, by name.
        plan: the sites that each analyzer reads.
        timed: whether to measure the time of the batch, for `CALIBRATION` seconds.
        remote: whether to measure requests to a server.
    """
    run = _MeteredRun(source, module, batch, analyzers, plan, remote)
    with ExitStack() as stack:
        stack.enter_context(running(source, any(analyzer.needs_calls for analyzer in analyzers.values())))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        run.all_passes()
        seconds = run.calibrate() if timed else None
    models = plan.models_by_analyzer([source.model], [source])
    tensors = [*module.parameters(), *module.buffers()]
    return Workload(
        model=source.model,
        shape=(batch.tokens.shape[0], batch.tokens.shape[1]),
        samples=run.samples,
        sites=len(source.sites),
        passes=run.passes,
        flops=run.flops,
        sums=run.sums,
        pools={name: pool.rows for name, pool in run.pools.items()},
        first_sums={name: _size(sums) for name, sums in run.first.items()},
        sent=tuple(run.sent),
        returned=tuple(run.returned),
        opening=_opening(source, analyzers) if remote else (),
        has_values=not run.weightless,
        weights=sum(tensor.nbytes for tensor in tensors),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        activations=run.peak,
        compute_seconds=sum(analyzer.compute_seconds(models[name][0]) for name, analyzer in analyzers.items()),
        batch_seconds=seconds,
    )


def _opening(source: Source, analyzers: Mapping[str, Analyzer]) -> tuple[int, ...]:
    """Bytes of the requests before the passes: the query for the server's features, and the checks on one row."""
    lens = any(analyzer.needs_unembed for analyzer in analyzers.values())
    sums = isinstance(source, CanReadSites) and bool(source.stream_sums())
    return (BYTES_OF_OFFER, *([BYTES_OF_LENS_CHECK] * lens), *([BYTES_OF_STREAM_CHECK] * sums))


class _MeteredRun:
    """One batch through all passes of a run, with its costs measured.

    Attributes:
        flops: see `Workload`.
        sums: bytes of the sums of each kernel.
        pools: a pool of rows for each kernel of pools.
        first: sums of the first pass.
        passes: number of passes that run the model.
        peak: largest number of bytes beside the weights that were alive at once.
        samples: number of samples of the batch.
        sent: see `Workload`.
        returned: see `Workload`.
    """

    def __init__(
        self,
        source: Source,
        module: torch.nn.Module,
        batch: Batch,
        analyzers: Mapping[str, Analyzer],
        plan: SitePlan,
        remote: bool,
    ) -> None:
        self.source, self.module, self.batch, self.analyzers, self.plan = source, module, batch, analyzers, plan
        self.remote = remote
        self.sent: list[int] = []
        self.returned: list[int] = []
        self.flops: Counter[str] = Counter()
        self.sums: dict[str, int] = {}
        self.pools: dict[str, _Pool] = {}
        self.first: dict[str, Sums] = {}
        self.passes, self.peak, self.samples = 1, 0, 0
        head = source.model.head
        paths = [] if head is None else head.modules
        self.head = [weight for path in paths for weight in module.get_submodule(path).parameters()]
        self.weightless = isinstance(source, WeightlessSource)
        kernels = {name: kernel for name, a in analyzers.items() if (kernel := a.first_kernel()) is not None}
        # Counting tokens or labels needs no model.
        self.alone = {name: kernel for name, kernel in kernels.items() if analyzers[name].first_without_model}
        self.first_kernels = {name: plan.kernel(name, kernel) for name, kernel in kernels.items() if name not in self.alone}

    def all_passes(self) -> None:
        """Measure the first pass, if an analyzer needs one, and the main pass."""
        self.first = {name: Sums.of(kernel(tokens_alone(self.batch))) for name, kernel in self.alone.items()}
        if self.first_kernels:
            self.first |= self._pass(self.first_kernels)
            self.passes = 2
        with without_values() if self.weightless else nullcontext():
            kernels = self._main_kernels()
        self.pools = {
            name: _Pool.of(kernel, self.batch, self.source.model.vocabulary or 1)
            for name, kernel in kernels.items()
            if isinstance(kernel, PoolKernel)
        }
        self.sums = {name: _size(sums) for name, sums in self._pass(kernels).items()}

    def _main_kernels(self) -> dict[str, AnyKernel]:
        return self.plan.kernels(self.analyzers, self.first)

    def _pass(self, kernels: Mapping[str, AnyKernel]) -> dict[str, Sums]:
        """Run kernels on the batch, count their FLOPs, and return their sums."""
        outputs = {}
        weights = [*self.module.parameters(), *self.module.buffers()]
        with OperationMeter(weights, self.head) as meter, without_values() if self.weightless else nullcontext():
            with meter.counting("forward"):
                view = self.source.collect(self.batch)
            self.samples = view.activations.shape[1]
            for name, kernel in kernels.items():
                pool: Any = self.pools.get(name)
                # A batch is a part of a pool, or several.
                share = 1 if pool is None else len(self.batch.tokens) / pool.rows
                run: Any = kernel if pool is None else pool.sums
                with meter.counting(analyzer_of(name), share), kernels_alone():
                    outputs[name] = run(view)
        self.flops.update(meter.flops)
        self.peak = max(self.peak, meter.peak)
        sums = {name: self._widened(out) for name, out in outputs.items()}
        if self.remote:
            # Sums of the first pass are a part of the kernels of the main pass; those without values take no bytes there.
            unpacked = sum(map(_size, self.first.values())) if self.weightless else 0
            self.sent.append(packed_request(kernels) + unpacked)
            sites = self.source.sites
            self.returned.append(sum(map(_size, sums.values())) if self.weightless else packed_result(sites, sums))
        return sums

    def _widened(self, out: Mapping[str, Tensor]) -> Sums:
        """Sums of a kernel's output, in float64 or int64; sums without values stay on the meta device."""
        kinds = {name: torch.float64 if value.dtype.is_floating_point else torch.int64 for name, value in out.items()}
        known = Sums.of({name: value for name, value in out.items() if not value.is_meta}).fields
        shapes = {
            name: torch.empty(value.shape, dtype=kinds[name], device="meta") for name, value in out.items() if value.is_meta
        }
        return Sums({**known, **shapes})

    def calibrate(self) -> float:
        """Seconds of all passes over the batch: the median of runs within `CALIBRATION` seconds, after a warm-up run."""
        steps: list[Mapping[str, AnyKernel]] = [kernels for kernels in (self.first_kernels, self._main_kernels()) if kernels]
        taken: list[float] = []
        view = self.source.collect(self.batch) if self.pools else None
        start = time.perf_counter()
        while not taken or (len(taken) <= TIMED_BATCHES and time.perf_counter() - start < CALIBRATION):
            before, of_pools = time.perf_counter(), 0.0
            for kernels in steps:
                single = {name: kernel for name, kernel in kernels.items() if not isinstance(kernel, PoolKernel)}
                for out in self.source.run(self.batch, single)[1].values():
                    Sums.of(out)
            whole = time.perf_counter() - before
            for pool in self.pools.values():
                assert view is not None
                before = time.perf_counter()
                in_full_precision(view.activations.device, partial(pool.sums, view))
                of_pools += (time.perf_counter() - before) * len(self.batch.tokens) / pool.rows
            taken.append(whole + of_pools)
        return statistics.median(taken[1:] or taken)


@dataclass(frozen=True)
class _Pool:
    """A pool of rows of which one batch is available; its samples stand in for all others.

    Attributes:
        kernel: kernel of the pool.
        rows: number of rows of the pool.
        samples: the drawn samples.
        draws: see `PoolKernel`.
        index: indices of the samples among the samples of the batch.
    """

    kernel: PoolKernel
    rows: int
    samples: Samples
    draws: Draws
    index: Tensor

    @classmethod
    def of(cls, kernel: PoolKernel, batch: Batch, vocabulary: int) -> _Pool:
        """Make a pool of rows that have as many counted positions as the rows of a batch.

        Args:
            kernel: kernel of the pool.
            batch: one batch of the run.
            vocabulary: size of the vocabulary; the draws depend on token ids.
        """
        counted = int(batch.counted.sum())
        each = max(1, counted // len(batch.tokens))
        rows = kernel.rows(each)
        row = torch.arange(rows).repeat_interleave(each)
        ids = torch.randint(vocabulary, (len(row),), generator=torch.Generator().manual_seed(0))
        known = View(torch.empty(0, len(row), 0), ids, row, row, row=row)
        [pool] = plan_batch(known, (0, rows), rows, None, {"": kernel}).pools[""]
        return cls(kernel, rows, pool.samples, pool.draws, pool.index % (len(batch.tokens) if kernel.whole_rows else counted))

    def sums(self, view: View) -> dict[str, Tensor]:
        """The sums of the pool."""
        out = drawn(view, read=self.kernel.read, sites=self.kernel.sites, index=self.index)
        return self.kernel.sums([out["samples 0"]], [tuple(out["widths 0"].tolist())], self.samples, self.draws)


def _size(sums: Sums) -> int:
    """Bytes of sums."""
    return sum(value.nbytes for value in sums.fields.values())
