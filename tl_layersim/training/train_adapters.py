"""`train_adapters`: train low-rank adapters in a frozen nnsight model, in this process or on a server."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from tqdm.auto import tqdm

from ..architectures.chosen_hook_points import block_numbers
from ..core.arguments import PositiveFloat, PositiveInt, Seed, typed
from ..core.errors import LayersimError, in_words, warn
from ..core.resumable_file import ResumableFile
from ..core.storage import refuse_unwritable
from ..data.data import Data
from ..engine.chosen_analyzers import with_tokenizer
from ..lens.targets import usual_labels
from ..remote.low_rank_adapters import RemoteDescent, open_traced
from ..sources.checks import check_lens, need_stream
from ..sources.model import Model
from ..sources.nnsight import NNsightSource
from ..sources.open import OpenedModel
from ..sources.source import OnServer, refuse_inference_weights
from ..stitching.stitched_model import StitchedModel
from .adapter_steps import AdapterSettings, AdapterSteps
from .adapters import AlignedAdapters
from .losses import Weights, layer_weights
from .residual_stream import no_known_head, refuse_float16
from .settings import open_training_file
from .training_data import TrainingData, open_training_data, record_of_training


def no_traced_model(model: Any) -> LayersimError:
    """The error for a model that is not an nnsight model."""
    instead = (
        "the nnsight model of its back" if isinstance(model, StitchedModel) else "nnsight.NNsight(model) or finetune_aligned"
    )
    return LayersimError(f"`model` is {type(model).__name__}; adapters are trained in an nnsight model. Use {instead}.")


def refuse_untrainable(model: Model) -> None:
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
    settings = AdapterSettings(rank, steps, float(lr), data.batch_size, seed)
    source = open_traced(opened)
    if source is None:
        raise no_traced_model(opened.model)
    known = with_tokenizer(source.model, data.tokenizer)
    refuse_untrainable(known)
    if known.d_model is not None and rank > known.d_model:
        raise LayersimError(f"`rank` is {rank}; the residual stream of {known.name} has {known.d_model} dimensions.")
    refuse_inference_weights(source.module)
    outputs = known.layers[1:]
    blocks = list(range(len(outputs))) if at is None else sorted(block_numbers(at, outputs, "at"))
    weights_by_layer = layer_weights(weights, len(known.layers) - 1)
    usual = usual_labels(labels, [(known, source.module)], data.source)
    rows = open_training_data(data, eval_data, labels, known, source.module, usual, None)
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
    training = AdapterSteps(RemoteDescent(source, blocks, weights_by_layer), rows, known, settings)
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
        _check_lens(source, training.eval_data)
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


def _check_lens(source: NNsightSource, data: TrainingData) -> None:
    """Check on one row that the blocks share one residual stream, and that the lens at the last layer gives the logits."""
    row = data.batch([0])
    source.settle(row)
    need_stream(source.model, "Aligned training")
    check_lens(source, row)


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
