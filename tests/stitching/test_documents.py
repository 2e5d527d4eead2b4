"""Rows of one document stand on one side of the split of a stitch."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batch
from tl_layersim.data.row import Row
from tl_layersim.data.texts import in_texts
from tl_layersim.stitching.activation_store import _split_between_texts

from ..models.tiny_models import random_tokens, tiny_llama


def batches_of(documents: list[tuple[int, int]], size: int = 3) -> list[Batch]:
    """Rows of four tokens, each with its first and its last document; the second token is the number of the row."""
    table = torch.tensor([[9, number + 10, 9, 9] for number in range(len(documents))])
    every = torch.ones_like(table).bool()
    pairs = list(zip(documents, table, every, strict=True))
    rows = [Row(ids, all_of_it, group=first, joined=(first, last)) for (first, last), ids, all_of_it in pairs]
    texts = tuple(row.text for row in in_texts(rows, True, True) if row.text is not None)
    whole = Batch(table, every, every, 0, texts=texts)
    return [whole.rows(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]


def split(documents: list[tuple[int, int]], size: int = 3) -> tuple[list[int], list[int]]:
    def row_numbers(batches) -> list[int]:
        return [int(row[1]) - 10 for batch in batches for row in batch.tokens]

    fit, evaluation = _split_between_texts(batches_of(documents, size))
    return row_numbers(fit), row_numbers(evaluation)


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
    assert split([(source, source) for source in sources], size) == (list(range(fit)), list(evaluation))


def test_a_packed_row_with_the_end_of_a_document_of_the_fit_is_left_out():
    # A document ends in rows 2, 5, 8 and 9.
    ends = {2, 5, 8, 9}
    documents = [sum(end < row for end in ends) for row in range(12)]
    fit, evaluation = split([(documents[row], documents[row] + (row in ends)) for row in range(12)])
    inside = [{documents[row], documents[row] + (row in ends)} for row in range(12)]

    assert not set().union(*(inside[row] for row in fit)) & set().union(*(inside[row] for row in evaluation))
    assert fit
    assert evaluation


def test_one_document_is_split_with_a_warning():
    with pytest.warns(lsim.LayersimWarning, match="eval_data="):
        assert split([(0, 0)] * 10) == (list(range(8)), [8, 9])


def test_the_interval_is_over_texts_and_few_are_warned_of():
    """Rows of one text are summed before blocks are made; another choice of texts changes the interval alone."""
    front = tiny_llama()
    back = tiny_llama(seed=1)
    tokens = random_tokens(12, 7)
    groups = [0, 0, 1, 1, 1, 2, 3, 3, 4, 5, 5, 6]

    with pytest.warns(lsim.LayersimWarning, match=r"7 texts \(12 rows\)"):
        grouped = lsim.stitch(front, back, lsim.Data(tokens, groups=groups), at=(0, 0), adapter="identity")
    with pytest.warns(lsim.LayersimWarning, match="12 texts"):
        alone = lsim.stitch(front, back, tokens, at=(0, 0), adapter="identity")

    assert grouped.provenance.texts == len(grouped.text_loss) == 7
    for name in ("text_loss", "text_tokens", "text_back_loss", "text_correct"):
        expected = torch.zeros(7, dtype=torch.float64).index_add_(0, torch.tensor(groups), getattr(alone, name))
        torch.testing.assert_close(getattr(grouped, name), expected, rtol=1e-6, atol=1e-6)
    assert grouped.penalty == pytest.approx(alone.penalty, rel=1e-6)
    assert grouped.penalty_interval()[1:] != pytest.approx(alone.penalty_interval()[1:], rel=1e-3)


def test_a_fit_with_other_texts_does_not_continue(tmp_path):
    front = tiny_llama()
    back = tiny_llama(seed=1)
    columns = {"input_ids": random_tokens(12, 7)}

    for documents in ([0] * 4 + list(range(8)), list(range(8)) + [7] * 4):
        data = lsim.Data(columns | {"document": documents}, groups="document")
        options = {"at": (0, 0), "adapter": "identity", "checkpoint": tmp_path / "x"}
        if documents[0] == documents[1]:
            lsim.stitch(front, back, data, **options)
            continue
        with pytest.raises(lsim.LayersimError, match="another run"):
            lsim.stitch(front, back, data, **options)
