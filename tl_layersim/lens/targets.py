"""Targets: the token or class that a model should predict at each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..activations.view import targets, tokens_alone
from ..architectures.output_heads import is_detr
from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.labels import NO_LABEL, as_labels
from ..data.reader import labelled_without_tokens
from ..sources.model_description import ModelDescription


def answers(batch: Batch, labels: str | Tensor, model: ModelDescription) -> Tensor:
    """The targets of a batch (`batch pos`; `batch` for a row classifier). A missing target is NO_LABEL.

    Raises:
        LayersimError: the data has positions="mean".
    """
    if batch.pooled:
        raise LayersimError("`positions` is 'mean', but each target belongs to one position. Use positions='all'.")
    ids = torch.full_like(batch.tokens, NO_LABEL)
    ids[batch.counted] = targets(tokens_alone(batch), labels).cpu()
    if model.head is None or model.head.reads == "every":
        return ids
    # All positions of a row have the class of the row.
    first = (ids != NO_LABEL).int().argmax(1, keepdim=True)
    return ids.gather(1, first)[:, 0]


def gives_classes(model: ModelDescription) -> bool:
    """Whether the model's head predicts classes of rows or positions, not tokens."""
    return model.head is not None and model.head.classifies


def usual_labels(labels: Any, models: Sequence[tuple[ModelDescription, Any]], data: Any) -> str | Tensor:
    """Check the argument `labels`, and replace None by the default for the models' heads.

    Args:
        labels: the argument as the user passed it; None for the next token, or for labels from the data if the models are
            classifiers or the rows have no tokens.
        models: the description of each model, and its module.
        data: the argument as the user passed it.

    Raises:
        LayersimError: the models mix classifiers and language models, or a masked language model has no labels.
    """
    kinds = {gives_classes(model) for model, _ in models}
    if len(kinds) > 1:
        raise LayersimError(
            "The models must be of one kind, but are a mix of language models and classifiers: "
            f"{', '.join(model.source for model, _ in models)}."
        )
    masked = next((model for model, module in models if "MaskedLM" in type(module).__name__), None)
    if labels is None and masked is not None:
        raise LayersimError(
            f"`labels` is None, but {masked.name} is a masked language model, which does not predict the next token. Pass "
            f"labels='data' with a column `labels` that is {NO_LABEL} at unmasked positions."
        )
    if labels is not None:
        return as_labels(labels)
    # The labels of a DETR are objects, which are no targets of its queries one by one.
    has_detr = any(is_detr(getattr(module, "config", None)) for _, module in models)
    has_labels = not has_detr and any(labelled_without_tokens(data, model) for model, _ in models)
    return "data" if kinds == {True} or has_labels else "next_token"


def check_batch_labels(labels: str | Tensor, batch: Batch, model: ModelDescription | None = None) -> None:
    """Raise an error if a batch has no labels, or labels that cannot be targets.

    Args:
        labels: output of `as_labels`.
        batch: the next batch of the model.
        model: the model if labels are targets of its head; else None.

    Raises:
        LayersimError: labels are missing, equal the tokens themselves, or are one class per row for a head of tokens.
    """
    if isinstance(labels, Tensor):
        row, column = batch.sources
        if bool((row < 0).any()):
            raise LayersimError(
                f"`labels` is a tensor of shape {tuple(labels.shape)}, which cannot be combined with pack=True: a packed row "
                "joins several texts."
            )
        row_count = int(row.max()) + 1
        pos = int(column[batch.attention].max()) + 1
        labels_positions = labels.dim() == 2
        if row_count > len(labels) or (labels_positions and pos > labels.shape[1]):
            positions = f" and their {pos} positions" if labels_positions else ""
            raise LayersimError(
                f"`labels` has shape {tuple(labels.shape)}; it must have an entry for each of the {row_count} rows of the data"
                f"{positions}."
            )
        # Padding has columns behind the labels.
        column = column.clamp(max=labels.shape[-1] - 1)
        labels_of_batch = labels[row].expand_as(row) if labels.dim() == 1 else labels[row, column]
    elif labels == "data":
        if batch.labels is None:
            raise LayersimError(
                "`data` has no labels; labels='data' needs a column `labels` or `label` of integers, or "
                "from_vectors(labels=...). Rows have no labels if pack=True."
            )
        labels_of_batch = batch.labels
    else:
        if labels == "next_token" and not batch.has_tokens:
            remedy = "labels='data', with a column `label`, or labels=tensor"
            if model is not None and "Detr" in model.source:
                remedy = "labels='none', or detection_by_layer(model, data)"
            raise LayersimError(
                f"`labels` is 'next_token', but the rows have {', '.join(batch.inputs)} in place of token ids. Use {remedy}."
            )
        return
    labels_of_batch = labels_of_batch.cpu()
    is_labelled = batch.counted & (labels_of_batch != NO_LABEL)
    head = None if model is None else model.head
    if batch.pooled or (head is not None and head.reads == "rows"):
        for row_labels, row_counted in zip(labels_of_batch, batch.counted, strict=True):
            # NaN is a missing score, and differs from itself.
            values = row_labels[row_counted].nan_to_num(torch.inf)
            if not torch.equal(values, values[:1].expand_as(values)):
                reason = (
                    "with positions='mean' a row is one sample" if batch.pooled else "the head predicts one class for a row"
                )
                raise LayersimError(f"`labels` differ within a row; a row must have a single label, because {reason}.")
    if head is not None and not head.classifies:
        # One token cannot be the target at every position of a row.
        rows_of_labels: list[Tensor] = []
        for row_labels, row_labelled in zip(labels_of_batch, is_labelled, strict=True):
            if int(row_labelled.sum()) > 2:
                rows_of_labels.append(row_labels[row_labelled])
        if len(rows_of_labels) > 1 and all(bool((values == values[0]).all()) for values in rows_of_labels):
            raise LayersimError(
                f"`labels` are equal at all positions of each of {len(rows_of_labels)} rows, but the head predicts a token at "
                "every position. Use a label for each position, or AutoModelForSequenceClassification."
            )
    labelled_count = int(is_labelled.sum())
    if batch.has_tokens and labelled_count > 2 and bool((labels_of_batch == batch.tokens)[is_labelled].all()):
        raise LayersimError(
            f"`labels` equal the input tokens at all {labelled_count} labelled positions; each label must be the target of "
            "its position. Use labels='next_token'."
        )
