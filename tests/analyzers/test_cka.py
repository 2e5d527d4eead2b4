"""CKA: the estimators, planted cases, two models, distance, minibatches and memory."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.analyzers.cka import GRAM_ROWS, centred, gram_matrices
from tl_layersim.core import Sums

from .. import oracles
from ..inputs.views import from_views, layer_run, residuals, samples, view
from ..models.tiny_models import hidden_states, random_tokens, tiny_llama


def between(analyzer: lsim.CKA, xs: list[np.ndarray], ys: list[np.ndarray], rows: int = 1) -> lsim.Result:
    """CKA of two models whose samples are rows of so many tokens."""
    pairs = [[view(z, rows=z.shape[1] // rows) for z in both] for both in zip(xs, ys, strict=True)]

    def total(kernel) -> Sums:
        return sum((Sums.of(reduce({"k": kernel}, *both)[1]["k"]) for both in pairs), Sums())

    first_kernel = analyzer.first_kernel()
    first = Sums() if first_kernel is None else total(first_kernel)
    return analyzer.compute(total(analyzer.kernel(first)), layer_run(len(xs[0]), len(ys[0])))


@pytest.mark.parametrize("estimator", ["minibatch", "exact", "biased"])
def test_each_estimator_equals_its_oracle(estimator):
    data = [residuals(seed, tokens=n) for seed, n in enumerate((12, 30, 7))]
    expected = oracles.oracle_cka(data, biased=estimator == "biased", exact=estimator == "exact")
    found = from_views(lsim.CKA(estimator=estimator), [samples(x) for x in data])
    for field, value in expected.items():
        np.testing.assert_allclose(getattr(found, field), value, atol=1e-9, err_msg=field)
    np.testing.assert_allclose(found.values, found.values.T, atol=1e-12)
    np.testing.assert_allclose(found.values.diagonal(), 1, atol=1e-12)


@pytest.mark.parametrize("estimator", ["minibatch", "exact", "biased"])
def test_between_two_models_of_other_width_and_depth(estimator):
    xs = [residuals(seed, tokens=20) for seed in range(3)]
    ys = [residuals(seed + 9, layers=3, tokens=20, width=5) + x[:3, :, :5] for seed, x in enumerate(xs)]
    expected = oracles.oracle_cka(xs, ys, biased=estimator == "biased", exact=estimator == "exact")
    found = between(lsim.CKA(estimator=estimator), xs, ys)
    assert found.values.shape == (4, 3)
    for field, value in expected.items():
        np.testing.assert_allclose(getattr(found, field), value, atol=1e-9, err_msg=field)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("estimator", ["minibatch", "biased"])
@pytest.mark.parametrize("bandwidth", [0.2, 1])
def test_an_rbf_kernel_equals_its_oracle(bandwidth, estimator, rows):
    xs = [residuals(seed, layers=2, tokens=15) for seed in range(2)]
    ys = [residuals(seed + 9, layers=3, tokens=15, width=5) + x[:1, :, :5] for seed, x in enumerate(xs)]
    found = between(lsim.CKA(estimator=estimator, rbf_bandwidth=bandwidth), xs, ys, rows=rows)
    text = np.arange(15) // rows
    for row in range(2):
        for column in range(3):
            sides = [[x[row] for x in xs], [y[column] for y in ys]]
            expected = oracles.rbf_cka(*sides, bandwidth, estimator == "biased", text)
            assert float(found.values[row, column]) == pytest.approx(expected, abs=1e-9)


def test_a_wide_rbf_kernel_is_the_linear_one():
    """exp(-d^2 / 2 s^2) is 1 - d^2 / 2 s^2 for a large s, and squared distances give the centred inner products."""
    data = [samples(residuals(0, tokens=30))]
    wide = from_views(lsim.CKA(rbf_bandwidth=1e3), data)
    np.testing.assert_allclose(wide.values, from_views(lsim.CKA(), data).values, atol=1e-5)


def test_an_rbf_kernel_needs_distances_and_gram_matrices():
    x = residuals(0, tokens=20)
    x[1, :15] = 1.0
    with pytest.warns(lsim.LayersimWarning, match=r"blocks\.0\.hook_resid_post"):
        found = from_views(lsim.CKA(rbf_bandwidth=1.0), [samples(x)])
    assert bool(found.values[1].isnan().all())
    with pytest.raises(lsim.LayersimError, match=r"`rbf_bandwidth`.* 0\.5"):
        lsim.CKA(estimator="exact", rbf_bandwidth=0.5)


@pytest.mark.parametrize("estimator", ["minibatch", "exact"])
def test_pairs_of_one_row_are_left_out(estimator):
    xs = [residuals(seed, tokens=18) for seed in range(2)]
    ys = [residuals(seed + 9, layers=3, tokens=18, width=5) + x[:3, :, :5] for seed, x in enumerate(xs)]
    expected = oracles.oracle_cka(xs, ys, exact=estimator == "exact", rows=3)
    found = between(lsim.CKA(estimator=estimator), xs, ys, rows=3)
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-9)
    independent = between(lsim.CKA(estimator=estimator, unit="token"), xs, ys, rows=3)
    np.testing.assert_allclose(independent.values, oracles.oracle_cka(xs, ys, exact=estimator == "exact")["values"], atol=1e-9)
    assert (found.values - independent.values).abs().max() > 1e-3


def test_exact_cka_of_rows_of_unequal_lengths():
    model = tiny_llama()
    rows = [random_tokens(1, n, seed=n)[0] for n in (3, 9, 4, 6, 5)]
    x = np.concatenate([hidden_states(model, row) for row in rows], axis=1).astype(np.float64)
    row = np.repeat(np.arange(5), [len(one) for one in rows])
    grams = [(z - z.mean(0)) @ (z - z.mean(0)).T for z in x]
    hsic = np.array([[oracles.hsic_of_rows(a, b, row)[0] for b in grams] for a in grams])
    expected = hsic / np.sqrt(np.outer(hsic.diagonal(), hsic.diagonal()))
    found = lsim.analyze(model, lsim.Data(rows, batch_size=2), lsim.CKA(estimator="exact"))["cka"]
    np.testing.assert_allclose(found.values, expected, atol=1e-5)


def test_invariant_to_rotation_scale_and_translation():
    rng = np.random.default_rng(0)
    x = residuals(0, tokens=40)
    rotation = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    y = 7 * x @ rotation + rng.normal(size=8)
    for estimator in ("minibatch", "exact", "biased"):
        found = between(lsim.CKA(estimator=estimator), [x], [y])
        np.testing.assert_allclose(found.values.diagonal(), 1, atol=1e-9)
        sheared = between(lsim.CKA(estimator=estimator), [x], [x * np.arange(1, 9)])
        assert sheared.values.diagonal().max() < 0.99


def test_independent_gaussians_read_zero_unbiased_and_half_biased():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 1, 256, 256))
    unbiased = between(lsim.CKA(), [x], [y]).values.item()
    biased = between(lsim.CKA(estimator="biased"), [x], [y]).values.item()
    assert abs(unbiased) < 0.01
    assert 0.48 < biased < 0.52


def test_unbiased_values_are_not_clipped():
    rng = np.random.default_rng(3)
    values = [
        between(lsim.CKA(), [rng.normal(size=(1, 16, 30))], [rng.normal(size=(1, 16, 30))]).values.item() for _ in range(20)
    ]
    assert min(values) < 0 < max(values)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_mean_of_ratios_is_not_the_ratio_of_means(biased, rows):
    estimator = "biased" if biased else "minibatch"
    xs = [residuals(0, tokens=18), 30 * residuals(1, tokens=18)]
    ys = [residuals(seed + 9, layers=3, tokens=18, width=5) + x[:3, :, :5] for seed, x in enumerate(xs)]
    ratios = np.mean([oracles.oracle_cka([x], [y], biased, rows=rows)["values"] for x, y in zip(xs, ys, strict=True)], axis=0)
    found = between(lsim.CKA(estimator=estimator, average="cka"), xs, ys, rows)
    np.testing.assert_allclose(found.values, ratios, atol=1e-9)
    assert np.abs(between(lsim.CKA(estimator=estimator), xs, ys, rows).values - ratios).max() > 1e-3


def test_a_layer_that_has_no_cka_in_one_minibatch_has_no_mean():
    data = [residuals(seed, tokens=8) for seed in range(2)]
    data[1][2] = 1.0
    found = from_views(lsim.CKA(average="cka"), [samples(x) for x in data]).values
    assert torch.equal(found.isnan(), torch.tensor([[a == 2 or b == 2 for b in range(4)] for a in range(4)]))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_whole_rows_as_vectors():
    """Sequence and feature flattened to one dimension, in several passes and for any size of batch."""
    model, tokens = tiny_llama(), random_tokens(12, 6)
    x = np.stack([hidden_states(model, row).reshape(4, -1) for row in tokens], axis=1).astype(np.float64)
    expected = oracles.oracle_cka([x])["values"]
    analyzer = lsim.CKA(level="sequence", pool="flat", minibatch=12)
    for size in (1, 5, 16):
        found = lsim.analyze(model, lsim.Data(tokens, batch_size=size), analyzer)["cka"]
        np.testing.assert_allclose(found.values, expected, atol=1e-5)
    with pytest.raises(lsim.LayersimError, match=r"`pool` is 'flat'.* 5 to 6"):
        lsim.analyze(model, [*tokens[:5], tokens[5][:5]], analyzer)
    width = x.shape[2] // 6
    with pytest.raises(lsim.LayersimError, match=f"`pool` is 'flat'.* {5 * width} to {6 * width} "):
        lsim.analyze(model, lsim.Data([*tokens[:5], tokens[5][:5]], batch_size=1), analyzer)


def test_float32_survives_a_large_common_vector():
    x = residuals(0, tokens=40)
    shifted = (x + 300).astype(np.float32)
    # Translation changes nothing; the naive formula itself loses digits on so large a common vector.
    wide = shifted.astype(np.float64)
    expected = oracles.oracle_cka([wide - wide.mean(axis=1, keepdims=True)])["values"]
    found = from_views(lsim.CKA(), [samples(shifted)])
    np.testing.assert_allclose(found.values, expected, atol=1e-4)
    exact = from_views(lsim.CKA(estimator="exact"), [samples(shifted)])
    np.testing.assert_allclose(exact.values, expected, atol=1e-6)


def test_minibatches_are_of_n_shuffled_seeded_and_counted():
    x = residuals(0, tokens=110)
    tokens = np.arange(110)
    one = from_views(lsim.CKA(minibatch=25), [samples(x, tokens)])
    assert (one.minibatches, one.samples) == (4, 100)
    again = from_views(lsim.CKA(minibatch=25), [samples(x, tokens)])
    assert torch.equal(one.values, again.values)
    for other in (lsim.CKA(minibatch=25, seed=1), lsim.CKA(minibatch=24)):
        assert not torch.allclose(from_views(other, [samples(x, tokens)]).values, one.values, atol=1e-6)


def test_distance_is_over_the_outputs_of_blocks():
    xs = [residuals(seed, tokens=30) for seed in range(2)]
    ys = [x + np.random.default_rng(1).normal(size=x.shape) for x in xs]
    found = between(lsim.CKA(), xs, ys)
    assert found.distance() == pytest.approx(oracles.arccos_distance(found.values.numpy()), abs=1e-12)
    assert found.distance() > 0.1
    same = between(lsim.CKA(), xs, xs)
    assert same.distance() == pytest.approx(0, abs=1e-6)


def test_distance_needs_equal_depth():
    found = between(lsim.CKA(), [residuals(0)], [residuals(1, layers=3)])
    with pytest.raises(lsim.LayersimError, match=r"\b3 and 2\b"):
        found.distance()


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_sequences_as_samples(pool):
    model = tiny_llama()
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 12, 5, 20, 7, 16)]
    states = [hidden_states(model, row) for row in rows]
    pooled = [s.mean(1) if pool == "mean" else s[:, -1] for s in states]
    expected = oracles.oracle_cka([np.stack(pooled, axis=1)])
    found = lsim.analyze(model, rows, lsim.CKA(level="sequence", pool=pool))["cka"]
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-5)
    exact = lsim.analyze(model, lsim.Data(rows, batch_size=2), lsim.CKA(level="sequence", pool=pool, estimator="exact"))["cka"]
    np.testing.assert_allclose(exact.values, expected["values"], atol=1e-5)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_compare_runs_two_models_on_the_same_tokens():
    a, b = tiny_llama(), tiny_llama(layers=2, seed=1)
    rows = list(random_tokens(5, 20))
    states = ([np.concatenate([hidden_states(model, row) for row in rows], axis=1)] for model in (a, b))
    expected = oracles.oracle_cka(*states, rows=20)
    found = lsim.compare(a, b, lsim.Data(rows, batch_size=1), lsim.CKA())
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-5)
    assert (len(found.layers), len(found.column_layers)) == (4, 3)
    assert " | " in found.provenance.model
    assert found.to_frame().shape == (12, 3)
    assert list(lsim.compare(a, b, rows, [lsim.CKA()])) == ["cka"]
    assert found.plot().layout.xaxis.title.text.startswith("After block of")


def test_four_samples_are_needed():
    for unit in ("row", "token"):
        with pytest.raises(lsim.LayersimError, match=r"CKA.* 4 .* 1 .* 1 "):
            from_views(lsim.CKA(unit=unit), [samples(residuals(0, tokens=3))] * 5)
    assert from_views(lsim.CKA(estimator="exact"), [samples(residuals(i, tokens=3)) for i in range(5)]).samples == 15


def test_four_rows_are_needed_unless_tokens_are_independent():
    one = [view(residuals(0, tokens=30), rows=3)]
    with pytest.raises(lsim.LayersimError, match=r"CKA.* 4 .*unit=\"token\""):
        from_views(lsim.CKA(), one)
    assert from_views(lsim.CKA(unit="token"), one).samples == 30


def test_constant_activations_have_no_cka():
    x = residuals(0)
    x[:] = 1.0
    with pytest.raises(lsim.LayersimError, match=r"CKA.*hook_resid_pre.* 40 "):
        from_views(lsim.CKA(), [samples(x)])


def test_exact_says_what_memory_it_needs():
    with pytest.raises(lsim.LayersimError, match=r"0\.000786 GB.*`max_memory_gb`.*1e-05"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.CKA(estimator="exact", max_memory_gb=1e-5))


def test_a_batch_too_small_for_a_minibatch_hardly_counts():
    model, rows = tiny_llama(), list(random_tokens(16, 20))
    whole = lsim.analyze(model, rows, lsim.CKA(minibatch=64))["cka"]
    tail = lsim.analyze(model, [*rows, *random_tokens(4, 3, seed=9)], lsim.CKA(minibatch=64))["cka"]
    assert tail.minibatches == whole.minibatches + 1
    assert (tail.values - whole.values).abs().max() < 0.01
    assert whole.samples / whole.minibatches == 64 > tail.samples / tail.minibatches


def test_each_minibatch_weighs_its_pairs():
    data = [residuals(0, tokens=40), residuals(1, tokens=6)]
    for biased in (False, True):
        found = from_views(lsim.CKA(estimator="biased" if biased else "minibatch"), [samples(x) for x in data])
        np.testing.assert_allclose(found.values, oracles.oracle_cka(data, biased=biased)["values"], atol=1e-10)
        alone = oracles.oracle_cka(data[:1], biased=biased)["values"]
        assert 1e-6 < np.abs(found.values.numpy() - alone).max() < 0.1


@pytest.mark.parametrize("estimator", ["minibatch", "exact"])
def test_few_samples_are_effective_beside_a_massive_one(estimator):
    x = residuals(0, tokens=512)
    assert from_views(lsim.CKA(estimator=estimator), [samples(x)]).effective_samples.min() > 150
    x[2, 17] *= 300
    found = from_views(lsim.CKA(estimator=estimator), [samples(x)])
    assert found.effective_samples[2] < 1.1
    assert found.effective_samples[3] > 150


def test_few_samples_are_spoken_of():
    for few in (40, 99):
        with pytest.warns(lsim.LayersimWarning, match=f"CKA rests on {few} samples"):
            from_views(lsim.CKA(), [samples(residuals(0, tokens=few))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_views(lsim.CKA(), [samples(residuals(0, tokens=100))])


def test_a_layer_of_equal_samples_in_the_second_model_is_named_and_nan():
    x, y = residuals(0, layers=2, tokens=40), residuals(1, layers=3, tokens=40)
    y[1] = 7.0
    with pytest.warns(lsim.LayersimWarning, match=re.escape("blocks.0.hook_resid_post")):
        found = between(lsim.CKA(minibatch=20), [x], [y])
    assert found.column_effective_samples.isnan().tolist() == [False, True, False]
    assert found.values.isnan().any(0).tolist() == [False, True, False]


def both(tokens: int = 9) -> tuple[np.ndarray, np.ndarray]:
    x = residuals(0, layers=3, tokens=tokens)
    return x, residuals(1, layers=2, tokens=tokens, width=5) + x[:2, :, :5]


@pytest.mark.parametrize("tokens", [4, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_centred_gram_matrices_multiply_to_the_estimators(biased, tokens):
    x, y = both(tokens)
    a, r_x = centred(gram_matrices(torch.as_tensor(x)), biased)
    b, _ = centred(gram_matrices(torch.as_tensor(y)), biased)
    factor = (tokens - 1) ** 2 if biased else tokens * (tokens - 3)
    hsic = oracles.hsic_0 if biased else oracles.hsic_1
    expected = [[factor * hsic(one @ one.T, other @ other.T) for other in y] for one in x]
    np.testing.assert_allclose(a @ b.T, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(r_x, ((x - x.mean(1, keepdims=True)) ** 2).sum(-1), rtol=1e-12)


@pytest.mark.parametrize("samples", [4, GRAM_ROWS, GRAM_ROWS + 1, 3 * GRAM_ROWS - 5])
def test_gram_matrices_of_any_number_of_samples(samples):
    """Only the upper triangle is multiplied, some rows at a time."""
    x = torch.randn(3, samples, 7, dtype=torch.float64) + 5
    gram = gram_matrices(x)
    centred_x = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(gram, centred_x @ centred_x.mT, rtol=1e-12, atol=1e-12)
