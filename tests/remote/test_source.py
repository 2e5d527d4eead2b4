"""What a server gives is what this process gives."""

from __future__ import annotations

import json

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches
from tl_layersim.engine.submitted_runs import _batch, _batch_snapshot
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources.open_local import OpenedModel

from ..models.tiny_models import random_tokens, tiny_llama
from ..ndif.client import equal, furthest, rows
from ..running.options import called
from .helpers import QUICK, local, lsim_analyzer

ALL = [lsim.Cosine(), lsim.CKA(minibatch=32), lsim.Trajectory(), lsim.NeuralCollapse(), lsim.LogitLens(), lsim.Saturation()]
ALL += [lsim.TaskMetrics()]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_analyzer_gives_there_what_it_gives_here(small, name):
    data = rows(10, 40)
    far = lsim.analyze(lsim.open_model(small.model(name), remote=small.url), lsim.Data(data, batch_size=4), ALL)
    assert furthest(far, local(small, data, ALL, name, batch_size=4)) < 1e-6


@pytest.mark.parametrize("method", ["dense", "krylov", "finite-difference"])
def test_blocks_are_called_again_where_they_are(small, method):
    data, analyzers = rows(6, 20), [lsim.BlockCoupling(k=(6, 3), method=method), lsim.Cosine(center="none")]
    far = lsim.analyze(lsim.open_model(small.model(), remote=small.url), lsim.Data(data, batch_size=4), analyzers)
    assert furthest(far, local(small, data, analyzers, batch_size=4)) < 1e-6
    assert float(far["block_coupling"].whole_rows.max()) == (method == "finite-difference")


@pytest.mark.heavy("many requests")
def test_blocks_are_skipped_and_sublayers_are_read_where_they_are(small):
    data, analyzers = rows(6, 20), [lsim.SkipEffect(splits=2), lsim.Contribution()]
    far = lsim.analyze(lsim.open_model(small.model(), remote=small.url), lsim.Data(data, batch_size=4), analyzers)
    assert furthest(far, local(small, data, analyzers, batch_size=4)) < 1e-6


def test_pictures_of_blocks_come_back(small):
    tokens, here = random_tokens(1, 9)[0], small.model(dispatch=True, dtype=torch.float32)
    far = lsim.prompts.block_jacobians(lsim.open_model(small.model(), remote=small.url), tokens, positions=[(2, 5), -1])
    torch.testing.assert_close(
        far.values, lsim.prompts.block_jacobians(here, tokens, positions=[(2, 5), -1]).values, rtol=0, atol=1e-6
    )
    far = lsim.prompts.coupling_matrices(lsim.open_model(small.model(), remote=small.url), tokens, along="fixed-output", k=4)
    near = lsim.prompts.coupling_matrices(here, tokens, along="fixed-output", k=4)
    torch.testing.assert_close(far.values, near.values, rtol=0, atol=1e-6)


@pytest.mark.heavy("many requests")
def test_how_batches_are_grouped_changes_no_bit(small):
    data = lsim.Data(rows(11, 40), batch_size=1)
    alone, *grouped = (
        lsim.analyze(lsim.open_model(small.model(), remote=small.url, tokens_per_request=tokens), data, QUICK)
        for tokens in (40, 80, 200, None)
    )
    assert all(equal(alone, one) for one in grouped)
    assert furthest(alone, local(small, data.source, QUICK, batch_size=1)) < 1e-12


def test_rows_of_one_text_are_measured_together_as_here(small, tmp_path):
    data, groups = rows(24, 10), [row // 3 if row < 12 else row for row in range(24)]
    analyzers = [lsim.CKA(minibatch=16, permutations=19), lsim.Cosine(center="none")]
    options = {"batch_size": 2, "groups": groups, "intervals": True}
    near = local(small, data, analyzers, **options)
    remote = {"remote": small.url, "tokens_per_request": 200}
    assert furthest(called(lsim.analyze, small.model(), data, analyzers, **options, **remote), near) < 1e-6
    run = called(lsim.analyze, small.model(), data, analyzers, blocking=False, **options, **remote)
    later = lsim.load_run(run.save(tmp_path / "run")).result(60)
    assert furthest(later, near) < 1e-6
    assert later["cka"].provenance.texts == 16


def test_batches_in_a_file_keep_their_texts():
    data = lsim.Data({"input_ids": random_tokens(6, 5)}, groups=[0, 0, 1, 2, 2, 2])
    [batch] = Batches(data, open_source(OpenedModel.of(tiny_llama())).model)
    facts, tensors = _batch_snapshot(batch)
    again = _batch(json.loads(json.dumps(facts)), tensors)
    assert (again.texts, again.units, again.neighbours) == (batch.texts, (0, 0, 1, 2, 2, 2), False)


def test_rows_without_counted_tokens_take_no_part(small):
    data = rows(9, 20)
    data["attention_mask"][[0, 3, 4, 8], 3:] = 0
    options = {"batch_size": 1, "skip_first": 3}
    far = called(lsim.analyze, small.model(), data, QUICK, remote=small.url, **options)
    assert furthest(far, local(small, data, QUICK, **options)) < 1e-12
    run = called(lsim.analyze, small.model(), data, QUICK, remote=small.url, blocking=False, tokens_per_request=40, **options)
    later = run.result(60)
    assert equal(later, far)
    record, other = (report["cka"].provenance for report in (later, far))
    assert (record.tokens, record.sequences, record.batches, record.data) == (
        other.tokens,
        other.sequences,
        other.batches,
        other.data,
    )


def test_the_lens_needs_no_guess_of_the_dtype_there(small):
    # The client's weights do not exist, and say bfloat16; the server's are float32.
    model = small.model(dtype=torch.bfloat16)
    far = lsim.analyze(lsim.open_model(model, remote=small.url), rows(4, 20), [lsim.LogitLens()])
    assert far["logit_lens"].provenance.dtype == "torch.float32"
    assert furthest(far, local(small, rows(4, 20), [lsim.LogitLens()])) < 1e-6


def test_a_request_smaller_than_a_forward_pass_is_refused(small):
    data = [list(range(3, 11))] * 8 + [list(range(3, 63))] * 4
    for blocking in (True, False):
        small.set()
        options = {"remote": small.url, "batch_size": 4, "tokens_per_request": 100, "blocking": blocking}
        with pytest.raises(lsim.LayersimError, match=r"4 rows of 60(.|\n)*at least 240(.|\n)*batch_size=1"):
            called(lsim.analyze, small.model(), [torch.tensor(row) for row in data], QUICK, **options)
        # Nothing was sent but the probe.
        assert small.set()["requests"] == 1
    for few in (0, -5):
        with pytest.raises(lsim.LayersimError, match=r"1 or more"):
            lsim.analyze(lsim.open_model(small.model(), remote=small.url, tokens_per_request=few), rows(4, 20), QUICK)
    with pytest.raises(lsim.LayersimError, match=r"`tokens_per_request` is 100\b.* 160\b"):
        lsim.analyze(
            lsim.open_model(small.model(), remote=small.url, tokens_per_request=100),
            lsim.Data(rows(8, 20), batch_size=8),
            QUICK,
        )


@pytest.mark.light
def test_options_that_mean_nothing_are_refused(small, tmp_path):
    model = small.model(dispatch=True, dtype=torch.float32)
    with pytest.raises(lsim.LayersimError, match="`tokens_per_request` is 100"):
        lsim.analyze(lsim.open_model(model, tokens_per_request=100), rows(2, 8), QUICK)
    with pytest.raises(lsim.LayersimError, match=r"`blocking=False`.*`remote`"):
        lsim.analyze(model, rows(2, 8), QUICK, blocking=False)
    with pytest.raises(lsim.LayersimError, match="`checkpoint`"):
        lsim.analyze(lsim.open_model(model, remote=small.url), rows(2, 8), QUICK, blocking=False, checkpoint=tmp_path / "x")


@pytest.mark.heavy("many requests")
def test_what_cannot_be_added_is_refused_as_here(small):
    data = rows(5, 20)
    # In one request, the server adds the sums; of several requests, this process.
    for tokens, match in ((1000, "'own'.*'norm'"), (80, "'norm'")):
        options = {"remote": small.url, "tokens_per_request": tokens, "batch_size": 4}
        with pytest.raises(ValueError, match=match):
            called(lsim.analyze, small.model(), data, [lsim_analyzer(one_a_row)], **options)
        # A sum that some batches lack is the sum over the others.
        far = called(lsim.analyze, small.model(), data, [lsim_analyzer(now_and_then)], **options)
        assert furthest(far, local(small, data, [lsim_analyzer(now_and_then)], batch_size=4)) < 1e-12


def one_a_row(view):
    return {"norm": torch.ones(int(view.sequence.max()) + 1), "count": torch.tensor(1)}


def now_and_then(view):
    few = int(view.sequence.max()) < 3
    return {"norm": torch.ones(len(view.activations)), "count": torch.tensor(1)} | ({"few": torch.tensor(1)} if few else {})


def test_labels_are_any_numbers(small):
    labels = torch.tensor([5, 7, 2**32 + 5, 2**32 + 7]).repeat(10)[:, None].expand(40, 6).contiguous()
    data = {"input_ids": torch.randint(3, 100, (40, 6)), "labels": labels}
    collapse = [lsim.NeuralCollapse(labels="data", classes=(5, 7))]
    assert (
        furthest(lsim.analyze(lsim.open_model(small.model(), remote=small.url), data, collapse), local(small, data, collapse))
        < 1e-9
    )


def test_a_checkpoint_is_of_one_revision(small, tmp_path):
    path = tmp_path / "run.ckpt"
    lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(4, 20), QUICK, checkpoint=path)
    other = small.model(revision="step2000")
    small.set()
    with pytest.raises(lsim.LayersimError, match=r"another run(.|\n)*@step2000"):
        lsim.analyze(lsim.open_model(other, remote=small.url), rows(4, 20), QUICK, checkpoint=path)
