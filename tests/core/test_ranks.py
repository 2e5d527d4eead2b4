"""Ranks of a group that have other inputs than each other, and ranks that fail: all ranks raise an error, and none waits."""

from __future__ import annotations

import json

import pytest

from ..running.processes import run_in_group

pytestmark = pytest.mark.heavy("several processes")

SCRIPT = """
import json, sys, warnings
import torch
import torch.distributed as dist
import tl_layersim as lsim
from tl_layersim.core.distributed import OtherRankFailed
from tests.models.tiny_models import random_tokens, tiny_llama

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
odd = rank == dist.get_world_size() - 1


def shuffled():
    return lsim.Data(random_tokens(9, 6)[torch.randperm(9, generator=torch.Generator().manual_seed(rank))], batch_size=1)


def rows(count=9, **options):
    return lsim.Data(random_tokens(count, 6), batch_size=1, **options)


def labelled(seed):
    return lsim.Data({"input_ids": random_tokens(9, 6), "labels": random_tokens(9, 6, seed=5 + seed)}, batch_size=1)


def grouped(first):
    # Two rows of one text, which begin at another row on the last rank.
    documents = [row - (row == first + 1) for row in range(9)]
    return lsim.Data({"input_ids": random_tokens(9, 6), "document": documents}, batch_size=1, groups="document")


def hooked():
    model = tiny_llama()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * (2 if odd else 3))
    return model


def broken(after):
    model, calls = tiny_llama(), []

    def fail(module, args, output):
        calls.append(1)
        if odd and len(calls) > after:
            raise OSError("the disk is gone")

    model.model.layers[0].mlp.register_forward_hook(fail)
    return model


def stream(count):
    yield from random_tokens(count, 6)
    if odd:
        raise OSError("the stream ended")


CENTRED, PLAIN = lsim.Cosine(), lsim.Cosine(center="none")
CASES = {
    "order of rows": lambda: lsim.analyze(tiny_llama(), shuffled(), CENTRED),
    "number of rows": lambda: lsim.analyze(tiny_llama(), rows(7 if odd else 9), PLAIN),
    "no rows": lambda: lsim.analyze(tiny_llama(), lsim.Data(random_tokens(9, 6)[: 0 if odd else 9]), PLAIN),
    "labels": lambda: lsim.analyze(tiny_llama(), labelled(int(odd)), lsim.LogitLens(labels="data")),
    "groups": lambda: lsim.analyze(tiny_llama(), grouped(4 * odd), PLAIN),
    "positions": lambda: lsim.analyze(tiny_llama(), rows(positions="last" if odd else "first"), PLAIN),
    "weights": lambda: lsim.analyze(tiny_llama(seed=int(odd)), rows(), PLAIN),
    "blocks": lambda: lsim.analyze(tiny_llama(layers=2 if odd else 3), rows(), PLAIN),
    "dtype": lambda: lsim.analyze(tiny_llama(dtype=torch.float64 if odd else torch.float32), rows(), PLAIN),
    "hook": lambda: lsim.analyze(hooked(), rows(), PLAIN),
    "options": lambda: lsim.analyze(tiny_llama(), rows(), lsim.CKA(minibatch=4 if odd else 8)),
    "analyzers": lambda: lsim.analyze(tiny_llama(), rows(), PLAIN if odd else lsim.Saturation()),
    "intervals": lambda: lsim.analyze(tiny_llama(), rows(), PLAIN, intervals=odd),
    "no analyzers": lambda: lsim.analyze(tiny_llama(), rows(), [] if odd else PLAIN),
    "no model": lambda: lsim.analyze(None if odd else tiny_llama(), rows(), PLAIN),
    "failure in the first batch": lambda: lsim.analyze(broken(0), rows(), CENTRED),
    "failure later": lambda: lsim.analyze(broken(4), rows(), PLAIN, intervals=True),
    "failure of a stream": lambda: lsim.analyze(tiny_llama(), lsim.Data(stream(5), batch_size=1), PLAIN),
    "two models": lambda: lsim.compare(tiny_llama(), tiny_llama(seed=int(odd)), rows(), lsim.CKA(minibatch=8)),
    "grid": lambda: lsim.compare_grid({"a": tiny_llama(), "b": broken(2)}, rows(), lsim.CKA(minibatch=8)),
    "sweep": lambda: lsim.sweep({"a": tiny_llama(), "b": broken(2)}, rows(), PLAIN),
    "checkpoint": lambda: lsim.analyze(tiny_llama(), rows(), PLAIN, checkpoint=sys.argv[1] + ("/no/run" if odd else "/run")),
}
found = {}
for name, call in CASES.items():
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        try:
            call()
            found[name] = ["", ""]
        except Exception as error:
            found[name] = [type(error).__name__, str(error), isinstance(error, lsim.LayersimError)]
with torch.autocast("cpu", torch.bfloat16, enabled=odd):
    try:
        lsim.analyze(tiny_llama(), rows(), PLAIN)
        found["autocast"] = ["", ""]
    except lsim.LayersimError as error:
        found["autocast"] = [type(error).__name__, str(error), True]
# After all these errors, the ranks still agree.
report = lsim.analyze(tiny_llama(), rows(), CENTRED)
found["tokens"] = report["cosine"].provenance.tokens
json.dump(found, open(f"{sys.argv[1]}/{rank}.json", "w"))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_raise_if_one_has_other_inputs_or_fails(ranks, tmp_path):
    run_in_group(SCRIPT, ranks, str(tmp_path))
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert {outcome.pop("tokens") for outcome in outcomes} == {54}

    failed = {"failure in the first batch", "failure later", "failure of a stream"}
    for name in outcomes[0]:
        errors = [outcome[name] for outcome in outcomes]
        assert all(error[0] for error in errors), (name, errors)
        # The rank that fails raises its own error.
        assert all(error[2] for error in (errors[:-1] if name in failed else errors)), (name, errors)
    for name in ("order of rows", "labels", "groups", "weights", "hook", "autocast"):
        assert all(f"Rank {ranks - 1}" in outcome[name][1] or "Rank 1" in outcome[name][1] for outcome in outcomes), outcomes[
            0
        ][name]
