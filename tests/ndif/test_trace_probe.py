"""`probe.read()` in traces on a real NDIF server, trusted and sandboxed."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..user_loops.test_trace_probe import hooked
from .client import counting, furthest, load, rows

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore:.*:UserWarning")]
ANALYZERS = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16), lsim.LogitLens(), lsim.Saturation()]


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_traces_equal_a_hooked_model(server, trust, scale, capsys):
    model, data = load("tests/llama"), rows(16, 40)
    probe = lsim.attach(lsim.open_model(model, remote=server.url), ANALYZERS)
    backend = counting(model, server.url)
    with model.trace(backend=backend) as tracer:
        with tracer.invoke(data):
            model.model.layers[1].mlp.output[:] = model.model.layers[1].mlp.output * scale
        with tracer.invoke():
            probe.read()
    report = probe.results()
    near = hooked(load("tests/llama", torch.float32)._module, data, ANALYZERS, scale)
    assert furthest(report, near) < 1e-6
    assert report["cosine"].provenance.tokens == int(data["attention_mask"].sum())
    with capsys.disabled():
        print(f"\n{trust}: {backend.sent:,} bytes sent, {backend.received:,} back; furthest {furthest(report, near):g}")


def test_each_new_token_of_a_generation(server, trust):
    model, tokens = load("tests/llama"), rows(4, 40)["input_ids"][:, :10]
    quick = [lsim.Saturation()]
    probe = lsim.attach(lsim.open_model(model, remote=server.url), quick)

    def generate():
        with model.generate(max_new_tokens=3, do_sample=False, remote=server.url) as tracer:
            with tracer.invoke(tokens):
                pass
            with tracer.invoke():
                for _ in tracer.iter[:3]:
                    probe.read()
        return probe

    if trust == "sandboxed":
        # Steps after the first would go on with a copy of the cache.
        with pytest.raises(Exception, match="sandboxed"):
            generate()
        return
    generate()
    module = load("tests/llama", torch.float32)._module
    with lsim.attach(module, quick) as loop, torch.no_grad():
        module.generate(tokens, max_new_tokens=3, do_sample=False, attention_mask=torch.ones(4, 10))
    assert torch.equal(probe.results()["saturation"].counts, loop.results()["saturation"].counts)
