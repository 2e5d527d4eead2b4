"""Requests that are prepared while the request before them runs."""

from __future__ import annotations

import threading
import time

import pytest

import tl_layersim as lsim
from tl_layersim.remote.client import NdifClient

from ..ndif.client import equal, rows
from ..running.options import called
from .helpers import SINGLE


@pytest.fixture
def run(small):
    def of_rows(count=8, **options):
        options = {"remote": small.url, "batch_size": 1, "tokens_per_request": 20} | options
        return called(lsim.analyze, small.model(), rows(count, 20), SINGLE, **options)

    return of_rows


@pytest.fixture
def log(monkeypatch):
    """What happens to requests, in order."""
    happened, prepare, attempt = [], NdifClient.prepare, NdifClient._attempt

    def prepared(self, run):
        happened.append("prepare")
        return prepare(self, run)

    def attempted(self, run, backend=None):
        result = attempt(self, run, backend)
        happened.append("result")
        return result

    monkeypatch.setattr(NdifClient, "prepare", prepared)
    monkeypatch.setattr(NdifClient, "_attempt", attempted)
    return happened


def test_the_next_request_is_prepared_while_one_runs(run, small, log):
    run(4)
    # The first result is that of the probe.
    assert log == ["result", "prepare", *["prepare", "result"] * 3, "result"]
    assert small.set() == {"requests": 5, "completed": 5}


@pytest.mark.heavy("many requests")
def test_halves_take_the_place_of_a_request_that_was_too_long(run, small):
    calm = run()
    small.set(most_batches=1)
    # Requests of 4 and 2 batches are refused once; no batch is computed twice.
    assert equal(calm, run(tokens_per_request=80))
    assert small.set() == {"requests": 1 + 2 + 8, "completed": 1 + 8}


@pytest.mark.heavy("many requests")
def test_errors_come_after_the_results_before_them(run, small, tmp_path, monkeypatch):
    prepare, prepared = NdifClient.prepare, []

    def refused(self, run):
        prepared.append(1)
        if len(prepared) == 5:
            raise lsim.LayersimError("no")
        return prepare(self, run)

    with monkeypatch.context() as patch:
        patch.setattr(NdifClient, "prepare", refused)
        with pytest.raises(lsim.LayersimError, match="no"):
            run(6, checkpoint=tmp_path / "run")
    assert small.set() == {"requests": 5, "completed": 5}
    run(6, checkpoint=tmp_path / "run")
    # The probe, and the two batches whose sums were not in the file.
    assert small.set() == {"requests": 3, "completed": 3}


def test_any_request_may_fail(run, small):
    calm = run(4)
    for fault in ("evicted", "unavailable", "cut"):
        # The first request is the probe.
        faults = ["", fault, "", fault, fault]
        small.set(faults=faults)
        assert equal(calm, run(4))
        # What was cut had been computed; nothing else is computed twice.
        assert small.set()["completed"] == 5 + faults.count("cut")


def test_an_interrupt_keeps_the_complete_requests(run, small, tmp_path, monkeypatch):
    path, calm, prepare, prepared = tmp_path / "run.ckpt", run(), NdifClient.prepare, []

    def interrupted(self, run):
        prepared.append(1)
        if len(prepared) == 5:
            raise KeyboardInterrupt
        return prepare(self, run)

    with monkeypatch.context() as patch:
        patch.setattr(NdifClient, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            run(checkpoint=path)
    assert any(str(path) in note for note in caught.value.__notes__)
    end = time.monotonic() + 600
    while any(thread.name == "ndif-request" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(thread.name == "ndif-request" for thread in threading.enumerate())
    small.set()
    assert equal(run(checkpoint=path), calm)
    # The probe, and the five requests whose sums had not arrived: the fourth was on the server.
    assert small.set()["requests"] == 6
