"""`train_adapters`: train low-rank adapters in a frozen nnsight model."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm.auto import tqdm

from ..architectures.site_selection import block_numbers
from ..core.arguments import FilePath, Layer, PositiveFloat, PositiveInt, Seed, typed
from ..core.errors import LayersimError, in_words, warn
from ..core.file_format import refuse_unwritable
from ..core.result_declarations import result_class
from ..core.results import Result, axes
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.training_loop import Shuffle, TrainingSteps, run_steps, save_state
from ..data.data import Data
from ..engine.run_arguments import with_tokenizer
from ..remote.backend import SMALL_RESULT, Form
from ..remote.client import quiet
from ..remote.failures import JobTooLong, server_text
from ..remote.low_rank_adapters import Item, LossSums, Parts, Patch, form_of_steps, run_here, run_on_server, step_or_evaluate
from ..remote.open_model import open_source
from ..remote.requests import RequestSchedule, ShippedSource
from ..remote.source import RemoteSource
from ..sources.activation_checks import check_lens, need_stream
from ..sources.forward_arguments import fewest_logits
from ..sources.hooks import frozen_weights
from ..sources.model_description import ModelDescription
from ..sources.nnsight import NNsightSource
from ..sources.open_local import OpenedModel, is_nnsight
from ..sources.partial_forward import no_known_head
from ..sources.source import refuse_inference_weights
from .losses import Weights, layer_weights, positions_with_targets
from .residual_stream import refuse_float16
from .training_data import TrainingData, open_training_data, open_training_file, record_of_training, rows_in_words

T = TypeVar("T")


@result_class
class AlignedAdapters(Result):
    """Low-rank adapters trained with the aligned loss. An adapter changes a block's output h to h + (h A') B'.

    Losses are in nats per target. Tensors are float64; only the adapters have the dtype in which they were trained.

    Attributes:
        values: `stage layer`, the same as `losses`: held-out cross-entropy of each layer's residual, read by the model's own
            final norm and head, without the adapters and with them.
        curve: `step`, aligned loss of each step's batch, before the step.
        curves: `step layer`, cross-entropy of each layer on that batch.
        down: `adapter direction dim`, the matrix A of each adapter.
        up: `adapter dim direction`, the matrix B of each adapter.
        weights: weights of the layers in the aligned loss.
        blocks: indices of the blocks with an adapter.
        paths: module paths of these blocks.
        stages: names of the two stages: without the adapters and with them.
    """

    stages: ClassVar[tuple[str, str]] = ("before", "after")
    values_name = "losses"
    values: Float64[Tensor, "stage layer"] = axes(
        "stage",
        "layer",
        label="Held-out cross-entropy",
        unit="nats",
        title="Held-out loss by layer, before and after",
        caption="Cross-entropy of each layer under the model's head, without the adapters and with them (Jiang et al. 2024, "
        "equation 5, for each layer).",
        better="lower",
        within=(0, math.inf),
    )
    curve: Float64[Tensor, " step"] = axes(
        "step",
        label="Aligned loss",
        unit="nats",
        title="Aligned loss while training",
        caption="The aligned loss of each step's batch.",
        within=(0, math.inf),
    )
    curves: Float64[Tensor, "step layer"] = axes(
        "step",
        "layer",
        label="Cross-entropy of the batch",
        unit="nats",
        title="Cross-entropy while training, of each layer",
        within=(0, math.inf),
    )
    down: Float[Tensor, "adapter direction dim"] = axes("adapter", "direction", "dim")
    up: Float[Tensor, "adapter dim direction"] = axes("adapter", "dim", "direction")
    weights: tuple[float, ...]
    blocks: tuple[int, ...]
    paths: tuple[str, ...]

    def measured_on(self, field: str) -> str:
        return rows_in_words(self.provenance, field in ("curve", "curves"))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the layers with an adapter."""
        return tuple(self.layers[block + 1] for block in self.blocks)

    @property
    def directions(self) -> tuple[int, ...]:
        """Indices of the rank-one directions of each adapter, from 0 to rank - 1."""
        return tuple(range(self.down.shape[1]))

    @property
    def losses(self) -> Tensor:
        """Held-out cross-entropies in nats (`stage layer`); the same tensor as `values`."""
        return self.values

    def aligned(self, stage: str) -> float:
        """The held-out aligned loss at a stage, `"before"` or `"after"`."""
        return float(self.values[self.stages.index(stage)] @ torch.tensor(self.weights, dtype=torch.float64))

    def apply(self, model: Any) -> None:
        """Apply the adapters to an nnsight model, inside a trace.

        Modules that are read afterwards in the same trace must lie above the last adapter, because nnsight runs the model once.
        A further `tracer.invoke()` can read all modules.

        Args:
            model: the traced model.

        Raises:
            LayersimError: the model has another width than the adapters, or lacks their blocks.

        Examples:
            >>> import nnsight, tl_layersim as lsim
            >>> from tl_layersim.training import train_adapters
            >>> demo = lsim.demo_model()
            >>> model = nnsight.TransformersModel(demo, task="text-generation", tokenizer=demo.tokenizer)
            >>> adapters = train_adapters(model, lsim.demo_text()[:8], steps=2)
            >>> with model.trace("Once upon a time"):
            ...     adapters.apply(model)
            ...     logits = model.lm_head.output.save()
        """
        Patch(self.paths, self.down, self.up).apply(model)

    def __reduce__(self) -> Any:
        # nnsight pickles the objects of a trace. A server does not know this class, and needs only `apply`.
        import nnsight

        # Servers do not have this package, so its code is sent.
        nnsight.register("tl_layersim")
        return Patch, (self.paths, self.down, self.up)

    def __copy__(self) -> AlignedAdapters:
        return self

    def __deepcopy__(self, memo: Any) -> AlignedAdapters:
        return self

    def __repr__(self) -> str:
        rank, width = self.down.shape[1:]
        lines = [f"AlignedAdapters({len(self.blocks)} of rank {rank} and width {width}, {self.provenance.model})"]
        lines += [f"  {key} = {value:.4g}" for key, value in self.headline().items()]
        return "\n".join(lines)

    def headline(self) -> dict[str, float]:
        numbers = {}
        for number, stage in enumerate(self.stages):
            numbers[f"aligned loss {stage}"] = self.aligned(stage)
            numbers[f"loss of the last layer {stage}"] = float(self.values[number, -1])
        return numbers


class AdapterSteps(TrainingSteps):
    """Optimiser steps of AdamW that train the adapters.

    Args:
        source: source of the model.
        data: training rows and held-out rows.
        at: indices of the blocks with an adapter.
        weights: weights of the layers in the aligned loss.
        start: initial adapters, which do not change the model, and AdamW's initial moments.
        steps: number of optimiser steps, each on one batch.
        lr: learning rate at the first step. It decreases linearly.
        seed: seed of the order of rows.

    Attributes:
        state: adapters, moments, and the losses `layer` of each step.
    """

    title = "adapters"

    def __init__(
        self,
        source: NNsightSource,
        data: tuple[TrainingData, TrainingData],
        at: list[int],
        weights: list[float],
        start: Parts,
        steps: int,
        lr: float,
        seed: int,
    ) -> None:
        assert source.lens is not None
        self.source = source
        self.at = at
        self.weights = weights
        self.start = start
        self.steps = steps
        self.lr = lr
        self.training_data, self.eval_data = data
        self.batch_size = self.training_data.batches.data.batch_size
        self.state: tuple[Parts, list[Tensor]] = (start, [])
        self._unembed = source.lens
        self._schedule = RequestSchedule(None)
        self._shipped_source = ShippedSource()
        self._shuffle = Shuffle(len(self.training_data), seed)

    def restore(self, _notes: Mapping[str, Any], tensors: Parts) -> None:
        parts = {name: tensors[name] for name in self.start}
        self.state = (parts, list(tensors["curve"]))

    @property
    def step(self) -> int:
        return len(self.state[1])

    @contextmanager
    def running(self, bar: Any) -> Iterator[None]:
        run = self.requests(self.steps, self._item_of_step, self.state[0], bar.set_postfix_str, self.step)
        with closing(run) as self._requests:
            yield

    def compute(self) -> Sequence[float]:
        sums, self._parts = next(self._requests)
        self._losses = [loss / count for loss, count in sums]
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return [float(loss @ weights) for loss in self._losses]

    def diverges(self, losses: Sequence[float]) -> bool:
        if super().diverges(losses):
            return True
        return not all(bool(self._parts[name].isfinite().all()) for name in ("up", "down"))

    def on_divergence(self, losses: Sequence[float]) -> None:
        raise LayersimError(
            f"The training diverged by step {self.step + len(losses)} of {self.steps}: a loss or an adapter is not finite. Use "
            f"a lower `lr`, such as {self.lr / 10:g}, and another `checkpoint`."
        )

    def apply(self) -> None:
        # One assignment, because an interrupt must not leave half a step.
        self.state = (self._parts, self.state[1] + self._losses)

    def snapshot(self) -> Snapshot | None:
        parts, curve = self.state
        if not curve:
            return None
        return {}, parts | {"curve": torch.stack(curve)}

    def evaluate(self, parts: Parts) -> Tensor:
        """Held-out loss of each layer in nats (`layer`). `parts` holds the adapters."""
        row_count = len(self.eval_data)
        size = self.batch_size
        batches = [range(start, min(start + size, row_count)) for start in range(0, row_count, size)]

        def item_of_batch(number: int) -> Item:
            return self._item(self.eval_data, batches[number])

        total = torch.zeros((), dtype=torch.float64)
        target_count = 0
        with tqdm(total=len(batches), desc="held out", unit="batch", disable=None, leave=False) as bar:
            for sums, _ in self.requests(len(batches), item_of_batch, parts, bar.set_postfix_str):
                for loss, count in sums:
                    total = total + loss
                    target_count += count
                bar.update(len(sums))
        return total / target_count

    def requests(
        self, count: int, item_of: Callable[[int], Item], state: Parts, say: Callable[[str], None], start: int = 0
    ) -> Generator[tuple[list[LossSums], Parts], None, None]:
        """Run optimiser steps or evaluations, and yield their losses and the new state.

        A request to a server holds as many as its time limit allows.

        Args:
            count: number of items.
            item_of: function from an item's index to the item.
            state: initial adapters and moments.
            say: receives the messages of a server.
            start: number of completed items.

        Yields:
            Summed losses and number of targets of each item of a request, and the state after it.
        """
        source = self.source
        if not isinstance(source, RemoteSource):
            for number in range(start, count):
                item = item_of(number)
                sums, state = run_here(
                    source.envoy, source.blocks, self._unembed, self.at, item, state, self.weights, source.where
                )
                yield [(sums, len(item["targets"]))], state
            return
        source.ndif.say = say
        try:
            while start < count:
                stop = min(count, start + self._schedule.affordable(source.offer.job_limit))
                items = [item_of(number) for number in range(start, stop)]
                try:
                    run = partial(
                        run_on_server, source.envoy, source.blocks, self._unembed, self.at, items, state, self.weights
                    )
                    form = partial(form_of_steps, steps=len(items), layers=len(source.blocks), state=state)
                    largest = SMALL_RESULT + 2 * sum(part.nbytes for part in state.values())
                    with self._shipped_source.in_place({"training": step_or_evaluate}):
                        losses, state = source.ndif.request(_expecting(form, largest, run))
                except JobTooLong as error:
                    if len(items) == 1:
                        raise _too_long(items[0], source, error) from None
                    self._schedule.lower(len(items) // 2)
                    continue
                self._schedule.measure(source.ndif.seconds, len(items))
                start += len(items)
                yield [(sums, len(item["targets"])) for sums, item in zip(losses, items, strict=True)], state
        finally:
            source.ndif.say = quiet

    def _item(self, data: TrainingData, rows: Sequence[int], step: int = 0, rate: float | None = None) -> Item:
        """Inputs, targets and learning rate of one optimiser step. An evaluation has no learning rate."""
        batch = data.take(rows)
        ids = {"tokens": batch.main}
        if self._unembed.reads == "rows":
            ids["attended"] = torch.ones_like(batch.main) if batch.attended is None else batch.attended
        options = {**batch.options, **fewest_logits(self.source.module)}
        ids["index"], ids["targets"] = positions_with_targets(
            self._unembed.reads, batch.targets, batch.attended, batch.main.shape[1]
        )
        item: Item = {name: tensor.to(torch.int32) for name, tensor in ids.items()}
        return item | {"options": options, "step": step, "rate": rate}

    def _item_of_step(self, step: int) -> Item:
        size = self.batch_size
        rows = [self._shuffle.row(place) for place in range(step * size, (step + 1) * size)]
        return self._item(self.training_data, rows, step + 1, self.lr * (self.steps - step) / self.steps)


def _expecting(form: Form, largest: int, run: Callable[[Any], T]) -> Callable[[Any], T]:
    """`run` with a backend that expects a result of this form and size, see `Expectation`."""
    return lambda backend: run(backend.expecting(form, largest))


def _initial_adapters(model: ModelDescription, count: int, rank: int, seed: int) -> Parts:
    """Dict of the initial adapters and moments: A is normal with variance 1 / d_model, B and the moments of AdamW are 0."""
    assert model.d_model is not None
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if model.dtype == "torch.float64" else torch.float32
    down = torch.randn(count, rank, model.d_model, generator=generator, dtype=torch.float64) / math.sqrt(model.d_model)
    parts = {"down": down.to(dtype), "up": torch.zeros(count, model.d_model, rank, dtype=dtype)}
    moments = {}
    for name, part in parts.items():
        moments[f"{name} mean"] = torch.zeros_like(part)
        moments[f"{name} square"] = torch.zeros_like(part)
    return parts | moments


def _refuse_untrainable(model: ModelDescription) -> None:
    """Raise an error if adapters cannot be trained in this model.

    Raises:
        LayersimError: the server computes no gradients, the head or the width is unknown, or the weights are in float16.
    """
    need_stream(model, "Aligned training")
    if model.calls != "gradients":
        raise LayersimError(
            f"`model` is {model.name} in a server's sandbox, which computes no gradients; adapters need a trusted server."
        )
    if model.head is None:
        raise no_known_head(model)
    if model.d_model is None:
        raise LayersimError(
            f"The width of {model.name} is not known. Set model.config.hidden_size before nnsight wraps the model."
        )
    refuse_float16(model)


@typed
def train_adapters(
    model: Any,
    data: Any,
    *,
    at: Layer | Sequence[Layer] | None = None,
    rank: PositiveInt = 8,
    steps: PositiveInt = 200,
    lr: PositiveFloat = 3e-3,
    weights: Weights = "linear",
    seed: Seed = 0,
    eval_data: Any = None,
    labels: Any = None,
    checkpoint: FilePath | None = None,
) -> AlignedAdapters:
    r"""Train low-rank adapters in the residual stream of a frozen nnsight model, so that every layer predicts the targets.

    The output h of block l is changed to $x^l = h + (h A_l^T) B_l^T$, the input of the next block. A and B are trained with the
    aligned loss $\sum_l w_l \, CE(W \, \mathrm{norm}(x^l), y)$ over all layers, with the model's own final norm and head. All
    other weights are frozen. If the model is on a server, the server runs the steps: requests hold tokens, A and B, no
    activations.

    A is initialised as normal with variance 1 / d_model and B as zero, so that the model is unchanged at the start. One
    learning rate fits residual streams of any size, because the change is a product with h and AdamW's steps do not depend on
    the size of gradients. The rate falls linearly to 0.

    Args:
        model: an nnsight model, or the result of `open_model`. A server must be trusted, because a sandbox computes no
            gradients.
        data: a `Data`, whose `batch_size` is the number of rows in a step, or raw data. Positions that are not counted have no
            targets.
        at: the blocks that get an adapter, by number, negative from the end, or by the name of their output
            (`blocks.2.hook_resid_post`); default: all.
        rank: rank of each adapter.
        steps: number of optimiser steps, each on one batch.
        lr: learning rate at the first step.
        weights: "linear", w_l = 2 l / (L (L + 1)); "uniform"; or one number for each layer, which must sum to 1.
        seed: seed of A and of the order of batches.
        eval_data: held-out data for the losses by layer; raw data is read like `data`. Default: the last tenth of the rows of
            `data`, which are then not trained on.
        labels: the targets: `"next_token"`, `"data"`, or a table, as in `LogitLens`. Default: `"next_token"`, for
            a classifier `"data"`.
        checkpoint: file with the state of the training; the same call resumes from it, with the same numbers.

    Returns:
        The adapters, with their learning curve and held-out losses by layer.

    Raises:
        LayersimError: the model is not an nnsight model, has no known head, or is in a server's sandbox, which computes no
            gradients.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5; Hu et al. 2022 (arXiv 2106.09685) for low-rank maps.

    Examples:
        >>> import nnsight, tl_layersim as lsim
        >>> from tl_layersim.training import train_adapters
        >>> demo = lsim.demo_model()
        >>> model = nnsight.TransformersModel(demo, task="text-generation", tokenizer=demo.tokenizer)
        >>> adapters = train_adapters(model, lsim.demo_text()[:8], at=[1, 3], rank=4, steps=2)
        >>> adapters.losses.shape
        torch.Size([2, 8])
    """
    refuse_unwritable(checkpoint, "checkpoint")
    data = Data.of(data)
    opened = OpenedModel.of(model)
    if not isinstance(opened.model, NNsightSource) and not is_nnsight(opened.model):
        raise LayersimError(
            f"`model` is a {type(opened.model).__name__}; it must be an nnsight model. Use nnsight.NNsight(model) or "
            "finetune_aligned."
        )
    source = open_source(opened)
    assert isinstance(source, NNsightSource)
    description = with_tokenizer(source.model, data.tokenizer)
    _refuse_untrainable(description)
    refuse_inference_weights(source.module)
    outputs = description.layers[1:]
    blocks = list(range(len(outputs))) if at is None else sorted(block_numbers(at, outputs, "at"))
    weights_by_layer = layer_weights(weights, len(description.layers) - 1)
    rows = open_training_data(data, eval_data, labels, description, source.module, None)
    options = {"at": blocks, "rank": rank, "steps": steps, "lr": float(lr), "weights": weights_by_layer}
    options |= {"layers": opened.layers, "unembed": opened.unembed}
    file = open_training_file(checkpoint, description, rows, options | {"seed": seed})
    start_time = time.perf_counter()
    start = _initial_adapters(description, len(blocks), rank, seed)
    training = AdapterSteps(source, rows, blocks, weights_by_layer, start, steps, float(lr), seed)
    file.resume(training.restore)
    if isinstance(source, RemoteSource):
        _report_traffic(training, source.offer.server)
    fields = _train_and_evaluate(training, file)
    if isinstance(source, RemoteSource):
        options["remote"] = [source.record()]
    run = record_of_training(description, rows, options, time.perf_counter() - start_time, seed)
    paths = tuple(source.paths[block] for block in blocks)
    adapters = AlignedAdapters(**fields, blocks=tuple(blocks), paths=paths, layers=description.layers, provenance=run)
    loss_before = adapters.aligned("before")
    loss_after = adapters.aligned("after")
    # A loss after the training that is NaN warns too.
    if not loss_after <= loss_before:
        warn(
            f"On held-out data the aligned loss rose from {loss_before:.4g} to {loss_after:.4g}. "
            f"Use more data, fewer steps, or lr={lr / 10:g}."
        )
    return adapters


def _train_and_evaluate(training: AdapterSteps, file: ResumableFile) -> dict[str, Any]:
    """Train and evaluate the adapters. Returns fields of `AlignedAdapters`."""
    source = training.source
    weights = training.weights
    with frozen_weights(source.module), source.evaluating():
        # Check on one row that the lens at the last layer gives the model's logits.
        row = training.eval_data.batch([0])
        source.settle(row)
        need_stream(source.model, "Aligned training")
        check_lens(source, row)
        before = training.evaluate(training.start)
        if not bool(before.isfinite().all()):
            raise LayersimError(
                f"The held-out loss of {source.model.name}, in {source.model.dtype}, is not finite before the training. Check "
                "the weights of the model."
            )
        run_steps(training, file)
        save_state(training, file)
        parts, losses = training.state
        curves = torch.stack(losses)
        after = training.evaluate(parts)
    return {
        "values": torch.stack([before, after]),
        "curve": curves @ torch.tensor(weights, dtype=torch.float64),
        "curves": curves,
        "down": parts["down"],
        "up": parts["up"],
        "weights": tuple(weights),
    }


def _report_traffic(training: AdapterSteps, server: str) -> None:
    """Print the number and size of the requests to a server."""
    size = sum(part.numel() * part.element_size() for part in training.start.values())
    tqdm.write(
        f"{server} runs {training.steps:,} steps in at most {training.steps:,} requests. Each request transfers "
        f"{in_words(size)} of adapters in each direction, and the tokens of its steps. The loss is evaluated on "
        f"{len(training.eval_data)} rows before and after. Activations and weights stay on the server.",
        file=sys.stderr,
    )


def _too_long(item: Item, source: RemoteSource, error: Exception) -> LayersimError:
    rows, width = item["tokens"].shape
    return LayersimError(
        f"A training step of {rows} rows with {width} tokens exceeds the server's time limit for a job. Use "
        f"batch_size={max(1, rows // 2)}, or a smaller seq_len=. {source.offer.server} says: '{server_text(error)}'"
    )
