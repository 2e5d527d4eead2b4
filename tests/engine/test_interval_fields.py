"""Intervals of counts, of fields whose labels depend on the data, and fields that have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama


def run(*analyzers, lengths=(5, 9) * 128):
    data = [random_tokens(1, length, seed=i)[0] for i, length in enumerate(lengths)]
    return lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=16), list(analyzers), intervals=True)


def test_the_interval_of_a_count_is_that_of_its_fraction():
    report = run(lsim.Saturation(), lsim.CKA(minibatch=16))
    counts = report["saturation"]
    fraction = counts.interval(lambda replicate: replicate.values / replicate.values.sum())
    torch.testing.assert_close(counts.interval("counts").error, fraction.error * counts.values.sum())

    cka = report["cka"]
    fraction = cka.interval(lambda replicate: replicate.effective_samples / replicate.samples)
    torch.testing.assert_close(cka.interval("effective_samples").error, fraction.error * cka.samples)
    assert float(lsim.difference(counts, counts)["counts"].sel(statistic="se").max()) == 0


def test_a_fraction_without_any_event_has_an_interval_with_width():
    model = tiny_llama()
    data = torch.randint(3, 90, (32, 12), generator=torch.Generator().manual_seed(0))
    # Tokens that the model never predicts.
    with torch.no_grad():
        model.lm_head.weight[1:3] = 0
    never = (torch.arange(12) % 2 + 1).expand(32, 12)
    lens = lsim.analyze(model, data, lsim.LogitLens(labels=never), intervals=True)["logit_lens"]

    assert bool((lens.accuracy == 0).all())

    interval = lens.interval("accuracy")
    assert bool((interval.low == 0).all() and (interval.high > 0.1).all() and (interval.high < 0.2).all())
    assert lens.interval(lambda replicate: replicate.accuracy[1]).high == interval.high[1]

    # The last layer agrees with itself by definition.
    agreement = lens.interval("agreement")
    assert float(agreement.low[-1]) == float(agreement.high[-1]) == 1.0


@pytest.mark.filterwarnings("ignore")
def test_a_label_that_one_block_alone_has_gets_no_interval():
    coupling = run(lsim.BlockCoupling(k=2), lengths=(5,) * 17 + (9,) * 16 + (40,))["block_coupling"]
    interval = coupling.interval("by_length")
    assert interval.low.isnan().tolist() == [False, False, True]
    assert len(coupling.to_frame("by_length")) == 3
    assert lsim.difference(coupling, coupling)["by_length"].sizes["length"] == 3


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_fields_without_intervals_are_drawn_and_tabled(tmp_path):
    analyzers = [lsim.CKA(minibatch=16, permutations=20), lsim.Trajectory(per_prompt=True), lsim.Cosine()]
    # Two blocks of CKA: that there are intervals is enough here.
    report = run(*analyzers, lengths=(5, 9) * 16)
    for name, field in (("cka", "p_values"), ("trajectory", "prompt_lss"), ("cosine", "mean")):
        with pytest.raises(lsim.LayersimError, match="has no interval"):
            report[name].interval(field)
        assert report[name].plot(field).data

    report.to_html(tmp_path / "page.html")
    assert not [line for line in repr(report).splitlines() if "p-value" in line and "±" in line]
    wide = replace(report["cosine"], layers=tuple(f"blocks.{i}.hook_resid_post" for i in range(4)))
    assert wide.plot("mean").layout.xaxis.title.text


@pytest.mark.heavy("a grid with intervals")
def test_ones_on_a_diagonal_differ_by_no_finding():
    first = run(lsim.CKA(minibatch=16))["cka"]
    rounded = replace(first, values=first.values + 1e-16 * torch.eye(4).double())
    difference = lsim.difference(first, rounded)["values"]
    assert np.isnan(difference.sel(statistic="p_value").values.diagonal()).all()
    assert float(abs(difference.sel(statistic="difference")).max()) == 0


@pytest.mark.heavy("a longer run")
def test_the_time_of_intervals_is_announced(capfd, monkeypatch):
    monkeypatch.setattr(lsim.Procrustes, "compute_seconds", lambda *_: 1.0)
    run(lsim.Procrustes())
    assert "Procrustes takes about 33 seconds on one core" in capfd.readouterr().err
