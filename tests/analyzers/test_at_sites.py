"""Analyzers at sites other than the residual stream: naive float64 oracles on tensors that plain hooks of the tests read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers

from .. import oracles
from ..models.site_hooks import MODELS, read_sites, site_samples
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import LENSES, by_hand, lively, nnsight
from ..running.options import called

pytestmark = pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
HEADS = {"at": "z", "per_head": True}
PLACES = {"attn_out": {"at": "attn_out"}, "mlp_out": {"at": "mlp_out"}, "z per head": HEADS}


def padded(rows: int = 6, length: int = 9) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1, 5:] = 0
    mask[2, :3] = 0
    return {"input_ids": random_tokens(rows, length), "attention_mask": mask}


# Where the tensors of each name lie, heads included, is a law of tests/contract/test_sites.py: here a model with shared value
# heads and one whose heads lie in one weight are enough.
@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(
    ("name", "place"), [("llama", "z per head"), ("gpt2", "z per head"), ("llama", "attn_out"), ("llama", "mlp_out")]
)
def test_cosine_and_cka_equal_their_oracles(name, place):
    model = MODELS[name]()
    data = padded()
    asked = [lsim.Cosine(), lsim.CKA()]

    report = called(lsim.analyze, model, data, asked, **PLACES[place])
    sites = report["cka"].layers
    samples = np.stack(site_samples(model, data, sites))
    # The oracle's norm ratio divides by the difference of heads that share a value head, which are equal at first tokens.
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = oracles.oracle_cosine([samples])

    for field in ("values", "std", "below_zero", "monotone_share"):
        np.testing.assert_allclose(getattr(report["cosine"], field), cosine[field], atol=2e-6, err_msg=field)
    assert report["cosine"].norm_ratio.isnan().all(), "only of blocks: no other sites are the input and the output of one"

    # One minibatch of all tokens: the shuffle changes nothing.
    row = [data["attention_mask"].nonzero()[:, 0].numpy()]
    np.testing.assert_allclose(report["cka"].values, oracles.oracle_cka([samples], row=row)["values"], atol=2e-6)

    exact = called(lsim.analyze, model, data, lsim.CKA(estimator="exact"), batch_size=2, **PLACES[place])["cka"]
    np.testing.assert_allclose(exact.values, oracles.oracle_cka([samples], exact=True, row=row)["values"], atol=2e-6)


@pytest.mark.light("here-biased")
@pytest.mark.parametrize(
    ("source", "estimator"),
    [("here", "minibatch"), ("here", "exact"), ("here", "biased"), ("NNsight", "exact"), ("remote=local", "minibatch")],
)
def test_sites_of_different_widths(estimator, source):
    model = tiny_llama()
    data = padded()
    source_model, options = (model, {}) if source == "here" else (nnsight(tiny_llama()), {})
    options |= {"remote": "local"} if source == "remote=local" else {}
    at = ["attn_out", "mlp_post", "k"]

    report = called(
        lsim.analyze, source_model, data, [lsim.CKA(estimator=estimator), lsim.NeuralCollapse(classes=4)], at=at, **options
    )
    samples = site_samples(model, data, report["cka"].layers)

    assert {x.shape[1] for x in samples} == {16, 32, 48}

    row = [data["attention_mask"].nonzero()[:, 0].numpy()]
    kind = {"biased": estimator == "biased", "exact": estimator == "exact", "row": row}
    torch.testing.assert_close(report["cka"].values, report["cka"].values.T, rtol=0, atol=1e-12)
    for a, x in enumerate(samples):
        for b, y in enumerate(samples[: a + 1]):
            expected = oracles.oracle_cka([x[None]], [y[None]], **kind)["values"][0, 0]
            assert float(report["cka"].values[a, b]) == pytest.approx(expected, abs=3e-6)

    labels = next_tokens(data)
    for a, x in enumerate(samples):
        nc1 = oracles.oracle_neural_collapse([x[None]], labels, 4)["values"][0]
        assert float(report["neural_collapse"].values[a]) == pytest.approx(nc1, rel=1e-4)
    with pytest.raises(lsim.LayersimError, match=r"mlp\.hook_post.* 48\b"):
        called(lsim.analyze, source_model, data, lsim.Cosine(), at=["attn_out", "mlp_post"], **options)


def next_tokens(data) -> list[int | None]:
    """The attended token that follows each counted one in its row."""
    out: list[int | None] = []
    for tokens, mask in zip(data["input_ids"].tolist(), data["attention_mask"].tolist(), strict=True):
        counted = [token for token, counts in zip(tokens, mask, strict=True) if counts]
        out += [*counted[1:], None]
    return out


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_widths_are_those_of_the_sites_where_memory_and_centres_are_checked():
    model = tiny_llama()
    data = padded()

    # 12 heads of width 8 need 0.2 MB; the residual stream of 12 layers would need 3.5 MB.
    called(lsim.analyze, model, data, lsim.CKA(estimator="exact", max_memory_gb=0.003), **HEADS)

    with pytest.raises(lsim.LayersimError, match="`max_memory_gb`"):
        called(lsim.analyze, model, data, lsim.CKA(estimator="exact", max_memory_gb=0.0001), **HEADS)
    with pytest.raises(lsim.LayersimError, match=r"`max_memory_gb` is 0\.0001"):
        lsim.analyze(model, data, lsim.NeuralCollapse(max_memory_gb=0.0001), at="mlp_post")

    mean = lsim.analyze(model, data, lsim.Cosine(), at="mlp_post")["cosine"].mean
    assert mean.shape == (3, 48)

    result = lsim.analyze(model, data, lsim.Cosine(center=mean), at="mlp_post")["cosine"]
    torch.testing.assert_close(result.values, lsim.analyze(model, data, lsim.Cosine(), at="mlp_post")["cosine"].values)
    with pytest.raises(lsim.LayersimError, match=r"`center`.*\(3, 32\)"):
        lsim.analyze(model, data, lsim.Cosine(center=mean), at="mlp_out")


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("norm", ["final", "none"])
def test_the_lens_between_attention_and_mlp_is_the_naive_one(make, norm):
    model = lively(make().double())
    tokens = random_tokens(3, 8)
    at = ["resid_mid"] if norm == "final" else ["resid_post", "resid_mid"]

    result = lsim.analyze(model, tokens, lsim.LogitLens(norm=norm), at=at)["logit_lens"]
    hook_name = "hook_resid_mid" if norm == "final" else "hook_resid_"

    assert result.layers[0] == "blocks.0.hook_resid_pre"
    assert result.layers[-1] == "blocks.2.hook_resid_post"
    assert all(hook_name in name for name in result.layers[1:-1])
    assert len(result.layers) == (5 if norm == "final" else 7)

    states = np.stack(site_samples(model, {"input_ids": tokens}, result.layers))
    logits = torch.as_tensor(by_hand(model, states, norm == "final"))
    target = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in tokens])
    expected = [float(torch.nn.functional.cross_entropy(z, target)) for z in logits]
    np.testing.assert_allclose(result.cross_entropy, expected, rtol=1e-9)
    assert result.effective_depth(1.0) == 1
    assert result.effective_depth(0.0) == 3
    assert f"accuracy after {'resid_mid of block 2' if norm == 'final' else 'block 1'}" in result.headline()


def test_of_some_layers_the_lens_counts_blocks():
    result = lsim.analyze(lively(tiny_llama()), random_tokens(), lsim.LogitLens(), at=["resid_post", "resid_mid"])["logit_lens"]
    for eps in (0.2, 0.5, 0.9, 0.97, 0.99):
        reached = [name for name, accuracy in zip(result.layers[1:], result.accuracy, strict=True) if accuracy >= 1 - eps]
        assert result.effective_depth(eps) == (int(reached[0].split(".")[1]) + 1 if reached else 3)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_ratio_of_norms_is_one_of_blocks_alone():
    model = tiny_llama()
    tokens = random_tokens()

    whole = lsim.analyze(model, tokens, lsim.Cosine(center="none"))["cosine"].norm_ratio
    result = lsim.analyze(model, tokens, lsim.Cosine(center="none"), at=["resid_post", "resid_mid"])["cosine"]

    assert result.norm_ratio.isnan().all()

    some = lsim.analyze(model, tokens, lsim.Cosine(center="none"), at=[f"blocks.{i}.hook_resid_post" for i in (0, 1)])["cosine"]
    torch.testing.assert_close(some.norm_ratio, whole[1:2])

    apart = lsim.analyze(model, tokens, lsim.Cosine(center="none"), at=[f"blocks.{i}.hook_resid_post" for i in (0, 2)])[
        "cosine"
    ]
    assert apart.norm_ratio.isnan().all()


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("place", [{"at": "attn_out"}, HEADS], ids=str)
def test_two_models_of_other_depth_and_width(place):
    import transformers

    torch.manual_seed(1)
    wide = transformers.LlamaConfig(
        hidden_size=40, num_hidden_layers=2, num_attention_heads=5, intermediate_size=64, vocab_size=100
    )
    a = tiny_llama()
    b = transformers.LlamaForCausalLM(wide).eval()
    data = padded()

    result = called(lsim.compare, a, b, data, lsim.CKA(), **place)

    assert len(result.layers) == (3 if place["at"] == "attn_out" else 12)
    assert len(result.column_layers) == (2 if place["at"] == "attn_out" else 10)

    x, y = (np.stack(site_samples(m, data, names)) for m, names in ((a, result.layers), (b, result.column_layers)))
    row = [data["attention_mask"].nonzero()[:, 0].numpy()]
    np.testing.assert_allclose(result.values, oracles.oracle_cka([x], [y], row=row)["values"], atol=2e-6)
    with pytest.raises(lsim.LayersimError, match=r"\b3 and 2\b|\b12 and 10\b"):
        result.distance()

    equal_width = called(lsim.compare, a, tiny_llama(seed=1), data, lsim.CKA(), **place)
    by_formula = equal_width.values.diagonal().clamp(-1, 1).arccos().square().sum().sqrt()
    assert equal_width.distance() == pytest.approx(float(by_formula))


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("place", ["attn_out", "z per head"])
def test_half_precision_models(place):
    model = tiny_llama(dtype=torch.bfloat16)
    data = padded()

    report = called(lsim.analyze, model, data, [lsim.Cosine(), lsim.CKA()], **PLACES[place])
    samples = np.stack(site_samples(model, data, report["cka"].layers))
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(report["cosine"].values, oracles.oracle_cosine([samples])["values"], atol=2e-6)
    row = [data["attention_mask"].nonzero()[:, 0].numpy()]

    np.testing.assert_allclose(report["cka"].values, oracles.oracle_cka([samples], row=row)["values"], atol=2e-6)
    assert report["cka"].provenance.dtype == "torch.bfloat16"


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("cls", [cls for cls in find_analyzers().values() if cls().needs.sites in ("any", "equal_width")])
def test_a_single_site_has_a_result_that_can_be_shown(cls, tmp_path):
    report = lsim.analyze(tiny_llama(), padded(), cls(), at="ln_final")
    result = report[cls.name]

    assert cls.name in repr(report)
    assert result.headline().keys() >= set()
    for field in result.tensor_fields():
        assert len(result.to_frame(field)) == getattr(result, field).numel()
        # A confusion matrix of each site has three axes, and no figure; what was not measured has none either.
        if 0 < len(result.tensor_fields()[field]) < 3 and not bool(getattr(result, field).isnan().all()):
            assert result.plot(field).data
    assert "blocks" not in repr(result) or cls().needs.families

    page = report.to_html(tmp_path / "page.html").read_text()
    assert cls.name in page

    loaded = lsim.load(report.save(tmp_path / "report.safetensors"))
    assert loaded[cls.name].layers == result.layers


@pytest.mark.parametrize("make", LENSES)
def test_a_lens_beside_an_analyzer_of_heads_is_refused(make):
    with pytest.raises(lsim.LayersimError, match="`at` is 'z'"):
        lsim.analyze(tiny_llama(), padded(), [lsim.CKA(), make()], at="z")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_analyzers_of_several_needs_in_one_call():
    model = tiny_llama()
    data = padded()

    mixed = lsim.analyze(model, data, [lsim.Cosine(), lsim.Contribution()], at="z")

    assert mixed["cosine"].layers == tuple(f"blocks.{i}.attn.hook_z" for i in range(3))
    for analyzer, at in ((lsim.Cosine(), "z"), (lsim.Contribution(), "resid_post")):
        alone = lsim.analyze(model, data, analyzer, at=at)[analyzer.name]
        torch.testing.assert_close(mixed[analyzer.name].values, alone.values)

    middle = lsim.analyze(model, data, [lsim.CKA(), lsim.LogitLens()], at="resid_mid")
    assert middle["cka"].layers == tuple(f"blocks.{i}.hook_resid_mid" for i in range(3))
    assert middle["logit_lens"].layers == ("blocks.0.hook_resid_pre", *middle["cka"].layers, "blocks.2.hook_resid_post")


def test_the_tensors_of_the_hand_made_hooks_are_those_that_the_table_names():
    """What the oracles above are fed with."""
    model = tiny_llama()
    data = padded()
    activations = read_sites(model, lsim.sites(model), data)

    torch.testing.assert_close(
        activations["blocks.1.hook_resid_post"], activations["blocks.1.hook_resid_mid"] + activations["blocks.1.hook_mlp_out"]
    )
