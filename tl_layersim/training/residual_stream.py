"""`ResidualStream`: the residual stream of a model in training, and the aligned loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor, nn

from ..activations.block_call import as_positions
from ..architectures.output_heads import is_detr
from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.batches import next_tokens, refuse_other_ids
from ..data.labels import NO_LABEL, as_labels
from ..data.padding_masks import as_mask
from ..data.right_padding import RightPadding
from ..remote.open_model import open_source
from ..sources.activation_checks import need_known_norm, need_stream, refuse_other_logits
from ..sources.forward_arguments import device_of, padding_id, with_padding_ids
from ..sources.hooked_module import HookedSource
from ..sources.hooks import eval_mode
from ..sources.model_description import ModelDescription
from ..sources.open_local import OpenedModel
from ..sources.partial_forward import logits_of, no_known_head, read_residuals
from ..sources.source import refuse_inference_weights
from ..stitching.stitched_model import StitchedSource
from .losses import Norm, Weights, layer_weights, positions_with_targets, summed_loss


def refuse_float16(model: ModelDescription) -> None:
    """Raise an error if the model is in float16, in which small gradients are 0.

    Raises:
        LayersimError: the weights are in float16.
    """
    if model.dtype == "torch.float16":
        raise LayersimError("`model` is in float16, in which small gradients are 0. Load it in float32 or bfloat16.")


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

    def row(self, number: int) -> TrainingBatch:
        """A batch with one row of this batch."""
        row = slice(number, number + 1)
        options = {}
        for name, value in self.options.items():
            # Some inputs are shared by all rows, such as one row of positions.
            by_row = isinstance(value, Tensor) and value.dim() and len(value) == len(self.main)
            options[name] = value[row] if by_row else value
        attended = None if self.attended is None else self.attended[row]
        return TrainingBatch(self.main[row], options, self.targets[row], attended, self.name)

    def to(self, device: torch.device) -> TrainingBatch:
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.options.items()}
        attended = None if self.attended is None else self.attended.to(device)
        return TrainingBatch(self.main.to(device), options, self.targets.to(device), attended, self.name)

    def right_padded(self) -> TrainingBatch:
        """This batch with the padding of its rows on the right, as data is read for `finetune_aligned`."""
        order = RightPadding(self.attended)
        if self.attended is None or not order.moves:
            return self
        # A head that reads one position of a row has one target for the row, which does not move.
        targets = order.moved(self.targets) if self.targets.shape == self.attended.shape else self.targets
        main = order.moved(self.main)
        options = order.moved_inputs(self.options)
        return TrainingBatch(main, options, targets, order.moved(self.attended), self.name)


class ResidualStream:
    """The residual stream, final norm and head of a model in training.

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
        self.source = source
        self.unembed = source.unembed
        self.reads = head.reads
        self.module = source.module
        self.blocks = source.blocks
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            refuse_inference_weights(self.module)
            offloaded = [name for name, parameter in self.module.named_parameters() if parameter.is_meta]
            if offloaded:
                raise LayersimError(
                    f"`model` has {len(offloaded)} offloaded weights, such as {offloaded[0]}, which cannot be trained. Load it "
                    "without device_map=."
                )
        self._top = source.module.get_submodule(head.norm or head.modules[0])

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        return device_of(self.module)

    def call(self, batch: TrainingBatch) -> Any:
        args, options = self.arguments(batch)
        return self.module(*args, **options)

    def arguments(self, batch: TrainingBatch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model's forward pass."""
        main = batch.main
        if not main.is_floating_point():
            main = with_padding_ids(self.module, main, batch.attended)
        options = self.source.anatomy.without_cache | dict(batch.options)
        options = {name: usable(value) for name, value in options.items()}
        if batch.name:
            return (), options | {batch.name: usable(main)}
        return (usable(main),), options

    @property
    def _pad(self) -> int | None:
        """The padding id, by which Hugging Face classifiers find the last token of a row."""
        return padding_id(self.module) if self.reads == "last" else None

    def residuals(
        self, batch: TrainingBatch, layers: Collection[int], run: Callable[[], Any] | None = None
    ) -> dict[int, Tensor]:
        """Residual stream after the given layers (`batch pos d_model`), with gradients.

        Args:
            batch: inputs and targets.
            layers: layers, counted from 1.
            run: runs the whole forward pass, as wrappers for several processes need; None for the model's own, which ends at
                the highest layer.
        """
        # Gradient checkpointing does not allow an exception inside a block.
        recomputes = any(getattr(block, "gradient_checkpointing", False) and block.training for block in self.blocks)
        above = self._top if recomputes else None
        call = run or (lambda: self.call(batch))
        residuals = read_residuals(self.blocks, layers, call, whole=run is not None, above=above)
        if len(residuals) < len(set(layers)):
            raise LayersimError(
                f"The forward pass of {self.source.model.name} did not call the modules of layers "
                f"{sorted(set(layers) - set(residuals))}. Train the model without torch.compile and without layer drop."
            )
        return {layer: as_positions(x) for layer, x in residuals.items()}

    def at_targets(
        self, batch: TrainingBatch, residuals: Mapping[int, Tensor], norm: bool | None
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Select the inputs of the head at the positions with a target.

        Args:
            batch: inputs and targets.
            residuals: residual stream after each layer, `batch pos d_model`.
            norm: whether the final norm is applied below the last layer as well as at it; None for no norm at any layer.

        Returns:
            For each layer, the inputs of the head, `sample width`; and the targets, `sample`.
        """
        if norm is False:
            need_known_norm(self.source.model)
        pos = next(iter(residuals.values())).shape[1]
        index, targets = positions_with_targets(self.reads, batch.targets, self._attended(batch), pos)
        head_inputs = {}
        for layer, x in residuals.items():
            normed = norm or (norm is not None and layer == self.n_layers)
            # Blocks of one model may be on several devices.
            index_here = index.to(x.device)
            if self.unembed.pool is not None:
                rows = index_here // pos
                attended = torch.ones_like(x[..., 0], dtype=torch.bool) if batch.attended is None else batch.attended
                head_inputs[layer] = self.unembed.pooled(x.index_select(0, rows), attended.to(x.device)[rows], normed)
            else:
                x = x.flatten(0, 1).index_select(0, index_here)
                head_inputs[layer] = self.unembed.normed(x) if normed else x
        return head_inputs, targets

    def _attended(self, batch: TrainingBatch) -> Tensor | None:
        """Attention mask (`batch pos`), False at padding. A classifier reads the last True position of a row."""
        if self._pad is None or batch.main.is_floating_point():
            return batch.attended
        is_token = batch.main != self._pad
        return is_token if batch.attended is None else is_token & batch.attended

    def loss(
        self,
        batch: TrainingBatch,
        terms: Mapping[int, float],
        norm: bool,
        run: Callable[[], Any] | None = None,
    ) -> tuple[Tensor, int]:
        """Weighted sum of cross-entropies over targets and layers. Returns the sum and the number of targets.

        Args:
            batch: inputs and targets.
            terms: weights by layer.
            norm: whether the final norm is applied below the last layer.
            run: see `residuals`.
        """
        head_inputs, targets = self.at_targets(batch, self.residuals(batch, terms, run), norm)
        return self.weighted(head_inputs, targets, terms), len(targets)

    def weighted(self, head_inputs: Mapping[int, Tensor], targets: Tensor, terms: Mapping[int, float]) -> Tensor:
        """Weighted sum of cross-entropies over targets and layers, given the head's inputs by layer."""
        device = next(iter(head_inputs.values())).device
        # All layers in one call, so that one gradient of the head is held.
        x = torch.cat([head_inputs[layer] for layer in terms])
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weights = torch.tensor(list(terms.values()), dtype=wide, device=device).repeat_interleave(len(targets))
        return summed_loss(self.unembed, x, targets.to(device).repeat(len(terms)), weights)

    def check(self, batch: TrainingBatch) -> int:
        """Raise an error if final norm and head do not give the model's own logits.

        Returns:
            The number of logits.

        Raises:
            LayersimError: the logits differ.
        """
        batch = batch.row(0)
        batch = replace(batch, targets=torch.zeros_like(batch.targets))
        classes = 0

        def gap() -> Tensor:
            nonlocal classes
            outputs: list[Any] = []
            with eval_mode(self.module), self.source.settling():
                run = partial(self.residuals, batch, [self.n_layers], lambda: outputs.append(self.call(batch)))
                residuals = self.source.watched(run).output
            logits = logits_of(outputs[0])
            classes = logits.shape[-1]
            # The forward pass may have shown that the modules are no blocks.
            need_stream(self.source.model, "Aligned training")
            head_inputs, _ = self.at_targets(batch, residuals, True)
            lens_logits = self.unembed(head_inputs[self.n_layers], False)
            if self.reads == "every":
                logits = as_positions(logits)[0]
            if lens_logits.shape != logits.shape:
                return torch.tensor([torch.inf, torch.nan], dtype=torch.float64)
            positions = slice(None) if batch.attended is None or self.reads != "every" else batch.attended[0]
            lens_logits = lens_logits.detach().double().cpu()[positions]
            logits = logits.double().cpu()[positions]
            return torch.stack([(lens_logits - logits).norm(), logits.norm()])

        with torch.no_grad():
            refuse_other_logits(gap, self.source.model)
        return classes


def usable(value: Any) -> Any:
    """Clone a tensor made in `torch.inference_mode()`, so that autograd can save it. Other values are returned as they are."""
    unusable = isinstance(value, Tensor) and value.is_inference() and not torch.is_inference_mode_enabled()
    return value.clone() if unusable else value


# For each model, the paths of blocks and head that have been checked against its logits.
_CHECKED: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


def open_residual_stream(model: Any, either_stack: bool = False) -> ResidualStream:
    """`ResidualStream` of a model that is to be trained.

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
            "`model` is a DETR, which needs the auxiliary loss of transformers and cannot be trained here. Set "
            "model.config.auxiliary_loss = True and use transformers' Trainer, see docs/detection.md."
        )
    source = open_source(opened, either_stack=either_stack)
    if not isinstance(source, HookedSource) or isinstance(source, StitchedSource):
        raise LayersimError(
            f"`model` is {source.model.source}; it must be a single model in this process. For an nnsight model, use "
            "train_adapters, or pass model._model."
        )
    return ResidualStream(source)


@typed
def aligned_loss(
    model: Any,
    tokens: Integer[Tensor, "batch pos"] | Float[Tensor, "batch channel height width"],
    labels: Any = None,
    *,
    weights: Weights = "linear",
    norm: Norm = "final",
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Tensor:
    r"""The aligned loss of a batch, for a custom training loop.

    $$\sum_{l=1}^{L} w_l \, CE\big(W \, \mathrm{norm}(x^l), y\big)$$

    Each cross-entropy is a mean over positions with a target. Logits are computed in chunks, and the model's own logits are not
    computed.

    Args:
        model: HookedTransformer, TransformerBridge or Hugging Face model, in training or evaluation mode, or the result of
            `open_model`, whose `verify` has no effect here.
        tokens: `batch pos`, token ids; of a vision model its `pixel_values`, `batch channel height width`.
        labels: the target of each position, `batch pos`, or `batch` for a classifier; -100 for no target. Labels are not
            shifted, and do not count at padding. Default: the next token, if both positions are attended.
        weights: "linear", w_l = 2 l / (L (L + 1)); "uniform"; or one number for each layer, which must sum to 1.
        norm: "final" applies the model's final norm at every layer, "none" only at the last.
        attention_mask: `batch pos`, 0 at padding, which may be on either side.
        inputs: further keyword arguments of the model's forward pass.

    Returns:
        A scalar in nats, with its gradient.

    Raises:
        LayersimError: the model has no known head, `tokens` or `attention_mask` has a wrong shape, `tokens` is empty or has ids
            outside the vocabulary, or the labels do not match the predictions.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5; w_l from appendix B.3.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> loss = lsim.training.aligned_loss(model, model.tokenizer(lsim.demo_text()[0], return_tensors="pt").input_ids)
        >>> loss.backward()
    """
    opened = replace(OpenedModel.of(model), verify=None)
    stream = open_residual_stream(opened)
    if not tokens.is_floating_point():
        refuse_other_ids(tokens, stream.source.model, "tokens")
    attended = None if attention_mask is None else as_mask(attention_mask).to(tokens.device)
    targets = _targets(stream.reads, tokens, labels, attended)
    options = dict(inputs or {})
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    batch = TrainingBatch(tokens, options, targets, attended).right_padded()
    terms = {layer: weight for layer, weight in enumerate(layer_weights(weights, stream.n_layers), 1) if weight}
    paths = (tuple(opened.layers or ()), tuple(opened.unembed or ()))
    checked_paths = _CHECKED.setdefault(stream.module, set())
    if paths not in checked_paths:
        stream.check(batch)
        checked_paths.add(paths)
    total, count = stream.loss(batch, terms, norm == "final")
    if not count:
        raise LayersimError("`labels` has no target." if labels is not None else "`tokens` has no next token to predict.")
    return total / count


def _targets(reads: str, tokens: Tensor, labels: Any, attended: Tensor | None) -> Tensor:
    """Targets of a batch, in the shape of the head's predictions. Without labels, the next tokens."""
    if labels is None:
        if reads != "every" or tokens.is_floating_point():
            raise LayersimError("`labels` is None; a classifier needs one class for each row.")
        return next_tokens(tokens, torch.ones_like(tokens, dtype=torch.bool) if attended is None else attended)
    table = as_labels(labels)
    expected = tuple(tokens.shape) if reads == "every" else (len(tokens),)
    if isinstance(table, str) or tuple(table.shape) != expected:
        raise LayersimError(f"`labels` is {brief(labels)}; it must have the shape of the head's predictions, {expected}.")
    targets = table.to(tokens.device).long()
    has_target = targets != NO_LABEL
    if targets.shape == tokens.shape and int(has_target.sum()) > 2 and bool((targets == tokens)[has_target].all()):
        raise LayersimError(
            "`labels` equal the input tokens at the same positions. Shift the labels, or leave out `labels` for next tokens."
        )
    return targets
