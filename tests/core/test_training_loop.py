"""The one training loop: steps, saves, interrupts and divergence, on a training that is a sum of numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tl_layersim.core import resumable_file
from tl_layersim.core.errors import LayersimError
from tl_layersim.core.resumable_file import ResumableFile
from tl_layersim.core.training_loop import Descent, Shuffle, TrainingSteps, run_steps


class Summing(TrainingSteps):
    """Adds the numbers 0, 1, 2, ...; `stop` is called at a step."""

    title = "sum"

    def __init__(self, steps=6, stop=(), at=-1, group=1):
        self.steps, self.stop, self.at, self.group = steps, stop, at, group
        self.total, self.made, self.finished, self.computed = 0.0, 0, False, []

    @property
    def step(self):
        return self.made

    def compute(self):
        steps = range(self.made, min(self.made + self.group, self.steps))
        self.computed += steps
        if self.at in steps and self.stop:
            raise self.stop
        return [math.nan if self.at == step else float(step) for step in steps]

    def apply(self):
        numbers = range(self.made, min(self.made + self.group, self.steps))
        self.total, self.made = self.total + sum(numbers), self.made + len(numbers)

    def on_divergence(self, losses):
        raise LayersimError(f"The loss is {losses[0]}.")

    def snapshot(self):
        return {"made": self.made}, {"total": torch.tensor(self.total)}

    def finish(self):
        self.finished = True

    def restore(self, file):
        self.made, self.total = file.resume(lambda notes, tensors: (notes["made"], float(tensors["total"]))) or (0, 0.0)
        return self


@pytest.mark.parametrize("group", [1, 4])
def test_all_steps_are_made_once(group):
    training = Summing(group=group)
    run_steps(training, ResumableFile(None, "training"))
    assert (training.total, training.computed, training.finished) == (15.0, list(range(6)), True)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ValueError("x")])
def test_an_interrupt_saves_the_last_whole_step_and_says_where_to_resume(stop, tmp_path, capsys):
    file = ResumableFile(tmp_path / "run", "training", {})
    with pytest.raises(type(stop)) as caught:
        run_steps(Summing(stop=stop, at=4), file)

    note = f"The training up to step 4 of 6 is in {file.path}; the same call continues from there."
    assert caught.value.__notes__[-1] == note

    resumed = Summing().restore(file)
    run_steps(resumed, file)
    assert (resumed.total, resumed.computed) == (15.0, [4, 5])
    assert "continues after step 4 of 6" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_a_training_before_its_step(tmp_path):
    training = Summing(at=3)
    with pytest.raises(LayersimError, match="The loss is nan"):
        run_steps(training, ResumableFile(None, "training"))
    assert (training.made, training.finished) == (3, False)


def test_a_training_may_record_its_end_in_place_of_raising():
    training = Summing(at=3)
    training.on_divergence = lambda losses: None
    run_steps(training, ResumableFile(None, "training"))
    assert (training.made, training.finished) == (3, True)


def test_the_state_is_saved_when_that_is_due_and_by_the_leading_process_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "SECONDS_BETWEEN_SAVES", 0)
    monkeypatch.setattr(resumable_file, "SAVE_SPACING", 0)
    for leads in (True, False):
        file = ResumableFile(tmp_path / str(leads), "training", {})
        training = Summing()
        saved_steps = []
        training.leads = leads
        plain = file.write
        monkeypatch.setattr(
            file,
            "write",
            lambda *arguments, plain=plain, saved_steps=saved_steps: (
                saved_steps.append(arguments[0]["made"]) or plain(*arguments)
            ),
        )
        run_steps(training, file)
        assert saved_steps == ([1, 2, 3, 4, 5, 6] if leads else [])


class Settings:
    steps = 8
    clip = 0.5

    def rate(self, step):
        return 0.1 / (step + 1)


OPTIMISERS = {
    ("step", "exp_avg", "exp_avg_sq"): torch.optim.AdamW,
    ("momentum_buffer",): lambda parts, lr: torch.optim.SGD(parts, lr=lr, momentum=0.9, nesterov=True),
}
every_optimiser = pytest.mark.parametrize("moments", OPTIMISERS, ids="-".join)


class Fitting(Descent):
    """Fits a product of two parameters to a number that depends on the step; a third one has no gradient."""

    def __init__(self, moments):
        self.moments = moments
        parameters = {name: torch.nn.Parameter(torch.full((2,), size)) for name, size in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
        super().__init__("fit", parameters, OPTIMISERS[moments](list(parameters.values()), lr=1.0), Settings())

    def loss_and_gradients(self):
        a, b, _ = self.parameters.values()
        loss = ((a * b - torch.tensor([self.step, 7.0])) ** 2).sum()
        loss.backward()
        return float(loss.detach())

    def on_divergence(self, losses):
        raise LayersimError(f"The loss is {losses[0]}.")

    def snapshot(self):
        return ({}, self.tensors() | {"curve": torch.tensor(self.curve)}) if self.consistent else None


@every_optimiser
def test_a_descent_is_the_optimiser_by_hand(moments):
    descent = Fitting(moments)
    by_hand = Fitting(moments)
    run_steps(descent, ResumableFile(None, "training"))
    for step in range(8):
        a, b, _ = by_hand.parameters.values()
        loss = ((a * b - torch.tensor([step, 7.0])) ** 2).sum()
        assert descent.curve[step] == float(loss.detach())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(by_hand.parameters.values()), 0.5)
        by_hand.optimiser.param_groups[0]["lr"] = 0.1 / (step + 1)
        by_hand.optimiser.step()
        by_hand.optimiser.zero_grad()

    assert all(torch.equal(descent.parameters[name], by_hand.parameters[name]) for name in "abc")
    assert all(parameter.grad is None for parameter in descent.parameters.values())


@every_optimiser
def test_a_descent_goes_on_from_its_tensors_with_the_same_bits(moments):
    whole = Fitting(moments)
    first = Fitting(moments)
    second = Fitting(moments)
    run_steps(whole, ResumableFile(None, "training"))
    first.steps = 3
    run_steps(first, ResumableFile(None, "training"))
    tensors = {name: value.clone() for name, value in first.tensors().items()}

    assert set(tensors) == {"weight/a", "weight/b", "weight/c"} | {f"{kind}/{name}" for kind in moments for name in "ab"}

    second.load(tensors)
    second.curve = list(first.curve)
    run_steps(second, ResumableFile(None, "training"))
    assert second.curve == whole.curve
    assert all(torch.equal(second.parameters[name], whole.parameters[name]) for name in "abc")


def test_nothing_is_saved_in_the_middle_of_an_optimiser_step(monkeypatch, tmp_path):
    descent = Fitting(("momentum_buffer",))
    monkeypatch.setattr(descent.optimiser, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_steps(descent, ResumableFile(tmp_path / "run", "training", {}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [0, 3])
def test_a_shuffle_is_a_permutation_of_its_own_each_epoch(seed):
    shuffle = Shuffle(7, seed)
    rows = [shuffle.row(place) for place in range(35)]
    epochs = [rows[start : start + 7] for start in range(0, 35, 7)]

    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    for number, epoch in enumerate(epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        assert epoch == torch.randperm(7, generator=generator).tolist()
    # In any order of asking.
    assert [Shuffle(7, seed).row(place) for place in (30, 2, 9)] == [rows[place] for place in (30, 2, 9)]
