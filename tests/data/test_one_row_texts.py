"""A model whose head reads a row as one reads one row of each text, which the tokenizer cuts."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.architectures.unembed import Head
from tl_layersim.data.batches import Batches
from tl_layersim.data.data import Data
from tl_layersim.sources.model_description import ModelDescription

from ..models.tiny_models import tiny_llama, tiny_tokenizer
from ..running.options import called
from ..training.helpers import bert
from . import helpers
from .test_inputs import INPUTS, pair_tokenizer

LONG = " ".join(f"w{i}" for i in range(10, 30))
TEXTS = ["w4 w5", LONG, "w6", LONG + " w9"]
LABELS = [0, 1, 2, 1]


def model(tokenizer, reads: str = "first", context: int | None = 64) -> ModelDescription:
    head = Head("norm", ("classifier",), reads)
    return replace(helpers.model(tokenizer, context), head=head, inputs=INPUTS)


def read(data, known: ModelDescription, labelled=False, **options) -> tuple[list[list[int]], Batches]:
    batches = Batches(Data(data, batch_size=3, **options), known, labelled)
    return [t[a].tolist() for b in batches for t, a in zip(b.tokens, b.attention, strict=True)], batches


def classifier():
    found = bert()
    found.tokenizer = pair_tokenizer()
    return found


@pytest.mark.parametrize("reads", ["first", "last", "rows"])
def test_each_text_is_the_row_that_the_tokenizer_cuts(reads):
    tokenizer = pair_tokenizer()
    with pytest.warns(lsim.LayersimWarning, match=r"2 of 4 texts are longer than seq_len=8(.|\n)*at most 64") as seen:
        rows, batches = read({"text": TEXTS, "label": LABELS}, model(tokenizer, reads), True, seq_len=8)
    # The second pass does not repeat the warning.
    assert sum(len(batch.tokens) for batch in batches) == 4
    assert len(seen) == 1
    assert rows == tokenizer(TEXTS, truncation=True, max_length=8)["input_ids"]
    assert [row[-1] for row in rows] == [2] * 4
    assert batches.row_counts()["cut_texts"] == 2
    assert torch.cat([batch.labels[:, 0] for batch in batches]).tolist() == LABELS


def test_texts_that_fit_and_heads_of_every_position_are_as_before():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, batches = read(TEXTS, model(pair_tokenizer()), seq_len=23)
        assert [len(row) for row in rows] == [4, 22, 3, 23]
        assert batches.row_counts()["cut_texts"] == 0
        rows, batches = read(TEXTS, model(pair_tokenizer(), "every"), seq_len=8)
        assert sum(len(row) for row in rows) == 4 + 22 + 3 + 23
        # The end of the data is not read.
        assert len(read([*TEXTS[:1], LONG], model(pair_tokenizer()), seq_len=8, max_tokens=4)[0]) == 1


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_bos_of_this_package_has_its_place_in_the_row(side):
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = side
    with pytest.warns(lsim.LayersimWarning, match="2 of 2 texts"):
        rows, _ = read([LONG, f"<s> {LONG}"], model(tokenizer, "last"), seq_len=6)
    words = range(10, 15) if side == "right" else range(25, 30)
    assert rows == [[1, *words]] * 2
    with pytest.warns(lsim.LayersimWarning, match="1 of 1 texts"):
        assert read([LONG], model(tokenizer, "last"), seq_len=6, prepend_bos=False)[0] == [
            list(range(10, 16) if side == "right" else range(24, 30))
        ]


def test_special_tokens_that_a_text_brings_along_are_not_doubled_where_it_is_cut():
    with pytest.warns(lsim.LayersimWarning, match="1 of 2 texts"):
        rows, batches = read([f"[CLS] {LONG} [SEP]", "[CLS] w5 [SEP]"], model(pair_tokenizer()), seq_len=6)
    assert rows == [[1, 10, 11, 12, 13, 2], [1, 5, 2]]
    assert batches.row_counts()["own_bos"] == 2


def test_pairs_are_cut_with_their_segments():
    tokenizer = pair_tokenizer()
    data = {"a": ["w4 w5 w6 w7 w8", "w4"], "b": ["w9 w10 w11", "w5"]}
    with pytest.warns(lsim.LayersimWarning, match="1 of 2 texts"):
        [batch] = Batches(Data(data, column=("a", "b"), seq_len=7), model(tokenizer))
    wanted = tokenizer(data["a"], data["b"], truncation=True, max_length=7, padding=True, return_tensors="pt")
    assert torch.equal(batch.tokens, wanted["input_ids"])
    assert torch.equal(batch.inputs["token_type_ids"], wanted["token_type_ids"])
    with pytest.raises(lsim.LayersimError, match="`seq_len` is 3"):
        read(data, model(tokenizer), column=("a", "b"), seq_len=3)


def test_what_cannot_be_cut_is_refused():
    tokens = torch.randint(4, 100, (2, 9))
    known = model(pair_tokenizer())
    with pytest.raises(lsim.LayersimError, match=r"`data`.* 9 .*`seq_len`.*\b6\b"):
        read(tokens, known, seq_len=6)
    assert len(read(tokens, known)[0]) == len(read(tokens, known, seq_len=9)[0]) == 2
    assert len(read(tokens, model(pair_tokenizer(), "every"), seq_len=6)[0]) == 4
    with pytest.raises(lsim.LayersimError, match=r"`data`.* 9 tokens.*max_length=8"):
        read(tokens, model(pair_tokenizer(), context=8))
    with pytest.raises(lsim.LayersimError, match=r"`pack`.* m "):
        read(TEXTS, known, pack=True)
    chats = tiny_tokenizer()
    chats.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    chat = [{"role": "user", "content": LONG}]
    with pytest.raises(lsim.LayersimError, match=r"`data`.* 20 .*`seq_len`.*\b6\b"):
        read([chat], model(chats, "last"), seq_len=6)
    assert len(read([chat], model(chats, "last"))[0]) == 1


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
def test_every_function_reads_the_rows_that_the_user_would_cut():
    known, options = classifier(), {"seq_len": 8, "batch_size": 2}
    data = {"text": TEXTS * 3, "label": LABELS * 3}
    encoded = known.tokenizer(data["text"], truncation=True, max_length=8, padding=True, return_tensors="pt")
    ids = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": torch.tensor(LABELS * 3)}
    lens = lsim.LogitLens(labels="data")
    found, wanted = (called(lsim.analyze, known, each, lens, **options)["logit_lens"] for each in (data, ids))
    assert (found.targets, found.provenance.options["cut_texts"]) == (12, 6)
    assert torch.equal(found.cross_entropy, wanted.cross_entropy)
    # A headless encoder beside the classifier does not lose the rows' heads, on either side.
    plain = transformers.BertModel(known.config).eval()
    plain.tokenizer = known.tokenizer
    cka = lsim.CKA(level="sequence", estimator="exact")
    for pair in ((known, plain), (plain, known)):
        assert called(lsim.compare, *pair, data["text"], cka, positions="all", **options).samples == 12
    report = called(lsim.evaluate_layers, known, known, data, center="none", **options)
    assert report["layers"].provenance.sequences == 12
    first, second = (
        called(lsim.stitch, known, known, each, at=(0, 0), ridge=1.0, fit="lstsq", **options) for each in (data, ids)
    )
    assert torch.equal(first.text_loss, second.text_loss)
    trained = called(lsim.finetune_aligned, classifier(), data, lsim.AlignedTraining(steps=1), **options)
    assert trained.provenance.options["cut_texts"] > 0


def test_language_models_continue_long_texts():
    causal = tiny_llama()
    causal.tokenizer = tiny_tokenizer()
    assert lsim.analyze(causal, lsim.Data([LONG], seq_len=8), lsim.LogitLens())["logit_lens"].provenance.sequences == 3
