"""Laws of every training objective that is discovered, and an objective added as one file."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.sources.hooks import eval_mode
from tl_layersim.training import objectives
from tl_layersim.training.objectives import OBJECTIVES, Objective
from tl_layersim.training.residual_stream import TrainingBatch, open_residual_stream

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..training.helpers import dropping, next_of, weights_of

NAMES = sorted(OBJECTIVES.all())
# Values of settings that are no numbers, other than the defaults.
WORDS = {"cosine_over": "attended"}
every_objective = pytest.mark.parametrize("name", NAMES)


def settings_of(name: str, **options) -> lsim.AlignedTraining:
    """Settings under which all terms of an objective are at work: its own numbers are 0.5, as far as they are numbers."""
    own_settings = [f for f in fields(lsim.AlignedTraining) if f.name in OBJECTIVES.named(name).own_settings]
    numbers = {f.name: 0.5 for f in own_settings if isinstance(f.default, float)}
    return lsim.AlignedTraining(**{"objective": name, "schedule": "always", "steps": 6, "lr": 1e-2, **numbers, **options})


def opened(name: str, model=None, **options) -> Objective:
    model = tiny_llama().double() if model is None else model
    return OBJECTIVES.named(name)(open_residual_stream(model), settings_of(name, **options))


def batch_of(tokens: torch.Tensor, attended: torch.Tensor | None = None) -> TrainingBatch:
    targets = next_of(tokens)
    if attended is None:
        return TrainingBatch(tokens, {}, targets, None)
    targets = targets.masked_fill(~attended, -100)
    targets[:, :-1] = targets[:, :-1].masked_fill(~attended[:, 1:], -100)
    return TrainingBatch(tokens, {"attention_mask": attended.long()}, targets, attended)


@every_objective
@pytest.mark.parametrize("schedule", ["alternating", "always"])
def test_a_loss_is_finite_and_a_sum_over_targets(name, schedule):
    tokens = random_tokens(6, 9)
    objective = opened(name, schedule=schedule)
    for step in range(2):
        whole = objective(batch_of(tokens), step)
        assert whole.dim() == 0
        assert bool(whole.isfinite())
        # CKA relates the rows of a forward pass to each other.
        for sizes in ([1] * 6, [2, 4], [5, 1]) if name != "cka-reg" else ():
            parts = sum(objective(batch_of(rows), step) for rows in tokens.split(sizes))
            torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


@every_objective
def test_gradients_reach_all_that_is_trained(name):
    objective = opened(name)
    for step in range(3):
        objective(batch_of(random_tokens(3, 9)), step).backward()
    own_parameters = set(objective.trained_parameters()) - {f"module.{key}" for key, _ in objective.module.named_parameters()}

    assert bool(own_parameters) == objective.has_own_parameters
    for key, parameter in objective.trained_parameters().items():
        assert parameter.grad is not None, key
        assert bool(parameter.grad.isfinite().all()), key
        assert float(parameter.grad.abs().max()) > 0, key


@every_objective
def test_parameters_without_gradient_stay_as_they_are(name):
    model = tiny_llama().double()
    for parameter in model.model.embed_tokens.parameters():
        parameter.requires_grad_(False)
    objective = opened(name, model)
    objective(batch_of(random_tokens(3, 9)), 1).backward()

    assert not any("embed_tokens" in key for key in objective.trained_parameters())
    assert model.model.embed_tokens.weight.grad is None


@every_objective
def test_padding_changes_nothing(name):
    tokens = random_tokens(3, 6)
    # Another seed: what stands at padded positions must not matter.
    padded = torch.cat([tokens, random_tokens(3, 4, seed=1)], 1)
    attended = torch.arange(10).expand(3, 10) < 6
    plain = opened(name)
    wide = opened(name)
    for step in range(2):
        loss = plain(batch_of(tokens), step)
        padded_loss = wide(batch_of(padded, attended), step)
        torch.testing.assert_close(padded_loss, loss, rtol=1e-9, atol=0)
        loss.backward()
        padded_loss.backward()

    for a, b in zip(plain.trained_parameters().values(), wide.trained_parameters().values(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(plain.evaluate(batch_of(tokens)), wide.evaluate(batch_of(padded, attended)), rtol=1e-6, atol=0)


@every_objective
def test_evaluation_has_a_row_of_sums_for_each_layer(name):
    objective = opened(name)
    tokens = random_tokens(6, 9)

    with eval_mode(objective.module):
        whole = objective.evaluate(batch_of(tokens))
        parts = sum(objective.evaluate(batch_of(rows)) for rows in tokens.split([1, 5]))

    assert whole.shape == (3, 3)
    assert whole.dtype == torch.float64
    assert whole[2].tolist() == [48] * 3
    assert not whole.requires_grad
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)


@pytest.mark.light("aligned", "standard")
@every_objective
def test_a_resumed_training_has_the_same_bits(name, tmp_path, monkeypatch):
    training = settings_of(name, schedule="alternating", eval_every=4)
    data = random_tokens(12, 6)
    expected_model = dropping(tiny_gpt2())
    resumed_model = dropping(tiny_gpt2())
    expected = lsim.finetune_aligned(expected_model, lsim.Data(data, batch_size=2), training)
    plain = Objective.forward
    path = tmp_path / "run"

    def interrupted(self, batch, step, run=None):
        if step == 3:
            raise KeyboardInterrupt
        return plain(self, batch, step, run)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lsim.finetune_aligned(dropping(tiny_gpt2()), lsim.Data(data, batch_size=2), training, checkpoint=path)
    steps = []
    monkeypatch.setattr(
        Objective, "forward", lambda self, batch, step, run=None: steps.append(step) or plain(self, batch, step, run)
    )
    resumed = lsim.finetune_aligned(resumed_model, lsim.Data(data, batch_size=2), training, checkpoint=path)
    assert steps == [3, 4, 5]
    assert all(torch.equal(getattr(resumed, key), getattr(expected, key)) for key in expected.tensor_fields())
    assert torch.equal(weights_of(resumed_model), weights_of(expected_model))


@every_objective
def test_mixed_precision_is_finite_and_near_float32(name):
    tokens = random_tokens(4, 9)
    losses = []
    for enabled in (False, True):
        objective = opened(name, tiny_llama())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = objective(batch_of(tokens), 1)
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for p in objective.trained_parameters().values())
        losses.append(loss.detach())

    assert all(bool(loss.isfinite()) for loss in losses)
    torch.testing.assert_close(losses[1].float(), losses[0].float(), rtol=0.05, atol=0.05)


@every_objective
def test_settings_of_other_objectives_are_refused(name):
    mine = OBJECTIVES.named(name).own_settings
    foreign = {setting for cls in OBJECTIVES.all().values() for setting in cls.own_settings} - set(mine)
    for setting in foreign:
        with pytest.raises(lsim.LayersimError, match=rf"`{setting}`.*objective='{name}'"):
            lsim.AlignedTraining(objective=name, **{setting: WORDS.get(setting, 2)})
    for setting in set(mine) - set(WORDS):
        with pytest.raises(lsim.LayersimError, match=f"`{setting}`.* -1,"):
            lsim.AlignedTraining(objective=name, **{setting: -1})


def test_an_unknown_objective_is_refused_with_the_list_of_those_that_exist():
    with pytest.raises(lsim.LayersimError, match=r"`objective`.*alined") as caught:
        lsim.AlignedTraining(objective="alined")
    assert all(name in str(caught.value) for name in NAMES)


NEW_FILE = '''
"""The mean square of the last layer's normed residual, beside its loss."""

from . import Objective


class SmallObjective(Objective):
    """The last layer's loss, and the size of what the head reads at the targets."""

    name = "small"

    def loss(self, batch, step, run):
        rows, targets = self.stream.at_targets(batch, self.residuals(batch, run), self.norms_every_layer)
        last = {self.stream.n_layers: rows[self.stream.n_layers]}
        loss = self.stream.weighted(last, targets, {self.stream.n_layers: 1.0})
        return loss + last[self.stream.n_layers].square().mean(-1).sum()
'''


@pytest.fixture
def new_objective(tmp_path, monkeypatch):
    """An objective that is one file and nothing else."""
    folder = tmp_path / "objectives"
    folder.mkdir()
    (folder / "small.py").write_text(NEW_FILE)
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(folder)])
    importlib.invalidate_caches()
    yield "small"
    sys.modules.pop(f"{objectives.__name__}.small", None)


def test_an_objective_is_added_by_one_file(new_objective, tmp_path):
    model = tiny_llama().double()
    tokens = random_tokens(12, 6)
    training = lsim.AlignedTraining(objective=new_objective, steps=6, lr=1e-2, schedule="always", save_to=tmp_path / "model")
    result = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=4), training)

    assert result.loss[-1] < result.loss[0]
    assert result.provenance.options["objective"] == new_objective

    lsim.AlignedTraining(objective=new_objective)
    with pytest.raises(lsim.LayersimError, match=r"\bsmall\b"):
        lsim.AlignedTraining(objective="smal")
