"""A fine-tune that is killed goes on with the same bits; another run's file is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import SHORT, dropping, weights_of

KILLED = """
import signal, sys, time, torch
# A shell's background jobs are started deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
import tl_layersim as lsim
from tests.tiny_models import random_tokens, tiny_gpt2
from tests.training.helpers import dropping
from tl_layersim.core import resumable_file
from tl_layersim.training.fine_tuning_steps import FineTuning
resumable_file.SECONDS_BETWEEN_SAVES = 0
step = FineTuning._loss_and_gradients
# At the tenth step it waits to be killed.
FineTuning._loss_and_gradients = lambda self, n: (print(n, flush=True), time.sleep(120 if n == 10 else 0.05), step(self, n))[-1]
training = lsim.AlignedTraining(steps=30, lr=1e-2, eval_every=7, accumulation=2)
lsim.finetune_aligned(dropping(tiny_gpt2()), lsim.Data(random_tokens(20, 6), batch_size=2), training, checkpoint=sys.argv[1])
"""


class TestResume:
    def test_killed_and_started_again_gives_the_same_bits(self, tmp_path):
        training = lsim.AlignedTraining(steps=30, lr=1e-2, eval_every=7, accumulation=2)
        whole = dropping(tiny_gpt2())
        expected = lsim.finetune_aligned(whole, lsim.Data(random_tokens(20, 6), batch_size=2), training)
        for kill in (signal.SIGKILL, signal.SIGINT):
            path = tmp_path / f"{kill.name}.safetensors"
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", KILLED, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for line in process.stdout:
                if int(line) == 10:
                    break
            process.send_signal(kill)
            process.wait()
            assert path.exists()
            model = dropping(tiny_gpt2())
            steps = []
            again = _counting(model, training, path, steps)
            assert 0 < len(steps) < 30
            assert torch.equal(again.loss, expected.loss)
            assert torch.equal(again.values, expected.values)
            assert again.looks == expected.looks
            assert torch.equal(weights_of(model), weights_of(whole))

    def test_a_file_of_another_run_is_refused(self, tmp_path):
        path = tmp_path / "run.safetensors"
        tokens = random_tokens(20, 6)
        lsim.finetune_aligned(tiny_llama(), lsim.Data(tokens, batch_size=2), SHORT, checkpoint=path)
        others = [
            (tiny_llama(), random_tokens(20, 6, seed=1), SHORT, 2),
            (tiny_llama(), tokens, replace(SHORT, lr=1e-3), 2),
            (tiny_llama(), tokens, replace(SHORT, weights="uniform"), 2),
            (tiny_llama(), tokens, SHORT, 4),
        ]
        for model, data, training, batch_size in others:
            with pytest.raises(lsim.LayersimError, match="another run"):
                lsim.finetune_aligned(model, lsim.Data(data, batch_size=batch_size), training, checkpoint=path)
        model = tiny_llama()
        again = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), SHORT, checkpoint=path)
        assert len(again.loss) == 6

    def test_a_model_that_the_run_has_trained_is_told_apart(self, tmp_path):
        model, tokens, path = tiny_llama(), random_tokens(20, 6), tmp_path / "run.safetensors"
        lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), SHORT, checkpoint=path)
        with pytest.raises(lsim.LayersimError, match=r"`model`.*LlamaForCausalLM.*run\.safetensors"):
            lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), SHORT, checkpoint=path)

    def test_places_that_are_none_are_refused_at_once(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match=r"`checkpoint`.*no"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), SHORT, checkpoint=tmp_path / "no" / "x")
        with pytest.raises(lsim.LayersimError, match=r"`save_to`.*no"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, save_to=tmp_path / "no" / "x"))


def _counting(model, training, path, steps):
    from tl_layersim.training.fine_tuning_steps import FineTuning

    original = FineTuning._loss_and_gradients
    try:
        FineTuning._loss_and_gradients = lambda self, n: steps.append(n) or original(self, n)
        return lsim.finetune_aligned(model, lsim.Data(random_tokens(20, 6), batch_size=2), training, checkpoint=path)
    finally:
        FineTuning._loss_and_gradients = original
