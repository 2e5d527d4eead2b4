"""Optimiser steps: resume after an interrupt, accumulation, mixed precision, several processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core.resumable_file import ResumableFile
from tl_layersim.training.adapter_training import AdapterSteps
from tl_layersim.training.finetune import FineTuning
from tl_layersim.training.objectives import Objective

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..running.processes import kill_when, run_in_group, started
from .helpers import SHORT, Stop, cut_after, dropping, equal, traced, train, weights_of

ROWS = lsim.Data(random_tokens(20, 6), batch_size=2)
LONG = lsim.AlignedTraining(steps=30, lr=1e-2, eval_every=7, accumulation=2)

KILLED = """
import sys, time
from tests.training import test_steps as here
from tl_layersim.core import resumable_file
resumable_file.SECONDS_BETWEEN_SAVES = 0
plain = here.FineTuning.loss_and_gradients

def waiting(self):
    # At the tenth step it waits to be killed.
    if self.step == 10:
        open(sys.argv[2], "x")
        time.sleep(3600)
    return plain(self)

here.FineTuning.loss_and_gradients = waiting
here.lsim.finetune_aligned(here.dropping(here.tiny_gpt2()), here.ROWS, here.LONG, checkpoint=sys.argv[1])
"""


def counted(monkeypatch, stop=None):
    """Numbers of the steps that fine-tunes make from now on; step `stop` is an interrupt."""
    steps = []
    plain = FineTuning.loss_and_gradients

    def counting(self):
        if self.step == stop:
            raise KeyboardInterrupt
        steps.append(self.step)
        return plain(self)

    monkeypatch.setattr(FineTuning, "loss_and_gradients", counting)
    return steps


class TestResume:
    @pytest.mark.heavy("a killed process")
    def test_a_killed_process(self, tmp_path, monkeypatch):
        path = tmp_path / "run.safetensors"
        whole = dropping(tiny_gpt2())
        model = dropping(tiny_gpt2())

        expected = lsim.finetune_aligned(whole, ROWS, LONG)
        kill_when(tmp_path / "waits", started(KILLED, str(path), str(tmp_path / "waits")))
        steps = counted(monkeypatch)
        resumed = lsim.finetune_aligned(model, ROWS, LONG, checkpoint=path)

        assert 0 < len(steps) < 30
        assert torch.equal(resumed.loss, expected.loss)
        assert torch.equal(resumed.values, expected.values)
        assert resumed.looks == expected.looks
        assert torch.equal(weights_of(model), weights_of(whole))

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("what", ["lora", "multi-head", "bf16"])
    def test_an_interrupt(self, what, tmp_path, monkeypatch):
        settings = {"objective": "multi-head"} if what == "multi-head" else {"mixed_precision": "bf16"}
        if what == "lora":
            peft = pytest.importorskip("peft")
            config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
            settings = {"lora": config, "lr": 0.05}
        training = replace(SHORT, **settings)
        path = tmp_path / "run.safetensors"
        whole = tiny_llama()
        model = tiny_llama()

        expected = lsim.finetune_aligned(whole, ROWS, training)
        with monkeypatch.context() as patch:
            counted(patch, stop=3)
            with pytest.raises(KeyboardInterrupt) as caught:
                lsim.finetune_aligned(model, ROWS, training, checkpoint=path)

        assert str(path) in caught.value.__notes__[-1]
        # Adapters are taken out again.
        assert torch.equal(weights_of(model), weights_of(tiny_llama())) == (what == "lora")

        steps = counted(monkeypatch)
        model = tiny_llama()
        for _ in range(2):
            # The second call finds a finished run.
            resumed = lsim.finetune_aligned(tiny_llama() if steps else model, ROWS, training, checkpoint=path)
            assert steps == [3, 4, 5]
            assert torch.equal(resumed.loss, expected.loss)
            assert torch.equal(resumed.values, expected.values)
            assert what != "multi-head" or resumed.heads.digest == expected.heads.digest
        assert torch.equal(weights_of(model), weights_of(whole))

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.filterwarnings("ignore:On held-out data the aligned loss rose")
    @pytest.mark.parametrize("count", [0, 1, 3])
    @pytest.mark.parametrize("killed", [False, True])
    def test_adapters(self, count, killed, tmp_path, monkeypatch):
        path = tmp_path / "run.ckpt"
        calm = train(traced())
        with monkeypatch.context() as patch:
            if killed:
                # As it stands on disk when the power goes: what is saved on the way out is not there.
                patch.setattr(ResumableFile, "due", True)
                plain = ResumableFile.write
                dead = []
                patch.setattr(ResumableFile, "write", lambda self, *a: bool(dead) or plain(self, *a))
                cut_after(count, patch, lambda: dead.append(1))
            else:
                cut_after(count, patch)
            with pytest.raises(Stop) as caught:
                train(traced(), checkpoint=path)

        assert path.exists() == (count > 0)
        assert bool(getattr(caught.value, "__notes__", [])) == (count > 0)

        items = []
        plain = AdapterSteps._item
        monkeypatch.setattr(AdapterSteps, "_item", lambda self, *a: items.extend(a[2:3]) or plain(self, *a))
        assert equal(train(traced(), checkpoint=path), calm)
        assert set(items) == set(range(count + 1, 5))
        assert equal(train(traced(), checkpoint=path), calm)
        with pytest.raises(lsim.LayersimError, match="another"):
            train(traced(), checkpoint=path, lr=0.1)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_another_run_is_refused(self, tmp_path):
        path = tmp_path / "run.safetensors"
        model = tiny_llama()

        lsim.finetune_aligned(model, ROWS, SHORT, checkpoint=path)
        runs = [
            (lsim.Data(random_tokens(20, 6, seed=1), batch_size=2), SHORT),
            (ROWS, replace(SHORT, lr=1e-3)),
            (ROWS, replace(SHORT, weights="uniform")),
            (lsim.Data(ROWS.source, batch_size=4), SHORT),
        ]

        for data, training in runs:
            with pytest.raises(lsim.LayersimError, match="another run"):
                lsim.finetune_aligned(tiny_llama(), data, training, checkpoint=path)
        # The model that the run has trained.
        with pytest.raises(lsim.LayersimError, match=r"`model`.*run\.safetensors"):
            lsim.finetune_aligned(model, ROWS, SHORT, checkpoint=path)

    def test_places_that_are_none_are_refused_at_once(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match=r"`checkpoint`.*no"):
            lsim.finetune_aligned(tiny_llama(), ROWS, SHORT, checkpoint=tmp_path / "no" / "x")
        with pytest.raises(lsim.LayersimError, match=r"`save_to`.*no"):
            lsim.finetune_aligned(tiny_llama(), ROWS, replace(SHORT, save_to=tmp_path / "no" / "x"))


def test_steps_are_the_optimisers_whatever_is_accumulated(monkeypatch):
    steps = []
    plain = Objective.forward
    monkeypatch.setattr(
        Objective, "forward", lambda self, batch, step, run=None: steps.append(step) or plain(self, batch, step, run)
    )

    lsim.finetune_aligned(tiny_llama(), ROWS, lsim.AlignedTraining(steps=3, accumulation=4, lr=1e-3))

    assert steps == [0] * 4 + [1] * 4 + [2] * 4


def test_accumulation_is_one_larger_batch():
    """Rows of different lengths: tokens count alike, not batches."""
    rows = [random_tokens(1, n, seed=n)[0].tolist() for n in (3, 9, 4, 12, 5, 6, 3, 20, 8, 4, 6, 7)]
    data = [{"input_ids": row} for row in rows]
    runs = []

    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = tiny_llama().double()
        training = lsim.AlignedTraining(steps=4, lr=1e-2, accumulation=accumulation)
        result = lsim.finetune_aligned(model, lsim.Data(data, batch_size=batch_size), training)
        runs.append((result.loss, weights_of(model)))

    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-9, atol=0)
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-7, atol=1e-9)


def test_bfloat16_is_near_float32():
    losses = [lsim.finetune_aligned(tiny_llama(), ROWS, replace(SHORT, mixed_precision=how)).loss for how in ("no", "bf16")]
    assert not torch.equal(*losses)
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.05)


def ranked(drawn: int, batch_size: int) -> dict[str, torch.Tensor]:
    """A fine-tune on rows of different lengths, with layers drawn at random if `drawn` is 1."""
    model = tiny_llama().double()
    training = lsim.AlignedTraining(steps=4, lr=1e-2, accumulation=2, layers_per_step=drawn or None)
    rows = [{"input_ids": row[: 3 + i % 5].tolist()} for i, row in enumerate(random_tokens(40, 8))]
    result = lsim.finetune_aligned(model, lsim.Data(rows, batch_size=batch_size), training)
    return {"loss": result.loss, "held": result.values, "weights": weights_of(model)}


RANKS = """
import os, sys, torch
from tests.training.test_steps import ranked
found = [ranked(drawn, 2) for drawn in (0, 1)]
if os.environ["RANK"] == "0":
    torch.save(found, sys.argv[1])
"""


@pytest.mark.heavy("several processes")
def test_two_processes_are_one_with_twice_the_batch(tmp_path):
    out = tmp_path / "ranks.pt"
    run_in_group(RANKS, 2, str(out), ACCELERATE_USE_CPU="true")
    for drawn, run_state in enumerate(torch.load(out, weights_only=True)):
        single = ranked(drawn, 4)
        torch.testing.assert_close(run_state["loss"], single["loss"], rtol=1e-9, atol=0)
        torch.testing.assert_close(run_state["held"], single["held"], rtol=1e-9, atol=0)
        torch.testing.assert_close(run_state["weights"], single["weights"], rtol=1e-6, atol=1e-9)
