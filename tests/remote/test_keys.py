"""Keys and addresses: sent where they belong, repeated nowhere."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..models.tiny_models import tiny_llama
from ..ndif.client import equal, rows
from .helpers import QUICK

KEY = "5e1f0000-1234-4321-abcd-00000000beef"


@pytest.fixture
def key(monkeypatch):
    from nnsight.schema.config import CONFIG

    monkeypatch.setattr(CONFIG.API, "APIKEY", KEY)
    return KEY


@pytest.mark.parametrize(
    ("sent", "says"),
    [(None, "no key"), ("not-a-uuid-but-secret", "a key"), (KEY.replace("beef", "dead"), "a key")],
)
def test_a_key_that_is_not_taken(small, monkeypatch, sent, says):
    from nnsight.schema.config import CONFIG

    small.set(key=KEY)
    monkeypatch.setattr(CONFIG.API, "APIKEY", sent)
    with pytest.raises(lsim.LayersimError, match=rf"rejected the API key(.|\n)*{says}(.|\n)*NDIF_API_KEY") as caught:
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(2, 8), QUICK)
    assert sent is None or sent not in str(caught.value)
    # Asked once: a wrong key does not get better.
    assert caught.value.__cause__ is None


@pytest.mark.heavy("many requests")
def test_a_key_is_sent_and_turns_up_nowhere(small, key, tmp_path, capfd):
    small.set(key=key)
    path = tmp_path / "run.ckpt"
    report = lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(4, 20), QUICK, checkpoint=path)
    report.save(tmp_path / "report.st")
    run = lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(4, 20), QUICK, blocking=False)
    run.save(tmp_path / "run")
    found = lsim.costs.capabilities(lsim.open_model(small.model(), remote=small.url))
    small.set(key=key, deny=f"something else, says {key}")
    with pytest.raises(lsim.LayersimError) as caught:
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(4, 20), QUICK)
    small.set(key=key)
    texts = [str(found), repr(found), repr(run), str(report["cka"].provenance), str(caught.value), *capfd.readouterr()]
    files = [item.read_bytes() for item in tmp_path.iterdir()]
    assert not any(key in text for text in texts)
    assert not any(key.encode() in content for content in files)
    assert equal(lsim.load_run(tmp_path / "run").result(60), report)


def test_a_login_in_the_address_is_kept_out_of_the_record(small):
    url = small.url.replace("http://", "http://me:secret@")
    report = lsim.analyze(lsim.open_model(small.model(), remote=url), rows(4, 20), QUICK)
    assert report["cka"].provenance.options["remote"][0]["server"] == small.url
    assert "secret" not in str(report["cka"].provenance)


SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "remote",
    [
        f"me:{SECRET}@host:1",
        f"ws://me:{SECRET}@host:1",
        SECRET,
        f"http://host?key={SECRET}",
        f"http://me:{SECRET}/y@host",
        f"http://me:{SECRET}#x@host",
        f"http://me:{SECRET}@127.0.0.1:1",
        f"http://me:{SECRET}@[broken",
    ],
)
def test_what_is_no_address_is_not_repeated(small, remote):
    hugging_face = tiny_llama()
    for model in (small.model(), hugging_face):
        for call in (
            lambda model: lsim.analyze(lsim.open_model(model, remote=remote), rows(2, 8), QUICK),
            lambda model: lsim.costs.capabilities(lsim.open_model(model, remote=remote)),
            lambda model: lsim.compare(
                lsim.open_model(model, remote=remote), lsim.open_model(model, remote=remote), rows(2, 8), QUICK
            ),
        ):
            with pytest.raises(lsim.LayersimError) as caught:
                call(model)
            assert SECRET not in str(caught.value)
            assert caught.value.__cause__ is None


def test_a_short_key_does_not_cut_words_up(monkeypatch):
    from nnsight.schema.config import CONFIG

    from tl_layersim.remote.failures import server_text

    monkeypatch.setattr(CONFIG.API, "APIKEY", "e")
    assert server_text("here") == "here"
