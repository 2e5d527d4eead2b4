"""Further inputs and embeddings travel in requests, and stay with runs that are not waited for."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens
from ..ndif.client import equal, furthest
from ..running.options import called
from .helpers import QUICK, local


def segments() -> dict[str, torch.Tensor]:
    tokens, mask = random_tokens(6, 12), torch.ones(6, 12, dtype=torch.long)
    mask[1, 8:], mask[3, :4] = 0, 0
    positions = (torch.arange(12) + 3).expand(6, -1)
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": tokens % 7, "position_ids": positions}


def embeddings(small) -> dict[str, torch.Tensor]:
    data = segments()
    model = small.model("gpt2", dispatch=True, dtype=torch.float32)._module
    return {"inputs_embeds": model.transformer.wte(data["input_ids"]).detach(), "attention_mask": data["attention_mask"]}


@pytest.mark.parametrize("kind", ["segments", "embeddings"])
def test_inputs_reach_the_model_there(small, kind):
    data = segments() if kind == "segments" else embeddings(small)
    far = lsim.analyze(lsim.open_model(small.model("gpt2"), remote=small.url), lsim.Data(data, batch_size=4), QUICK)
    near = local(small, data, QUICK, "gpt2", batch_size=4)
    assert furthest(far, near) < 1e-6
    assert far["cka"].provenance.data == near["cka"].provenance.data
    if kind == "segments":
        plain = {name: data[name] for name in ("input_ids", "attention_mask")}
        assert furthest(far, local(small, plain, QUICK, "gpt2", batch_size=4)) > 1e-3


@pytest.mark.parametrize("kind", ["segments", "embeddings"])
def test_a_run_that_is_kept_holds_the_inputs_of_its_jobs(small, kind, tmp_path):
    data = segments() if kind == "segments" else embeddings(small)
    options = {"batch_size": 1, "tokens_per_request": 24, "remote": small.url}
    waited = called(lsim.analyze, small.model("gpt2"), data, QUICK, **options)
    run = called(lsim.analyze, small.model("gpt2"), data, QUICK, blocking=False, **options)
    run.save(tmp_path / "run")
    kept = lsim.load_run(tmp_path / "run", model=small.model("gpt2"))
    for ours, theirs in zip(run._jobs, kept._jobs, strict=True):
        for a, b in zip(ours.batches, theirs.batches, strict=True):
            assert a.inputs.keys() == b.inputs.keys()
            assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
            assert (a.positional, a.has_tokens) == (b.positional, b.has_tokens)
    assert equal(run.result(60), waited)


def test_stitching_with_segments_there(small):
    data = segments()
    far = called(lsim.stitch, *[small.model("gpt2")] * 2, data, at=(0, 0), adapter="identity", remote=small.url, batch_size=3)
    here = small.model("gpt2", dispatch=True, dtype=torch.float32)._module
    near = lsim.stitch(here, here, lsim.Data(data, batch_size=3), at=(0, 0), adapter="identity")
    assert far.loss == pytest.approx(near.loss, abs=1e-5)
    without = lsim.stitch(here, here, lsim.Data(data | {"token_type_ids": None}, batch_size=3), at=(0, 0), adapter="identity")
    assert abs(far.loss - without.loss) > 1e-3
