"""Data that cannot be read is refused with the argument, what was given and what to write instead."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.commands.models_and_data import load_data
from tl_layersim.data.data import Data

from ..models.tiny_models import tiny_llama, tiny_tokenizer
from ..running.options import called

TEXTS = ["w3 w4", "w5 w6 w7"]
HOLES = ["w3 w4", None, "w5"]


@pytest.fixture(scope="module")
def llama():
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    return model


def analyze(model, data, **options):
    return called(lsim.analyze, model, data, lsim.Cosine(center="none"), **options)["cosine"]


MISSING = {
    "Dataset": datasets.Dataset.from_dict({"text": HOLES}),
    "Dataset with another name": datasets.Dataset.from_dict({"story": HOLES, "id": [1, 2, 3]}),
    "pandas": pandas.DataFrame({"story": HOLES, "id": [1, 2, 3]}),
    "pandas strings": pandas.DataFrame({"story": pandas.array(HOLES, dtype="string")}),
    "pandas Series": pandas.Series(HOLES),
    "mapping": {"text": HOLES},
    "list": HOLES,
    "list with NaN": ["w3", float("nan")],
    "jsonl": [{"text": "w3"}, {"text": None}],
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_row_without_a_text_is_named(llama, kind):
    with pytest.raises(lsim.LayersimError, match=r"^`data`.* row 1"):
        analyze(llama, MISSING[kind])


STRINGS = {
    "array": np.array(TEXTS),
    "array of objects": np.array(TEXTS, dtype=object),
    "mapping of an array": {"text": np.array(TEXTS)},
    "mapping of a tuple": {"text": tuple(TEXTS)},
    "data set in NumPy's format": datasets.Dataset.from_dict({"text": TEXTS}).with_format("numpy"),
    "column of a data set": {"story": datasets.Dataset.from_dict({"text": TEXTS})["text"]},
    "Series in a mapping": {"story": pandas.Series(TEXTS)},
}


@pytest.mark.light("array", "mapping of an array", "data set in NumPy's format", "Series in a mapping")
@pytest.mark.parametrize("kind", STRINGS)
def test_texts_in_any_container_are_texts(llama, kind):
    assert torch.equal(analyze(llama, STRINGS[kind]).values, analyze(llama, TEXTS).values)


IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
NO_TABLES = {
    "meta": IDS.to("meta"),
    "beyond int64": [[3, 10**30, 4], [5, 6, 7]],
    "objects": [object(), object()],
}


@pytest.mark.parametrize("kind", NO_TABLES)
def test_no_numbers_in_any_column(llama, kind):
    given = NO_TABLES[kind]
    for data in (given, [given], {"input_ids": given}, [{"input_ids": given}]):
        with pytest.raises(lsim.LayersimError, match=r"^`(data|input_ids)`"):
            analyze(llama, data)
    for name in ("attention_mask", "position_ids"):
        with pytest.raises(lsim.LayersimError, match=f"^`{name}`"):
            analyze(llama, {"input_ids": IDS, name: given})
    for labels in (given, None):
        data = {"input_ids": IDS, "labels": given}
        with pytest.raises(lsim.LayersimError, match=r"^`labels`"):
            lsim.analyze(llama, data, lsim.LogitLens(labels="data" if labels is None else labels))


NO_DATA = {
    "texts as ids": ({"input_ids": ["w3 w4", "w5"]}, None, "`input_ids`"),
    "a text as ids": ([{"input_ids": "w3"}], None, "`input_ids`"),
    "no masks of ragged rows": ({"input_ids": [[3, 4], [5]], "attention_mask": [None, None]}, None, "`attention_mask`"),
    "a number": (torch.tensor(3), None, "`data`"),
    "numbers that are no ids": ({"x": [1.5, 2.5]}, "x", "`data`"),
    "mappings": ({"x": [{"a": 1}]}, "x", "`x`"),
    "ids with a hole": ({"input_ids": [[3, 4], None]}, None, "`input_ids`"),
    "ids as text": ({"input_ids": [["3", "4"], ["3"]]}, None, "`input_ids`"),
    "texts and numbers": ({"text": ["w3", 5]}, None, "`text`"),
    "dates": (np.array(["2020-01-01"], dtype="datetime64[D]"), None, "`data`"),
    "a ragged mask": ({"input_ids": [[3, 4], [5, 6]], "attention_mask": [[1, 1], [1]]}, None, "`attention_mask`"),
}


@pytest.mark.parametrize("kind", NO_DATA)
def test_what_is_neither_text_nor_ids_is_no_traceback(llama, kind):
    data, column, text = NO_DATA[kind]
    with pytest.raises(lsim.LayersimError, match=text):
        analyze(llama, Data(data, column=column))


@pytest.mark.parametrize("path", ["storys.txt", "./my folder/story.md", "data/story.jsonl", Path("story"), ["story.csv", "w3"]])
def test_a_misspelt_path_is_no_text(llama, path):
    with pytest.raises(lsim.LayersimError, match=r"`data`.*story"):
        analyze(llama, path)


def test_a_text_may_end_like_a_path(llama):
    assert analyze(llama, "w3 w4 notes.txt").provenance.tokens > 3
    assert analyze(llama, ["w3 w4", "notes.txt"]).provenance.tokens > 3
    assert analyze(llama, "notes.txt\n").provenance.tokens > 1


def test_a_text_may_be_the_name_of_a_folder(llama, tmp_path, monkeypatch):
    (tmp_path / "w3").mkdir()
    monkeypatch.chdir(tmp_path)
    assert analyze(llama, ["w3", "w4 w5"]).provenance.sequences == 2


def test_a_lone_surrogate_is_named(llama):
    with pytest.raises(lsim.LayersimError, match=r"^`data`.* row 1.*ud83d"):
        analyze(llama, ["w3 w4", "w3 \ud83d w4"])


def test_paths_in_a_list_are_no_texts(llama, tmp_path):
    (tmp_path / "story").write_text("w3")
    for data in ([str(tmp_path / "story")], str(tmp_path)):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*load_from_disk"):
            analyze(llama, data)


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (3, 8, 8)])
def test_pixels_are_no_input_of_a_model_of_tokens(llama, shape):
    pixels = torch.randn(shape)
    for data in (pixels, [pixels], pixels.numpy(), torch.zeros(2, *shape[-3:], dtype=torch.uint8)):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*LlamaForCausalLM.*`input_ids`"):
            analyze(llama, data)


@pytest.mark.parametrize("family", ["Bert", "Llama", "ViT"])
def test_a_model_without_a_head_is_refused(family):
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    more = {"image_size": 8, "patch_size": 4} if family == "ViT" else {"vocab_size": 20}
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**small, **more))
    with pytest.raises(lsim.LayersimError, match=f"LogitLens.*{family}Model"):
        lsim.analyze(model, torch.ones(2, 4, dtype=torch.long), lsim.LogitLens())


def test_the_command_line_names_the_option_that_is_wrong(tmp_path):
    from tl_layersim.sources import load_by_name

    (tmp_path / "weights.txt").write_bytes(bytes(range(256)))
    (tmp_path / "table.parquet").write_bytes(b"no parquet")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "set")
    (tmp_path / "utf-16").write_bytes("w3 w4".encode("utf-16-le"))
    (tmp_path / "folder").mkdir()
    for name, text in {
        "weights.txt": "^`--data` is .*weights.txt.*UTF-8",
        "table.parquet": "^`--data` is .*table.parquet.*UTF-8",
        "utf-16": "^`--data` is .*utf-16.*UTF-8",
        "folder": "^`--data` is .*folder",
        "set": "^`--data` is .*set.* split test",
        "nothing.jsonl": "^`--data` is .*nothing.jsonl",
    }.items():
        with pytest.raises(lsim.LayersimError, match=text):
            load_data(str(tmp_path / name), "test")
    for name in ("nothing", "folder", "set"):
        with pytest.raises(lsim.LayersimError, match=f"^`--model` is .*{name}"):
            load_by_name.load_model(str(tmp_path / name), "cpu", "float32", False)
