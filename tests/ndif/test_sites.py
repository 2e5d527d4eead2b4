"""Hook points, positions and analyzers with sites of their own on a real NDIF server, trusted and sandboxed."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.engine import submitted_runs

from ..running.options import called
from .client import equal, furthest, load, rows

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore:.*:UserWarning")]
QUICK = [lsim.Cosine(center="none"), lsim.CKA(minibatch=64)]
HERE: dict[str, object] = {}


def both(server, name, analyzers, **options):
    """The report of the server, which must equal the report of this process."""
    data = rows(8, 40)
    if name not in HERE:
        HERE[name] = load(name, torch.float32)
    near = called(lsim.analyze, HERE[name], data, analyzers, batch_size=4, **options)
    far = called(lsim.analyze, load(name), data, analyzers, remote=server.url, batch_size=4, tokens_per_request=4000, **options)
    assert furthest(far, near) < 1e-6
    for one, other in zip(far.values(), near.values(), strict=True):
        assert one.layers == other.layers
        assert one.provenance.tokens == other.provenance.tokens
    return far


@pytest.mark.parametrize(("at", "per_head"), [(["attn_out", "mlp_out"], False), ("z", True)], ids=["sublayers", "heads"])
def test_sites_equal_local(server, trust, at, per_head):
    report = both(server, "tests/llama", QUICK, at=at, per_head=per_head)
    [place] = report["cka"].provenance.options["remote"]
    assert place["trusted"] is (trust == "trusted")
    # The probe, the sums of the stream where the family is a term of them, and one for all batches.
    assert place["requests"] == (2 if per_head else 3)


# A sandbox starts a process for each request: few requests.


def test_positions_equal_local(server, trust):
    both(server, "tests/gpt2", QUICK, at="z", positions="mean", skip_first=3)
    if trust == "trusted":
        both(server, "tests/gpt2", QUICK, at="mlp_out", positions="last")


def test_analyzers_with_sites_of_their_own_equal_local(server, trust):
    both(server, "tests/gpt2", [lsim.SkipEffect(), lsim.Contribution(), lsim.LogitLens()])
    if trust == "trusted":
        both(server, "tests/llama", [lsim.LogitLens(), lsim.Contribution()], at="resid_mid")


def test_edits_after_the_last_site_equal_local(server, trust):
    found = []
    for model, options in ((load("tests/llama"), {"remote": server.url}), (load("tests/llama", torch.float32), {})):
        with model.edit() as (_, edited):
            edited.model.layers[0].output[:] = edited.model.layers[0].output * 0.5 + 1
            edited.model.layers[-1].output[:] = edited.model.layers[-1].output * 0.5 + 1
        found.append(called(lsim.analyze, edited, rows(8, 40), QUICK, at="attn_out", batch_size=4, **options))
    assert furthest(*found) < 1e-6
    assert furthest(found[0], lsim.analyze(load("tests/llama", torch.float32), rows(8, 40), QUICK, at="attn_out")) > 1e-3


def test_coupling_of_an_edited_model_equals_local(server, trust):
    edited = []
    for model in (load("tests/llama"), load("tests/llama", torch.float32)):
        with model.edit() as (_, changed):
            changed.model.layers[1].mlp.output[:] = changed.model.layers[1].mlp.output * 0.5
        edited.append(changed)
    far, near = lsim.open_model(edited[0], remote=server.url), edited[1]
    coupling = lsim.BlockCoupling(k=4)
    if trust != "trusted":
        with pytest.raises(lsim.LayersimError, match=r"BlockCoupling.*nnsight edit"):
            lsim.analyze(far, rows(4, 12), coupling)
        return
    found = lsim.analyze(far, rows(4, 12), coupling)
    assert furthest(found, lsim.analyze(near, rows(4, 12), coupling)) < 1e-5
    plain = lsim.analyze(load("tests/llama", torch.float32), rows(4, 12), coupling)
    assert furthest(found, plain) > 1e-3


def test_a_run_at_other_sites_is_kept_and_sent_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr(submitted_runs, "FORGOTTEN", 0.5)
    monkeypatch.setattr(submitted_runs, "PAUSE", 0.1)
    # A request with CKA holds 16 rows or more.
    data, options = rows(32, 40), {"remote": server.url, "batch_size": 4, "at": "z", "per_head": True}
    waited = called(lsim.analyze, load("tests/llama"), data, QUICK, **options)
    run = called(lsim.analyze, load("tests/llama"), data, QUICK, blocking=False, tokens_per_request=320, **options)
    path = run.save(tmp_path / "run")
    assert equal(lsim.load_run(path).result(300), waited)
    again = lsim.load_run(path, model=load("tests/llama"))
    # As after a restart of the server, which forgets its jobs.
    job = again._jobs[1]
    job.sent = replace(job.sent, id=str(uuid.uuid4()))
    assert equal(again.result(300), waited)
    assert job.failure is not None


def test_two_remote_models_at_other_sites(server):
    data, options = rows(8, 40), {"batch_size": 8, "at": "attn_out"}
    far = called(lsim.compare, load("tests/llama"), load("tests/gpt2"), data, QUICK[1], remote=server.url, **options)
    near = called(
        lsim.compare, load("tests/llama", torch.float32), load("tests/gpt2", torch.float32), data, QUICK[1], **options
    )
    assert torch.allclose(far.values, near.values, atol=1e-6)
    assert far.layers == near.layers


@pytest.mark.parametrize("at", ["attn_out", "mlp_out", "z", "mlp_post"])
def test_few_bytes_cross_at_32_layers(server, at, capsys):
    report = lsim.analyze(
        lsim.open_model(load("tests/deep"), remote=server.url), lsim.Data(rows(64, 60), batch_size=64), QUICK, at=at
    )
    [place] = report["cosine"].provenance.options["remote"]
    with capsys.disabled():
        print(
            f"\n32 layers, {at}, {report['cka'].samples} tokens: {place['bytes_sent']:,} bytes sent, "
            f"{place['bytes_received']:,} back, in {place['requests']} requests"
        )
    # Of all requests together, each with the code of the package that the server runs.
    assert max(place["bytes_sent"], place["bytes_received"]) < 160_000
