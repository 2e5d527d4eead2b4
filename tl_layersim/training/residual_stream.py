"""`ResidualStream`: the residual stream of a model in training, with gradients, and checks that the model can be trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..activations.block_call import as_positions
from ..architectures.output_heads import CLASSES_WITH_HEAD, is_detr
from ..core.errors import LayersimError
from ..remote.open import open_source
from ..sources.checks import lens_gap, need_stream, refuse_other_logits
from ..sources.hooked import HookedSource
from ..sources.hooks import eval_mode, every_module, on_tensor, temporary_hooks
from ..sources.identity import refuse_quantised
from ..sources.inputs import device_of, no_cache
from ..sources.model import Model
from ..sources.open import OpenedModel
from ..sources.source import refuse_inference_weights
from ..sources.split_model import logits_of, read_residuals
from ..stitching.stitched_model import StitchedSource
from .losses import positions_with_targets, summed_loss


def refuse_offloaded(module: torch.nn.Module) -> None:
    """Raise an error if the model has offloaded weights, which an optimiser cannot change.

    Raises:
        LayersimError: a weight is offloaded.
    """
    away = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if away:
        raise LayersimError(
            f"`model` has {len(away)} offloaded weights, such as {away[0]}, which cannot be trained. Load it without "
            "device_map=."
        )


def refuse_float16(model: Model) -> None:
    """Raise an error if the model is in float16, in which gradients below 6e-8 are 0.

    Raises:
        LayersimError: the weights are in float16.
    """
    if model.dtype == "torch.float16":
        raise LayersimError("`model` is in float16, in which small gradients are 0. Load it in float32 or bfloat16.")


def no_known_head(model: Model) -> LayersimError:
    """The error for a model without a known final norm and head."""
    return LayersimError(
        f"{model.name} has no known head, so its layers make no predictions to train. Load it by "
        f"{CLASSES_WITH_HEAD}, or open_model(model, unembed=[final norm, head])."
    )


def refuse_frozen_integers(model: Any, lora: Any) -> None:
    """Raise an error if a quantised model has no adapters, because only norms and embeddings would be trained.

    Args:
        model: the model.
        lora: the setting `lora`, whose adapters are merged into the weights, which are then rounded again.

    Raises:
        LayersimError: the model has quantised weights and no adapters of its own.
    """
    if lora is None and hasattr(model, "peft_config"):
        return
    with_lora = "" if lora is None else ", and LoRA adapters cannot be merged into them without rounding"
    refuse_quantised(
        model,
        f"`model` has quantised weights, which cannot be trained{with_lora}",
        do="peft.get_peft_model(model, peft.LoraConfig(...)) without lora=",
    )


@dataclass(frozen=True)
class TrainingBatch:
    """Inputs and targets of one forward pass in training.

    Attributes:
        main: token ids `batch pos`, or pixel values, features or embeddings.
        options: further arguments of the model's forward pass.
        targets: `batch pos`, or `batch` for a head that reads one position of a row; NO_LABEL for no target.
        attended: attention mask `batch pos`; None without padding.
        name: name of the argument that takes `main`; "" for the first one.
    """

    main: Tensor
    options: Mapping[str, Any]
    targets: Tensor
    attended: Tensor | None
    name: str = ""

    @property
    def first_row(self) -> TrainingBatch:
        """The first row as a batch."""
        return self.row(0)

    def row(self, number: int) -> TrainingBatch:
        """One row as a batch."""
        at, rows = slice(number, number + 1), len(self.main)
        # Some inputs are shared by all rows, such as one row of positions.
        cut = {n: v[at] if isinstance(v, Tensor) and v.dim() and len(v) == rows else v for n, v in self.options.items()}
        attended = None if self.attended is None else self.attended[at]
        return TrainingBatch(self.main[at], cut, self.targets[at], attended, self.name)

    def to(self, device: torch.device) -> TrainingBatch:
        """The batch on a device."""
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.options.items()}
        attended = None if self.attended is None else self.attended.to(device)
        return TrainingBatch(self.main.to(device), options, self.targets.to(device), attended, self.name)


class ResidualStream:
    """The residual stream, final norm and head of a model in this process, for training.

    Args:
        source: the source of the model.

    Raises:
        LayersimError: the model has no known head, or its blocks do not share one residual stream.
    """

    def __init__(self, source: HookedSource) -> None:
        head = source.model.head
        if head is None or source.unembed is None:
            raise no_known_head(source.model)
        need_stream(source.model, "Aligned training")
        self.source, self.unembed, self.reads = source, source.unembed, head.reads
        self.module, self.blocks = source.module, source.blocks
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            refuse_inference_weights(self.module)
            refuse_offloaded(self.module)
        self._top = source.module.get_submodule(head.norm or head.modules[0])

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.module)

    def call(self, batch: TrainingBatch) -> Any:
        """Run the model's own forward pass."""
        args, options = self.arguments(batch)
        return self.module(*args, **options)

    def arguments(self, batch: TrainingBatch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model's forward pass."""
        options, main = dict(batch.options), batch.main
        pad = self._pad
        if pad is not None and batch.attended is not None and not main.is_floating_point():
            main = torch.where(batch.attended, main, pad)
        options = {name: usable(value) for name, value in (no_cache(self.module) | options).items()}
        return ((), options | {batch.name: usable(main)}) if batch.name else ((usable(main),), options)

    @property
    def _pad(self) -> int | None:
        """The padding id. Hugging Face classifiers use it, not the mask, to find the last token of a row."""
        pad = getattr(getattr(self.module, "config", None), "pad_token_id", None)
        return pad if self.reads == "last" and isinstance(pad, int) and pad >= 0 else None

    def residuals(self, layers: Collection[int], run: Callable[[], Any], whole: bool = False) -> dict[int, Tensor]:
        """Residual stream `batch pos d_model` after each of the given layers, with gradients.

        Args:
            layers: layers, counted from 1.
            run: runs the forward pass.
            whole: whether the forward pass runs to its end, as wrappers for several processes need.
        """
        # A block that is computed again in the backward pass must not be left by an exception.
        recomputes = any(getattr(block, "gradient_checkpointing", False) and block.training for block in self.blocks)
        found = read_residuals(self.blocks, layers, run, whole, above=self._top if recomputes else None)
        if len(found) < len(set(layers)):
            raise LayersimError(
                f"The forward pass of {self.source.model.name} did not run its blocks {sorted(set(layers) - set(found))} as "
                "modules. Train the model before torch.compile, and without layer drop."
            )
        return {layer: as_positions(x) for layer, x in found.items()}

    def at_targets(
        self, batch: TrainingBatch, residuals: Mapping[int, Tensor], norm: bool | None
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Inputs of the head at positions with a target, `sample width`, for each layer; and the targets.

        Args:
            batch: inputs and targets.
            residuals: residual stream after each layer, `batch pos d_model`.
            norm: whether the final norm is applied below the last layer as well as at it; None for no norm at any layer.
        """
        pos = next(iter(residuals.values())).shape[1]
        index, targets = positions_with_targets(self.reads, batch.targets, self._read_from(batch), pos)
        read = {}
        for layer, x in residuals.items():
            normed, here = norm or (norm is not None and layer == self.n_layers), index.to(x.device)
            if self.unembed.pool is not None:
                rows = here // pos
                attended = torch.ones_like(x[..., 0], dtype=torch.bool) if batch.attended is None else batch.attended
                read[layer] = self.unembed.pooled(x.index_select(0, rows), attended.to(x.device)[rows], normed)
            else:
                x = x.flatten(0, 1).index_select(0, here)
                read[layer] = self.unembed.normed(x) if normed else x
        return read, targets

    def _read_from(self, batch: TrainingBatch) -> Tensor | None:
        """Mask `batch pos` of positions; a classifier reads the last of them in each row."""
        if self._pad is None or batch.main.is_floating_point():
            return batch.attended
        kept = batch.main != self._pad
        return kept if batch.attended is None else kept & batch.attended

    def loss(
        self,
        batch: TrainingBatch,
        terms: Mapping[int, float],
        norm: bool,
        run: Callable[[], Any] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, int]:
        """Weighted sum over layers of the cross-entropies, summed over targets; and the number of targets.

        Args:
            batch: inputs and targets.
            terms: weights by layer.
            norm: whether the final norm is applied below the last layer.
            run: runs the forward pass; None for the model's own.
            whole: see `residuals`.
        """
        residuals = self.residuals(terms, run or (lambda: self.call(batch)), whole)
        read, targets = self.at_targets(batch, residuals, norm)
        return self.weighted(read, targets, terms), len(targets)

    def weighted(self, read: Mapping[int, Tensor], targets: Tensor, terms: Mapping[int, float]) -> Tensor:
        """Weighted sum over layers of the summed cross-entropy of the head's inputs, see `at_targets`."""
        device = next(iter(read.values())).device
        # All layers in one call, so that one gradient of the head is held.
        x = torch.cat([read[layer] for layer in terms])
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weights = torch.tensor(list(terms.values()), dtype=wide, device=device).repeat_interleave(len(targets))
        return summed_loss(self.unembed, x, targets.to(device).repeat(len(terms)), weights)

    def check(self, batch: TrainingBatch) -> int:
        """Check on one row that final norm and head, applied to the last layer, give the model's logits.

        Returns:
            The number of logits.

        Raises:
            LayersimError: the logits differ.
        """
        batch = batch.first_row
        classes = 0

        def gap() -> Tensor:
            nonlocal classes
            seen: list[Tensor] = []
            with temporary_hooks() as handles, torch.no_grad(), eval_mode(self.module), self.source.settling():
                handles.append(on_tensor(self.blocks[-1], False, lambda output: seen.append(as_positions(output))))
                logits = logits_of(self.call(batch))
            classes = logits.shape[-1]
            # The forward pass may have shown that the modules are no blocks.
            need_stream(self.source.model, "Aligned training")
            if self.reads == "every":
                theirs = as_positions(logits)[0]
                ours = self.unembed(seen[-1][0])
            else:
                index, _ = positions_with_targets(
                    self.reads, torch.zeros(1, dtype=torch.int64), self._read_from(batch), seen[-1].shape[1]
                )
                theirs = logits[0]
                if self.unembed.pool is not None:
                    attended = torch.ones_like(seen[-1][..., 0], dtype=torch.bool) if batch.attended is None else batch.attended
                    ours = self.unembed(self.unembed.pooled(seen[-1], attended)[0], False)
                else:
                    ours = self.unembed(seen[-1][0, int(index)])
            if ours.shape != theirs.shape:
                return torch.tensor([torch.inf, torch.nan], dtype=torch.float64)
            kept = slice(None) if batch.attended is None or self.reads != "every" else batch.attended[0]
            ours, theirs = ours.detach().double().cpu()[kept], theirs.double().cpu()[kept]
            return torch.stack([(ours - theirs).norm(), theirs.norm()])

        with torch.no_grad():
            found = lens_gap(self.source.model, gap)
        refuse_other_logits(found, self.source.model)
        return classes


def usable(value: Any) -> Any:
    """An input that autograd can save: tensors from `torch.inference_mode()` are copied."""
    unusable = isinstance(value, Tensor) and value.is_inference() and not torch.is_inference_mode_enabled()
    return value.clone() if unusable else value


# By model, the paths whose head was checked against the model's logits.
_CHECKED: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


def check_once(stream: ResidualStream, batch: TrainingBatch, paths: Any) -> None:
    """Run `ResidualStream.check` once for each model and its module paths."""
    known = _CHECKED.setdefault(stream.module, set())
    if paths not in known:
        stream.check(batch)
        known.add(paths)


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """A context that sets the model to training mode, and restores each module's mode at the end."""
    before = {part: part.training for part in every_module(module)}
    try:
        for part in before:
            part.training = True
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


def open_residual_stream(model: Any, either_stack: bool = False) -> ResidualStream:
    """The `ResidualStream` of a model in this process.

    Args:
        model: the model, or an `OpenedModel`.
        either_stack: whether the caller passes the inputs of both stacks of an encoder-decoder, so that the decoder can be
            trained.

    Raises:
        LayersimError: the model cannot be trained, because its modules are not in this process.
    """
    opened = OpenedModel.of(model)
    if is_detr(getattr(opened.model, "config", None)):
        raise LayersimError(
            "`model` is a DETR, whose aligned training is transformers' auxiliary loss: model.config.auxiliary_loss = True, "
            "and a Trainer (docs/detection.md)."
        )
    source = open_source(opened, either_stack=either_stack)
    if not isinstance(source, HookedSource) or isinstance(source, StitchedSource):
        raise LayersimError(
            f"`model` is {source.model.source}; fine-tuning needs a single model whose modules run in this process. For an "
            "nnsight model, pass its `_model`, or use train_adapters."
        )
    return ResidualStream(source)
