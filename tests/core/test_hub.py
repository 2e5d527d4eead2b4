"""Reports on the Hugging Face hub, against a stand-in on loopback: upload, download, and the errors of the hub."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import subprocess
import sys

import pandas
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from markdown_it import MarkdownIt

import tl_layersim as lsim
from tl_layersim.core.results import card

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import FILES
from .small_hub import TOKEN, SmallHub


@pytest.fixture(scope="module")
def running():
    hub = SmallHub()
    yield hub
    hub.close()


@pytest.fixture
def hub(running, monkeypatch, tmp_path):
    """The stand-in, without repositories; nobody is logged in."""
    running.repos.clear()
    running.seen.clear()
    running.can_write = True
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", running.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return running


@pytest.fixture(scope="module")
def report():
    return lsim.analyze(tiny_llama(), random_tokens(4, 16), {"raw": lsim.LogitLens(norm="none"), "cosine": "cosine"})


def equal(loaded, report):
    assert list(loaded) == list(report)
    for name, result in report.items():
        for field in result.tensor_fields():
            assert torch.equal(getattr(loaded[name], field).nan_to_num(), getattr(result, field).nan_to_num())
        assert loaded[name].provenance == result.provenance
    return True


@pytest.mark.heavy("reports of many analyzers")
def test_a_report_is_uploaded_and_read_again(hub, report, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    page = report.push_to_hub("me/layers")
    assert page == f"{hub.url}/datasets/me/layers"

    files = hub.repos["me/layers"]["main"]
    assert sorted(files) == ["README.md", "report.csv", "report.html", "report.safetensors"]
    assert b"plotly" in files["report.html"]
    assert equal(lsim.load("hf://me/layers"), report)
    assert equal(lsim.load("hf://me/layers/report.safetensors"), report)
    assert equal(lsim.load("hf://datasets/me/layers@main"), report)
    assert equal(lsim.load(f"hf://me/layers@{hub.commit_of('me/layers', 'main')}"), report)

    # A name without a user is one in the own account, and a second upload is a second commit.
    before = hub.commit_of("me/layers", "main")
    assert report.push_to_hub("layers") == page
    assert hub.commit_of("me/layers", "main") != before or hub.repos["me/layers"]["main"] == files


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_what_is_downloaded_is_kept_for_work_without_a_network(hub, report, monkeypatch):
    report.push_to_hub("me/layers", token=TOKEN)
    assert equal(lsim.load("hf://me/layers"), report)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.seen)
    assert equal(lsim.load("hf://me/layers"), report)
    assert len(hub.seen) == before


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_branch_and_another_file_of_a_repository(hub, report, tmp_path):
    report.push_to_hub("me/layers", token=TOKEN, revision="second", message="words")
    assert hub.repos["me/layers"]["main"] == {}
    assert equal(lsim.load("hf://me/layers@second"), report)
    hub.repos["me/layers"]["main"]["parts/lens.safetensors"] = report["raw"].save(tmp_path / "x").read_bytes()
    assert torch.equal(lsim.load("hf://me/layers/parts/lens.safetensors").values, report["raw"].values)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_private_repository(hub, report):
    report.push_to_hub("me/secret", private=True, token=TOKEN)
    assert hub.repos["me/secret"]["private"]
    with pytest.raises(RepositoryNotFoundError):
        lsim.load("hf://me/secret")

    hub.make("me/open")
    with pytest.raises(lsim.LayersimError, match=r"`private` is True.*me/open"):
        report.push_to_hub("me/open", private=True, token=TOKEN)
    assert hub.repos["me/open"]["main"] == {}, "nothing was uploaded"

    report.push_to_hub("me/secret", private=True, token=TOKEN)


def test_the_card_says_what_was_measured_on_what(hub, report):
    text = card(report, "me/layers", "second")
    p = report["raw"].provenance
    assert text.startswith("---\ntags:\n- tl_layersim\n")
    for words in (p.data, p.config_hash, str(p.tokens), "norm=none", "LogitLensResult", 'lsim.load("hf://me/layers@second")'):
        assert words in text
    assert f"torch={p.versions['torch']}" in text

    # Every line of a table has as many cells as its heading.
    lines = text.splitlines()
    assert all(line.replace("\\|", "").count("|") in (3, 4) for line in lines if line.startswith("|"))
    for name, result in report.items():
        assert sum(line.startswith(f"| {name} |") for line in lines) == len(result.headline()) + 1


def test_the_card_names_both_models_of_a_comparison(report):
    run = dataclasses.replace(report["raw"].provenance, model="org/first | /home/me/second/")
    comparison = lsim.Report({"raw": dataclasses.replace(report["raw"], provenance=run)})
    assert "\n# How the layers of first and second relate\n" in card(comparison, "me/layers")
    assert "org/first \\| /home/me/second/" in card(comparison, "me/layers")


def test_names_in_the_card_are_text(report):
    # Names of a file that somebody else wrote.
    nasty = "a\n# b ![c](javascript:d) <script>e<script> `f` | g & [h]: i"
    run = report["raw"].provenance
    run = dataclasses.replace(run, **dict.fromkeys(("model", "source", "basis", "dtype", "data", "config_hash"), nasty))
    run = dataclasses.replace(run, weights_hash=nasty, options={nasty: nasty}, versions={nasty: nasty})
    text = card(lsim.Report({nasty: dataclasses.replace(report["raw"], provenance=run)}), "me/layers")
    page = MarkdownIt("commonmark").enable("table").render(text.partition("---\n\n")[2])

    assert not re.search(r"<(script|a|img)\b", page)
    assert [page.count(tag) for tag in ("<h1>", "<h2>", "<code", "<table>")] == [1, 2, 4, 3]
    assert "! [c](javascript:d) &lt;script&gt;e&lt;script&gt; `f` | g &amp;" in page.replace("![", "! [")


@pytest.mark.heavy("reports of many analyzers")
def test_the_table_is_what_the_hub_shows(hub, report, tmp_path):
    report.push_to_hub("me/layers", token=TOKEN)
    (tmp_path / "x.csv").write_bytes(hub.repos["me/layers"]["main"]["report.csv"])
    assert len(pandas.read_csv(tmp_path / "x.csv")) == len(report.to_frame())
    assert b"data_files: report.csv" in hub.repos["me/layers"]["main"]["README.md"]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_token_is_nowhere(hub, report, caplog, capfd, monkeypatch):
    caplog.set_level(logging.DEBUG)
    report.push_to_hub("me/layers", token=TOKEN)
    assert {token for _, path, token in hub.seen if path.startswith("/api")} == {TOKEN}
    assert all(TOKEN.encode() not in content for content in hub.repos["me/layers"]["main"].values())

    hub.can_write = False
    with pytest.raises(HfHubHTTPError) as caught:
        report.push_to_hub("me/layers", token=TOKEN)
    with pytest.raises(lsim.LayersimError) as other_error:
        lsim.load(f"hf://me/layers?token={TOKEN}")

    out, err = capfd.readouterr()
    assert TOKEN not in out + err + caplog.text + str(caught.value) + str(other_error.value)


def test_an_error_is_that_of_the_hub(hub, report):
    hub.make("me/empty")
    for call, kind in (
        (lambda: report.push_to_hub("me/layers"), HfHubHTTPError),
        (lambda: report.push_to_hub("me/a b", token=TOKEN), HFValidationError),
        (lambda: lsim.load("hf://me/missing"), RepositoryNotFoundError),
        (lambda: lsim.load("hf://me/empty"), EntryNotFoundError),
        (lambda: lsim.load("hf://me/empty@v9"), RevisionNotFoundError),
    ):
        with pytest.raises(kind):
            call()
    with pytest.raises(lsim.LayersimError, match="`path` is 'hf://layers'"):
        lsim.load("hf://layers")


def test_an_empty_report_is_not_uploaded(hub):
    with pytest.raises(lsim.LayersimError, match="report is empty"):
        lsim.Report({}).push_to_hub("me/layers", token=TOKEN)
    assert not hub.seen


@pytest.mark.heavy("a process of its own")
def test_another_process_reads_by_its_environment(hub, report, tmp_path):
    report.push_to_hub("me/layers", token=TOKEN)
    # And a file whose class of results no module has registered yet.
    script = "import sys, tl_layersim as lsim; print(type(lsim.load(sys.argv[1])).__name__, *lsim.load('hf://me/layers'))"
    grid = str(FILES / "prediction_grid.safetensors")
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", script, grid], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )

    assert process.stdout.strip() == "PredictionGrid raw cosine", process.stderr
