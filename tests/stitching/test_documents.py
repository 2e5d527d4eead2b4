"""Rows of one document stand on one side of the split of a stitch."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batch
from tl_layersim.stitching.activation_store import _split

END = 2


def batches_of(sources: list[int], tokens: list[list[int]] | None = None, size: int = 3) -> list[Batch]:
    """Rows of four tokens of these documents, or packed rows; the second token is the number of the row."""
    table = torch.tensor(tokens or [[9, number + 10, 9, 9] for number in range(len(sources))])
    every, origins = torch.ones_like(table).bool(), tuple((source, 0) for source in sources)
    whole = Batch(table, every, every, 0, origins=origins)
    return [whole.rows(start, min(start + size, len(sources))) for start in range(0, len(sources), size)]


def split(sources: list[int], tokens: list[list[int]] | None = None, size: int = 3) -> tuple[list[int], list[int]]:
    parts = _split(batches_of(sources, tokens, size), END)
    fit, evaluation = ([int(row[1]) - 10 for batch in part for row in batch.tokens] for part in parts)
    return fit, evaluation


@pytest.mark.covering
@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize(
    ("sources", "fit", "evaluation"),
    [
        # Rows of their own: the last fifth.
        (list(range(10)), 8, (8, 9)),
        (list(range(6)), 5, (5,)),
        # The cut is moved behind the document that it goes through,
        ([0, 0, 1, 1, 2, 2, 2, 3, 3, 4], 9, (9,)),
        # or before it, if the document is the last one.
        ([0, 0, 1, 1, 2, 2, 3, 3, 3, 3], 6, (6, 7, 8, 9)),
    ],
)
def test_a_document_stays_whole(sources, fit, evaluation, size):
    assert split(sources, size=size) == (list(range(fit)), list(evaluation))


def test_a_packed_row_with_the_end_of_a_document_of_the_fit_is_left_out():
    # A document ends in rows 2, 5, 8 and 9; the first token is a BOS and no end.
    ends = {2, 5, 8, 9}
    tokens = [[END, number + 10, END if number in ends else 9, 9] for number in range(12)]

    fit, evaluation = split([-1] * 12, tokens)
    documents = [sum(end < row for end in ends) for row in range(12)]
    inside = [{documents[row], documents[row] + (row in ends)} for row in range(12)]
    assert not set().union(*(inside[row] for row in fit)) & set().union(*(inside[row] for row in evaluation))
    assert fit
    assert evaluation


def test_one_document_is_split_with_a_warning():
    for tokens in (None, [[9, number + 10, 9, 9] for number in range(10)]):
        with pytest.warns(lsim.LayersimWarning, match="eval_data="):
            assert split([0] * 10 if tokens is None else [-1] * 10, tokens) == (list(range(8)), [8, 9])
