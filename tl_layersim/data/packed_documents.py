"""Rows that hold several documents, which position ids tell apart."""

from __future__ import annotations

import itertools

from torch import Tensor

from ..core.errors import LayersimError
from .row import ModelInputs, Row

NAMES_OF_POSITION_IDS = ("position_ids", "decoder_position_ids")


def documents_in(row: Row, model: ModelInputs) -> list[Row]:
    """Split a row at the positions at which its position ids begin again, so that each document is a row of its own.

    Models keep documents of one row apart only in some batches, and some models never do. A document that is a row of its own
    is measured as the model reads it alone.

    Args:
        row: the row.
        model: the model that reads it.

    Returns:
        The documents in order, without padding at their ends; the row itself if it is one document.

    Raises:
        LayersimError: position ids neither rise by 1 nor begin again; or the model makes one prediction for the whole row.
    """
    name = next((name for name in NAMES_OF_POSITION_IDS if name in row.positional), None)
    if name is None:
        return [row]
    attended = row.attention.nonzero()[:, 0]
    starts = document_starts(row.inputs[name][attended], name, row.source)
    if len(starts) <= 1:
        return [row]
    if model.reads_rows:
        raise LayersimError(
            f"`{name}` begins again within row {row.source} of the data, which therefore holds {len(starts)} documents, but "
            f"the head of {model.name} makes one prediction per row. Give each document as a row."
        )
    documents = []
    for start, stop in itertools.pairwise([*starts, len(attended)]):
        first = int(attended[start])
        last = int(attended[stop - 1])
        documents.append(row[first : last + 1])
    return documents


def document_starts(ids: Tensor, name: str, number: int) -> list[int]:
    """Indices at which documents begin in the position ids of a row.

    Args:
        ids: `pos`, position ids of the attended positions.
        name: name of the input, for the message.
        number: index of the row in the data, for the message.

    Raises:
        LayersimError: an id neither is the one before plus 1, nor lower, nor again the first id of the row.

    Examples:
        >>> import torch
        >>> document_starts(torch.tensor([0, 1, 2, 0, 1, 0, 0]), "position_ids", 0)
        [0, 3, 5, 6]
    """
    values: list[int] = ids.tolist()
    starts = [0] if values else []
    for place, (previous, value) in enumerate(itertools.pairwise(values), start=1):
        if value == previous + 1:
            continue
        if value > previous or (value == previous and value != values[0]):
            raise LayersimError(
                f"`{name}` goes from {previous} to {value} in row {number} of the data; it must rise by 1 from token to token, "
                "or begin again at a lower value, where another document begins."
            )
        starts.append(place)
    return starts
