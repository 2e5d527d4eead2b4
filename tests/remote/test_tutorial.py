"""The page about NDIF, run against the small server."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from .helpers import run_page

pytestmark = [pytest.mark.filterwarnings("ignore:.*(not those here|CKA rests).*:UserWarning")]


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
