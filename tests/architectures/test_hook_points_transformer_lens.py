"""Sites of TransformerLens models hold what the sites of the Hugging Face model hold."""

from __future__ import annotations

import functools

import pytest
import torch

import tl_layersim as lsim
from tl_layersim import LayersimError
from tl_layersim.architectures.blocks import anatomy_of
from tl_layersim.architectures.site_selection import find_points, site_map, stream_sums

from ..sources.tiny_transformer_lens import bridge_of, has_hooked_transformer, hooked_transformer_of
from .site_cases import inputs_of, model_of, read, sites_of, values_of

BRIDGES = (
    "llama", "mixtral", "qwen3", "gemma2", "gemma3", "phi", "phi3", "olmo2", "gpt2", "gptj", "neox", "opt", "bloom", "mpt",
    "mamba", "bert", "vit",
)  # fmt: skip
HOOKED = ("llama", "mixtral", "qwen2", "qwen3", "gemma2", "gpt2", "gptj", "neox", "opt", "bloom")
# A bridge computes attention patterns in float32.
ROUNDING = 1e-6
bridge = functools.cache(lambda key: bridge_of(model_of(key)))
hooked = functools.cache(lambda key: hooked_transformer_of(model_of(key)))


def model_input(key: str) -> torch.Tensor:
    [value] = inputs_of(key).values()
    return value


def assert_same_sites(model, key: str, absent: frozenset[str] = frozenset()) -> None:
    expected_sites = site_map(model, anatomy_of(model))
    expected = [site for site in sites_of(key).sites if site.family not in absent]
    assert [(s.point.name, s.family, s.block, len(s.heads)) for s in expected_sites.sites] == [
        (s.point.name, s.family, s.block, len(s.heads)) for s in expected
    ]
    sums = {point.name: point for site_sum in expected_sites.sums for point in (site_sum.total, *site_sum.terms)}
    values = read(model, {s.point.name: s.point for s in expected_sites.sites}.values(), model_input(key))
    values |= read(model, sums.values(), model_input(key))
    for site in expected:
        here = values[site.point.name]
        there = values_of(key)[site.point.name]
        assert here.shape == there.shape, site
        assert (here - there).norm() <= ROUNDING * there.norm(), site
    assert len(expected_sites.sums) == len(sites_of(key).sums)
    for site_sum in expected_sites.sums:
        gap = values[site_sum.total.name] - sum(values[term.name] for term in site_sum.terms)
        assert gap.norm() <= 1e-12 * values[site_sum.total.name].norm(), site_sum


@pytest.mark.light("llama", "gemma2", "gpt2", "neox", "bert")
@pytest.mark.parametrize("key", BRIDGES)
def test_a_bridge_has_the_sites_of_its_model(key):
    assert_same_sites(bridge(key), key)


@pytest.mark.parametrize("key", HOOKED)
def test_a_hooked_transformer_has_the_sites_of_the_model(key):
    assert_same_sites(hooked(key), key)


@pytest.mark.parametrize("make", [bridge, hooked], ids=["bridge", "HookedTransformer"])
def test_heads_of_transformer_lens_are_heads_of_the_model(make):
    model = make("llama")
    points = find_points(model, [], ["q", "k", "z"], per_head=True)
    values = read(model, points, model_input("llama"))

    assert [name for name in values if name.startswith("blocks.1.attn.hook_k")] == [
        f"blocks.1.attn.hook_k[{i}]" for i in (0, 1)
    ]
    for family, count in (("q", 4), ("k", 2), ("z", 4)):
        name = f"blocks.1.attn.hook_{family}"
        whole = values_of("llama")[name].unflatten(-1, (count, -1))
        for head in range(count):
            assert (values[f"{name}[{head}]"] - whole[..., head, :]).norm() <= ROUNDING * whole.norm()


@pytest.mark.parametrize("make", [bridge, hooked], ids=["bridge", "HookedTransformer"])
def test_any_hook_point_can_be_named_and_any_alias(make):
    model = make("llama")
    names = ["blocks.1.attn.hook_rot_q", "blocks.0.hook_attn_out", "ln_final.hook_scale"]
    points = find_points(model, [], names)
    assert [point.name for point in points] == names
    assert [model.get_submodule(point.module) for point in points] == [model.hook_dict[name] for name in names]
    assert [p.name for p in find_points(model, [], "blocks.*.attn.hook_rot_k")] == [
        f"blocks.{i}.attn.hook_rot_k" for i in (0, 1)
    ]

    # Names of sites come first: other hook points are searched where no site matches.
    chosen = find_points(model, [], lambda name: name.endswith("hook_z"))
    assert [point.name for point in chosen] == ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]
    for name in ("blocks.0.attn.hook_pattern", "blocks.0.attn.hook_attn_scores"):
        with pytest.raises(LayersimError, match="pair of positions"):
            find_points(model, [], [name])


def test_an_alias_of_a_site_is_the_same_hook_point():
    model = bridge("llama")
    [point] = find_points(model, [], "blocks.1.hook_out")
    assert point.name == "blocks.1.hook_out"
    assert point.module == find_points(model, [], "resid_post")[-1].module


@pytest.mark.parametrize("make", [bridge, hooked], ids=["bridge", "HookedTransformer"])
def test_a_name_that_means_another_tensor_is_refused(make):
    model = make("llama")
    for at in (["blocks.0.ln1.hook_normalized"], "blocks.*.ln2.hook_normalized", lambda name: "ln_final.hook_norm" in name):
        with pytest.raises(LayersimError, match=r"`at` is .*norm.*(TransformerBridge|HookedTransformer).*'ln"):
            find_points(model, [], at)

    # The norm without its weights is not what attention reads.
    [family] = find_points(model, [], "ln_final")
    assert model.get_submodule(family.module) is not model.hook_dict["ln_final.hook_normalized"]


def test_a_bert_bridge_refuses_names_that_mean_other_tensors():
    model = bridge("bert")
    for name in ("blocks.0.hook_resid_mid", "blocks.0.hook_attn_out"):
        with pytest.raises(LayersimError, match=f"`at` is '{name}'.*at='{name.partition('hook_')[2]}'"):
            find_points(model, [], [name])

    [first, second] = stream_sums(model, [], ["blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"])
    assert [term.name for term in first.terms] == ["blocks.1.hook_resid_pre", "blocks.1.hook_attn_out"]
    assert [term.name for term in second.terms] == ["blocks.1.hook_resid_mid", "blocks.1.hook_mlp_out"]


def test_families_that_an_architecture_lacks_are_refused_with_the_reason():
    for make in (bridge, *([hooked] if has_hooked_transformer() else [])):
        with pytest.raises(LayersimError, match=r"`at` is 'resid_mid'.*attn_out.*mlp_out"):
            find_points(make("neox"), [], "resid_mid")
    with pytest.raises(LayersimError, match="state-space mixer"):
        find_points(bridge("mamba"), [], "z")
    with pytest.raises(LayersimError, match="norms stand after attention"):
        find_points(bridge("olmo2"), [], "ln1")


def test_a_bridge_of_an_encoder_decoder_points_to_the_hugging_face_model():
    with pytest.raises(LayersimError, match="pass the Hugging Face model itself"):
        find_points(bridge("t5"), [], "resid_post")


def test_folded_norms_have_no_weights_left():
    """In compatibility mode the output of a norm is normalized, and the projections hold its weights."""
    model = bridge_of(model_of("gpt2"))
    model.enable_compatibility_mode()
    values = read(model, find_points(model, [], ["ln1", "q"]), model_input("gpt2"))
    normed = values["blocks.1.ln1.hook_normalized"]

    torch.testing.assert_close(normed.var(-1, unbiased=False), torch.ones(2, 7, dtype=torch.float64), atol=1e-3, rtol=0)

    expected = torch.einsum("bpd,hde->bphe", normed, model.W_Q[1]) + model.b_Q[1]
    torch.testing.assert_close(values["blocks.1.attn.hook_q"], expected.flatten(2).detach(), atol=1e-5, rtol=0)


def test_a_hooked_transformer_of_attention_alone_has_no_mlp():
    if not has_hooked_transformer():
        pytest.skip("TransformerLens 4 has no HookedTransformer; make test-tl3 runs this")
    import transformer_lens as tl

    config = {
        "n_layers": 1,
        "d_model": 8,
        "n_ctx": 8,
        "d_head": 4,
        "n_heads": 2,
        "d_vocab": 20,
        "attn_only": True,
        "device": "cpu",
    }
    model = tl.HookedTransformer(tl.HookedTransformerConfig(**config, normalization_type="LNPre"))
    with pytest.raises(LayersimError, match="blocks have no MLP"):
        find_points(model, [], "mlp_out")
    [site_sum] = stream_sums(model, [], ["attn_out"])
    assert (site_sum.total.name, len(site_sum.terms)) == ("blocks.0.hook_resid_post", 2)
    # The norm runs for queries, keys and values each; attention, which reads its output, runs once.
    [point] = find_points(model, [], "blocks.0.ln1.hook_normalized")
    assert (point.module, point.incoming) == ("blocks.0.attn", True)
    result = lsim.analyze(model, torch.arange(16).view(2, 8), lsim.CKA(unit="token"), at="ln1")["cka"]
    assert result.layers == ("blocks.0.ln1.hook_normalized",)
