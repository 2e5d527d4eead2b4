"""Everything that data may be, and its rows and batches: packing, padding, what is counted."""

from __future__ import annotations

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from .helpers import ROWS, TEXTS, batches, counted, model, rows


def stream():
    yield from ({"text": text} for text in TEXTS)


FORMS = {
    "list of texts": TEXTS,
    "tuple of one list": (TEXTS,),
    "mapping of texts": {"text": TEXTS},
    "mappings of one text": [{"text": text} for text in TEXTS],
    "any single text field": [{"id": 7, "story": text} for text in TEXTS],
    "datasets.Dataset": datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1, 0]}),
    "datasets.IterableDataset": datasets.IterableDataset.from_generator(stream),
    "generator of texts": lambda: (text for text in TEXTS),
    "rows of ids": ROWS,
    "tensors": [torch.tensor(row) for row in ROWS],
    "arrays": [np.array(row) for row in ROWS],
    "dicts of ids": [{"input_ids": row} for row in ROWS],
    "one dict of ragged ids": {"input_ids": ROWS},
    "token data set": datasets.Dataset.from_dict({"input_ids": ROWS, "attention_mask": [[1] * len(r) for r in ROWS]}),
    "tokens column": datasets.Dataset.from_dict({"tokens": ROWS}).with_format("torch"),
    "padded with mask": {
        "input_ids": torch.tensor([[1, 3, 4, 5, 2, 2, 2], [1, 6, 7, 2, 2, 2, 2], [1, 8, 9, 10, 11, 12, 13]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1] * 7]),
    },
    "mixed": [TEXTS[0], torch.tensor([ROWS[1]]), {"text": TEXTS[2]}],
    "text file lines": "\n".join,
}


@pytest.mark.parametrize("form", [name for name in FORMS if name != "text file lines"])
def test_every_form_gives_the_same_rows(form):
    data = FORMS[form]
    assert rows(data() if callable(data) else data) == ROWS


def test_one_text_and_one_row():
    assert rows(TEXTS[0]) == ROWS[:1]
    assert rows(torch.tensor(ROWS[0])) == ROWS[:1]
    assert rows(ROWS[0]) == ROWS[:1]


def test_bos_can_be_left_out():
    assert rows(TEXTS, prepend_bos=False) == [row[1:] for row in ROWS]


def test_a_tokenizer_with_its_own_special_tokens_keeps_them():
    tokenizer = tiny_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.cls_token = "<s>"
    assert rows(["w3 w4"], model=model(tokenizer)) == [[1, 3, 4, 2]]


def test_streams_are_read_no_further_than_needed():
    read = []

    def endless():
        while True:
            read.append(1)
            yield "w3 w4 w5"

    assert sum(len(row) for row in counted(endless(), max_tokens=100)) == 100
    assert len(read) <= 128


REFUSALS = {
    "a number": (7, {}, "`data`.* 7, .*int"),
    "bytes": ([b"abc"], {}, "`data`.* b'abc'"),
    "tokens and labels": ([(torch.tensor([3, 4]), torch.tensor([1, 0]))], {}, "`data`.* 2 "),
    "batches of a DataLoader": ([[torch.tensor([[3, 4]]), torch.tensor([[1, 0]])]], {}, "`data`.* 2 "),
    "an additive mask": (
        {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.tensor([[0.0, -1e9]])},
        {},
        r"`attention_mask`.*-1e\+09 to 0",
    ),
    "too few rows of mask": ({"input_ids": [[3, 4], [5]], "attention_mask": [[1, 1]]}, {}, r"`attention_mask`.* 1 .* 2\b"),
    "float tokens": (torch.ones(2, 3), {}, r"`data`.*torch.float32.*\(2, 3\)"),
    "three dimensions": (torch.ones(2, 3, 4, dtype=torch.long), {}, r"`data`.*\(2, 3, 4\)"),
    "ids outside the vocabulary": (torch.tensor([[3, 100]]), {}, "`data` .*3 to 100.*0 to 99"),
    "negative ids": (torch.tensor([[3, -1]]), {}, "`data` .*-1 to 3"),
    "a mask of the wrong shape": (
        {"input_ids": torch.ones(2, 4, dtype=torch.long) * 3, "attention_mask": torch.ones(2, 3)},
        {},
        r"`attention_mask` .*\(3,\).* 4 ",
    ),
    "pads without a mask": (torch.tensor([[1, 3, 2, 2], [1, 3, 4, 5]]), {}, "`attention_mask`.*1 of 2 "),
    "no text column": ([{"a": "x", "b": "y"}], {}, r"`data`.*\['a', 'b'\].*column='a'"),
    "a column that is not there": ([{"text": "x"}], {"column": "body"}, "`column` is 'body'"),
    "a dictionary of splits": (
        datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}),
        {},
        r"`data`.*data\['train'\]",
    ),
    "a row beyond the context": (torch.full((1, 65), 3), {}, "`data`.* 65 tokens.*seq_len=64"),
    "packed tokens": (torch.tensor([[1, 3]]), {"pack": True}, "`pack`"),
    "a column of a list of texts": (["w3"], {"column": "text"}, r"`column` is 'text'"),
    "a column of a text": ("w3", {"column": "text"}, r"`column` is 'text'"),
    "columns of lists of texts": ([["w3", "w4"], ["w5", "w6"]], {"column": ("premise", "hypothesis")}, r"`column` is \("),
    "a column of a tensor": (torch.tensor([[3, 4]]), {"column": "input_ids"}, "`column` is 'input_ids'"),
    "a column of ids": ([[3, 4], [5]], {"column": "input_ids"}, "`column` is 'input_ids'"),
    "seq_len beyond the context": (TEXTS, {"seq_len": 65}, "`seq_len` is 65.* 64"),
    "everything skipped": (TEXTS, {"seq_len": 4, "skip_first": 4}, "`skip_first` is 4.* 4"),
    "an image": ([PIL.Image.new("RGB", (2, 2))], {}, "`data`.*Image.*`input_ids`"),
    "texts and numbers": ({"text": ["w3", 2, "w4"]}, {}, "`text`.* texts.*token ids"),
    "a row and an id": ({"input_ids": [[5, 6, 7], 8]}, {}, "`input_ids`.* texts.*token ids"),
    "batch_size of none": (TEXTS, {"batch_size": 0}, "`batch_size`.* 0,"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_data_is_refused(case):
    data, options, text = REFUSALS[case]
    with pytest.raises(lsim.LayersimError, match=text):
        batches(data, **options)


def test_texts_need_a_tokenizer():
    with pytest.raises(lsim.LayersimError, match=r"LlamaForCausalLM .*tokenizer="):
        lsim.analyze(tiny_llama(), TEXTS, "cosine")
    assert lsim.analyze(tiny_llama(), lsim.Data(TEXTS, tokenizer=tiny_tokenizer()), "cosine")["cosine"].provenance.tokens == 14


@pytest.mark.parametrize("wrong", [transformers.AutoTokenizer, tiny_tokenizer().encode, tiny_tokenizer, tiny_llama()])
def test_what_is_no_tokenizer_is_refused(wrong):
    with pytest.raises(lsim.LayersimError, match=r"`tokenizer` is .*loaded tokenizer"):
        lsim.analyze(tiny_llama(), lsim.Data(TEXTS, tokenizer=wrong), "cosine")


def test_a_pandas_table_is_read_by_its_columns():
    import pandas

    table = pandas.DataFrame({"text": TEXTS, "label": [0, 1, 0]})
    assert rows(table) == ROWS
    assert rows(table["text"]) == ROWS
    assert rows(pandas.DataFrame({"a": TEXTS, "b": TEXTS}), column="b") == ROWS
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\['a', 'b'\]"):
        rows(pandas.DataFrame({"a": TEXTS, "b": TEXTS}))


def test_a_path_is_no_text(tmp_path):
    (tmp_path / "text.txt").write_text("w3 w4")
    for path in (tmp_path / "text.txt", str(tmp_path / "text.txt")):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*text\.txt"):
            rows(path)


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


@pytest.mark.heavy("seconds, where faster tests reach the same")
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


@pytest.mark.heavy("seconds, where faster tests reach the same")
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
