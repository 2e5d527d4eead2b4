"""Models with quantised weights give the numbers of the same model with dequantised weights, or are refused early."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.sources.identity import hash_weights, is_quantised

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called

TOKENS = random_tokens(8, 11)


def by_torchao(model):
    quantization = pytest.importorskip("torchao.quantization", reason="quantises weights to 8-bit integers")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def by_bitsandbytes(model):
    """The blocks in NF4, as `load_in_4bit=True` of transformers makes them; the head stays as it is."""
    bnb = pytest.importorskip("bitsandbytes", reason="quantises weights to 4 bits")
    make = partial(bnb.nn.Linear4bit, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    return _replaced(model, lambda linear: _loaded(make(linear.in_features, linear.out_features), linear).to("cpu"))


def by_hqq(model):
    hqq = pytest.importorskip("hqq.core.quantize", reason="quantises weights to 4 bits")
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=16)
    options = {"compute_dtype": torch.float32, "device": "cpu", "del_orig": False}
    return _replaced(model, lambda linear: hqq.HQQLinear(linear, config, **options))


def by_quanto(model):
    quanto = pytest.importorskip("optimum.quanto", reason="quantises weights to 8-bit integers")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


class PackedLinear(torch.nn.Module):
    """A linear layer with 4-bit weights packed into buffers of 32-bit integers, as GPTQ and AWQ store them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        codes = (linear.weight.detach() / scales).round().clamp(-8, 7).int() + 8
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        self.register_buffer("qweight", (codes.view(len(codes), -1, 8) << shifts).sum(-1).int())
        self.register_buffer("scales", scales)
        self.register_buffer("shifts", shifts)

    def forward(self, x):
        codes = ((self.qweight[..., None] >> self.shifts) & 15).flatten(1)
        return x @ ((codes - 8) * self.scales).T


def by_packing(model):
    return _replaced(model, PackedLinear)


def _loaded(linear, plain):
    linear.load_state_dict({"weight": plain.weight.detach().clone()})
    return linear


def _replaced(model, quantise):
    for path, linear in list(model.model.layers.named_modules()):
        if type(linear) is torch.nn.Linear:
            owner, _, name = path.rpartition(".")
            setattr(model.model.layers.get_submodule(owner), name, quantise(linear))
    return model.requires_grad_(False)


def dequantised(model):
    """The plain model with the weights that the quantised matrices multiply by: their images of the unit vectors."""
    plain = tiny_llama()
    with torch.no_grad():
        for path, linear in plain.named_modules():
            if type(linear) is torch.nn.Linear:
                linear.weight.copy_(model.get_submodule(path)(torch.eye(linear.in_features)).T)
    return plain


@pytest.fixture(
    scope="module", params=[by_torchao, by_bitsandbytes, by_hqq, by_quanto, by_packing], ids=lambda rule: rule.__name__[3:]
)
def pair(request):
    model = request.param(tiny_llama())
    plain = dequantised(model)
    # The weights were rounded, by more than what the comparisons below allow.
    change = (plain.model.layers[1].mlp.up_proj.weight - tiny_llama().model.layers[1].mlp.up_proj.weight).norm()
    assert change > 1e-3
    return SimpleNamespace(model=model, plain=plain)


def test_similarities_and_predictions_are_those_of_the_dequantised_model(pair):
    analyzers = [
        lsim.Cosine(),
        lsim.CKA(minibatch=16),
        lsim.LogitLens(),
        lsim.Saturation(),
        lsim.ExitCurve(),
        lsim.Trajectory(),
    ]
    found, expected = (lsim.analyze(one, lsim.Data(TOKENS, batch_size=4), analyzers) for one in (pair.model, pair.plain))
    for name in expected:
        assert worst(found[name], expected[name]) < 1e-4, name
    with torch.no_grad(), lsim.attach(pair.model, [lsim.LogitLens()]) as probe:
        pair.model(TOKENS)
    assert worst(probe.results()["logit_lens"], expected["logit_lens"]) < 1e-4
    assert lsim.sites(pair.model).equals(lsim.sites(pair.plain))


@pytest.mark.covering
@pytest.mark.parametrize("method", ["dense", "finite-difference"])
def test_jacobians_are_those_of_the_dequantised_model(pair, method):
    options = {"layers": [1], "positions": [-1], "method": method}
    found, expected = (called(lsim.prompts.block_jacobians, one, TOKENS[0], **options) for one in (pair.model, pair.plain))
    assert worst(found, expected) < (1e-4 if method == "dense" else 5e-3)


def test_stitching_and_early_exit_are_those_of_the_dequantised_model(pair):
    for place in (0, 1):
        losses = []
        for one in (pair.model, pair.plain):
            models = [pair.plain, pair.plain]
            models[place] = one
            losses.append(called(lsim.stitch, *models, TOKENS, at=(1, 1), fit="lstsq").loss)
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    found, expected = (lsim.EarlyExit(one, threshold=0.05, at=(1,)).logits(TOKENS[:2]) for one in (pair.model, pair.plain))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)


def test_the_hash_of_the_weights_follows_every_stored_tensor(pair):
    own = hash_weights(pair.model)
    assert own not in ("", hash_weights(pair.plain))
    with torch.no_grad():
        pair.model(TOKENS)
    assert hash_weights(pair.model) == own
    assert lsim.analyze(pair.model, TOKENS, lsim.Cosine())["cosine"].provenance.weights_hash == own


def test_what_needs_plain_weights_is_refused(pair):
    assert sum(map(is_quantised, pair.model.modules())) in (21, 22)
    with pytest.raises(lsim.LayersimError, match=r"`model`.*q_proj.*get_peft_model"):
        lsim.finetune_aligned(pair.model, TOKENS, lsim.AlignedTraining(steps=1))
    with pytest.raises(lsim.LayersimError, match=r"`model`.*q_proj.*save_to=.*quantization_config"):
        lsim.truncate(pair.model, 1)


def test_packed_weights_of_two_checkpoints_have_two_hashes():
    one, other = by_packing(tiny_llama()), by_packing(tiny_llama())
    assert hash_weights(one) == hash_weights(other)
    other.model.layers[2].mlp.down_proj.scales *= 2
    assert hash_weights(one) != hash_weights(other)


def test_adapters_of_a_quantised_model_are_trained():
    peft = pytest.importorskip("peft")
    model = by_packing(tiny_llama())
    # peft takes linear layers of the classes that it knows; the head is one.
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"])).base_model.model
    adapted.peft_config = {}
    before = copy.deepcopy({n: p for n, p in adapted.named_parameters() if p.requires_grad})
    lsim.finetune_aligned(adapted, lsim.Data(TOKENS, batch_size=2), lsim.AlignedTraining(steps=2, lr=1e-2))
    after = dict(adapted.named_parameters())
    assert before
    assert any(bool((after[n] != p).any()) for n, p in before.items())
    with pytest.raises(lsim.LayersimError, match=r"PackedLinear.*get_peft_model"):
        lsim.finetune_aligned(by_packing(tiny_llama()), TOKENS, lsim.AlignedTraining(steps=1, lora=peft.LoraConfig(r=2)))
