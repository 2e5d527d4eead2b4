"""Logins and access tokens in addresses reach no log, no message, no repr and no file."""

from __future__ import annotations

import http.server
import json
import logging
import threading

import httpx
import pytest

import tl_layersim as lsim
from tl_layersim.core.errors import remove_secrets, warn, without_secrets
from tl_layersim.remote.client import NdifClient

from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama

TOKEN = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:80/a", "http://host:80/a"),
        ("at https://me:se@cret@host, twice: http://x:secret@y", "at https://host, twice: http://y"),
        ("me:secret@host/model", "host/model"),
        ("https://host/x?a=1&access_token=secret&b=2", "https://host/x?a=1&access_token=***&b=2"),
        ("https://host/x?X-Amz-Signature=secret", "https://host/x?X-Amz-Signature=***"),
        (f"org/model with {TOKEN}", "org/model with hf_***"),
        ("https://host/org/model@main", "https://host/org/model@main"),
        ("org/model@revision", "org/model@revision"),
        ("https:/me:secret@host/x does not exist", "https:/host/x does not exist"),
        ("'me:secret@host/model'", "'host/model'"),
        (f"api_{TOKEN}", "api_hf_***"),
        (f"my{TOKEN}_copy", "myhf_***_copy"),
        ("api_org_" + "a1B2" * 8, "api_org_***"),
        ("hf://user/name@main", "hf://user/name@main"),
        ("sha256:abc of blocks.0@3", "sha256:abc of blocks.0@3"),
        ("C:/users/me@home/x", "C:/users/me@home/x"),
        ("blocks.0: 3 @ 4", "blocks.0: 3 @ 4"),
    ],
)
def test_secrets_are_taken_out_of_a_text_and_nothing_else(text, shown):
    assert without_secrets(text) == shown


LOGIN = "https://me:secret@host/x"
CALLS = {
    "load": lambda: lsim.load(LOGIN),
    "Report.load": lambda: lsim.Report.load(LOGIN),
    "load_run": lambda: lsim.load_run(LOGIN),
    "merge": lambda: lsim.merge(LOGIN),
    "merge of several": lambda: lsim.merge(["x", LOGIN]),
    "save": lambda: lsim.Report({}).save(LOGIN),
    "to_html": lambda: lsim.Report({}).to_html(LOGIN),
    "checkpoint": lambda: lsim.analyze(tiny_llama(), random_tokens(), "cosine", checkpoint=LOGIN),
    "heads": lambda: lsim.LogitLens(heads=LOGIN),
    "model": lambda: lsim.analyze(LOGIN, random_tokens(), "cosine"),
    "data": lambda: lsim.analyze(tiny_llama(), LOGIN, "cosine"),
    "a token": lambda: lsim.load(f"api_{TOKEN}/secret"[:-7]),
}


def exceptions(error):
    """An exception, and all that a traceback may print with it."""
    found, waiting = [], [error]
    while waiting:
        found.append(waiting.pop())
        waiting += [one for one in (found[-1].__cause__, found[-1].__context__) if one is not None and one not in found]
    return found


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_exception_shows_no_login_and_neither_does_its_cause(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((lsim.LayersimError, OSError)) as caught:
        call()
    for error in exceptions(caught.value):
        for text in (str(error), repr(error), *map(str, getattr(error, "__notes__", ()))):
            assert "secret" not in text
            assert TOKEN not in text


def test_a_damaged_file_in_a_folder_named_as_a_login(tmp_path):
    """The error of the library, which quotes the path, is the cause."""
    folder = tmp_path / "https:" / "me:secret@host"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(b"12")
    for call in (lsim.load, lsim.merge, lsim.load_run):
        with pytest.raises(lsim.LayersimError) as caught:
            call(folder / "x")
        assert not [one for one in exceptions(caught.value) if "secret" in f"{one} {one!r}"]


def test_an_exception_that_writes_its_text_anew_is_detached():
    class Quoting(Exception):
        def __str__(self):
            return LOGIN

    error = lsim.LayersimError("x")
    error.__cause__ = Quoting()
    remove_secrets(error)
    assert exceptions(error) == [error]


@pytest.mark.light("https://me:secret@host/model")
@pytest.mark.parametrize("name", ["https://me:secret@host/model", "me:secret@host/model", "https://host/m?token=secret"])
def test_a_login_in_the_name_of_a_model_stays_out_of_results_and_files(name, tmp_path):
    model = tiny_llama()
    model.config._name_or_path = name
    report = lsim.analyze(model, random_tokens(), [lsim.CKA(minibatch=16)], checkpoint=tmp_path / "run")
    assert report["cka"].provenance.model.startswith(("host/m", "https://host/m"))
    report.save(tmp_path / "report")
    report.to_html(tmp_path / "page")
    lsim.finetune_aligned(
        model,
        lsim.Data(random_tokens(), batch_size=2),
        lsim.AlignedTraining(steps=1, warmup=0),
        checkpoint=tmp_path / "training",
    )
    assert len(list(tmp_path.iterdir())) == 4
    for path in tmp_path.iterdir():
        assert b"secret" not in path.read_bytes(), path.name
    assert "secret" not in repr(report["cka"])


def test_a_login_stays_out_of_errors_and_warnings():
    error = lsim.LayersimError("No http://me:secret@host?key=secret.")
    assert "secret" not in str(error)
    with pytest.raises(lsim.LayersimError) as caught:
        lsim.analyze(lsim.open_model(tiny_llama(), remote=["http://me:secret@host"]), random_tokens(), "cka")
    assert "secret" not in str(caught.value)
    with pytest.warns(lsim.LayersimWarning, match="at http://host$"):
        warn("at http://me:secret@host")
    assert provenance(model="http://me:secret@host").model == "http://host"


@pytest.fixture(scope="module")
def server():
    """Answers every question with what stands in `answer`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        answer: bytes = b"{}"

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(Handler.answer)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield Handler, found.server_address[1]
        found.shutdown()


def test_a_login_stays_out_of_the_log_of_requests(server, caplog):
    caplog.set_level(logging.DEBUG)
    ndif = NdifClient(f"http://me:secret@127.0.0.1:{server[1]}", "key", {})
    ndif.get("/ping")
    # As nnsight asks.
    httpx.get(f"{ndif.host}/response/1")
    assert "HTTP Request: GET http://127.0.0.1" in caplog.text
    assert "secret" not in caplog.text
    assert "secret" not in repr(ndif)


RUNNING = {"application_state": "RUNNING", "model_key": "key", "execution_timeout_seconds": "soon"}
REFUSED = [[], None, 3, "x", [[]], {}, {"deployments": None}, {"deployments": []}, {"deployments": {"a": RUNNING}}]
REFUSED += [{"deployments": {}, "packages": [1], "python_version": 3}, {"deployments": {}, "packages": 3}, "no JSON"]
READ = [{"deployments": {"a": 1}}, {"deployments": {"a": {"application_state": [], "model_key": {}}}}]
READ += [{"deployments": {}, "packages": {"torch": None}}]


@pytest.mark.light("[]-False", "{'deployments': []}-False", "{'deployments': {}, 'packages': {'torch': None}}-True")
@pytest.mark.parametrize(("answer", "readable"), [(a, False) for a in REFUSED] + [(a, True) for a in READ], ids=str)
def test_a_status_of_another_form_is_refused_or_read(server, answer, readable):
    server[0].answer = b"<html>" if answer == "no JSON" else json.dumps(answer).encode()
    ndif = NdifClient(f"http://127.0.0.1:{server[1]}", "key", {})
    if readable:
        assert not ndif.status.dtype
        return
    with pytest.raises(lsim.LayersimError, match=rf"http://127\.0\.0\.1:{server[1]}\b.*NDIF_HOST"):
        _ = ndif.status
