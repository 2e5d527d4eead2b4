"""Jobs that are not waited for."""

from __future__ import annotations

import pytest

import tl_layersim as lsim
from tl_layersim.engine import submitted_runs
from tl_layersim.remote import client as ndif

from ..models.tiny_models import tiny_llama, tiny_tokenizer
from ..ndif.client import equal, rows
from ..running.options import called
from .helpers import SINGLE, lsim_analyzer, mean_norm


@pytest.fixture
def sent(small):
    def send(**options):
        options = {"batch_size": 1, "tokens_per_request": 40} | options
        return called(lsim.analyze, small.model(), rows(7, 20), SINGLE, remote=small.url, blocking=False, **options)

    return send


@pytest.fixture(scope="module")
def waited(running):
    """The report of a run that is waited for, on a server without faults."""
    running.set()
    return lsim.analyze(lsim.open_model(running.model(), remote=running.url), lsim.Data(rows(7, 20), batch_size=1), SINGLE)


@pytest.mark.light
def test_a_run_is_kept_and_picked_up(sent, waited, tmp_path):
    run = sent()
    assert "4 jobs" in repr(run)
    run.save(tmp_path / "run")
    assert equal(lsim.load_run(tmp_path / "run").result(60), waited)
    assert equal(run.result(60), waited)
    # What has arrived is kept too: nothing is asked of the server any more.
    run.save(tmp_path / "done")
    done = lsim.load_run(tmp_path / "done")
    done._ndif.poll = None
    later = done.result(60)
    assert equal(later, waited)
    # The record is that of the whole run: the probe, four requests, and all that came back.
    [kept], [own] = (report["cosine"].provenance.options["remote"] for report in (later, run.result(60)))
    assert kept == own
    assert kept["requests"] == 5
    assert kept["bytes_received"] > 1000
    assert later["cosine"].provenance.seconds > 0


def test_a_first_look_is_waited_for(small):
    data = rows(7, 20)
    run = lsim.analyze(lsim.open_model(small.model(), remote=small.url), data, [lsim.Cosine()], blocking=False)
    assert equal(run.result(60), lsim.analyze(lsim.open_model(small.model(), remote=small.url), data, [lsim.Cosine()]))


@pytest.mark.heavy("a server with a socket")
def test_a_job_that_was_too_long_is_sent_in_halves(small, sent, waited, tmp_path):
    small.set(most_batches=2)
    run = sent(tokens_per_request=10_000)
    run.save(tmp_path / "run")
    assert equal(run.result(60), waited)
    with pytest.raises(lsim.LayersimError, match=r"sent again without the model(.|\n)*load_run\(path, model=model\)"):
        lsim.load_run(tmp_path / "run").result(60)
    assert equal(lsim.load_run(tmp_path / "run", model=small.model()).result(60), waited)


def test_a_job_that_the_server_has_lost_is_sent_again(small, sent, waited, monkeypatch):
    monkeypatch.setattr(submitted_runs, "FORGOTTEN", 0.5)
    small.set(faults=["", "lost", "", "evicted"])
    assert equal(sent().result(60), waited)


@pytest.mark.parametrize("codes", [{"bad_words": [502, 200, 503]}, {"bad_results": [503, 403]}])
def test_a_bad_answer_is_not_the_jobs_failure(small, sent, waited, codes):
    run = sent()
    small.set(**codes)
    assert equal(run.result(60), waited)
    assert small.set()["requests"] == 0


def test_a_job_that_fails_and_fails_is_given_up(small, sent):
    small.set(faults=["", *["evicted"] * 20])
    with pytest.raises(lsim.LayersimError, match=r"5 attempts(.|\n)*evicted"):
        sent(tokens_per_request=1000).result(60)


def test_a_server_that_is_away_has_not_lost_the_job(small, sent, waited, tmp_path, monkeypatch):
    monkeypatch.setattr(submitted_runs, "FORGOTTEN", 0.2)
    path = sent().save(tmp_path / "run")
    run, plain = lsim.load_run(path), ndif.NdifClient.backend

    def nowhere(self, job_id=None):
        backend = plain(self, job_id)
        backend.host = "http://127.0.0.1:9"
        return backend

    with monkeypatch.context() as patch:
        patch.setattr(ndif.NdifClient, "backend", nowhere)
        patch.setattr(ndif, "WAITS", (60.0,))
        with pytest.raises(TimeoutError):
            run.result(0.3)
        patch.setattr(ndif, "WAITS", (0.3,))
        with pytest.raises(lsim.LayersimError, match=r"does not respond(.|\n)*RemoteRun"):
            run.result(20)
    assert equal(run.result(60), waited)


def test_a_job_of_numbers_that_are_none_says_so_every_time(small, tmp_path):
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    model.save_pretrained(small.folder / "none")
    tiny_tokenizer().save_pretrained(small.folder / "none")
    run = lsim.analyze(lsim.open_model(small.model("none"), remote=small.url), rows(4, 20), SINGLE, blocking=False)
    for _ in range(2):
        with pytest.raises(lsim.LayersimError, match=r"NaN or infinite in job(.|\n)*blocks.1.hook_resid_post"):
            run.result(30)
        assert run.status() == {"ERROR": 1}
    with pytest.raises(lsim.LayersimError, match="NaN or infinite"):
        lsim.load_run(run.save(tmp_path / "run")).result(30)


def test_a_login_is_given_again(small, sent, waited, tmp_path):
    path = sent().save(tmp_path / "run")
    login = small.url.replace("http://", "http://me:secret@")
    assert equal(lsim.load_run(path, remote=login).result(60), waited)
    with pytest.raises(lsim.LayersimError, match=r"`remote`.*127.0.0.1:9"):
        lsim.load_run(path, remote="http://127.0.0.1:9")


def test_a_file_that_is_no_whole_run(small, sent, tmp_path):
    from tl_layersim.core import file_format

    path = sent().save(tmp_path / "run")
    header, tensors = file_format.read(path, ("remote_run",))
    for change, says in (({"jobs": None}, "jobs"), ({"version": "0.0.1"}, r"0\.0\.1")):
        broken = {key: value for key, value in (header | change).items() if key != "jobs" or value is not None}
        file_format.write(path, "remote_run", broken, tensors)
        with pytest.raises(lsim.LayersimError, match=says):
            lsim.load_run(path)


@pytest.mark.heavy("waits")
def test_waiting_has_an_end(small, sent):
    small.set(faults=["", "silent"])
    run = sent()
    with pytest.raises(TimeoutError, match=r"`timeout` is 0\.1 s"):
        run.result(0.1)
    # However long the other three jobs take, the one of which nothing is heard does not end.
    while run.status()["COMPLETED"] < 3:
        with pytest.raises(TimeoutError):
            run.result(0.1)
    assert run.status()["COMPLETED"] == 3


def test_a_kept_run_wants_its_own_model_and_analyzers(small, sent, waited, tmp_path):
    run = sent()
    path = run.save(tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match="`model` is "):
        lsim.load_run(path, model=small.model("gpt2"))
    with pytest.raises(lsim.LayersimError, match=r"`analyzers`.*CKA"):
        lsim.load_run(path, analyzers=[lsim.CKA(minibatch=64)])
    assert equal(lsim.load_run(path, analyzers=SINGLE).result(60), waited)


def test_an_analyzer_of_ones_own_is_given_again(small, tmp_path):
    own = lsim_analyzer(mean_norm)
    run = lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(4, 20), [own], blocking=False)
    path = run.save(tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match=r"'own'.*analyzers="):
        lsim.load_run(path)
    assert equal(lsim.load_run(path, analyzers=[own]).result(60), run.result(60))
