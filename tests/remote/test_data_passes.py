"""How often a call with a model on a server reads its data."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..engine.test_data_passes import Counted
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called


def test_a_run_on_a_server_reads_its_data_once(small):
    data = Counted(list(random_tokens(4)))
    lsim.analyze(lsim.open_model(small.model(), remote=small.url), lsim.Data(data, batch_size=2), lsim.Cosine())
    assert data.reads == 1
    lsim.analyze(lsim.open_model(small.model(), remote=small.url), lsim.Data(data, batch_size=2), lsim.Cosine(), blocking=False)
    assert data.reads == 2
    lsim.compare(
        lsim.open_model(small.model(), remote=small.url),
        lsim.open_model(small.model("gpt2"), remote=small.url),
        lsim.Data(data, batch_size=2),
        lsim.CKA(minibatch=16),
    )
    assert data.reads == 3


def test_a_generator_compares_models_on_a_server_where_its_rows_fit(small, monkeypatch):
    models, cka = (small.model(), small.model("gpt2")), lsim.CKA(minibatch=16)
    listed = called(lsim.compare, *models, list(random_tokens(4)), cka, remote=small.url, batch_size=2)
    generated = called(lsim.compare, *models, (row for row in random_tokens(4)), cka, remote=small.url, batch_size=2)
    assert listed.values.equal(generated.values)
    monkeypatch.setattr("tl_layersim.data.data.MOST_KEPT", 0)
    with pytest.raises(lsim.LayersimError, match=r"^`data` "):
        called(lsim.compare, *models, (row for row in random_tokens(4)), cka, remote=small.url)


@pytest.mark.light
def test_a_model_in_this_process_has_no_server():
    with pytest.raises(lsim.LayersimError, match=r"`remote` must be an NDIF server(.|\n)*LlamaForCausalLM"):
        lsim.costs.capabilities(lsim.open_model(tiny_llama()))
