"""`aligned_loss`: the weighted sum of all layers' cross-entropies on a batch, for a custom training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.batches import next_tokens, refuse_other_ids
from ..data.labels import NO_LABEL, as_labels
from ..data.padding import as_mask
from ..sources.open import OpenedModel
from .losses import Weights, layer_weights
from .residual_stream import TrainingBatch, check_once, open_residual_stream

Norm = Literal["final", "none"]


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
    r"""The aligned loss of a batch, for a custom training loop: the weighted sum of all layers' cross-entropies.

    $$\sum_{l=1}^{L} w_l \, CE\big(W \, \mathrm{norm}(x^l), y\big)$$

    Each cross-entropy is a mean over positions with a target. Logits are computed in chunks, and the model's own logits are not
    computed.

    Args:
        model: HookedTransformer, TransformerBridge or Hugging Face model, in training or evaluation mode, or the result of
            `open_model`, whose `verify` has no effect here.
        tokens: `batch pos`, token ids; of a vision model its `pixel_values`, `batch channel height width`.
        labels: the target of each position, `batch pos`, or `batch` for a classifier; -100 for no target. Labels are not
            shifted. Default: the next token, if both positions are attended.
        weights: "linear", w_l = 2 l / (L (L + 1)); "uniform"; or one number for each layer, which must sum to 1.
        norm: "final" applies the model's final norm at every layer, "none" only at the last.
        attention_mask: `batch pos`, 0 at padding.
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
    options = dict(inputs or {}) | ({} if attention_mask is None else {"attention_mask": attention_mask})
    batch = TrainingBatch(tokens, options, targets, attended)
    terms = {layer: weight for layer, weight in enumerate(layer_weights(weights, stream.n_layers), 1) if weight}
    check_once(stream, batch, (tuple(opened.layers or ()), tuple(opened.unembed or ())))
    total, count = stream.loss(batch, terms, norm == "final")
    if not count:
        raise LayersimError(
            "`labels` has no target in this batch, so its mean loss is not defined."
            if labels is not None
            else "`tokens` has no position that is followed by an attended token, so there is no next token to predict."
        )
    return total / count


def _targets(reads: str, tokens: Tensor, labels: Any, attended: Tensor | None) -> Tensor:
    """The labels as a tensor with the shape of the head's predictions, on the device of the tokens."""
    if labels is None:
        if reads != "every" or tokens.is_floating_point():
            raise LayersimError("`labels` is None; a classifier needs one class for each row.")
        return next_tokens(tokens, torch.ones_like(tokens, dtype=torch.bool) if attended is None else attended)
    table = as_labels(labels)
    expected = tuple(tokens.shape) if reads == "every" else (len(tokens),)
    if isinstance(table, str) or tuple(table.shape) != expected:
        raise LayersimError(f"`labels` is {brief(labels)}; it must have the shape of the head's predictions, {expected}.")
    targets = table.to(tokens.device).long()
    known = targets != NO_LABEL
    if targets.shape == tokens.shape and int(known.sum()) > 2 and bool((targets == tokens)[known].all()):
        raise LayersimError(
            "`labels` are the input tokens at the same positions, not the targets: shift them, or leave `labels` out for "
            "next tokens."
        )
    return targets
