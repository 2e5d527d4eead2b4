"""Sites of every layout of blocks, against the weights of the model and the formulas of its parts, in float64."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.blocks import find_stacks
from tl_layersim.architectures.hook_points import SITE_NAMES
from tl_layersim.architectures.site_selection import find_points, stream_sums

from ..models.tiny_models import random_tokens, tiny_llama
from .site_cases import MODELS, inputs_of, model_of, read, sites_of, values_of
from .site_parts import STACKS

CROSS = {"cross_attn_out", "resid_mid_cross"}
BLOCKS = range(2)


def name_of(parts) -> str:
    return f"{parts.model} {parts.prefix}".strip()


def reads_tokens(parts) -> bool:
    return "pixel_values" not in inputs_of(parts.model) or parts.prefix == "text."


every_stack = pytest.mark.parametrize("parts", STACKS, ids=name_of)


def close(values: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-9) -> None:
    assert values.shape == expected.shape
    assert (values - expected).norm() <= rtol * expected.norm(), float((values - expected).norm() / expected.norm())


def matrix(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight `out in` and bias of a projection; GPT-2 stores weights transposed."""
    weight = module.weight.T if type(module).__name__ == "Conv1D" else module.weight
    bias = getattr(module, "bias", None)
    return weight.detach(), torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.detach()


def rows_of(parts, family: str, head: int) -> list[int]:
    """Rows of a projection that give one head, counted out by hand."""
    number = "qkv".index(family)
    heads = parts.heads
    keys = parts.key_heads
    size = 32 // parts.heads
    group = heads // keys
    if parts.fused == "qkv heads":
        start = number * heads + head
    elif parts.fused == "heads qkv":
        start = 3 * head + number
    elif parts.fused == "groups":
        start = (head // group) * (group + 2) + head % group if family == "q" else head * (group + 2) + group + number - 1
    elif parts.fused == "rows":
        start = {"q": 0, "k": heads, "v": heads + keys}[family] + head
    else:
        start = head
    return list(range(start * size, (start + 1) * size))


def norm_by_formula(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    kind = type(module).__name__
    if kind == "Identity":
        # Attention in block 0 of a ModernBERT reads the normed embeddings as they are.
        return x
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    eps = (
        next(getattr(module, name) for name in ("eps", "variance_epsilon") if hasattr(module, name))
        if kind != ("OlmoLayerNorm")
        else 1e-5
    )
    if "RMS" not in kind and kind != "T5LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        x = x * (1 + weight if "Gemma" in kind else weight)
    return (x if bias is None else x + bias).detach()


def mid_stream(parts, number: int) -> torch.Tensor:
    """What the norm before the MLP reads."""
    if parts.parallel:
        return parts.values("resid_pre", number)
    return parts.values("resid_mid_cross" if parts.prefix == "decoder." else "resid_mid", number)


@pytest.mark.light(
    "llama",
    "qwen2",
    "gemma",
    "olmo",
    "gemma2",
    "phi3",
    "phi",
    "gptj",
    "neox sequential",
    "opt",
    "bloom",
    "falcon",
    "falcon multi-query",
    "mpt",
    "roberta",
    "electra",
    "distilbert",
    "deberta-v2",
    "modernbert",
    "beit unscaled",
    "swin stages.1.",
    "vit",
    "dinov2",
    "clip text.",
    "siglip text.",
    "t5 encoder.",
    "t5 gated encoder.",
    "t5 gated decoder.",
    "bart decoder.",
    "detr decoder.",
)
@every_stack
def test_a_stack_has_its_families_and_no_others(parts):
    families = {site.family for site in sites_of(parts.model).sites if site.point.name.startswith(parts.prefix)}
    cross = set() if parts.prefix == "decoder." else CROSS
    # All of these stacks have attention.
    assert families == set(SITE_NAMES) - parts.without - cross - {"mixer_out"}

    if parts.final:
        [point] = [s.point for s in sites_of(parts.model).sites if s.point.name == f"{parts.prefix}ln_final.hook_normalized"]
        assert (point.module, point.incoming, point.part) == (parts.final, False, None)
        expected = norm_by_formula(model_of(parts.model).get_submodule(parts.final), parts.values("resid_post", 1))
        close(values_of(parts.model)[point.name], expected, rtol=1e-5)


@every_stack
def test_streams_enter_and_leave_the_blocks(parts):
    for number in BLOCKS:
        block = parts.block(number)
        stream = {}
        hooks = [
            block.register_forward_pre_hook(
                lambda _m, args, kwargs, stream=stream: stream.update(a=(*args, *kwargs.values())[0]), with_kwargs=True
            ),
            block.register_forward_hook(
                lambda _m, _a, out, stream=stream: stream.update(b=out if isinstance(out, torch.Tensor) else out[0])
            ),
        ]
        with torch.no_grad():
            model_of(parts.model)(**inputs_of(parts.model))
        for hook in hooks:
            hook.remove()
        close(parts.values("resid_pre", number), stream["a"], 0)
        close(parts.values("resid_post", number), stream["b"], 0)


@pytest.mark.parametrize("key", MODELS)
def test_identities_hold(key):
    values = values_of(key)
    sums = sites_of(key).sums
    assert len(sums) == sum(_sums(parts) for parts in STACKS if parts.model == key)
    for site_sum in sums:
        close(values[site_sum.total.name], sum(values[term.name] for term in site_sum.terms), rtol=1e-12)


def _sums(parts) -> int:
    if parts.model == "beit":
        return 0
    return len(BLOCKS) * (1 if parts.parallel else 3 if parts.prefix == "decoder." else 2)


def test_the_stream_of_a_beit_takes_its_sublayers_times_a_parameter():
    [parts] = [parts for parts in STACKS if parts.model == "beit"]
    for number in BLOCKS:
        block = parts.block(number)
        before, mid, after = (parts.values(family, number) for family in ("resid_pre", "resid_mid", "resid_post"))
        for family, path, scale, start, end in (
            ("z", parts.attention[3], block.lambda_1, before, mid),
            ("mlp_post", parts.mlp, block.lambda_2, mid, after),
        ):
            weight, bias = matrix(parts.part(number, path))
            close(start + scale.detach() * (parts.values(family, number) @ weight.T + bias), end)


@every_stack
@pytest.mark.parametrize("family", ["q", "k", "v"])
def test_queries_keys_and_values_are_the_weights_times_what_attention_reads(parts, family):
    if parts.model == "detr" and family != "v":
        pytest.skip("a DETR adds positions to what queries and keys read, see tests/architectures/test_detr.py")
    count = parts.heads if family == "q" else parts.key_heads
    for number in () if family in parts.without else BLOCKS:
        read_by = parts.values("ln1" if "ln1" not in parts.without else "resid_pre", number)
        weight, bias = matrix(parts.part(number, parts.attention["qkv".index(family)]))
        rows = [row for head in range(count) for row in rows_of(parts, family, head)]
        close(parts.values(family, number), read_by @ weight[rows].T + bias[rows])


@every_stack
def test_z_enters_the_output_projection_and_attn_out_is_what_is_added(parts):
    for number in () if {"z", "attn_out"} & parts.without else BLOCKS:
        weight, bias = matrix(parts.part(number, parts.attention[3]))
        expected = parts.values("z", number) @ weight.T + bias
        if parts.after:
            expected = parts.part(number, parts.after[0])(expected).detach()
        close(parts.values("attn_out", number), expected)


@pytest.mark.parametrize("parts", [p for p in STACKS if reads_tokens(p) and "v" not in p.without], ids=name_of)
def test_the_only_token_attends_to_itself(parts):
    """Softmax over one position is 1: each head's z is the value of its key-value head."""
    group = parts.heads // parts.key_heads
    for number in BLOCKS:
        z = parts.values("z", number, 1).unflatten(-1, (parts.heads, -1))
        v = parts.values("v", number, 1).unflatten(-1, (parts.key_heads, -1))
        close(z, v.repeat_interleave(group, dim=2), rtol=1e-6)


@pytest.mark.parametrize(
    "parts",
    # BEiT adds a bias to the scores; Swin has no such sites.
    [p for p in STACKS if p.model == "bert" or not (reads_tokens(p) or p.model in ("beit", "swin"))],
    ids=name_of,
)
def test_z_is_attention_over_the_values(parts):
    for number in BLOCKS:
        q, k, v = (parts.values(family, number).unflatten(-1, (parts.heads, -1)).transpose(1, 2) for family in "qkv")
        pattern = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        close(parts.values("z", number), (pattern @ v).transpose(1, 2).flatten(2), rtol=1e-6)


@pytest.mark.parametrize("parts", [p for p in STACKS if p.mlp and "mlp_out" not in p.without], ids=name_of)
def test_neurons_enter_the_output_projection_and_mlp_out_is_what_is_added(parts):
    for number in BLOCKS:
        weight, bias = matrix(parts.part(number, parts.mlp))
        expected = parts.values("mlp_post", number) @ weight.T + bias
        if parts.after:
            expected = parts.part(number, parts.after[1])(expected).detach()
        close(parts.values("mlp_out", number), expected)


@pytest.mark.parametrize("parts", [parts for parts in STACKS if parts.norms], ids=name_of)
def test_norms_follow_their_formula(parts):
    for number in BLOCKS:
        stream = parts.values("resid_pre", number)
        close(parts.values("ln1", number), norm_by_formula(parts.part(number, parts.norms[0]), stream), rtol=1e-5)
        expected = norm_by_formula(parts.part(number, parts.norms[1]), mid_stream(parts, number))
        close(parts.values("ln2", number), expected, rtol=1e-5)


@pytest.mark.parametrize("key", [key for key in MODELS if key not in ("mamba", "swin")])
def test_heads_divide_their_family(key):
    model = model_of(key)
    blocks = find_stacks(model, None)
    has = [family for family in "qkvz" if family in {site.family for site in sites_of(key).sites}]
    points = find_points(model, blocks, has, per_head=True)
    values = read(model, points, **inputs_of(key))

    assert len(values) == len(points)

    for parts in STACKS:
        for family in set("qkvz") - parts.without if parts.model == key else ():
            count = parts.key_heads if family in "kv" else parts.heads
            for number in BLOCKS:
                name = f"{parts.prefix}blocks.{number}.{SITE_NAMES[family]}"
                heads = [values[f"{name}[{head}]"] for head in range(count)]
                assert f"{name}[{count}]" not in values
                close(torch.cat(heads, -1), values_of(key)[name], 0)


def test_sums_are_those_of_the_families_asked_for():
    model = model_of("llama")
    blocks = find_stacks(model, None)
    assert stream_sums(model, blocks, ["z", "ln1", "mlp_post", "ln_final"]) == ()

    [first, second] = stream_sums(model, blocks, ["attn_out"])
    assert first.total.name == "blocks.0.hook_resid_mid"
    assert [term.name for term in second.terms] == ["blocks.1.hook_resid_pre", "blocks.1.hook_attn_out"]
    assert [site_sum.total.name for site_sum in stream_sums(model, blocks, ["blocks.1.hook_mlp_out"])] == [
        "blocks.1.hook_resid_post"
    ]
    assert len(stream_sums(model, blocks, ["resid_mid"])) == 4

    [bert, *_] = stream_sums(model_of("bert"), find_stacks(model_of("bert"), None), ["attn_out"])
    assert (bert.total.module, bert.total.incoming) == ("bert.encoder.layer.0.attention.output.LayerNorm", True)


def test_a_misspelt_family_is_answered_with_one_that_the_model_has():
    with pytest.raises(lsim.LayersimError, match=r"did you mean 'attn_out'\?|did you mean 'attn_out' or"):
        lsim.analyze(tiny_llama(), random_tokens(), "cosine", at="attnout")
