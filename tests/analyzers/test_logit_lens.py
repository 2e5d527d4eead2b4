"""What each layer would say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, own_head, residuals, view, worst
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import LENSES, by_hand, lively, read_logits, tables


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("norm", ["final", "none"])
def test_the_lens_of_a_whole_model_equals_its_oracle(make, norm):
    model = make().double()
    rows = list(random_tokens(3, 12))
    states, targets = tables(model, rows)
    logits = by_hand(model, states, norm == "final")
    table = [[oracles.softmax(z[t]) for z in logits] for t in range(states.shape[1])]
    found = lsim.analyze(model, lsim.Data(rows, batch_size=1), [lsim.LogitLens(norm=norm), lsim.Saturation(norm=norm)])
    lens, saturation = found["logit_lens"], found["saturation"]
    known = [t for t in range(len(targets)) if targets[t] is not None]
    for layer in range(len(logits)):
        cross_entropy = -np.mean([np.log(table[t][layer][targets[t]]) for t in known])
        agreement = np.mean([table[t][layer].argmax() == table[t][-1].argmax() for t in range(len(targets))])
        kl = np.mean([np.sum(table[t][-1] * (np.log(table[t][-1]) - np.log(table[t][layer]))) for t in range(len(targets))])
        np.testing.assert_allclose(lens.cross_entropy[layer], cross_entropy, rtol=1e-9)
        np.testing.assert_allclose(lens.agreement[layer], agreement)
        np.testing.assert_allclose(lens.kl_to_final[layer], kl, atol=1e-9)
    said = np.array([[p.argmax() for p in row] for row in table])
    first = [min(k for k in range(said.shape[1]) if (row[k:] == row[-1]).all()) for row in said]
    assert saturation.counts.tolist() == [first.count(k) for k in range(said.shape[1])]


def test_theorem_2_2_centred_equals_its_oracle():
    data = [residuals(seed, tokens=20) for seed in range(2)]
    found = from_views(lsim.LogitLens(center="dataset"), [view(x) for x in data])
    expected = oracles.oracle_logit_lens(data, center=True)
    raw = oracles.oracle_logit_lens(data)
    for name in ("step_share", "step_share_if_closer", "lost_share"):
        np.testing.assert_allclose(getattr(found, name), expected[name], err_msg=name)
    assert not np.allclose(raw["step_share_if_closer"][1:], expected["step_share_if_closer"][1:])


def test_correct_predictions_that_a_later_layer_loses():
    best = torch.tensor([[0, 0, 0, 0], [1, 2, 0, 4], [2, 2, 3, 4], [1, 2, 0, 4]])
    x = 5.0 * torch.nn.functional.one_hot(best, 8).double().numpy()
    found = from_views(lsim.LogitLens(), [view(x, np.arange(4), unembed=own_head(np.eye(8)))])
    np.testing.assert_allclose(found.accuracy, [2 / 3, 2 / 3, 2 / 3])
    # The next tokens are 1, 2 and 3.
    np.testing.assert_allclose(found.lost_share, [1 / 3, 1 / 3, 0])


def test_one_lens_serves_all_who_ask():
    """Three analyzers in one run ask the head as often as one."""

    def calls(analyzers) -> int:
        model, count = tiny_llama(), []
        head = model.lm_head

        class Counting(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = head.weight

            def forward(self, x):
                count.append(x.numel() // x.shape[-1])
                return torch.nn.functional.linear(x, self.weight)

        model.lm_head = Counting()
        lsim.analyze(model, random_tokens(4, 12), analyzers)
        return sum(count)

    alone = calls([lsim.LogitLens()])
    assert calls([lsim.LogitLens(), lsim.ExitCurve(), lsim.Saturation()]) == alone
    assert calls([lsim.Saturation()]) < alone
    assert calls([lsim.LogitLens(norm="none"), lsim.ExitCurve()]) > 1.5 * alone


def test_a_model_of_one_block():
    found = lsim.analyze(tiny_llama(layers=1), random_tokens(4, 12), [cls() for cls in LENSES])
    assert found["logit_lens"].agreement.tolist() == [1]
    assert found["logit_lens"].monotone_share == 1
    assert found["logit_lens"].effective_depth(0) == 1
    assert found["saturation"].early_share == 0
    assert found["saturation"].cosine_to_last.tolist() == [1]
    assert (found["exit_curve"].speedup == 1).all()


def test_the_next_token_is_the_one_that_the_model_attends_to():
    """Padding is nobody's next token, nor is what follows a hole in the mask."""
    model = tiny_llama()
    tokens = random_tokens(1, 8)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0]])
    found = lsim.analyze(model, {"input_ids": tokens, "attention_mask": mask}, lsim.LogitLens())["logit_lens"]
    assert (found.positions, found.targets) == (5, 3)
    skipped = lsim.analyze(model, lsim.Data(tokens, skip_first=2), lsim.LogitLens())["logit_lens"]
    assert (skipped.positions, skipped.targets) == (6, 5)


def test_fields_have_their_own_names():
    found = from_views(lsim.LogitLens(), [view(residuals(5))])
    assert torch.equal(found.cross_entropy, found.values)
    assert np.asarray(found).shape == (3,)
    table = found.to_frame()
    assert {"layer", "cross_entropy", "perplexity", "accuracy", "agreement", "kl_to_final", "entropy"} <= set(table.columns)
    assert "values" not in table.columns
    assert found.plot("cross_entropy").layout.title.text == found.plot().layout.title.text
    assert list(found.to_frame("top_k_accuracy").columns) == ["k", "layer", "top_k_accuracy"]
    with pytest.raises(lsim.LayersimError, match="'loss'"):
        found.plot("loss")


def test_a_label_that_cannot_be_said_has_no_probability():
    logits = np.zeros((2, 3, 40))
    logits[:, 0, 7] = -np.inf
    found = read_logits(logits, torch.tensor([7, 7]))
    assert found["target_log_prob"][0].isneginf().all()
    np.testing.assert_allclose(found["target_log_prob"][1:], -np.log(40))
    np.testing.assert_allclose(found["entropy"][0], np.log(39))


def test_a_grid_as_a_table():
    grid = lsim.prompts.prediction_grid(tiny_llama(), random_tokens(1, 9)[0])
    table = grid.to_frame()
    assert list(table.columns) == ["position", "token", "layer", "probability", "entropy", "word", "final"]
    assert table[table.layer == "blocks.2.hook_resid_post"].final.all()
    assert table.word.tolist() == [word for row in grid.words for word in row]
    assert list(grid.to_frame("saturation_layer").columns) == ["token", "saturation_layer"]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_measures_that_need_no_target_are_the_same_without_targets(tmp_path):
    model, tokens = tiny_llama(), random_tokens(3, 12)
    with_targets, without = (
        lsim.analyze(model, tokens, [lsim.LogitLens(labels=labels), lsim.ExitCurve(labels=labels)])
        for labels in ("next_token", "none")
    )
    for key, names in (
        ("logit_lens", ("agreement", "kl_to_final", "entropy")),
        ("exit_curve", ("exits", "agreement", "speedup")),
    ):
        for name in names:
            assert torch.equal(getattr(without[key], name), getattr(with_targets[key], name))
        assert bool(without[key].accuracy.isnan().all())
        assert without[key].targets == 0
    assert without["exit_curve"].threshold_for(agreement=0.95) == with_targets["exit_curve"].threshold_for(agreement=0.95)
    with pytest.raises(lsim.LayersimError, match=r"accuracy[ =]0\.5"):
        without["exit_curve"].threshold_for(accuracy=0.5)
    assert without["logit_lens"].provenance.options["labels"] == "none"
    page = without.to_html(tmp_path / "page.html").read_text()
    assert "Agreement with the final prediction" in page
    assert "Probability of the target" not in page


ANALYZERS = [lsim.LogitLens, lsim.ExitCurve, lsim.Saturation]


class Watched:
    """An unembedding that remembers how many bytes of logits it gave at once."""

    def __init__(self, unembed) -> None:
        self.unembed, self.sizes = unembed, []

    def __getattr__(self, name):
        return getattr(self.unembed, name)

    def __call__(self, *arguments):
        logits = self.unembed(*arguments)
        self.sizes.append(logits.numel() * logits.element_size())
        return logits


@pytest.mark.parametrize("analyzer", ANALYZERS)
def test_no_more_logits_are_made_at_once_than_memory_was_given_for(analyzer):
    x = residuals(0, tokens=60)

    def sizes(megabytes: float) -> list[int]:
        watched = Watched(own_head())
        from_views(analyzer(lens_memory_mb=megabytes), [view(x, unembed=watched)])
        return watched.sizes

    few, many = sizes(0.05), sizes(10)
    assert max(few) <= 0.05 * 2**20
    # Yet more than half of it: chunks are as large as they may be.
    assert max(few) > 0.025 * 2**20
    assert len(many) < len(few)
    if analyzer is not lsim.Saturation:
        assert sum(few) == sum(many) == 3 * 60 * 300 * 8


@pytest.mark.parametrize("analyzer", ANALYZERS)
def test_positions_with_infinite_logits_are_counted_over_all_chunks(analyzer):
    x = residuals(0, tokens=40)
    # Far apart, so that no chunk has both.
    x[2, [3, 27]] = 1e300
    head = own_head(np.full((300, 8), 1e20) * np.sign(np.random.default_rng(0).normal(size=(300, 8))))
    with pytest.raises(lsim.LayersimError, match=r"\b2 .*hook_resid_post"):
        from_views(analyzer(norm="none", lens_memory_mb=0.01), [view(x, unembed=head)])


def test_results_do_not_depend_on_the_memory():
    x = residuals(3, tokens=50)
    for analyzer in ANALYZERS:
        one, other = (from_views(analyzer(lens_memory_mb=mb), [view(x)]) for mb in (0.003, 50))
        torch.testing.assert_close(one.values, other.values, rtol=1e-12, atol=0)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_what_is_saved_can_be_resumed(tmp_path):
    model, tokens = tiny_llama(), random_tokens(12, 9)
    every = [lsim.LogitLens(), lsim.Saturation(center="dataset"), lsim.ExitCurve(), lsim.Trajectory(), lsim.NeuralCollapse()]
    whole = lsim.analyze(model, lsim.Data(tokens, batch_size=3), every)

    class Stop(Exception):
        pass

    class Cut(list):
        def __iter__(self):
            for i, row in enumerate(super().__iter__()):
                if i == 7 and self.armed:
                    raise Stop
                yield row

    rows = Cut(list(tokens))
    rows.armed = True
    path = tmp_path / "run.part"
    with pytest.raises(Stop):
        lsim.analyze(model, lsim.Data(rows, batch_size=3), every, checkpoint=path)
    rows.armed = False
    resumed = lsim.analyze(model, lsim.Data(rows, batch_size=3), every, checkpoint=path)
    for name in whole:
        assert worst(resumed[name], whole[name]) == 0


def test_saturation_with_a_centre_and_without():
    x = [residuals(i, tokens=25) for i in range(3)]
    for center in ("none", "dataset"):
        found = from_views(lsim.Saturation(center=center, norm="none"), [view(b) for b in x])
        expected = oracles.oracle_saturation(x, norm=False, center=center == "dataset")
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name), value, atol=1e-9, err_msg=name)
    # Exactly, whatever the rounding of norms.
    few = [from_views(lsim.Saturation(), [view(residuals(seed, tokens=3))]) for seed in range(20)]
    assert {float(one.cosine_to_last[-1]) for one in few} == {1.0}


def test_a_layer_that_excludes_what_the_last_allows_is_infinitely_far():
    logits = np.zeros((2, 3, 40))
    logits[:, 0, 7] = -np.inf
    assert read_logits(logits, torch.tensor([1, 1]))["kl"].tolist() == [[math.inf] * 2, [0.0] * 2, [0.0] * 2]


def test_what_is_shared_is_what_each_would_find_alone():
    """More ranks than another asked for, another norm, other labels: none of them is taken from what is not theirs."""
    model, tokens = lively(tiny_llama()), random_tokens(4, 12)
    every = [lsim.ExitCurve(), lsim.LogitLens(top_k=(1, 20), norm="none"), lsim.Saturation(norm="none")]
    together = lsim.analyze(model, tokens, every)
    swapped = lsim.analyze(model, tokens, [lsim.ExitCurve(), lsim.LogitLens(top_k=(1, 20)), lsim.Saturation()])
    for analyzer in every:
        alone = lsim.analyze(model, tokens, analyzer)[analyzer.name]
        assert worst(together[analyzer.name], alone) < 1e-5
    assert worst(swapped["logit_lens"], lsim.analyze(model, tokens, lsim.LogitLens(top_k=(1, 20)))["logit_lens"]) < 1e-5
    mixed = lsim.analyze(model, tokens, [lsim.LogitLens(), lsim.Saturation(norm="none")])["saturation"]
    assert torch.equal(mixed.counts, together["saturation"].counts)
    assert not torch.equal(mixed.counts, swapped["saturation"].counts)


def test_a_later_token_with_low_logits_is_read_as_well_as_the_first():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 3, 200))
    low = logits.copy()
    low[1:] -= 101
    exact, found = read_logits(logits, torch.arange(5)), read_logits(low.astype(np.float32), torch.arange(5))
    for name in ("best_prob", "target_log_prob", "entropy", "kl"):
        np.testing.assert_allclose(found[name], exact[name], atol=2e-4, err_msg=name)
