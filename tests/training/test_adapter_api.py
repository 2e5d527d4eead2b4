"""Adapters that align a frozen model, against plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote import low_rank_adapters
from tl_layersim.training import train_adapters
from tl_layersim.training.adapter_training import AdapterSteps

from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from ..ndif.client import rows
from .helpers import Stop, cut_after, equal, hooked, traced, train

# Random tokens have nothing in common.
pytestmark = pytest.mark.filterwarnings("ignore:On held-out data the aligned loss rose")

D = 32
L = 3


def exact_llama():
    """In double precision throughout: the norms of transformers go through float32."""
    module = tiny_llama(dtype=torch.float64)
    for holder in [module.model, *module.model.layers]:
        for name, norm in list(holder.named_children()):
            if "norm" in name:
                setattr(holder, name, torch.nn.RMSNorm(D, eps=norm.variance_epsilon, dtype=torch.float64))
    return module


def naive_losses(module, data, at, down, up):
    """Mean cross-entropy of each layer from whole logits."""
    tokens = data["input_ids"]
    mask = data["attention_mask"]
    with hooked(module, at, down, up) as captured:
        module(tokens, attention_mask=mask, use_cache=False)
    pair = (mask[:, :-1] * mask[:, 1:]).bool()
    logits = [module.lm_head(module.model.norm(x))[:, :-1][pair] for x in captured]
    return torch.stack([torch.nn.functional.cross_entropy(layer_logits, tokens[:, 1:][pair]) for layer_logits in logits])


def linear(n=L):
    return torch.tensor([2 * (i + 1) / (n * (n + 1)) for i in range(n)], dtype=torch.float64)


def random_adapters(count, rank=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(count, rank, D, generator=generator, dtype=torch.float64) / 6
    return down, torch.randn(count, D, rank, generator=generator, dtype=torch.float64) / 6


@pytest.mark.light("1-[0, 1, 2]", "7-[0, 1, 2]", "7-[2]", "10000-[2]")
@pytest.mark.parametrize("at", [[0, 1, 2], [1], [2]])
@pytest.mark.parametrize("rows_at_once", [1, 7, 10_000])
def test_losses_and_gradients_are_those_of_plain_torch(at, rows_at_once, monkeypatch):
    import nnsight

    monkeypatch.setattr(low_rank_adapters, "LOGITS_AT_ONCE", 100 * rows_at_once)
    calls = []
    plain = low_rank_adapters.cross_entropy_slopes
    module = exact_llama().requires_grad_(False)
    data = rows(5, 14)
    down, up = (part.requires_grad_() for part in random_adapters(len(at)))
    losses = naive_losses(module, data, at, down, up)
    expected = torch.autograd.grad(losses @ linear(), [down, up])
    monkeypatch.setattr(low_rank_adapters, "cross_entropy_slopes", lambda x, *a: calls.append(len(x)) or plain(x, *a))
    from tl_layersim.remote.open_model import open_source

    source = open_source(traced(module))
    mask = data["attention_mask"]
    targets = torch.full_like(mask, -100)
    targets[:, :-1] = torch.where((mask[:, :-1] * mask[:, 1:]).bool(), data["input_ids"][:, 1:], -100)
    index = (targets.flatten() >= 0).nonzero()[:, 0]
    item = {"index": index, "targets": targets.flatten()[index]}
    shares = linear().tolist()
    blocks = source.blocks
    unembed = source.lens
    with source.envoy.trace(data["input_ids"], attention_mask=mask, use_cache=False):
        with torch.enable_grad():
            sums, slopes = low_rank_adapters.loss_and_gradient(blocks, unembed, False, at, item, down, up, shares)
        saved = nnsight.save((sums, slopes))

    torch.testing.assert_close(saved[0] / len(index), losses.detach(), rtol=1e-10, atol=1e-12)
    for gradient, expected_gradient in zip(saved[1], expected, strict=True):
        assert float(expected_gradient.abs().max()) > 1e-4
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-12)
    # No more rows of logits at once than were allowed.
    assert max(calls) == min(rows_at_once, len(index))


@pytest.mark.parametrize("at", [None, [0, 2]])
def test_steps_are_those_of_a_plain_adamw(at):
    data = rows(6, 16)
    held_out = rows(9, 16, seed=9)

    result = train(traced(exact_llama()), data, at=at, steps=5, batch_size=6, lr=0.02, seed=7, eval_data=held_out)
    where = [0, 1, 2] if at is None else at
    generator = torch.Generator().manual_seed(7)
    down = (torch.randn(len(where), 3, D, generator=generator, dtype=torch.float64) / math.sqrt(D)).requires_grad_()
    up = torch.zeros(len(where), D, 3, dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.AdamW([down, up], lr=0.02)
    module = exact_llama().requires_grad_(False)
    curves = []
    before = naive_losses(module, held_out, where, down, up).detach()
    for step in range(5):
        # All rows are in each step, in whatever order.
        losses = naive_losses(module, data, where, down, up)
        curves.append(losses.detach())
        optimiser.param_groups[0]["lr"] = 0.02 * (5 - step) / 5
        optimiser.zero_grad()
        (losses @ linear()).backward()
        optimiser.step()

    torch.testing.assert_close(result.curves, torch.stack(curves), rtol=1e-9, atol=0)
    torch.testing.assert_close(result.curve, torch.stack(curves) @ linear(), rtol=1e-9, atol=0)
    torch.testing.assert_close(result.down, down.detach(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(result.up, up.detach(), rtol=1e-8, atol=1e-9)
    assert float(result.up.abs().max()) > 0.02

    after = naive_losses(module, held_out, where, down, up).detach()
    torch.testing.assert_close(result.losses, torch.stack([before, after]), rtol=1e-9, atol=0)
    assert result.aligned("after") == pytest.approx(float(after @ linear()), rel=1e-7)


def test_each_step_takes_other_rows_and_each_row_its_turn(monkeypatch):
    records = []
    plain = AdapterSteps._item

    def item(self, *args):
        step_item = plain(self, *args)
        if step_item["rate"] is not None:
            records.append((step_item["step"], step_item["rate"], step_item["tokens"]))
        return step_item

    monkeypatch.setattr(AdapterSteps, "_item", item)
    data = random_tokens(10, 8)

    train(traced(), data, steps=5, batch_size=4, lr=1.0e-3, eval_data=random_tokens(3, 8, seed=4))
    steps = {step: (rate, tokens) for step, rate, tokens in records}

    assert [steps[step][0] for step in range(1, 6)] == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])

    order = [data.tolist().index(row) for step in range(1, 6) for row in steps[step][1].tolist()]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


@pytest.mark.parametrize("weights", ["uniform", [0.0, 0.25, 0.75]])
def test_weights_of_layers(weights):
    result = train(traced(), weights=weights)
    expected = [1 / 3] * 3 if weights == "uniform" else weights

    assert result.weights == pytest.approx(expected)
    torch.testing.assert_close(result.curve, result.curves @ torch.tensor(expected, dtype=torch.float64))

    second = train(traced())
    assert not torch.equal(result.up, second.up)


@pytest.mark.heavy("a long training")
def test_layers_learn_on_held_out_text():
    from nnsight import TransformersModel

    demo = lsim.demo_model()
    model = TransformersModel(demo, task="text-generation", tokenizer=demo.tokenizer)

    result = train_adapters(model, lsim.Data(lsim.demo_text(), batch_size=8, seq_len=64), steps=20, rank=4)

    assert result.aligned("after") < result.aligned("before") - 0.1
    assert result.curve[-5:].mean() < result.curve[:5].mean()
    assert "aligned loss after" in repr(result)
    assert result.provenance.options["train_rows"] > result.provenance.sequences > 0
    assert len(result.plot().data) == 2

    words = [result.plot(field).layout.title.subtitle.text for field in ("losses", "curve")]
    assert words[0].endswith(f" · {result.provenance.tokens} held-out tokens")
    assert words[1].endswith(f" · {result.provenance.options['train_rows']} training rows")
    assert list(result.to_frame("losses").columns[:2]) == ["stage", "layer"]


def test_nothing_changes_before_the_first_step():
    model = traced()
    tokens = random_tokens(2, 9)

    result = train(model, steps=1)
    nothing = replace(result, up=torch.zeros_like(result.up))
    with model.trace(tokens):
        plain = model.lm_head.output.save()
    with model.trace(tokens):
        nothing.apply(model)
        unchanged = model.lm_head.output.save()
    with model.trace(tokens):
        result.apply(model)
        changed = model.lm_head.output.save()

    assert torch.equal(plain, unchanged)
    assert not torch.equal(plain, changed)


def test_padding_does_not_matter():
    data = rows(8, 16)
    garbage = data | {"input_ids": torch.where(data["attention_mask"].bool(), data["input_ids"], 57)}

    # One long row makes all others of its batch wider.
    alone = train(traced(), data, batch_size=8)

    assert equal(alone, train(traced(), garbage, batch_size=8))

    width = {"input_ids": torch.full((8, 24), 5), "attention_mask": torch.zeros(8, 24, dtype=torch.long)}
    for name, value in data.items():
        width[name][:, :16] = value
    wide = train(traced(), width, batch_size=8)
    for name in ("curves", "losses", "down", "up"):
        torch.testing.assert_close(getattr(wide, name).double(), getattr(alone, name).double(), rtol=0, atol=1e-5)


def test_one_rate_is_as_good_for_a_stream_of_any_size():
    def larger(times):
        module = tiny_llama(dtype=torch.float64)
        with torch.no_grad():
            module.model.embed_tokens.weight.mul_(times)
            for block in module.model.layers:
                block.self_attn.o_proj.weight.mul_(times)
                block.mlp.down_proj.weight.mul_(times)
        return traced(module)

    # Root mean square norms undo the factor, up to their epsilon.
    plain = train(larger(10))
    large = train(larger(10_000))

    torch.testing.assert_close(plain.curves, large.curves, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain.up, large.up, rtol=1e-2, atol=1e-4)


def test_the_model_is_left_as_it_was(monkeypatch):
    module = tiny_llama().train()
    module.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = traced(module)

    def unchanged():
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        assert module.training
        assert {n for n, p in module.named_parameters() if not p.requires_grad} == {"lm_head.weight"}
        assert all(p.grad is None for p in module.parameters())

    learning = []
    plain = low_rank_adapters.loss_and_gradient

    def loss_and_gradient(*args):
        learning.extend(name for name, p in module.named_parameters() if p.requires_grad)
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(low_rank_adapters, "loss_and_gradient", loss_and_gradient)
        train(model)

    # A graph of all weights would be kept for nothing.
    assert not learning

    unchanged()
    cut_after(1, monkeypatch)
    with pytest.raises(Stop):
        train(model)
    unchanged()


def test_dropout_is_off():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, resid_pdrop=0.5)
    module = GPT2LMHeadModel(config)

    assert equal(train(traced(module.train())), train(traced(module.eval())))


def test_half_precision_learns_in_float32():
    result = train(traced(tiny_llama(dtype=torch.bfloat16)))
    exact = train(traced())

    assert result.down.dtype == result.up.dtype == torch.float32
    torch.testing.assert_close(result.curves, exact.curves, rtol=0, atol=0.1)


def test_a_classifier_learns_from_labels():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=100,
        num_labels=3,
        pad_token_id=2,
    )
    module = LlamaForSequenceClassification(config).double().eval()
    data = rows(6, 12) | {"labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    from nnsight import NNsight

    result = train(NNsight(module), data, batch_size=6, steps=2, eval_data=data, tokenizer=tiny_tokenizer())
    with torch.no_grad(), hooked(module, [], None, None) as captured:
        module(data["input_ids"], attention_mask=data["attention_mask"], use_cache=False)
        last = data["attention_mask"].sum(1) - 1
        logits = [module.score(module.model.norm(x[torch.arange(6), last])) for x in captured]
    expected = torch.stack([torch.nn.functional.cross_entropy(layer_logits, data["labels"]) for layer_logits in logits])

    torch.testing.assert_close(result.losses[0], expected)
    torch.testing.assert_close(result.curves[0], expected)
    assert result.aligned("after") < result.aligned("before")
