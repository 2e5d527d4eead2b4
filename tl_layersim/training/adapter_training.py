"""`train_adapters`: train low-rank adapters in a frozen nnsight model, in this process or on a server."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm.auto import tqdm

from ..architectures.site_selection import block_numbers
from ..core.arguments import PositiveFloat, PositiveInt, Seed, typed
from ..core.errors import LayersimError, in_words, warn
from ..core.result_declarations import result_class
from ..core.results import Result, axes
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.storage import refuse_unwritable
from ..core.training_loop import Shuffle, TrainingSteps, run_steps, save_state
from ..data.data import Data
from ..engine.run_arguments import with_tokenizer
from ..remote.low_rank_adapters import Item, Parts, Patch, RemoteDescent, open_traced
from ..sources.activation_checks import check_lens, need_stream
from ..sources.model_description import Model
from ..sources.nnsight import NNsightSource
from ..sources.open_local import OpenedModel
from ..sources.source import OnServer, refuse_inference_weights
from ..stitching.stitched_model import StitchedModel
from .losses import Weights, layer_weights, positions_with_targets
from .residual_stream import no_known_head, refuse_float16
from .settings import curve_of, open_training_file
from .training_data import TrainingData, open_training_data, record_of_training, rows_in_words

STAGES = ("before", "after")


@result_class
class AlignedAdapters(Result):
    """Low-rank adapters trained with the aligned loss; each changes the output h of a block to h + (h A') B'.

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
    """

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
    def stages(self) -> tuple[str, ...]:
        """Names of the two stages: without and with the adapters."""
        return STAGES

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the layers with an adapter."""
        return tuple(self.layers[block + 1] for block in self.blocks)

    @property
    def directions(self) -> tuple[int, ...]:
        """Indices of an adapter's rank-one directions."""
        return tuple(range(self.down.shape[1]))

    @property
    def losses(self) -> Tensor:
        """Held-out cross-entropies in nats, `stage layer`, the same as `values`."""
        return self.values

    def aligned(self, stage: str) -> float:
        """The held-out aligned loss without adapters (`"before"`) or with them (`"after"`)."""
        return float(self.values[STAGES.index(stage)] @ torch.tensor(self.weights, dtype=torch.float64))

    def apply(self, model: Any) -> None:
        """Apply the adapters to an nnsight model, inside a trace in this process or on a server.

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
        # nnsight pickles what a trace on a server refers to. A server can make neither this class nor its base, and needs
        # `apply` alone.
        import nnsight

        # By value: servers do not have this package.
        nnsight.register("tl_layersim")
        return Patch, (self.paths, self.down, self.up)

    def __copy__(self) -> AlignedAdapters:
        return self

    def __deepcopy__(self, memo: Any) -> AlignedAdapters:
        return self

    def __repr__(self) -> str:
        rank, width = self.down.shape[1:]
        lines = [f"AlignedAdapters({len(self.blocks)} of rank {rank} and width {width}, {self.provenance.model})"]
        return "\n".join(lines + [f"  {key} = {value:.4g}" for key, value in self.headline().items()])

    def headline(self) -> dict[str, float]:
        numbers = {}
        for number, stage in enumerate(STAGES):
            numbers[f"aligned loss {stage}"] = self.aligned(stage)
            numbers[f"loss of the last layer {stage}"] = float(self.values[number, -1])
        return numbers


class AdapterSteps(TrainingSteps):
    """AdamW training of adapters, in this process or on a server, with a state that can be saved and resumed.

    Args:
        descent: runs steps and evaluations, in this process or on a server.
        data: training rows and held-out rows.
        model: description of the model.
        rank: rank of each adapter.
        steps: number of optimiser steps, each on one batch.
        lr: learning rate at the first step. It decreases linearly.
        batch_size: number of rows in a step.
        seed: seed of A and of the order of rows.

    Attributes:
        start: initial adapters, which do not change the model, and AdamW's initial moments.
        state: adapters, moments, and the losses `layer` of each step.
    """

    title = "adapters"

    def __init__(
        self,
        descent: RemoteDescent,
        data: tuple[TrainingData, TrainingData],
        model: Model,
        rank: int,
        steps: int,
        lr: float,
        batch_size: int,
        seed: int,
    ) -> None:
        assert model.head is not None
        self.descent, self.head_reads, self.steps, self.lr, self.batch_size = descent, model.head.reads, steps, lr, batch_size
        self.training_data, self.eval_data = data
        self.start = _start(model, len(descent.at), rank, seed)
        self.state: tuple[Parts, list[Tensor]] = (self.start, [])
        self._shuffle = Shuffle(len(self.training_data), seed)
        self._weights = torch.tensor(descent.weights, dtype=torch.float64)

    def restore(self, file: ResumableFile) -> None:
        """Load the state of a file.

        Raises:
            LayersimError: the file is damaged, or belongs to another run.
        """
        self.state = file.resume(self._state_of) or self.state

    def run(self, file: ResumableFile) -> tuple[Parts, Tensor]:
        """Train to the last step. Returns the adapters and the losses of all steps, `step layer`.

        Raises:
            LayersimError: a loss or an adapter is not finite.
        """
        run_steps(self, file)
        save_state(self, file)
        parts, curve = self.state
        return parts, torch.stack(curve)

    @property
    def step(self) -> int:
        return len(self.state[1])

    @contextmanager
    def running(self, bar: Any) -> Iterator[None]:
        run = self.descent.run(self.steps, self._item_of_step, self.state[0], self.step, bar.set_postfix_str)
        with closing(run) as self._requests:
            yield

    def compute(self) -> Sequence[float]:
        sums, self._parts = next(self._requests)
        self._losses = [loss / count for loss, count in sums]
        return [float(loss @ self._weights) for loss in self._losses]

    def diverges(self, losses: Sequence[float]) -> bool:
        return super().diverges(losses) or not all(bool(self._parts[name].isfinite().all()) for name in ("up", "down"))

    def on_divergence(self, losses: Sequence[float]) -> None:
        raise LayersimError(
            f"The training diverged: a loss or an adapter is not finite by step {self.step + len(losses)} of {self.steps}. "
            f"Use a lower lr, such as {self.lr / 10:g}, with another checkpoint=."
        )

    def apply(self) -> None:
        # One assignment: an interrupt leaves all of a step or nothing.
        self.state = (self._parts, self.state[1] + self._losses)

    def snapshot(self) -> Snapshot | None:
        parts, curve = self.state
        return ({"step": self.step}, parts | {"curve": torch.stack(curve)}) if curve else None

    def evaluate(self, parts: Parts) -> Tensor:
        """Held-out loss of each layer with the adapters, `layer`, in nats."""
        count, size = len(self.eval_data), self.batch_size
        batches = [range(start, min(start + size, count)) for start in range(0, count, size)]
        losses, targets = torch.zeros((), dtype=torch.float64), 0
        with tqdm(total=len(batches), desc="held out", unit="batch", disable=None, leave=False) as bar:
            run = self.descent.run(
                len(batches), lambda number: self._item(self.eval_data, batches[number]), parts, say=bar.set_postfix_str
            )
            for sums, _ in run:
                for loss, number in sums:
                    losses, targets = losses + loss, targets + number
                bar.update(len(sums))
        return losses / targets

    def _item(self, data: TrainingData, rows: Sequence[int], step: int = 0, rate: float | None = None) -> Item:
        """The inputs of a step or an evaluation on these rows."""
        batch = data.take(rows)
        index, targets = positions_with_targets(self.head_reads, batch.targets, batch.attended, batch.main.shape[1])
        item = self.descent.item(batch.main, batch.options, index, targets, step, rate)
        if self.head_reads != "rows":
            return item
        attended = torch.ones_like(batch.main) if batch.attended is None else batch.attended
        return item | {"attended": attended.to(torch.int32)}

    def _item_of_step(self, step: int) -> Item:
        """The inputs of a step, counted from 0."""
        size = self.batch_size
        rows = [self._shuffle.row(place) for place in range(step * size, (step + 1) * size)]
        return self._item(self.training_data, rows, step + 1, self.lr * (self.steps - step) / self.steps)

    def _state_of(self, notes: Mapping[str, Any], tensors: Parts) -> tuple[Parts, list[Tensor]]:
        """The state in a file. Raises an error if its tensors do not have the shapes of the initial state."""
        steps, start = len(curve_of(notes, tensors)), self.start
        parts = {name: tensors[name] for name in start}
        wrong = [name for name, part in parts.items() if part.shape != start[name].shape or part.dtype != start[name].dtype]
        if wrong or tensors["curve"].shape != (steps, len(self._weights)):
            raise ValueError(f"other shapes of {', '.join(wrong) or 'curve'}")
        return parts, list(tensors["curve"])


def _start(model: Model, count: int, rank: int, seed: int) -> Parts:
    """The initial state of the adapters: A is normal with variance 1 / d_model; B and AdamW's moments are zero."""
    assert model.d_model is not None
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if model.dtype == "torch.float64" else torch.float32
    down = torch.randn(count, rank, model.d_model, generator=generator, dtype=torch.float64) / math.sqrt(model.d_model)
    parts = {"down": down.to(dtype), "up": torch.zeros(count, model.d_model, rank, dtype=dtype)}
    moments = ("mean", "square")
    return parts | {f"{name} {moment}": torch.zeros_like(part) for name, part in parts.items() for moment in moments}


def _refuse_untrainable(model: Model) -> None:
    """Raise an error if adapters cannot be trained in this model.

    Raises:
        LayersimError: the server computes no gradients, the head or the width is unknown, or the weights are in float16.
    """
    need_stream(model, "Aligned training")
    if model.calls != "gradients":
        raise LayersimError(
            f"`model` is on a server that runs {model.name} in a sandbox without gradients; adapters need a trusted key."
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
    at: int | str | Sequence[int | str] | None = None,
    rank: PositiveInt = 8,
    steps: PositiveInt = 200,
    lr: PositiveFloat = 3e-3,
    weights: Weights = "linear",
    seed: Seed = 0,
    eval_data: Any = None,
    labels: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
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
    data, opened = Data.of(data), OpenedModel.of(model)
    source = open_traced(opened)
    if source is None:
        stitched = isinstance(opened.model, StitchedModel)
        instead = "the nnsight model of its back" if stitched else "nnsight.NNsight(model) or finetune_aligned"
        raise LayersimError(
            f"`model` is {type(opened.model).__name__}; adapters are trained in an nnsight model. Use {instead}."
        )
    known = with_tokenizer(source.model, data.tokenizer)
    _refuse_untrainable(known)
    if known.d_model is not None and rank > known.d_model:
        raise LayersimError(f"`rank` is {rank}; the residual stream of {known.name} has {known.d_model} dimensions.")
    refuse_inference_weights(source.module)
    outputs = known.layers[1:]
    blocks = list(range(len(outputs))) if at is None else sorted(block_numbers(at, outputs, "at"))
    weights_by_layer = layer_weights(weights, len(known.layers) - 1)
    rows = open_training_data(data, eval_data, labels, known, source.module, None)
    options = {"at": blocks, "rank": rank, "steps": steps, "lr": float(lr), "weights": weights_by_layer}
    options |= {"layers": opened.layers, "unembed": opened.unembed}
    identity = {
        "model": () if checkpoint is None else known.identity("checkpoint"),
        "task": options | {"seed": seed, "batch_size": data.batch_size},
        "pad": known.tokenizer.pad_token_id if known.tokenizer is not None else None,
        "version": version("tl_layersim"),
        "trained_on": rows[0].digest,
        "judged_on": rows[1].digest,
    }
    file, began = open_training_file(checkpoint, identity), time.perf_counter()
    training = AdapterSteps(
        RemoteDescent(source, blocks, weights_by_layer), rows, known, rank, steps, float(lr), data.batch_size, seed
    )
    training.restore(file)
    _report_traffic(training)
    fields = _trained(training, source, file)
    options |= {"remote": [source.record()]} if isinstance(source, OnServer) else {}
    run = record_of_training(known, rows, options, time.perf_counter() - began, seed)
    paths = tuple(source.paths[block] for block in blocks)
    adapters = AlignedAdapters(**fields, blocks=tuple(blocks), paths=paths, layers=known.layers, provenance=run)
    if not adapters.aligned("after") <= adapters.aligned("before"):
        warn(
            f"On held-out data the aligned loss rose from {adapters.aligned('before'):.4g} to {adapters.aligned('after'):.4g}. "
            f"Use more data, fewer steps, or lr={lr / 10:g}."
        )
    return adapters


def _trained(training: AdapterSteps, source: NNsightSource, file: ResumableFile) -> dict[str, Any]:
    """Evaluate, train and evaluate again. Returns the adapters, curves and held-out losses as fields of `AlignedAdapters`."""
    with training.descent.evaluating():
        # On one row: the blocks share one residual stream, and the lens at the last layer gives the logits.
        row = training.eval_data.batch([0])
        source.settle(row)
        need_stream(source.model, "Aligned training")
        check_lens(source, row)
        before = training.evaluate(training.start)
        if not bool(before.isfinite().all()):
            raise LayersimError(
                f"The losses of {source.model.name} in {source.model.dtype} are not finite, before anything is trained."
            )
        learnt, curves = training.run(file)
        after = training.evaluate(learnt)
    weights = training.descent.weights
    return {
        "values": torch.stack([before, after]),
        "curve": curves @ torch.tensor(weights, dtype=torch.float64),
        "curves": curves,
        "down": learnt["down"],
        "up": learnt["up"],
        "weights": tuple(weights),
    }


def _report_traffic(training: AdapterSteps) -> None:
    """Print the number and size of the requests to a server, before they are sent."""
    if training.descent.server is None:
        return
    size = sum(part.numel() * part.element_size() for part in training.start.values())
    tqdm.write(
        f"{training.descent.server}: {training.steps:,} steps in at most as many requests, fewer where steps are fast. Each "
        f"request carries {in_words(size)} of adapters in each direction, and the tokens of its steps. Before and after, the "
        f"loss is evaluated on {len(training.eval_data)} rows. Activations and weights stay on the server.",
        file=sys.stderr,
    )
