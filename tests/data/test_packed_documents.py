"""Documents that share a row by position ids: each is measured as it is alone."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches
from tl_layersim.data.packed_documents import document_starts
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources.open_local import OpenedModel

from ..models.tiny_models import family, random_tokens, tiny_gpt2, tiny_llama

TOKENS = random_tokens(1, 40)[0].tolist()
# Rows of three documents, of two that have one token, and of one document.
LENGTHS = ((7, 9, 5), (1, 1, 4), (12,))


def documents():
    ends = torch.tensor([length for row in LENGTHS for length in row]).cumsum(0).tolist()
    return [TOKENS[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def packed():
    pieces = iter(documents())
    rows = [[next(pieces) for _ in row] for row in LENGTHS]
    return {
        "input_ids": [[token for piece in row for token in piece] for row in rows],
        "position_ids": [[place for piece in row for place in range(len(piece))] for row in rows],
    }


def measured(model, data, size):
    return lsim.analyze(model, lsim.Data(data, batch_size=size), [lsim.Cosine(center="none"), lsim.LogitLens()])


MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2} | {
    name: lambda name=name: family(name) for name in ("gemma3", "opt", "neox", "gptj")
}


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_each_document_is_measured_alone(name, size):
    model = MODELS[name]()
    found, alone = measured(model, packed(), size), measured(model, documents(), 1)
    torch.testing.assert_close(found["cosine"].values, alone["cosine"].values, rtol=0, atol=1e-6)
    # No token is predicted from another document.
    torch.testing.assert_close(found["logit_lens"].cross_entropy, alone["logit_lens"].cross_entropy, rtol=0, atol=1e-5)
    assert found["cosine"].provenance.sequences == len(documents())


def test_a_document_alone_is_what_plain_hooks_read():
    model, states = tiny_llama(), []
    with torch.no_grad():
        for document in documents():
            states.append(model.model(torch.tensor([document]), output_hidden_states=True).hidden_states)
    x = [torch.cat([state[layer][0] for state in states]).double() for layer in (0, 2)]
    expected = torch.nn.functional.cosine_similarity(*x, dim=-1).mean()
    assert float(measured(model, packed(), 2)["cosine"].values[0, 2]) == pytest.approx(float(expected), abs=1e-6)


def test_embeddings_and_padding_between_documents():
    model, first, second = tiny_llama(), TOKENS[:5], TOKENS[5:8]
    row = {
        "input_ids": [[*first, 0, 0, *second]],
        "attention_mask": [[1] * 5 + [0, 0] + [1] * 3],
        "position_ids": [[0, 1, 2, 3, 4, 1, 1, 0, 1, 2]],
    }
    alone = measured(model, [first, second], 1)["cosine"].values
    torch.testing.assert_close(measured(model, row, 1)["cosine"].values, alone, rtol=0, atol=1e-6)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor([[*first, *second]]))
    rows = {"inputs_embeds": embedded, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])}
    found = lsim.analyze(model, rows, lsim.Cosine(center="none"))["cosine"]
    torch.testing.assert_close(found.values, alone, rtol=0, atol=1e-6)


def rows_of(data):
    return list(Batches(data, open_source(OpenedModel.of(tiny_llama())).model).rows())


def test_documents_of_one_row_are_texts_whose_neighbours_may_continue_them():
    rows = rows_of(lsim.Data(packed()))
    # The row of one document may have been given whole.
    assert [row.text.neighbours for row in rows] == [True] * 6 + [False]
    assert [row.text.unit for row in rows] == list(range(7))
    assert [row.text.group for row in rows] == [0, 0, 0, 1, 1, 1, 2]
    cut = rows_of(lsim.Data(packed(), seq_len=5))
    assert [(row.text.unit, row.text.part) for row in cut][:5] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_groups_hold_all_documents_of_their_rows():
    rows = rows_of(lsim.Data(packed(), groups=["a", "b", "a"]))
    assert [row.text.unit for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    assert [row.source for row in rows] == [0, 0, 0, 2, 1, 1, 1]
    assert not any(row.text.neighbours for row in rows)


@pytest.mark.filterwarnings("ignore:Intervals of")
def test_pairs_of_neighbouring_documents_are_left_out():
    ids = torch.arange(8).repeat(16, 3)
    data = {"input_ids": random_tokens(16, 24, seed=7), "position_ids": ids}
    found = lsim.analyze(tiny_llama(), data, lsim.CKA(minibatch=32), intervals=True)["cka"]
    assert found.provenance.texts == found.provenance.sequences == 48
    # Every other of 16 documents.
    assert found.texts <= 8


def test_one_document_stays_one_row():
    model = tiny_llama()
    row = {"input_ids": [TOKENS[:9]], "position_ids": [list(range(3, 12))]}
    assert measured(model, row, 1)["cosine"].provenance.sequences == 1
    masked = {
        "input_ids": [TOKENS[:6]],
        "attention_mask": [[1, 1, 0, 0, 1, 1]],
        "position_ids": [[0, 1, 1, 1, 2, 3]],
    }
    assert measured(model, masked, 1)["cosine"].provenance.sequences == 1


@pytest.mark.parametrize("ids", [[0, 1, 2, 7, 8], [0, 1, 2, 2, 2]])
def test_positions_that_neither_rise_nor_begin_again_are_refused(ids):
    with pytest.raises(lsim.LayersimError, match=r"`position_ids`.* from 2 to [27]\b"):
        measured(tiny_llama(), {"input_ids": [TOKENS[:5]], "position_ids": [ids]}, 1)


def test_document_starts():
    assert document_starts(torch.tensor([2, 3, 4, 2, 2, 3]), "position_ids", 0) == [0, 3, 4]
    assert document_starts(torch.tensor([5, 6, 3, 4]), "position_ids", 0) == [0, 2]
    assert document_starts(torch.tensor([], dtype=torch.int64), "position_ids", 0) == []
