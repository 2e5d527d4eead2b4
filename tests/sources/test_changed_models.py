"""An opened source describes its model as it is at each run; code that was looked up once is looked up again if it changes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.blocks import forward_parameters
from tl_layersim.architectures.module_paths import modules_by_path, modules_remembered
from tl_layersim.core import tensor_digests
from tl_layersim.core.tensor_digests import WORDS, digest_of_tensor
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources.identity import hash_weights

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge, nnsight

TOKENS = random_tokens(4, 6)


def projection(model):
    return model.model.layers[1].mlp.up_proj.weight


def write_data(model):
    projection(model).data[0, 0] += 1e-3


def swap_rows(model):
    weight = projection(model).data
    weight[[0, 1]] = weight[[1, 0]].clone()


def swap_weights(model):
    query = model.model.layers[0].self_attn.q_proj.weight
    output = model.model.layers[0].self_attn.o_proj.weight
    query.data, output.data = output.data, query.data


def add_and_subtract(model):
    weight = projection(model).data.view(torch.int32)
    weight[0, 0] += 1
    weight[2, 3] -= 1


def negate_two(model):
    projection(model).data[:2] *= -1


def change_last_bit(model):
    model.model.norm.weight.data.view(torch.int32)[-1] ^= 1


def write_memory(model):
    # NumPy shares the memory and raises no version counter.
    projection(model).detach().numpy()[3, 4] = 0


def change_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.5)


def change_setting(model):
    model.model.norm.variance_epsilon = 0.1


CHANGES = (
    *(write_data, swap_rows, swap_weights, add_and_subtract, negate_two, change_last_bit, write_memory),
    *(change_buffer, change_setting),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_opened_model_is_in_the_next_result(change):
    model = tiny_llama()
    source = open_source(model)
    before = lsim.analyze(source, TOKENS, lsim.Cosine(center="none"))["cosine"].provenance
    again = lsim.analyze(source, TOKENS, lsim.Cosine(center="none"))["cosine"].provenance
    assert again.weights_hash == before.weights_hash

    change(model)

    after = lsim.analyze(source, TOKENS, lsim.Cosine(center="none"))["cosine"].provenance
    assert after.weights_hash != before.weights_hash
    assert after.weights_hash == hash_weights(model)


@pytest.mark.parametrize("wrapper", [lambda model: model, nnsight], ids=["module", "nnsight"])
def test_a_hook_on_an_opened_model_is_in_the_next_result_alone(wrapper):
    model = tiny_llama()
    source = open_source(wrapper(model))

    def halved(_module, _args, output):
        return output / 2

    handle = model.model.layers[0].mlp.register_forward_hook(halved)
    with_hook = lsim.analyze(source, TOKENS, lsim.Cosine(center="none"))["cosine"].provenance.changes
    handle.remove()
    without_hook = lsim.analyze(source, TOKENS, lsim.Cosine(center="none"))["cosine"].provenance.changes

    assert "model.layers.0.mlp" in with_hook
    assert without_hook == ""


def other_rotation(q, k, cos, sin, unsqueeze_dim=1):
    return q, k


def other_forward(self, hidden_states):
    return hidden_states


def other_activation(x, inplace=False):
    return x


REPLACED = {
    "a function of the file": ("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", other_rotation),
    "a method of a class": ("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", other_forward),
    "a function of torch": ("torch.nn.functional.silu", other_activation),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_code_of_a_library_is_seen_after_it_was_looked_up(name, monkeypatch):
    path, replacement = REPLACED[name]
    model = tiny_llama()
    before = hash_weights(model)

    monkeypatch.setattr(path, replacement)
    replaced = hash_weights(model)
    monkeypatch.undo()

    assert replaced != before
    assert hash_weights(model) == before


def test_code_that_is_replaced_in_place_has_its_own_parameters():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x

    def forward_with_mask(self, x, attention_mask=None):
        return x

    before = list(forward_parameters(Model()))
    # IPython reloads changed functions in this way.
    Model.forward.__code__ = forward_with_mask.__code__
    Model.forward.__defaults__ = forward_with_mask.__defaults__

    assert before == ["self", "x"]
    assert list(forward_parameters(Model())) == ["self", "x", "attention_mask"]


def naive_digest(x):
    """The digest from its formula, in Python's integers."""
    multipliers = []
    state = 0
    for _ in range(2 * WORDS):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        multipliers.append((z ^ (z >> 31)) | 1)
    content = x.contiguous().view(torch.uint8).numpy().tobytes()
    content += bytes(-len(content) % 8)
    words = np.frombuffer(content, "<i8").tolist()
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    for start in range(0, len(words), WORDS):
        total = 0
        for place, word in enumerate(words[start : start + WORDS]):
            total += word * multipliers[place] + (word >> 32) * multipliers[WORDS + place]
        digest.update((total % 2**64).to_bytes(8, "little"))
    return digest.digest()


@pytest.mark.parametrize("count", [1, 7, WORDS - 1, WORDS, WORDS + 1, 3 * WORDS + 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numpy_and_torch_give_the_digest_of_the_formula(count, dtype, monkeypatch):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    expected = naive_digest(x)

    assert digest_of_tensor(x) == expected
    monkeypatch.setattr(tensor_digests, "LARGEST_OF_NUMPY", -1)
    assert digest_of_tensor(x) == expected


class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        part = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.first = torch.nn.ModuleList([part, torch.nn.Identity(), part])
        self.second = part
        self.nothing = None
        self.register_module("empty", None)


class Listing(torch.nn.Linear):
    def named_modules(self, *args, **kwargs):
        yield from super().named_modules(*args, **kwargs)
        yield "elsewhere", torch.nn.Identity()


MODELS = {
    "Llama": tiny_llama,
    "bridge": lambda: bridge(tiny_gpt2()),
    "modules with two paths": Shared,
    "a module that lists others": lambda: torch.nn.Sequential(torch.nn.ReLU(), Listing(1, 1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_those_of_torch_in_the_same_order(name):
    model = MODELS[name]()
    paths = [path for path, _ in model.named_modules()]

    assert list(modules_by_path(model)) == paths
    if name != "a module that lists others":
        assert list(modules_by_path(model).values()) == list(model.modules())


def test_modules_are_listed_once_inside_and_anew_outside():
    model = torch.nn.Sequential(torch.nn.ReLU())
    with modules_remembered():
        inside = modules_by_path(model)
        assert modules_by_path(model) is inside
    model.append(torch.nn.ReLU())
    assert list(modules_by_path(model)) == ["", "0", "1"]
