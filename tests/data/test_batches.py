"""Rows and batches: packing, padding, what is counted."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from .helpers import ROWS, TEXTS, batches, counted, rows


def test_long_texts_go_on_in_further_rows_with_a_bos_each():
    assert rows(TEXTS, seq_len=4) == [[1, 3, 4, 5], [1, 6, 7], [1, 8, 9, 10], [1, 11, 12, 13]]
    assert rows([torch.tensor(ROWS[2])], seq_len=4) == [[1, 8, 9, 10], [11, 12, 13]]


def test_packing_joins_texts_with_an_end_of_text():
    assert rows(TEXTS, seq_len=6, pack=True) == [[1, 3, 4, 5, 2, 6], [1, 7, 2, 8, 9, 10], [1, 11, 12, 13, 2]]


def test_max_tokens_is_met_exactly():
    assert counted(TEXTS, max_tokens=6) == [[1, 3, 4, 5], [1, 6]]
    assert counted(TEXTS, max_tokens=5, skip_first=1) == [[3, 4, 5], [6, 7]]
    assert counted(TEXTS, max_tokens=10**6) == ROWS


def test_skip_first_leaves_positions_out_of_the_counts_only():
    assert counted(TEXTS, skip_first=2) == [row[2:] for row in ROWS]
    assert rows(TEXTS, skip_first=2) == ROWS


def test_left_padding_is_moved_to_the_right():
    ids = torch.tensor([[2, 2, 1, 6, 7], [1, 3, 4, 5, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    batch = batches({"input_ids": ids, "attention_mask": mask})[0]
    assert batch.tokens[0, :3].tolist() == [1, 6, 7]
    assert batch.attention[0].tolist() == [True, True, True, False, False]


def test_holes_in_a_mask_stay_holes():
    batch = batches({"input_ids": torch.tensor([[1, 3, 4, 5]]), "attention_mask": torch.tensor([[1, 0, 1, 1]])})[0]
    assert batch.attention[0].tolist() == [True, False, True, True]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    batch_size=st.integers(1, 7),
    seq_len=st.integers(2, 12),
    pack=st.booleans(),
)
def test_no_token_is_lost_or_counted_twice(lengths, batch_size, seq_len, pack):
    texts = [" ".join(f"w{3 + (i + j) % 90}" for j in range(n)) for i, n in enumerate(lengths)]
    ids = [int(word[1:]) for text in texts for word in text.split()]
    found = [t for row in rows(texts, batch_size=batch_size, seq_len=seq_len, pack=pack) for t in row if t > 2]
    assert found == ids


def test_fingerprint_depends_on_rows_alone():
    model = tiny_llama()
    data = [random_tokens(1, n, seed=n)[0] for n in (5, 9, 3, 8)]
    prints = {b: lsim.analyze(model, lsim.Data(data, batch_size=b), "cosine")["cosine"].provenance.data for b in (1, 3, 4)}
    assert len(set(prints.values())) == 1
    other = [*data[:3], data[3].flip(0)]
    assert lsim.analyze(model, other, "cosine")["cosine"].provenance.data not in prints.values()


def test_the_tokenizer_and_named_layers_are_recorded():
    paths = ["model.layers.0", "model.layers.2"]
    found = lsim.analyze(lsim.open_model(tiny_llama(), layers=paths), lsim.Data(TEXTS, tokenizer=tiny_tokenizer()), "cosine")[
        "cosine"
    ]
    assert found.provenance.options["tokenizer"].endswith("of 100 tokens")
    assert found.provenance.options["layers"] == paths
    assert found.values.shape == (3, 3)
