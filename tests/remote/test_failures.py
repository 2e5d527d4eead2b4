"""What goes wrong with requests to a server, and what is asked for again."""

from __future__ import annotations

import contextlib
import time

import pytest

import tl_layersim as lsim
from tl_layersim.remote import client as ndif

from ..ndif.client import equal, rows
from ..ndif.server import free_ports
from ..running.options import called
from .helpers import QUICK, SINGLE, lsim_analyzer


def test_a_request_that_takes_too_long_is_halved(small):
    data = rows(11, 20)
    calm = lsim.analyze(
        lsim.open_model(small.model(), remote=small.url, tokens_per_request=20), lsim.Data(data, batch_size=1), SINGLE
    )
    small.set(most_batches=2)
    halved = lsim.analyze(
        lsim.open_model(small.model(), remote=small.url, tokens_per_request=10_000), lsim.Data(data, batch_size=1), SINGLE
    )
    assert equal(calm, halved)
    # 11 batches: tried as 11 and 8 and 4, done as 2 + 2 + 2 + 2 + 2 + 1; and the probe.
    assert small.set(most_batches=0) == {"requests": 3 + 6 + 1, "completed": 6 + 1}
    with pytest.raises(lsim.LayersimError, match=r"the server's time limit for a job(.|\n)*batch_size="):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), lsim.Data(data, batch_size=4), SINGLE)


def test_what_does_not_pass_ends_the_run_and_keeps_the_sums(small, tmp_path):
    data, path = rows(8, 20), tmp_path / "run.ckpt"
    options = {"remote": small.url, "batch_size": 1, "tokens_per_request": 40, "checkpoint": path}
    small.set(faults=["", "", *["evicted"] * 6])
    with pytest.raises(lsim.LayersimError, match=r"does not respond in 5 attempts(.|\n)*evicted(.|\n)*checkpoint=") as caught:
        called(lsim.analyze, small.model(), data, SINGLE, **options)
    assert any(str(path) in note for note in caught.value.__notes__)
    small.set()
    resumed = called(lsim.analyze, small.model(), data, SINGLE, **options)
    # The probe, and the three requests that were missing.
    assert small.set()["requests"] == 4
    assert equal(resumed, called(lsim.analyze, small.model(), data, SINGLE, **options | {"checkpoint": None}))


@pytest.mark.heavy("a server with a socket")
@pytest.mark.parametrize("after", [1, 2, 5, 8, 11])
def test_a_resumed_run_ends_with_the_same_bits_however_it_was_cut(small, after, tmp_path, monkeypatch):
    data = rows(11, 20)
    options = {"remote": small.url, "batch_size": 1}
    calm = called(lsim.analyze, small.model(), data, QUICK, tokens_per_request=10_000, **options)
    path = tmp_path / "run.ckpt"
    # Five attempts of one request.
    small.set(faults=["", *[""] * (after - 1), *["evicted"] * 5])
    sizes = [20, 40, 60, 80, 160]
    with contextlib.suppress(lsim.LayersimError):
        called(lsim.analyze, small.model(), data, QUICK, checkpoint=path, tokens_per_request=sizes[after % 5], **options)
    small.set()
    assert equal(
        calm, called(lsim.analyze, small.model(), data, QUICK, checkpoint=path, tokens_per_request=sizes[after % 4], **options)
    )


def test_a_server_that_starts_again_in_the_middle(small, monkeypatch):
    data = rows(8, 20)
    options = {"remote": small.url, "batch_size": 1, "tokens_per_request": 20}
    calm = called(lsim.analyze, small.model(), data, SINGLE, **options)
    monkeypatch.setattr(ndif, "WAITS", (0.5,) * 60)
    plain, seen = ndif.NdifClient._send, []

    def send(self, payload):
        seen.append(1)
        if len(seen) == 5:
            small.stop()
        sent = plain(self, payload)
        if len(seen) == 5:
            assert sent[1].exception(60) is not None
            small.start()
        return sent

    monkeypatch.setattr(ndif.NdifClient, "_send", send)
    assert equal(calm, called(lsim.analyze, small.model(), data, SINGLE, **options))
    assert len(seen) > 8


def test_a_connection_that_has_gone_silent_is_noticed(small, monkeypatch):
    # Nothing more is said, and the server is gone without a word: what a cut cable looks like.
    monkeypatch.setattr(ndif, "SILENCE", 0.3)
    asked = []

    def gone(self, path, timeout=30.0):
        asked.append(path)
        raise ndif.TransientFailure("no answer")

    display = ndif.NdifClient(small.url, "x:{}", {}).backend().display
    monkeypatch.setattr(ndif.NdifClient, "get", gone)
    display.refresh()
    time.sleep(0.4)
    with pytest.raises(ConnectionError):
        display.refresh()
    assert asked == ["/ping"]


@pytest.mark.heavy("waits for an answer")
def test_no_server(small):
    [port] = free_ports(1)
    with pytest.raises(lsim.LayersimError, match=rf"http://127\.0\.0\.1:{port}\b(.|\n)*NDIF_HOST"):
        lsim.analyze(lsim.open_model(small.model(), remote=f"http://127.0.0.1:{port}"), rows(2, 8), QUICK)
    with pytest.raises(lsim.LayersimError, match=r"`remote`.*http://127"):
        lsim.analyze(lsim.open_model(small.model(), remote="127.0.0.1:5000"), rows(2, 8), QUICK)
    with pytest.raises(lsim.LayersimError, match=r"no NDIF server(.|\n)*HTTP 404"):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url + "/elsewhere"), rows(2, 8), QUICK)


@pytest.mark.heavy("many requests")
def test_versions_that_differ_are_named_when_a_request_fails(small):
    @lsim_analyzer
    def broken(view):
        raise RuntimeError("nothing like this there")

    small.set(versions={"transformers": "4.0.0"})
    found = lsim.costs.capabilities(lsim.open_model(small.model(), remote=small.url))
    assert any("transformers" in words and "4.0.0 there" in words for words in found.offer.differences)
    with pytest.raises(lsim.LayersimError, match=r"nothing like this there(.|\n)*transformers .* here, 4.0.0 there"):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(2, 8), [broken])


def test_a_server_that_wants_other_versions(small):
    small.set(deny="Client nnsight version 0.8.1 is below the minimum supported 9.0.")
    with pytest.raises(lsim.LayersimError, match=r"minimum supported 9\.0(.|\n)*remote='local'"):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(2, 8), QUICK)


def test_a_model_from_a_folder_has_no_name_on_a_server(small, monkeypatch):
    from nnsight.modeling import huggingface

    model = small.model()
    monkeypatch.delitem(huggingface._ID_CACHE, model.repo_id)
    with pytest.raises(lsim.LayersimError, match=r"`model`.*/llama'.*'org/llama'"):
        lsim.analyze(lsim.open_model(model, remote=small.url), rows(2, 8), QUICK)
