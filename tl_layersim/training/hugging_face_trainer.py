"""`AlignedTrainer`: Hugging Face's `Trainer` with the aligned loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from ..architectures.unembed import rounding
from ..core.distributed import refuse_sharded
from ..core.errors import LayersimError, warn
from ..data.input_names import EMBEDDINGS, PIXELS, TOKEN_IDS
from ..data.labels import NO_LABEL
from ..sources.hooks import eval_mode
from ..sources.open_local import OpenedModel, adapted_model
from .objectives import OBJECTIVES
from .residual_stream import TrainingBatch, open_residual_stream
from .settings import AlignedTraining


class AlignedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """Hugging Face's `Trainer` with the objectives of `AlignedTraining`.

    The schedule follows `state.global_step`, which counts optimiser steps. Labels have the form of Hugging Face's collators:
    the token at each position, -100 for no target. Whether labels are shifted is tested with the model's own loss on a row.
    Settings that `TrainingArguments` has too (steps, lr, accumulation, ...) are taken from it, not from `aligned`. Evaluation
    uses the model's own loss.

    Args:
        model: as in `Trainer`, or the result of `open_model`. `model_init` may return either.
        *args: as in `Trainer`.
        aligned: objective, schedule, weights, norm, beta, kl, layers_per_step; default `AlignedTraining()`.
        **options: as in `Trainer`.

    Raises:
        LayersimError: the objective needs parameters of its own, or the model has no known head.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5.

    Examples:
        >>> import tl_layersim as lsim
        >>> from transformers import TrainingArguments
        >>> model = lsim.demo_model()
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in [[0, 5, 6, 7], [0, 8, 9, 10]]]
        >>> quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        >>> arguments = TrainingArguments("unused", max_steps=1, **quiet)
        >>> lsim.training.AlignedTrainer(model, arguments, train_dataset=rows).train().global_step  # doctest: +ELLIPSIS
        {...}
        1
    """

    def __init__(self, model: Any = None, *args: Any, aligned: AlignedTraining | None = None, **options: Any) -> None:
        self._model_argument = OpenedModel.of(model)
        super().__init__(_trained_model(self._model_argument), *args, **options)
        settings = aligned or AlignedTraining()
        objective = OBJECTIVES.named(settings.objective)
        unsupported = {
            f"objective={settings.objective!r}": objective.has_own_parameters,
            "save_to=": settings.save_to is not None,
            "lora=": settings.lora is not None,
            "gradient_checkpointing=True": settings.gradient_checkpointing,
            "label_smoothing_factor": bool(self.args.label_smoothing_factor),
            "compute_loss_func=": self.compute_loss_func is not None,
        }
        for setting, is_set in unsupported.items():
            if is_set:
                raise LayersimError(
                    f"AlignedTrainer does not support {setting}; use TrainingArguments and peft, or finetune_aligned."
                )
        self._settings = settings
        self._build_objective()
        # With this setting, Trainer counts the targets of a step, by which compute_loss divides.
        self.model_accepts_loss_kwargs = True

    def call_model_init(self, trial: Any = None) -> Any:
        self._model_argument = OpenedModel.of(super().call_model_init(trial))
        return _trained_model(self._model_argument)

    def _build_objective(self) -> None:
        """Build the objective for the current model."""
        model = self.accelerator.unwrap_model(self.model)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not isinstance(inner, PreTrainedModel):
            raise LayersimError(
                f"`model` is a {type(inner).__name__}; it must be a transformers.PreTrainedModel. Use finetune_aligned."
            )
        refuse_sharded(model)
        self._model_of_objective = model
        objective = OBJECTIVES.named(self._settings.objective)
        stream = open_residual_stream(replace(self._model_argument, model=inner))
        self._objective = objective(stream, self._settings)
        self._shift: bool | None = None

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The objective's loss in training, and the model's own loss in evaluation."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs=return_outputs)
        batch = self._batch(inputs)
        stream = self._objective.stream
        if self._shift is None:
            self._shift = self._shift_of_model_loss(batch)
        if self._shift:
            batch = replace(batch, targets=shifted(batch.targets))
        count: Any = int((batch.targets != NO_LABEL).sum()) if num_items_in_batch is None else num_items_in_batch
        args, options = stream.arguments(batch)
        run = None if model is stream.module else lambda: model(*args, **options)
        total = self._objective(batch, int(self.state.global_step), run)
        if int(count) == 0:
            # 0 / 0 would make weights NaN, which the losses that Trainer logs do not show.
            warn("`labels` of a batch are all -100, so the batch contributes nothing to its step.")
            count = 1
        loss = total / count
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return loss

    def _batch(self, inputs: Mapping[str, Any]) -> TrainingBatch:
        # `Trainer` builds a new model for each trial of a hyperparameter search.
        if self.accelerator.unwrap_model(self.model) is not self._model_of_objective:
            self._build_objective()
        options = dict(inputs)
        labels = options.pop("labels", None)
        name = next((name for name in (TOKEN_IDS, PIXELS, EMBEDDINGS) if name in options), "")
        main = options.pop(name, None)
        if labels is None or main is None or labels.is_floating_point():
            raise LayersimError(
                f"A batch of `train_dataset` has {', '.join(inputs)}; it must have input_ids, pixel_values or inputs_embeds, "
                "and integer labels."
            )
        mask = options.get("attention_mask")
        # A mask of pairs of positions, such as that of packed rows, has no padding to move.
        attended = mask.bool() if mask is not None and mask.shape == main.shape[:2] else None
        return TrainingBatch(main, options, labels, attended, "" if name == TOKEN_IDS else name).right_padded()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of a step, and their number of targets."""
        samples, label_count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if label_count is None or not samples or "labels" not in samples[0]:
            return samples, label_count
        if self._shift is None:
            self._shift = self._shift_of_model_loss(self._batch(self._prepare_inputs(samples[0])))
        # The targets of the objective may be fewer than the labels, because a shift drops the first label of each row.
        target_counts = []
        for sample in samples:
            targets = self._batch(sample).targets
            if self._shift:
                targets = shifted(targets)
            target_counts.append(targets.ne(NO_LABEL).sum())
        count = torch.stack(target_counts).sum()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count.to(device)).sum()
        return samples, count.to(device)

    def _shift_of_model_loss(self, batch: TrainingBatch) -> bool | None:
        """Whether the model's own loss shifts labels. None if the batch has no target.

        Raises:
            LayersimError: the model's loss is not the last layer's cross-entropy, neither with shifted nor with unshifted
                labels.
        """
        stream = self._objective.stream
        losses: dict[bool, float] = {}
        for number in range(len(batch.main)):
            row = batch.row(number)
            with torch.no_grad(), eval_mode(stream.module), self.compute_loss_context_manager():
                model_loss = float(stream.call(replace(row, options={**row.options, "labels": row.targets})).loss)
                # The mean over no targets is NaN.
                if math.isnan(model_loss):
                    continue
                # Only labels of positions can be shifted, not those of rows.
                for shift in (True, False) if row.targets.dim() == 2 else (False,):
                    shifted_row = replace(row, targets=shifted(row.targets)) if shift else row
                    loss, count = stream.loss(shifted_row, {stream.n_layers: 1.0}, True)
                    losses[shift] = float(loss) / max(count, 1)
            differences = {shift: abs(loss - model_loss) for shift, loss in losses.items()}
            nearest = min(differences, key=lambda shift: differences[shift])
            # transformers computes losses in float32.
            allowed = rounding(next(stream.module.parameters()).dtype, torch.float32)
            if differences[nearest] <= allowed * (1 + abs(model_loss)):
                return nearest
            values = [f"{value:.5g}{' with shifted labels' if shift else ''}" for shift, value in losses.items()]
            raise LayersimError(
                f"The loss of `model` is {model_loss:.5g}; it must equal the cross-entropy of the last layer, "
                f"{' or '.join(values)}. "
                "Use open_model(model, unembed=[final norm, head]), or set model.config.output_router_logits = False."
            )
        return None


def _trained_model(opened: OpenedModel) -> Any:
    """The model that `Trainer` trains and saves: a `PeftModel` itself, of which it saves the adapters alone."""
    return opened.model if adapted_model(opened.given) is None else opened.given


def shifted(labels: Tensor) -> Tensor:
    """Next-token targets of unshifted labels (`batch pos`). The target at a position is the label of the next position."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], NO_LABEL)], 1)
