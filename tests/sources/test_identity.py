"""What makes a model another model: each change has another identity, and a model that is the same has the same one."""

from __future__ import annotations

import copy
import functools
import tempfile

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import file_format
from tl_layersim.core.tensor_digests import WORDS, digest_of_tensor
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources import untrained
from tl_layersim.sources.identity import hash_weights, hooks_on
from tl_layersim.sources.nnsight import NNsightSource

from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called

TOKENS = random_tokens(8, 11)
CALL = {"analyzers": lsim.Cosine(center="none"), "batch_size": 2}


def scaled(_module, _args, output, by=0.5):
    return output * by


@torch.no_grad()
def tripled(_module, _args, output):
    return output * 3


def halved(_module, args):
    return (args[0] / 2, *args[1:])


class Scaling:
    def __call__(self, _module, _args, output):
        return output * 2


def edited(model, by):
    from nnsight import NNsight

    with NNsight(model).edit() as (_, changed):
        changed.model.layers[1].output[:] = changed.model.layers[1].output * by
    return changed


def moved(model, change):
    """The model with its weights on a disk, after a change of the files there."""
    accelerate = pytest.importorskip("accelerate")
    change(model)
    # Removed with the model.
    model.folder = tempfile.TemporaryDirectory()
    return accelerate.disk_offload(model, model.folder.name, execution_device="cpu", offload_buffers=False)


def of_weights(change):
    def make(model):
        with torch.no_grad():
            change(model.model.layers[1].mlp.down_proj.weight.data)
        return model

    return make


def swapped(weight):
    weight[[3, 4]] = weight[[4, 3]]


def negated(weight):
    # The highest bits of two 64-bit words.
    weight[0, [1, 3]] *= -1


def hooked(register, function):
    def make(model):
        getattr(model.model.layers[1], register)(function)
        return model

    return make


def other_buffer(model):
    model.model.rotary_emb.inv_freq[1] *= 1.5
    return model


def of_block(change):
    def make(model):
        change(model.model.layers[1])
        return model

    return make


def forward_times(by):
    def change(block):
        own = block.mlp.forward
        block.mlp.forward = lambda x: own(x) * by

    return of_block(change)


def acting_by(function):
    def change(block):
        del block.mlp.act_fn
        block.mlp.act_fn = function

    return of_block(change)


class Scaled(torch.nn.Module):
    """A block of a user: its output depends on an object, on a private attribute, on a tensor, and on code."""

    def __init__(self, inner, **own):
        super().__init__()
        self.inner, self.options, self._by, self.shift = inner, Options(), 1.0, torch.zeros(1)
        for name, value in own.items():
            setattr(self, name, value)

    def scaled(self, x):
        return x * self.options.scale

    def forward(self, x):
        return self.scaled(self.inner(x)) * self._by + self.shift


class Options:
    def __init__(self, scale=1.0):
        self.scale, self.itself = scale, self


class Doubled(Scaled):
    def scaled(self, x):
        return 2 * super().scaled(x)


Doubled.__qualname__ = Scaled.__qualname__


def own_class(kind=Scaled, **own):
    return of_block(lambda block: setattr(block, "mlp", kind(block.mlp, **own)))


def with_lora(change):
    def make(model):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).eval()
        change(adapted.base_model)
        return adapted.base_model.model

    return make


CHANGES = {
    "one weight": of_weights(lambda w: w[5, 6].add_(1e-3)),
    "scaled row": of_weights(lambda w: w[5].mul_(1.01)),
    "swapped rows": of_weights(swapped),
    "zeroed columns": of_weights(lambda w: w.__setitem__((slice(None), [7, 11]), 0)),
    "negated weights": of_weights(negated),
    "buffer": other_buffer,
    "offloaded weights": lambda model: moved(model, of_weights(lambda w: w.mul_(3))),
    "forward hook": hooked("register_forward_hook", scaled),
    "forward hook with another value": hooked("register_forward_hook", functools.partial(scaled, by=2.0)),
    "forward hook without gradients": hooked("register_forward_hook", tripled),
    "forward pre-hook": hooked("register_forward_pre_hook", halved),
    "epsilon of a norm": of_block(lambda block: setattr(block.input_layernorm, "variance_epsilon", 0.5)),
    "activation": of_block(lambda block: setattr(block.mlp, "act_fn", torch.nn.Tanh())),
    "function": acting_by(torch.nn.functional.gelu),
    "function with another name": acting_by(torch.nn.functional.relu),
    "function with an argument": acting_by(functools.partial(torch.nn.functional.gelu, approximate="tanh")),
    "function with code of its own": acting_by(lambda x: x * 2),
    "function with other code": acting_by(lambda x: x * 3),
    "numbers": of_block(lambda block: setattr(block.mlp, "gains", [1.0, np.float32(2)])),
    "numbers with others": of_block(lambda block: setattr(block.mlp, "gains", [1.0, np.float32(3)])),
    "own class": own_class(),
    "own class with other options": own_class(options=Options(2.0)),
    "own class with a private number": own_class(_by=2.0),
    "own class with a tensor": own_class(shift=torch.ones(1)),
    "own class with other code": own_class(Doubled),
    "module around": of_block(lambda block: setattr(block, "mlp", torch.nn.Sequential(block.mlp, torch.nn.Tanh()))),
    "LoRA": with_lora(lambda _: None),
    "LoRA with another scaling": with_lora(
        lambda base: base.model.model.layers[1].self_attn.q_proj.scaling.update(default=7.0)
    ),
    "LoRA with no adapter on": with_lora(lambda base: base.disable_adapter_layers()),
    "forward": forward_times(2.0),
    "forward with another value": forward_times(3.0),
    "forward below nnsight": lambda model: nnsight_of(forward_times(2.0)(model)),
    "edit": lambda model: edited(model, torch.tensor(2.0)),
    "edit with another value": lambda model: edited(model, torch.tensor(3.0)),
}


def identity(model):
    found = open_source(model).model
    return found.weights_hash, found.changes


@pytest.mark.light("one weight", "function", "edit with another value")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_another_model(name):
    plain = nnsight_of(tiny_llama()) if "edit" in name or "nnsight" in name else tiny_llama()
    changed = CHANGES[name](tiny_llama())
    assert identity(changed) != identity(plain)
    others = [make for other, make in CHANGES.items() if other.split(" with")[0] == name.split(" with")[0] and other != name]
    assert all(identity(make(tiny_llama())) != identity(changed) for make in others)
    assert identity(CHANGES[name](tiny_llama())) == identity(changed)


@pytest.mark.light("one weight")
@pytest.mark.parametrize("name", ["one weight", "forward hook", "edit"])
def test_files_of_a_changed_model_are_those_of_another_model(name, tmp_path):
    plain = nnsight_of(tiny_llama()) if name == "edit" else tiny_llama()
    changed = CHANGES[name](tiny_llama())
    for number, model in enumerate((plain, changed)):
        called(lsim.analyze, model, TOKENS, **CALL, shard=(number, 2), save_to=tmp_path / f"{number}.safetensors")
    with pytest.raises(lsim.LayersimError, match=r"models: "):
        lsim.merge(tmp_path)
    report = called(lsim.analyze, plain, TOKENS, **CALL, checkpoint=tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match="run"):
        called(lsim.analyze, changed, TOKENS, **CALL, checkpoint=tmp_path / "run")
    own = called(lsim.analyze, changed, TOKENS, **CALL)["cosine"].provenance
    assert (own.weights_hash, own.changes) == identity(changed) != (report["cosine"].provenance.weights_hash, "")


def nnsight_of(model):
    from nnsight import NNsight

    return NNsight(model)


def reloaded(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def transposed(model):
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.T.contiguous().T
    return model


def probed(model):
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        model(TOKENS)
        assert hooks_on(model) == ""
    probe.results()
    return model


SAME = {
    "loaded again": reloaded,
    "another memory layout": lambda model, _: transposed(model),
    "another device": lambda model, _: model.to("cuda") if torch.cuda.is_available() else model,
    "a copy": lambda model, _: copy.deepcopy(model),
    "a forward pass with captured states": lambda model, _: (model(TOKENS, output_hidden_states=True), model)[1],
    "probes of this package": lambda model, _: probed(model),
    "offloaded to a disk": lambda model, _: moved(model, lambda _: None),
    "wrapped by nnsight": lambda model, _: nnsight_of(model),
    "gradient checkpointing": lambda model, _: (model.gradient_checkpointing_enable(), model)[1],
    "without the edit": lambda model, _: (edited(model, 2.0), nnsight_of(model))[1],
}


@pytest.mark.light("loaded again", "a forward pass with captured states", "without the edit")
@pytest.mark.parametrize("name", SAME)
def test_the_same_weights_are_the_same_model(name, tmp_path):
    assert identity(SAME[name](tiny_llama(), tmp_path)) == identity(tiny_llama()) == (hash_weights(tiny_llama()), "")


def test_a_run_continues_in_another_folder(tmp_path):
    first = called(lsim.analyze, tiny_llama(), TOKENS, **CALL, shard=(0, 2), save_to=tmp_path / "0.safetensors")
    elsewhere = reloaded(tiny_llama(), tmp_path / "model")
    second = called(lsim.analyze, elsewhere, TOKENS, **CALL, shard=(1, 2), save_to=tmp_path / "1.safetensors")
    whole = called(lsim.analyze, tiny_llama(), TOKENS, **CALL)["cosine"].values
    assert torch.equal(lsim.merge([first, second])["cosine"].values, whole)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_hook_points_of_transformer_lens(tmp_path):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    def bridge():
        hf = tiny_llama()
        return build_bridge_from_module(hf, "LlamaForCausalLM", hf_config=hf.config)

    own, plain = bridge(), identity(bridge())
    assert identity(own) == plain
    called(lsim.analyze, own, TOKENS, **CALL, checkpoint=tmp_path / "run")
    found = set()
    for value in (0.0, 2.0):
        own.blocks[1].hook_out.add_hook(lambda x, hook, value=value: x * value)
        found.add(identity(own))
        with pytest.raises(lsim.LayersimError, match=r"blocks\.1\.hook_out"):
            called(lsim.analyze, own, TOKENS, **CALL, checkpoint=tmp_path / "run")
        own.reset_hooks()
    assert plain not in found
    assert len(found) == 2
    assert identity(own) == plain


@pytest.mark.parametrize(
    "hook", [Scaling(), print, functools.partial(scaled, by=Scaling()), functools.partial(lambda h, *a: h, object())]
)
@pytest.mark.parametrize("file", [{"checkpoint": "run"}, {"shard": (0, 2), "save_to": "run"}])
def test_a_change_without_a_name_is_refused_where_runs_are_compared(hook, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = hooked("register_forward_hook", hook)(tiny_llama())
    assert "model.layers.1" in open_source(model).model.changes
    with pytest.raises(lsim.LayersimError, match=r"`(checkpoint|save_to)`(.|\n)*model\.layers\.1"):
        called(lsim.analyze, model, TOKENS, **CALL, **file)


@pytest.mark.parametrize(
    "make", [lambda: hooked("register_forward_hook", scaled)(tiny_llama()), lambda: edited(tiny_llama(), 2.0)]
)
def test_no_untrained_twin_of_a_changed_model(make, monkeypatch):
    model = make()
    with pytest.raises(lsim.LayersimError, match=r"`model`(.|\n)*sha256"):
        untrained(model)
    monkeypatch.setattr("tl_layersim.engine.analyze_and_compare.open_source", None)
    for run in (functools.partial(lsim.analyze, model), functools.partial(lsim.compare, tiny_llama(), model)):
        with pytest.raises(lsim.LayersimError, match=r"`model`(.|\n)*sha256"):
            run(TOKENS, "cka", baseline="untrained")


def test_parts_of_an_edited_model_do_not_run_without_its_edits():
    with pytest.raises(lsim.LayersimError, match=r"nnsight edit sha256(.|\n)*model\.clear_edits\(\)"):
        lsim.stitch(edited(tiny_llama(), 2.0), tiny_llama(), TOKENS, at=(0, 0), fit="lstsq")


def test_a_shard_under_another_number_is_refused(tmp_path):
    for number in (0, 1):
        called(lsim.analyze, tiny_llama(), TOKENS, **CALL, shard=(number, 2), save_to=tmp_path / f"{number}.safetensors")
    header, tensors = file_format.read(tmp_path / "0.safetensors", ("shard",))
    header["identity"]["shard"] = [1, 2]
    file_format.write(tmp_path / "1.safetensors", header.pop("kind"), header, tensors)
    with pytest.raises(lsim.LayersimError, match=r"1\.safetensors.*\b4\b"):
        lsim.merge(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 8 * WORDS, 40 * WORDS + 3])
def test_the_digest_of_a_tensor_follows_every_element(dtype, count):
    x = torch.arange(count).remainder(2).to(dtype)
    own = digest_of_tensor(x)
    # Neither at a multiple of eight bytes nor in one piece.
    elsewhere = torch.arange(-2, 2 * count).div(2, rounding_mode="floor").remainder(2).to(dtype)[2::2]
    assert digest_of_tensor(elsewhere) == own
    assert digest_of_tensor(x[None]) != own
    for place in {0, count // 3, count - 1} & set(range(count)):
        other = x.clone()
        other[place] = 1 - other[place].float()
        assert digest_of_tensor(other) != own


def test_the_checksum_is_computed_once_for_a_run_and_not_without_need(monkeypatch):
    counted = []
    monkeypatch.setattr("tl_layersim.sources.identity.digest_of_tensor", lambda x: counted.append(1) or b"0")
    model = tiny_llama()
    lsim.sites(model)
    NNsightSource(nnsight_of(model), None, None, False)
    assert counted == []
    lsim.analyze(model, lsim.Data(TOKENS, batch_size=8), ["cosine", "cka", "logit_lens"])
    assert len(counted) == len([*model.parameters(), *model.buffers()])
