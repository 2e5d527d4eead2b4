"""Hook points, positions and further analyzers on a server."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import family, tiny_tokenizer
from ..ndif.client import equal, furthest, rows
from ..running.options import called
from .helpers import QUICK, here, local

pytestmark = pytest.mark.filterwarnings("ignore:The relative change is not:UserWarning")
EVERYTHING = [lsim.SkipEffect(), lsim.Contribution(), lsim.LogitLens(ranks=7), lsim.LogitAttribution(), *QUICK]


@pytest.fixture(scope="module")
def opt(running):
    """Its blocks flatten rows and positions before the MLP, and its mask needs no values."""
    family("opt").save_pretrained(running.folder / "opt")
    tiny_tokenizer().save_pretrained(running.folder / "opt")
    return "opt"


def both(small, analyzers, name="llama", **options):
    """The results there and here, which must be equal."""
    data = rows(9, 30)
    far = called(lsim.analyze, small.model(name), data, analyzers, remote=small.url, batch_size=4, **options)
    near = local(small, data, analyzers, name, batch_size=4, **options)
    assert furthest(far, near) < 1e-6
    for one, other in zip(far.values(), near.values(), strict=True):
        assert one.layers == other.layers
        assert {key: one.provenance.options.get(key) for key in ("at", "per_head", "positions")} == {
            key: other.provenance.options.get(key) for key in ("at", "per_head", "positions")
        }
    return far


@pytest.mark.parametrize(
    "at", ["attn_out", ["resid_post", "mlp_out"], ["q", "z"], ["model.layers.1.mlp", "blocks.0.hook_mlp_out"]]
)
def test_hook_points_are_read_there_as_here(small, at):
    both(small, QUICK, at=at)


def test_heads_are_read_there_as_here(small):
    report = both(small, QUICK, "gpt2", at="z", per_head=True)
    assert report["cka"].layers[5] == "blocks.1.attn.hook_z[1]"


def test_sites_of_several_widths_and_flattened_positions(small, opt):
    both(small, [lsim.CKA(minibatch=32)], opt, at=["resid_mid", "mlp_post", "mlp_out"])


@pytest.mark.parametrize("positions", ["last", "mean", slice(1, None, 2)])
def test_positions_are_chosen_there_as_here(small, positions):
    both(small, QUICK, at="mlp_out", positions=positions)


def test_analyzers_that_read_sites_of_their_own(small):
    both(small, EVERYTHING, skip_first=1)
    both(small, [lsim.LogitLens(), lsim.Contribution()], "gpt2", at=["resid_mid", "resid_post"])


def test_a_kept_run_reads_its_sites_when_it_is_sent_again(small, tmp_path):
    data = rows(7, 20)
    options = {"remote": small.url, "batch_size": 1, "at": ["mlp_out", "z"], "per_head": False}
    waited = called(lsim.analyze, small.model(), data, QUICK, **options)
    small.set(most_batches=2)
    run = called(lsim.analyze, small.model(), data, QUICK, blocking=False, **options)
    path = run.save(tmp_path / "run")
    again = lsim.load_run(path, model=small.model()).result(60)
    assert equal(again, waited)
    assert again["cka"].layers == waited["cka"].layers
    assert equal(run.result(60), waited)
    assert equal(lsim.load_run(run.save(tmp_path / "done")).result(60), waited)


def test_two_models_are_compared_at_other_sites(small, capfd):
    data = rows(9, 30)
    options = {"at": "z", "per_head": True, "batch_size": 9}
    cka = lsim.CKA(minibatch=32)
    near = called(lsim.compare, here(small, "llama"), here(small, "gpt2"), data, cka, **options)
    capfd.readouterr()
    for remote in (small.url, (False, small.url)):
        first = small.model("llama") if remote == small.url else here(small, "llama")
        far = called(lsim.compare, first, small.model("gpt2"), data, cka, remote=remote, **options)
        torch.testing.assert_close(far.values, near.values, rtol=0, atol=1e-6)
        assert (far.layers, far.column_layers) == (near.layers, near.column_layers)
    said = capfd.readouterr().err
    tokens = near.samples
    assert near.provenance.tokens // 32 * 32 == tokens
    # Of each model: Grams of 12 sites, the row of each sample and the number of rows, for each minibatch, and the rows of the
    # pool; and 96 numbers a token, where the widths of both are known beforehand.
    crossing = 2 * (tokens // 32 * (12 * 4 * 32 * 33 // 2 + 8 * 32 + 8) + 8)
    assert said.count(f"{crossing / 1e3:.1f} kB are transferred in all") == 2
