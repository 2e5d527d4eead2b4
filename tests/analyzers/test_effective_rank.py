"""Effective rank: spectra that are known, its options, sites of different widths, and what has no spectrum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.effective_rank import spectrum_of
from tl_layersim.core import Sums

from .. import oracles
from ..inputs.views import from_views, layer_run, residuals, view
from ..models.tiny_models import random_tokens, tiny_llama

FIELDS = ("values", "eigenvalue_rank", "participation_ratio", "stable_rank", "directions_90", "spectrum")


def planted(singular_values: list[float], samples: int = 40) -> np.ndarray:
    """One site whose centred samples have these singular values, with a mean that centring must remove."""
    rng = np.random.default_rng(0)
    left_factor = rng.normal(size=(samples, len(singular_values)))
    left_factor = np.linalg.qr(left_factor - left_factor.mean(0))[0]
    right = np.linalg.qr(rng.normal(size=(len(singular_values),) * 2))[0]
    return (left_factor * singular_values @ right.T + rng.normal(size=len(singular_values)))[None]


def test_equal_variance_fills_every_direction():
    result = from_views(lsim.EffectiveRank(), [view(planted([3.0] * 6))])
    for name in FIELDS[:4]:
        np.testing.assert_allclose(getattr(result, name), [6], rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(result.spectrum, np.full((1, 6), 1 / 6))


def test_a_known_spectrum():
    result = from_views(lsim.EffectiveRank(top=2), [view(planted([2.0, 1.0, 1.0]))])
    np.testing.assert_allclose(result.values, [2 ** (0.5 + 2 * 0.25 * 2)])

    eigenvalues = np.array([4, 1, 1]) / 6
    np.testing.assert_allclose(result.eigenvalue_rank, [np.exp(-(eigenvalues * np.log(eigenvalues)).sum())])
    np.testing.assert_allclose(result.participation_ratio, [36 / 18])
    np.testing.assert_allclose(result.stable_rank, [6 / 4])
    # 4/6 and 5/6 of the variance are below 90 %.
    np.testing.assert_allclose(result.directions_90, [3])
    np.testing.assert_allclose(result.spectrum, [[4 / 6, 1 / 6]])
    assert result.coordinates("direction") == (1, 2)


def test_exactly_ninety_percent_needs_no_further_direction():
    result = from_views(lsim.EffectiveRank(), [view(planted([3.0, 1.0]))])
    np.testing.assert_allclose(result.spectrum, [[0.9, 0.1]])
    assert result.directions_90 == 1


@pytest.mark.parametrize("center", ["dataset", "none"])
def test_batches_of_any_size_equal_the_oracle(center):
    data = [residuals(0, tokens=20), residuals(1, tokens=1), residuals(2, tokens=9)]
    result = from_views(lsim.EffectiveRank(center=center, top=3), [view(x) for x in data])

    for name, value in oracles.oracle_effective_rank(data, center, top=3).items():
        np.testing.assert_allclose(getattr(result, name), value, rtol=1e-9, err_msg=name)
    assert result.samples == 30


def test_rotation_scale_and_translation_change_nothing():
    x = residuals(3)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]

    plain, moved = (from_views(lsim.EffectiveRank(), [view(y)]) for y in (x, 7 * x @ rotation + 5))

    for name in FIELDS:
        np.testing.assert_allclose(getattr(plain, name), getattr(moved, name), rtol=1e-9, err_msg=name)


def test_rank_decreases_from_entropies_to_stable_rank():
    result = from_views(lsim.EffectiveRank(), [view(residuals(5))])
    ordered = (result.values, result.eigenvalue_rank, result.participation_ratio, result.stable_rank)
    assert all(bool((high > low).all()) for high, low in itertools.pairwise(ordered))


@pytest.mark.parametrize("pool", ["mean", "last", "first"])
def test_rows_as_samples(pool):
    data = [residuals(seed, tokens=12) for seed in range(4)]
    chosen = {"mean": lambda x: x.reshape(4, 3, 4, 8).mean(2), "last": lambda x: x[:, 3::4], "first": lambda x: x[:, ::4]}[pool]
    analyzer = lsim.EffectiveRank(level="sequence", pool=pool)

    assert analyzer.needs.whole_rows
    assert not lsim.EffectiveRank().needs.whole_rows

    result = from_views(analyzer, [view(x, rows=3) for x in data])
    expected = oracles.oracle_effective_rank([chosen(x) for x in data])
    for name in FIELDS:
        np.testing.assert_allclose(getattr(result, name), expected[name], rtol=1e-9, err_msg=name)
    assert result.samples == 12


def test_sites_of_different_widths_have_spectra_of_their_own():
    model = tiny_llama()
    tokens = random_tokens(4, 30)
    at = ["blocks.0.hook_resid_post", "blocks.0.mlp.hook_post"]

    together = lsim.analyze(model, tokens, lsim.EffectiveRank(), at=at)["effective_rank"]
    widths = []

    for number, site in enumerate(at):
        alone = lsim.analyze(model, tokens, lsim.EffectiveRank(), at=[site])["effective_rank"]
        widths += alone.widths
        for name in FIELDS[:5]:
            torch.testing.assert_close(getattr(together, name)[number], getattr(alone, name)[0], rtol=1e-9, atol=0)
    assert together.widths == tuple(widths)
    assert widths[0] < widths[1]
    assert bool((together.spectrum[0, widths[0] :] == 0).all())


def test_few_samples_limit_the_rank():
    x = residuals(0, tokens=5)
    with pytest.warns(lsim.LayersimWarning, match=r"5 tokens, fewer than the width of 8: no rank can exceed 4"):
        result = from_views(lsim.EffectiveRank(), [view(x)])

    assert bool((result.values <= 4 + 1e-9).all())
    np.testing.assert_allclose(result.values, oracles.oracle_effective_rank([x])["values"], rtol=1e-6)
    with pytest.warns(lsim.LayersimWarning, match="8 tokens, fewer than the width of 8: no rank can exceed 7"):
        from_views(lsim.EffectiveRank(), [view(residuals(0, tokens=8))])


def test_as_many_samples_as_directions_do_not_warn(recwarn):
    from_views(lsim.EffectiveRank(), [view(residuals(0, tokens=9))])
    from_views(lsim.EffectiveRank(center="none"), [view(residuals(0, tokens=8))])
    assert not [w for w in recwarn if issubclass(w.category, lsim.LayersimWarning)]


def test_a_large_mean_is_not_taken_for_variance():
    x = residuals(1)
    result = from_views(lsim.EffectiveRank(), [view(x + 1e4)])

    np.testing.assert_allclose(result.values, oracles.oracle_effective_rank([x])["values"], rtol=1e-6)

    y = x.copy()
    y[1] = x[1] * 1e-3 + 1e7
    with pytest.warns(lsim.LayersimWarning, match=r"not defined at blocks\.0\.hook_resid_post, and NaN there: all 40"):
        lost = from_views(lsim.EffectiveRank(), [view(y)])
    for name in FIELDS:
        assert bool(getattr(lost, name)[1].isnan().all()), name
        assert not bool(getattr(lost, name)[[0, 2, 3]].isnan().any()), name
    assert not any(math.isnan(value) for value in lost.headline().values())


def test_rounding_is_not_counted_as_directions():
    second = torch.diag(torch.tensor([1.0, 0.5, 1e-15, 2e-15], dtype=torch.float64))
    assert spectrum_of(second, torch.zeros(4, dtype=torch.float64)).tolist() == [1, 0.5, 2e-15, 0]


def test_equal_samples_are_refused():
    x = np.repeat(residuals(0, tokens=1), 20, axis=1)
    with pytest.raises(lsim.LayersimError, match=r"hook_resid_pre.* 20 "):
        from_views(lsim.EffectiveRank(), [view(x)])

    result = from_views(lsim.EffectiveRank(center="none"), [view(x)])
    np.testing.assert_allclose(result.values, 1, rtol=1e-6)


def test_one_sample_has_no_spectrum():
    with pytest.raises(lsim.LayersimError, match=r"effective rank.* 1 tokens\b"):
        from_views(lsim.EffectiveRank(), [view(residuals(0, tokens=1))])
    with pytest.raises(lsim.LayersimError, match=r"effective rank.* 1 sequences\b"):
        from_views(lsim.EffectiveRank(level="sequence"), [view(residuals(0))])


def test_wrong_options_are_refused():
    with pytest.raises(lsim.LayersimError, match="`top`"):
        lsim.EffectiveRank(top=0)
    # 4 sites x 32 x 32 numbers of 8 bytes, three times: 98 kB.
    with pytest.raises(lsim.LayersimError, match="`max_memory_gb`"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.EffectiveRank(max_memory_gb=9.8e-5))
    lsim.analyze(tiny_llama(), random_tokens(4, 20), lsim.EffectiveRank(max_memory_gb=2e-4))


def test_the_headline_names_the_lowest_rank():
    x = np.concatenate([residuals(0), residuals(0)[:1] * [1, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01], residuals(0)[:1]])
    result = from_views(lsim.EffectiveRank(), [view(x)])
    headline = result.headline()
    low = float(result.values[4])
    last = float(result.values[5])

    assert headline["lowest effective rank, at blocks.3.hook_resid_post"] == low
    assert headline["Effective rank at the last site"] == last
    assert low < last


def test_the_spectrum_is_drawn_by_depth():
    result = from_views(lsim.EffectiveRank(), [view(residuals(0))])
    figure = result.plot("spectrum")

    assert figure.data[0].name == "direction 1"
    np.testing.assert_allclose(figure.data[0].y, result.spectrum[:, 0])
    assert figure.layout.yaxis.type == "log"


def test_half_precision_is_summed_in_float64():
    x = torch.as_tensor(residuals(4)).half()
    analyzer = lsim.EffectiveRank()

    sums = Sums.of(analyzer.kernel(Sums())(view(x.numpy())))
    result = analyzer.compute(sums, layer_run(4))
    expected = oracles.oracle_effective_rank([x.double().numpy()])

    np.testing.assert_allclose(result.values, expected["values"], rtol=1e-12)
    assert result.headline()
