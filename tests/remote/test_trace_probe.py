"""`probe.read()` in traces that run on a server, which sends its sums back with the results of the trace."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..ndif.client import counting
from ..user_loops.test_trace_probe import ANALYZERS, QUICK, TOKENS, differences, hooked
from .helpers import here


def opened(small):
    return lsim.open_model(small.model(), remote=small.url)


def far(probe, model, tokens, scale, small):
    with model.model.trace(remote=small.url) as tracer:
        with tracer.invoke(tokens):
            model.model.model.layers[1].mlp.output[:] = model.model.model.layers[1].mlp.output * scale
        with tracer.invoke():
            probe.read()
    # The same probe, in whose place the name stood on the server.
    return probe


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_traces_on_a_server_equal_a_hooked_model_to_the_last_bit(small, scale):
    model = opened(small)
    probe = lsim.attach(model, ANALYZERS)
    assert far(probe, model, TOKENS, scale, small) is probe
    report = probe.results()
    assert differences(report, hooked(here(small, "llama")._module, TOKENS, ANALYZERS, scale)) == []
    provenance = report["cosine"].provenance
    assert (provenance.tokens, provenance.sequences) == (480, 24)
    assert provenance.options["remote"][0]["server"] == small.url


@pytest.mark.heavy("many requests")
def test_several_traces_heads_and_positions(small):
    model = opened(small)
    analyzers, at = [lsim.Cosine(center="none")], {"at": "z", "per_head": True}
    probe = lsim.attach(model, analyzers, positions=slice(2, -1), **at)
    for part in TOKENS[:16].split(8):
        far(probe, model, part, 0.5, small)
    data = lsim.Data(TOKENS[:16], positions=slice(2, -1), batch_size=8)
    expected = hooked(here(small, "llama")._module, data, analyzers, 0.5, **at)
    assert differences(probe.results(), expected) == []


def test_two_probes_in_one_trace(small):
    model = opened(small)
    one, other = lsim.attach(model, QUICK), lsim.attach(model, QUICK)
    own = model.model
    with own.trace(remote=small.url) as tracer:
        with tracer.invoke(TOKENS[:8]):
            pass
        with tracer.invoke():
            one.read()
        with tracer.invoke():
            own.model.layers[1].mlp.output[:] = 0
        with tracer.invoke():
            other.read()
    expected = hooked(here(small, "llama")._module, TOKENS[:8], QUICK)
    # Residual layers after the second MLP show the intervention to both.
    assert differences(one.results(), expected) == differences(other.results(), expected) == []


def test_each_new_token_on_a_server(small):
    model = opened(small)
    probe, own = lsim.attach(model, QUICK), model.model
    with own.generate(max_new_tokens=4, do_sample=False, remote=small.url) as tracer:
        with tracer.invoke(TOKENS[:4, :10]):
            pass
        with tracer.invoke():
            for _ in tracer.iter[:4]:
                probe.read()
    module = here(small, "llama")._module
    with lsim.attach(module, QUICK) as loop, torch.no_grad():
        module.generate(TOKENS[:4, :10], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(4, 10))
    counts = loop.results()["saturation"].counts
    assert torch.equal(probe.results()["saturation"].counts, counts)


def test_few_bytes_cross(small):
    model = opened(small)
    probe = lsim.attach(model, QUICK)
    sizes = []
    for rows in (8, 24):
        backend = counting(model.model, small.url)
        with model.model.trace(backend=backend) as tracer:
            with tracer.invoke(TOKENS[:rows]):
                pass
            with tracer.invoke():
                probe.read()
        sizes.append((backend.sent, backend.received))
    assert max(max(size) for size in sizes) < 80_000
    assert max(received for _, received in sizes) < 8_000


class Held:
    def __init__(self, probe):
        self.probe = probe


def test_a_probe_without_a_name_of_its_own_is_an_error(small):
    model = opened(small)
    held, own = Held(lsim.attach(model, QUICK)), model.model
    with own.trace(remote=small.url) as tracer:
        with tracer.invoke(TOKENS[:4]):
            pass
        with tracer.invoke():
            held.probe.read()
    with pytest.raises(lsim.LayersimError, match=r"1 trace"):
        held.probe.results()


CHANGED = """
# The seal was made of the sums before the change.
import copy
class Sent:
    def __init__(self, how): self.how = how
    def __reduce__(self): return self.how
for name, one in list(kept.items()):
    if hasattr(one, 'passes'):
        call, (place, key, ticket, (same, number, passes)) = one.__reduce__()
        plain = copy.deepcopy(passes)
        CHANGE
        kept[name] = Sent((call, (place, key, ticket, (same, number, plain))))
"""


@pytest.mark.parametrize(
    "code",
    [
        "plain[0]['tokens'] = -1",
        "plain[0]['tokens'] = 1000",
        "plain[0].pop('hash')",
        "plain[0]['sums'] = walk(plain[0]['sums'], lambda t: t.float())",
        "plain[0]['sums'] = walk(plain[0]['sums'], lambda t: t + 1)",
        "plain[0]['sums'][1].pop('saturation')",
        "plain.append(plain[0])",
    ],
)
def test_sums_that_were_changed_on_the_way_are_refused(small, code):
    model = opened(small)
    probe = lsim.attach(model, QUICK)
    small.set(mutate=CHANGED.replace("CHANGE", code))
    with pytest.raises(lsim.LayersimError, match=r"probe\.read\(\)"):
        far(probe, model, TOKENS[:8], 1.0, small)
    small.set()
    assert far(probe, model, TOKENS[:8], 1.0, small).results()["saturation"].counts.sum() == 8 * 20
