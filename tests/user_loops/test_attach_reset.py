"""A probe that begins anew: results of each epoch, and numbers for a logger in the loop."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..runs import hooks
from ..tiny_models import random_tokens, tiny_llama

ANALYZERS = {"cosine": lsim.Cosine(center="none"), "lens": lsim.LogitLens()}
pytestmark = pytest.mark.filterwarnings("ignore:Intervals of .* rest on")


def epoch(seed):
    return random_tokens(8, 16, seed=seed).split(2)


@pytest.mark.parametrize("intervals", [False, True])
def test_results_after_a_reset_are_those_of_a_probe_that_begins_there(intervals):
    model = tiny_llama()
    with lsim.attach(model, ANALYZERS, intervals=intervals) as probe:
        for number in range(3):
            for rows in epoch(number):
                model(rows)
            found = probe.results()
            with lsim.attach(tiny_llama(), ANALYZERS, intervals=intervals) as own:
                other = own._source.module
                for rows in epoch(number):
                    other(rows)
            for name, result in own.results().items():
                for field in result.tensor_fields():
                    assert torch.equal(getattr(found[name], field).nan_to_num(), getattr(result, field).nan_to_num())
                assert found[name].provenance.data == result.provenance.data
                assert found[name].provenance.tokens == result.provenance.tokens == 128
                assert len(found[name].block_tokens) == len(result.block_tokens)
            assert probe.headline() == pytest.approx(found.headline(), nan_ok=True)
            probe.reset()
            with pytest.raises(lsim.LayersimError, match="measured nothing"):
                probe.results()
    assert hooks(model) == 0


def test_the_mask_stays_and_results_inside_the_loop_change_nothing():
    model, rows = tiny_llama(), random_tokens(2, 16)
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        probe.mask = torch.arange(16).expand(2, 16) < 4
        model(rows)
        probe.reset()
        model(rows)
        assert probe.results()["cosine"].provenance.tokens == 8
        probe.results()
        model(rows)
    assert probe.results()["cosine"].provenance.tokens == 16


def test_an_error_stays():
    model, rows = tiny_llama(), random_tokens(2, 16)
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        probe.mask = torch.ones(3, 3, dtype=torch.bool)
        model(rows)
        probe.mask = None
        probe.reset()
        model(rows)
    assert probe.headline() == {}
    with pytest.raises(lsim.LayersimError, match="mask"):
        probe.results()
