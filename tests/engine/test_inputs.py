"""Runs over pairs and images: batches, interrupts, processors, stitching, evaluation and training."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.sources.hooked_module import HookedSource

from .. import oracles
from ..inputs.views import worst
from ..models.input_models import alone, bert_blocks, image_vit, pair_bert, pair_data, pixels, states, vit_blocks
from ..running.options import called

CLASSES = torch.tensor([0, 1, 2, 0, 1, 2] * 2)
CE = torch.nn.functional.cross_entropy


@pytest.mark.light("pairs")
@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_the_size_and_the_order_of_batches_change_nothing(kind):
    model, data = (pair_bert(), pair_data(8)) if kind == "pairs" else (image_vit(), {"pixel_values": pixels(8)})
    whole = lsim.analyze(model, lsim.Data(data, batch_size=8, positions="all"), lsim.Cosine())["cosine"]
    for size in (1, 3):
        result = lsim.analyze(model, lsim.Data(data, batch_size=size, positions="all"), lsim.Cosine())["cosine"]
        assert worst(result, whole) < 1e-12
        assert result.provenance.data == whole.provenance.data

    turned = {name: values.flip(0) for name, values in data.items()}
    assert worst(lsim.analyze(model, lsim.Data(turned, positions="all"), lsim.Cosine())["cosine"], whole) < 1e-12


class Stopped(KeyboardInterrupt):
    pass


@pytest.mark.light("pairs")
@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_an_interrupted_run_resumes_and_other_inputs_are_refused(kind, tmp_path, monkeypatch):
    model, data = (pair_bert(), pair_data(8)) if kind == "pairs" else (image_vit(), {"pixel_values": pixels(8)})
    options = {"batch_size": 2, "positions": "all", "checkpoint": tmp_path / "run.safetensors"}
    undisturbed = lsim.analyze(model, lsim.Data(data, batch_size=2, positions="all"), lsim.Cosine())["cosine"]
    calls = []
    run = HookedSource.run

    def interrupted(self, batch, kernels):
        calls.append(1)
        if len(calls) == 6:
            raise Stopped
        return run(self, batch, kernels)

    monkeypatch.setattr(HookedSource, "run", interrupted)
    with pytest.raises(Stopped):
        called(lsim.analyze, model, data, lsim.Cosine(), **options)
    name = "token_type_ids" if kind == "pairs" else "pixel_values"
    with pytest.raises(lsim.LayersimError, match=r"`data`.*checkpoint"):
        called(lsim.analyze, model, data | {name: 1 - data[name]}, lsim.Cosine(), **options)
    result = called(lsim.analyze, model, data, lsim.Cosine(), **options)["cosine"]
    assert worst(result, undisturbed) == 0
    assert result.provenance.data == undisturbed.provenance.data


def test_attach_gives_the_numbers_of_analyze():
    for model, data in ((pair_bert(), pair_data()), (image_vit(), {"pixel_values": pixels()})):
        with lsim.attach(model, lsim.Cosine(center="none"), positions="all") as probe, torch.no_grad():
            model(**data)
        result = lsim.analyze(model, lsim.Data(data, batch_size=4, positions="all"), lsim.Cosine(center="none"))["cosine"]
        np.testing.assert_allclose(probe.results()["cosine"].values, result.values, atol=1e-12)


def processor():
    """A processor of images whose backend is PIL alone."""
    pytest.importorskip("PIL")
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": 8, "width": 8})


def test_images_of_a_data_set_go_through_the_processor():
    image = pytest.importorskip("PIL.Image")
    maker = np.random.default_rng(0)
    pictures = [image.fromarray(maker.integers(0, 256, (10, 12, 3), dtype=np.uint8)) for _ in range(6)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 2] * 2}, features=features)
    model = image_vit()
    image_processor = processor()
    values = image_processor(images=pictures, return_tensors="pt")["pixel_values"].double()
    expected = oracles.oracle_cosine([states(model, vit_blocks(model), pixel_values=values)])

    for form in (data, pictures, data.to_iterable_dataset(), {"image": pictures}):
        result = lsim.analyze(model, lsim.Data(form, tokenizer=image_processor, batch_size=4, positions="all"), lsim.Cosine())[
            "cosine"
        ]
        np.testing.assert_allclose(result.values, expected["values"], atol=1e-6)
        assert result.provenance.options["processor"] == "ViTImageProcessorPil"
    with pytest.raises(lsim.LayersimError, match=r"^`data` .*images.*tokenizer=AutoImageProcessor"):
        lsim.analyze(model, data, lsim.Cosine())

    model.processor = image_processor
    lens = lsim.analyze(model, data, lsim.LogitLens(labels="data"))["logit_lens"]
    with torch.no_grad():
        loss = CE(model(pixel_values=values).logits, torch.tensor(data["label"]))

    assert float(lens.cross_entropy[-1]) == pytest.approx(float(loss), abs=1e-6)


def stitched_by_hand(front, back, layer: int, blocks, rows: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Logits of the back whose block `layer` takes the input of the front's block `layer`."""
    logits = []
    for inputs in rows:
        inputs_of_block: list[torch.Tensor] = []
        handle = blocks(front)[layer].register_forward_pre_hook(
            lambda _m, a, inputs_of_block=inputs_of_block: inputs_of_block.append(a[0])
        )
        with torch.no_grad():
            front(**inputs)
        handle.remove()
        handle = blocks(back)[layer].register_forward_pre_hook(
            lambda _m, a, inputs_of_block=inputs_of_block: (inputs_of_block[0], *a[1:])
        )
        with torch.no_grad():
            logits.append(back(**inputs).logits)
        handle.remove()
    return torch.cat(logits)


@pytest.mark.heavy("many stitches")
def test_stitching_of_models_of_pairs_is_that_of_plain_torch():
    front = pair_bert(0)
    back = pair_bert(1)
    data = pair_data(12)
    rows = [alone(data, row) for row in range(12)]
    expected = stitched_by_hand(front, back, 2, bert_blocks, rows)
    stitched = lsim.stitch(front, back, lsim.Data(data | {"labels": CLASSES}, batch_size=4), at=(1, 1), adapter="identity")

    assert stitched.loss == pytest.approx(float(CE(expected, CLASSES)), abs=1e-9)

    with torch.no_grad():
        logits = torch.cat([back(**row).logits for row in rows])
        assert stitched.back_loss == pytest.approx(float(CE(logits, CLASSES)), abs=1e-9)
        torch.testing.assert_close(torch.cat([stitched.model(**row).logits for row in rows]), expected)
    measured = lsim.analyze(stitched.model, lsim.Data(data, batch_size=5, positions="all"), lsim.Cosine(center="none"))[
        "cosine"
    ]

    assert measured.provenance.tokens == int(data["attention_mask"].sum())


@pytest.mark.heavy("many stitches")
@pytest.mark.filterwarnings("ignore:Least squares has 50 tokens")
def test_stitching_of_models_of_images_is_that_of_plain_torch():
    front = image_vit(0)
    back = image_vit(1)
    images = pixels(12)
    data = {"pixel_values": images, "labels": CLASSES}
    expected = stitched_by_hand(front, back, 1, vit_blocks, [{"pixel_values": images}])
    stitched = lsim.stitch(front, back, lsim.Data(data, batch_size=4), at=(0, 0), adapter="identity")

    assert stitched.loss == pytest.approx(float(CE(expected, CLASSES)), abs=1e-9)

    with torch.no_grad():
        torch.testing.assert_close(stitched.model(pixel_values=images).logits, expected)
    trained = lsim.stitch(front, back, lsim.Data(data, batch_size=4), at=(0, 0), adapter="linear", fit="lstsq", ridge=0.1)
    assert trained.adapter.weight is not None

    unchanged = lsim.stitch(front, front, data, at=(2, 2), adapter="identity")
    assert unchanged.penalty == 0
    measured = lsim.analyze(stitched.model, lsim.Data(images, positions="all"), lsim.Cosine(center="none"))["cosine"]
    assert measured.provenance.tokens == 60


@pytest.mark.heavy("a simulated server")
def test_stitching_through_simulated_servers():
    import nnsight

    data = {"pixel_values": pixels(12), "labels": CLASSES}
    expected = lsim.stitch(image_vit(0), image_vit(1), lsim.Data(data, batch_size=4), at=(0, 0), adapter="identity")
    places = [nnsight.NNsight(image_vit(seed)) for seed in (0, 1)]
    stitched = called(lsim.stitch, *places, data, at=(0, 0), adapter="identity", batch_size=4, remote="local")
    assert stitched.loss == pytest.approx(expected.loss, abs=1e-9)
    assert stitched.back_loss == pytest.approx(expected.back_loss, abs=1e-9)


@pytest.mark.heavy("a comparison of trainings")
@pytest.mark.filterwarnings("ignore:NC1 is not defined at blocks.0.hook_resid_pre")
@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_evaluate_layers_measures_what_the_model_is_given(kind):
    make, blocks = (pair_bert, bert_blocks) if kind == "pairs" else (image_vit, vit_blocks)
    before = make(0)
    after = make(1)
    data = pair_data(12) if kind == "pairs" else {"pixel_values": pixels(12)}
    rows = [alone(data, row) for row in range(12)]
    result = lsim.evaluate_layers(before, after, lsim.Data(data | {"label": CLASSES}, batch_size=4), center="none")["layers"]
    for number, model in enumerate((before, after)):
        with torch.no_grad():
            logits = torch.cat([model(**row).logits for row in rows])
        assert float(result.values[number, -1]) == pytest.approx(float(CE(logits, CLASSES)), abs=1e-6)
        heads = np.stack([states(model, blocks(model), **row)[:, 0] for row in rows], 1)
        expected = oracles.oracle_cosine([heads], center="none")["values"][:, -1]
        np.testing.assert_allclose(result.cosine_to_last[number], expected, atol=1e-9)


def layer_losses(model, blocks, row: dict[str, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
    """The mean over layers of the cross-entropy of each layer through the model's own norm, pooler and head."""
    outputs: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda _m, _a, out: outputs.append(out)) for block in blocks]
    model(**row)
    for handle in handles:
        handle.remove()
    base = model.base_model
    losses = []
    for x in outputs:
        if hasattr(base, "pooler") and base.pooler is not None:
            logits = model.classifier(base.pooler(x))
        else:
            logits = model.classifier(base.layernorm(x)[:, 0])
        losses.append(CE(logits, label))
    return torch.stack(losses).mean()


@pytest.mark.light("pairs", "embeddings")
@pytest.mark.parametrize("kind", ["pairs", "images", "embeddings"])
def test_one_step_of_a_fine_tune_is_that_of_plain_torch(kind):
    make, blocks = (image_vit, vit_blocks) if kind == "images" else (pair_bert, bert_blocks)
    model = make(0)
    naive = make(0)
    data = {"pixel_values": pixels(12)} if kind == "images" else pair_data(12)
    if kind == "embeddings":
        embeds = model.bert.embeddings.word_embeddings(data.pop("input_ids")).detach()
        data["inputs_embeds"] = embeds
    training = lsim.AlignedTraining(
        steps=1, lr=1e-3, warmup=0, schedule="always", weights="uniform", weight_decay=0.0, clip=1e9, seed=0
    )
    held = {name: values[:2] for name, values in data.items()} | {"labels": CLASSES[:2]}
    lsim.finetune_aligned(model, lsim.Data(data | {"labels": CLASSES}, batch_size=12), training, eval_data=held)
    naive.train()
    optimiser = torch.optim.AdamW(naive.parameters(), lr=1e-3, weight_decay=0.0)
    rows = [alone(data, row) for row in range(12)]
    loss = torch.stack([layer_losses(naive, blocks(naive), row, CLASSES[i : i + 1]) for i, row in enumerate(rows)]).mean()
    loss.backward()
    optimiser.step()
    for (name, parameter), expected in zip(model.named_parameters(), naive.parameters(), strict=True):
        if expected.grad is not None:
            # Where the gradient is 0, AdamW follows the sign of its rounding error.
            moved = expected.grad.abs() > 1e-9
            torch.testing.assert_close(parameter[moved], expected[moved], atol=1e-6, rtol=1e-5, msg=name)
