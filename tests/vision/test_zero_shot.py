"""`zero_shot` against the models' own logits, layer by layer, and the classes and images that it refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers as hf

import tl_layersim as lsim
from tl_layersim.vision import zero_shot, zero_shot_classifier

from ..models.clip_models import END, KINDS, PAD, clip_of, features, pairs
from ..running.options import called

PIXELS = pairs(12)["pixel_values"]
LABELS = torch.arange(12) % 3
ONE_EACH = [torch.tensor([1, 5, END]), torch.tensor([1, 7, 9, 11, END]), torch.tensor([1, 20, 21, END])]
SEVERAL = [[ONE_EACH[0], torch.tensor([1, 30, END])], [ONE_EACH[1]], [ONE_EACH[2], torch.tensor([1, 40, 41, 42, 43, END])]]


def own_logits(model, pixels=PIXELS, prompts=ONE_EACH) -> torch.Tensor:
    """`image class`, one class at a time, so that no prompt is padded."""
    with torch.no_grad():
        columns = [model(input_ids=ids[None], pixel_values=pixels).logits_per_image for ids in prompts]
    return torch.cat(columns, dim=1)


def oracle_logits(model, prompts, blocks: int) -> np.ndarray:
    """Radford et al. 2021, section 3.1: norm 1, mean over prompts, norm 1; the image's features after some blocks."""
    classes = []
    for prompts_of_class in prompts:
        vectors = []
        for ids in prompts_of_class:
            data = {"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
            vector = features(model, "text", data, 3)[0]
            vectors.append(vector / np.linalg.norm(vector))
        mean = np.mean(vectors, axis=0)
        classes.append(mean / np.linalg.norm(mean))
    images = features(model, "vision", {"pixel_values": PIXELS}, blocks)
    images = images / np.linalg.norm(images, axis=1, keepdims=True)
    return float(model.logit_scale.detach().exp()) * images @ np.stack(classes).T


@pytest.mark.light("clip", "alt")
@pytest.mark.parametrize("kind", KINDS)
def test_one_prompt_a_class_gives_the_models_own_logits(kind):
    model = clip_of(kind)
    classifier = zero_shot_classifier(model, prompts=ONE_EACH)
    logits = own_logits(model)
    with torch.no_grad():
        torch.testing.assert_close(classifier(PIXELS), logits, atol=1e-9, rtol=0)
    result = zero_shot(model, lsim.Data(PIXELS, batch_size=5), prompts=ONE_EACH, labels=LABELS)

    assert float(result.accuracy[-1]) == float((logits.argmax(1) == LABELS).double().mean())

    expected = torch.nn.functional.cross_entropy(logits, LABELS)
    torch.testing.assert_close(result.cross_entropy[-1], expected, atol=1e-9, rtol=0)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(
    "prompts", [SEVERAL, {"cat": SEVERAL[0], "dog": SEVERAL[1], "bird": SEVERAL[2]}], ids=["list", "names"]
)
def test_every_layer_equals_the_models_features_after_that_block(prompts):
    model = clip_of()
    result = zero_shot(model, PIXELS, prompts=prompts, labels=LABELS, top_k=(1, 2))
    last = oracle_logits(model, SEVERAL, 4)

    for block in range(4):
        logits = oracle_logits(model, SEVERAL, block + 1)
        order = np.argsort(-logits, axis=1)
        true = LABELS.numpy()[:, None]
        assert float(result.accuracy[block]) == np.mean(order[:, :1] == true)
        assert float(result.top_k_accuracy[1, block]) == np.mean((order[:, :2] == true).any(1))
        assert float(result.agreement[block]) == np.mean(order[:, 0] == last.argmax(1))
        log_prob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        expected = -np.take_along_axis(log_prob, true, 1).mean()
        np.testing.assert_allclose(float(result.cross_entropy[block]), expected, atol=1e-9)
    assert result.layers == ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(4)))
    assert "accuracy of the last layer" in result.headline()
    assert result.plot("accuracy").data


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_labels_come_from_the_data_or_by_row():
    data = {"pixel_values": PIXELS, "label": LABELS}
    by_data = zero_shot(clip_of(), data, prompts=ONE_EACH)
    by_row = zero_shot(clip_of(), lsim.Data(PIXELS, batch_size=5), prompts=ONE_EACH, labels=LABELS)
    torch.testing.assert_close(by_data.accuracy, by_row.accuracy)

    single = zero_shot(clip_of(), PIXELS[:1], prompts=ONE_EACH, labels=LABELS[:1])
    assert single.positions == 1


def test_the_classifier_is_a_model_like_any_other():
    model = zero_shot_classifier(clip_of(), prompts=ONE_EACH)
    data = {"pixel_values": PIXELS, "label": LABELS}
    analyzers = [lsim.Cosine(center="none"), lsim.Saturation(), lsim.ExitCurve(labels="data"), lsim.LogitLens(labels="data")]
    report = lsim.analyze(model, data, analyzers)

    assert float(report["logit_lens"].agreement[-1]) == 1.0

    with torch.no_grad():
        states = clip_of().vision_model(PIXELS, output_hidden_states=True).hidden_states
    expected = torch.nn.functional.cosine_similarity(states[1][:, 0], states[4][:, 0]).mean()
    torch.testing.assert_close(report["cosine"].values[1, 4], expected)

    heads = lsim.analyze(model, data, lsim.CKA(minibatch=12), at="attn_out")["cka"]
    assert heads.layers[0] == "blocks.0.hook_attn_out"

    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none"), positions="first") as probe:
        model(PIXELS)
    torch.testing.assert_close(probe.results()["cosine"].values, report["cosine"].values)
    with pytest.raises(lsim.LayersimError, match="zero-shot classifier"):
        lsim.analyze(lsim.open_model(model, layers=["vision_model.encoder.layers.0"]), data, "cosine")


def test_the_clip_itself_is_not_changed():
    model = copy.deepcopy(clip_of()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero_shot(model, PIXELS, prompts=ONE_EACH, labels=LABELS)

    assert all(module.training for module in model.modules())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_half_precision_gives_the_models_own_predictions():
    model = copy.deepcopy(clip_of()).to(torch.bfloat16)
    result = zero_shot(model, PIXELS, prompts=ONE_EACH, labels=LABELS)
    logits = own_logits(model, PIXELS.to(torch.bfloat16)).float()
    sure = logits.topk(2, dim=1).values.diff(dim=1).abs()[:, 0] > 0.1

    assert abs(float(result.accuracy[-1]) - float((logits.argmax(1) == LABELS).double().mean())) <= float(
        (~sure).double().mean()
    )


BAD = {
    "no prompt of a class": ({"prompts": [ONE_EACH[0], []]}, "no prompt for class 1"),
    "one class": ({"prompts": [ONE_EACH[0]]}, r"`prompts`.* 1\b"),
    "neither": ({}, "`class_names`.*`prompts`"),
    "both": ({"class_names": ["cat", "dog"], "prompts": ONE_EACH}, "`class_names`.*`prompts`"),
    "no place for a name": ({"class_names": ["cat", "dog"], "template": "a photo"}, "`template` is 'a photo'"),
    "texts without a tokenizer": ({"class_names": ["cat", "dog"]}, "has no tokenizer"),
    "no end of text": ({"prompts": [torch.tensor([1, 5]), ONE_EACH[0]]}, r"`prompts`.* 2 .* 98\b"),
    "label out of range": ({"prompts": ONE_EACH, "labels": LABELS + 1}, r"`labels`.* 3; .* 0 to 2\b"),
    "fewer labels": ({"prompts": ONE_EACH, "labels": LABELS[:4]}, r"`labels`.*\(4,\).* 12\b"),
    "no labels": ({"prompts": ONE_EACH, "labels": "data"}, "`images` has no labels"),
    "top_k": ({"prompts": ONE_EACH, "top_k": 0}, "`top_k` is"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_classes_and_labels_are_refused(case):
    options, message = BAD[case]
    with pytest.raises(lsim.LayersimError, match=message):
        called(zero_shot, clip_of(), PIXELS, **{"labels": LABELS} | options)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (["a text", "another"], "takes `pixel_values`"),
        (torch.ones(2, 5, dtype=torch.int64), "takes `pixel_values`, but the data are tokens"),
        (PIXELS[:, :, :4], r"ZeroShotClassifier.*pixel_values"),
    ],
)
def test_other_data_than_images_is_refused(images, message):
    with pytest.raises(lsim.LayersimError, match=message):
        zero_shot(clip_of(), images, prompts=ONE_EACH, labels=LABELS[: len(images)])


def test_other_models_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`clip` is .*CLIPModel, "):
        zero_shot(clip_of().vision_model, PIXELS, prompts=ONE_EACH, labels=LABELS)

    model = copy.deepcopy(clip_of())
    del model.visual_projection
    with pytest.raises(AttributeError, match="visual_projection"):
        zero_shot(model, PIXELS, prompts=ONE_EACH, labels=LABELS)


def test_a_model_with_other_logits_is_refused():
    class Own(hf.CLIPModel):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.logits_per_image = output.logits_per_image - 3.0
            return output

    model = copy.deepcopy(clip_of())
    model.__class__ = Own
    with pytest.raises(lsim.LayersimError, match="`logits_per_image`"):
        zero_shot_classifier(model, prompts=ONE_EACH)


def test_texts_and_images_are_read_through_the_processor():
    datasets = pytest.importorskip("datasets")
    from ..models.clip_processor import image, processor, small_clip

    clip_processor = processor()
    model = small_clip(clip_processor)
    names = ["cat", "dog", "bird"]
    templates = ["a photo of a {}.", "the {}."]
    images = [image(seed) for seed in range(6)]
    rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 2, 0, 1, 2]})
    result = zero_shot(model, lsim.Data(rows, tokenizer=clip_processor, batch_size=4), names, template=templates)
    with torch.no_grad():
        texts = clip_processor(text=[t.format(n) for n in names for t in templates], return_tensors="pt", padding=True)
        vectors = torch.nn.functional.normalize(model.get_text_features(**texts).pooler_output, dim=-1)
        classes = torch.nn.functional.normalize(vectors.view(3, 2, -1).mean(1), dim=-1)
        pixels = clip_processor(images=images, return_tensors="pt").pixel_values
        image_vectors = torch.nn.functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
    logits = model.logit_scale.exp().detach() * image_vectors @ classes.T
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    torch.testing.assert_close(
        result.cross_entropy[-1], torch.nn.functional.cross_entropy(logits, labels).double(), atol=1e-5, rtol=0
    )
    assert float(result.accuracy[-1]) == float((logits.argmax(1) == labels).double().mean())
    model.tokenizer = clip_processor.tokenizer
    model.processor = clip_processor.image_processor
    carried = zero_shot(model, rows, names, template=templates)
    torch.testing.assert_close(carried.accuracy, result.accuracy)


def test_a_prompt_of_token_ids_has_no_padding():
    prompts = [torch.tensor([PAD, 5, PAD, 9, END]), *ONE_EACH[1:]]
    with torch.no_grad():
        logits = zero_shot_classifier(clip_of(), prompts=[prompts[0].tolist(), *prompts[1:]])(PIXELS)
    torch.testing.assert_close(logits, own_logits(clip_of(), prompts=prompts), atol=1e-9, rtol=0)
