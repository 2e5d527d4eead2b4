"""`estimate`: FLOPs, memory and traffic of a run before it starts, and its time if the model is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..activations.row_pools import ROWS
from ..core.arguments import PositiveInt, RowCount, typed
from ..core.errors import LayersimError, in_words
from ..core.sums import analyzer_of, first_block_size, most_nodes
from ..core.wording import duration_in_words, with_article
from ..data.batches import Batch, Batches
from ..data.data import Data
from ..data.inputs import ROW_AXES
from ..engine.chosen_analyzers import AnalyzersArgument, choose_analyzers
from ..engine.plan import DEFAULT, AtArgument, plan_sites
from ..engine.submitted_runs import TOKENS_PER_REQUEST
from ..remote.open import open_source
from ..remote.request_schedule import MOST_BATCHES
from ..sources.inputs import position_counter, shape_of_row
from ..sources.named_model import model_without_weights
from ..sources.open import OpenedModel, is_nnsight
from ..sources.source import Source
from ..sources.without_weights import WeightlessSource, has_no_weights
from .workload import Workload, meter

# Measured with an NDIF server on one machine, see docs/ndif.md.
BYTES_OF_TOKEN = 4
BYTES_OF_LAYER, BYTES_OF_SITE = 190, 35
# Returned by a request before the passes.
BYTES_OF_OPENING = 300


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
    """FLOPs, memory, traffic and time that a run is expected to take.

    Attributes:
        model: name of the model.
        tokens: number of counted tokens.
        batches: number of batches.
        sites: number of sites to read.
        passes: number of passes over the data that run the model.
        flops: FLOPs of all passes: "forward" for the blocks, "head" for logits in kernels, and by analyzer. Matrix products,
            convolutions and attention count; a multiplication and an addition count as two.
        sums_bytes: largest number of bytes of sums held at once, by analyzer. Batches are added in pairs, so up to log2 of the
            number of batches plus one sums wait; with `intervals=True` the sums of all blocks are held beside the pairs of a
            block. Sums of a first pass are included.
        weights_bytes: bytes of parameters and buffers.
        activations_bytes: largest number of bytes beside the weights that are alive at once on a batch: activations of the
            model, the sites that are read, and intermediate values of kernels.
        traffic: traffic with a server; None if the model is not remote.
        seconds: wall time in seconds, from one batch measured in this process; None without weights and on a server.
        blocks: number of blocks whose sums are kept for confidence intervals; 0 without intervals.
        workload: the measured workload of one batch.

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
        """One line with the model, the size of the run and the number of sites."""
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
    """Estimate a run from the workload of one of its batches.

    Args:
        workload: workload of one batch.
        tokens: number of counted tokens.
        remote: whether the model is on a server.
        intervals: whether the sums of blocks are kept.
        tokens_per_request: number of positions in a request to a server.
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
    """Estimate FLOPs, memory and traffic of `analyze` on a model before the run, and its time if the model is loaded.

    One batch of random tokens, images or recordings runs through the forward pass and the kernels of the analyzers. For a model
    in this process the batch is also timed, for ten seconds. From a configuration alone it runs on the meta device, where
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
        intervals: whether the run keeps sums of blocks for confidence intervals.

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
    chosen, opened = choose_analyzers(analyzers), OpenedModel.of(model_or_config)
    source, module = _opened(opened, at)
    plan = plan_sites([source], chosen, at, per_head)
    chosen = plan.settled(chosen, source, None)
    for name, models in plan.models_by_analyzer([source.model], [source]).items():
        chosen[name].check_sites(*models)
        chosen[name].check(*models)
    labelled = any(analyzer.label_source == "data" for analyzer in chosen.values())
    batch = _random_batch(source, module, batch_size, seq_len, labelled)
    for analyzer in chosen.values():
        analyzer.check_batch(batch, source.model)
    weightless, remote = isinstance(source, WeightlessSource), opened.on_server
    try:
        workload = meter(source, module, batch, chosen, plan, timed=not weightless and not remote, remote=remote)
    except LayersimError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if not weightless:
            raise
        raise LayersimError(
            f"{source.model.name} with {', '.join(chosen)} cannot run without weights, because the operations depend on values "
            f"({type(error).__name__}: {str(error)[:160]}). Pass a model with weights, such as a smaller one of the same "
            "architecture."
        ) from error
    return assemble(workload, tokens, remote, intervals, opened.tokens_per_request)


def _opened(opened: OpenedModel, at: AtArgument) -> tuple[Source, torch.nn.Module]:
    """The source of a model or a configuration, and the module that the source runs."""
    model = opened.model
    if isinstance(model, Source):
        raise LayersimError(
            f"`model_or_config` is {with_article(type(model).__name__)}; it must be the model that this source runs."
        )
    module = model._module if is_nnsight(model) else model
    if not isinstance(module, torch.nn.Module):
        module = model_without_weights(dict(module) if isinstance(module, Mapping) else module)
    if has_no_weights(module):
        return WeightlessSource(module, opened.layers, opened.unembed), module
    return open_source(OpenedModel(module, opened.layers, opened.unembed), either_stack=True, at=at), module


def _random_batch(source: Source, module: torch.nn.Module, rows: int, length: int, labelled: bool) -> Batch:
    """A batch of random tokens, images or recordings.

    Raises:
        LayersimError: the model takes other inputs, inputs of unknown size, or fewer tokens.
    """
    described, random = source.model, torch.Generator().manual_seed(0)
    data: dict[str, Any] = {"label": torch.arange(rows) % 2} if labelled else {}
    if described.main_input in ROW_AXES:
        shape = shape_of_row(module, described, described.main_input)
        data[described.main_input] = torch.randn(rows, *shape, generator=random)
    elif described.vocabulary is None:
        raise LayersimError(f"`model_or_config` is {described.name}, which reads neither tokens nor images.")
    elif described.context is not None and length > described.context:
        raise LayersimError(f"`seq_len` is {length}; the context of {described.name} has {described.context} tokens.")
    else:
        data["input_ids"] = torch.randint(described.vocabulary, (rows, length), generator=random)
        data["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
    return next(iter(Batches(Data(data, batch_size=rows), described, labelled, position_counter([source]))))
