"""Targets: the token or class that a model should predict at each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.labels import NO_LABEL, as_labels
from .model_info import Model
from .unembed import CLASSIFIERS
from .view import View, tokens_alone


def targets(view: View, labels: str | Tensor) -> Tensor:
    """`token`: the right answer at each position, NO_LABEL where there is none. Travels with the kernels that call it."""
    if isinstance(labels, Tensor):
        assert view.row is not None
        assert view.column is not None
        labels = labels.long().to(view.row.device)
        return labels[view.row] if labels.dim() == 1 else labels[view.row, view.column]
    if labels == "data":
        assert view.labels is not None
        return view.labels
    if view.next_token is not None:
        return view.next_token
    # A source that says nothing else: the next counted token, where it is the next position of the same row.
    following = torch.full_like(view.tokens, NO_LABEL)
    pair = (view.sequence[1:] == view.sequence[:-1]) & (view.position[1:] == view.position[:-1] + 1)
    following[:-1] = torch.where(pair, view.tokens[1:], NO_LABEL)
    return following


def answers(batch: Batch, labels: str | Tensor, model: Model) -> Tensor:
    """What a model ought to say: `batch pos`, or `batch` of a classifier; NO_LABEL where nothing is asked."""
    found = torch.full_like(batch.tokens, NO_LABEL)
    found[batch.counted] = targets(tokens_alone(batch), labels).cpu()
    if model.head is None or model.head.reads == "every":
        return found
    # A row's class stands at each of its positions.
    first = (found != NO_LABEL).int().argmax(1, keepdim=True)
    return found.gather(1, first)[:, 0]


def usual_labels(labels: Any, models: Sequence[tuple[Model, Any]]) -> str | Tensor:
    """What models ought to say: as the user wants it, or by their heads.

    Args:
        labels: as the user hands them over, None for what the heads are made for.
        models: what is known of each, and its module.

    Raises:
        LayersimError: they do not answer one question, or one that nobody can guess.
    """
    heads = [model.head for model, _ in models]
    kinds = {head is not None and (head.reads != "every" or head.parts[-1] in CLASSIFIERS) for head in heads}
    if len(kinds) > 1:
        raise LayersimError(
            "Some of these models are language models and some are classifiers.",
            given=", ".join(model.source for model, _ in models),
            expected="models that answer the same question",
            do="one call for the language models, and one for the classifiers",
        )
    masked = next((model for model, module in models if "MaskedLM" in type(module).__name__), None)
    if labels is None and masked is not None:
        raise LayersimError(
            f"{masked.name} is a masked language model: it sees the next token, and is not there to predict it.",
            given="labels=None",
            expected="what it ought to say where, and nothing elsewhere",
            do=f"labels='data', with a column of {NO_LABEL} but where a token is masked",
        )
    return as_labels(("data" if kinds == {True} else "next_token") if labels is None else labels)


def check_batch_labels(labels: str | Tensor, batch: Batch, model: Model | None = None) -> None:
    """Refuse a batch for which there are no labels, or whose labels are plainly of another convention.

    Args:
        labels: as `as_labels` gives them.
        batch: what the model is about to read.
        model: where labels are compared with what its head says.
    """
    if isinstance(labels, Tensor):
        row, column = batch.sources
        if bool((row < 0).any()):
            raise LayersimError(
                "Texts that are joined have no row of their own.",
                given="labels by row, and pack=True",
                expected="a row for each text",
                do="pack=False",
            )
        rows, pos = int(row.max()) + 1, int(column[batch.attention].max()) + 1
        if rows > len(labels) or (labels.dim() == 2 and pos > labels.shape[1]):
            raise LayersimError(
                "There are fewer labels than the data has rows or positions.",
                given=f"labels of shape {tuple(labels.shape)}",
                expected=f"at least {rows} rows" + (f" of {pos} positions" if labels.dim() == 2 else ""),
                do="one row of labels for each row of the data, as long as it; or labels='data', with labels beside the data",
            )
        column = column.clamp(max=labels.shape[-1] - 1)
        found = labels[row].expand_as(row) if labels.dim() == 1 else labels[row, column]
    elif labels == "data":
        if batch.labels is None:
            raise LayersimError(
                "The data has no labels.",
                given="labels='data' and data without them, or texts that pack=True joins",
                expected="a column `labels` or `label` of whole numbers beside the tokens or texts",
                do="{'input_ids': tokens, 'labels': labels}, or labels=tensor",
            )
        found = batch.labels
    else:
        return
    counted = batch.counted & (found.cpu() != NO_LABEL)
    if model is not None and model.head is not None and model.head.reads == "every" and model.head.parts[-1] not in CLASSIFIERS:
        # One and the same token cannot be what should be said at every position of a row.
        classes = [labels_of[own] for labels_of, own in zip(found.cpu(), counted, strict=True) if int(own.sum()) > 2]
        if len(classes) > 1 and all(bool((row == row[0]).all()) for row in classes):
            raise LayersimError(
                "These labels are one class for a whole row, and the head says a token at every position.",
                given=f"{len(classes)} rows of one label each",
                expected=f"a label for each position, {NO_LABEL} where there is none, or a model with a classifier head",
                do="AutoModelForSequenceClassification; or NeuralCollapse(labels=...), which takes classes of rows",
            )
    if int(counted.sum()) > 2 and bool((found.cpu() == batch.tokens)[counted].all()):
        raise LayersimError(
            "These labels are the tokens themselves, at the same positions.",
            given=f"{int(counted.sum())} labels in a batch, each equal to its own token",
            expected="at each position what the model should say there; causal models in transformers shift labels, here "
            "nothing is shifted",
            do=f"labels='next_token'; or labels[:, 1:] with a last column of {NO_LABEL}",
        )


def with_labels(view: View, labels: str | Tensor, index: Tensor | None) -> Tensor:
    """`targets` at some of the tokens, None for all."""
    found = targets(view, labels)
    return found if index is None else found[index]
