"""Families, names, patterns and functions of names: which hook points `at=` selects, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim import LayersimError
from tl_layersim.architectures import HookPoint, Part, find_points, find_stacks, stream_sums
from tl_layersim.architectures.site_selection import block_numbers, items_of

from ..models.tiny_models import random_tokens, tiny_llama
from .site_cases import model_of


def select(key: str, at, **options) -> list[HookPoint]:
    model = model_of(key)
    return list(find_points(model, find_stacks(model, None), at, **options))


def names(key: str, at, **options) -> list[str]:
    return [point.name for point in select(key, at, **options)]


def test_hook_points_placed_by_hand():
    """Llama, GPT-2, GPT-NeoX, BERT and ViT: the module of each family, as a reader of their code would hook it."""
    block = "model.layers.1."
    assert select("llama", ["attn_out", "mlp_out", "z", "mlp_post", "resid_mid"])[5:] == [
        HookPoint("blocks.1.attn.hook_z", f"{block}self_attn.o_proj", True),
        HookPoint("blocks.1.hook_attn_out", f"{block}self_attn"),
        HookPoint("blocks.1.hook_resid_mid", f"{block}post_attention_layernorm", True),
        HookPoint("blocks.1.mlp.hook_post", f"{block}mlp.down_proj", True),
        HookPoint("blocks.1.hook_mlp_out", f"{block}mlp"),
    ]
    assert select("gpt2", "k")[0] == HookPoint(
        "blocks.0.attn.hook_k", "transformer.h.0.attn.c_attn", False, Part((3, 4, -1), (1,))
    )
    assert select("neox", "v", per_head=True)[3] == HookPoint(
        "blocks.0.attn.hook_v[3]", "gpt_neox.layers.0.attention.query_key_value", False, Part((4, 3, -1), (3, 2))
    )
    assert select("bert", "z")[1] == HookPoint("blocks.1.attn.hook_z", "bert.encoder.layer.1.attention.output.dense", True)
    assert select("vit", "ln2")[1] == HookPoint("blocks.1.ln2.hook_normalized", "vit.layers.1.layernorm_after")


def test_the_default_family_begins_with_what_enters_block_0():
    assert names("llama", "resid_post") == ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    assert names("t5", "resid_post") == [
        *(f"encoder.blocks.{n}" for n in ("0.hook_resid_pre", "0.hook_resid_post", "1.hook_resid_post")),
        *(f"decoder.blocks.{n}" for n in ("0.hook_resid_pre", "0.hook_resid_post", "1.hook_resid_post")),
    ]
    assert names("clip", "resid_pre") == [f"{tower}.blocks.{i}.hook_resid_pre" for tower in ("text", "vision") for i in (0, 1)]


def test_families_come_in_the_order_of_the_model():
    expected = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("ln1.hook_normalized", "hook_attn_out", "hook_mlp_out")]
    for at in (["mlp_out", "ln1", "attn_out"], ["attn_out", "mlp_out", "ln1"]):
        assert names("llama", at) == expected
    assert names("llama", ["ln_final", "resid_post"])[-1] == "ln_final.hook_normalized"

    [decoder] = [
        name for name in names("bart", ["attn_out", "cross_attn_out", "mlp_out"]) if "decoder.blocks.0.hook_cross" in name
    ]
    order = names("bart", ["mlp_out", "cross_attn_out", "attn_out"])

    assert order[order.index(decoder) - 1 : order.index(decoder) + 2] == [
        "decoder.blocks.0.hook_attn_out", "decoder.blocks.0.hook_cross_attn_out", "decoder.blocks.0.hook_mlp_out",
    ]  # fmt: skip


def test_a_site_that_is_selected_twice_is_read_once():
    expected = names("llama", "mlp_out")
    for at in (["mlp_out"] * 2, [*expected, expected[0]], ["blocks.*.hook_mlp_out", "mlp_out"], ["mlp_out", expected[1]]):
        assert names("llama", at) == expected


def test_names_come_as_they_are_given_and_mix_with_families():
    at = ["blocks.1.attn.hook_z[3]", "ln_final", "model.layers.0.mlp.gate_proj", "resid_mid", "model.layers.1.mlp.act_fn.input"]
    points = select("llama", at)
    assert [point.name for point in points] == [
        "blocks.1.attn.hook_z[3]",
        "blocks.0.hook_resid_mid",
        "blocks.1.hook_resid_mid",
        "ln_final.hook_normalized",
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.act_fn.input",
    ]
    assert points[0].part == Part((4, -1), (3,))
    assert (points[-1].module, points[-1].incoming) == ("model.layers.1.mlp.act_fn", True)


def test_patterns_and_functions_choose_among_names():
    assert names("llama", "blocks.*.hook_attn_out") == ["blocks.0.hook_attn_out", "blocks.1.hook_attn_out"]
    assert names("llama", lambda name: name.endswith("hook_mlp_out") and ".1." in name) == ["blocks.1.hook_mlp_out"]
    assert names("llama", "model.layers.*.mlp") == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert names("llama", "blocks.*.attn.hook_z", per_head=True)[:2] == ["blocks.0.attn.hook_z[0]", "blocks.0.attn.hook_z[1]"]
    assert names("t5", "decoder.*.hook_cross_attn_out") == [f"decoder.blocks.{i}.hook_cross_attn_out" for i in (0, 1)]
    assert names("llama", ["*.hook_attn_out", "*.hook_mlp_out"])[1:3] == ["blocks.1.hook_attn_out", "blocks.0.hook_mlp_out"]


OUTPUTS = [f"blocks.{i}.hook_resid_post" for i in range(8)]
BLOCKS = [
    (3, OUTPUTS[3:4]),
    (-1, OUTPUTS[-1:]),
    ([0, 5, -1], [OUTPUTS[0], OUTPUTS[5], OUTPUTS[7]]),
    ([-2, OUTPUTS[1]], [OUTPUTS[6], OUTPUTS[1]]),
    (range(0, 8, 2), OUTPUTS[::2]),
    (OUTPUTS[:2], OUTPUTS[:2]),
]


@pytest.mark.parametrize(("at", "expected"), BLOCKS, ids=str)
def test_blocks_by_number(at, expected):
    model = tiny_llama(8)
    assert [point.name for point in find_points(model, find_stacks(model, None), at)] == expected
    assert block_numbers(expected, OUTPUTS, "at") == block_numbers(items_of(at), OUTPUTS, "at")

    tokens = random_tokens(4, 6)
    by_number, by_name = (lsim.analyze(model, tokens, lsim.Cosine(), at=blocks)["cosine"] for blocks in (at, expected))
    assert by_number.layers == tuple(expected)
    assert torch.equal(by_number.values, by_name.values)


@pytest.mark.parametrize("at", [2, -3, [0, 2], ["z", -3], True], ids=str)
def test_blocks_that_the_model_lacks(at):
    with pytest.raises(LayersimError, match=r"`at`.*(2|-3|True)"):
        names("llama", at)


def test_blocks_once_each():
    for at in ([1, -1], [0, OUTPUTS[0]]):
        assert len(names("llama", at)) == 1
        with pytest.raises(LayersimError, match="`layers`"):
            block_numbers(at, OUTPUTS[:2], "layers")
    with pytest.raises(LayersimError, match="`layers`"):
        block_numbers([], OUTPUTS, "layers")


def test_blocks_by_numbers_of_numpy():
    model = tiny_llama()
    tokens = random_tokens(4, 8)
    assert items_of(np.array([1, -1])) == items_of([np.int64(1), np.int32(-1)]) == [1, -1]
    assert block_numbers(np.int64(1), ["a", "b"], "at") == (1,)

    result = lsim.analyze(model, tokens, lsim.Cosine(), at=[np.int64(0), np.int64(1)])["cosine"]
    assert result.layers == ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post")
    assert result.provenance.options["at"] == [0, 1]

    number = np.int64(1)
    assert lsim.stitch(model, model, tokens, at=(number, number), adapter="identity").layers == (OUTPUTS[1], OUTPUTS[1])
    assert lsim.prompts.block_jacobians(model, tokens[0], layers=[number]).blocks == (OUTPUTS[1],)
    assert lsim.EarlyExit(tiny_llama(4), at=number).at == (1,)


def test_blocks_that_are_named_keep_their_numbers():
    model = model_of("gpt2")
    blocks = find_stacks(model, ["transformer.h.1"])
    assert [point.name for point in find_points(model, blocks, "attn_out")] == ["blocks.1.hook_attn_out"]
    assert [point.name for point in find_points(model, blocks, "resid_post")] == [
        "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post",
    ]  # fmt: skip

    opened = lsim.open_model(tiny_llama(4), layers=["model.layers.1", "model.layers.3"])
    tokens = random_tokens(4, 6)
    lens = lsim.Cosine(center="none")
    assert lsim.analyze(opened, tokens, lens, at=[3, -2])["cosine"].layers == (OUTPUTS[3], OUTPUTS[1])

    upper = lsim.open_model(opened.model, layers=["model.layers.2", "model.layers.3"])
    assert lsim.stitch(upper, upper, tokens, at=(2, -2), adapter="identity").layers == (OUTPUTS[2], OUTPUTS[2])
    assert lsim.prompts.block_jacobians(opened, tokens[0], layers=3).blocks == (OUTPUTS[3],)
    with pytest.raises(LayersimError, match=r"`at`.* 2; .* 1 to 3"):
        lsim.analyze(opened, tokens, lens, at=2)


def test_one_tower_in_a_model_with_a_head_is_its_stack():
    clip = transformers.CLIPForImageClassification(copy.deepcopy(model_of("clip").config))
    t5 = transformers.T5EncoderModel(copy.deepcopy(model_of("t5").config))
    for model, path, name in (
        (clip, "vision_model.encoder.layers.1.layer_norm2", "blocks.1.hook_resid_mid"),
        (t5, "encoder.block.1.layer.1.layer_norm", "blocks.1.hook_resid_mid"),
    ):
        point = find_points(model, find_stacks(model, None), "resid_mid")[1]
        assert (point.module, point.name) == (path, name)


class Own(torch.nn.Module):
    """An architecture that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.part:
            x = x + part(x)
        return x


def test_an_unknown_architecture_has_its_blocks_and_its_modules():
    model = Own()
    blocks = ["part.0", "part.1"]
    assert find_points(model, blocks, "resid_post") == (
        HookPoint("part.0.input", "part.0", True),
        HookPoint("part.0", "part.0"),
        HookPoint("part.1", "part.1"),
    )
    assert find_points(model, blocks, ["part.1.0"]) == (HookPoint("part.1.0", "part.1.0"),)
    with pytest.raises(LayersimError, match=r"`at` is 'attn_out'.* Own .*resid_pre, resid_post"):
        find_points(model, blocks, "attn_out")
    assert stream_sums(model, blocks, ["resid_post"]) == ()

    # A known list of blocks of an unknown class.
    config = transformers.CohereConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=99, pad_token_id=0
    )
    cohere = transformers.CohereModel(config)

    assert [p.name for p in find_points(cohere, find_stacks(cohere, None), "resid_post")] == [
        "blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post",
    ]  # fmt: skip
    with pytest.raises(LayersimError, match="not in the table"):
        find_points(cohere, find_stacks(cohere, None), "z")


def test_a_block_of_a_known_class_is_found_in_any_model():
    """A block that inherits from one of the table has its layout; its configuration is that of the model around it."""

    class Later(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        pass

    outer = torch.nn.Module()
    outer.config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, head_dim=8
    )
    outer.stack = torch.nn.ModuleList(Later(outer.config, i) for i in range(2))
    assert [p.name for p in find_points(outer, ["stack.0", "stack.1"], "k", per_head=True)] == [
        f"blocks.{i}.attn.hook_k[{head}]" for i in (0, 1) for head in (0, 1)
    ]


REFUSED = [
    ("neox", "resid_mid", {}, r"`at` is 'resid_mid'.*GPTNeoXForCausalLM.*resid_pre, ln1, q"),
    ("mamba", "z", {}, r"`at` is 'z'.*MambaForCausalLM.*resid_pre, mixer_out, resid_post, ln_final"),
    ("mixtral", "mlp_post", {}, "each expert of its mixture"),
    ("bert", "ln_final", {}, "the last block ends in a layer norm"),
    ("olmo2", ["ln1"], {}, "its norms stand after attention and MLP"),
    ("llama", "cross_attn_out", {}, "does not have: its blocks have none"),
    ("llama", "atn_out", {}, r"selects no hook point(.|\n)*did you mean 'attn_out'"),
    ("llama", "hook_z", {}, "`at` is 'hook_z'.* 'z'"),
    ("llama", "blocks.0.hook_atn_out", {}, "did you mean 'blocks.0.hook_attn_out'"),
    ("llama", "blocks.7.hook_attn_out", {}, "did you mean"),
    ("llama", "blocks.*.hook_nothing", {}, "selects no hook point"),
    ("llama", lambda name: False, {}, "a function that is False for all names"),
    ("llama", "model.layers", {}, "selects no hook point"),
    ("llama", [], {}, r"`at` is \[\]"),
    ("llama", "attn_out", {"per_head": True}, r"`per_head`.*True.*blocks.0.hook_attn_out.*q, k, v, z"),
    ("llama", ["z", "model.layers.1.mlp"], {"per_head": True}, "`per_head`.*True.*model.layers.1.mlp"),
    ("llama", "blocks.0.attn.hook_z[4]", {}, r"`at` is 'blocks.0.attn.hook_z\[4\]'.* 0 to 3"),
    ("llama", "blocks.0.attn.hook_k[2]", {}, "heads 0 to 1"),
    ("llama", "blocks.9.attn.hook_z[0]", {}, "selects no hook point"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "at", "options", "message"), REFUSED)
def test_what_cannot_be_read_is_refused(key, at, options, message):
    with pytest.raises(LayersimError, match=message):
        select(key, at, **options)


def test_attention_and_mlp_may_read_one_norm():
    """GPT-J and Phi have one norm per block, which is `ln1` and `ln2`."""
    points = select("gptj", ["ln1", "ln2"])
    assert [point.name for point in points[:2]] == ["blocks.0.ln1.hook_normalized", "blocks.0.ln2.hook_normalized"]
    assert points[0].module == points[1].module == "transformer.h.0.ln_1"


def test_heads_need_a_configuration():
    outer = torch.nn.Module()
    outer.config = transformers.GPT2Config(n_embd=32, n_head=4)
    outer.h = torch.nn.ModuleList([transformers.models.gpt2.modeling_gpt2.GPT2Block(outer.config, 0)])
    assert len(find_points(outer, ["h.0"], "q", per_head=True)) == 4

    outer.config = {"n_head": 4}
    with pytest.raises(LayersimError, match="its blocks have none"):
        find_points(outer, ["h.0"], "q")

    [z] = find_points(outer, ["h.0"], "z")
    assert z.module == "h.0.attn.c_proj"
    with pytest.raises(LayersimError, match="number of heads"):
        find_points(outer, ["h.0"], "z", per_head=True)
