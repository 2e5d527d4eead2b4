"""`LogitLens(ranks=)` and `prediction_grid(target=)`: the rank and the probability of one token at each layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, own_head, residuals, view
from ..models.tiny_models import hidden_states, random_tokens, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import by_hand

FIELDS = ("rank", "reciprocal_rank", "ranked_probability")


def ranks_by_hand(model, rows, ids) -> np.ndarray:
    """`row layer`: the rank of each row's token at its last position, counted one logit at a time."""
    table = []
    for row, token in zip(rows, ids, strict=True):
        logits = by_hand(model, hidden_states(model, row))[:, -1]
        ranks = []
        for layer in logits:
            ranks.append(1 + sum(1 for logit in layer if logit > layer[token]))
        table.append(ranks)
    return np.array(table)


@pytest.mark.parametrize("memory", [0.003, 128.0])
def test_the_ranks_of_a_token_equal_their_oracle(memory):
    data = [residuals(seed, tokens=13) for seed in range(2)]
    lens = from_views(lsim.LogitLens(ranks=7, lens_memory_mb=memory), [view(x) for x in data])
    expected = oracles.oracle_logit_lens(data, ranks=[7] * 26)

    for name in FIELDS:
        np.testing.assert_allclose(getattr(lens, name), expected[name], rtol=1e-9, err_msg=name)


def test_equal_logits_share_the_better_rank():
    head = np.zeros((6, 8))
    head[:, 0] = [3, 2, 2, 2, 1, 0]
    x = np.ones((2, 1, 8))
    x[:, :, 1:] = -1 / 7
    lens = {}

    for token in range(6):
        lens[token] = from_views(lsim.LogitLens(ranks=token), [view(x, np.zeros(1, int), unembed=own_head(head))])

    assert [float(lens[token].rank) for token in range(6)] == [1, 2, 2, 2, 5, 6]


def test_a_token_for_each_row_of_the_data():
    model = tiny_llama().double()
    rows = random_tokens(9, 7)
    ids = [3, 50, 99, 4, 4, 60, 71, 12, 33]
    expected = ranks_by_hand(model, rows, ids)
    data = lsim.Data(rows, positions="last", batch_size=4)

    for ranks in (ids, torch.tensor(ids), np.array(ids)):
        lens = lsim.analyze(model, data, lsim.LogitLens(ranks=ranks, labels="none"))["logit_lens"]
        np.testing.assert_allclose(lens.rank, expected.mean(0), rtol=1e-12)
        np.testing.assert_allclose(lens.reciprocal_rank, (1 / expected).mean(0), rtol=1e-12)

    # Other ids for other rows.
    swapped = lsim.analyze(model, data, lsim.LogitLens(ranks=ids[::-1], labels="none"))["logit_lens"]
    np.testing.assert_allclose(swapped.rank, ranks_by_hand(model, rows, ids[::-1]).mean(0), rtol=1e-12)


def test_ranks_change_no_other_number_and_are_shared_with_no_other_token():
    model = tiny_llama()
    rows = random_tokens(4, 9)
    analyzers = {
        "curve": lsim.ExitCurve(),
        "plain": lsim.LogitLens(),
        "first": lsim.LogitLens(ranks=5),
        "second": lsim.LogitLens(ranks=50),
        "again": lsim.ExitCurve(),
    }

    report = lsim.analyze(model, rows, analyzers)

    assert bool(report["plain"].rank.isnan().all())
    for key in ("first", "second"):
        assert torch.equal(report[key].entropy, report["plain"].entropy)
        assert torch.equal(report[key].cross_entropy, report["plain"].cross_entropy)

    alone = lsim.analyze(model, rows, lsim.LogitLens(ranks=5))["logit_lens"]
    assert torch.equal(report["first"].rank, alone.rank)
    assert not torch.equal(report["first"].rank, report["second"].rank)
    assert torch.equal(report["curve"].exits, report["again"].exits)
    assert alone.provenance.options["ranks"] == 5


def test_intervals_files_and_figures_of_ranks(tmp_path):
    model = tiny_llama()
    report = lsim.analyze(model, random_tokens(20, 6), lsim.LogitLens(ranks=9), intervals=True)
    lens = report["logit_lens"]
    interval = lens.interval("rank")

    assert bool((interval.low >= 1).all() and (interval.low < lens.rank).all() and (lens.rank < interval.high).all())

    loaded = lsim.load(lens.save(tmp_path / "lens.safetensors"))
    assert torch.equal(loaded.rank, lens.rank)

    drawn = [trace.y for trace in lens.plot("rank").data if len(trace.y) == 3]
    np.testing.assert_allclose(drawn[0], lens.rank)
    assert "Rank of the given token" in report.to_html(tmp_path / "page.html").read_text()
    assert lens.headline()["mean rank of the given token at the last layer"] == float(lens.rank[-1])


def test_text_is_read_by_the_model_s_tokenizer():
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    rows = random_tokens(3, 6)

    by_text = lsim.analyze(model, rows, lsim.LogitLens(ranks="w9"))["logit_lens"]
    by_id = lsim.analyze(model, rows, lsim.LogitLens(ranks=9))["logit_lens"]

    assert torch.equal(by_text.rank, by_id.rank)

    mixed = lsim.analyze(model, lsim.Data(rows), lsim.LogitLens(ranks=["w9", 9, "w9"]))["logit_lens"]
    assert torch.equal(mixed.rank, by_id.rank)

    with lsim.attach(model, lsim.LogitLens(ranks="w9")) as probe, torch.no_grad():
        model(rows)
    torch.testing.assert_close(probe.results()["logit_lens"].rank, by_id.rank)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("w9 w10", r"`ranks` is 'w9 w10'.*2 tokens.*'w9' \(9\).*'w10' \(10\)"),
        ("Paris", r"`ranks` is 'Paris'.*'<unk>' \(0\)"),
        ("", r"`ranks` is ''.*0 tokens"),
        (100, r"`ranks`.*\b100\b.*\b99\b"),
        (-1, r"`ranks`.*-1\b"),
        (1.5, r"`ranks` is 1\.5"),
        ([[1, 2]], r"`ranks`"),
        ([1, 2], r"`ranks` has 2 tokens.*\b3 rows"),
    ],
)
def test_what_is_no_token_is_refused(ranks, message):
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    with pytest.raises(lsim.LayersimError, match=message):
        lsim.analyze(model, random_tokens(3, 6), lsim.LogitLens(ranks=ranks))


def test_text_without_a_tokenizer_and_rows_in_a_loop_are_refused():
    model = tiny_llama()
    with pytest.raises(lsim.LayersimError, match=r"`ranks` is 'w9'.*tokenizer"):
        lsim.analyze(model, random_tokens(3, 6), lsim.LogitLens(ranks="w9"))
    with pytest.raises(lsim.LayersimError, match="LogitLens cannot be attached"):
        lsim.attach(model, lsim.LogitLens(ranks=[1, 2]))


def test_leading_spaces_are_said(demo):
    data = lsim.Data("Once upon a time there was a little", positions="last")
    with pytest.raises(lsim.LayersimError, match=r"`ranks` is 'girl'.*'irl' \(424\).*' girl'"):
        lsim.analyze(demo, data, lsim.LogitLens(ranks="girl"))

    with pytest.warns(lsim.LayersimWarning, match=r"`ranks` is 'a'.*'a' \(65\).*' a' \(259\)"):
        lsim.analyze(demo, data, lsim.LogitLens(ranks="a"))
    lens = lsim.analyze(demo, data, lsim.LogitLens(ranks=" girl"))["logit_lens"]
    assert float(lens.rank[-1]) == 1


@pytest.mark.parametrize("norm", ["final", "none"])
def test_the_grid_of_a_prompt_has_the_rank_of_a_target_at_each_token(norm, tmp_path):
    model = tiny_llama().double()
    row = random_tokens(1, 9)[0]
    logits = by_hand(model, hidden_states(model, row), norm == "final")

    grid = lsim.prompts.prediction_grid(model, row, target=7, norm=norm)
    ranks = 1 + (logits > logits[..., 7:8]).sum(-1)

    assert grid.target_rank.T.tolist() == ranks.tolist()

    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(grid.target_probability.T, p[..., 7], rtol=1e-9)
    assert grid.target == "7"
    assert grid.plot("target_rank").data[0].z.shape == (9, 3)
    assert torch.equal(lsim.load(grid.save(tmp_path / "grid.safetensors")).target_rank, grid.target_rank)

    plain = lsim.prompts.prediction_grid(model, row, norm=norm)
    assert bool(plain.target_rank.isnan().all())
    assert (plain.target, plain.words) == ("", grid.words)
    with pytest.raises(lsim.LayersimError, match=r"`target` is \[7, 8\]"):
        lsim.prompts.prediction_grid(model, row, target=[7, 8])
