"""Requests that are prepared and sent while the request before them runs."""

from __future__ import annotations

import threading
import time

import pytest

import tl_layersim as lsim
from tl_layersim.core import LayersimError
from tl_layersim.remote import client as ndif
from tl_layersim.remote import request_schedule as request_pipeline
from tl_layersim.remote.failures import JobTooLong
from tl_layersim.remote.request_schedule import RequestPipeline, RequestSchedule

from ..ndif.client import equal, rows
from ..options import called
from .helpers import SINGLE

pytestmark = [pytest.mark.filterwarnings("ignore:.*(not those here|CKA rests).*:UserWarning")]


class Request:
    """A request of a simulated server, which runs one request after the other and notes what happens."""

    is_sent, queue_position = False, 1

    def __init__(self, batches, log):
        self.batches, self._log = batches, log

    def abandon(self):
        if self.is_sent:
            self._log.append(f"abandon {self.batches}")


class Server:
    """A simulated client and server.

    Args:
        most: batches that fit into a job.
        failing: names of batches whose job fails.
        others: whether other users' requests wait.
    """

    def __init__(self, most=64, failing="", others=False):
        self.log, self._most, self._failing, self._others = [], most, failing, others
        self.schedule = RequestSchedule(1)

    def prepare(self, batches):
        self.log.append(f"prepare {batches}")
        if "!" in batches:
            raise LayersimError("no")
        return Request(batches, self.log)

    def send(self, request):
        self.log.append(f"send {request.batches}")
        request.is_sent = True
        request.queue_position = 2 if self._others else 1

    def finish(self, request):
        if not request.is_sent:
            self.send(request)
        request.is_sent = False
        if len(request.batches) > self._most:
            raise JobTooLong
        if request.batches in self._failing:
            raise LayersimError("failed")
        return request.batches.upper()

    def halve(self, batches, error):
        half = len(batches) // 2
        if error is not None:
            self.schedule.lower(half)
        return batches[:half], batches[half:]

    def results(self, groups):
        for batches, result in RequestPipeline(self, self.schedule, self.prepare, self.halve).results(iter(groups)):
            self.schedule.measure(1.0, len(batches))
            self.log.append(f"result {result}")
            yield result


def test_the_next_request_is_sent_while_one_runs():
    server = Server()
    assert list(server.results(["a", "b", "c"])) == ["A", "B", "C"]
    # The first request has a new size: the second is only prepared meanwhile.
    assert " ".join(server.log) == ("prepare a send a prepare b result A send b prepare c send c result B result C")


def test_a_request_of_a_new_size_is_prepared_and_not_sent_ahead():
    server = Server()
    assert list(server.results(["a", "b", "cd", "ef"])) == ["A", "B", "CD", "EF"]
    assert server.log.index("prepare cd") < server.log.index("result B") < server.log.index("send cd")
    assert server.log.index("prepare ef") < server.log.index("result CD") < server.log.index("send ef")


def test_other_users_are_not_overtaken():
    server = Server(others=True)
    assert list(server.results("abcd")) == list("ABCD")
    for before, after in zip("ABC", "bcd", strict=True):
        assert server.log.index(f"prepare {after}") < server.log.index(f"result {before}") < server.log.index(f"send {after}")


def test_halves_take_the_place_of_a_request_that_was_too_long():
    server = Server(most=1)
    assert list(server.results(["abcd", "ef", "g"])) == list("ABCDEFG")
    assert server.log.count("send abcd") == 1
    # Sizes that are known to be too long are not sent; no batch is sent in two requests that both complete.
    assert [entry for entry in server.log if entry.startswith("send")] == [
        f"send {batches}" for batches in ("abcd", "ab", "a", "b", "c", "d", "e", "f", "g")
    ]


@pytest.mark.parametrize("groups", [["a", "b", "c", "d!", "e"], "failed reading"])
def test_errors_come_after_the_results_before_them(groups):
    def reading():
        yield from "abc"
        raise LayersimError("no")

    server, found = Server(), []
    with pytest.raises(LayersimError):
        found.extend(server.results(reading() if groups == "failed reading" else groups))
    assert [entry for entry in server.log if entry.startswith("result")] == ["result A", "result B", "result C"]
    assert "prepare e" not in server.log


def test_a_request_that_failed_ends_the_run_and_abandons_the_next():
    server = Server(failing="b")
    results = server.results("abcd")
    assert next(results) == "A"
    with pytest.raises(LayersimError, match="failed"):
        next(results)
    assert server.log[-1] == "abandon c"
    assert "send d" not in server.log


def test_never_more_than_two_requests_are_on_the_server(small, monkeypatch):
    data, options = rows(12, 20), {"remote": small.url, "batch_size": 1, "tokens_per_request": 20}
    monkeypatch.setattr(request_pipeline, "MOST_ON_SERVER", 1)
    one_by_one = called(lsim.analyze, small.model(), data, SINGLE, **options)
    monkeypatch.setattr(request_pipeline, "MOST_ON_SERVER", 2)
    plain, on_server, most = ndif.NdifClient.send, set(), []
    finish = ndif.NdifClient._finish_attempt

    def send(self, request):
        on_server.add(request)
        most.append(len(on_server))
        plain(self, request)

    def finished(self, request):
        result = finish(self, request)
        on_server.discard(request)
        return result

    monkeypatch.setattr(ndif.NdifClient, "send", send)
    monkeypatch.setattr(ndif.NdifClient, "_finish_attempt", finished)
    small.set()
    ahead = called(lsim.analyze, small.model(), data, SINGLE, **options)
    assert equal(ahead, one_by_one)
    assert max(most) == 2
    # Each request once, and the probe.
    assert small.set() == {"requests": 13, "completed": 13}
    records = [report["cosine"].provenance.options["remote"][0] for report in (ahead, one_by_one)]
    assert records[0]["requests"] == records[1]["requests"] == 13


@pytest.mark.parametrize(
    "faults", [["", "", "evicted"], ["", "", "", "evicted"], ["", "", "cut", "cut"], ["", "", "unavailable"]]
)
def test_either_of_two_requests_may_fail(small, faults):
    data, options = rows(8, 20), {"remote": small.url, "batch_size": 1, "tokens_per_request": 20}
    calm = called(lsim.analyze, small.model(), data, SINGLE, **options)
    small.set(faults=faults)
    assert equal(calm, called(lsim.analyze, small.model(), data, SINGLE, **options))
    done = small.set()["completed"]
    # What was cut had been computed; nothing else is computed twice.
    assert done == 9 + faults.count("cut")


def test_an_interrupt_with_two_requests_on_the_server_keeps_the_complete_ones(small, tmp_path, monkeypatch):
    data, path = rows(8, 20), tmp_path / "run.ckpt"
    options = {"remote": small.url, "batch_size": 1, "tokens_per_request": 20}
    calm = called(lsim.analyze, small.model(), data, SINGLE, **options)
    plain, sent = ndif.NdifClient.send, []

    def send(self, request):
        plain(self, request)
        sent.append(request)
        if len(sent) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ndif.NdifClient, "send", send)
        with pytest.raises(KeyboardInterrupt) as caught:
            called(lsim.analyze, small.model(), data, SINGLE, checkpoint=path, **options)
    assert any(str(path) in note for note in caught.value.__notes__)
    end = time.monotonic() + 20
    while any(thread.name == "ndif-request" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(thread.name == "ndif-request" for thread in threading.enumerate())
    small.set()
    resumed = called(lsim.analyze, small.model(), data, SINGLE, checkpoint=path, **options)
    assert equal(resumed, calm)
    # The probe, and the five requests whose sums had not arrived: the fourth and the fifth were on the server.
    assert small.set()["requests"] == 6
