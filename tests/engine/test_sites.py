"""Laws of runs at sites other than the residual stream: padding, checkpoints, results, refusals, attached probes."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.sources.hooked_module import HookedSource

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import nnsight
from ..running.options import called
from ..running.runs import MODELS, analyzers, each_model, hooks, logits

pytestmark = pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
PLACES = {"z per head": {"at": "z", "per_head": True}}
each_place = pytest.mark.parametrize("asked", PLACES.values(), ids=PLACES)


def every():
    return [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.NeuralCollapse(classes=4)]


@each_place
def test_padding_does_not_matter(asked):
    rows = [random_tokens(1, n, seed=n)[0] for n in (14, 6, 9, 12)]
    plain = called(lsim.analyze, tiny_llama(), rows, every(), **asked)
    for side in ("left", "right"):
        tokens = random_tokens(4, 17, seed=8)
        mask = torch.zeros(4, 17, dtype=torch.int64)
        for i, row in enumerate(rows):
            span = slice(17 - len(row), 17) if side == "left" else slice(0, len(row))
            tokens[i, span], mask[i, span] = row, 1
        padded = called(lsim.analyze, tiny_llama(), {"input_ids": tokens, "attention_mask": mask}, every(), **asked)
        for name in plain:
            assert worst(plain[name], padded[name]) < 1e-9
            assert padded[name].provenance.data == plain[name].provenance.data


class Stopped(KeyboardInterrupt):
    pass


@each_place
@pytest.mark.parametrize("at", [1, 5])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_numbers(asked, at, tmp_path, monkeypatch):
    """Four batches twice over, and a check of the first row before each pass that begins at its first batch."""
    model = tiny_llama()
    data = list(random_tokens(8, 11))
    path = tmp_path / "run.safetensors"
    undisturbed = called(lsim.analyze, model, data, every(), batch_size=2, **asked)
    calls = []
    run = HookedSource.run

    def interrupted(self, batch, kernels):
        calls.append(len(batch.tokens))
        if len([rows for rows in calls if rows == 2]) == at + 1:
            calls.append(2)
            raise Stopped
        return run(self, batch, kernels)

    monkeypatch.setattr(HookedSource, "run", interrupted)
    with pytest.raises(Stopped):
        called(lsim.analyze, model, data, every(), batch_size=2, checkpoint=path, **asked)
    report = called(lsim.analyze, model, data, every(), batch_size=2, checkpoint=path, **asked)
    for name in report:
        assert worst(report[name], undisturbed[name]) == 0
        assert report[name].layers == undisturbed[name].layers
    with pytest.raises(lsim.LayersimError, match=r"run\.safetensors .*sites: .*sites: "):
        lsim.analyze(model, lsim.Data(data, batch_size=2), every(), checkpoint=path, at="mlp_out")


def test_results_of_heads_survive_save_and_load(tmp_path):
    report = lsim.analyze(tiny_llama(), random_tokens(), every(), at=["q", "z"], per_head=True)
    loaded = lsim.load(report.save(tmp_path / "report.safetensors"))
    assert report["cka"].layers[:2] == ("blocks.0.attn.hook_q[0]", "blocks.0.attn.hook_q[1]")
    for name, result in report.items():
        assert worst(result, loaded[name]) == 0
        assert (loaded[name].layers, loaded[name].provenance) == (result.layers, result.provenance)
    assert loaded["cka"].provenance.options["per_head"] is True
    assert list(loaded["cosine"].to_frame()["row_layer"].cat.categories) == list(report["cka"].layers)


def test_some_blocks_named_with_layers():
    model = tiny_llama()
    tokens = random_tokens()
    blocks = ["model.layers.0", "model.layers.2"]

    whole = lsim.analyze(model, tokens, lsim.CKA(), at="attn_out")["cka"]
    some = lsim.analyze(lsim.open_model(model, layers=blocks), tokens, lsim.CKA(), at="attn_out")["cka"]

    assert some.layers == ("blocks.0.hook_attn_out", "blocks.2.hook_attn_out")
    torch.testing.assert_close(some.values, whole.values[::2, ::2])
    with pytest.raises(lsim.LayersimError, match=r"`at` is 'attn_out'.*resid_post"):
        lsim.analyze(
            lsim.open_model(model, layers=[f"model.layers.{i}.mlp" for i in range(3)]), tokens, lsim.CKA(), at="attn_out"
        )


def test_a_stitched_model_is_read_at_its_residual_stream_alone():
    model = tiny_llama()
    tokens = random_tokens(8)
    stitched = lsim.stitch(model, model, tokens, at=(0, 0), adapter="identity").model

    with pytest.raises(lsim.LayersimError, match=r"`at` is 'attn_out'.*stitched"):
        lsim.analyze(stitched, tokens, lsim.CKA(), at="attn_out")
    assert lsim.analyze(stitched, tokens, lsim.CKA(), at="resid_post")["cka"].values.isfinite().all()


class Shared(torch.nn.Module):
    """An architecture that nobody knows, which runs one module twice, and has one that it never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 8)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.twice, self.idle = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for part in self.parts:
            x = x + part(x + self.twice(x))
        return self.head(x)


BLOCKS = ["parts.0", "parts.1"]
NOT_ONCE = ("twice", "idle")


@pytest.mark.parametrize("path", NOT_ONCE)
@pytest.mark.parametrize("beside", [[], ["parts.1"]], ids=str)
@pytest.mark.parametrize("source", ["here", "remote=local"])
def test_a_module_that_does_not_run_once_is_refused(path, beside, source):
    model = Shared() if source == "here" else nnsight(Shared())
    options = {"remote": "local"} if source == "remote=local" else {}
    with pytest.raises(lsim.LayersimError, match=rf"`at`.*\b{path}\b"):
        called(lsim.analyze, model, random_tokens(), lsim.CKA(), at=[path, *beside], layers=BLOCKS, **options)


@pytest.mark.parametrize("path", NOT_ONCE)
@pytest.mark.parametrize("beside", [[], ["parts.1"]], ids=str)
def test_a_probe_refuses_it_in_its_results(path, beside):
    model = Shared()
    tokens = random_tokens()
    expected = model(tokens)
    with lsim.attach(lsim.open_model(model, layers=BLOCKS), lsim.CKA(), at=[path, *beside]) as probe:
        assert torch.equal(model(tokens), expected)

    with pytest.raises(lsim.LayersimError, match=rf"`at`.*\b{path}\b"):
        probe.results()

    with lsim.attach(lsim.open_model(model, layers=BLOCKS), lsim.CKA(), at=["parts.0", "head"]) as probe:
        model(tokens)
        model(tokens)
    assert probe.results()["cka"].provenance.tokens == 2 * tokens.numel()


# ---- attached probes


@each_model
@each_place
def test_a_probe_sums_what_analyze_sums_and_changes_nothing(make, asked):
    model = make()
    tokens = random_tokens(4, 9)

    def step():
        model.zero_grad()
        out = logits(model, tokens)
        out.square().mean().backward()
        return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain_out, plain_grads = step()
    before = hooks(model)
    with called(lsim.attach, model, analyzers(), **asked) as probe:
        out, grads = step()
    assert torch.equal(out, plain_out)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))
    assert hooks(model) == before
    expected = called(lsim.analyze, model, tokens, analyzers(), **asked)
    for name, result in probe.results().items():
        assert worst(result, expected[name]) < 1e-6
        assert result.layers == expected[name].layers

    def loop():
        with called(lsim.attach, model, analyzers(), **asked):
            model(tokens)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop()
    assert hooks(model) == before


@each_place
@pytest.mark.parametrize("make", list(MODELS.values())[:2], ids=list(MODELS)[:2])
def test_a_probe_counts_once_with_gradient_checkpointing(make, asked):
    model = make().train()
    tokens = random_tokens(4, 9)
    getattr(model, "original_model", model).gradient_checkpointing_enable()

    with called(lsim.attach, model, analyzers(), **asked) as probe:
        logits(model, tokens).square().mean().backward()

    assert probe.results()["cka"].provenance.tokens == 36


def test_a_probe_of_a_pass_that_fails_goes_on_with_the_next():
    model = tiny_llama()
    tokens = random_tokens()

    def fail(*_):
        raise RuntimeError("mine")

    with lsim.attach(model, lsim.CKA(), at=["attn_out", "ln_final"]) as probe:
        handle = model.model.layers[2].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="mine"):
            model(tokens)
        handle.remove()
        model(tokens)
        lsim.analyze(model, tokens, lsim.CKA(), at="attn_out")
    result = probe.results()["cka"]
    # The run that ended before the final norm is no whole pass either.
    assert result.provenance.tokens == tokens.numel()
    expected = lsim.analyze(model, tokens, lsim.CKA(), at=["attn_out", "ln_final"])["cka"]
    assert worst(result, expected) < 1e-6


def test_a_probe_refuses_cosines_of_sites_of_different_widths():
    model = tiny_llama()
    with lsim.attach(model, lsim.Cosine(center="none"), at=["attn_out", "mlp_post"]) as probe:
        model(random_tokens())
    with pytest.raises(lsim.LayersimError, match=r"Cosine needs sites of equal width"):
        probe.results()

    with lsim.attach(model, lsim.CKA(), at=["attn_out", "mlp_post"]) as probe, torch.no_grad():
        model(random_tokens())
    expected = lsim.analyze(model, random_tokens(), lsim.CKA(), at=["attn_out", "mlp_post"])["cka"]
    assert worst(probe.results()["cka"], expected) < 1e-6
