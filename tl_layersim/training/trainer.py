"""AlignedTrainer: the aligned loss for those who live in Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from ..errors import LayersimError
from ..source import NO_LABEL
from .objective import Objective
from .settings import AlignedTraining
from .stream import Piece, open_stream


class AlignedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """`transformers.Trainer` with the losses of `AlignedTraining` in place of the model's own.

    The schedule follows `state.global_step`, which counts optimiser steps. Labels are those of Hugging Face's collators: at
    each position the token that stands there, which is shifted here for causal models; -100 where nothing is asked. Of
    `aligned`, everything that `TrainingArguments` says too (steps, lr, accumulation, ...) is left to them. Evaluation gives
    `eval_loss`, the last layer's.

    Args:
        *args: as of `Trainer`.
        aligned: objective, schedule, weights, norm, beta, kl, layers_per_step; default `AlignedTraining()`.
        layers: paths of the blocks, for layouts that are not known.
        unembed: paths of the final norm and the head, for layouts that are not known.
        **options: as of `Trainer`.

    Raises:
        LayersimError: the objective needs parameters of its own, or the model has no head that is known.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5.

    Example:
        >>> import tl_layersim as lsim
        >>> from transformers import TrainingArguments
        >>> model = lsim.demo_model()
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in [[0, 5, 6, 7], [0, 8, 9, 10]]]
        >>> quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        >>> arguments = TrainingArguments("unused", max_steps=1, **quiet)
        >>> lsim.AlignedTrainer(model, arguments, train_dataset=rows).train().global_step  # doctest: +ELLIPSIS
        {...}
        1
    """

    def __init__(
        self,
        *args: Any,
        aligned: AlignedTraining | None = None,
        layers: list[str] | None = None,
        unembed: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        settings = aligned or AlignedTraining()
        if settings.objective == "multi-head":
            raise LayersimError(
                "Heads of their own are parameters that the Trainer's model does not have.",
                given="objective='multi-head'",
                expected="'aligned', 'cosine-reg' or 'standard'",
                do="finetune_aligned(model, data, AlignedTraining(objective='multi-head'))",
            )
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self._objective = Objective(open_stream(inner, layers, unembed), settings)
        # The sum over answers is divided here by their number in the whole step, which Trainer counts if it may.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch: in training that of the schedule, in evaluation the last layer's."""
        stream = self._objective.stream
        given = dict(inputs)
        labels = given.pop("labels", None)
        main = next((given.pop(name) for name in ("input_ids", "pixel_values") if name in given), None)
        if labels is None or main is None:
            raise LayersimError(
                "A batch needs something to read and something to say.",
                given=f"a batch of {', '.join(inputs)}",
                expected="input_ids or pixel_values, and labels",
                do="DataCollatorForLanguageModeling(tokenizer, mlm=False), or a column `labels`",
            )
        mask = given.get("attention_mask")
        causal = stream.reads == "every" and labels.shape == main.shape and _shifts(stream.module)
        targets = shifted(labels) if causal else labels
        piece = Piece(main, given, targets, None if mask is None else mask.bool())
        if not model.training:
            with torch.no_grad():
                outputs = model(**{**inputs, "labels": None})
            whole = self._objective.stream.loss(piece, {stream.n_layers: 1.0}, True)
            loss = whole[0] / max(whole[1], 1)
            return (loss, outputs) if return_outputs else loss
        count: Any = int((targets != NO_LABEL).sum()) if num_items_in_batch is None else num_items_in_batch
        own = model is stream.module
        total = self._objective(piece, int(self.state.global_step), None if own else lambda: model(main, **_uncached(given)))
        loss = total / count
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return loss


def _uncached(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_cache": False, **options}


def _shifts(module: torch.nn.Module) -> bool:
    """Whether the model's own loss shifts labels: causal language models do, masked ones and token classifiers do not."""
    return "CausalLM" in type(module).__name__ or "LMHead" in type(module).__name__


def shifted(labels: Tensor) -> Tensor:
    """What should be said at each position, from what stands there; both `batch pos`."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], NO_LABEL)], 1)
