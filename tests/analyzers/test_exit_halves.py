"""Exit thresholds are chosen on one half of the rows, and reported on the other."""

from __future__ import annotations

import numpy as np
import torch

import tl_layersim as lsim

from .. import oracles
from ..options import called
from ..tiny_models import random_tokens, tiny_llama, tiny_tokenizer


def curve_of(rows: int = 24, **options):
    return called(lsim.analyze, tiny_llama(), random_tokens(rows, 9), lsim.ExitCurve(), **options)["exit_curve"]


def test_halves_are_rows_whatever_the_batch_size():
    found = curve_of(batch_size=24)
    out = sum(oracles.held_out_rows(24, 0.5))
    assert found.part_exits[:, 0].sum(-1).tolist() == [9 * (24 - out), 9 * out]
    assert torch.equal(found.part_exits.sum(0), found.exits)
    for size in (1, 7):
        assert torch.equal(curve_of(batch_size=size).part_exits, found.part_exits)


def test_a_threshold_is_chosen_on_the_first_half():
    found = curve_of()
    for least in (0.3, 0.6, 0.9):
        chosen = found.threshold_for(agreement=least)
        place = found.thresholds.index(chosen)
        assert found.part_agreement[0, place:].min() >= least
        assert place == 0 or found.part_agreement[0, place - 1] < least
        point = found.at(chosen, held_out=True)
        assert point.agreement == float(found.part_agreement[1, place])
        assert point.exits.tolist() == found.part_exits[1, place].tolist()
        blocks = torch.arange(1, len(point.exits) + 1).double()
        assert point.speedup == float(len(blocks) * point.exits.sum() / (point.exits * blocks).sum())


def test_replicates_have_halves_of_their_own():
    found = curve_of(rows=48, intervals=True)
    out = np.array(oracles.held_out_rows(48, 0.5))
    size = 48 // len(found.replicates)
    for number, one in enumerate(found.replicates):
        left = np.delete(out, np.s_[number * size : (number + 1) * size])
        assert one.part_exits[:, 0].sum(-1).tolist() == [9 * (~left).sum(), 9 * left.sum()]
    assert found.finding()


def test_packed_rows_are_halved_by_their_tokens():
    model, texts = tiny_llama(), [" ".join(f"w{t}" for t in row.tolist()) for row in random_tokens(40, 9)]
    model.tokenizer = tiny_tokenizer()
    found = [
        lsim.analyze(model, lsim.Data(texts, pack=True, seq_len=12, batch_size=size), lsim.ExitCurve())["exit_curve"]
        for size in (4, 9)
    ]
    assert torch.equal(found[0].part_exits, found[1].part_exits)
    assert (found[0].part_exits[:, 0].sum(-1) > 0).all()


def test_one_row_has_no_held_out_half():
    found = curve_of(rows=1)
    assert found.threshold_for(agreement=1.0) <= 1
    assert np.isnan(found.at(1.0, held_out=True).agreement)
    assert found.finding() == ""
