"""CostEstimate: FLOPs, memory and traffic of a run, and time where it is measured, from the workload of one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.blocks import first_block_size
from ..core.errors import in_words
from ..core.sum_tree import most_nodes
from ..core.sums import analyzer_of
from ..core.wording import duration_in_words
from ..models.pools import ROWS
from ..remote.request_sizes import MOST_BATCHES
from .submitted_run import TOKENS_PER_REQUEST
from .workload import Workload

# Measured with an NDIF server on one machine, see docs/ndif.md.
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
        seconds: wall time, from that of a batch in this process; None without weights and on a server.
        blocks: number of blocks whose sums are kept for confidence intervals; 0 without them.
        workload: of one batch.

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
    workload: Workload = field(repr=False)

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
        blocks = f", {self.blocks} blocks" if self.blocks else ""
        lines += [("sums", f"at most {in_words(sum(self.sums_bytes.values()))}{blocks}")]
        lines += [(f"  {name}", in_words(size)) for name, size in self.sums_bytes.items()]
        lines += [("weights", f"{in_words(self.weights_bytes)}, {self.workload.parameters:,} parameters")]
        lines += [("activations", f"{in_words(self.activations_bytes)} for a batch of {batch} x {positions}")]
        if self.traffic is not None:
            sent, back = in_words(self.traffic.bytes_up), in_words(self.traffic.bytes_down)
            most = "" if self.workload.has_values else "at most "
            lines += [("traffic", f"{self.traffic.requests:,} requests, {sent} up, {most}{back} down")]
        if self.seconds is not None:
            lines += [("time", f"{duration_in_words(self.seconds)}, measured on one batch")]
        return lines

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join([self.title, *(f"{name:<{width}}  {text}" for name, text in self.rows())])


def assemble(workload: Workload, tokens: int, remote: bool, intervals: bool, tokens_per_request: int | None) -> CostEstimate:
    """The estimate of a run from the workload of one of its batches.

    Args:
        workload: of one batch.
        tokens: number of counted tokens.
        remote: whether the model is on a server.
        intervals: whether sums of blocks are kept.
        tokens_per_request: positions in a request to a server.
    """
    share = tokens / workload.samples
    parts = ["forward", "head", *dict.fromkeys(map(analyzer_of, workload.sums))]
    rows = math.ceil(share * workload.shape[0])
    blocks = math.ceil(rows / first_block_size(rows)) if intervals else 0
    leaf = min(ROWS, workload.capacity)
    first_nodes = most_nodes(math.ceil(rows / leaf), False)
    sums_bytes = dict.fromkeys(parts[2:], 0)
    for name, size in workload.sums.items():
        # With intervals the first leaves are single rows.
        units = math.ceil(rows / workload.pools.get(name, 1 if intervals else leaf))
        sums_bytes[analyzer_of(name)] += most_nodes(units, intervals) * size
    for name, size in workload.first_sums.items():
        sums_bytes[name] += first_nodes * size
    seconds = workload.batch_seconds
    return CostEstimate(
        model=workload.model.name,
        tokens=tokens,
        batches=math.ceil(share),
        sites=workload.sites,
        passes=workload.passes,
        flops={part: flops * share for part in parts if (flops := workload.flops.get(part))},
        sums_bytes=sums_bytes,
        weights_bytes=workload.weights,
        activations_bytes=workload.activations,
        traffic=_traffic(workload, rows, tokens_per_request) if remote else None,
        seconds=None if seconds is None else seconds * share + workload.compute_seconds * (1 + blocks),
        blocks=blocks,
        workload=workload,
    )


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
