"""Models with weights offloaded to a disk or to the CPU: each number is that of the plain model, to the last bit."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama

# Where accelerate keeps each part. Blocks 0 and 2, and the final norm in one of them, stay in memory.
MIXED = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
MIXED |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
ALL = dict.fromkeys(MIXED, "disk") | {"model.rotary_emb": "cpu"}
TOKENS = random_tokens(8, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder / "float32")
    tiny_llama().bfloat16().save_pretrained(folder / "bfloat16")
    return folder


def offloaded(folder, device_map, dtype="float32"):
    options = {"device_map": device_map, "offload_folder": folder / "offload", "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(folder / dtype, **options).eval()


@pytest.fixture(params=[MIXED, ALL], ids=["some blocks on the disk", "all on the disk"])
def model(folder, request):
    return offloaded(folder, request.param)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_every_analyzer_gives_the_numbers_of_the_plain_model(model):
    left_out = ("block_coupling", "task_metrics")
    analyzers = [cls() for name, cls in find_analyzers().items() if name not in left_out and cls().needs.models != "two"]
    here, plain = (lsim.analyze(one, lsim.Data(TOKENS, batch_size=4), analyzers) for one in (model, tiny_llama()))
    for name in plain:
        assert worst(here[name], plain[name]) == 0, name
    assert here["cka"].provenance.weights_hash == plain["cka"].provenance.weights_hash != ""


@pytest.mark.parametrize("family", ["z", "ln_final"])
def test_sites_inside_blocks(folder, family):
    model = offloaded(folder, MIXED)
    here, plain = (lsim.analyze(one, TOKENS, lsim.CKA(minibatch=8), at=family)["cka"] for one in (model, tiny_llama()))
    assert worst(here, plain) == 0


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(("method", "dtype"), [("dense", "float32"), ("finite-difference", "bfloat16")])
def test_jacobians_of_offloaded_blocks_are_computed_in_float32(folder, method, dtype):
    model, plain = offloaded(folder, ALL, dtype), AutoModelForCausalLM.from_pretrained(folder / dtype, dtype=dtype).eval()
    here, there = (lsim.prompts.block_jacobians(one, TOKENS[0], method=method) for one in (model, plain))
    assert worst(here, there) == 0
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if ".layers." in name)
    torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=0)


def test_a_block_is_loaded_once_for_all_products_with_its_jacobian(folder, monkeypatch):
    from accelerate.hooks import AlignDevicesHook

    model, loads = offloaded(folder, ALL), []
    load = AlignDevicesHook.pre_forward

    def counted(hook, module, *args, **kwargs):
        if hook.offload and type(module) is torch.nn.Linear:
            loads.append(module)
        return load(hook, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", counted)
    lsim.prompts.block_jacobians(model, TOKENS[0], layers=[1])
    # A forward pass of three blocks with seven matrices each and the head, one more check, and block 1 once.
    assert len(loads) <= 2 * (3 * 7 + 1) + 7


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_attach_compare_stitch_and_figures(folder):
    model, plain = offloaded(folder, ALL), tiny_llama()
    found = []
    for one in (model, plain):
        with torch.no_grad(), lsim.attach(one, [lsim.LogitLens(), lsim.Cosine(center="none")]) as probe:
            one(TOKENS)
        stitched = (
            lsim.stitch(one, plain, TOKENS, at=(1, 1), fit="lstsq"),
            lsim.stitch(plain, one, TOKENS, at=(1, 1), fit="lstsq"),
        )
        found.append([*probe.results().values(), *stitched, lsim.prompts.prediction_grid(one, TOKENS[0])])
        found[-1].append(lsim.compare(one, plain, TOKENS, lsim.CKA(minibatch=8)))
        found[-1] += lsim.evaluate_layers(one, plain, TOKENS).values()
    for here, there in zip(*found, strict=True):
        assert worst(here, there) == 0


@pytest.mark.parametrize("call", [lsim.EarlyExit, lambda model: lsim.truncate(model, 1)], ids=["EarlyExit", "truncate"])
def test_early_exit_and_truncate_are_refused(folder, call):
    model = offloaded(folder, MIXED)
    with pytest.raises(lsim.LayersimError, match=r"`model`.* meta.*device_map"):
        call(model)


def test_training_is_refused(folder):
    model = offloaded(folder, MIXED)
    calls = [
        lambda: lsim.finetune_aligned(model, TOKENS, lsim.AlignedTraining(steps=1)),
        lambda: lsim.training.aligned_loss(model, TOKENS),
    ]
    for call in calls:
        with pytest.raises(lsim.LayersimError, match=r"`model`.* 9 .*device_map"):
            call()


def test_a_run_that_fails_unloads_the_weights(folder, monkeypatch):
    from tl_layersim.jacobians import jacobian_operator

    model = offloaded(folder, ALL)
    monkeypatch.setattr(jacobian_operator, "lengthening", lambda _x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lsim.prompts.block_jacobians(model, TOKENS[0], layers=[1])
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if ".layers." in name)
    torch.testing.assert_close(model(TOKENS).logits, tiny_llama()(TOKENS).logits, rtol=0, atol=0)
