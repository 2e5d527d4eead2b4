"""Two models of which one or both are on a server."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches
from tl_layersim.engine.two_models import exchanges
from tl_layersim.remote.open_model import open_source

from ..inputs.views import worst
from ..ndif.client import rows
from ..running.options import called


@pytest.mark.parametrize(
    "cka",
    [
        lsim.CKA(minibatch=16, permutations=40),
        lsim.CKA(minibatch=16, estimator="biased"),
        lsim.CKA(level="sequence"),
        lsim.RSA(minibatch=16, permutations=40),
        lsim.MutualKNN(k=3, minibatch=16, permutations=40),
        lsim.MutualKNN(k=3, minibatch=16, overlap="cknna", permutations=40),
        lsim.CKA(minibatch=16, rbf_bandwidth=0.5, permutations=40),
        lsim.RSA(minibatch=16, unit="token", compare="whitened_cosine", permutations=40),
    ],
)
def test_gram_matrices_cross_and_give_the_same(small, cka, capfd):
    data, options = rows(12, 20), {"batch_size": 6}
    here = called(
        lsim.compare,
        small.model(dispatch=True, dtype=torch.float32),
        small.model("gpt2", dispatch=True, dtype=torch.float32),
        data,
        cka,
        **options,
    )
    far = called(lsim.compare, small.model(), small.model("gpt2"), data, cka, remote=small.url, **options)
    assert torch.allclose(far.values, here.values, atol=1e-9)
    for field in ("p_values", "null_threshold", "max_p_value", "max_calibrated"):
        assert torch.allclose(getattr(far, field), getattr(here, field), atol=1e-9, equal_nan=True)
    assert "each run on one model and then on the other" in capfd.readouterr().err
    assert len(far.provenance.options["remote"]) == 2
    mixed = called(
        lsim.compare,
        small.model(dispatch=True, dtype=torch.float32),
        small.model("gpt2"),
        data,
        cka,
        remote=(False, small.url),
        **options,
    )
    assert torch.allclose(mixed.values, here.values, atol=1e-9)


def test_many_models_in_several_places(small, capfd):
    data, cka = lsim.Data(rows(12, 20), batch_size=6), lsim.CKA(minibatch=16)
    names = {"a": (), "b": ("gpt2",), "c": ()}
    here = {name: small.model(*kind, dispatch=True, dtype=torch.float32) for name, kind in names.items()}
    depths = lambda result: float(result.values[-1, -1])  # noqa: E731 (models of two depths)
    expected = lsim.compare_grid(here, data, cka, distance=depths)
    far = {name: lsim.open_model(small.model(*names[name]), remote=small.url) for name in ("b", "c")}
    found = lsim.compare_grid({"a": here["a"], **far}, data, cka, distance=depths)
    assert torch.allclose(found.values, expected.values, atol=1e-9)
    assert torch.allclose(found["b", "c"].values, expected["b", "c"].values, atol=1e-9)
    assert "each run on 3 models in turn" in capfd.readouterr().err
    assert len(found.provenance.options["remote"]) == 2
    with pytest.raises(lsim.LayersimError, match=r"CKA\(.*estimator='exact'.*CKA\(estimator=\"minibatch\"\)"):
        lsim.compare_grid({"a": here["a"], **far}, data, lsim.CKA(estimator="exact"), distance=depths)


@pytest.mark.heavy("many requests")
def test_pictures_of_one_prompt_are_made_there(small):
    words = "w3 w4 w5 w6 w7"
    here = small.model(dispatch=True, dtype=torch.float32)
    assert torch.allclose(
        lsim.prompts.prediction_grid(lsim.open_model(small.model(), remote=small.url), words).probability,
        lsim.prompts.prediction_grid(here, words).probability,
    )
    far, near = (
        lsim.prompts.trajectory_pca(model, words) for model in (lsim.open_model(small.model(), remote=small.url), here)
    )
    assert torch.allclose(far.values, near.values, atol=1e-5)


def test_edits_of_one_model_run_in_one_request(small):
    analyzers = [lsim.InterventionEffect(), lsim.CKA(minibatch=16)]
    data = lsim.Data(rows(12, 20), batch_size=6, skip_first=1)

    def pair(model):
        with model.edit() as (_, edited):
            edited.model.layers[1].mlp.output[:] = 0
        return model, edited

    here = lsim.compare(*pair(small.model(dispatch=True, dtype=torch.float32)), data, analyzers, intervals=True)
    clean, edited = (lsim.open_model(one, remote=small.url) for one in pair(small.model()))
    small.set()
    found = lsim.compare(clean, edited, data, analyzers, intervals=True)
    # For each source, a request for what it asks of the server and one for its lens of the first row; and one for all batches.
    assert small.set()["requests"] == 5
    for name in here:
        assert worst(found[name], here[name]) < 1e-6
    effect = found["intervention_effect"]
    assert effect.cosine[:2].tolist() == [1, 1]
    assert effect.kl_divergence[1] > 0
    # Sums of some layers, where activations of 12 rows would be 4 x 240 x 32 numbers.
    alone = lsim.compare(clean, edited, data, lsim.InterventionEffect())
    assert alone.provenance.options["remote"][0]["bytes_received"] < 20_000
    other = lsim.open_model(small.model("gpt2"), remote=small.url)
    for wrong in (other, small.model(dispatch=True, dtype=torch.float32)):
        with pytest.raises(lsim.LayersimError, match="InterventionEffect"):
            lsim.compare(clean, wrong, data, lsim.InterventionEffect())


def test_activations_do_not_cross(small):
    with pytest.raises(lsim.LayersimError, match=r"CKA\(.*estimator='exact'.*CKA\(estimator=\"minibatch\"\)"):
        lsim.compare(
            lsim.open_model(small.model(), remote=small.url),
            lsim.open_model(small.model("gpt2"), remote=small.url),
            rows(4, 20),
            lsim.CKA(estimator="exact"),
        )
    with pytest.raises(lsim.LayersimError, match=r"Activations .*RemoteSource"):
        open_source(lsim.open_model(small.model(), remote=small.url)).collect(None)


@pytest.mark.heavy("many requests")
def test_what_will_cross_is_what_crosses(small):
    cka = lsim.CKA(minibatch=16)
    data = rows(12, 20)
    data["attention_mask"][:] = 1
    opened = open_source(lsim.open_model(small.model(), remote=small.url))
    [batch] = Batches(lsim.Data(data, batch_size=12), opened.model)
    given = exchanges({"cka": cka})["cka"]
    _, out = opened.run(batch, {"cka": given.kernel})
    assert given.size(12, 20.0, 4) == sum(value.numel() * value.element_size() for value in out["cka"].values())
    rows_alone = lsim.CKA(minibatch=16, level="sequence").exchange()
    _, out = opened.run(batch, {"cka": rows_alone.kernel})
    assert rows_alone.size(12, 20.0, 4) == sum(value.numel() * value.element_size() for value in out["cka"].values())


def test_a_function_of_the_user_is_refused_on_a_server(small):
    with pytest.raises(lsim.LayersimError, match="Similarity"):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(12, 20), lsim.Similarity(lambda x, y: 1.0))
