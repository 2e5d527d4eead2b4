"""Requests to a server, and what goes wrong with them: against a small server that speaks NDIF's protocol."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data import Batches
from tl_layersim.exchange import exchanges
from tl_layersim.sources import ndif, open_source

from .conftest import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .ndif.client import equal, furthest, rows
from .ndif.server import free_ports
from .test_docs import ROOT, blocks

ALL = [lsim.Cosine(), lsim.CKA(minibatch=32), lsim.Trajectory(), lsim.NeuralCollapse(), lsim.LogitLens(), lsim.Saturation()]
QUICK = [lsim.CKA(minibatch=32), lsim.Cosine(center="none")]
KEY = "5e1f0000-1234-4321-abcd-00000000beef"
pytestmark = [pytest.mark.filterwarnings("ignore:.*(not those here|CKA rests).*:UserWarning")]


class Small:
    """The small server, and the folders of the models that it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        [port] = free_ports(1)
        self.url, self._port = f"http://127.0.0.1:{port}", port
        for name, model in (("llama", tiny_llama()), ("gpt2", tiny_gpt2())):
            model.save_pretrained(folder / name)
            tiny_tokenizer().save_pretrained(folder / name)
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("small_ndif.py")), str(self._port)]
        self._process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        # Importing transformers takes long on a machine with other work.
        end = time.monotonic() + 180
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(self.url + "/ping", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the small server did not come up")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def set(self, **settings) -> dict[str, int]:
        """Settings anew, what is not named as at the start; gives how many requests there were since the last call."""
        request = urllib.request.Request(self.url + "/control", json.dumps(settings).encode(), method="POST")
        return json.load(urllib.request.urlopen(request, timeout=10))

    def model(self, name: str = "llama", **here):
        from nnsight import TransformersModel
        from nnsight.modeling import huggingface
        from transformers import AutoTokenizer

        path = str(self.folder / name)
        # nnsight would ask a hub what this repository is really called.
        huggingface._ID_CACHE[path] = path
        return TransformersModel(path, task="text-generation", tokenizer=AutoTokenizer.from_pretrained(path), **here)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    small = Small(tmp_path_factory.mktemp("small"))
    yield small
    small.stop()


@pytest.fixture
def small(running, monkeypatch):
    monkeypatch.setattr(ndif, "WAITS", (0.02,) * 4)
    running.set()
    yield running
    running.set()


@pytest.fixture
def key(monkeypatch):
    from nnsight.schema.config import CONFIG

    monkeypatch.setattr(CONFIG.API, "APIKEY", KEY)
    return KEY


def local(small, data, analyzers, name="llama", **options):
    return lsim.analyze(small.model(name, dispatch=True, dtype=torch.float32), data, analyzers, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_analyzer_gives_there_what_it_gives_here(small, name):
    data = rows(10, 40)
    far = lsim.analyze(small.model(name), data, ALL, remote=small.url, batch_size=4)
    assert furthest(far, local(small, data, ALL, name, batch_size=4)) < 1e-6


@pytest.mark.parametrize("method", ["dense", "krylov", "finite-difference"])
def test_blocks_are_called_again_where_they_are(small, method):
    data, analyzers = rows(6, 20), [lsim.BlockCoupling(k=(6, 3), method=method), lsim.Cosine(center="none")]
    far = lsim.analyze(small.model(), data, analyzers, remote=small.url, batch_size=4)
    assert furthest(far, local(small, data, analyzers, batch_size=4)) < 1e-6
    assert float(far["block_coupling"].whole_rows.max()) == (method == "finite-difference")


def test_pictures_of_blocks_come_back(small):
    tokens, here = random_tokens(1, 9)[0], small.model(dispatch=True, dtype=torch.float32)
    far = lsim.block_jacobians(small.model(), tokens, positions=[(2, 5), -1], remote=small.url)
    torch.testing.assert_close(far.values, lsim.block_jacobians(here, tokens, positions=[(2, 5), -1]).values, rtol=0, atol=1e-6)
    far = lsim.coupling_matrices(small.model(), tokens, along="fixed-output", k=4, remote=small.url)
    near = lsim.coupling_matrices(here, tokens, along="fixed-output", k=4)
    torch.testing.assert_close(far.values, near.values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens_per_request", [40, 80, 200, 10_000, None])
def test_how_batches_are_grouped_changes_no_bit(small, tokens_per_request):
    data = rows(11, 40)
    alone = lsim.analyze(small.model(), data, QUICK, remote=small.url, batch_size=1, tokens_per_request=40)
    grouped = lsim.analyze(small.model(), data, QUICK, remote=small.url, batch_size=1, tokens_per_request=tokens_per_request)
    assert equal(alone, grouped)
    assert furthest(grouped, local(small, data, QUICK, batch_size=1)) < 1e-12


def test_rows_without_counted_tokens_take_no_part(small):
    data = rows(9, 20)
    data["attention_mask"][[0, 3, 4, 8], 3:] = 0
    options = {"batch_size": 1, "skip_first": 3}
    far = lsim.analyze(small.model(), data, QUICK, remote=small.url, **options)
    assert furthest(far, local(small, data, QUICK, **options)) < 1e-12
    run = lsim.analyze(small.model(), data, QUICK, remote=small.url, blocking=False, tokens_per_request=40, **options)
    later = run.result(60)
    assert equal(later, far)
    record, other = (report["cka"].provenance for report in (later, far))
    assert (record.tokens, record.sequences, record.batches, record.data) == (
        other.tokens,
        other.sequences,
        other.batches,
        other.data,
    )


def test_the_lens_needs_no_guess_of_the_dtype_there(small):
    # The client's weights do not exist, and say bfloat16; the server's are float32.
    model = small.model(dtype=torch.bfloat16)
    far = lsim.analyze(model, rows(4, 20), [lsim.LogitLens()], remote=small.url)
    assert far["logit_lens"].provenance.dtype == "torch.float32"
    assert furthest(far, local(small, rows(4, 20), [lsim.LogitLens()])) < 1e-6


def test_a_request_that_takes_too_long_is_halved(small):
    data = rows(11, 20)
    calm = lsim.analyze(small.model(), data, QUICK, remote=small.url, batch_size=1, tokens_per_request=20)
    small.set(most_batches=2)
    halved = lsim.analyze(small.model(), data, QUICK, remote=small.url, batch_size=1, tokens_per_request=10_000)
    assert equal(calm, halved)
    # 11 batches: tried as 11 and 8 and 4, done as 2 + 2 + 2 + 2 + 2 + 1; and the probe.
    assert small.set(most_batches=0) == {"requests": 3 + 6 + 1, "completed": 6 + 1}
    with pytest.raises(lsim.LayersimError, match=r"longer than a job may(.|\n)*batch_size=2"):
        lsim.analyze(small.model(), data, QUICK, remote=small.url, batch_size=4)


@pytest.mark.parametrize("fault", ["evicted", "unavailable", "cut"])
def test_what_passes_is_asked_for_again_and_counted_once(small, fault):
    data = rows(8, 20)
    options = {"remote": small.url, "batch_size": 1, "tokens_per_request": 40}
    calm = lsim.analyze(small.model(), data, QUICK, **options)
    # The first request is the probe.
    small.set(faults=["", fault, "", fault, fault])
    assert equal(calm, lsim.analyze(small.model(), data, QUICK, **options))


def test_what_does_not_pass_ends_the_run_and_keeps_the_sums(small, tmp_path):
    data, path = rows(8, 20), tmp_path / "run.ckpt"
    options = {"remote": small.url, "batch_size": 1, "tokens_per_request": 40, "checkpoint": path}
    small.set(faults=["", "", *["evicted"] * 5])
    with pytest.raises(lsim.LayersimError, match=r"gave no answer, asked 5 times(.|\n)*evicted(.|\n)*checkpoint=") as caught:
        lsim.analyze(small.model(), data, QUICK, **options)
    assert any(str(path) in note for note in caught.value.__notes__)
    small.set()
    resumed = lsim.analyze(small.model(), data, QUICK, **options)
    # The probe, and the three requests that were missing.
    assert small.set()["requests"] == 4
    assert equal(resumed, lsim.analyze(small.model(), data, QUICK, **(options | {"checkpoint": None})))


@pytest.mark.parametrize("after", range(1, 12))
def test_a_resumed_run_ends_with_the_same_bits_however_it_was_cut(small, after, tmp_path, monkeypatch):
    data = rows(11, 20)
    options = {"remote": small.url, "batch_size": 1}
    calm = lsim.analyze(small.model(), data, QUICK, tokens_per_request=10_000, **options)
    path = tmp_path / "run.ckpt"
    small.set(faults=["", *[""] * (after - 1), *["evicted"] * 5])
    sizes = [20, 40, 60, 80, 160]
    with contextlib.suppress(lsim.LayersimError):
        lsim.analyze(small.model(), data, QUICK, checkpoint=path, tokens_per_request=sizes[after % 5], **options)
    small.set()
    assert equal(
        calm, lsim.analyze(small.model(), data, QUICK, checkpoint=path, tokens_per_request=sizes[after % 4], **options)
    )


def test_a_server_that_starts_again_in_the_middle(small, monkeypatch):
    data = rows(8, 20)
    options = {"remote": small.url, "batch_size": 1, "tokens_per_request": 20}
    calm = lsim.analyze(small.model(), data, QUICK, **options)
    monkeypatch.setattr(ndif, "WAITS", (0.5,) * 60)
    plain, seen = ndif.Ndif._attempt, []

    def attempt(self, run):
        seen.append(1)
        if len(seen) == 5:
            small.stop()
            with pytest.raises(ndif.Passing):
                plain(self, run)
            small.start()
        return plain(self, run)

    monkeypatch.setattr(ndif.Ndif, "_attempt", attempt)
    assert equal(calm, lsim.analyze(small.model(), data, QUICK, **options))


def test_a_connection_that_has_gone_silent_is_noticed(small, monkeypatch):
    # Nothing more is said, and the server is gone without a word: what a cut cable looks like.
    monkeypatch.setattr(ndif, "SILENCE", 0.3)
    asked = []

    def gone(self, path, timeout=30.0):
        asked.append(path)
        raise ndif.Passing("no answer")

    source = ndif.Display(ndif.Ndif(small.url, "x:{}", {}))
    monkeypatch.setattr(ndif.Ndif, "get", gone)
    source.refresh()
    time.sleep(0.4)
    with pytest.raises(ndif.Stalled):
        source.refresh()
    assert asked == ["/ping"]


def test_no_server(small):
    [port] = free_ports(1)
    with pytest.raises(lsim.LayersimError, match=r"no NDIF server at this address(.|\n)*NDIF_HOST"):
        lsim.analyze(small.model(), rows(2, 8), QUICK, remote=f"http://127.0.0.1:{port}")
    with pytest.raises(lsim.LayersimError, match="no address of a server"):
        lsim.analyze(small.model(), rows(2, 8), QUICK, remote="127.0.0.1:5000")
    with pytest.raises(lsim.LayersimError, match=r"no NDIF server(.|\n)*HTTP 404"):
        lsim.analyze(small.model(), rows(2, 8), QUICK, remote=small.url + "/elsewhere")


@pytest.mark.parametrize(
    ("sent", "says"),
    [(None, "no key"), ("not-a-uuid-but-secret", "a key"), (KEY.replace("beef", "dead"), "a key")],
)
def test_a_key_that_is_not_taken(small, monkeypatch, sent, says):
    from nnsight.schema.config import CONFIG

    small.set(key=KEY)
    monkeypatch.setattr(CONFIG.API, "APIKEY", sent)
    with pytest.raises(lsim.LayersimError, match=rf"does not take this key(.|\n)*{says}(.|\n)*NDIF_API_KEY") as caught:
        lsim.analyze(small.model(), rows(2, 8), QUICK, remote=small.url)
    assert sent is None or sent not in str(caught.value)
    # Asked once: a wrong key does not get better.
    assert caught.value.__cause__ is None


def test_a_key_is_sent_and_turns_up_nowhere(small, key, tmp_path, capfd):
    small.set(key=key)
    path = tmp_path / "run.ckpt"
    report = lsim.analyze(small.model(), rows(4, 20), QUICK, remote=small.url, checkpoint=path)
    report.save(tmp_path / "report.st")
    run = lsim.analyze(small.model(), rows(4, 20), QUICK, remote=small.url, blocking=False)
    run.save(tmp_path / "run")
    found = lsim.capabilities(small.model(), remote=small.url)
    small.set(key=key, deny=f"something else, says {key}")
    with pytest.raises(lsim.LayersimError) as caught:
        lsim.analyze(small.model(), rows(4, 20), QUICK, remote=small.url)
    small.set(key=key)
    texts = [str(found), repr(found), repr(run), str(report["cka"].provenance), str(caught.value), *capfd.readouterr()]
    files = [item.read_bytes() for item in tmp_path.iterdir()]
    assert not any(key in text for text in texts)
    assert not any(key.encode() in content for content in files)
    assert equal(lsim.load_run(tmp_path / "run").result(60), report)


def test_a_login_in_the_address_is_kept_out_of_the_record(small):
    url = small.url.replace("http://", "http://me:secret@")
    report = lsim.analyze(small.model(), rows(4, 20), QUICK, remote=url)
    assert report["cka"].provenance.options["remote"][0]["server"] == small.url
    assert "secret" not in str(report["cka"].provenance)


def test_versions_that_differ_are_named_when_a_request_fails(small):
    @lsim_analyzer
    def broken(view):
        raise RuntimeError("nothing like this there")

    small.set(versions={"transformers": "4.0.0"})
    found = lsim.capabilities(small.model(), remote=small.url)
    assert any("transformers" in words and "4.0.0 there" in words for words in found.offer.differences)
    with pytest.raises(lsim.LayersimError, match=r"nothing like this there(.|\n)*transformers .* here, 4.0.0 there"):
        lsim.analyze(small.model(), rows(2, 8), [broken], remote=small.url)


def test_a_server_that_wants_other_versions(small):
    small.set(deny="Client nnsight version 0.8.1 is below the minimum supported 9.0.")
    with pytest.raises(lsim.LayersimError, match=r"does not take requests from these versions(.|\n)*minimum supported 9.0"):
        lsim.analyze(small.model(), rows(2, 8), QUICK, remote=small.url)


def lsim_analyzer(function):
    """An analyzer of one kernel, as a user writes it."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Own(lsim.Analyzer):
        name = "own"

        def kernel(self, first):
            return function

        def compute(self, sums, run):
            return lsim.LayerCurve(values=sums["norm"] / sums["count"], layers=run.layers, provenance=run.provenance)

    return Own()


def mean_norm(view):
    return {"norm": view.residual.double().norm(dim=-1).sum(1), "count": torch.tensor(view.residual.shape[1])}


def test_an_analyzer_of_ones_own_travels(small):
    data = rows(6, 20)
    far = lsim.analyze(small.model(), data, [lsim_analyzer(mean_norm)], remote=small.url)
    assert furthest(far, local(small, data, [lsim_analyzer(mean_norm)])) < 1e-12


def test_not_a_number_there_is_named_with_its_layer(small, tmp_path):
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    model.save_pretrained(small.folder / "broken")
    tiny_tokenizer().save_pretrained(small.folder / "broken")
    with pytest.raises(lsim.LayersimError, match=r"batches 0 to 3(.|\n)*blocks.1.hook_resid_post"):
        lsim.analyze(small.model("broken"), rows(4, 20), QUICK, remote=small.url, batch_size=1, tokens_per_request=1000)


def test_a_request_smaller_than_a_forward_pass_is_refused(small):
    data = [list(range(3, 11))] * 8 + [list(range(3, 63))] * 4
    for blocking in (True, False):
        small.set()
        options = {"remote": small.url, "batch_size": 4, "tokens_per_request": 100, "blocking": blocking}
        with pytest.raises(lsim.LayersimError, match=r"4 rows of 60(.|\n)*at least 240(.|\n)*batch_size=1"):
            lsim.analyze(small.model(), [torch.tensor(row) for row in data], QUICK, **options)
        # Nothing was sent but the probe.
        assert small.set()["requests"] == 1
    for few in (0, -5):
        with pytest.raises(lsim.LayersimError, match=r"1 or more"):
            lsim.analyze(small.model(), rows(4, 20), QUICK, remote=small.url, tokens_per_request=few)
    with pytest.raises(lsim.LayersimError, match=r"whole forward passes(.|\n)*tokens_per_request of at least 160"):
        lsim.analyze(small.model(), rows(8, 20), QUICK, remote=small.url, batch_size=8, tokens_per_request=100)


def test_options_that_mean_nothing_are_refused(small, tmp_path):
    model = small.model(dispatch=True, dtype=torch.float32)
    with pytest.raises(lsim.LayersimError, match="Only a server is sent requests"):
        lsim.analyze(model, rows(2, 8), QUICK, tokens_per_request=100)
    with pytest.raises(lsim.LayersimError, match="Only a server goes on by itself"):
        lsim.analyze(model, rows(2, 8), QUICK, blocking=False)
    with pytest.raises(lsim.LayersimError, match="keeps itself"):
        lsim.analyze(model, rows(2, 8), QUICK, remote=small.url, blocking=False, checkpoint=tmp_path / "x")


def test_what_cannot_be_added_is_refused_as_here(small):
    data = rows(5, 20)
    for kernel in (one_a_row, now_and_then):
        for where in ({"remote": small.url, "tokens_per_request": 1000}, {"remote": small.url, "tokens_per_request": 80}):
            with pytest.raises(lsim.LayersimError, match=r"kernel of 'own' returned cannot be added up"):
                lsim.analyze(small.model(), data, [lsim_analyzer(kernel)], batch_size=4, **where)


def one_a_row(view):
    return {"norm": torch.ones(int(view.sequence.max()) + 1), "count": torch.tensor(1)}


def now_and_then(view):
    few = int(view.sequence.max()) < 3
    return {"norm": torch.ones(4), "count": torch.tensor(1)} | ({"few": torch.tensor(1)} if few else {})


def everything(view):
    return {"norm": view.residual.repeat(1, 40, 40), "count": torch.tensor(1)}


def test_what_is_large_is_not_brought_without_a_word(small):
    much = pytest.warns(lsim.LayersimWarning, match=r"'own' brings back \d+ MB a request, most of it 'norm'")
    with much, contextlib.suppress(lsim.LayersimError):
        lsim.analyze(small.model(), rows(8, 20), [lsim_analyzer(everything)], remote=small.url)


def refuses(view):
    raise RuntimeError("the frobnicator is unavailable, try again")


def test_a_kernel_that_fails_is_not_asked_for_again(small):
    with pytest.raises(lsim.LayersimError, match=r"request failed(.|\n)*frobnicator"):
        lsim.analyze(small.model(), rows(2, 8), [lsim_analyzer(refuses)], remote=small.url)
    assert small.set()["requests"] == 2
    run = lsim.analyze(small.model(), rows(2, 8), [lsim_analyzer(refuses)], remote=small.url, blocking=False)
    with pytest.raises(lsim.LayersimError, match=r"request failed(.|\n)*frobnicator"):
        run.result(30)
    assert run.status() == {"ERROR": 1}
    assert small.set()["requests"] == 2


def test_a_refusal_of_a_kernel_keeps_its_words(small):
    labels = torch.randint(100, 200, (4, 20))
    data = {"input_ids": rows(4, 20)["input_ids"], "labels": labels}
    with pytest.raises(lsim.LayersimError, match=r"labels that the head cannot say(.|\n)*given: +labels from 1\d\d to 1\d\d\n"):
        lsim.analyze(small.model(), data, [lsim.LogitLens(labels="data")], remote=small.url)


OWN = """
from dataclasses import dataclass
import torch
import tl_layersim as lsim

FACTOR = 2.0


@dataclass(frozen=True)
class Own(lsim.Analyzer):
    name = "own"

    def kernel(self, first):
        return norms

    def compute(self, sums, run):
        return lsim.LayerCurve(values=sums["norm"] / sums["count"], layers=run.layers, provenance=run.provenance)


def norms(view):
    return {"norm": scaled(view), "count": torch.tensor(view.residual.shape[1])}


def scaled(view):
    return view.residual.double().norm(dim=-1).sum(1) * 2.0
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A module of a user's own, and how to import it: as it is in the file now."""
    path = tmp_path / "own_kernels.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def imported():
        sys.modules.pop("own_kernels", None)
        importlib.invalidate_caches()
        return importlib.import_module("own_kernels")

    yield path, imported
    sys.modules.pop("own_kernels", None)


def test_a_file_that_is_saved_while_a_run_goes_on(small, own_file, monkeypatch):
    path, imported = own_file
    own, data = imported().Own(), rows(8, 20)
    expected = local(small, data, [own], batch_size=1)
    plain = ndif.Ndif._attempt

    def attempt(self, run):
        found = plain(self, run)
        path.write_text(OWN.replace("2.0", "200.0"))
        os.utime(path, (time.time() + 5, time.time() + 5))
        return found

    source = open_source(small.model(), remote=small.url, tokens_per_request=20)
    monkeypatch.setattr(ndif.Ndif, "_attempt", attempt)
    far = lsim.analyze(source, data, [own], batch_size=1)
    assert path.read_text() != OWN
    assert furthest(far, expected) < 1e-12


def test_a_file_that_was_saved_since_it_was_imported(small, own_file):
    path, imported = own_file
    own = imported().Own()
    path.write_text(OWN + "# A line more at the end changes nothing.\n")
    lsim.analyze(small.model(), rows(4, 20), [own], remote=small.url)
    # Source is found by its line, and what a kernel calls travels with it.
    for other in ("# A line more at the start.\n" + OWN, OWN.replace("* 2.0", "* 200.0"), OWN.replace("sum(1)", "sum(")):
        path.write_text(other)
        with pytest.raises(lsim.LayersimError, match=r"changed since it was imported(.|\n)*own_kernels.py(.|\n)*reload"):
            lsim.analyze(small.model(), rows(4, 20), [own], remote=small.url)


def test_a_checkpoint_is_of_one_kernel(own_file, tmp_path):
    path, imported = own_file
    options = {"checkpoint": tmp_path / "own.ckpt"}
    first = lsim.analyze(tiny_llama(), rows(4, 20), [imported().Own()], **options)
    assert equal(first, lsim.analyze(tiny_llama(), rows(4, 20), [imported().Own()], **options))
    path.write_text(OWN.replace("* 2.0", "* 200.0"))
    with pytest.raises(lsim.LayersimError, match=r"another run(.|\n)*code: own"):
        lsim.analyze(tiny_llama(), rows(4, 20), [imported().Own()], **options)


def test_labels_are_any_numbers(small):
    labels = torch.tensor([5, 7, 2**32 + 5, 2**32 + 7]).repeat(10)[:, None].expand(40, 6).contiguous()
    data = {"input_ids": torch.randint(3, 100, (40, 6)), "labels": labels}
    collapse = [lsim.NeuralCollapse(labels="data", classes=(5, 7))]
    assert furthest(lsim.analyze(small.model(), data, collapse, remote=small.url), local(small, data, collapse)) < 1e-9


def test_a_checkpoint_is_of_one_revision(small, tmp_path):
    path = tmp_path / "run.ckpt"
    lsim.analyze(small.model(), rows(4, 20), QUICK, remote=small.url, checkpoint=path)
    other = small.model(revision="step2000")
    small.set()
    with pytest.raises(lsim.LayersimError, match=r"another run(.|\n)*@step2000"):
        lsim.analyze(other, rows(4, 20), QUICK, remote=small.url, checkpoint=path)


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
            lambda model: lsim.analyze(model, rows(2, 8), QUICK, remote=remote),
            lambda model: lsim.capabilities(model, remote=remote),
            lambda model: lsim.compare(model, model, rows(2, 8), QUICK, remote=remote),
        ):
            with pytest.raises(lsim.LayersimError) as caught:
                call(model)
            assert SECRET not in str(caught.value)
            assert caught.value.__cause__ is None


def test_a_short_key_does_not_cut_words_up(monkeypatch):
    from nnsight.schema.config import CONFIG

    from tl_layersim.sources.address import redacted

    monkeypatch.setattr(CONFIG.API, "APIKEY", "e")
    assert redacted("here") == "here"


# --- jobs that are not waited for


@pytest.fixture
def sent(small):
    def send(**options):
        options = {"batch_size": 1, "tokens_per_request": 40} | options
        return lsim.analyze(small.model(), rows(7, 20), QUICK, remote=small.url, blocking=False, **options)

    return send


@pytest.fixture
def waited(small):
    return lsim.analyze(small.model(), rows(7, 20), QUICK, remote=small.url, batch_size=1)


def test_a_run_is_kept_and_picked_up(sent, waited, tmp_path):
    run = sent()
    assert "4 jobs" in repr(run)
    run.save(tmp_path / "run")
    assert equal(lsim.load_run(tmp_path / "run").result(60), waited)
    assert equal(run.result(60), waited)
    # What has arrived is kept too: nothing is asked of the server any more.
    run.save(tmp_path / "done")
    done = lsim.load_run(tmp_path / "done")
    done._ndif.look = None
    later = done.result(60)
    assert equal(later, waited)
    # The record is that of the whole run: the probe, four requests, and all that came back.
    [kept], [own] = (report["cka"].provenance.options["remote"] for report in (later, run.result(60)))
    assert kept == own
    assert kept["requests"] == 5
    assert kept["bytes_received"] > 4 * 1000
    assert later["cka"].provenance.seconds > 0


def test_a_first_look_is_waited_for(small):
    data = rows(7, 20)
    run = lsim.analyze(small.model(), data, [lsim.Cosine()], remote=small.url, blocking=False)
    assert equal(run.result(60), lsim.analyze(small.model(), data, [lsim.Cosine()], remote=small.url))


def test_a_job_that_was_too_long_is_sent_in_halves(small, sent, waited, tmp_path):
    small.set(most_batches=2)
    run = sent(tokens_per_request=10_000)
    run.save(tmp_path / "run")
    assert equal(run.result(60), waited)
    with pytest.raises(lsim.LayersimError, match=r"not at hand(.|\n)*load_run\(path, model=model\)"):
        lsim.load_run(tmp_path / "run").result(60)
    assert equal(lsim.load_run(tmp_path / "run", model=small.model()).result(60), waited)


def test_a_job_that_the_server_has_lost_is_sent_again(small, sent, waited, monkeypatch):
    from tl_layersim import jobs

    monkeypatch.setattr(jobs, "FORGOTTEN", 0.5)
    monkeypatch.setattr(jobs, "PAUSE", 0.1)
    small.set(faults=["", "lost", "", "evicted"])
    assert equal(sent().result(60), waited)


@pytest.mark.parametrize("codes", [{"bad_words": [502, 200, 503]}, {"bad_results": [503, 403]}])
def test_a_bad_answer_is_not_the_jobs_failure(small, sent, waited, codes, monkeypatch):
    from tl_layersim import jobs

    monkeypatch.setattr(jobs, "PAUSE", 0.05)
    run = sent()
    small.set(**codes)
    assert equal(run.result(60), waited)
    assert small.set()["requests"] == 0


def test_a_job_that_fails_and_fails_is_given_up(small, sent, monkeypatch):
    from tl_layersim import jobs

    monkeypatch.setattr(jobs, "PAUSE", 0.01)
    small.set(faults=["", *["evicted"] * 20])
    with pytest.raises(lsim.LayersimError, match=r"did not end well, 6 times(.|\n)*evicted"):
        sent(tokens_per_request=1000).result(60)


def test_a_server_that_is_away_has_not_lost_the_job(small, sent, waited, tmp_path, monkeypatch):
    from tl_layersim import jobs

    monkeypatch.setattr(jobs, "PAUSE", 0.05)
    monkeypatch.setattr(jobs, "FORGOTTEN", 0.2)
    path = sent().save(tmp_path / "run")
    run, plain = lsim.load_run(path), ndif.Ndif.backend

    def nowhere(self, blocking, job_id=None):
        backend = plain(self, blocking, job_id)
        backend.host = "http://127.0.0.1:9"
        return backend

    with monkeypatch.context() as patch:
        patch.setattr(ndif.Ndif, "backend", nowhere)
        patch.setattr(ndif, "WAITS", (60.0,))
        with pytest.raises(TimeoutError):
            run.result(1)
        patch.setattr(ndif, "WAITS", (0.3,))
        with pytest.raises(lsim.LayersimError, match=r"does not answer(.|\n)*RemoteRun"):
            run.result(20)
    assert equal(run.result(60), waited)


def test_a_job_of_numbers_that_are_none_says_so_every_time(small, tmp_path):
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    model.save_pretrained(small.folder / "none")
    tiny_tokenizer().save_pretrained(small.folder / "none")
    run = lsim.analyze(small.model("none"), rows(4, 20), QUICK, remote=small.url, blocking=False)
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
    with pytest.raises(lsim.LayersimError, match="not the server of this run"):
        lsim.load_run(path, remote="http://127.0.0.1:9")


def test_a_file_that_is_no_whole_run(small, sent, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = sent().save(tmp_path / "run")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        header = json.loads(file.metadata()["tl_layersim"])
    for change, says in (({"jobs": None}, "not a whole run"), ({"version": "0.0.1"}, "another tl_layersim")):
        broken = {key: value for key, value in (header | change).items() if value is not None}
        save_file(tensors, path, metadata={"tl_layersim": json.dumps(broken)})
        with pytest.raises(lsim.LayersimError, match=says):
            lsim.load_run(path)


def test_waiting_has_an_end(small, sent):
    small.set(faults=["", "silent"])
    run = sent()
    with pytest.raises(TimeoutError, match="Nothing is lost"):
        run.result(1.5)
    assert run.status()["COMPLETED"] == 3


def test_a_kept_run_wants_its_own_model_and_analyzers(small, sent, waited, tmp_path):
    run = sent()
    path = run.save(tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match="not the model of this run"):
        lsim.load_run(path, model=small.model("gpt2"))
    with pytest.raises(lsim.LayersimError, match="not the analyzers of this run"):
        lsim.load_run(path, analyzers=[lsim.CKA(minibatch=64)])
    assert equal(lsim.load_run(path, analyzers=QUICK).result(60), waited)


def test_an_analyzer_of_ones_own_is_given_again(small, tmp_path):
    own = lsim_analyzer(mean_norm)
    run = lsim.analyze(small.model(), rows(4, 20), [own], remote=small.url, blocking=False)
    path = run.save(tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match=r"cannot be made again from the file(.|\n)*analyzers="):
        lsim.load_run(path)
    assert equal(lsim.load_run(path, analyzers=[own]).result(60), run.result(60))


def test_the_tutorial_runs_as_it_is_but_for_names(small, tmp_path, monkeypatch):
    from nnsight.modeling import huggingface
    from nnsight.schema.config import CONFIG

    model = lsim.demo_model()
    path = small.folder / "demo"
    model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    huggingface._ID_CACHE[str(path)] = str(path)
    monkeypatch.setattr(CONFIG.API, "HOST", small.url)
    monkeypatch.chdir(tmp_path)
    run_page(str(path))
    assert (tmp_path / "70b.html").stat().st_size > 10_000


def run_page(name: str) -> None:
    """The code of the page about NDIF, on another model."""
    page = ROOT / "docs/ndif.md"
    found = {}
    for block in blocks(page):
        exec(compile(block.replace("meta-llama/Llama-3.1-70B", name), page.name, "exec"), found)
    assert set(found["report"].values.shape) == {len(found["report"].layers)}


# --- two models


@pytest.mark.parametrize(
    "cka", [lsim.CKA(minibatch=16), lsim.CKA(minibatch=16, estimator="biased"), lsim.CKA(level="sequence")]
)
def test_gram_matrices_cross_and_give_the_same(small, cka, capfd):
    data, options = rows(12, 20), {"batch_size": 6}
    here = lsim.compare(
        small.model(dispatch=True, dtype=torch.float32),
        small.model("gpt2", dispatch=True, dtype=torch.float32),
        data,
        cka,
        **options,
    )
    far = lsim.compare(small.model(), small.model("gpt2"), data, cka, remote=small.url, **options)
    assert torch.allclose(far.values, here.values, atol=1e-9)
    assert "2 batches, each run on one model and then on the other" in capfd.readouterr().err
    assert len(far.provenance.options["remote"]) == 2
    mixed = lsim.compare(
        small.model(dispatch=True, dtype=torch.float32), small.model("gpt2"), data, cka, remote=(False, small.url), **options
    )
    assert torch.allclose(mixed.values, here.values, atol=1e-9)


def test_pictures_of_one_prompt_are_made_there(small):
    words = "w3 w4 w5 w6 w7"
    here = small.model(dispatch=True, dtype=torch.float32)
    assert torch.allclose(
        lsim.prediction_grid(small.model(), words, remote=small.url).probability, lsim.prediction_grid(here, words).probability
    )
    far, near = (
        lsim.trajectory_pca(model, words, **more) for model, more in ((small.model(), {"remote": small.url}), (here, {}))
    )
    assert torch.allclose(far.values, near.values, atol=1e-5)


def test_activations_do_not_cross(small):
    with pytest.raises(lsim.LayersimError, match="needs both models' activations in one place"):
        lsim.compare(small.model(), small.model("gpt2"), rows(4, 20), lsim.CKA(estimator="exact"), remote=small.url)
    with pytest.raises(lsim.LayersimError, match="Activations stay where the model is"):
        open_source(small.model(), remote=small.url).collect(None)


def test_what_will_cross_is_what_crosses(small):
    cka = lsim.CKA(minibatch=16)
    data = rows(12, 20)
    data["attention_mask"][:] = 1
    opened = open_source(small.model(), remote=small.url)
    [batch] = Batches(data, opened.model, 12, None, False, None, 0, True, None)
    given = exchanges({"cka": cka})["cka"]
    _, out = opened.run(batch, {"cka": given.kernel})
    assert given.size(240, 12, 4) == sum(value.numel() * value.element_size() for value in out["cka"].values())
    rows_alone = lsim.CKA(minibatch=16, level="sequence").exchange()
    _, out = opened.run(batch, {"cka": rows_alone.kernel})
    assert rows_alone.size(240, 12, 4) == sum(value.numel() * value.element_size() for value in out["cka"].values())


def here(small, name):
    return small.model(name, dispatch=True, dtype=torch.float32)


@pytest.mark.parametrize("at", [(0, 0), (2, 1), (3, 3)])
def test_stitched_there_as_here(small, at, capfd):
    options = {"at": at, "adapter": "affine", "fit": "lstsq", "batch_size": 4}
    data = rows(24, 20)
    expected = lsim.stitch(here(small, "llama"), here(small, "gpt2"), data, **options)
    capfd.readouterr()
    found = lsim.stitch(small.model("llama"), small.model("gpt2"), data, remote=small.url, **options)
    assert "of activations at one layer cross" in capfd.readouterr().err
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.back_loss == pytest.approx(expected.back_loss, abs=1e-6)
    torch.testing.assert_close(found.weight, expected.weight, rtol=1e-4, atol=1e-5)
    assert "NDIF" in found.provenance.source
    for sides in ((True, False), (False, True)):
        models = [
            (small.model if far else lambda name: here(small, name))(name)
            for far, name in zip(sides, ("llama", "gpt2"), strict=True)
        ]
        mixed = lsim.stitch(*models, data, remote=tuple(small.url if far else False for far in sides), **options)
        assert mixed.loss == pytest.approx(expected.loss, abs=1e-6)


def test_an_adapter_is_trained_through_a_trusted_server(small):
    options = {"at": (2, 2), "adapter": "affine-norm", "fit": "sgd", "batch_size": 8}
    options |= {"training": lsim.StitchTraining(steps=6, warmup=2)}
    data = rows(24, 20)
    expected = lsim.stitch(here(small, "llama"), here(small, "gpt2"), data, **options)
    small.set()
    found = lsim.stitch(small.model("llama"), small.model("gpt2"), data, remote=small.url, **options)
    torch.testing.assert_close(found.curve, expected.curve, rtol=1e-5, atol=1e-5)
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)


def test_no_training_through_a_sandbox(small, monkeypatch):
    from dataclasses import replace

    from tl_layersim.sources.remote import RemoteSource

    plain = RemoteSource._ask_offer
    monkeypatch.setattr(RemoteSource, "_ask_offer", lambda self: replace(plain(self), trusted=False))
    with pytest.raises(lsim.LayersimError, match=r"sandbox that weights stay out of(.|\n)*fit='lstsq'"):
        lsim.stitch(here(small, "llama"), small.model("gpt2"), rows(24, 20), at=(1, 1), fit="sgd", remote=(False, small.url))
    found = lsim.stitch(
        here(small, "llama"), small.model("gpt2"), rows(24, 20), at=(1, 1), remote=(False, small.url), batch_size=4
    )
    assert found.fit == "lstsq"
