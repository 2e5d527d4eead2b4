"""MLPs, whose rows are single vectors: predictions by layer, stitching, training and couplings, written out by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.wrapped_models import nnsight
from ..running.options import called
from .family_cases import CASES, model_of

CASE = CASES["mlp"]


def mlp(seed: int = 0):
    return copy.deepcopy(model_of("mlp", seed)).double()


def vectors() -> dict[str, torch.Tensor]:
    return {"x": CASE.data()["x"].double(), "labels": CASE.targets()}


def logits_by_layer(model, x) -> list[torch.Tensor]:
    """The head after each block, by hand."""
    logits = []
    with torch.no_grad():
        hidden = model.embed(x)
        for step in model.steps:
            hidden = step(hidden)
            logits.append(model.classes(hidden))
    return logits


@pytest.mark.parametrize("wrap", [lambda model: model, nnsight], ids=["module", "nnsight"])
def test_predictions_by_layer(wrap):
    data = vectors()
    model = mlp()
    lens = called(lsim.analyze, wrap(model), data, lsim.LogitLens(labels="data"), batch_size=4, **CASE.named_head)["logit_lens"]

    for layer, logits in enumerate(logits_by_layer(mlp(), data["x"])):
        expected = float(torch.nn.functional.cross_entropy(logits, data["labels"]))
        assert float(lens.cross_entropy[layer]) == pytest.approx(expected, abs=1e-12)
        assert float(lens.accuracy[layer]) == pytest.approx(float((logits.argmax(1) == data["labels"]).double().mean()))
    with pytest.raises(lsim.LayersimError, match=r"classes\(.* \d.*unembed="):
        lsim.analyze(
            lsim.open_model(wrap(mlp()), layers=list(CASE.layers), unembed=["steps.0", "classes"]),
            data,
            lsim.LogitLens(labels="data"),
        )


def test_probe_of_a_loop():
    data = vectors()
    with (
        torch.no_grad(),
        called(lsim.attach, mlp(), [lsim.Saturation(), lsim.Cosine(center="none")], **CASE.named_head) as probe,
    ):
        model = probe._source.module
        model(data["x"])
    predicted = torch.stack([logits.argmax(1) for logits in logits_by_layer(mlp(), data["x"])])
    first = [int((predicted[:, n] == predicted[-1, n]).int().argmax()) for n in range(6)]

    assert probe.results()["saturation"].counts.tolist() == [first.count(layer) for layer in range(2)]


def test_a_stitched_model_is_the_front_below_and_the_back_above():
    data = vectors()
    front = mlp()
    back = mlp(1)
    layers = list(CASE.layers)
    stitched = lsim.stitch(
        lsim.open_model(front, layers=layers),
        lsim.open_model(back, layers=layers),
        data,
        at=(0, 0),
        adapter="identity",
        labels="data",
        eval_data=data,
    )
    with torch.no_grad():
        hidden = front.steps[0](front.embed(data["x"]))
        logits = back.classes(back.steps[1](hidden))
    expected = float(torch.nn.functional.cross_entropy(logits, data["labels"]))

    assert stitched.loss == pytest.approx(expected, abs=1e-9)

    with torch.no_grad():
        expected_of_back = float(torch.nn.functional.cross_entropy(back(data["x"]), data["labels"]))
    assert stitched.back_loss == pytest.approx(expected_of_back, abs=1e-9)


def test_training_starts_from_the_losses_of_the_layers():
    data = vectors()
    expected = [float(torch.nn.functional.cross_entropy(x, data["labels"])) for x in logits_by_layer(mlp(), data["x"])]

    training = lsim.AlignedTraining(steps=1)
    result = called(
        lsim.finetune_aligned, mlp(), data, training, labels="data", eval_data=data, batch_size=3, **CASE.named_head
    )

    np.testing.assert_allclose(result.values[0], expected, atol=1e-9)


def test_coupling_of_blocks_is_that_of_their_jacobians():
    data = {"x": vectors()["x"][:1]}
    model = mlp()
    result = lsim.analyze(lsim.open_model(model, layers=list(CASE.layers)), data, lsim.BlockCoupling(k=2, method="dense"))[
        "block_coupling"
    ]
    hidden = model.embed(data["x"][0]).detach()

    for layer, step in enumerate(model.steps):
        jacobian = torch.autograd.functional.jacobian(step, hidden[None]).reshape(16, 16) - torch.eye(16, dtype=torch.float64)
        expected = torch.linalg.svdvals(jacobian)
        torch.testing.assert_close(
            result.singular_values[layer], expected[: result.singular_values.shape[1]], rtol=1e-5, atol=1e-7
        )
        hidden = step(hidden[None])[0].detach()
