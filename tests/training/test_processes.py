"""A fine-tune in several processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama
from .helpers import weights_of

RANKS = """
import sys, torch
import tl_layersim as lsim
from tests.tiny_models import random_tokens, tiny_llama
model = tiny_llama().double()
training = lsim.AlignedTraining(steps=4, lr=1e-2, accumulation=2, layers_per_step=int(sys.argv[2]) or None)
rows = [{"input_ids": r[: 3 + i % 5].tolist()} for i, r in enumerate(random_tokens(40, 8))]
result = lsim.finetune_aligned(model, lsim.Data(rows, batch_size=2), training)
if int(__import__("os").environ["RANK"]) == 0:
    torch.save({"loss": result.loss, "held": result.values, "w": torch.cat([p.detach().flatten() for p in model.parameters()])},
               sys.argv[1])
"""


@pytest.mark.parametrize("drawn", [0, 1])
def test_two_processes_are_one_with_twice_the_batch(tmp_path, drawn):
    import os
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "ranks.pt"
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    processes = []
    for rank in range(2):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.getcwd()}  # fmt: skip
        command = [sys.executable, "-W", "ignore", str(script), str(out), str(drawn)]
        processes.append(subprocess.Popen(command, env=os.environ | world, stderr=subprocess.PIPE))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), errors
    found = torch.load(out, weights_only=True)
    model = tiny_llama().double()
    training = lsim.AlignedTraining(steps=4, lr=1e-2, accumulation=2, layers_per_step=drawn or None)
    rows = [{"input_ids": r[: 3 + i % 5].tolist()} for i, r in enumerate(random_tokens(40, 8))]
    result = lsim.finetune_aligned(model, lsim.Data(rows, batch_size=4), training)
    torch.testing.assert_close(found["loss"], result.loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(found["held"], result.values, rtol=1e-9, atol=0)
    torch.testing.assert_close(found["w"], weights_of(model), rtol=1e-6, atol=1e-9)
