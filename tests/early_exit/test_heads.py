"""Early exit in which each layer is read by a head of its own, against the naive way."""

from __future__ import annotations

import itertools

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit.early_exit import EarlyExit
from tl_layersim.lens import ExitHeads

from ..models.tiny_models import VOCABULARY, random_tokens
from .helpers import HEAD, RULES, classifier, deep, layers_of, naive_exit, naive_generate, ragged

AT = (0, 2, 3)


def near_heads(model, norm="final", seed=0, bias=True):
    """Heads near the model's own, each another one."""
    torch.manual_seed(seed)
    unembedding = model.lm_head.weight.detach()
    weight = torch.stack([unembedding + 0.3 * HEAD * 0.1 * torch.randn_like(unembedding) for _ in range(5)])
    return ExitHeads(weight, torch.randn(5, VOCABULARY) if bias else None, norm=norm)


def naive_heads(model, heads):
    """For each layer the function from a residual to logits."""

    def head(layer):
        weight = heads.weight[layer]
        bias = 0 if heads.bias is None else heads.bias[layer]
        return lambda x: (weight @ (model.model.norm(x) if heads.norm == "final" else x) + bias).detach()

    return [head(layer) for layer in range(len(heads))]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("rule", RULES)
def test_tokens_and_exits(rule):
    model = deep()
    threshold = RULES[rule]["threshold"]
    heads = near_heads(model)
    early = EarlyExit(model, threshold, rule=rule, at=AT, heads=heads)
    lengths = [7, 3, 9, 5]
    tokens, mask = ragged(lengths)
    generated = early.generate(tokens, attention_mask=mask, max_new_tokens=15, eos_token_id=())
    plain_heads = naive_heads(model, heads)
    depths = set()
    for i, length in enumerate(lengths):
        said, exits = naive_generate(model, tokens[i, 9 - length :], 15, AT, rule, threshold, heads=plain_heads)
        assert generated.tokens[i].tolist() == said
        assert generated.exits[i].tolist() == exits
        depths.update(exits)

    assert len(depths) >= 3

    shared = EarlyExit(model, threshold, rule=rule, at=AT).generate(tokens, attention_mask=mask, max_new_tokens=15)
    assert any(a.tolist() != b.tolist() for a, b in zip(shared.tokens, generated.tokens, strict=True))


@pytest.mark.light("True-final", "False-none")
@pytest.mark.parametrize("norm", ["final", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_of_a_text(norm, bias):
    model = deep()
    heads = near_heads(model, norm, bias=bias)
    tokens, mask = ragged([9, 4, 7], "right")
    output = EarlyExit(model, 0.5, at=AT, heads=heads).logits(tokens, mask)
    stream_of, lens = layers_of(model)
    states = stream_of(input_ids=tokens, attention_mask=mask)
    plain_heads = naive_heads(model, heads)
    depths = set()
    for i, j in itertools.product(range(3), range(9)):
        if mask[i, j]:
            logits, layer = naive_exit([h[i, j] for h in states], lens, AT, "max-prob", 0.5, heads=plain_heads)
            assert int(output.exits[i, j]) == layer
            assert torch.allclose(output.logits[i, j], logits, atol=1e-4, rtol=1e-4)
            depths.add(layer)

    assert len(depths) >= (3 if norm == "final" else 2)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_shortlist_reads_the_rows_of_each_head():
    model = deep()
    row = random_tokens(1, 5)[0]
    heads = near_heads(model)
    short = torch.arange(0, VOCABULARY, 3)
    generated = EarlyExit(model, 0.6, at=AT, shortlist=short.tolist(), heads=heads).generate(
        row, max_new_tokens=25, eos_token_id=()
    )
    said, exits = naive_generate(model, row, 25, AT, "max-prob", 0.6, short, heads=naive_heads(model, heads))

    assert (generated.tokens[0].tolist(), generated.exits[0].tolist()) == (said, exits)
    assert len(set(exits)) >= 2


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_exits_are_those_of_the_curve():
    model = deep()
    tokens = random_tokens(6, 15)
    heads = near_heads(model)
    curve = lsim.analyze(model, lsim.Data(tokens, prepend_bos=False), lsim.ExitCurve(thresholds=(0.5,), heads=heads))[
        "exit_curve"
    ]
    exits = EarlyExit(model, 0.5, at="all", heads=heads).logits(tokens).exits

    assert torch.bincount(exits.flatten(), minlength=7)[1:].tolist() == curve.exits[0].tolist()

    costs = lsim.early_exit.ExitCosts(block=1, check=0.1, head=0.1, blocks=6)
    planned = EarlyExit(model, 0.5, curve=curve, costs=costs, heads=heads)
    assert planned.plan.at == planned.at
    for other_heads in (None, near_heads(model, seed=1)):
        with pytest.raises(lsim.LayersimError, match=r"`heads` is .*ExitHeads"):
            EarlyExit(model, 0.5, curve=curve, costs=costs, heads=other_heads)


def test_threshold_one_is_the_model():
    model = deep()
    tokens = random_tokens(2, 7)
    output = EarlyExit(model, 1, heads=near_heads(model)).logits(tokens)
    with torch.no_grad():
        assert torch.allclose(output.logits, model(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_rows_of_a_classifier(name):
    """A layer's own head reads what the pooler or the norm gives, which the layers share."""
    model, inputs, mask = classifier(name)
    torch.manual_seed(3)
    classifier_head = model.classifier
    heads = ExitHeads(
        classifier_head.weight.detach() + torch.randn(2, 3, 32), classifier_head.bias.detach() + torch.randn(2, 3)
    )
    base = model.base_model
    states = []
    blocks = base.layers if hasattr(base, "layers") else base.encoder.layer
    handles = [b.register_forward_hook(lambda _m, _a, o: states.append(o if torch.is_tensor(o) else o[0])) for b in blocks]
    extra = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad():
        logits = [model(**{"pixel_values" if name == "vit" else "input_ids": inputs}, **extra).logits]
        for handle in handles:
            handle.remove()
        pooled = [base.pooler(h) if name == "bert" else base.layernorm(h)[:, 0] for h in states]
        by_layer = [pooled[i] @ heads.weight[i].T + heads.bias[i] for i in (0, 1)] + logits
    tops = torch.stack([z.double().softmax(-1).amax(-1) for z in by_layer])
    threshold = float(tops[:2].quantile(0.63))
    exits = [next((i for i in (0, 1) if tops[i, row] > threshold), 2) for row in range(8)]

    output = EarlyExit(model, threshold, at="all", heads=heads).logits(inputs, mask)

    assert output.exits.tolist() == [layer + 1 for layer in exits]
    assert len(set(exits)) >= 2
    assert torch.allclose(output.logits, torch.stack([by_layer[i][row] for row, i in enumerate(exits)]), atol=1e-5)


def test_half_precision_models_take_wider_heads():
    model = deep().to(torch.bfloat16)
    wide = near_heads(deep())
    early = EarlyExit(model, 0.5, at=AT, heads=wide)
    assert early.logits(random_tokens(2, 9)).logits.dtype == torch.float32

    tokens, mask = ragged([6, 9])
    assert len(early.generate(tokens, attention_mask=mask, max_new_tokens=5, eos_token_id=()).tokens[0]) == 5


def test_heads_of_another_model_are_refused():
    model = deep()
    for heads, says in (
        (ExitHeads(torch.zeros(4, VOCABULARY, 32)), r"`heads`.* 4 .* 5\b"),
        (ExitHeads(torch.zeros(5, VOCABULARY + 1, 32)), rf"`heads`.*\(5, {VOCABULARY + 1}, 32\)"),
        (ExitHeads(torch.zeros(5, VOCABULARY, 16)), r"`heads`.*, 16\)"),
        (ExitHeads(torch.zeros(5, VOCABULARY, 32), weights_hash="0123456789ab"), "`heads`.*0123456789ab"),
        ("nothing.safetensors", "nothing.safetensors"),
    ):
        with pytest.raises((lsim.LayersimError, FileNotFoundError), match=says):
            EarlyExit(model, heads=heads)
