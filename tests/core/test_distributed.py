"""A run in several processes."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.processes import run_in_group
from ..running.runs import cosine_and_cka

pytestmark = pytest.mark.heavy("several processes")

SCRIPT = """
import sys
import torch.distributed as dist
import tl_layersim as lsim
from tests.models.tiny_models import random_tokens, tiny_llama
dist.init_process_group("gloo")
data = list(random_tokens(4, 11))
report = lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=2), [lsim.Cosine(), lsim.CKA(minibatch=16)])
report.save(f"{sys.argv[1]}/{dist.get_rank()}.safetensors")
# 67 batches: the first of two ranks has coarser blocks than the second, which has fewer batches.
data = list(random_tokens(67, 6))
report = lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=1), [lsim.LogitLens()], intervals=True)
report.save(f"{sys.argv[1]}/{dist.get_rank()}.blocks.safetensors")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_give_what_one_gives(ranks, tmp_path):
    """Three ranks and two batches: one of them has nothing to add."""
    run_in_group(SCRIPT, ranks, str(tmp_path))
    alone = lsim.analyze(tiny_llama(), lsim.Data(list(random_tokens(4, 11)), batch_size=2), cosine_and_cka())
    for rank in range(ranks):
        report = lsim.load(tmp_path / f"{rank}.safetensors")
        for name in ("cosine", "cka"):
            assert worst(report[name], alone[name]) < 1e-12
            assert report[name].provenance.tokens == 44
        blocks = lsim.load(tmp_path / f"{rank}.blocks.safetensors")["logit_lens"]
        # Blocks of consecutive batches, however the ranks share them: 34 and 33 batches, or 23, 22 and 22.
        size = {2: 4, 3: 3}[ranks]
        whole = list(random_tokens(67, 6))
        assert blocks.block_tokens == (6 * size,) * (67 // size) + (6 * (67 % size),)
        without = lsim.analyze(tiny_llama(), lsim.Data(whole[:size] + whole[2 * size :], batch_size=1), [lsim.LogitLens()])[
            "logit_lens"
        ]
        assert worst(blocks.replicates[1], without) < 1e-9
