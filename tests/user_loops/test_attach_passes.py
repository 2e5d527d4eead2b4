"""attach: what is a forward pass of the model, also in other threads, and what is not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.input_models import OwnBlocks
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import bridge
from ..running.runs import analyzers, each_model, hooks, logits


def test_a_failed_forward_pass_does_not_spoil_the_next():
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    broken = [True]

    def fail(module, args):
        if broken[0]:
            raise RuntimeError("half way")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        with pytest.raises(RuntimeError, match="half way"):
            model(tokens)
        broken[0] = False
        model(tokens)
        broken[0] = True
        with pytest.raises(RuntimeError, match="half way"):
            model(tokens, attention_mask=torch.tensor([[1] * 12, [1] * 5 + [0] * 7]))
        broken[0] = False
        model(inputs_embeds=model.get_input_embeddings()(tokens)[:, :7])
    handle.remove()
    assert probe.results()["cosine"].provenance.tokens == 24 + 14


@pytest.mark.filterwarnings("ignore:1 of 4 rows")
def test_generation_with_a_cache_counts_each_token_once():
    model = bridge(tiny_llama())
    with lsim.attach(model, analyzers()) as probe:
        out = model.generate(random_tokens(4, 6), max_new_tokens=7, stop_at_eos=False, verbose=False, do_sample=False)
    # The last token is generated, but never read.
    assert probe.results()["cosine"].provenance.tokens == 4 * (6 + 7 - 1)
    expected = lsim.analyze(model, out[:, :-1], analyzers())
    for name in expected:
        assert worst(probe.results()[name], expected[name]) < 1e-5


class Checkpointed(torch.nn.Module):
    """Blocks inside a checkpoint, as models that call `torch.utils.checkpoint` around their blocks have them."""

    def __init__(self, layers: int, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 8)
        self.parts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.words(tokens)
        for part in self.parts:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_does_not_count_twice(layers, reentrant):
    """The backward pass runs blocks again, one by one; of a single block that looks like a whole forward pass."""
    model = Checkpointed(layers, reentrant)
    tokens = random_tokens(4, 12)
    paths = [f"parts.{i}" for i in range(layers)]
    with lsim.attach(lsim.open_model(model, layers=paths), analyzers()) as probe:
        model(tokens).square().mean().backward()
    assert probe.results()["cosine"].provenance.tokens == 48


@each_model
def test_gradient_checkpointing_of_a_real_layout(make):
    model = make().train()
    tokens = random_tokens(4, 12)
    getattr(model, "original_model", model).gradient_checkpointing_enable()
    with lsim.attach(model, analyzers()) as probe:
        logits(model, tokens).square().mean().backward()
    assert probe.results()["cosine"].provenance.tokens == 48


def test_a_block_that_is_run_alone_is_no_forward_pass():
    model = OwnBlocks()
    tokens = random_tokens(2, 12)
    layers = ["parts.0", "parts.1", "parts.2"]
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=layers), lsim.Cosine(center="none")) as probe:
        model.parts[1](torch.ones(2, 12, 8))
        model(tokens)
        model.parts[2](torch.ones(2, 5, 8))
        model.parts[0](torch.ones(2, 5, 8))
    expected = lsim.analyze(lsim.open_model(model, layers=layers), tokens, lsim.Cosine(center="none"))
    assert worst(probe.results()["cosine"], expected["cosine"]) == 0


def test_the_stack_inside_a_model_may_be_run_too():
    model = tiny_llama()
    tokens = random_tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model.model(tokens, attention_mask=mask)
        model(tokens, mask)
    assert probe.results()["cosine"].provenance.tokens == 20


def test_forward_passes_of_analyze_inside_the_block_are_not_counted():
    model = tiny_llama()
    tokens = random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(tokens)
        lsim.analyze(model, random_tokens(4, 9), [lsim.Cosine(), lsim.BlockCoupling(k=2)])
        model(tokens)
    assert probe.results()["cosine"].provenance.tokens == 48


def test_centred_cosine_with_the_mean_of_an_earlier_run():
    model = tiny_llama()
    tokens = random_tokens(8, 12)
    expected = lsim.analyze(model, tokens, lsim.Cosine())["cosine"]
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center=expected.mean)) as probe:
        for rows in tokens.split(4):
            model(rows)
    assert float((probe.results()["cosine"].values - expected.values).abs().max()) < 1e-9


COSINE = lsim.Cosine(center="none")


def in_a_thread(model, tokens):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.no_grad()(model), tokens).result().logits


def in_replicas(model, tokens):
    with ThreadPoolExecutor(2) as pool:
        run = torch.no_grad()(lambda pair: pair[0](pair[1]).logits)
        return torch.cat(list(pool.map(run, zip(replicas(model, 2), tokens.split(2), strict=True))))


@pytest.mark.parametrize("run", [in_a_thread, in_replicas])
def test_a_forward_pass_in_another_thread_is_refused_in_the_results(run):
    model = tiny_llama()
    tokens = random_tokens(4, 9)
    with torch.no_grad(), lsim.attach(model, [COSINE, lsim.LogitLens()]) as probe:
        expected = model(tokens).logits
        with pytest.warns(lsim.LayersimWarning, match="another thread"):
            found = run(model, tokens)
        assert probe.headline() == {}
    torch.testing.assert_close(found, expected)
    with pytest.raises(lsim.LayersimError, match="another thread"):
        probe.results()
    assert hooks(model) == 0


def test_a_probe_measures_the_thread_that_enters_its_block():
    model = tiny_llama()
    tokens = random_tokens(4, 9)

    def loop():
        with torch.no_grad(), lsim.attach(model, COSINE) as probe:
            model(tokens)
        return probe

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(loop).result().results()["cosine"]
    assert worst(found, lsim.analyze(model, tokens, COSINE)["cosine"]) < 1e-6


@pytest.mark.heavy("threads")
@pytest.mark.parametrize("way", ["cosine", "logit_lens", "block_coupling"])
def test_analyze_reads_its_own_forward_passes_while_another_thread_runs_the_model(way):
    """Of a Hugging Face model: a TransformerBridge mixes up the forward passes of threads by itself."""
    model = tiny_llama()
    tokens = random_tokens(4, 12)
    other = random_tokens(4, 12, seed=5)
    analyzer = {"cosine": COSINE, "logit_lens": lsim.LogitLens(), "block_coupling": lsim.BlockCoupling(k=2)}[way]
    expected = lsim.analyze(model, lsim.Data(tokens, batch_size=1), analyzer)[way]
    with torch.no_grad():
        before = model(other).logits
    stop = threading.Event()
    seen = []

    def loop():
        with torch.no_grad():
            while not stop.is_set():
                # Not equal: derivatives of blocks need torch's plain attention, which is set for the whole process.
                seen.append(torch.allclose(model(other).logits, before, rtol=1e-4, atol=1e-5))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop)
        while len(seen) < 2 and not running.done():
            pass
        try:
            found = [lsim.analyze(model, lsim.Data(tokens, batch_size=1), analyzer)[way] for _ in range(2)]
        finally:
            stop.set()
        running.result()
    assert all(seen)
    assert all(worst(one, expected) < 1e-12 for one in found)


def test_the_lens_of_a_probe_does_not_switch_off_hooks_and_dropout_of_other_threads():
    """A lens calls the norm and the head, which another thread may be in the middle of."""
    from tl_layersim.architectures.output_heads import Quiet

    calls = []
    inside = threading.Event()
    go = threading.Event()

    class Slow(torch.nn.Linear):
        def forward(self, x):
            if threading.current_thread().name == "lens":
                inside.set()
                go.wait(600)
            return super().forward(x)

    head = torch.nn.Sequential(torch.nn.Dropout(0.5), Slow(4, 4)).train()
    head[1].register_forward_hook(lambda *_: calls.append(1))
    lens = threading.Thread(target=lambda: Quiet(head)(torch.ones(1, 4)), name="lens")
    lens.start()
    inside.wait(600)
    assert head.training
    assert head[0].training
    head(torch.ones(1, 4))
    assert calls == [1]
    go.set()
    lens.join()
    assert calls == [1]


def test_a_call_of_the_model_inside_its_own_forward_pass_is_a_pass_of_its_own():
    model = tiny_llama()
    tokens = random_tokens(2, 9)
    inner = random_tokens(3, 5, seed=1)
    busy = []

    def again(*_):
        if not busy:
            busy.append(1)
            model(inner)
            busy.clear()

    with torch.no_grad():
        handle = model.model.layers[1].register_forward_hook(again)
        with lsim.attach(model, [COSINE, lsim.LogitLens()]) as probe:
            model(tokens)
        with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_pre"):
            lsim.analyze(model, tokens, COSINE)
        handle.remove()
    both = lsim.analyze(model, [*tokens, *inner], [COSINE, lsim.LogitLens()])
    for name in both:
        assert worst(probe.results()[name], both[name]) < 1e-5


def test_a_pass_inside_another_that_cannot_be_told_apart_is_refused():
    """`forward` itself is called past the model's hooks, so nothing says where the inner pass begins and ends."""
    model = OwnBlocks()
    busy = []

    def again(*_):
        if not busy:
            busy.append(1)
            model.forward(random_tokens(2, 9, seed=1))
            busy.clear()

    handle = model.parts[1].register_forward_hook(again)
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=[f"parts.{i}" for i in range(3)]), COSINE) as probe:
        model(random_tokens(2, 9))
    handle.remove()
    with pytest.raises(lsim.LayersimError, match=r"model\.forward\(\.\.\.\)"):
        probe.results()


def replicas(model, count):
    """Copies that share hooks and weights, as DataParallel makes them for its devices."""
    made = []
    for _ in range(count):
        copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, copied in copies.items():
            for name, child in module._modules.items():
                if child is not None:
                    copied._modules[name] = copies[child]
            for name, parameter in module._parameters.items():
                copied._parameters[name] = parameter
        made.append(copies[model])
    return made


def test_each_third_forward_pass_is_measured_and_the_others_are_not_read():
    # Given a loop of eight passes, one of which fails, and a rule that tells which rows the probe looks at.
    model = tiny_llama()
    parts = random_tokens(16, 9).split(2)
    rows_seen = []

    def from_third(row):
        rows_seen.append(tuple(row.tolist()))
        return range(2, len(row))

    with torch.no_grad(), lsim.attach(model, [COSINE, lsim.LogitLens()], positions=from_third, every=3) as probe:
        for number, part in enumerate(parts):
            if number == 4:
                with pytest.raises(IndexError):
                    model(part + 10**6)
            else:
                model(part)
    # Then passes 0, 3 and 6 are measured, also where an earlier one failed, and no row of another pass is looked at.
    measured = torch.cat([parts[0], parts[3], parts[6]])
    assert rows_seen == [tuple(row) for row in measured.tolist()]
    data = lsim.Data(measured, positions=slice(2, None))
    expected = lsim.analyze(model, data, [COSINE, lsim.LogitLens()])
    for name, result in probe.results().items():
        assert worst(result, expected[name]) < 1e-6
        assert result.provenance.tokens == 3 * 2 * 7
        assert result.provenance.options["every"] == 3


def test_each_second_pass_counts_from_a_reset_and_passes_inside_a_stack_count_once():
    model = tiny_llama()
    rows = random_tokens(1, 9)
    with torch.no_grad(), lsim.attach(model, COSINE, every=2) as probe:
        model(rows)
        probe.reset()
        # The pass after a reset is the first.
        model(rows[:, :5])
        model.model(rows)
        model.model(rows[:, :3])
    assert probe.results()["cosine"].provenance.tokens == 5 + 3
    assert hooks(model) == 0


def test_steps_of_a_generation_are_not_taken_apart():
    model = tiny_llama()
    with torch.no_grad(), lsim.attach(model, COSINE, every=2) as probe:
        out = model.generate(random_tokens(2, 6), max_new_tokens=3, do_sample=False)
    # The loop itself goes on.
    assert out.shape[1] <= 9
    with pytest.raises(lsim.LayersimError, match=r"`every` is 2"):
        probe.results()


def test_passes_of_transformer_lens_that_do_not_call_the_model_are_not_counted_apart():
    model = bridge(tiny_llama())
    with torch.no_grad(), lsim.attach(model, COSINE, every=2) as probe:
        for _ in range(3):
            model(random_tokens(2, 6))
    assert probe.results()["cosine"].provenance.tokens == 24


@pytest.mark.parametrize("every", [0, -2])
def test_a_number_of_passes_below_one_is_refused(every):
    with pytest.raises(lsim.LayersimError, match=rf"`every` is {every}"):
        lsim.attach(tiny_llama(), COSINE, every=every)
