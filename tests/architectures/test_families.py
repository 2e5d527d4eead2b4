"""One tiny model of each encoder and vision family gives one answer through every source, which is that of a float64 oracle."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..models.input_models import states
from ..models.wrapped_models import bridge, nnsight
from ..running.options import called
from .family_cases import CASES, model_of

# Paths of the blocks, by hand, for one case of each family. Those of a Swin are the blocks of its last stage.
BLOCKS = {
    "bert classes": "bert.encoder.layer",
    "roberta masked": "roberta.encoder.layer",
    "distilbert classes": "distilbert.transformer.layer",
    "electra masked": "electra.encoder.layer",
    "deberta classes": "deberta.encoder.layer",
    "deberta-v2 masked": "deberta.encoder.layer",
    "modernbert classes": "model.layers",
    "mpnet": "encoder.layer",
    "vit classes": "vit.layers",
    "deit distilled": "deit.layers",
    "dinov2": "encoder.layer",
    "beit classes": "beit.layers",
    "swin classes": "swin.encoder.layers.1.blocks",
    "siglip vision": "encoder.layers",
    "siglip classes": "vision_model.encoder.layers",
    "clip vision projected": "vision_model.encoder.layers",
    "clip text": "encoder.layers",
    "t5": "decoder.block",
    "bart": "model.decoder.layers",
    "mlp": "steps",
}
SOURCES = {
    "module": (lambda m: m, {}),
    "NNsight": (nnsight, {}),
    "NNsight remote=local": (nnsight, {"remote": "local"}),
}
# More tokens than a batch of the oracle has: each is one row.
ONE_ROW = 1000
# The simulation of a server runs the traces of NNsight.
SIMULATED = ("bert classes", "vit classes", "t5")
# TransformerLens boots these of the classes above from a module.
BRIDGED = ("vit classes", "bert masked")


def rows_of(key: str) -> list[dict[str, torch.Tensor]]:
    """Each row alone, without its padding."""
    data = CASES[key].data()
    rows = []
    for number in range(len(next(iter(data.values())))):
        row = {name: values[number : number + 1] for name, values in data.items()}
        mask = row.pop("attention_mask", None)
        rows.append(row if mask is None else {name: values[mask.bool()][None] for name, values in row.items()})
    return [{name: x.double() if x.is_floating_point() else x for name, x in row.items()} for row in rows]


def oracle_states(key: str) -> list[np.ndarray]:
    """The residual stream of each row, `layer token width`, of a float64 copy of the model."""
    model = copy.deepcopy(model_of(key)).double()
    blocks = list(model.get_submodule(BLOCKS[key]))
    return [states(model, blocks, **row) for row in rows_of(key)]


def measured(model, key: str, estimator: str = "exact", **options):
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(estimator=estimator)]
    return called(
        lsim.analyze, model, CASES[key].data(), analyzers, positions="all", batch_size=4, **CASES[key].named, **options
    )


@pytest.mark.heavy("every source")
@pytest.mark.parametrize("key", BLOCKS)
def test_every_source_gives_the_answer_of_a_float64_oracle(key):
    rows = oracle_states(key)
    cosine = oracles.oracle_cosine(rows, center="none")
    cka = oracles.oracle_cka(rows, rows, exact=True, rows=ONE_ROW)
    first = None
    for name, (wrap, options) in SOURCES.items():
        if name == "NNsight remote=local" and key not in SIMULATED:
            continue
        report = measured(wrap(copy.deepcopy(model_of(key))), key, **options)
        np.testing.assert_allclose(report["cosine"].values, cosine["values"], atol=1e-5)
        np.testing.assert_allclose(report["cosine"].norm_ratio, cosine["norm_ratio"], rtol=1e-4)
        np.testing.assert_allclose(report["cka"].values, cka["values"], atol=1e-5)
        first = first or report
        assert report["cka"].layers == first["cka"].layers
        assert report["cka"].provenance.tokens == sum(row.shape[1] for row in rows)


@pytest.mark.light("t5", "clip vision projected")
@pytest.mark.parametrize("key", [*SIMULATED, "modernbert classes", "swin classes", "clip vision projected", "bart"])
def test_a_loop_of_ones_own_gives_this_answer_too(key):
    model = model_of(key)
    expected = measured(model_of(key), key, "minibatch")
    analyzers = [lsim.Cosine(center="none"), lsim.CKA()]
    with torch.no_grad(), lsim.attach(model, analyzers, positions="all") as probe:
        for part in (slice(0, 4), slice(4, None)):
            model(**{name: values[part] for name, values in CASES[key].data().items()})
    report = probe.results()

    for name in ("cosine", "cka"):
        np.testing.assert_allclose(report[name].values, expected[name].values, atol=1e-6)
        assert report[name].layers == expected[name].layers


@pytest.mark.light("vit classes")
@pytest.mark.parametrize("key", BRIDGED)
def test_a_bridge_gives_this_answer_too(key):
    expected = measured(model_of(key), key)
    report = measured(bridge(copy.deepcopy(model_of(key))), key)
    for name in ("cosine", "cka"):
        np.testing.assert_allclose(report[name].values, expected[name].values, atol=1e-5)
