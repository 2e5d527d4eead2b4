"""Servers whose answers are broken or hostile: each ends in one sentence, or in the right numbers."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote import client as ndif
from tl_layersim.remote import connection
from tl_layersim.remote.client import NdifClient
from tl_layersim.remote.failures import server_text

from ..ndif.client import equal, rows
from .helpers import SINGLE

KEY = "5e1f0000-1234-4321-abcd-00000000beef"


def analysed(small, **options):
    data = lsim.Data(rows(4, 12), batch_size=2)
    return lsim.analyze(lsim.open_model(small.model(), remote=small.url, tokens_per_request=24), data, SINGLE, **options)


@pytest.fixture(scope="module")
def honest(running):
    running.set()
    return analysed(running)


def of_sums(code: str) -> str:
    """Code for results that hold sums; `ticket`, `number` and `value` are their parts."""
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    unpacked = "    ticket, number, value = kept['found']\n"
    return (
        f"if sums:\n{unpacked}{lines}\n    kept = dict(kept, found=kept['found'] if value is None else (ticket, number, value))"
    )


def of_tensors(change: str) -> str:
    return of_sums(f"value = walk(value, lambda t: {change})")


ONE = "value[0][1][1]['cosine']"
KINDS = {
    "another name": "kept = {'other': kept['found']}",
    "one more name": "kept = dict(kept, other=1)",
    "no seal": of_sums("kept['found'] = value\nvalue = None"),
    "list": "kept = list(kept.values())",
    "text": "kept = 'sums'",
    "number": "kept = {'found': 3}",
    "no part": of_sums("value = []"),
    "one part less": of_sums("value = value[:0] + value[1:]"),
    "one part twice": of_sums("value = value + value[:1]"),
    "nested": of_sums("value = [value]"),
    "parts are pairs of pairs": of_sums("value = [((count, own), 1) for count, own in value]"),
    "other count": of_sums("value = [(2 * count, own) for count, own in value]"),
    "negative count": of_sums("value = [(-count, own) for count, own in value]"),
    "no power of two": of_sums("value = [(3, own) for count, own in value]"),
    "true count": of_sums("value = [(True, own) for count, own in value]"),
    "text count": of_sums("value = [(str(count), own) for count, own in value]"),
    "no analyzer": of_sums("value[0][1][1].pop('cosine')"),
    "one more analyzer": of_sums("value[0][1][1]['more'] = {}"),
    "no sums": of_sums(f"{ONE}.clear()"),
    "one sum less": of_sums(f"{ONE}.popitem()"),
    "one more sum": of_sums(f"{ONE}['more'] = torch.zeros(2, dtype=torch.float64)"),
    "other name of a sum": of_sums(f"name, sums = {ONE}.popitem()\n{ONE}['x' + name] = sums"),
    "sums in exchange": of_sums(f"a, *_, b = list({ONE})\n{ONE}[a], {ONE}[b] = {ONE}[b], {ONE}[a]"),
    "nested sums": of_sums(f"{ONE}.update(deeper={{}})"),
    "number in place of a sum": of_sums(f"{ONE}.update((name, 1.5) for name in list({ONE}))"),
    "lists": of_tensors("t.tolist()"),
    "empty lists": of_tensors("[]"),
    "float32": of_tensors("t.float() if t.is_floating_point() else t"),
    "float16": of_tensors("t.half() if t.is_floating_point() else t"),
    "bfloat16": of_tensors("t.bfloat16() if t.is_floating_point() else t"),
    "integers": of_tensors("t.long()"),
    "int32": of_tensors("t.int() if not t.is_floating_point() else t"),
    "bools": of_tensors("t.bool()"),
    "complex": of_tensors("t.cdouble() if t.is_floating_point() else t"),
    "one more axis": of_tensors("t[None]"),
    "flat": of_tensors("t.reshape(-1)"),
    "summed": of_tensors("t.sum()"),
    "one number less": of_tensors("t[..., :-1] if t.dim() else t"),
    "empty": of_tensors("t[:0] if t.dim() else t"),
    "transposed": of_tensors("t.T if t.dim() == 2 else t.flip(0) if t.dim() else t"),
    "expanded": of_tensors("torch.zeros(1, dtype=t.dtype).expand(10**12)"),
    "expanded to its shape": of_tensors("t.flatten()[:1].expand(t.shape) if t.numel() else t"),
    "NaN": of_tensors("t * float('nan') if t.is_floating_point() else t"),
    "-inf": of_tensors("t - float('inf') if t.is_floating_point() else t"),
    "negative": of_tensors("-t"),
    "doubled": of_tensors("2 * t"),
    "last bit": of_tensors("torch.nextafter(t, t + 1) if t.is_floating_point() else t"),
    "meta": of_tensors("t.to('meta')"),
    "sparse": of_tensors("t.to_sparse() if t.dim() else t"),
    "parameter": of_tensors("torch.nn.Parameter(t.double())"),
    "counts of activations that are not finite": of_sums("value[0][1][0][0][:] = -1"),
    "counts of fewer sites": of_sums("value = [(c, ([n[:-1] for n in bad], out)) for c, (bad, out) in value]"),
    "no counts": of_sums("value = [(c, ([], out)) for c, (bad, out) in value]"),
    "device": of_sums("value = torch.device('cpu')"),
    "checksum": of_sums("number += 1"),
    "text as checksum": of_sums("number = 'a'"),
    "facts in place of sums": of_sums("value = {'dtype': 'torch.float32', 'devices': ['cpu'], 'meta': False}"),
    "other facts": "if not sums: kept = {'found': (*kept['found'][:2], {'dtype': 'x', 'devices': ['cpu'], 'meta': False})}",
    "terminal escapes in facts": (
        "if not sums: kept = {'found': (*kept['found'][:2], {'dtype': '\\x1b[31mx', 'devices': ['\\x1b]0;x\\x07'], 'meta': 1})}"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_another_form_is_refused(small, kind):
    small.set(mutate=KINDS[kind])
    with pytest.raises(lsim.LayersimError, match=small.url) as caught:
        analysed(small)
    assert "\x1b" not in str(caught.value)
    # Refused at once: the same request would give the same answer.
    assert small.set()["requests"] <= 3


HARMLESS = {
    "other order of names": of_sums(f"one = dict(reversed({ONE}.items()))\n{ONE}.clear()\n{ONE}.update(one)"),
    "strided": of_tensors("torch.stack([t, t], -1)[..., 0]"),
    "part of a storage": of_tensors("torch.cat([t.flatten(), t.flatten()])[: t.numel()].view(t.shape)"),
    "gradient": of_tensors("t.requires_grad_() if t.is_floating_point() else t"),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_another_form_with_the_same_numbers_gives_them(small, honest, kind):
    small.set(mutate=HARMLESS[kind])
    assert equal(analysed(small), honest)


# A result of `packed(kept)`, as it arrives.
DAMAGED = {
    "nothing": "b''",
    "one byte": "b'x'",
    "zeros": "bytes(100)",
    "half": "(lambda b: b[: len(b) // 2])(packed(kept))",
    "all but the last byte": "packed(kept)[:-1]",
    "not compressed": "packed(kept, False)",
    "compressed twice": "zstandard.compress(packed(kept))",
    "half of a file": "(lambda b: zstandard.compress(b[: len(b) // 2]))(packed(kept, False))",
    "no file": "zstandard.compress(b'no file')",
    "no bytes in a frame": "zstandard.compress(b'')",
    "changed byte": "(lambda b: zstandard.compress(b[:900] + bytes([b[900] ^ 1]) + b[901:]))(packed(kept, False))",
    "page": "b'<html>busy</html>'",
    "pickle": "zstandard.compress(__import__('pickle').dumps(kept))",
    "other request": "packed({'found': ('0' * 32, *kept['found'][1:])})",
    "earlier result": "(OLD.append(packed(kept)), OLD[0])[1] if len(OLD) < 2 or not sums else OLD[0]",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_result_is_asked_for_again_and_then_named(small, kind):
    code = DAMAGED[kind]
    small.set(raw_result=f"{code} if sums else packed(kept)" if kind != "earlier result" else code)
    with pytest.raises(lsim.LayersimError, match=rf"{small.url}(.|\n)*3 attempts"):
        analysed(small)
    assert small.set()["requests"] <= 8


BOMBS = {
    "zeros": "zstandard.ZstdCompressor(level=9).compress(bytes(3 * 10**8))",
    "long text": "packed({'found': 'a' * (3 * 10**8)})",
    "tensor": "packed({'found': torch.zeros(4 * 10**7)})",
    "expanded many times": "packed({'found': [torch.zeros(1).expand(10**9)] * 1000})",
    "values": "packed({'found': [0] * 500_000})",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_result_that_is_too_large_is_refused(small, kind):
    small.set(raw_result=BOMBS[kind])
    with pytest.raises(lsim.LayersimError, match=small.url):
        analysed(small)
    assert small.set()["requests"] == 1


def test_no_code_of_a_result_runs(small, tmp_path):
    path = tmp_path / "here"
    small.set(
        raw_result=f"packed({{'found': type('Runs', (), {{'__reduce__': lambda self: (open, ({str(path)!r}, 'w'))}})()}})"
    )
    with pytest.raises(lsim.LayersimError, match=small.url):
        analysed(small)
    small.set(raw_status=f"packed(type('Runs', (), {{'__reduce__': lambda self: (open, ({str(path)!r}, 'w'))}})(), False)")
    with pytest.raises(lsim.LayersimError, match=small.url):
        analysed(small)
    assert not path.exists()


STATUS = "json.dumps({{'id': job, 'status': {status}, 'description': {text}, 'data': {data}}})"
MESSAGES = {
    "no data": STATUS.format(status="'COMPLETED'", text="''", data="None"),
    "empty data": STATUS.format(status="'COMPLETED'", text="''", data="''"),
    "number as data": STATUS.format(status="'COMPLETED'", text="''", data="7"),
    "list as data": STATUS.format(status="'COMPLETED'", text="''", data="[1]"),
    "no address": STATUS.format(status="'COMPLETED'", text="''", data="'nowhere'"),
    "file": STATUS.format(status="'COMPLETED'", text="''", data="'file:///etc/passwd'"),
    "bad address": STATUS.format(status="'COMPLETED'", text="''", data="'http://[::1'"),
    "closed port": STATUS.format(status="'COMPLETED'", text="''", data="'http://127.0.0.1:9/x'"),
    "unknown state": STATUS.format(status="'DONE'", text="''", data="None"),
    "number as text": STATUS.format(status="'RUNNING'", text="5", data="None"),
    "no JSON": "'no JSON'",
    "null": "'null'",
    "nested": "'[' * 100_000",
    "empty": "''",
    "binary": "b'abc'",
    "binary list": "packed([1, 2], False)",
    "binary state": "packed({'id': job, 'status': 'NEVER', 'data': b''}, False)",
    "binary without data": "packed({'id': job, 'status': 'COMPLETED', 'data': b''}, False)",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_last_message_of_another_form_is_a_damaged_result(small, kind):
    small.set(raw_status=MESSAGES[kind])
    with pytest.raises(lsim.LayersimError, match=small.url):
        analysed(small)


@pytest.mark.parametrize(
    "answer",
    [
        ["<html>", 200],
        ["[]", 200],
        ["", 200],
        ['{"id": 1, "status": "RECEIVED"}', 200],
        ['{"detail": {"a": [1, 2]}}', 422],
        ['{"detail": null}', 418],
        ["eval:'[' * 100_000", 200],
        ["eval:'a' * 30_000_000", 200],
        ["\x1b[2J\x07", 500],
    ],
    ids=str,
)
def test_an_answer_to_a_request_of_another_form(small, answer):
    small.set(raw_http={"request": answer})
    with pytest.raises(lsim.LayersimError, match=small.url) as caught:
        analysed(small)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("kind", ["close", "silent", "no JSON", "{}", "[]", '{"session_id": 3}', '{"session_id": ""}'])
def test_a_connection_that_names_no_session(small, monkeypatch, kind):
    monkeypatch.setattr(connection, "SESSION", 0.5)
    small.set(socket=kind)
    with pytest.raises(lsim.LayersimError, match=small.url):
        analysed(small)


PACKAGES = '{"python_version": "%s", "packages": %s}'
FACTS = {
    "no words in a version": {"env": [PACKAGES % ("", "{}"), 200]},
    "list of packages": {"env": [PACKAGES % ("3.11", "[1]"), 200]},
    "infinite limit": {"status": ["eval:STATUS.replace('\"LIMIT\"', '1e999')", 200]},
    "NaN": {"status": ["eval:STATUS.replace('\"LIMIT\"', 'NaN')", 200]},
    "text": {"status": ["eval:STATUS.replace('\"LIMIT\"', '\"soon\"')", 200]},
    "long number": {"status": ["eval:STATUS.replace('\"LIMIT\"', ('9' * 5000))", 200]},
    "large": {"status": ["eval:'[' + '1,' * 20_000_000 + '1]'", 200]},
}


@pytest.mark.parametrize("kind", FACTS)
def test_facts_about_the_server_of_another_form(small, kind):
    status = json.dumps(
        {
            "deployments": {
                "a": {
                    "application_state": "RUNNING",
                    "model_key": small.model().to_model_key(),
                    "execution_timeout_seconds": "LIMIT",
                }
            }
        }
    )
    facts = {name: [body.replace("STATUS", repr(status)), code] for name, (body, code) in FACTS[kind].items()}
    small.set(raw_http=facts)
    with pytest.raises(lsim.LayersimError, match=small.url):
        analysed(small)


def test_texts_of_a_server_are_shown_as_its_own_without_control_characters(small, monkeypatch, caplog):
    from nnsight.schema.config import CONFIG

    monkeypatch.setattr(CONFIG.API, "APIKEY", KEY)
    hidden = "".join(f"{letter}\u200b" for letter in KEY)
    text = f"\x1b[31mbad\x1b[0m \x9b2J\x1b]0;title\x07 \u202egone\u2066 \roverwritten {KEY} {hidden}" + "x" * 10_000
    for settings in ({"deny": text}, {"raw_http": {"request": ["eval:" + repr(text), 503]}}):
        small.set(**settings)
        with pytest.raises(lsim.LayersimError, match=rf"{small.url}(.|\n)*overwritten ") as caught:
            analysed(small)
        for shown in (str(caught.value), caplog.text):
            assert not set(shown) & set("\x1b\x9b\x07\u202e\u2066\u200b\r")
            assert KEY not in shown
            assert "title" not in shown
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, 3 % & <b>", "plain words, 3 % & <b>"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b(0\x1b=\x1bcdone", "done"),
        ("\x9b31mred\x90secret\x9cend", "redend"),
        ("a\rb\nc\td\x0be", "a b c d e"),
        ("\u202eabc\u2066\u200b\ufeff\ud800", "abc"),
        ("über 日本 é", "über 日本 é"),
        (None, "None"),
        ("x" * 1000, "x" * 297 + "..."),
    ],
)
def test_a_text_of_a_server_as_it_is_shown(text, shown):
    assert server_text(text) == shown


@pytest.mark.heavy("a server with a socket")
def test_results_of_jobs_that_are_not_waited_for_are_checked_too(small, honest):
    for settings, match in (
        ({"mutate": KINDS["float16"]}, "float16"),
        ({"mutate": KINDS["doubled"]}, "checksum"),
        ({"raw_result": DAMAGED["half"] + " if sums else packed(kept)"}, "3 attempts|cannot|cut off"),
    ):
        small.set(**settings)
        run = analysed(small, blocking=False)
        with pytest.raises(lsim.LayersimError, match=match):
            run.result(60)
    small.set()
    assert equal(analysed(small, blocking=False).result(60), honest)


@pytest.mark.heavy("many requests")
def test_a_download_that_was_damaged_once_is_repeated(small, honest, monkeypatch):
    run = analysed(small, blocking=False)
    waited = [time.monotonic()]
    while run._ndif.get("/status") and time.monotonic() - waited[0] < 0.5:
        pass
    small.set(bad_results=[503, 500])
    assert equal(run.result(60), honest)


def test_forms_and_tickets_are_saved_with_a_run(small, honest, tmp_path):
    path = analysed(small, blocking=False).save(tmp_path / "run")
    assert equal(lsim.load_run(path).result(60), honest)
    small.set(mutate=KINDS["float32"])
    path = analysed(small, blocking=False).save(tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match="float32"):
        lsim.load_run(path).result(60)


class Trickle:
    """Answers every connection with `begin`, and then with one byte at a time, without an end."""

    def __init__(self, begin: bytes) -> None:
        self.begin = begin
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.recv(1000)
            connection.sendall(self.begin)
            while not self.stopped.wait(0.02):
                connection.sendall(b"x")
        except OSError:
            return

    def stop(self) -> None:
        self.stopped.set()
        self.listener.close()


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"])
def test_a_server_that_sends_one_byte_at_a_time_is_given_up(begin):
    server = Trickle(begin)
    try:
        with pytest.raises(lsim.LayersimError, match=server.url):
            NdifClient(server.url, "key", {}).get("/status", timeout=0.5)
    finally:
        server.stop()


def test_a_connection_that_sends_one_byte_at_a_time_is_given_up(monkeypatch):
    server = Trickle(b"HTTP/1.1 101 Switching Protocols\r\n")
    monkeypatch.setattr(connection, "CONNECT", 0.3)
    try:
        opened = connection.subscription(server.url.replace("http", "ws"), {}, 1000)
        with pytest.raises((OSError, Exception)), opened:
            pass
    finally:
        server.stop()


def test_a_queued_job_may_be_silent_as_long_as_the_server_responds(small, monkeypatch):
    monkeypatch.setattr(ndif, "SILENCE", 0.05)
    pings = []
    plain = NdifClient.get

    def get(self, path, timeout=30.0):
        if path == "/ping":
            pings.append(path)
        return plain(self, path, timeout)

    monkeypatch.setattr(NdifClient, "get", get)
    small.set(mutate="if sums: __import__('time').sleep(1.0)")
    report = analysed(small)
    assert len(pings) > 2
    small.set()
    assert equal(report, analysed(small))


def test_a_running_job_that_is_lost_is_noticed(small, monkeypatch):
    monkeypatch.setattr(ndif, "LONGEST_RUN", 0.3)
    small.set(faults=["", *["silent"] * 20])
    with pytest.raises(lsim.LayersimError, match=small.url):
        analysed(small)


@pytest.mark.heavy("many requests")
def test_a_model_in_a_folder_is_loaded_where_it_is_needed(tmp_path):
    import nnsight

    demo = lsim.demo_model()
    demo.save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    tokens = torch.arange(3, 43).view(4, 10)

    def model():
        return nnsight.TransformersModel(str(tmp_path), task="text-generation", tokenizer=demo.tokenizer)

    analyzers = lsim.Cosine(center="none")
    expected = lsim.analyze(demo, tokens, analyzers)
    assert torch.equal(lsim.analyze(model(), tokens, analyzers)["cosine"].values, expected["cosine"].values)
    own = model()
    probe = lsim.attach(own, analyzers)
    with own.trace() as tracer:
        with tracer.invoke(tokens):
            pass
        with tracer.invoke():
            probe.read()
    assert torch.allclose(probe.results()["cosine"].values, expected["cosine"].values, atol=1e-12)
