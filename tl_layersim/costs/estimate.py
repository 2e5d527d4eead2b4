"""`estimate`: costs of a run before it starts."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..activations.row_pools import TEXTS_OF_POOL, AnyKernel, Draws, PoolKernel, Samples, drawn, plan_batch, view_of_tokens
from ..activations.text_order import bytes_of_neighbour_products
from ..activations.view import View, in_full_precision, tokens_alone
from ..analyzers.analyzer import Analyzer
from ..architectures.blocks import anatomy_of
from ..architectures.site_selection import blocks_to_read
from ..core.arguments import PositiveInt, RowCount, typed
from ..core.errors import LayersimError, excerpt, in_words
from ..core.sums import TEXT_ORDER, Sums, analyzer_of, as_sum, first_block_size, most_nodes
from ..core.wording import duration_in_words
from ..data.batches import Batch, Batches
from ..data.data import Data
from ..data.input_names import ROW_AXES
from ..engine.run_arguments import AnalyzersArgument, choose_analyzers
from ..engine.site_plan import DEFAULT, AtArgument, SitePlan, plan_sites
from ..engine.submitted_runs import TOKENS_PER_REQUEST
from ..remote.open_model import open_source
from ..remote.requests import MOST_BATCHES, packed_request, packed_result
from ..sources.forward_arguments import shape_of_row
from ..sources.hooks import kernels_alone
from ..sources.load_by_name import model_without_weights
from ..sources.open_local import OpenedModel, is_nnsight
from ..sources.source import CanReadSites, Source, position_counter, running
from ..sources.without_weights import CPU_ATTENTION, WeightlessSource, has_no_weights, without_values

# Measured with an NDIF server on one machine, see docs/ndif.md.
BYTES_OF_TOKEN = 6
BYTES_OF_LAYER = 190
BYTES_OF_SITE = 35
# Of the requests before the passes: the query for the server's features, the checks on one row, and each reply.
BYTES_OF_OFFER = 7_000
BYTES_OF_LENS_CHECK = 17_000
BYTES_OF_STREAM_CHECK = 35_000
BYTES_OF_OPENING = 300
# A calibration ends after so many seconds, or so many repeats.
CALIBRATION = 10.0
TIMED_BATCHES = 9


@dataclass(frozen=True)
class Traffic:
    """Requests to a server and the bytes that they carry.

    Attributes:
        requests: number of requests, including those that ask for the server's features and check the first row.
        bytes_up: bytes sent: the packed source of the kernels, token ids, and sums of a first pass.
        bytes_down: bytes returned: the packed sums of each request. Without weights, sums have no values and `bytes_down` is an
            upper bound, their size before packing; histograms pack to 3 %.
    """

    requests: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class CostEstimate:
    """Expected FLOPs, memory, traffic and time of a run.

    Attributes:
        model: name of the model.
        tokens: number of counted tokens.
        batches: number of batches.
        sites: number of sites to read.
        passes: number of passes over the data that run the model.
        flops: FLOPs of all passes: "forward" for the blocks, "head" for logits in kernels, and by analyzer. Matrix products,
            convolutions and attention count; a multiplication and an addition count as two.
        sums_bytes: largest number of bytes of sums held at once, by analyzer. Batches are added in pairs, so up to log2 of the
            number of batches plus one sums wait; with `intervals=True` the sums of all jackknife blocks are held too, and those
            of "order of texts", the correlation of texts that follow each other. Sums of a first pass are included.
        weights_bytes: bytes of parameters and buffers.
        activations_bytes: largest number of bytes beside the weights that are alive at once on a batch: activations of the
            model, the sites that are read, and intermediate values of kernels.
        traffic: traffic with a server; None if the model is not remote.
        seconds: wall time in seconds, from one batch measured in this process; None without weights and on a server.
        blocks: number of jackknife blocks whose sums are kept for confidence intervals; 0 without intervals.
        batch: rows and positions of the measured batch.
        parameters: number of parameters.
        has_values: whether sums were measured with their values, so that the bytes that a server returns are no upper bound.

    Examples:
        >>> import tl_layersim as lsim
        >>> config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> cost = lsim.estimate(config, [lsim.CKA()], tokens=100_000)
        >>> cost.sites, cost.seconds is None
        (3, True)
    """

    model: str
    tokens: int
    batches: int
    sites: int
    passes: int
    flops: Mapping[str, float]
    sums_bytes: Mapping[str, int]
    weights_bytes: int
    activations_bytes: int
    traffic: Traffic | None
    seconds: float | None
    blocks: int
    batch: tuple[int, int]
    parameters: int
    has_values: bool

    @property
    def title(self) -> str:
        """One line with the model, the size of the run, and the number of sites."""
        passes = f", {self.passes} passes" if self.passes > 1 else ""
        return f"{self.model}: {self.tokens:,} tokens in {self.batches:,} batches{passes}, {self.sites} sites"

    def rows(self) -> list[tuple[str, str]]:
        """Table of costs as pairs of strings: a name, and a value with its unit."""
        lines = [("FLOPs", f"{sum(self.flops.values()):.2e}")]
        lines += [(f"  {part}", f"{flops:.2e}") for part, flops in self.flops.items()]
        blocks = f", {self.blocks} blocks" if self.blocks else ""
        lines.append(("sums", f"at most {in_words(sum(self.sums_bytes.values()))}{blocks}"))
        lines += [(f"  {name}", in_words(size)) for name, size in self.sums_bytes.items()]
        lines.append(("weights", f"{in_words(self.weights_bytes)}, {self.parameters:,} parameters"))
        rows, positions = self.batch
        lines.append(("activations", f"{in_words(self.activations_bytes)} for a batch of {rows} x {positions}"))
        if self.traffic is not None:
            up = in_words(self.traffic.bytes_up)
            down = in_words(self.traffic.bytes_down)
            at_most = "" if self.has_values else "at most "
            lines.append(("traffic", f"{self.traffic.requests:,} requests, {up} up, {at_most}{down} down"))
        if self.seconds is not None:
            lines.append(("time", f"{duration_in_words(self.seconds)}, measured on one batch"))
        return lines

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {text}" for name, text in rows]
        return "\n".join([self.title, *lines])


@typed
def estimate(
    model_or_config: Any,
    analyzers: AnalyzersArgument,
    *,
    tokens: PositiveInt = 1_000_000,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    batch_size: RowCount = 16,
    seq_len: PositiveInt = 256,
    intervals: bool = False,
) -> CostEstimate:
    """Estimate FLOPs, memory, traffic and time of `analyze` before a run. The time is known only for a loaded model.

    One batch of random tokens, images or recordings runs through the forward pass and the kernels of the analyzers. For a model
    in this process the batch is also timed, for up to ten seconds. From a configuration alone it runs on the meta device, where
    tensors have shapes and no values, so that models of any size cost seconds and no memory; results of comparisons are then
    assumed to be typical, and time is not known.

    Args:
        model_or_config: a model as in `analyze`; or a configuration of transformers, its fields as a dict with `model_type`, or
            the folder or hub name of a model, of which only the configuration is read.
            `open_model(model_or_config, remote=True)` counts requests and traffic too. The server is not asked: without
            `tokens_per_request`, a request is assumed to hold 8,192 positions, while a run chooses their number by time.
        analyzers: as in `analyze`.
        tokens: number of counted tokens of the run.
        at: the sites to read, see `analyze`.
        per_head: see `analyze`.
        batch_size: rows in a forward pass.
        seq_len: tokens in a row; all of them are counted. Images have as many as their size gives.
        intervals: whether the run keeps the sums of jackknife blocks, for confidence intervals.

    Returns:
        A `CostEstimate`, whose `repr` is a table.

    Raises:
        LayersimError: an analyzer cannot use the model, as in `analyze`; or the model cannot run on the meta device.

    Examples:
        >>> import tl_layersim as lsim
        >>> cost = lsim.estimate(lsim.demo_model(), [lsim.Cosine(center="none")], tokens=1_000_000, batch_size=2, seq_len=32)
        >>> cost.sites, cost.seconds > 0
        (9, True)
    """
    chosen = choose_analyzers(analyzers)
    opened = OpenedModel.of(model_or_config, "model_or_config")
    source, module = _opened(opened, at)
    plan = plan_sites([source], chosen, at, per_head)
    plan.start_reading()
    models_of_analyzers = plan.models()
    chosen = {name: analyzer.settled(models_of_analyzers[name][0], None) for name, analyzer in chosen.items()}
    for name, models in models_of_analyzers.items():
        chosen[name].check_sites(*models)
        chosen[name].check(*models)
    labelled = any(analyzer.needs.labels == "data" for analyzer in chosen.values())
    batch = _random_batch(source, module, batch_size, seq_len, labelled)
    for analyzer in chosen.values():
        analyzer.check_batch(batch, source.model)
    run = MeteredBatch(source, module, batch, chosen, plan, opened.on_server)
    try:
        needs_calls = any(analyzer.needs.calls for analyzer in chosen.values())
        with running(source, needs_calls), torch.inference_mode(False), torch.no_grad():
            run.all_passes()
            seconds = None if run.weightless or opened.on_server else run.calibrate()
    except LayersimError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if not run.weightless:
            raise
        raise LayersimError(
            f"{source.model.name} with {', '.join(chosen)} cannot run without weights, because it needs the values of tensors "
            f"({type(error).__name__}: {excerpt(str(error), 160)}). Pass a model with weights, such as a smaller model of the "
            "same architecture."
        ) from error
    # Number of batches, not rounded.
    share = tokens / run.samples
    rows = math.ceil(share * len(batch.tokens))
    blocks = math.ceil(rows / first_block_size(rows)) if intervals else 0
    flops = {}
    for part in ("forward", "head", *dict.fromkeys(map(analyzer_of, run.sums))):
        if run.flops.get(part):
            flops[part] = run.flops[part] * share
    sums_bytes = _bytes_of_sums(run, rows, intervals)
    one_at_a_time = any(analyzer.needs.one_model_at_a_time for analyzer in chosen.values())
    if intervals and not opened.on_server and not one_at_a_time:
        pools = math.ceil(rows / TEXTS_OF_POOL)
        sums_bytes[TEXT_ORDER] = most_nodes(pools, True) * bytes_of_neighbour_products(len(source.sites))
    if seconds is not None:
        models_of_analyzers = plan.models()
        computing = sum(analyzer.compute_seconds(models_of_analyzers[name][0]) for name, analyzer in chosen.items())
        # A result is computed from all sums, and without each block.
        seconds = seconds * share + computing * (1 + blocks)
    return CostEstimate(
        model=source.model.name,
        tokens=tokens,
        batches=math.ceil(share),
        sites=len(source.sites),
        passes=run.passes,
        flops=flops,
        sums_bytes=sums_bytes,
        weights_bytes=sum(tensor.nbytes for tensor in run.weights),
        activations_bytes=run.peak,
        traffic=_traffic(run, rows, opened.tokens_per_request) if opened.on_server else None,
        seconds=seconds,
        blocks=blocks,
        batch=(batch.tokens.shape[0], batch.tokens.shape[1]),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        has_values=not run.weightless,
    )


def _bytes_of_sums(run: MeteredBatch, rows: int, intervals: bool) -> dict[str, int]:
    """Peak memory of the sums in bytes, by analyzer."""
    leaf = min(TEXTS_OF_POOL, run.capacity)
    # With intervals, leaves at the start of the data are single rows.
    smallest_leaf = 1 if intervals else leaf
    bytes_of_analyzers = Counter[str]()
    for name, size in run.sums.items():
        rows_of_leaf = run.pools[name].rows if name in run.pools else smallest_leaf
        bytes_of_analyzers[analyzer_of(name)] += most_nodes(math.ceil(rows / rows_of_leaf), intervals) * size
    for name, sums in run.first_sums.items():
        bytes_of_analyzers[name] += most_nodes(math.ceil(rows / leaf), False) * _bytes_of(sums)
    return dict(bytes_of_analyzers)


def _traffic(run: MeteredBatch, rows: int, tokens_per_request: int | None) -> Traffic:
    source = run.source
    width = run.batch.tokens.shape[1]
    # Requests hold whole pools.
    batches = math.ceil(rows / run.capacity)
    batches_that_fit = max(1, (tokens_per_request or TOKENS_PER_REQUEST) // (run.capacity * width))
    # A request holds a power of two of batches.
    batches_of_request = min(MOST_BATCHES, 1 << (batches_that_fit.bit_length() - 1))
    requests_of_pass = math.ceil(batches / batches_of_request)
    requests = run.passes * requests_of_pass
    opening = [BYTES_OF_OFFER]
    if any(analyzer.needs.unembeds for analyzer in run.analyzers.values()):
        opening.append(BYTES_OF_LENS_CHECK)
    if isinstance(source, CanReadSites) and bool(source.stream_sums()):
        opening.append(BYTES_OF_STREAM_CHECK)
    bytes_of_sites = len(source.model.layers) * BYTES_OF_LAYER + len(source.sites) * BYTES_OF_SITE
    bytes_of_tokens = run.passes * rows * width * BYTES_OF_TOKEN
    up = sum(opening) + sum(run.sent) * requests_of_pass + requests * bytes_of_sites + bytes_of_tokens
    down = sum(run.returned) * requests_of_pass + len(opening) * BYTES_OF_OPENING
    return Traffic(requests + len(opening), up, down)


def _opened(opened: OpenedModel, at: AtArgument) -> tuple[Source, torch.nn.Module]:
    """Open a model, or make one without weights from a configuration. Returns its source and its module."""
    model = opened.model
    module = model._module if is_nnsight(model) else model
    if not isinstance(module, torch.nn.Module):
        module = model_without_weights(dict(module) if isinstance(module, Mapping) else module)
    if has_no_weights(module):
        anatomy = anatomy_of(module)
        layers = blocks_to_read(module, anatomy, opened.layers, at)
        return WeightlessSource(module, layers, opened.unembed, anatomy), module
    local = OpenedModel(module, opened.layers, opened.unembed, argument=opened.argument)
    return open_source(local, either_stack=True, at=at), module


def _random_batch(source: Source, module: torch.nn.Module, rows: int, length: int, labelled: bool) -> Batch:
    """A batch of random tokens, images or recordings.

    Raises:
        LayersimError: the model takes other inputs, inputs of unknown size, or fewer tokens.
    """
    model = source.model
    generator = torch.Generator().manual_seed(0)
    data: dict[str, Any] = {}
    if labelled:
        data["label"] = torch.arange(rows) % 2
    if model.main_input in ROW_AXES:
        shape = shape_of_row(module, model, model.main_input)
        data[model.main_input] = torch.randn(rows, *shape, generator=generator)
    elif model.vocabulary is None:
        raise LayersimError(f"`model_or_config` is {model.name}; it must take tokens, images or recordings.")
    elif model.context is not None and length > model.context:
        raise LayersimError(f"`seq_len` is {length}; it must be at most {model.context}, the context of {model.name}.")
    else:
        data["input_ids"] = torch.randint(model.vocabulary, (rows, length), generator=generator)
        data["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
    batches = Batches(Data(data, batch_size=rows), model, labelled, position_counter([source]))
    return next(iter(batches))


class OperationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Counts FLOPs and live memory of tensor operations, also on the meta device.

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
        self.live = 0
        self.peak = 0
        # Name of the part whose FLOPs are counted, and the share of them that counts.
        self._part: tuple[str, Any] = ("", 1)
        self._weights = _storages(list(weights))
        self._head = _storages(list(head))
        self._alive: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def counting(self, part: str, share: float = 1) -> Iterator[None]:
        """Context manager that counts FLOPs under the name `part`.

        Args:
            part: the name.
            share: share of the FLOPs to count.
        """
        outer_part = self._part
        self._part = (part, share)
        yield
        self._part = outer_part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        input_storages = _storages((args, kwargs))
        output = func(*args, **kwargs)
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            part, share = self._part
            if input_storages.keys() & self._head.keys():
                part = "head"
            self.flops[part] += share * formula(*args, **kwargs, out_val=output)
        for key, storage in _storages(output).items():
            # A view, or a tensor that was changed in place, has the storage of another tensor.
            if key not in input_storages and key not in self._alive and key not in self._weights:
                self._count_until_freed(key, storage)
        return output

    def _count_until_freed(self, key: int, storage: Any) -> None:
        """Count the memory of a tensor until it is freed."""
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.live -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention on a CPU. Grouped queries share keys and values."""
    count: Any = sdpa_flop_count
    batch_and_heads = query.shape[:2]
    return int(count(query.shape, (*batch_and_heads, *key.shape[2:]), (*batch_and_heads, *value.shape[2:])))


FORMULAS: dict[Any, Any] = {**flop_registry, CPU_ATTENTION: _attention_on_cpu}


def _storages(values: Any) -> dict[int, Any]:
    """Storages of all tensors in nested containers, by identifier."""
    storages = [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {storage._cdata: storage for storage in storages}


class MeteredBatch:
    """Measures the costs of one batch in all passes of a run.

    Args:
        source: the source that runs the model; a `WeightlessSource` for a model on the meta device.
        module: the model.
        batch: a batch of the size of the run's batches.
        analyzers: the analyzers, by name.
        plan: the sites that each analyzer reads.
        remote: whether to measure requests to a server.

    Attributes:
        flops: FLOPs of all passes: "forward" for the blocks, "head" for logits in kernels, and by analyzer.
        sums: bytes of the sums of each kernel.
        pools: a pool of rows for each kernel of pools.
        first_sums: sums of the first pass.
        passes: number of passes that run the model.
        peak: largest number of bytes beside the weights that were alive at once.
        samples: number of samples of the batch.
        sent: bytes of a request to a server in each pass, without its tokens.
        returned: bytes of a reply in each pass.
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
        self.source = source
        self.batch = batch
        self.analyzers = analyzers
        self.plan = plan
        self.remote = remote
        self.weights = [*module.parameters(), *module.buffers()]
        self.sent: list[int] = []
        self.returned: list[int] = []
        self.flops: Counter[str] = Counter()
        self.sums: dict[str, int] = {}
        self.pools: dict[str, _Pool] = {}
        self.first_sums: dict[str, Sums] = {}
        self.passes = 1
        self.peak = 0
        self.samples = 0
        self.head: list[Tensor] = []
        if source.model.head is not None:
            for path in source.model.head.modules:
                self.head += module.get_submodule(path).parameters()
        self.weightless = isinstance(source, WeightlessSource)
        self.first_kernels: dict[str, AnyKernel] = {}
        # Counting tokens or labels needs no model.
        self.first_kernels_without_model: dict[str, Any] = {}
        for name, analyzer in analyzers.items():
            kernel = analyzer.first_kernel()
            if kernel is None:
                continue
            if analyzer.needs.first_pass == "data":
                self.first_kernels_without_model[name] = kernel
            else:
                self.first_kernels[name] = plan.kernel(name, kernel)

    @property
    def capacity(self) -> int:
        """Number of rows in a batch of the run.

        It is the number of rows in the measured batch, rounded down to a power of two, but at least the rows of the largest
        pool.
        """
        rows = 1 << (len(self.batch.tokens).bit_length() - 1)
        return max([rows, *(pool.rows for pool in self.pools.values())])

    def all_passes(self) -> None:
        """Measure the first pass, if an analyzer needs one, and the main pass."""
        for name, kernel in self.first_kernels_without_model.items():
            self.first_sums[name] = Sums.of(kernel(tokens_alone(self.batch)))
        if self.first_kernels:
            self.first_sums |= self._run_kernels(self.first_kernels)
            self.passes = 2
        with without_values() if self.weightless else nullcontext():
            kernels = self.plan.kernels(self.analyzers, self.first_sums)
        for name, kernel in kernels.items():
            if isinstance(kernel, PoolKernel):
                self.pools[name] = _Pool.of(kernel, self.batch, self.source.model.vocabulary or 1)
        self.sums = {name: _bytes_of(sums) for name, sums in self._run_kernels(kernels).items()}

    def _run_kernels(self, kernels: Mapping[str, AnyKernel]) -> dict[str, Sums]:
        """Run kernels on the batch and count their FLOPs. Returns the output of the kernels."""
        outputs = {}
        with OperationMeter(self.weights, self.head) as meter, without_values() if self.weightless else nullcontext():
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
        sums = {name: self._as_sums(output) for name, output in outputs.items()}
        if self.remote:
            request = packed_request(kernels)
            if self.weightless:
                # Sums of the first pass are a part of the kernels of the main pass; those without values take no bytes there.
                request += sum(map(_bytes_of, self.first_sums.values()))
                reply = sum(map(_bytes_of, sums.values()))
            else:
                reply = packed_result(self.source.sites, sums)
            self.sent.append(request)
            self.returned.append(reply)
        return sums

    def _as_sums(self, output: Mapping[str, Tensor]) -> Sums:
        """Cast the output of a kernel to float64 or int64. Tensors without values stay on the meta device."""
        fields = dict(Sums.of({name: value for name, value in output.items() if not value.is_meta}).fields)
        for name, value in output.items():
            if value.is_meta:
                fields[name] = as_sum(value)
        return Sums(fields)

    def calibrate(self) -> float:
        """Median time of all passes over the batch, in seconds.

        After a warm-up, the passes are repeated for up to `CALIBRATION` seconds.
        """
        main_kernels = self.plan.kernels(self.analyzers, self.first_sums)
        kernels_of_passes: list[Mapping[str, AnyKernel]] = [
            kernels for kernels in (self.first_kernels, main_kernels) if kernels
        ]
        view = self.source.collect(self.batch) if self.pools else None
        times: list[float] = []
        start = time.perf_counter()
        # The first repeat is the warm-up.
        while not times or (len(times) <= TIMED_BATCHES and time.perf_counter() - start < CALIBRATION):
            start_of_passes = time.perf_counter()
            for kernels in kernels_of_passes:
                kernels_of_rows = {name: kernel for name, kernel in kernels.items() if not isinstance(kernel, PoolKernel)}
                for output in self.source.run(self.batch, kernels_of_rows)[1].values():
                    Sums.of(output)
            time_of_passes = time.perf_counter() - start_of_passes
            time_of_pools = 0.0
            for pool in self.pools.values():
                assert view is not None
                start_of_pool = time.perf_counter()
                in_full_precision(view.activations.device, partial(pool.sums, view))
                # A batch is a part of a pool, or several.
                time_of_pools += (time.perf_counter() - start_of_pool) * len(self.batch.tokens) / pool.rows
            times.append(time_of_passes + time_of_pools)
        return statistics.median(times[1:] or times)


@dataclass(frozen=True)
class _Pool:
    """Samples for one call of a `PoolKernel`, all from one batch, to measure its costs.

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
        """Simulate which samples a `PoolKernel` draws from the rows of one call.

        Each row has the batch's mean number of counted positions.

        Args:
            kernel: kernel of the pool.
            batch: one batch of the run.
            vocabulary: size of the vocabulary; the draws depend on token ids.
        """
        counted = int(batch.counted.sum())
        positions_of_row = max(1, counted // len(batch.tokens))
        rows = kernel.texts(positions_of_row)
        row = torch.arange(rows).repeat_interleave(positions_of_row)
        ids = torch.randint(vocabulary, (len(row),), generator=torch.Generator().manual_seed(0))
        [pool] = plan_batch(view_of_tokens(ids, row, row), (0, rows), rows, None, {"": kernel}).pools[""]
        # A pool may have more rows than the batch: its samples are those of the batch again and again.
        samples_of_batch = len(batch.tokens) if kernel.whole_rows else counted
        return cls(kernel, rows, pool.samples, pool.draws, pool.index % samples_of_batch)

    def sums(self, view: View) -> dict[str, Tensor]:
        output = drawn(view, read=self.kernel.read, sites=self.kernel.sites, index=self.index)
        widths = tuple(output["widths 0"].tolist())
        return self.kernel.sums([output["samples 0"]], [widths], self.samples, self.draws)


def _bytes_of(sums: Sums) -> int:
    """Size of sums in bytes."""
    return sum(value.nbytes for value in sums.fields.values())
