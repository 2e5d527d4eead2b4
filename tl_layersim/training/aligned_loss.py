"""The aligned loss, for any training loop: the cross-entropy of every layer's logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.typed import typed
from ..data.batches import next_tokens
from ..data.labels import NO_LABEL, as_labels
from .losses import Weights, attended_count, layer_weights
from .residual_stream import TrainingBatch, check_once, open_residual_stream

Norm = Literal["final", "none"]


@typed
def aligned_loss(
    model: Any,
    tokens: Tensor,
    labels: Any = None,
    *,
    weights: Weights = "linear",
    norm: Norm = "final",
    attention_mask: Tensor | None = None,
    inputs: Mapping[str, Any] | None = None,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
) -> Tensor:
    r"""The aligned loss of a batch, for any training loop: every layer is asked what the last one is asked.

    $$\sum_{l=1}^{L} w_l \, CE\big(W \, \mathrm{norm}(x^l), y\big)$$

    The mean is over positions with an answer. No more than some thousands of rows of logits are held at once, and the model's
    own logits are not computed.

    Args:
        model: HookedTransformer, TransformerBridge or Hugging Face model, in whatever mode it is in.
        tokens: `batch pos`, token ids; of a vision model its `pixel_values`.
        labels: what should be said at each position, `batch pos`, or `batch` for a classifier; -100 where nothing is asked.
            Nothing is shifted. Default: the token that follows, where both are attended to.
        weights: "linear", w_l = 2 l / (L (L + 1)); "uniform"; or one number for each layer, which must sum to 1.
        norm: "final" applies the model's final norm at every layer, "none" at the last alone.
        attention_mask: `batch pos`, 0 at padding.
        inputs: whatever else the model's forward pass takes, by name.
        layers: paths of the blocks, for layouts that are not known.
        unembed: paths of the final norm and the head, for layouts that are not known.

    Returns:
        A scalar in nats, with its gradient.

    Raises:
        LayersimError: the model has no head that is known, or the labels do not fit.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5; w_l from appendix B.3.

    Example:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> loss = lsim.aligned_loss(model, model.tokenizer(lsim.demo_text()[0], return_tensors="pt").input_ids)
        >>> loss.backward()
    """
    stream = open_residual_stream(model, layers, unembed)
    attended = None if attention_mask is None else attention_mask.bool()
    targets = _targets(stream.reads, tokens, labels, attended)
    options = dict(inputs or {}) | ({} if attention_mask is None else {"attention_mask": attention_mask})
    piece = TrainingBatch(tokens, options, targets, attended)
    terms = {layer: weight for layer, weight in enumerate(layer_weights(weights, stream.n_layers), 1) if weight}
    check_once(stream, piece, (tuple(layers or ()), tuple(unembed or ())))
    total, count = stream.loss(piece, terms, norm == "final")
    if not count:
        raise LayersimError(
            "`labels` has no target in this batch, so its mean loss is not defined."
            if labels is not None
            else "`tokens` has no position that is followed by an attended token, so there is no next token to predict.",
            given=f"tokens of shape {tuple(tokens.shape)}, "
            + (f"labels that are all {NO_LABEL}" if labels is not None else f"{attended_count(tokens, attended)} attended"),
            expected="at least one position with a target",
            do="skip this batch: if (labels != -100).any()"
            if labels is not None
            else "rows of two or more tokens, and an attention_mask with 1 at tokens; leave other batches out",
        )
    return total / count


def _targets(reads: str, tokens: Tensor, labels: Any, attended: Tensor | None) -> Tensor:
    """The labels as a tensor of the shape that the head answers in, on the tokens' device."""
    if tokens.dim() < 2:
        raise LayersimError(
            "A batch has rows.", given=f"tokens of shape {tuple(tokens.shape)}", expected="batch pos", do="tokens[None]"
        )
    if labels is None:
        if reads != "every" or tokens.is_floating_point():
            raise LayersimError(
                "A classifier is asked for labels.",
                given="no labels",
                expected="a tensor of one class for each row",
                do="aligned_loss(model, tokens, labels)",
            )
        return next_tokens(tokens, torch.ones_like(tokens, dtype=torch.bool) if attended is None else attended)
    found = as_labels(labels)
    expected = tuple(tokens.shape) if reads == "every" else (len(tokens),)
    if isinstance(found, str) or tuple(found.shape) != expected:
        raise LayersimError(
            "The labels do not fit what the head says.",
            given=found if isinstance(found, str) else f"labels of shape {tuple(found.shape)}",
            expected=f"a table of shape {expected}: one for each {'position' if reads == 'every' else 'row'}",
            do="labels=None for the next token" if reads == "every" else "labels of shape (batch,)",
        )
    found = found.to(tokens.device).long()
    known = found != NO_LABEL
    if found.shape == tokens.shape and int(known.sum()) > 2 and bool((found == tokens)[known].all()):
        raise LayersimError(
            "These labels are the tokens themselves, at the same positions.",
            given=f"{int(known.sum())} labels, each equal to its own token",
            expected="at each position what the model should say there; models in transformers shift labels, here nothing is "
            "shifted",
            do="labels=None for the next token",
        )
    return found
