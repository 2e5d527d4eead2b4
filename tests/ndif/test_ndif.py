"""A real NDIF server, trusted and sandboxed: what comes back is what a model here gives, whatever happens on the way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.remote import client as ndif

from ..running.options import called
from .client import equal, furthest, load, rows

HERE = Path(__file__).resolve().parents[2]
RESIDUAL = [lsim.Cosine(), lsim.CKA(minibatch=64), lsim.Trajectory(), lsim.NeuralCollapse()]
LENS = [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve()]
pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore:.*:UserWarning")]


# First those with servers of their own: an idle server takes a good part of a core.


def test_a_job_that_is_too_long_is_halved_and_adds_up_to_the_same(start, tmp_path):
    server, data = start(job_limit=4), rows(32, 200)
    options = {"remote": server.url, "batch_size": 2}
    # A request with CKA holds 16 rows or more.
    analyzers = [lsim.Cosine(center="none"), lsim.Trajectory()]
    calm = called(lsim.analyze, load("tests/slow"), data, analyzers, tokens_per_request=400, **options)
    halved = called(lsim.analyze, load("tests/slow"), data, analyzers, tokens_per_request=100_000, **options)
    assert equal(calm, halved)
    requests = [report["cosine"].provenance.options["remote"][0]["requests"] for report in (calm, halved)]
    assert requests[0] == 17
    # Without a halving there would be two requests.
    assert 2 < requests[1] <= 17
    # Left to itself it stays below the limit.
    assert equal(calm, called(lsim.analyze, load("tests/slow"), data, analyzers, **options))
    with pytest.raises(lsim.LayersimError, match=r"the server's time limit for a job(.|\n)*batch_size="):
        lsim.analyze(
            lsim.open_model(load("tests/slow"), remote=server.url), lsim.Data(rows(120, 256), batch_size=120), analyzers
        )
    # The same of jobs that are not waited for.
    run = called(lsim.analyze, load("tests/slow"), data, analyzers, tokens_per_request=100_000, blocking=False, **options)
    run.save(tmp_path / "run")
    assert equal(run.result(600), calm)
    with pytest.raises(lsim.LayersimError, match="cannot be sent again without the model"):
        lsim.load_run(tmp_path / "run").result(300)
    assert equal(lsim.load_run(tmp_path / "run", model=load("tests/slow")).result(600), calm)


def test_a_server_that_is_killed_and_started_again(start, monkeypatch):
    server, data = start(), rows(24, 60)
    analyzers = [lsim.Cosine(), lsim.Trajectory()]
    options = {"remote": server.url, "batch_size": 2, "tokens_per_request": 240}
    undisturbed = called(lsim.analyze, load("tests/llama"), data, analyzers, **options)

    under_way, plain, asked = threading.Event(), ndif.NdifClient._attempt, []

    def attempt(self, run, backend=None):
        asked.append(1)
        if len(asked) == 7:
            under_way.set()
        return plain(self, run, backend)

    def power_cut():
        under_way.wait(120)
        server.kill()
        server.start()

    monkeypatch.setattr(ndif.NdifClient, "_attempt", attempt)
    cut = threading.Thread(target=power_cut)
    cut.start()
    report = called(lsim.analyze, load("tests/llama"), data, analyzers, **options)
    cut.join()
    # Some requests were made more than once.
    assert len(asked) > report["cosine"].provenance.options["remote"][0]["requests"]
    assert equal(report, undisturbed)
    assert report["cosine"].provenance.seconds > undisturbed["cosine"].provenance.seconds + 5


@pytest.mark.parametrize("name", ["tests/llama", "tests/gpt2", "real/stories260K"])
def test_remote_equals_local(name, server, hub, trust):
    if name not in hub:
        pytest.skip("optional real model: no models/stories260K")
    data = rows(12, 60)
    # A sandbox has no gradients of a model.
    coupling = lsim.BlockCoupling(k=6, method="dense" if trust == "trusted" else "finite-difference")
    analyzers = [*RESIDUAL, *LENS, coupling, lsim.SkipEffect(), lsim.Contribution()]
    report = lsim.analyze(
        lsim.open_model(load(name), remote=server.url, tokens_per_request=4000), lsim.Data(data, batch_size=4), analyzers
    )
    here = lsim.analyze(load(name, torch.float32), lsim.Data(data, batch_size=4), analyzers)
    assert furthest(report, here) < 1e-6
    for result, local in zip(report.values(), here.values(), strict=True):
        assert result.provenance.data == local.provenance.data
        assert result.provenance.dtype == "torch.float32"
        [place] = result.provenance.options["remote"]
        assert place["server"] == server.url
        assert place["trusted"] is (trust == "trusted")


def test_few_bytes_come_back(server, capsys):
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=64), lsim.Trajectory()]
    sizes = []
    for count in (4, 64):
        report = lsim.analyze(
            lsim.open_model(load("tests/deep"), remote=server.url), lsim.Data(rows(count, 60), batch_size=count), analyzers
        )
        [place] = report["cosine"].provenance.options["remote"]
        # The probe, which brings a few words, and one request.
        assert place["requests"] == 2
        tokens = report["cosine"].provenance.tokens
        sizes.append(place["bytes_received"])
        with capsys.disabled():
            print(f"\n32 layers, {tokens} tokens: {place['bytes_sent']:,} bytes sent, {place['bytes_received']:,} back")
    assert max(sizes) < 100_000
    # Compressed: fuller histograms are a little larger.
    assert sizes[1] < 2 * sizes[0]


def run_client(*args: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.ndif.client", *map(str, args)], cwd=HERE, env=dict(os.environ))


def test_a_client_that_is_killed_five_times(server, tmp_path):
    assert run_client(server.url, "tests/slow", tmp_path / "calm.st").wait() == 0
    draw, killed, lengths = random.Random(0), 0, []
    checkpoint = tmp_path / "run.ckpt"
    while killed < 5:
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        client = run_client(server.url, "tests/slow", tmp_path / "killed.st", checkpoint)
        # Imports take seconds: the clock starts with the first sums of this process.
        while client.poll() is None and (checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0) == before:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.6))
        if client.poll() is not None:
            break
        client.send_signal(signal.SIGKILL)
        client.wait()
        killed += 1
        lengths.append(checkpoint.stat().st_size)
    assert killed == 5, f"the run was over after {killed} kills: it is too short"
    assert run_client(server.url, "tests/slow", tmp_path / "killed.st", checkpoint).wait() == 0
    calm, survived = lsim.load(tmp_path / "calm.st"), lsim.load(tmp_path / "killed.st")
    assert equal(calm, survived)
    assert calm["cka"].provenance.tokens == survived["cka"].provenance.tokens
    assert b"beef" not in checkpoint.read_bytes() + (tmp_path / "killed.st").read_bytes()


def test_a_run_that_is_not_waited_for_is_picked_up_in_another_process(server, tmp_path):
    data, analyzers = rows(32, 60), RESIDUAL + LENS
    options = {"remote": server.url, "batch_size": 4}
    waited = called(lsim.analyze, load("tests/llama"), data, analyzers, **options)
    run = called(lsim.analyze, load("tests/llama"), data, analyzers, blocking=False, tokens_per_request=480, **options)
    run.save(tmp_path / "run")
    assert b"beef" not in (tmp_path / "run").read_bytes()
    assert "beef" not in repr(run)
    code = f"import tl_layersim as l; l.load_run({str(tmp_path / 'run')!r}).result(300).save({str(tmp_path / 'out')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=500)
    assert equal(lsim.load(tmp_path / "out"), waited)
    assert equal(run.result(300), waited)


def test_two_remote_models_are_compared_by_what_is_small(server, trust, capfd):
    data = rows(12, 60)
    options = {"batch_size": 12}
    far = called(
        lsim.compare, load("tests/llama"), load("tests/gpt2"), data, lsim.CKA(minibatch=64), remote=server.url, **options
    )
    said = capfd.readouterr().err
    here = called(
        lsim.compare,
        load("tests/llama", torch.float32),
        load("tests/gpt2", torch.float32),
        data,
        lsim.CKA(minibatch=64),
        **options,
    )
    assert torch.allclose(far.values, here.values, atol=1e-6)
    assert "transferred in all" in said


def test_one_model_here_and_one_there(server):
    data = rows(12, 60)
    mixed = lsim.compare(
        load("tests/llama", torch.float32), lsim.open_model(load("tests/gpt2"), remote=server.url), data, lsim.CKA(minibatch=64)
    )
    here = lsim.compare(load("tests/llama", torch.float32), load("tests/gpt2", torch.float32), data, lsim.CKA(minibatch=64))
    assert torch.allclose(mixed.values, here.values, atol=1e-6)


def test_the_server_says_what_it_can_do(server, trust):
    found = lsim.costs.capabilities(lsim.open_model(load("tests/llama"), remote=server.url))
    assert found.offer.trusted is (trust == "trusted")
    assert found.offer.dtype == "torch.float32"
    assert found.offer.devices == ("cpu",)
    assert found.offer.job_limit is None
    assert set(found.analyzers) == set(find_analyzers())
    reasons = {name: reason for name, reason in found.analyzers.items() if reason}
    # Analyzers that need gradients.
    assert set(reasons) == (set() if trust == "trusted" else {"block_coupling", "logit_attribution"})
    assert all("sandbox" in reason for reason in reasons.values())
    assert "beef" not in str(found) + repr(found)
    # The environment of `make test-ndif` has another patch release of nnsight than the server.
    assert any(words.startswith("nnsight ") for words in found.offer.differences)


def test_a_model_that_the_server_cannot_load(server, hub, tmp_path):
    import shutil

    from .conftest import HUB

    # Here a client may read it; the server finds its weights gone.
    shutil.copytree(HUB.root / "tests/llama", HUB.root / "tests/gone")
    model = load("tests/gone")
    for path in (HUB.root / "tests/gone").glob("*"):
        path.unlink()
    with pytest.raises(lsim.LayersimError, match="tests/gone"):
        lsim.analyze(lsim.open_model(model, remote=server.url), rows(2, 8), ["cka"])


def test_the_tutorial_runs_as_it_is_but_for_names(server, hub, tmp_path, monkeypatch):
    from nnsight.schema.config import CONFIG

    from ..remote.helpers import run_page

    monkeypatch.setattr(CONFIG.API, "HOST", server.url)
    monkeypatch.chdir(tmp_path)
    run_page("tests/demo")


def test_stitched_there_as_here(server, trust):
    options = {"at": (1, 1), "adapter": "affine", "fit": "lstsq", "batch_size": 8}
    data = rows(16, 40)
    expected = called(lsim.stitch, load("tests/llama", torch.float32), load("tests/gpt2", torch.float32), data, **options)
    there = [load("tests/llama"), load("tests/gpt2")]
    found = called(lsim.stitch, *there, data, remote=server.url, **options)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.back_loss == pytest.approx(expected.back_loss, abs=1e-6)
    training = {"fit": "sgd", "training": lsim.stitching.StitchTraining(steps=3, warmup=1)}
    if trust == "sandboxed":
        with pytest.raises(lsim.LayersimError, match="`fit` is 'sgd'"):
            called(lsim.stitch, *there, data, remote=server.url, **options | training)
        return
    trained = called(lsim.stitch, *there, data, remote=server.url, **options | training | {"adapter": "affine-norm"})
    by_hand = called(
        lsim.stitch,
        load("tests/llama", torch.float32),
        load("tests/gpt2", torch.float32),
        data,
        **options | training | {"adapter": "affine-norm"},
    )
    torch.testing.assert_close(trained.curve, by_hand.curve, rtol=1e-5, atol=1e-5)
