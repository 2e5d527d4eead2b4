"""What a layer ought to say at a position: the next token, the data's own label, or labels that the user hands over."""

from __future__ import annotations

import torch
from torch import Tensor

from .data import Batch
from .errors import LayersimError
from .source import NO_LABEL, View


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


def label_source(labels: str | Tensor) -> str:
    """Where they come from, as `Analyzer.label_source` says it."""
    return "rows" if isinstance(labels, Tensor) else "data" if labels == "data" else ""


def label_key(labels: str | Tensor) -> str:
    """A name for what `targets` gives, equal for equal labels."""
    return labels if isinstance(labels, str) else f"tensor {id(labels)}"


def check_labels(labels: str | Tensor) -> None:
    """Refuse a tensor that is no table of labels."""
    if isinstance(labels, Tensor) and (labels.dim() not in (1, 2) or labels.is_floating_point() or labels.dtype == torch.bool):
        raise LayersimError(
            "Labels are whole numbers, one for each row of the data or for each of its positions.",
            given=f"{labels.dtype} of shape {tuple(labels.shape)}",
            expected=f"int64 of shape (row,) or (row, pos), {NO_LABEL} where there is none",
            do="labels=labels.long()",
        )


def check_batch_labels(labels: str | Tensor, batch: Batch) -> None:
    """Refuse a batch for which there are no labels, or whose labels are plainly of another convention."""
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
