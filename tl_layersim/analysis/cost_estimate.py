"""CostEstimate: FLOPs, memory, traffic and time of a run, from the workload of one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.argument_checks import typed
from ..core.blocks import first_block_size
from ..core.bounds import PositiveInt
from ..core.errors import in_words
from ..core.sum_tree import most_nodes
from ..core.sums import analyzer_of
from ..core.wording import duration_in_words
from ..models.pools import ROWS
from ..remote.request_sizes import MOST_BATCHES
from .device_speeds import Devices, devices_of
from .submitted_run import TOKENS_PER_REQUEST
from .workload import Workload

# Measured with an NDIF server on one machine, see docs/performance.md and docs/ndif.md.
SECONDS_OF_REQUEST = 0.15
BYTES_OF_TOKEN = 4
BYTES_OF_LAYER, BYTES_OF_SITE = 190, 35
# Returned by a request before the passes.
BYTES_OF_OPENING = 300


@dataclass(frozen=True)
class Traffic:
    """Requests to a server and what they carry.

    Attributes:
        requests: number of requests, with those that ask what the server offers and check the first row.
        bytes_up: sent: the packed source of the kernels, token ids, and sums of a first pass.
        bytes_down: returned: the sums of each request, packed as those of the batch. Without weights sums have no values, and
            `bytes_down` is an upper bound, their size before they are packed: histograms are packed to 3 %.
    """

    requests: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class CostEstimate:
    """FLOPs, memory, traffic and time that a run is expected to take.

    Attributes:
        model: name of the model.
        tokens: number of counted tokens.
        batches: number of batches.
        sites: number of sites that are read.
        passes: number of passes over the data in which the model runs.
        flops: of all passes: "forward" for the blocks, "head" for logits in kernels, and by analyzer; matrix products,
            convolutions and attention, a multiplication and an addition counted as two.
        sums_bytes: bytes of sums that are held at most, by analyzer. Batches are added in pairs, so the sums of up to log2 of
            the number of batches plus one wait; with `intervals=True` those of all blocks are held beside the pairs of a block.
            Sums of a first pass are included.
        weights_bytes: bytes of parameters and buffers.
        activations_bytes: most bytes beside the weights that are alive at once on a batch: activations of the model, the sites
            that are read, and intermediate values of kernels.
        traffic: with a server; None where the model is not remote.
        seconds: wall time; infinite where the devices do not hold the model, None where no speed is known.
        basis: where `seconds` comes from.
        devices: whose stated speed is used; None where time was measured.
        workload: of one batch.
        remote: whether the model is on a server.
        intervals: whether sums of blocks are kept.
        tokens_per_request: positions in a request.

    Examples:
        >>> import tl_layersim as lsim
        >>> config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> cost = lsim.estimate(config, [lsim.CKA()], tokens=100_000, devices="1xH100")
        >>> cost.sites, cost.scaled(tokens=200_000).flops["forward"] / cost.flops["forward"]
        (3, 2.0)
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
    basis: str
    devices: Devices | None
    workload: Workload = field(repr=False)
    remote: bool = False
    intervals: bool = False
    tokens_per_request: int | None = None

    @typed
    def scaled(self, *, tokens: PositiveInt | None = None, devices: str | Devices | None = None) -> CostEstimate:
        """The estimate of the same run on more or fewer tokens, or on other devices, without metering a batch again.

        Args:
            tokens: number of tokens; the same where it is left out.
            devices: as in `estimate`; the same where they are left out.
        """
        given = self.devices if devices is None else devices_of(devices)
        return assemble(
            self.workload,
            self.tokens if tokens is None else tokens,
            given,
            self.remote,
            self.intervals,
            self.tokens_per_request,
        )

    @property
    def title(self) -> str:
        """The model, the size of the run and the number of sites, in one line."""
        passes = f", {self.passes} passes" if self.passes > 1 else ""
        return f"{self.model}: {self.tokens:,} tokens in {self.batches:,} batches{passes}, {self.sites} sites"

    def rows(self) -> list[tuple[str, str]]:
        """The costs by name, as text with units."""
        batch, positions = self.workload.shape
        lines = [("FLOPs", f"{sum(self.flops.values()):.2e}")]
        lines += [(f"  {part}", f"{flops:.2e}") for part, flops in self.flops.items()]
        rows = math.ceil(self.tokens / self.workload.samples * batch)
        blocks = f", {_blocks(rows)} blocks" if self.intervals else ""
        lines += [("sums", f"at most {in_words(sum(self.sums_bytes.values()))}{blocks}")]
        lines += [(f"  {name}", in_words(size)) for name, size in self.sums_bytes.items()]
        lines += [("weights", f"{in_words(self.weights_bytes)}, {self.workload.parameters:,} parameters")]
        lines += [("activations", f"{in_words(self.activations_bytes)} for a batch of {batch} x {positions}")]
        if self.traffic is not None:
            sent, back = in_words(self.traffic.bytes_up), in_words(self.traffic.bytes_down)
            most = "" if self.workload.has_values else "at most "
            lines += [("traffic", f"{self.traffic.requests:,} requests, {sent} up, {most}{back} down")]
        time = "not known" if self.seconds is None else "never" if math.isinf(self.seconds) else _long(self.seconds)
        return [*lines, ("time", f"{time} ({self.basis})")]

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join([self.title, *(f"{name:<{width}}  {text}" for name, text in self.rows())])


def _blocks(rows: int) -> int:
    """Number of blocks that a run with intervals keeps."""
    return math.ceil(rows / first_block_size(rows))


def _long(seconds: float) -> str:
    """A duration in seconds or minutes or, from two hours on, in hours."""
    return duration_in_words(seconds) if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def assemble(
    workload: Workload,
    tokens: int,
    devices: Devices | None,
    remote: bool,
    intervals: bool,
    tokens_per_request: int | None,
) -> CostEstimate:
    """The estimate of a run from the workload of one of its batches.

    Args:
        workload: of one batch.
        tokens: number of counted tokens.
        devices: whose stated speed is used; None for the measured time.
        remote: whether the model is on a server.
        intervals: whether sums of blocks are kept.
        tokens_per_request: positions in a request to a server.
    """
    share = tokens / workload.samples
    batches = math.ceil(share)
    counts = {operation: count * share for operation, count in workload.counts.items()}
    parts = ["forward", "head", *dict.fromkeys(map(analyzer_of, workload.sums))]
    rows = math.ceil(share * workload.shape[0])
    leaf = min(ROWS, workload.capacity)
    first_nodes = most_nodes(math.ceil(rows / leaf), False)
    sums_bytes = dict.fromkeys(parts[2:], 0)
    for name, size in workload.sums.items():
        # With intervals the first leaves are single rows.
        units = math.ceil(rows / workload.pools.get(name, 1 if intervals else leaf))
        sums_bytes[analyzer_of(name)] += most_nodes(units, intervals) * size
    for name, size in workload.first_sums.items():
        sums_bytes[name] += first_nodes * size
    traffic = _traffic(workload, rows, tokens_per_request) if remote else None
    compute = workload.compute_seconds * ((1 + _blocks(rows)) if intervals else 1)
    seconds, basis = None, "neither weights nor devices are given"
    size = workload.weights + workload.activations
    if devices is not None:
        seconds = devices.seconds(counts, size) + compute
        basis = _basis(devices, size)
    elif workload.batch_seconds is not None:
        seconds, basis = workload.batch_seconds * share + compute, "measured on one batch in this process"
    if traffic is not None and seconds is not None:
        seconds += traffic.requests * SECONDS_OF_REQUEST
    return CostEstimate(
        model=workload.model.name,
        tokens=tokens,
        batches=batches,
        sites=workload.sites,
        passes=workload.passes,
        flops={part: flops * share for part in parts if (flops := workload.flops(part))},
        sums_bytes=sums_bytes,
        weights_bytes=workload.weights,
        activations_bytes=workload.activations,
        traffic=traffic,
        seconds=seconds,
        basis=basis,
        devices=devices,
        workload=workload,
        remote=remote,
        intervals=intervals,
        tokens_per_request=tokens_per_request,
    )


def _basis(devices: Devices, size: float) -> str:
    copies, each = devices.copies(size), devices.per_copy(size)
    if not copies:
        return f"{devices} hold {in_words(devices.count * devices.memory)}, and one copy takes {in_words(size)}"
    split = f" split by {devices.split}" if each > 1 else ""
    held = f"{copies} {'copy' if copies == 1 else 'copies'} on {each} device{'s' if each > 1 else ''} each{split}"
    reached = f"{devices.flops_reached:.0%} of the FLOP/s and {devices.bandwidth_reached:.0%} of the bandwidth"
    return f"{devices}, {held}; stated speed, {reached} assumed"


def _traffic(workload: Workload, rows: int, tokens_per_request: int | None) -> Traffic:
    # Requests hold whole pools.
    batches, positions = math.ceil(rows / workload.capacity), workload.capacity * workload.shape[1]
    fit = max(1, (tokens_per_request or TOKENS_PER_REQUEST) // positions)
    # A request holds a power of two of batches.
    each = min(MOST_BATCHES, 1 << (fit.bit_length() - 1))
    of_a_pass, opening = math.ceil(batches / each), workload.opening
    requests = workload.passes * of_a_pass
    read = len(workload.model.layers) * BYTES_OF_LAYER + workload.sites * BYTES_OF_SITE
    up = sum(opening) + sum(workload.sent) * of_a_pass + requests * read
    up += workload.passes * rows * workload.shape[1] * BYTES_OF_TOKEN
    down = sum(workload.returned) * of_a_pass + len(opening) * BYTES_OF_OPENING
    return Traffic(requests + len(opening), up, down)
