"""Adapters that align a frozen model: against plain torch, through nnsight here, in its simulation, and on a small server."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.errors import LayersimError
from tl_layersim.sources import far_training
from tl_layersim.sources.far_training import Descent
from tl_layersim.training import state as state_module
from tl_layersim.training.adapters import AlignedAdapters
from tl_layersim.training.aligned_adapters import train_adapters

from .conftest import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .ndif.client import rows
from .test_remote import here, running, small  # noqa: F401

D, L = 32, 3
# Random tokens have nothing in common.
pytestmark = pytest.mark.filterwarnings("ignore:On held-out data the aligned loss rose")


def traced(module=None):
    from nnsight import TransformersModel

    return TransformersModel(tiny_llama() if module is None else module, task="text-generation", tokenizer=tiny_tokenizer())


def train(model, data=None, **options):
    options = {"steps": 4, "rank": 3, "batch_size": 4, "eval_data": rows(4, 16, seed=9)} | options
    return train_adapters(model, rows(8, 16) if data is None else data, **options)


def equal(a: AlignedAdapters, b: AlignedAdapters) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in a.tensor_fields())


def exact_llama():
    """In double precision throughout: the norms of transformers go through float32."""
    module = tiny_llama(dtype=torch.float64)
    for holder in [module.model, *module.model.layers]:
        for name, own in list(holder.named_children()):
            if "norm" in name:
                setattr(holder, name, torch.nn.RMSNorm(D, eps=own.variance_epsilon, dtype=torch.float64))
    return module


@contextmanager
def hooked(module, at, down, up):
    """H + (h A') B' by torch hooks, and what left each block."""
    blocks = module.model.layers if hasattr(module, "model") else module.transformer.h
    seen = []

    def hook(number):
        def change(_module, _args, output):
            h = output[0] if isinstance(output, tuple) else output
            if number in at:
                a, b = down[at.index(number)], up[at.index(number)]
                h = h + (h @ a.T) @ b.T
            seen.append(h)
            return (h, *output[1:]) if isinstance(output, tuple) else h

        return change

    handles = [block.register_forward_hook(hook(number)) for number, block in enumerate(blocks)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def naive_losses(module, data, at, down, up):
    """Mean cross-entropy of each layer from whole logits."""
    tokens, mask = data["input_ids"], data["attention_mask"]
    with hooked(module, at, down, up) as seen:
        module(tokens, attention_mask=mask, use_cache=False)
    pair = (mask[:, :-1] * mask[:, 1:]).bool()
    logits = [module.lm_head(module.model.norm(x))[:, :-1][pair] for x in seen]
    return torch.stack([torch.nn.functional.cross_entropy(own, tokens[:, 1:][pair]) for own in logits])


def linear(n=L):
    return torch.tensor([2 * (i + 1) / (n * (n + 1)) for i in range(n)], dtype=torch.float64)


def random_adapters(count, rank=3, seed=0):
    made = torch.Generator().manual_seed(seed)
    down = torch.randn(count, rank, D, generator=made, dtype=torch.float64) / 6
    return down, torch.randn(count, D, rank, generator=made, dtype=torch.float64) / 6


@pytest.mark.parametrize("at", [[0, 1, 2], [1], [2]])
@pytest.mark.parametrize("rows_at_once", [1, 7, 10_000])
def test_losses_and_gradients_are_those_of_plain_torch(at, rows_at_once, monkeypatch):
    import nnsight

    monkeypatch.setattr(far_training, "LOGITS", 100 * rows_at_once)
    calls, plain = [], torch.nn.functional.cross_entropy
    module, data = exact_llama().requires_grad_(False), rows(5, 14)
    down, up = (part.requires_grad_() for part in random_adapters(len(at)))
    losses = naive_losses(module, data, at, down, up)
    expected = torch.autograd.grad(losses @ linear(), [down, up])
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda x, *a, **k: calls.append(len(x)) or plain(x, *a, **k))
    from tl_layersim.sources import open_source

    source = open_source(traced(module))
    mask = data["attention_mask"]
    targets = torch.full_like(mask, -100)
    targets[:, :-1] = torch.where((mask[:, :-1] * mask[:, 1:]).bool(), data["input_ids"][:, 1:], -100)
    index = (targets.flatten() >= 0).nonzero()[:, 0]
    item = {"index": index, "wanted": targets.flatten()[index]}
    shares, blocks, unembed = linear().tolist(), source.blocks, source._unembed
    with source.envoy.trace(data["input_ids"], attention_mask=mask, use_cache=False):
        with torch.enable_grad():
            sums, slopes = far_training.pull(blocks, unembed, False, at, item, down, up, shares)
        found = nnsight.save((sums, slopes))
    torch.testing.assert_close(found[0] / len(index), losses.detach(), rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(found[1], expected, strict=True):
        assert float(theirs.abs().max()) > 1e-4
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)
    # No more rows of logits at once than were allowed.
    assert max(calls) == min(rows_at_once, len(index))


@pytest.mark.parametrize("at", [None, [0, 2]])
def test_steps_are_those_of_a_plain_adamw(at):
    data, held = rows(6, 16), rows(5, 16, seed=9)
    found = train(traced(exact_llama()), data, at=at, steps=5, batch_size=6, lr=0.02, seed=7, eval_data=held)
    where = [0, 1, 2] if at is None else at
    made = torch.Generator().manual_seed(7)
    down = (torch.randn(len(where), 3, D, generator=made, dtype=torch.float64) / math.sqrt(D)).requires_grad_()
    up = torch.zeros(len(where), D, 3, dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.AdamW([down, up], lr=0.02)
    module, curves = exact_llama().requires_grad_(False), []
    before = naive_losses(module, held, where, down, up).detach()
    for step in range(5):
        # All rows are in each step, in whatever order.
        losses = naive_losses(module, data, where, down, up)
        curves.append(losses.detach())
        optimiser.param_groups[0]["lr"] = 0.02 * (5 - step) / 5
        optimiser.zero_grad()
        (losses @ linear()).backward()
        optimiser.step()
    torch.testing.assert_close(found.curves, torch.stack(curves), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.curve, torch.stack(curves) @ linear(), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.down, down.detach(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.up, up.detach(), rtol=1e-8, atol=1e-9)
    assert float(found.up.abs().max()) > 0.02
    after = naive_losses(module, held, where, down, up).detach()
    torch.testing.assert_close(found.losses, torch.stack([before, after]), rtol=1e-9, atol=0)
    assert found.aligned("after") == pytest.approx(float(after @ linear()), rel=1e-7)


def test_each_step_takes_other_rows_and_each_row_its_turn(monkeypatch):
    seen, plain = [], Descent.item

    def item(self, tokens, *rest, **more):
        made = plain(self, tokens, *rest, **more)
        if made["rate"] is not None:
            seen.append((made["step"], made["rate"], tokens))
        return made

    monkeypatch.setattr(Descent, "item", item)
    data = random_tokens(10, 8)
    train(traced(), data, steps=5, batch_size=4, lr=1.0e-3, eval_data=random_tokens(3, 8, seed=4))
    steps = {step: (rate, tokens) for step, rate, tokens in seen}
    assert [steps[step][0] for step in range(1, 6)] == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])
    order = [data.tolist().index(row) for step in range(1, 6) for row in steps[step][1].tolist()]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


@pytest.mark.parametrize("weights", ["uniform", [0.0, 0.25, 0.75]])
def test_weights_of_layers(weights):
    found = train(traced(), weights=weights)
    expected = [1 / 3] * 3 if weights == "uniform" else weights
    assert found.weights == pytest.approx(expected)
    torch.testing.assert_close(found.curve, found.curves @ torch.tensor(expected, dtype=torch.float64))
    other = train(traced())
    assert not torch.equal(found.up, other.up)


def test_layers_learn_on_held_out_text():
    from nnsight import TransformersModel

    demo = lsim.demo_model()
    model = TransformersModel(demo, task="text-generation", tokenizer=demo.tokenizer)
    found = train_adapters(model, lsim.demo_text(), steps=20, batch_size=8, seq_len=64, rank=4)
    assert found.aligned("after") < found.aligned("before") - 0.1
    assert found.curve[-5:].mean() < found.curve[:5].mean()
    assert "aligned loss after" in repr(found)
    assert found.provenance.options["train_rows"] > found.provenance.sequences > 0
    assert len(found.plot().data) == 2
    found.plot("curve")
    assert list(found.to_frame("losses").columns[:2]) == ["stage", "layer"]


def test_nothing_changes_before_the_first_step():
    model, tokens = traced(), random_tokens(2, 9)
    found = train(model, steps=1)
    nothing = replace(found, up=torch.zeros_like(found.up))
    with model.trace(tokens):
        plain = model.lm_head.output.save()
    with model.trace(tokens):
        nothing.apply(model)
        same = model.lm_head.output.save()
    with model.trace(tokens):
        found.apply(model)
        other = model.lm_head.output.save()
    assert torch.equal(plain, same)
    assert not torch.equal(plain, other)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("remote", [False, "local"])
def test_applied_in_a_trace_as_by_hooks(make, remote, tmp_path):
    module, tokens = make(), random_tokens(2, 9)
    found = train(traced(module), at=[1], lr=0.05)
    found.save(tmp_path / "adapters.safetensors")
    found = lsim.load(tmp_path / "adapters.safetensors")
    with torch.no_grad(), hooked(module, [], None, None) as plain:
        module(tokens)
    with torch.no_grad(), hooked(module, [1], found.down, found.up) as seen:
        expected = module(tokens).logits
    model = traced(module)
    blocks = model.model.layers if make is tiny_llama else model.transformer.h
    with torch.no_grad(), model.trace(remote=remote) as tracer:
        with tracer.invoke(tokens):
            found.apply(model)
            logits = model.lm_head.output.save()
        with tracer.invoke():
            low = blocks[0].output.save()
            middle = blocks[1].output.save()
            high = blocks[2].output.save()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for own, hook, before, changed in zip((low, middle, high), seen, plain, (False, True, True), strict=True):
        torch.testing.assert_close(own, hook, rtol=0, atol=1e-5)
        assert torch.equal(own, before) != changed
    # Nothing stays.
    with torch.no_grad(), hooked(module, [], None, None) as again:
        module(tokens)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_applied_at_each_step_of_generation():
    module, tokens = tiny_llama(), random_tokens(1, 9)
    model, found = traced(module), train(traced(module), lr=0.1, steps=8)
    with model.generate(max_new_tokens=4, do_sample=False) as tracer:
        with tracer.invoke(tokens):
            for _step in tracer.iter[:4]:
                found.apply(model)
        with tracer.invoke():
            written = tracer.result.save()
    with torch.no_grad(), hooked(module, list(found.blocks), found.down, found.up):
        expected = module.generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(written, expected)


def test_saved_and_loaded_exactly(tmp_path):
    found = train(traced(), at=["blocks.0.hook_resid_post", 2])
    path = found.save(tmp_path / "adapters.safetensors")
    # Two adapters of rank 3 in float32, and words.
    assert path.stat().st_size < 2 * 2 * 3 * D * 4 + 10_000
    loaded = lsim.load(path)
    assert isinstance(loaded, AlignedAdapters)
    assert equal(found, loaded)
    assert loaded.adapters == ("blocks.0.hook_resid_post", "blocks.2.hook_resid_post")
    assert (loaded.weights, loaded.blocks, loaded.paths) == (found.weights, found.blocks, found.paths)
    assert loaded.provenance == found.provenance
    assert found.down.dtype == torch.float32


@pytest.mark.parametrize("remote", [False, "local"])
def test_the_simulation_of_a_server_gives_the_same(remote):
    assert equal(train(traced()), train(traced(), remote=remote))


def test_a_wrapped_module_is_traced_too():
    from nnsight import NNsight

    assert equal(train(traced()), train(NNsight(tiny_llama()), tokenizer=tiny_tokenizer()))


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
    plain, large = train(larger(10)), train(larger(10_000))
    torch.testing.assert_close(plain.curves, large.curves, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain.up, large.up, rtol=1e-2, atol=1e-4)


class Stop(Exception):
    pass


def cut_after(count, monkeypatch, then=lambda: None):
    """Ends a training after so many steps."""
    plain = Descent.run

    def run(self, total, item_of, parts, *rest, **more):
        for done, found in enumerate(plain(self, total, item_of, parts, *rest, **more)):
            if "up mean" in parts and done == count and item_of(0)["rate"] is not None:
                then()
                raise Stop
            yield found

    monkeypatch.setattr(Descent, "run", run)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("killed", [False, True])
def test_a_cut_training_goes_on_with_the_same_bits(count, killed, tmp_path, monkeypatch):
    path, calm = tmp_path / "run.ckpt", train(traced())
    with monkeypatch.context() as patch:
        if killed:
            # As it stands on disk when the power goes: what is saved on the way out is not there.
            patch.setattr(state_module.Saved, "due", True)
            plain, dead = state_module.Saved.save, []
            patch.setattr(state_module.Saved, "save", lambda self, *a: None if dead else plain(self, *a))
            cut_after(count, patch, lambda: dead.append(1))
        else:
            cut_after(count, patch)
        with pytest.raises(Stop) as caught:
            train(traced(), checkpoint=path)
    assert path.exists() == (count > 0)
    assert bool(getattr(caught.value, "__notes__", [])) == (count > 0)
    made, plain = [], Descent.item
    monkeypatch.setattr(Descent, "item", lambda self, *a: made.append(a[-2]) or plain(self, *a))
    resumed = train(traced(), checkpoint=path)
    assert equal(resumed, calm)
    assert set(made) - {0} == set(range(count + 1, 5))
    assert equal(train(traced(), checkpoint=path), calm)
    with pytest.raises(LayersimError, match="another"):
        train(traced(), checkpoint=path, lr=0.1)


def test_the_model_is_left_as_it_was(monkeypatch):
    module = tiny_llama().train()
    module.lm_head.weight.requires_grad_(False)
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    model = traced(module)

    def unchanged():
        assert all(torch.equal(kept[name], value) for name, value in module.state_dict().items())
        assert module.training
        assert {n for n, p in module.named_parameters() if not p.requires_grad} == {"lm_head.weight"}
        assert all(p.grad is None for p in module.parameters())

    learning, plain = [], far_training.pull

    def pull(*given):
        learning.extend(name for name, p in module.named_parameters() if p.requires_grad)
        return plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(far_training, "pull", pull)
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
    found, exact = train(traced(tiny_llama(dtype=torch.bfloat16))), train(traced())
    assert found.down.dtype == found.up.dtype == torch.float32
    torch.testing.assert_close(found.curves, exact.curves, rtol=0, atol=0.1)


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

    found = train(NNsight(module), data, batch_size=6, steps=2, eval_data=data, tokenizer=tiny_tokenizer())
    with torch.no_grad(), hooked(module, [], None, None) as seen:
        module(data["input_ids"], attention_mask=data["attention_mask"], use_cache=False)
        last = data["attention_mask"].sum(1) - 1
        logits = [module.score(module.model.norm(x[torch.arange(6), last])) for x in seen]
    expected = torch.stack([torch.nn.functional.cross_entropy(own, data["labels"]) for own in logits])
    torch.testing.assert_close(found.losses[0], expected)
    torch.testing.assert_close(found.curves[0], expected)
    assert found.aligned("after") < found.aligned("before")


def test_a_rising_loss_is_said():
    with pytest.warns(UserWarning, match=r"aligned loss rose from .*lr=0\.3"):
        train(traced(), lr=3.0, steps=6)


def test_what_diverges_is_refused(monkeypatch):
    plain = far_training.stepped

    def stepped(*given):
        return {name: value * math.inf for name, value in plain(*given).items()}

    monkeypatch.setattr(far_training, "stepped", stepped)
    with pytest.raises(LayersimError, match=r"diverged(.|\n)*lr=0\.0003"):
        train(traced(), lr=0.003)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank is too small"),
        ({"rank": D + 1}, "rank is too large"),
        ({"steps": 0}, "steps is too small"),
        ({"lr": 0.0}, "lr is out of range"),
        ({"at": [3]}, r"no blocks to put adapters at(.|\n)*0 to 2"),
        ({"at": [-1]}, "no blocks to put adapters at"),
        ({"at": ["blocks.0.hook_resid_pre"]}, "no blocks to put adapters at"),
        ({"at": []}, "a list of different blocks"),
        ({"at": [1, "blocks.1.hook_resid_post"]}, "a list of different blocks"),
        ({"weights": [0.5, 0.5]}, "weights do not belong"),
        ({"checkpoint": "nowhere/run.ckpt"}, "no place to go"),
        ({"data": {"pixel_values": torch.zeros(2, 3, 4, 4), "labels": [0, 1]}}, "trained on tokens"),
        ({"data": random_tokens(1, 8), "eval_data": None}, "cannot be parted"),
    ],
)
def test_what_cannot_be_done_is_refused(options, words):
    with pytest.raises(LayersimError, match=words):
        train(traced(), **options)


def test_models_that_cannot_be_trained_through_are_refused():
    with pytest.raises(LayersimError, match=r"nnsight model(.|\n)*LlamaForCausalLM(.|\n)*finetune_aligned"):
        train(tiny_llama())
    stitched = lsim.stitch(tiny_llama(), tiny_llama(), random_tokens(4, 8), at=(1, 1), adapter="identity").model
    with pytest.raises(LayersimError, match=r"a stitched model(.|\n)*its back"):
        train(stitched)
    with pytest.raises(LayersimError, match="float16 model vanish"):
        train(traced(tiny_llama(dtype=torch.float16)))
    from nnsight import NNsight

    with pytest.raises(LayersimError, match="no head that is known"):
        train(NNsight(tiny_llama().model))
    found = train(traced())
    gpt2 = traced(tiny_gpt2())
    with pytest.raises(Exception, match="has not got the blocks"), gpt2.trace(random_tokens(1, 4)):
        found.apply(gpt2)
    narrow = replace(found, down=found.down[..., :8], up=found.up[:, :8])
    model = traced()
    with pytest.raises(Exception, match="another width"), model.trace(random_tokens(1, 4)):
        narrow.apply(model)


def test_a_server_gives_what_this_process_gives(small, capfd):  # noqa: F811
    data, held = rows(16, 20), rows(6, 20, seed=9)
    expected = train(here(small, "llama"), data, eval_data=held, steps=6)
    capfd.readouterr()
    found = train(small.model(), data, eval_data=held, steps=6, remote=small.url)
    said = capfd.readouterr().err
    assert "6 steps in at most as many requests" in said
    assert "6.9 kB of adapters" in said
    for name in ("curves", "losses", "down", "up"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name).double(), rtol=1e-5, atol=1e-6)
    assert "NDIF" in found.provenance.source
    assert found.provenance.options["remote"][0]["trusted"]
    model, tokens = small.model(), random_tokens(2, 9)
    with model.trace(tokens, remote=small.url):
        found.apply(model)
        logits = model.lm_head.output.save()
    module = here(small, "llama")._module
    with torch.no_grad(), hooked(module, list(found.blocks), found.down, found.up):
        torch.testing.assert_close(logits, module(tokens).logits, rtol=0, atol=1e-5)


def test_how_steps_are_grouped_changes_no_bit(small, monkeypatch):  # noqa: F811
    data = rows(16, 20)
    found = train(small.model(), data, steps=9, remote=small.url)
    monkeypatch.setattr(far_training, "MOST", 1)
    small.set()
    alone = train(small.model(), data, steps=9, remote=small.url)
    # The probe, the lens, one look before and one after, and the steps.
    assert small.set()["requests"] == 2 + 2 + 9
    assert equal(found, alone)
    monkeypatch.setattr(far_training, "MOST", 64)
    small.set(most_batches=2)
    halved = train(small.model(), data, steps=9, remote=small.url)
    assert equal(halved, alone)
    # Looks too, when they are asked for twice.
    held = rows(22, 16, seed=9)
    monkeypatch.setattr(far_training, "MOST", 1)
    alone_at_more = train(small.model(), data, eval_data=held, remote=small.url)
    monkeypatch.setattr(far_training, "MOST", 64)
    assert equal(train(small.model(), data, eval_data=held, remote=small.url), alone_at_more)
    small.set(faults=["", "", "", "", "evicted", "cut"])
    assert equal(train(small.model(), data, steps=9, remote=small.url), alone)


def test_a_cut_training_on_a_server_goes_on(small, tmp_path, monkeypatch):  # noqa: F811
    path, calm = tmp_path / "run.ckpt", train(small.model(), remote=small.url)
    monkeypatch.setattr(far_training, "MOST", 2)
    small.set(faults=["", "", "", "", *["evicted"] * 5])
    with pytest.raises(LayersimError, match="gave no answer") as caught:
        train(small.model(), remote=small.url, checkpoint=path)
    assert any(str(path) in note for note in caught.value.__notes__)
    small.set()
    assert equal(train(small.model(), remote=small.url, checkpoint=path), calm)


def test_a_step_that_takes_too_long_is_refused(small):  # noqa: F811
    small.set(most_batches=0)
    with pytest.raises(LayersimError, match=r"takes longer than a job may(.|\n)*batch_size=2"):
        train(small.model(), remote=small.url)


def test_no_training_in_a_sandbox(small, monkeypatch):  # noqa: F811
    from tl_layersim.sources.remote import RemoteSource

    plain = RemoteSource._ask_offer
    monkeypatch.setattr(RemoteSource, "_ask_offer", lambda self: replace(plain(self), trusted=False))
    with pytest.raises(LayersimError, match=r"sandbox that weights stay out of(.|\n)*a trusted server"):
        train(small.model(), remote=small.url)
