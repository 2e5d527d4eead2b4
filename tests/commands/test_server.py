"""`--server` and `--remote`: a model on a small NDIF server gives the numbers of the same model here."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..ndif.client import furthest
from ..remote.conftest import running, small
from .helpers import done, run

__all__ = ["running", "small"]

pytestmark = pytest.mark.filterwarnings("ignore:.*(not those here|CKA rests|CKA is dominated).*:UserWarning")


@pytest.mark.heavy("a server with a socket")
def test_a_report_from_a_server(small, tmp_path, monkeypatch):
    from nnsight.schema.config import CONFIG

    monkeypatch.setattr(CONFIG.API, "APIKEY", "a-secret-key-1234")
    small.set(key="a-secret-key-1234")
    small.model()
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(f"w{(7 * row + i) % 30 + 3}" for i in range(20)) for row in range(20)))
    options = ["--data", text, "--seq-len", 16, "--model", small.folder / "llama", "--option", "cka.minibatch=32"]
    there = done("report", *options, "--server", small.url, "--out", tmp_path / "there")
    done("report", *options, "--out", tmp_path / "here")
    far, near = (lsim.load(tmp_path / name / "report.safetensors") for name in ("there", "here"))
    assert furthest(far, near) < 1e-6
    assert small.set(key=None)["requests"] > 0
    # The key is sent to the server alone.
    for path in (tmp_path / "there").iterdir():
        assert b"a-secret-key-1234" not in path.read_bytes(), path
    assert "a-secret-key-1234" not in there.output


@pytest.mark.heavy("a server with a socket")
def test_a_wrong_key_is_refused_with_the_place_of_the_key(small, tmp_path, monkeypatch):
    from nnsight.schema.config import CONFIG

    small.model()
    monkeypatch.setattr(CONFIG.API, "APIKEY", None)
    small.set(key="another")
    refused = run("report", "--model", small.folder / "llama", "--server", small.url, "--out", tmp_path / "out")
    assert "NDIF_API_KEY" in str(refused.exception)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_what_a_server_has_no_use_for_is_refused(tmp_path):
    for options, name in (
        (["--remote"], "`--model`"),
        (["--remote", "--model", "org/name", "--device", "cuda"], "`--device`"),
        (["--remote", "--model", "org/name", "--dtype", "float16"], "`--dtype`"),
        (["--tokens-per-request", 64], "`--tokens-per-request`"),
    ):
        assert str(run("report", *options, "--out", tmp_path / "out").exception).startswith(name)
