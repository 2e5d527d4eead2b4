"""`verify=`: the residual stream of a TransformerLens model is that of its Hugging Face model, or the run is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.sources import activation_checks

from ..models.tiny_models import family, random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import bridge, build, hooked_transformer, nnsight

COSINE = lsim.Cosine(center="none")
MAKERS = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "neox": lambda: family("neox"),
    "gemma2": lambda: family("gemma2"),
    "bert": lambda: family("bert"),
    "mamba": lambda: build("Mamba"),
}


def pair(make=tiny_llama):
    """An untouched Hugging Face model, and a bridge of its copy."""
    model = make()
    return model, bridge(copy.deepcopy(model))


def folder(tmp_path, model):
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def boot(path, **options):
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(path, device="cpu", **options)


def scaled(module, factor):
    """Multiply what a module returns, as a bridge does that drops a scale of the architecture."""

    def scale(_module, _args, output):
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    module.register_forward_hook(scale)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("name", MAKERS)
def test_a_right_bridge_is_measured_and_the_check_is_recorded(name):
    untouched, bridged = pair(MAKERS[name])
    data = random_tokens(4, 12)
    found = lsim.analyze(lsim.open_model(bridged, verify=untouched), data, COSINE)["cosine"]
    plain = lsim.analyze(bridged, data, COSINE)["cosine"]
    assert torch.equal(found.values, plain.values)
    assert found.provenance.options["verify"] == "hf"
    assert plain.provenance.options["verify"] is None


@pytest.mark.light("llama-0", "neox-2", "gemma2-0", "mamba-2")
@pytest.mark.parametrize(("name", "block"), [(name, number % 3) for number, name in enumerate(MAKERS)])
def test_a_changed_block_is_named(name, block):
    untouched, bridged = pair(MAKERS[name])
    weights = [p for p in bridged.blocks[block].parameters() if p.dim() == 2]
    with torch.no_grad():
        weights[-1].mul_(1.5)
    # The colon tells the residual from its final norm.
    with pytest.raises(lsim.LayersimError, match=rf": blocks\.{block}\.hook_resid_post differs"):
        lsim.analyze(lsim.open_model(bridged, verify=untouched), random_tokens(4, 12), COSINE)


def lost_scale(untouched, bridged):
    scaled(bridged.blocks[1].attn, 0.9)


def scale_of_the_last_residual(untouched, bridged):
    """The final norm hides it."""
    scaled(bridged.blocks[2].original_component, 2.0)


def final_norm(untouched, bridged):
    untouched.model.norm.weight.mul_(1.01)


def embedding(untouched, bridged):
    untouched.model.embed_tokens.weight.mul_(1.01)


def small_beside_a_massive_activation(untouched, bridged):
    """A residual of norm 6e5 at token 5 in both models, beside which every other difference is rounding."""
    own = bridged.original_model.get_input_embeddings().weight
    untouched.model.embed_tokens.weight[5] = own[5] = 1e5
    own[7] *= 1.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost_scale, r"blocks\.1\.hook_resid_post differs by 0\.\d+"),
        (scale_of_the_last_residual, r": blocks\.2\.hook_resid_post differs by 1 of"),
        (final_norm, r"the final norm of blocks\.2\.hook_resid_post differs by"),
        (embedding, r"blocks\.0\.hook_resid_pre differs by 0\.0099"),
        (small_beside_a_massive_activation, r"blocks\.0\.hook_resid_pre differs"),
    ],
)
def test_a_difference_is_named_where_it_begins(change, message):
    untouched, bridged = pair()
    with torch.no_grad():
        change(untouched, bridged)
    tokens = torch.tensor([[5, 6, 7, 8]]) if change is small_beside_a_massive_activation else random_tokens(4, 12)
    with pytest.raises(lsim.LayersimError, match=message):
        lsim.analyze(lsim.open_model(bridged, verify=untouched), tokens, COSINE)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_bridge_of_a_vision_model_is_compared_on_its_first_image():
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    untouched, bridged = pair(lambda: transformers.ViTForImageClassification(config).eval())
    images = {"pixel_values": torch.randn(3, 3, 8, 8)}
    lsim.analyze(lsim.open_model(bridged, verify=untouched), images, COSINE)
    with torch.no_grad():
        untouched.vit.embeddings.cls_token.add_(1)
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_pre differs"):
        lsim.analyze(lsim.open_model(bridged, verify=untouched), images, COSINE)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_the_first_row_is_left_out(name, side):
    untouched, bridged = pair(MAKERS[name])
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[0, slice(0, 5) if side == "left" else slice(7, 12)] = 0
    data = {"input_ids": random_tokens(4, 12), "attention_mask": mask}
    lsim.analyze(lsim.open_model(bridged, verify=untouched), data, COSINE)
    # Positions that are not measured are compared too: earlier ones change what later ones attend to.
    lsim.analyze(lsim.open_model(bridged, verify=untouched), lsim.Data(data, positions="last", skip_first=2), COSINE)


def test_rounding_of_a_large_residual_that_a_later_block_cancels_is_no_difference():
    states = torch.stack([torch.full((3, 4), 1e4), torch.full((3, 4), 1e4), torch.ones(3, 4)])
    cancelled = activation_checks._cancellation(states)
    assert cancelled.tolist() == [[1] * 3, [1] * 3, [1e4] * 3]
    assert activation_checks._gap(states[2] + 10, states[2], cancelled[2]) == pytest.approx(1e-3)
    assert activation_checks._gap(states[1] + 10, states[1], cancelled[1]) == pytest.approx(1e-3)


def test_values_that_are_not_finite_differ_unless_both_are():
    one, none = torch.ones(2, 3), torch.ones(2)
    bad = torch.tensor([[1.0, torch.nan, 1.0], [1.0, 1.0, torch.inf]])
    assert activation_checks._gap(bad, bad, none) == 0
    assert not activation_checks._gap(bad, one, none) <= 1
    assert activation_checks._gap(one, bad, none) > 0.5


@pytest.mark.light("torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_booted_bridge_is_compared_with_its_own_folder_once(dtype, tmp_path, monkeypatch):
    loaded = []
    own = transformers.LlamaForCausalLM.from_pretrained

    def count(*args, **kwargs):
        loaded.append(kwargs)
        return own(*args, **kwargs)

    bridged = boot(folder(tmp_path, tiny_llama()), dtype=dtype)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", count)
    # Two passes over the data, and sites of another family: the residual stream is compared all the same, once.
    report = lsim.analyze(lsim.open_model(bridged, verify="hf"), random_tokens(4, 12), [lsim.Cosine()], at="attn_out")
    assert report["cosine"].layers[0] == "blocks.0.hook_attn_out"
    assert [options["dtype"] for options in loaded] == [dtype]
    with torch.no_grad():
        bridged.blocks[0].mlp.out.weight.mul_(1.1)
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_post differs(.|\n)*verify=model"):
        lsim.analyze(lsim.open_model(bridged, verify="hf"), random_tokens(4, 12), COSINE, at="attn_out")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_bridge_of_a_module_needs_an_untouched_copy():
    model = tiny_llama()
    bridged = bridge(model)
    with pytest.raises(lsim.LayersimError, match=r"`verify` is 'hf'.*copy\.deepcopy\(model\)"):
        lsim.analyze(lsim.open_model(bridged, verify="hf"), random_tokens(), COSINE)
    for wrapped in (model, copy.deepcopy(model)):
        with pytest.raises(lsim.LayersimError, match=r"`verify`.*TransformerLens(.|\n)*model\.embed_tokens(.|\n)*deepcopy"):
            lsim.analyze(lsim.open_model(bridged, verify=wrapped), random_tokens(), COSINE)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_what_cannot_be_verified_is_refused():
    untouched, bridged = pair(tiny_gpt2)
    processed = bridge(copy.deepcopy(untouched))
    processed.enable_compatibility_mode()
    for model, verify, message in (
        (tiny_llama(), "hf", r"`verify`.*LlamaForCausalLM"),
        (nnsight(tiny_llama()), "hf", r"`verify`.*LlamaForCausalLM"),
        (bridged, torch.nn.Linear(2, 2), r"Linear"),
        (bridge(tiny_llama()), tiny_llama(2), r"3 blocks, and 2"),
        (processed, untouched, r"`verify`.*TransformerBridge(.|\n)*without enable_comp"),
    ):
        with pytest.raises(lsim.LayersimError, match=message):
            lsim.analyze(lsim.open_model(model, verify=verify), random_tokens(), COSINE)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_two_models_are_verified_each_with_its_own():
    untouched, bridged = pair()
    other, other_bridge = pair(lambda: tiny_llama(seed=1))
    data, cka = random_tokens(), lsim.CKA(minibatch=16)
    found = lsim.compare(lsim.open_model(bridged, verify=untouched), lsim.open_model(other_bridge, verify=other), data, cka)
    assert found.provenance.options["verify"] == ["hf", "hf"]
    assert lsim.compare(lsim.open_model(bridged, verify=untouched), other, data, cka).provenance.options["verify"] == [
        "hf",
        None,
    ]
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_pre differs"):
        lsim.compare(lsim.open_model(bridged, verify=untouched), lsim.open_model(other_bridge, verify=untouched), data, cka)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_hugging_face_model_is_left_as_it_was():
    untouched, bridged = pair()
    untouched.train()
    lsim.analyze(lsim.open_model(bridged, verify=untouched), random_tokens(), COSINE)
    assert all(module.training for module in untouched.modules())
    ours = [hook for m in untouched.modules() for hook in m._forward_hooks.values() if "tl_layersim" in type(hook).__module__]
    assert not ours


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_hooked_transformer_is_verified_unless_its_weights_are_centred(tmp_path):
    module = tiny_gpt2()
    model = hooked_transformer(module)
    data = random_tokens()
    lsim.analyze(lsim.open_model(model, verify=module), data, COSINE)
    with pytest.raises(lsim.LayersimError, match=r"`verify` is 'hf'.*'custom'"):
        lsim.analyze(lsim.open_model(model, verify="hf"), data, COSINE)
    # As from_pretrained leaves the configuration.
    model.cfg.model_name, model.cfg.tokenizer_name = "model", folder(tmp_path, module)
    model.cfg.original_architecture = "GPT2LMHeadModel"
    lsim.analyze(lsim.open_model(model, verify="hf"), data, COSINE)
    model.process_weights_(fold_ln=True, center_writing_weights=False, center_unembed=True)
    # Norms that are folded into later weights leave the residual stream as it is.
    lsim.analyze(lsim.open_model(model, verify="hf"), data, COSINE)
    with torch.no_grad():
        model.W_E.mul_(1.1)
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_pre differs"):
        lsim.analyze(lsim.open_model(model, verify="hf"), data, COSINE)
    model.process_weights_(fold_ln=False, center_writing_weights=True, center_unembed=False)
    with pytest.raises(lsim.LayersimError, match=r"with centred writing weights(.|\n)*from_pretrained_no_processing"):
        lsim.analyze(lsim.open_model(model, verify="hf"), data, COSINE)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_checkpoint_that_is_gone_is_named(tmp_path):
    path = folder(tmp_path, tiny_llama())
    bridged = boot(path)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(lsim.LayersimError, match=r"`verify` is 'hf'.*/model'.*verify=model"):
        lsim.analyze(lsim.open_model(bridged, verify="hf"), random_tokens(), COSINE)
