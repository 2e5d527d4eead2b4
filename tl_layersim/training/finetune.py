"""`finetune_aligned`: fine-tune a model with the aligned loss, with held-out curves by layer."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.storage import refuse_unwritable
from ..core.wording import brief
from ..data.data import Data
from ..engine.chosen_analyzers import with_tokenizer
from ..lens.targets import usual_labels
from ..sources.open import OpenedModel
from .export import check_savable, save_model, without_additions
from .fine_tuning_steps import FineTuning
from .finetune_results import AlignedResult
from .objectives import OBJECTIVES
from .residual_stream import open_residual_stream, refuse_float16, refuse_frozen_integers
from .settings import AlignedTraining, open_training_file
from .training_data import open_training_data, record_of_training, refuse_labels


@typed
def finetune_aligned(
    model: Any,
    data: Any,
    training: AlignedTraining | None = None,
    *,
    eval_data: Any = None,
    labels: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> AlignedResult:
    """Fine-tune a model so that every layer, read by the model's own head, predicts the targets.

    The model is trained in place; its mode (training or evaluation) is restored at the end. Processes started by `accelerate
    launch` share each step: n processes take n times as many rows in a step.

    Args:
        model: HookedTransformer, TransformerBridge or Hugging Face model: language models, token and row classifiers, vision
            classifiers; or the result of `open_model`.
        data: a `Data`, whose `batch_size` is the number of rows in a forward pass, or raw data, which is read with
            `batch_size=8`; for a vision model with `pixel_values` and `labels`. Positions that are not counted have no targets.
        training: the settings; default `AlignedTraining()`. Those of the paper are `AlignedTraining.paper_gpt2()` and
            `AlignedTraining.paper_bert(rows)`.
        eval_data: held-out data for the curves by layer; raw data is read like `data`. Default: the last tenth of the rows of
            `data`, which are then not trained on.
        labels: the targets: `"next_token"`, `"data"`, or a table, as in `LogitLens`. Default: `"next_token"`, for a
            classifier, and for rows without tokens that have labels, `"data"`.
        checkpoint: file with the state of the run. The same call on the untrained model resumes from it, with the same numbers.

    Returns:
        An `AlignedResult`: the training loss, and held-out loss and accuracy by layer before, during and after; with
        `objective="multi-head"` also the trained heads.

    Raises:
        LayersimError: the model cannot be trained in this process, or the arguments contradict one another.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3, appendices B.3 and C.2.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> training = lsim.AlignedTraining(steps=2, lr=1e-4)
        >>> result = lsim.finetune_aligned(model, lsim.Data(lsim.demo_text()[:8], batch_size=2, seq_len=32), training)
        >>> result.looks
        (0, 2)
    """
    training, data, opened = training or AlignedTraining(), Data.of(data, batch_size=8), OpenedModel.of(model)
    model = opened.model
    training.check_folder()
    refuse_unwritable(checkpoint, "checkpoint")
    if training.save_to is not None:
        check_savable(model)
    if isinstance(model, torch.nn.Module):
        refuse_frozen_integers(model, training.lora)
    start = time.perf_counter()
    with ExitStack() as stack:
        # A notebook or service may run under torch.no_grad() or torch.inference_mode(), which compute no gradients.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        known = open_residual_stream(opened, either_stack=True).source.model
        refuse_float16(known)
        # Of the weights before the training.
        known = replace(known, weights=known.weights_hash)
        own = () if checkpoint is None else known.identity("checkpoint")
        finish = stack.enter_context(_with_lora(model, training))
        stack.enter_context(_gradient_checkpointing(model, training))
        stack.enter_context(without_additions(model))
        stream = open_residual_stream(opened, either_stack=True)
        described = with_tokenizer(known, data.tokenizer)
        usual = usual_labels(labels, [(described, model)], data.source)
        rows = open_training_data(data, eval_data, labels, described, model, usual, stream.source.count_positions)
        if opened.verify is not None:
            stream.source.settle(rows[0].batch([0]))
        refuse_labels(*rows, stream.check(rows[0].take([0]).to(stream.device)))
        objective = OBJECTIVES.named(training.objective)(stream, training)
        identity = {
            "model": own,
            "blocks": opened.layers,
            "unembed": opened.unembed,
            "training": training.options(),
            "batch_size": data.batch_size,
            "pad": described.tokenizer.pad_token_id if described.tokenizer is not None else None,
            "learns": hashlib.sha256(" ".join(sorted(objective.trained_parameters())).encode()).hexdigest(),
            "data": rows[0].digest,
            "judged": rows[1].digest,
        }
        tuning = FineTuning(objective, rows, training, data.batch_size)
        trained = sum(parameter.numel() for parameter in tuning.parameters.values())
        tuning.run(open_training_file(checkpoint, identity))
        finish()
    heads = objective.exit_heads()
    if training.save_to is not None and tuning.accelerator.is_main_process:
        save_model(model, training.save_to, described.tokenizer, heads, rows[0].take([0]))
    tuning.accelerator.wait_for_everyone()
    options = {"parameters": trained} | training.options()
    loss, hits, count = torch.stack(list(tuning.evaluations.values())).unbind(1)
    return AlignedResult(
        values=loss / count,
        accuracy=hits / count,
        loss=torch.tensor(tuning.curve, dtype=torch.float64),
        looks=tuple(tuning.evaluations),
        unit="token" if stream.reads == "every" else "row",
        layers=known.layers,
        provenance=record_of_training(known, rows, options, time.perf_counter() - start, training.seed),
        exit_heads=heads,
    )


@contextmanager
def _with_lora(model: Any, training: AlignedTraining) -> Iterator[Any]:
    """A context with LoRA adapters in the model. It yields a function that merges them; otherwise they are removed."""
    if training.lora is None:
        yield lambda: None
        return
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError:
        raise LayersimError("`lora` needs the package peft: pip install 'tl_layersim[lora]'.") from None
    from transformers import PreTrainedModel

    if hasattr(model, "peft_config"):
        raise LayersimError(
            "`lora` cannot be combined with a model that has adapters already; without `lora`, the adapters of the model are "
            "trained."
        )
    if not isinstance(training.lora, PeftConfig) or not isinstance(model, PreTrainedModel):
        raise LayersimError(
            f"`lora` is {brief(training.lora)} and `model` {type(model).__name__}; they must be a peft.LoraConfig and a "
            "Hugging Face model."
        )
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        wrapped = get_peft_model(model, training.lora)
    merged = False

    def finish() -> None:
        nonlocal merged
        wrapped.merge_and_unload()
        merged = True

    try:
        yield finish
    finally:
        if not merged:
            wrapped.unload()
        model.__dict__.pop("peft_config", None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required.get(name, parameter.requires_grad))


@contextmanager
def _gradient_checkpointing(model: Any, training: AlignedTraining) -> Iterator[None]:
    if not training.gradient_checkpointing:
        yield
        return
    before = model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        if not before:
            model.gradient_checkpointing_disable()
