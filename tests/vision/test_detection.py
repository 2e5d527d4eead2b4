"""`detection_by_layer` against brute force over matchings in float64, and against the losses of transformers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.vision import detection_by_layer
from tl_layersim.vision.detection import Objects, generalised_iou, match

from ..models.detectors import CLASSES, LAYERS, QUERIES, annotation, outputs_by_layer, scenes, tiny_detr

FIELDS = ("accuracy", "box_l1", "giou", "no_object", "cross_entropy", "loss")
with_and_without_auxiliary_loss = pytest.mark.parametrize("auxiliary_loss", [False, True])


def giou_of(a, b) -> float:
    """Generalised IoU of two boxes, by areas of intervals."""
    sides = []
    for axis in (0, 1):
        low_a, high_a, low_b, high_b = (box[axis] + sign * box[axis + 2] / 2 for box in (a, b) for sign in (-1, 1))
        sides.append((max(0.0, min(high_a, high_b) - max(low_a, low_b)), max(high_a, high_b) - min(low_a, low_b)))
    overlap = sides[0][0] * sides[1][0]
    around = sides[0][1] * sides[1][1]
    union = a[2] * a[3] + b[2] * b[3] - overlap
    return overlap / union - (around - union) / around


def oracle(model, data) -> dict[str, list[float]]:
    """The fields of the result, from all matchings of each image and layer in turn."""
    c = model.config
    expected = {name: [] for name in FIELDS}
    logits, boxes = outputs_by_layer(model, data)
    for layer in range(LAYERS):
        sums = dict.fromkeys(FIELDS, 0.0)
        matched = 0
        unmatched = 0
        objects = 0
        weight = 0.0
        for row, labels in enumerate(data["labels"]):
            p = logits[layer, row].softmax(-1).tolist()
            b = boxes[layer, row].tolist()
            classes = labels["class_labels"].tolist()
            truth = labels["boxes"].double().tolist()

            def cost(q, o, p=p, b=b, classes=classes, truth=truth):
                distance = sum(abs(x - y) for x, y in zip(b[q], truth[o], strict=True))
                return -c.class_cost * p[q][classes[o]] + c.bbox_cost * distance - c.giou_cost * giou_of(b[q], truth[o])

            few = min(len(b), len(classes))
            pairs = (
                [list(zip(chosen, range(few), strict=True)) for chosen in itertools.permutations(range(len(b)), few)]
                if few == len(classes)
                else [list(zip(range(few), chosen, strict=True)) for chosen in itertools.permutations(range(len(classes)), few)]
            )
            best = min(pairs, key=lambda pairs: sum(cost(q, o) for q, o in pairs))
            objects = objects + len(classes)
            matched = matched + few
            unmatched = unmatched + len(b) - few
            of = dict(best)
            for q in range(len(b)):
                predicted = p[q].index(max(p[q]))
                target = classes[of[q]] if q in of else CLASSES
                importance = 1.0 if q in of else c.eos_coefficient
                sums["cross_entropy"] -= importance * math.log(p[q][target])
                weight += importance
                if q in of:
                    sums["accuracy"] += predicted == target
                    sums["box_l1"] += sum(abs(x - y) for x, y in zip(b[q], truth[of[q]], strict=True))
                    sums["giou"] += giou_of(b[q], truth[of[q]])
                else:
                    sums["no_object"] += predicted == CLASSES
        loss = c.bbox_loss_coefficient * sums["box_l1"] + c.giou_loss_coefficient * (matched - sums["giou"])
        expected["loss"].append(sums["cross_entropy"] / weight + loss / max(objects, 1))
        expected["cross_entropy"].append(sums["cross_entropy"] / weight)
        expected["no_object"].append(sums["no_object"] / unmatched if unmatched else math.nan)
        for name, per in (("accuracy", 1), ("box_l1", 4), ("giou", 1)):
            expected[name].append(sums[name] / (per * matched) if matched else math.nan)
    return expected


def agrees(result, model, data, atol: float = 1e-10) -> None:
    for name, values in oracle(model, data).items():
        expected = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(getattr(result, name), expected, atol=atol, rtol=0, equal_nan=True, msg=name)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@with_and_without_auxiliary_loss
@pytest.mark.parametrize("seed", [0, 1])
def test_every_number_equals_brute_force_in_every_batch_size(auxiliary_loss, seed):
    model = tiny_detr(auxiliary_loss, seed=seed)
    data = scenes(seed=seed)
    for size in (1, 3, 16):
        result = detection_by_layer(model, lsim.Data(data, batch_size=size))
        agrees(result, model, data)

    assert (result.images, result.objects, result.matched) == (4, 6, 6)
    assert result.layers[1:] == tuple(f"decoder.blocks.{i}.hook_resid_post" for i in range(LAYERS))
    assert result.coordinates("layer") == result.layers[1:]


@with_and_without_auxiliary_loss
def test_losses_are_those_of_transformers(auxiliary_loss):
    model = tiny_detr(auxiliary_loss, torch.float32)
    data = scenes()
    result = detection_by_layer(model, data)
    with torch.no_grad():
        out = model(**data)
    names = {**{k: f"_{k}" for k in range(LAYERS - 1)}, LAYERS - 1: ""}
    layers = range(LAYERS) if auxiliary_loss else [LAYERS - 1]

    for layer in layers:
        expected = [float(out.loss_dict[f"{name}{names[layer]}"]) for name in ("loss_ce", "loss_bbox", "loss_giou")]
        losses = [float(x[layer]) for x in (result.cross_entropy, 4 * result.box_l1, 1 - result.giou)]
        assert losses == pytest.approx(expected, abs=1e-5)
    assert float(result.loss[list(layers)].sum()) == pytest.approx(float(out.loss), rel=1e-5)


def test_the_mask_of_pixels_reaches_the_model():
    model = tiny_detr()
    data = scenes((1, 2))
    masked = detection_by_layer(model, data)
    whole = detection_by_layer(model, {name: data[name] for name in ("pixel_values", "labels")})
    assert float((masked.box_l1 - whole.box_l1).abs().max()) > 1e-6


def test_matching_equals_that_of_transformers():
    from transformers.loss.loss_for_object_detection import HungarianMatcher

    generator = torch.Generator().manual_seed(3)
    weights = {"class_cost": 1, "bbox_cost": 5, "giou_cost": 2}
    for count in (0, 1, 5, 12):
        logits = torch.randn(8, CLASSES + 1, generator=generator).double()
        boxes = annotation(8, generator)["boxes"].double()
        labels = annotation(count, generator)
        objects = Objects(labels["class_labels"], labels["boxes"].double())
        target = [{"class_labels": objects.classes, "boxes": objects.boxes}]
        [expected] = HungarianMatcher(1, 5, 2)({"logits": logits[None], "pred_boxes": boxes[None]}, target)
        assert [x.tolist() for x in match(logits, boxes, objects, weights)] == [x.tolist() for x in expected]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_weights_of_the_configuration_decide():
    model = tiny_detr()
    data = scenes((3, 2, 3))
    settings = {"class_cost": 0, "bbox_cost": 0, "giou_cost": 1, "eos_coefficient": 0.7, "bbox_loss_coefficient": 3}
    before = detection_by_layer(model, data)
    for name, value in settings.items():
        setattr(model.config, name, value)
    result = detection_by_layer(model, data)
    agrees(result, model, data)

    assert bool((result.giou >= before.giou - 1e-12).all())
    assert result.provenance.options["giou_cost"] == 1


@pytest.mark.parametrize("counts", [(1,), (0, 2), (1, 1, 1, 1, 1)])
def test_few_objects(counts):
    model = tiny_detr()
    data = scenes(counts)
    agrees(detection_by_layer(model, data), model, data)


def test_images_without_any_object_have_only_unmatched_queries():
    model = tiny_detr()
    data = scenes((0, 0))
    result = detection_by_layer(model, data)
    agrees(result, model, data)

    assert bool(torch.cat([result.accuracy, result.box_l1, result.giou]).isnan().all())
    assert bool(result.no_object.isfinite().all() and result.loss.isfinite().all())
    assert list(result.headline().values()) == [float(result.no_object[-1])]


def test_more_objects_than_queries():
    model = tiny_detr()
    data = scenes((QUERIES + 2, QUERIES))
    with pytest.warns(lsim.LayersimWarning, match=f"2 of {2 * QUERIES + 2} objects have no query"):
        result = detection_by_layer(model, data)
    agrees(result, model, data)

    assert (result.objects, result.matched) == (2 * QUERIES + 2, 2 * QUERIES)
    assert bool(result.no_object.isnan().all())


def test_generalised_iou_of_boxes_that_touch_overlap_and_stand_apart():
    generator = torch.Generator().manual_seed(0)
    a, b = (annotation(20, generator)["boxes"].double() for _ in range(2))
    expected = [[giou_of(x, y) for y in b.tolist()] for x in a.tolist()]
    torch.testing.assert_close(generalised_iou(a[:, None], b), torch.tensor(expected, dtype=torch.float64))


def rows(data) -> list[dict]:
    return [{name: values[i] for name, values in data.items()} for i in range(len(data["labels"]))]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_all_forms_of_the_data_give_the_same_numbers():
    import datasets

    model = tiny_detr()
    data = scenes()
    expected = detection_by_layer(model, data)
    batches = [{name: values[i : i + 2] for name, values in data.items()} for i in (0, 2)]
    alone = {name: data[name] for name in ("pixel_values", "pixel_mask")}
    lists = [{n: v if isinstance(v, dict) else v.tolist() for n, v in row.items()} for row in rows(data)]
    for row in lists:
        row["labels"] = {name: values.tolist() for name, values in row["labels"].items()}
    loader = torch.utils.data.DataLoader(
        rows(data),
        batch_size=3,
        collate_fn=lambda of: {n: [r[n] for r in of] if n == "labels" else torch.stack([r[n] for r in of]) for n in of[0]},
    )
    forms = {
        "rows": (rows(data), None),
        "batches": (batches, None),
        "generator": ((row for row in rows(data)), None),
        "labels apart": (alone, data["labels"]),
        "generator of labels": (alone, (annotations for annotations in data["labels"])),
        "DataLoader": (loader, None),
        "data set": (datasets.Dataset.from_list(lists), None),
    }
    for name, (form, labels) in forms.items():
        result = detection_by_layer(model, lsim.Data(form, batch_size=2), labels=labels)
        for field in FIELDS:
            torch.testing.assert_close(getattr(result, field), getattr(expected, field), atol=1e-6, rtol=0, msg=name)
    assert result.provenance.data == expected.provenance.data


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_images_go_through_the_processor():
    PIL = pytest.importorskip("PIL.Image")
    from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil

    processor = DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64})
    generator = torch.Generator().manual_seed(0)
    pictures = [
        PIL.fromarray(torch.randint(0, 256, (h, w, 3), generator=generator, dtype=torch.uint8).numpy())
        for h, w in ((40, 40), (40, 60))
    ]
    labels = [annotation(count, generator) for count in (2, 1)]
    model = tiny_detr(dtype=torch.float32)
    result = detection_by_layer(model, lsim.Data(pictures, tokenizer=processor, batch_size=1), labels=labels)
    by_hand = [processor(images=picture, return_tensors="pt") for picture in pictures]
    apart = [detection_by_layer(model, dict(inputs), labels=[label]) for inputs, label in zip(by_hand, labels, strict=True)]
    expected = (2 * apart[0].box_l1 + apart[1].box_l1) / 3
    torch.testing.assert_close(result.box_l1, expected)


@with_and_without_auxiliary_loss
def test_half_precision(auxiliary_loss):
    model = tiny_detr(auxiliary_loss, torch.bfloat16)
    data = scenes()
    result = detection_by_layer(model, data)
    whole = oracle(tiny_detr(auxiliary_loss), data)

    torch.testing.assert_close(result.box_l1, torch.tensor(whole["box_l1"]), atol=0.02, rtol=0, check_dtype=False)
    assert result.box_l1.dtype == torch.float64


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_model_in_training_is_measured_without_dropout_and_left_as_it_was():
    model = tiny_detr(dropout=0.5)
    data = scenes()
    expected = detection_by_layer(model, data)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    result = detection_by_layer(model, data)

    torch.testing.assert_close(result.box_l1, expected.box_l1)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_result_is_a_file_a_table_and_figures(tmp_path):
    result = detection_by_layer(tiny_detr(), scenes())
    again = lsim.load(result.save(tmp_path / "detection.safetensors"))
    for name in FIELDS:
        assert torch.equal(getattr(again, name), getattr(result, name))
    assert again.provenance == result.provenance

    table = result.to_frame()
    assert list(table.columns) == ["layer", "accuracy", "box_l1", "giou", "no_object", "cross_entropy", "loss"]

    boxes = result.plot("box_l1").layout
    assert boxes.yaxis.title.text == "Box L1 (fraction of the image)"
    assert boxes.xaxis.title.text == "Decoder layer"

    words = f"{result.images} images, {result.provenance.tokens} queries"
    assert boxes.title.subtitle.text == f"DetrForObjectDetection · {words}"
    assert result.provenance.tokens == result.images * tiny_detr().config.num_queries

    page = lsim.Report({"detection": result}).to_html(tmp_path / "page.html").read_text()
    assert "Box error of each layer" in page
    assert "class accuracy of the last layer" in repr(result)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_annotations_are_a_part_of_the_record():
    model = tiny_detr()
    data = scenes()
    first = detection_by_layer(model, data).provenance
    data["labels"][0]["boxes"] = data["labels"][0]["boxes"] / 2

    second = detection_by_layer(model, data).provenance

    assert first.data == second.data
    assert first.options["labels"] != second.options["labels"]


ONE = {"class_labels": [1], "boxes": [[0.5, 0.5, 0.2, 0.2]]}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([ONE | {"class_labels": [CLASSES]}, ONE], r"`labels`.* 0 .*\b3 to 3\b"),
        ([ONE, ONE | {"class_labels": [-1]}], r"`labels`.* 1 .*-1 to -1\b"),
        ([ONE | {"boxes": [[16.0, 16.0, 8.0, 8.0]]}, ONE], r"`labels`.* 0 .*\b8 to 16\b"),
        ([ONE | {"boxes": [[0.5, 0.5, -0.2, 0.2]]}, ONE], r"`labels`.* 0 .*-0\.2 to 0\.5\b"),
        ([ONE | {"boxes": [[0.5, 0.5, 0.2, 0.0]]}, ONE], r"`labels`.* 0 .*\b0 to 0\.5\b"),
        ([ONE | {"boxes": [[0.5, 0.5, 0.2, math.nan]]}, ONE], "`labels`.* 0 .*nan to nan"),
        ([ONE | {"boxes": [[0.5, 0.5, 0.2]]}, ONE], r"`labels`.* 0 .*\(1, 3\)"),
        ([ONE | {"class_labels": []}, ONE], r"`labels`.* 0 .*\(0,\).*\(1, 4\)"),
        ([{"class_labels": [], "boxes": [[0.5, 0.5, 0.2]]}, ONE], r"`labels`.* 0 .*\(0,\).*\(1, 3\)"),
        ([ONE | {"class_labels": [1, 2]}, ONE], r"`labels`.* 0 .*\(2,\).*\(1, 4\)"),
        ([ONE | {"class_labels": [1.5]}, ONE], "`labels`.* 0 .*torch.float64"),
        ([ONE | {"class_labels": ["cat"]}, ONE], "`labels`.* 0 .*dict of 2 str"),
        ([{"class_labels": [1]}, ONE], "`labels`.* 0 .*dict of 1 str"),
        ([1, 2], "`labels`.* 0 is 1;"),
        ("a text", "`labels` is 'a text'"),
        (ONE, "`labels` is a dict"),
        (5, "`labels` is 5;"),
        ([ONE], r"`labels`.*\b1\b.*\b2\b"),
        ([ONE] * 3, r"`labels`.*\b3\b.*\b2\b"),
        ([], r"`data`.*\b2\b.*`labels`"),
        (None, r"`data`.*\b2\b.*`labels`"),
    ],
    ids=str,
)
def test_annotations_that_are_none_are_refused(labels, message):
    with pytest.raises(lsim.LayersimError, match=message):
        detection_by_layer(tiny_detr(), scenes()["pixel_values"][:2], labels=labels)


def test_boxes_may_fill_the_image():
    from tl_layersim.vision.detection import as_objects

    whole = as_objects(ONE | {"boxes": [[0.5, 0.5, 1.0, 1.0]]}, 0, CLASSES)
    assert whole.boxes.tolist() == [[0.5, 0.5, 1.0, 1.0]]


def test_annotations_beside_another_number_of_images_are_refused():
    data = scenes()
    for mismatched in (
        data | {"labels": data["labels"][:3]},
        [data | {"labels": data["labels"][:3]}],
        [{"pixel_values": data["pixel_values"], "labels": data["labels"][0]}],
        # As many in all, at other images.
        [data | {"labels": data["labels"] + data["labels"][:1]}, data | {"labels": data["labels"][1:]}],
    ):
        with pytest.raises(lsim.LayersimError, match=r"`labels`.* \d .* \d\b"):
            detection_by_layer(tiny_detr(), mismatched)

    first, second, *_ = rows(data)
    del second["labels"]
    with pytest.raises(lsim.LayersimError, match=r"`labels`.* \d .* \d\b"):
        detection_by_layer(tiny_detr(), [first, second])


def test_data_that_are_no_images_are_refused():
    for data, message in (
        (["a text"], "`data`.*DetrForObjectDetection.*`pixel_values`"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.long)}, "takes `pixel_values`"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.long), "must be floating-point"),
    ):
        with pytest.raises(lsim.LayersimError, match=message):
            detection_by_layer(tiny_detr(), data, labels=[ONE])


def other_detectors():
    import transformers as hf

    from ..models.detectors import BACKBONE

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = hf.ConditionalDetrConfig(backbone_config=BACKBONE, num_queries=4, **sizes)
    yield hf.ConditionalDetrForObjectDetection(config), "offsets from reference points"
    vit = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    yield hf.YolosForObjectDetection(hf.YolosConfig(image_size=[32, 32], num_detection_tokens=4, **vit)), "of object queries"
    yield tiny_detr().model, "`model`.*DetrModel.*DetrForObjectDetection"


def test_other_models_are_refused_with_the_reason():
    for model, message in other_detectors():
        with pytest.raises(lsim.LayersimError, match=message):
            detection_by_layer(model, torch.zeros(1, 3, 32, 32), labels=[ONE])
    nnsight = pytest.importorskip("nnsight")
    with pytest.raises(lsim.LayersimError, match=r"`model`.*NNsight"):
        detection_by_layer(nnsight.NNsight(tiny_detr()), torch.zeros(1, 3, 32, 32), labels=[ONE])


def test_heads_that_are_not_the_model_s_are_refused():
    model = tiny_detr()
    handle = model.bbox_predictor.register_forward_hook(lambda _m, _a, out: out + 1)
    with pytest.raises(lsim.LayersimError, match=r"boxes.* 0\.\d+\b"):
        detection_by_layer(model, scenes())
    handle.remove()


def test_predictions_that_are_not_finite_are_refused():
    model = tiny_detr()
    with torch.no_grad():
        model.class_labels_classifier.bias[0] = math.nan
    with pytest.raises(lsim.LayersimError, match=r"\b(nan|NaN)\b"):
        detection_by_layer(model, scenes())
