"""A DETR: its decoder of object queries by default, its encoder by `at=`, and the logit lens through its class head."""

from __future__ import annotations

import math

import pytest
import torch

import tl_layersim as lsim

from ..models.detectors import LAYERS, QUERIES, outputs_by_layer, scenes, tiny_detr

COSINE = lsim.Cosine(center="none")
# Queries start as zeros, which have no cosine.
pytestmark = pytest.mark.filterwarnings("ignore:.*cosine is not defined|.*zero:tl_layersim.LayersimWarning")
with_and_without_auxiliary_loss = pytest.mark.parametrize("auxiliary_loss", [False, True])


def images(**inputs):
    data = scenes()
    return {"pixel_values": data["pixel_values"], "pixel_mask": data["pixel_mask"]} | inputs


def by_hand(model, stack: str, data) -> torch.Tensor:
    """Outputs of the blocks of a stack, `block row pos width`."""
    outputs = []
    handles = []
    for block in getattr(model.model, stack).layers:
        handles.append(block.register_forward_hook(lambda _m, _a, out: outputs.append(out.detach())))
    with torch.no_grad():
        model(pixel_values=data["pixel_values"].to(model.dtype), pixel_mask=data.get("pixel_mask"))
    for handle in handles:
        handle.remove()
    return torch.stack(outputs)


def cosines(x: torch.Tensor) -> torch.Tensor:
    unit = x / x.norm(dim=-1, keepdim=True)
    return torch.einsum("atd,btd->abt", unit, unit).mean(-1)


@pytest.mark.light("False")
@with_and_without_auxiliary_loss
def test_the_decoder_is_read_with_object_queries_as_positions(auxiliary_loss):
    model = tiny_detr(auxiliary_loss)
    data = images()
    expected = cosines(by_hand(model, "decoder", data).flatten(1, 2))

    for size in (1, 3, 16):
        result = lsim.analyze(model, lsim.Data(data, batch_size=size), COSINE)["cosine"]
        torch.testing.assert_close(result.values[1:, 1:], expected, atol=1e-9, rtol=0)
        assert result.provenance.tokens == 4 * QUERIES
    assert result.layers == (
        "decoder.blocks.0.hook_resid_pre",
        *(f"decoder.blocks.{i}.hook_resid_post" for i in range(LAYERS)),
    )
    assert "post-norm" in result.provenance.basis
    assert ("config.auxiliary_loss" in result.provenance.basis) == auxiliary_loss


@with_and_without_auxiliary_loss
def test_attach_reads_the_decoder_and_labels_do_not_disturb(auxiliary_loss):
    # The loss of transformers takes float32 only.
    model = tiny_detr(auxiliary_loss, torch.float32)
    data = scenes()
    expected = cosines(by_hand(model, "decoder", data).flatten(1, 2).double())
    with lsim.attach(model, [COSINE, lsim.LogitLens(labels="none")]) as probe:
        model(**data).loss.backward()
    report = probe.results()

    torch.testing.assert_close(report["cosine"].values[1:, 1:], expected, atol=1e-6, rtol=0)

    whole = lsim.analyze(model, images(), lsim.LogitLens(labels="none"))["logit_lens"]
    torch.testing.assert_close(report["logit_lens"].entropy, whole.entropy)


def test_the_encoder_is_read_at_the_places_of_the_feature_map():
    model = tiny_detr()
    data = {"pixel_values": scenes()["pixel_values"]}
    expected = cosines(by_hand(model, "encoder", data).flatten(1, 2))

    result = lsim.analyze(model, data, COSINE, at="encoder.resid_post")["cosine"]

    torch.testing.assert_close(result.values[1:, 1:], expected, atol=1e-9, rtol=0)
    # A feature map of 8 x 8 places for each of 4 images.
    assert result.provenance.tokens == 4 * 64
    assert result.layers[-1] == "encoder.blocks.1.hook_resid_post"


def test_places_of_padding_in_the_encoder_are_not_counted():
    model = tiny_detr()
    data = images()
    with pytest.raises(lsim.LayersimError, match=r"`pixel_mask` \(4, 32, 32\).* 384 "):
        lsim.analyze(model, data, COSINE, at="encoder.resid_post")

    hidden = by_hand(model, "encoder", data)
    # 20 of the 32 columns of the second image are 5 of the 8 columns of its feature map.
    counted = torch.ones(4, 8, 8, dtype=torch.bool)
    counted[1, :, 5:] = False
    with torch.no_grad(), lsim.attach(model, COSINE, at="encoder.resid_post") as probe:
        model(data["pixel_values"].double(), pixel_mask=data["pixel_mask"])
    result = probe.results()["cosine"]

    assert result.provenance.tokens == int(counted.sum()) == 4 * 64 - 24
    torch.testing.assert_close(result.values[1:, 1:], cosines(hidden[:, counted.flatten(1)]), atol=1e-9, rtol=0)


def test_masked_queries_are_refused():
    hidden = torch.ones(4, QUERIES, dtype=torch.long)
    lsim.analyze(tiny_detr(), images(decoder_attention_mask=hidden), COSINE)
    hidden[0, 1] = 0
    with pytest.raises(lsim.LayersimError, match=r"`decoder_attention_mask` \(1, 4\).* 1 "):
        lsim.analyze(tiny_detr(), images(decoder_attention_mask=hidden), COSINE)


@with_and_without_auxiliary_loss
def test_the_lens_without_targets_equals_the_naive_lens(auxiliary_loss):
    model = tiny_detr(auxiliary_loss)
    data = images()
    report = lsim.analyze(model, data, [lsim.LogitLens(labels="none"), lsim.ExitCurve(labels="none"), lsim.Saturation()])
    hidden = by_hand(model, "decoder", data)
    norm = model.model.decoder.layernorm
    with torch.no_grad():
        # With auxiliary losses, the stream between blocks is the norm of a block's output.
        stream = norm(hidden) if auxiliary_loss else hidden
        log_p = model.class_labels_classifier(norm(stream)).log_softmax(-1).flatten(1, 2)
    logits, _ = outputs_by_layer(model, data)

    torch.testing.assert_close(log_p[-1], logits[-1].log_softmax(-1).flatten(0, 1))

    best = log_p.argmax(-1)
    p = log_p.exp()
    lens = report["logit_lens"]
    torch.testing.assert_close(lens.agreement, (best == best[-1]).double().mean(1))
    torch.testing.assert_close(lens.entropy, -(p * log_p).sum(-1).mean(1))
    torch.testing.assert_close(lens.kl_to_final, (p[-1] * (log_p[-1] - log_p)).sum(-1).mean(1))
    for name in ("values", "perplexity", "accuracy", "top_k_accuracy", "target_probability", "monotone_share"):
        assert bool(getattr(lens, name).isnan().all()), name
    assert not any(math.isnan(x) for result in report.values() for x in result.headline().values())
    assert lens.targets == 0

    final = best == best[-1]
    layers = [min(k for k in range(LAYERS) if bool(final[k:, query].all())) for query in range(final.shape[1])]
    assert report["saturation"].counts.tolist() == [layers.count(k) for k in range(LAYERS)]

    curve = report["exit_curve"]
    assert curve.at(1.0).agreement == 1
    assert curve.threshold_for(agreement=0.0) == 0.0
    assert bool(curve.accuracy.isnan().all())
    assert "model.decoder.layernorm" in lens.unembedding


def test_the_setting_of_auxiliary_losses_is_a_part_of_the_model():
    """docs/detection.md says so; transformers also norms the stream between layers where it is set."""
    model = tiny_detr()
    data = images()
    pixels = data["pixel_values"].double()
    with torch.no_grad():
        without = model(pixels).pred_boxes
        model.config.auxiliary_loss = True
        assert float((model(pixels).pred_boxes - without).abs().max()) > 1e-3
        inputs_of_block = []
        handle = model.model.decoder.layers[1].register_forward_pre_hook(lambda _m, args: inputs_of_block.append(args[0]))
        first = by_hand(model, "decoder", {"pixel_values": pixels})[0]
        handle.remove()
        torch.testing.assert_close(inputs_of_block[0], model.model.decoder.layernorm(first))


def test_queries_have_no_next_token():
    with pytest.raises(lsim.LayersimError, match="`labels` is 'next_token'") as error:
        lsim.analyze(tiny_detr(), images(), lsim.LogitLens())
    assert "labels='none'" in str(error.value)
    assert "detection_by_layer" in str(error.value)
    with pytest.raises(lsim.LayersimError, match="`labels` is 'none'"):
        lsim.NeuralCollapse(labels="none")


def test_queries_and_keys_are_read_after_their_positions_are_added():
    model = tiny_detr()
    data = images()
    result = lsim.analyze(model, data, COSINE, at=["decoder.blocks.1.attn.hook_q", "decoder.blocks.2.attn.hook_q"])["cosine"]
    hidden = by_hand(model, "decoder", data)
    positions = model.model.query_position_embeddings.weight
    with torch.no_grad():
        queries = torch.stack([model.model.decoder.layers[i].self_attn.q_proj(hidden[i - 1] + positions) for i in (1, 2)])

    torch.testing.assert_close(result.values, cosines(queries.flatten(1, 2)), atol=1e-9, rtol=0)


def test_two_detectors_are_compared_at_the_same_queries():
    a = tiny_detr()
    b = tiny_detr(seed=1)
    pixels = scenes()["pixel_values"]

    with pytest.warns(lsim.LayersimWarning, match="CKA is not defined at decoder.blocks.0.hook_resid_pre"):
        values = lsim.compare(a, b, pixels, lsim.CKA(estimator="exact")).values

    # All queries start as zeros.
    assert bool(values[0].isnan().all() and values[:, 0].isnan().all() and values[1:, 1:].isfinite().all())


def test_training_is_refused_with_the_auxiliary_loss():
    with pytest.raises(lsim.LayersimError, match="auxiliary loss") as error:
        lsim.finetune_aligned(tiny_detr(), images())
    assert "model.config.auxiliary_loss = True" in str(error.value)
    with pytest.raises(lsim.LayersimError, match="encoder-decoder"):
        lsim.EarlyExit(tiny_detr(), 0.5)


def test_every_source_reads_the_decoder():
    nnsight = pytest.importorskip("nnsight")
    model = tiny_detr()
    data = images()
    expected = lsim.analyze(model, data, COSINE)["cosine"].values
    wrapped = nnsight.NNsight(model)

    torch.testing.assert_close(
        lsim.analyze(wrapped, lsim.Data(data, batch_size=2), COSINE)["cosine"].values, expected, equal_nan=True
    )
