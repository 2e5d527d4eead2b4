"""The sums that an evaluation of training is made of, against naive float64 code, and what is differentiable in the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training import losses
from tl_layersim.training.objectives import OBJECTIVES
from tl_layersim.training.residual_stream import TrainingBatch, open_residual_stream

from .. import oracles
from ..models.tiny_models import hidden_states, random_tokens, tiny_llama


@pytest.mark.parametrize("norm", ["final", "none"])
@pytest.mark.parametrize("objective", ["aligned", "multi-head"])
def test_evaluation_sums_losses_hits_and_answers_of_each_layer(norm, objective, monkeypatch):
    # Four chunks of at most seven tokens.
    monkeypatch.setattr(losses, "LOGITS", 700)
    model = tiny_llama().double()
    tokens = random_tokens(3, 9)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, 2] = -100
    training = lsim.AlignedTraining(objective=objective, norm=norm, schedule="always")
    cls = OBJECTIVES.named(objective)
    terms = cls(open_residual_stream(model), training).evaluate(TrainingBatch(tokens, {}, targets, None))
    head = model.lm_head.weight.detach().numpy()
    gain = model.model.norm.weight.detach().numpy()
    expected = np.zeros((3, 3))
    for row, answers in zip(tokens, targets.tolist(), strict=True):
        states = hidden_states(model, row)[1:]
        for layer, x in enumerate(states):
            if norm == "final" or layer == 2:
                x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * gain
            for position, answer in enumerate(answers):
                if answer != -100:
                    p = oracles.softmax(head @ x[position])
                    expected[:, layer] += [-np.log(p[answer]), p.argmax() == answer, 1]

    assert expected[2].tolist() == [23, 23, 23]
    np.testing.assert_allclose(terms, expected, rtol=1e-6)


def test_the_divergence_has_gradients_that_can_be_asked_for():
    """As `torch.autograd.grad` does, which is not the same as `backward` where logits are made again."""
    objective = OBJECTIVES.named("multi-head")(
        open_residual_stream(tiny_llama().double()), lsim.AlignedTraining(objective="multi-head", kl=1.0)
    )
    torch.manual_seed(0)
    last, x = (torch.randn(5, 32).double().requires_grad_() for _ in range(2))
    head = objective.head_of(1)
    weight = head.weight
    gradients_found = torch.autograd.grad(objective._divergence(last, x, head), (x, weight, last), allow_unused=True)

    assert gradients_found[2] is None

    # KL(p || q) of the last layer's p, q of this layer: its gradient by this layer's logits is q - p.
    p, q = ((z @ w.T).softmax(-1).detach() for z, w in ((last, objective.stream.unembed.linear.weight), (x, weight)))
    torch.testing.assert_close(gradients_found[0], (q - p) @ weight.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients_found[1], (q - p).T @ x.detach(), rtol=1e-9, atol=1e-12)
