"""attach and analyze where several forward passes of one model are under way: nested calls, threads, replicas."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tl_layersim as lsim

from ..input_models import OwnBlocks
from ..runs import hooks
from ..tiny_models import random_tokens, tiny_llama
from ..views import worst

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
    model, tokens = tiny_llama(), random_tokens(4, 9)
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
    model, tokens = tiny_llama(), random_tokens(4, 9)

    def loop():
        with torch.no_grad(), lsim.attach(model, COSINE) as probe:
            model(tokens)
        return probe

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(loop).result().results()["cosine"]
    assert worst(found, lsim.analyze(model, tokens, COSINE)["cosine"]) < 1e-6


@pytest.mark.parametrize("way", ["cosine", "logit_lens", "block_coupling"])
def test_analyze_reads_its_own_forward_passes_while_another_thread_runs_the_model(way):
    """Of a Hugging Face model: a TransformerBridge mixes up the forward passes of threads by itself."""
    model, tokens, other = tiny_llama(), random_tokens(4, 12), random_tokens(4, 12, seed=5)
    analyzer = {"cosine": COSINE, "logit_lens": lsim.LogitLens(), "block_coupling": lsim.BlockCoupling(k=2)}[way]
    expected = lsim.analyze(model, lsim.Data(tokens, batch_size=1), analyzer)[way]
    with torch.no_grad():
        before = model(other).logits
    stop, seen = threading.Event(), []

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

    calls, inside, go = [], threading.Event(), threading.Event()

    class Slow(torch.nn.Linear):
        def forward(self, x):
            if threading.current_thread().name == "lens":
                inside.set()
                go.wait(20)
            return super().forward(x)

    head = torch.nn.Sequential(torch.nn.Dropout(0.5), Slow(4, 4)).train()
    head[1].register_forward_hook(lambda *_: calls.append(1))
    lens = threading.Thread(target=lambda: Quiet(head)(torch.ones(1, 4)), name="lens")
    lens.start()
    inside.wait(20)
    assert head.training
    assert head[0].training
    head(torch.ones(1, 4))
    assert calls == [1]
    go.set()
    lens.join()
    assert calls == [1]


def test_a_call_of_the_model_inside_its_own_forward_pass_is_a_pass_of_its_own():
    model, tokens, inner = tiny_llama(), random_tokens(2, 9), random_tokens(3, 5, seed=1)
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
    model, busy = OwnBlocks(), []

    def again(*_):
        if not busy:
            busy.append(1)
            model.forward(random_tokens(2, 9, seed=1))
            busy.clear()

    handle = model.parts[1].register_forward_hook(again)
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=[f"parts.{i}" for i in range(3)]), COSINE) as probe:
        model(random_tokens(2, 9))
    handle.remove()
    with pytest.raises(lsim.LayersimError, match="interrupted by another one"):
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
