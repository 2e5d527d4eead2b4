"""Further inputs of rows: how they are cut, padded, stacked and refused, and rows without token ids."""

from __future__ import annotations

import math
from dataclasses import replace

import datasets
import numpy as np
import pandas
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches, fingerprint, new_digest
from tl_layersim.data.data import Data
from tl_layersim.data.reader import labelled_without_tokens

from . import helpers

INPUTS = {"token_type_ids": 0, "position_ids": None, "pixel_values": None, "inputs_embeds": None, "decoder_input_ids": None}


def model(main: str = "input_ids", **options):
    return replace(words(main), tokenizer=None, **options)


def read(data, main: str = "input_ids", labelled: bool = False, **options):
    found = Batches(Data(data, **options), model(main), labelled, lambda batch: 5)
    return list(found)


def digest(batches) -> str:
    held = new_digest()
    for batch in batches:
        fingerprint(held, batch)
    return held.hexdigest()


def test_left_padding_is_stripped_from_all_inputs_by_position():
    tokens = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    data = {
        "input_ids": tokens,
        "attention_mask": mask,
        "token_type_ids": torch.tensor([[9, 9, 0, 1, 1], [0, 0, 0, 1, 1]]),
        "position_ids": torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]]),
        "pixel_values": torch.randn(2, 3, 4, 4),
    }
    [batch] = read(data)
    assert batch.tokens.tolist() == [[5, 6, 7, 0, 0], [3, 4, 5, 6, 7]]
    assert batch.inputs["token_type_ids"].tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert torch.equal(batch.inputs["pixel_values"], data["pixel_values"])
    assert batch.positional == {"token_type_ids", "position_ids"}
    assert batch.first_row.inputs["token_type_ids"].tolist() == [[0, 1, 1]]
    assert batch.first_row.inputs["pixel_values"].shape == (1, 3, 4, 4)


def test_long_rows_are_split_with_their_inputs_by_position():
    data = {
        "input_ids": torch.arange(3, 13)[None],
        "position_ids": torch.arange(10)[None],
        "pixel_values": torch.ones(1, 3, 2, 2),
    }
    [batch] = read(data, seq_len=4)
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert batch.inputs["pixel_values"].shape == (3, 3, 2, 2)
    [cut] = read(data, max_tokens=6)
    assert cut.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_inputs_of_a_decoder_belong_to_no_position_of_the_encoder():
    data = {"input_ids": torch.ones(2, 4, dtype=torch.long), "decoder_input_ids": torch.arange(8).view(2, 4)}
    [batch] = read(data | {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])})
    assert batch.positional == frozenset()
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_without_segments_among_rows_with_them_get_the_default():
    [batch] = read([{"input_ids": [3, 4], "token_type_ids": [0, 1]}, {"input_ids": [5, 6, 7]}])
    assert batch.inputs["token_type_ids"].tolist() == [[0, 1, 0], [0, 0, 0]]
    with pytest.raises(lsim.LayersimError, match=r"`data`.*`position_ids`"):
        read([{"input_ids": [3, 4], "position_ids": [0, 1]}, {"input_ids": [5, 6, 7]}])


def test_inputs_that_do_not_fit_are_refused():
    tokens = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(lsim.LayersimError, match=r"`pixel_values`.*\(3, 3, 2, 2\).* 2\b"):
        read({"input_ids": tokens, "pixel_values": torch.ones(3, 3, 2, 2)})
    with pytest.raises(lsim.LayersimError, match=r"`pixel_values`.*'a'"):
        read({"input_ids": tokens, "pixel_values": ["a", "b"]})
    with pytest.raises(lsim.LayersimError, match=r"`pixel_values`.*\(3, 2, 2\).*`batch_size=1`"):
        read([{"input_ids": [3, 4], "pixel_values": torch.ones(3, size, size)} for size in (2, 3)])
    assert len(read([{"input_ids": [3, 4], "pixel_values": torch.ones(3, size, size)} for size in (2, 3)], batch_size=1)) == 2
    texts = Batches(Data([{"text": "a", "pixel_values": torch.ones(3, 2, 2)}], pack=True), words())
    with pytest.raises(lsim.LayersimError, match="`pack`"):
        list(texts)


def words(main: str = "input_ids"):
    return replace(helpers.model(), dtype="f", inputs=INPUTS, main_input=main)


def test_images_beside_texts_go_with_each_row_of_the_text():
    data = [{"text": "w3 w4 w5", "pixel_values": torch.ones(3, 4, 4)}]
    [batch] = Batches(Data(data, seq_len=3), words())
    assert batch.tokens.tolist() == [[1, 3, 4], [1, 5, 2]]
    assert batch.inputs["pixel_values"].shape == (2, 3, 4, 4)


PIXELS = torch.arange(3 * 3 * 2 * 2).view(3, 3, 2, 2).float()
FORMS = {
    "tensor": PIXELS,
    "array": PIXELS.numpy(),
    "list of images": list(PIXELS),
    "mapping": {"pixel_values": PIXELS},
    "mapping of lists": {"pixel_values": PIXELS.tolist()},
    "mapping of a list of arrays": {"pixel_values": list(PIXELS.numpy())},
    "rows": [{"pixel_values": image} for image in PIXELS],
    "batches": [{"pixel_values": PIXELS[:2]}, {"pixel_values": PIXELS[2:]}],
    "data set": datasets.Dataset.from_dict({"pixel_values": PIXELS.numpy()}),
    "data set of tensors": datasets.Dataset.from_dict({"pixel_values": PIXELS.numpy()}).with_format("torch"),
    "stream": datasets.Dataset.from_dict({"pixel_values": PIXELS.numpy()}).to_iterable_dataset(),
    "loader": torch.utils.data.DataLoader([{"pixel_values": image} for image in PIXELS], batch_size=2),
    "generator": lambda: ({"pixel_values": image} for image in PIXELS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_images_gives_the_same_rows(form):
    data = FORMS[form]
    batches = read(data() if callable(data) else data, "pixel_values", batch_size=2)
    assert torch.equal(torch.cat([batch.inputs["pixel_values"] for batch in batches]), PIXELS)
    assert [tuple(batch.tokens.shape) for batch in batches] == [(2, 5), (1, 5)]
    assert not any(batch.has_tokens or batch.tokens.any() for batch in batches)
    assert bool((batches[0].next_tokens == -100).all())
    assert digest(batches) == digest(read(PIXELS, "pixel_values", batch_size=3))
    assert digest(batches) != digest(read(PIXELS + 1, "pixel_values"))


def test_labels_and_skipped_positions_of_images():
    [batch] = read({"pixel_values": PIXELS, "labels": [2, 0, 1]}, "pixel_values", labelled=True, skip_first=1)
    assert batch.labels[:, 0].tolist() == [2, 0, 1]
    assert bool((batch.labels == batch.labels[:, :1]).all())
    assert batch.counted.tolist() == [[False, True, True, True, True]] * 3
    assert batch.attention.all()
    with pytest.raises(lsim.LayersimError, match=r"`labels`.* 2 .* 3\b"):
        read({"pixel_values": PIXELS, "labels": [2, 0]}, "pixel_values", labelled=True)
    [single] = read([{"pixel_values": PIXELS[0], "label": 2}], "pixel_values", labelled=True)
    assert single.labels.tolist() == [[2] * 5]


def test_custom_inputs_of_any_name_and_shape():
    vectors = torch.randn(4, 6)
    for data in (vectors, {"x": vectors}, [{"x": row} for row in vectors], list(vectors), {"features": vectors.numpy()}):
        column = "features" if isinstance(data, dict) and "features" in data else None
        [batch] = read(data, "x", column=column)
        assert torch.equal(batch.inputs["x"], vectors)
    many = torch.randn(4, 2, 6)
    [batch] = read(datasets.Dataset.from_dict({"x": many.numpy()}), "x")
    assert batch.inputs["x"].shape == (4, 2, 6)
    [doubles] = read(vectors.double(), "x")
    assert doubles.inputs["x"].dtype == torch.float64


def test_embeddings_have_positions_of_their_own():
    embeds = torch.randn(2, 4, 8)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    [batch] = read({"inputs_embeds": embeds, "attention_mask": mask, "labels": torch.tensor([1, 2])}, labelled=True)
    assert torch.equal(batch.inputs["inputs_embeds"][0], embeds[0, 1:])
    assert torch.equal(batch.inputs["inputs_embeds"][1], torch.cat([embeds[1, :2], torch.zeros(1, 8)]))
    assert batch.attention.tolist() == [[True] * 3, [True, True, False]]
    assert batch.labels.tolist() == [[1, 1, 1], [2, 2, -100]]
    [ragged] = read([{"inputs_embeds": embeds[0]}, {"inputs_embeds": embeds[1, :2]}])
    assert ragged.attention.sum().item() == 6


@pytest.mark.parametrize("option", [{"max_tokens": 3}, {"seq_len": 3}])
def test_options_that_cut_tokens_are_refused_for_rows_without_them(option):
    with pytest.raises(lsim.LayersimError, match=f"`{next(iter(option))}` is 3"):
        read(PIXELS, "pixel_values", **option)


def test_packing_and_masks_of_pixels_are_refused():
    with pytest.raises(lsim.LayersimError, match="`pack`"):
        read(PIXELS, "pixel_values", pack=True)
    with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.*\(2,\)"):
        read({"pixel_values": PIXELS, "attention_mask": torch.tensor([[1, 1], [1, 0], [1, 1]])}, "pixel_values")
    assert read({"pixel_values": PIXELS, "attention_mask": torch.ones(3, 2)}, "pixel_values")[0].attention.all()


def test_pixels_as_whole_numbers_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`pixel_values`.*torch.uint8"):
        read({"pixel_values": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, "pixel_values")
    with pytest.raises(lsim.LayersimError, match=r"`pixel_values`.*torch.uint8"):
        read(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "pixel_values")


def test_an_additive_mask_of_a_decoder_is_named():
    known = model(token_input="decoder_input_ids", mask_input="decoder_attention_mask")
    data = {"input_ids": [[3]], "decoder_input_ids": [[3, 4]], "decoder_attention_mask": torch.tensor([[0.0, -1e9]])}
    with pytest.raises(lsim.LayersimError, match=r"`decoder_attention_mask` .*-1e\+09 to 0"):
        list(Batches(Data(data), known))


def test_rows_with_and_without_tokens_are_not_batched_together():
    with pytest.raises(lsim.LayersimError, match=r"`data`.*`inputs_embeds`"):
        read([{"input_ids": [3, 4]}, {"inputs_embeds": torch.randn(2, 8)}])


def test_callers_that_read_tokens_refuse_images():
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\(pixel_values\)"):
        list(Batches(Data(PIXELS), model("pixel_values")))


class Processor:
    """Scales images to 0 to 1, as a processor of images does."""

    model_input_names = ("pixel_values",)

    def __call__(self, images, return_tensors):
        assert return_tensors == "pt"
        return {"pixel_values": torch.stack([torch.tensor(np.asarray(x)).permute(2, 0, 1) / 255.0 for x in images]), "size": 2}


IMAGES = np.random.default_rng(0).integers(0, 256, (3, 2, 2, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["list", "array", "tensor", "int64", "data set", "named", "two columns"])
def test_images_go_through_the_processor(kind):
    table = datasets.Dataset.from_dict({"image": IMAGES, "label": [0, 1, 2]})
    table = table.cast_column("image", datasets.Array3D((2, 2, 3), "uint8")).with_format("numpy")
    data = {
        "list": list(IMAGES),
        "array": IMAGES,
        "tensor": torch.tensor(IMAGES),
        "int64": torch.tensor(IMAGES).long(),
        "data set": table,
        "named": table.add_column("caption", ["a", "b", "c"]),
        "two columns": [{"left": image, "right": image[::-1]} for image in IMAGES],
    }[kind]
    known = model("pixel_values", processor=Processor())
    if kind == "two columns":
        with pytest.raises(lsim.LayersimError, match=r"`data`.*left, right.*column='left'"):
            list(Batches(Data(data), known, count_positions=lambda batch: 5))
    column = {"data set": "image", "named": "image", "two columns": "left"}.get(kind)
    batches = Batches(Data(data, column=column), known, kind == "data set", lambda batch: 5)
    [batch] = batches
    expected = torch.tensor(IMAGES).permute(0, 3, 1, 2) / 255.0
    assert torch.equal(batch.inputs["pixel_values"], expected)
    assert kind != "data set" or batch.labels[:, 0].tolist() == [0, 1, 2]
    assert batches.record()["processor"] == "Processor"


@pytest.mark.parametrize("column", [None, "image"])
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, lambda x: torch.tensor(x).long()], ids=["array", "tensor", "int64"])
def test_an_array_of_images_in_a_column_is_one_row_each(kind, column):
    known = model("pixel_values", processor=Processor())
    data = {"image": kind(IMAGES), "label": torch.arange(3)}
    [batch] = Batches(Data(data, column=column), known, True, lambda batch: 5)
    assert torch.equal(batch.inputs["pixel_values"], torch.tensor(IMAGES).permute(0, 3, 1, 2) / 255.0)
    assert batch.labels[:, 0].tolist() == [0, 1, 2]
    [one] = Batches(Data({"image": kind(IMAGES[:1])}, column=column), known, count_positions=lambda batch: 5)
    assert torch.equal(one.inputs["pixel_values"], batch.inputs["pixel_values"][:1])


def test_rows_of_several_images_are_refused():
    class Flat(Processor):
        """Makes one row of each image of a row, as processors of transformers do."""

        def __call__(self, images, return_tensors):
            return super().__call__([y for x in images for y in (x if x.ndim == 4 else [x])], return_tensors)

    known = model("pixel_values", processor=Flat())
    table = datasets.Dataset.from_dict({"image": [IMAGES]})
    table = table.cast_column("image", datasets.Array4D((3, 2, 2, 3), "uint8")).with_format("numpy")
    with pytest.raises(lsim.LayersimError, match=r"`data`.* 1 .* 3 "):
        list(Batches(Data(table, column="image"), known, count_positions=lambda batch: 5))


def test_images_without_a_processor_are_refused_with_the_call():
    with pytest.raises(lsim.LayersimError, match=r"`data`.*tokenizer=AutoImageProcessor"):
        read(list(IMAGES), "pixel_values")


def test_images_of_pil_go_through_the_processor():
    image = pytest.importorskip("PIL.Image")
    data = [image.fromarray(array) for array in IMAGES]
    known = model("pixel_values", processor=Processor())
    expected = torch.tensor(IMAGES).permute(0, 3, 1, 2) / 255.0
    table = datasets.Dataset.from_dict({"picture": data}, features=datasets.Features({"picture": datasets.Image()}))
    for each in (data, table, [{"picture": x} for x in data], {"picture": data}):
        [batch] = Batches(Data(each), known, count_positions=lambda batch: 5)
        assert torch.equal(batch.inputs["pixel_values"], expected)
    with pytest.raises(lsim.LayersimError, match=r"`data`.*Image.*`input_ids`"):
        read(data)


def pair_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {f"w{i}": i for i in range(4, 100)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **special
    )


ROWS = [{"premise": "w4 w5", "hypothesis": "w6", "label": 1}, {"premise": "w7", "hypothesis": "w8 w9 w10", "label": 0}]


@pytest.mark.parametrize("form", ["rows", "data set", "mapping", "table"])
def test_pairs_of_texts_are_joined_by_the_tokenizer(form):
    import pandas

    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    data = {
        "rows": ROWS,
        "data set": datasets.Dataset.from_dict(columns),
        "mapping": columns,
        "table": pandas.DataFrame(columns),
    }
    known = replace(helpers.model(pair_tokenizer()), inputs=INPUTS)
    [batch] = Batches(Data(data[form], column=("premise", "hypothesis")), known, True)
    assert batch.tokens.tolist() == [[1, 4, 5, 2, 6, 2, 0], [1, 7, 2, 8, 9, 10, 2]]
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]]
    assert batch.labels[:, 0].tolist() == [1, 0]
    [single] = Batches(Data(data[form], column="premise"), known)
    assert not single.inputs
    assert Data([], column=("premise", "hypothesis")).record()["column"] == ["premise", "hypothesis"]


def test_pairs_that_cannot_be_joined_are_refused():
    known = replace(helpers.model(pair_tokenizer()), inputs=INPUTS)
    both = {"column": ("premise", "hypothesis")}
    with pytest.raises(lsim.LayersimError, match=r"`column`.*TokenizersBackend"):
        list(Batches(Data(ROWS, **both), words()))
    with pytest.raises(lsim.LayersimError, match=r"`data`.*row 1"):
        list(Batches(Data([ROWS[0], ROWS[1] | {"hypothesis": None}], **both), known))
    with pytest.raises(lsim.LayersimError, match=r"`data`.*hypothesis"):
        list(Batches(Data([{"premise": "w4"}], **both), known))
    with pytest.raises(lsim.LayersimError, match=r"`data`.* 5 in row 1"):
        list(Batches(Data([ROWS[0], ROWS[1] | {"hypothesis": 5}], **both), known))
    for second in (["w4"], "w4"):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*'premise'.*'hypothesis'"):
            list(Batches(Data({"premise": ["w3", "w4"], "hypothesis": second}, **both), known))
    with pytest.raises(lsim.LayersimError, match="`pack`"):
        list(Batches(Data(ROWS, column=("premise", "hypothesis"), pack=True), known))


def test_the_cache_counts_the_memory_of_all_inputs(monkeypatch):
    monkeypatch.setattr("tl_layersim.data.data.MOST_KEPT", 6000)
    images = torch.randn(4, 3, 8, 8)
    kept = Batches(Data(iter(images), batch_size=1), model("pixel_values"), count_positions=lambda batch: 2)
    with pytest.raises(lsim.LayersimError, match=r"`data`.*a test.*list\(data\)"):
        kept.read_ahead("a test", "list(data)")
    again = Batches(Data(images), model("pixel_values"), count_positions=lambda batch: 2)
    assert len(list(again)) == 1


def test_passes_over_one_data_at_the_same_time_keep_their_rows_apart():
    data = Data(torch.randn(4, 3, 8, 8), batch_size=1)
    first, second = (Batches(data, model("pixel_values"), count_positions=lambda batch: 2).rows() for _ in range(2))
    next(first), next(second)
    assert len(list(first)) == len(list(second)) == 3
    assert len(list(Batches(data, model("pixel_values"), count_positions=lambda batch: 2).rows())) == 4


@pytest.mark.parametrize("missing", [None, math.nan, pandas.NA])
def test_a_missing_label_beside_token_ids_is_no_label(missing):
    [batch] = read({"input_ids": [[3, 4], [5, 6]], "labels": [1, missing]}, labelled=True)
    assert batch.labels.tolist() == [[1, 1], [-100, -100]]


def test_position_ids_of_a_single_row_may_have_an_axis_of_rows():
    for values in (torch.arange(3), torch.arange(3)[None]):
        [batch] = read({"input_ids": [3, 4, 5], "position_ids": values})
        assert batch.inputs["position_ids"].tolist() == [[0, 1, 2]]


def series_that_starts_at_ten(rows):
    return pandas.Series(rows, index=range(10, 10 + len(rows)))


@pytest.mark.parametrize("form", [list, datasets.Dataset.from_list, pandas.DataFrame, series_that_starts_at_ten])
def test_labels_of_rows_without_tokens_are_seen_in_every_form(form):
    rows = [{"inputs_embeds": [[0.5, 1.0], [1.5, 2.0]], "label": 1}, {"inputs_embeds": [[0.1, 0.2], [0.3, 0.4]], "label": 0}]
    assert labelled_without_tokens(form(rows), model())
    assert not labelled_without_tokens(form([{"input_ids": [1, 2], "label": 1}]), model())
