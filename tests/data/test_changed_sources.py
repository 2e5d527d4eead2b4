"""A `Data` whose source is changed in place gives the numbers of the changed source."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches
from tl_layersim.data.data import KeptRows

from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer

OLD, NEW = random_tokens(6, 9, seed=1), random_tokens(6, 9, seed=2)
WORDS = {seed: [" ".join(f"w{word}" for word in row) for row in tokens.tolist()] for seed, tokens in ((1, OLD), (2, NEW))}


def from_numpy():
    memory = OLD.numpy().copy()
    return torch.from_numpy(memory), lambda _: memory.__setitem__(slice(None), NEW.numpy())


def in_inference_mode():
    with torch.inference_mode():
        tokens = OLD.clone()

    def change(_):
        with torch.inference_mode():
            tokens.copy_(NEW)

    return tokens, change


def data_loader():
    rows = [{"input_ids": row.clone()} for row in OLD]

    def change(_):
        for row, new in zip(rows, NEW, strict=True):
            row["input_ids"].copy_(new)

    return torch.utils.data.DataLoader(rows, batch_size=2), change


def data_set(change):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"input_ids": OLD.tolist()}), change


def transformed():
    datasets = pytest.importorskip("datasets")
    place = {"rows": OLD}
    rows = datasets.Dataset.from_dict({"row": list(range(6))})
    rows.set_transform(lambda batch: {"input_ids": [place["rows"][row].tolist() for row in batch["row"]]})
    return rows, lambda _: place.update(rows=NEW)


def table(change):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"input_ids": OLD.tolist()}), change


class Rows:
    """An iterable of a user."""

    def __init__(self):
        self.rows = OLD

    def __iter__(self):
        return iter(self.rows)


def one_number(rows):
    rows[3][4] = 97


def labels_of(rows):
    rows["labels"][0] = 0


# By name: a function that returns the source, and a function that changes it in place.
SOURCES = {
    "tensor": lambda: (OLD.clone(), lambda x: x.copy_(NEW)),
    "tensor through its data": lambda: (OLD.clone(), lambda x: x.data.copy_(NEW)),
    "tensor through the memory of NumPy": from_numpy,
    "tensor through a view": lambda: (OLD.clone(), lambda x: x[2].detach().copy_(NEW[2])),
    "tensor in inference mode": in_inference_mode,
    "array": lambda: (OLD.numpy().copy(), lambda x: x.__setitem__(slice(None), NEW.numpy())),
    "array of objects": lambda: (np.array(WORDS[1], dtype=object), lambda x: x.__setitem__(2, WORDS[2][0])),
    "mapping": lambda: ({"input_ids": OLD.clone()}, lambda x: x["input_ids"].copy_(NEW)),
    "mapping with another column": lambda: ({"input_ids": OLD.clone()}, lambda x: x.update(input_ids=NEW)),
    "mapping with a mask": lambda: (
        {"input_ids": OLD.clone(), "attention_mask": torch.ones_like(OLD)},
        lambda x: x["attention_mask"][2, 4:].fill_(0),
    ),
    "UserDict": lambda: (UserDict(input_ids=OLD.clone()), lambda x: x["input_ids"].copy_(NEW)),
    "lists": lambda: (OLD.tolist(), one_number),
    "lists in a mapping": lambda: ({"input_ids": OLD.tolist()}, lambda x: one_number(x["input_ids"])),
    "list of tensors": lambda: (list(OLD.clone()), lambda x: x[3].add_(1)),
    "list of arrays": lambda: (list(OLD.numpy().copy()), lambda x: x[3].__setitem__(2, 96)),
    "list of mappings": lambda: (
        [{"input_ids": row} for row in OLD.tolist()],
        lambda x: one_number([r["input_ids"] for r in x]),
    ),
    "texts": lambda: (list(WORDS[1]), lambda x: x.__setitem__(4, WORDS[2][4])),
    "texts in another order": lambda: (list(WORDS[1]), lambda x: x.reverse()),
    "texts in a mapping": lambda: ({"text": list(WORDS[1])}, lambda x: x["text"].__setitem__(4, WORDS[2][4])),
    "pairs of chats": lambda: (
        [[{"role": "user", "content": text}] for text in WORDS[1]],
        lambda x: x[1][0].update(content=WORDS[2][1]),
    ),
    "table": lambda: table(lambda x: one_number(x["input_ids"])),
    "table with another column": lambda: table(lambda x: x.__setitem__("input_ids", NEW.tolist())),
    "data set with a function": transformed,
    "DataLoader": data_loader,
    "iterable": lambda: (Rows(), lambda x: setattr(x, "rows", NEW)),
}


def model():
    made = tiny_llama(layers=2)
    made.tokenizer = tiny_tokenizer()
    made.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def measured(data, own=None):
    found = lsim.analyze(own or model(), data, lsim.Cosine(center="none"))["cosine"]
    return found.provenance.data, found.values


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_changes_in_place_is_read_again(name):
    source, change = SOURCES[name]()
    data = lsim.Data(source, batch_size=2)
    before = measured(data)
    assert measured(data)[0] == before[0]
    change(source)
    again, fresh = measured(data), measured(lsim.Data(source, batch_size=2))
    assert again[0] == fresh[0] != before[0]
    assert torch.equal(again[1], fresh[1])


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_labels_that_change_in_place_are_read_again():
    rows = {"input_ids": OLD.clone(), "labels": torch.arange(6) % 3}
    data = lsim.Data(rows, positions="last")
    found = [lsim.analyze(model(), data, lsim.NeuralCollapse(labels="data"))["neural_collapse"].nc1]
    rows["labels"].copy_(rows["labels"].flip(0).roll(1))
    found += [
        lsim.analyze(model(), each, lsim.NeuralCollapse(labels="data"))["neural_collapse"].nc1
        for each in (data, lsim.Data(rows, positions="last"))
    ]
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens(["w5 w6"]),
        lambda tokenizer: setattr(tokenizer, "bos_token", "w9"),
        lambda tokenizer: setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }} w7"),
    ],
)
def test_a_tokenizer_that_changes_in_place_reads_again(change):
    own, chats = model(), [[{"role": "user", "content": text}] for text in WORDS[1]]
    data = lsim.Data(chats, batch_size=2)
    before = measured(data, own)
    change(own.tokenizer)
    again, fresh = measured(data, own), measured(lsim.Data(chats, batch_size=2), own)
    assert again[0] == fresh[0]
    assert torch.equal(again[1], fresh[1])
    assert before[0] == measured(data)[0]


def test_a_rule_of_positions_that_changes_counts_again():
    first = [1]
    data = lsim.Data(OLD, positions=lambda ids: torch.arange(len(ids)) >= first[0])
    counts = []
    for start in (1, 4):
        first[0] = start
        counts.append(lsim.analyze(model(), data, lsim.Cosine(center="none"))["cosine"].provenance.tokens)
    assert counts == [6 * 8, 6 * 5]


@pytest.mark.light("source0", "source5")
@pytest.mark.parametrize("source", [OLD, OLD.tolist(), OLD.numpy(), {"input_ids": OLD}, WORDS[1], list(OLD)])
def test_a_source_that_stays_is_tokenised_once(source, monkeypatch):
    read, items = [], Batches._items
    monkeypatch.setattr(Batches, "_items", lambda batches: read.append(1) or items(batches))
    data, own = lsim.Data(source, batch_size=2), model()
    for _ in range(3):
        measured(data, own)
    assert len(read) == 1


def test_rows_of_an_iterable_may_share_memory():
    memory = torch.zeros(9, dtype=torch.int64)

    def rows():
        for row in OLD:
            yield memory.copy_(row)

    assert measured(lsim.Data(rows(), batch_size=4))[0] == measured(lsim.Data(OLD, batch_size=4))[0]


def test_old_rows_of_a_changed_source_are_dropped():
    rows, own = OLD.clone(), model()
    data = lsim.Data(rows)
    for _ in range(3):
        measured(data, own)
        rows.add_(1).remainder_(90)
    kept = data._reading.rows
    assert len(kept) == 1
    assert all(isinstance(each, KeptRows) for each in kept.values())
