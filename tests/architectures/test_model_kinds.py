"""Models of images, of two towers or stacks, without weights or on other machines: right numbers, or a refusal that helps."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import tl_layersim as lsim

from ..commands.helpers import run
from ..models.tiny_models import random_tokens, tiny_llama

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def resnet():
    return hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")).eval()


def swin():
    return hf.SwinModel(
        hf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
    ).eval()


def clip():
    text = SMALL | {"vocab_size": 100, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    vision = SMALL | {"hidden_size": 24, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


def detr():
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "num_queries": 5}
    none = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return hf.DetrModel(hf.DetrConfig(**none, backbone_config=backbone, **sizes)).eval()


def t5():
    torch.manual_seed(0)
    config = hf.T5Config(d_model=16, num_layers=2, num_heads=2, d_ff=16, vocab_size=100, d_kv=8, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config).eval()


def attached(model, layers, **inputs):
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=layers), lsim.Cosine(center="none")) as probe:
        model(**inputs)
    return probe.results()["cosine"]


def naive(model, paths, call) -> torch.Tensor:
    stream = []
    blocks = [model.get_submodule(path) for path in paths]
    first = lambda x: x[0] if isinstance(x, tuple) else x  # noqa: E731
    handles = [blocks[0].register_forward_pre_hook(lambda _m, a, k: stream.append((*a, *k.values())[0]), with_kwargs=True)]
    handles += [block.register_forward_hook(lambda _m, _a, out: stream.append(first(out))) for block in blocks]
    with torch.no_grad():
        call(model)
    for handle in handles:
        handle.remove()
    unit = [torch.nn.functional.normalize(x.double().flatten(0, -2), dim=-1) for x in stream]
    return torch.stack([torch.stack([(a * b).sum(-1).mean() for b in unit]) for a in unit])


@pytest.mark.parametrize("make", [resnet, swin, detr, lambda: clip().vision_model])
def test_a_model_of_images_given_tokens_says_what_it_reads(make):
    model = make()
    layers = {"ResNetModel": ["encoder.stages.0"], "DetrModel": ["encoder.layers.0"]}.get(type(model).__name__)
    with pytest.raises(lsim.LayersimError, match=r"takes `pixel_values`(.|\n)*data=\{'pixel_values'"):
        lsim.analyze(lsim.open_model(model, layers=layers), random_tokens(), "cosine")


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (detr, ["encoder.layers.0", "encoder.layers.1"]),
        (swin, ["encoder.layers.0.blocks.0", "encoder.layers.0.blocks.1"]),
    ],
)
def test_a_stack_of_a_model_of_images_is_read_where_the_user_runs_it(make, layers):
    torch.manual_seed(0)
    model = make()
    result = attached(model, layers, pixel_values=PIXELS)
    named = ("encoder.blocks.0.hook_resid_pre", "encoder.blocks.0.hook_resid_post", "encoder.blocks.1.hook_resid_post")

    assert result.layers == (named if make is detr else tuple(name.replace("encoder", "stages.0", 1) for name in named))
    torch.testing.assert_close(result.values, naive(model, layers, lambda m: m(pixel_values=PIXELS)), atol=1e-6, rtol=0)


def test_a_tower_of_clip_is_a_model_of_its_own():
    towers = clip()
    tokens = random_tokens(4, 12)
    result = lsim.analyze(towers.text_model, tokens, lsim.Cosine(center="none"))["cosine"]
    paths = [f"encoder.layers.{i}" for i in range(2)]

    torch.testing.assert_close(result.values, naive(towers.text_model, paths, lambda m: m(tokens)), atol=1e-6, rtol=0)

    torch.manual_seed(1)
    untrained_tower = hf.CLIPTextModel(towers.config.text_config).eval()
    similarity_to_itself = lsim.compare(towers.text_model, towers.text_model, tokens, lsim.CKA(minibatch=24)).values.diagonal()
    assert bool((similarity_to_itself > 0.9999).all())
    assert bool(lsim.compare(towers.text_model, untrained_tower, tokens, lsim.CKA(minibatch=24)).values[-1, -1] < 0.9)


def test_a_model_that_needs_more_than_tokens_names_its_parts():
    towers = clip()
    layers = [f"text_model.encoder.layers.{i}" for i in range(2)]
    with pytest.raises(
        lsim.LayersimError, match=r"CLIPModel fails on this data(.|\n)*model\.text_model or model\.vision_model"
    ):
        lsim.analyze(lsim.open_model(towers, layers=layers), random_tokens(), "cosine")
    with pytest.raises(lsim.LayersimError, match=r"CLIPModel .*\(input_ids, pixel"):
        lsim.compare(
            lsim.open_model(towers, layers=layers), lsim.open_model(towers, layers=layers), random_tokens(), lsim.CKA()
        )

    tokens = random_tokens(2, 12)
    inside = attached(towers, layers, input_ids=tokens, pixel_values=PIXELS)
    alone = attached(towers.text_model, None, input_ids=tokens)
    torch.testing.assert_close(inside.values, alone.values)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: pytest.importorskip("nnsight").NNsight(m)], ids=["module", "nnsight"])
def test_the_decoder_of_an_encoder_decoder_is_refused_and_its_encoder_read(wrap):
    tokens = random_tokens()
    with pytest.raises(lsim.LayersimError, match=r"`data`.*decoder_input_ids"):
        lsim.analyze(lsim.open_model(wrap(t5()), layers=["decoder.block.0", "decoder.block.1"]), tokens, "cosine")

    paths = ["encoder.block.0", "encoder.block.1"]
    result = lsim.analyze(lsim.open_model(wrap(t5()), layers=paths), tokens, [lsim.Cosine(center="none"), lsim.Trajectory()])[
        "cosine"
    ]
    expected = naive(t5(), paths, lambda m: m(input_ids=tokens, decoder_input_ids=tokens))

    torch.testing.assert_close(result.values, expected, atol=1e-6, rtol=0)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(tiny_llama().config)
    tokens = random_tokens()
    for call in (
        lambda: lsim.analyze(model, tokens, "cosine"),
        lambda: lsim.analyze(pytest.importorskip("nnsight").NNsight(model), tokens, "cosine"),
        lambda: attached(model, None, input_ids=tokens),
        lambda: lsim.stitch(model, tiny_llama(), tokens, at=(0, 0)),
    ):
        with pytest.raises(lsim.LayersimError, match=r"LlamaForCausalLM.* meta .*from_pretrained"):
            call()


def test_a_folder_of_this_machine_is_not_sent_to_a_server(tmp_path):
    nnsight = pytest.importorskip("nnsight")
    demo = lsim.demo_model()
    demo.save_pretrained(tmp_path / "mine")
    demo.tokenizer.save_pretrained(tmp_path / "mine")
    model = nnsight.TransformersModel(str(tmp_path / "mine"), task="text-generation", tokenizer=demo.tokenizer)

    for remote in (True, "http://127.0.0.1:9"):
        with pytest.raises(lsim.LayersimError, match=r"`model`.*/mine'.*'org/mine'"):
            lsim.analyze(lsim.open_model(model, remote=remote), lsim.demo_text()[:1], "cosine")


@pytest.mark.parametrize("device", ["cuda:77", "gpu", "mps:x"])
def test_a_device_that_is_not_there_is_named(device, tmp_path):
    out = run("report", "--device", device, "--out", tmp_path / "out")
    assert isinstance(out.exception, lsim.LayersimError)
    assert str(out.exception).startswith(f"`--device` is {device}")
    assert not (tmp_path / "out").exists()


def xlnet():
    return hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=100, d_model=16, n_layer=2, n_head=2, d_inner=32)).eval()


def encoder(batch_first):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    stack = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return torch.nn.Sequential(torch.nn.Embedding(100, 16), stack).eval()


def squeezebert():
    return hf.SqueezeBertForMaskedLM(hf.SqueezeBertConfig(**SMALL, vocab_size=100, embedding_size=16)).eval()


def vitdet():
    return hf.VitDetModel(
        hf.VitDetConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, pretrain_image_size=32, patch_size=8
        )
    ).eval()


@pytest.mark.parametrize(
    ("model", "layers", "analyzer", "named"),
    [
        # As many rows as positions would hide that both axes are exchanged.
        (xlnet(), None, lsim.Cosine(), "XLNetLMHeadModel.* batch x pos x width"),
        (encoder(False), ["1.layers.0", "1.layers.1"], lsim.Cosine(), "batch_first=True"),
        (squeezebert(), None, lsim.LogitLens(labels="none"), "SqueezeBertForMaskedLM"),
        (vitdet(), None, lsim.BlockCoupling(k=2), r"VitDet.* \d x 16 x 4 x 4"),
        (vitdet(), None, lsim.SkipEffect(), r"VitDet.* \d x 16 x 4 x 4"),
    ],
)
def test_blocks_that_pass_on_other_axes_are_refused(model, layers, analyzer, named):
    tokens = torch.randint(10, 100, (6, 6), generator=torch.Generator().manual_seed(0))
    data = {"pixel_values": torch.randn(3, 3, 32, 32)} if "VitDet" in named else tokens
    with pytest.raises(lsim.LayersimError, match=named):
        lsim.analyze(lsim.open_model(model, layers=layers), data, [analyzer])


def test_a_site_of_tokens_with_other_axes_is_not_taken_for_one_of_images():
    module = encoder(True)
    tokens = torch.randint(10, 100, (4, 6))
    module[1].layers[0].register_forward_hook(lambda _module, _args, output: output.transpose(0, 1))
    module[1].layers[1].register_forward_pre_hook(lambda _module, args: (args[0].transpose(0, 1),))

    with pytest.raises(lsim.LayersimError, match=r"1\.layers\.0.* 6 x \d x 16\b.* \d x 6\b"):
        lsim.analyze(module, tokens, [lsim.Cosine()], at=["1.layers.0"])
