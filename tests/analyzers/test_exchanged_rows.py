"""The null of similarities: whole rows of the columns are exchanged, position with position, in each pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.activations.row_pools import samples_of
from tl_layersim.analyzers._samples import draw_grid, draw_minibatches, draw_permutations, pool_key
from tl_layersim.core import Sums
from tl_layersim.core.sums import POOL, with_pools

from .. import oracles
from ..inputs.views import layer_run, residuals, samples, view
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called

LENGTHS = (7, 3, 9, 6, 8, 7, 1, 6)
# Of half of these rows, the held-out ones; the sixth row is in neither grid: it has one token.
SPLIT = {"test_fraction": 0.5, "seed": 0}


def ragged(x: np.ndarray, **fields) -> View:
    """A view of rows of unequal lengths."""
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    return replace(view(x), sequence=row, position=position, row=row, **fields)


def computed(analyzer, *views: View) -> lsim.Result:
    """The result of an analyzer on one pool."""
    kernels = {"k": analyzer.kernel(Sums())}
    if (pool := analyzer.pool_kernel(Sums())) is not None:
        kernels[POOL + "k"] = pool
    sums = with_pools({name: Sums.of(kernel(*views)) for name, kernel in kernels.items()}, "k")
    return analyzer.compute(sums, layer_run(*(len(side.activations) for side in views)))


def selected(source_view: View, index: torch.Tensor) -> View:
    """The view of some samples."""
    names = ("tokens", "sequence", "position", "row")
    return replace(
        source_view,
        activations=source_view.activations[:, index],
        **{name: getattr(source_view, name)[index] for name in names},
        memo={},
    )


def exchanged(source_view: View, grid: torch.Tensor, order: torch.Tensor) -> View:
    """The view of samples `row position`, with the activations of other rows."""
    flat = selected(source_view, grid.flatten())
    return replace(flat, activations=source_view.activations[:, grid[order].flatten()])


PAIRS = {
    "cka": lambda **options: lsim.CKA(**options),
    "biased cka": lambda **options: lsim.CKA(estimator="biased", **options),
    "rsa": lambda **options: lsim.RSA(**options),
    "mutual_knn": lambda **options: lsim.MutualKNN(k=3, **options),
    "procrustes": lambda **options: lsim.Procrustes(**options),
    "cca": lambda **options: lsim.CCA(**options),
}


@pytest.mark.covering
@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_null_values_are_those_of_exchanged_rows(name, two):
    """Each value of the null is what the measure gives on rows of which those of the columns are in another order."""
    count = sum(LENGTHS)
    a = ragged(residuals(0, layers=3, tokens=count))
    b = ragged(residuals(1, layers=2, tokens=count, width=5)) if two else a

    result = computed(PAIRS[name](permutations=23), *((a, b) if two else (a,)))
    row_samples = samples_of(a, False)
    in_pairs = name not in ("procrustes", "cca")
    grid = draw_grid(
        row_samples, 256 if in_pairs else count * 64, 0, *((5, 4) if name == "mutual_knn" else (4, 4) if in_pairs else (1, 1))
    )

    assert grid.shape == (6, 6)
    assert a.sequence[grid[:, 0]].tolist() == [0, 2, 3, 4, 5, 7]

    # The seed of the orders depends on the samples that were drawn.
    drawn = row_samples if in_pairs else row_samples.select(grid.flatten().sort().values)
    if in_pairs:
        used = torch.unique(torch.cat([*draw_minibatches(row_samples, 256, 0, 4, True), grid.flatten()]))
        drawn = row_samples.select(used)
    orders = draw_permutations(23, 6, pool_key(drawn, 0))
    plain = PAIRS[name]()
    values = [computed(plain, selected(a, grid.flatten()), exchanged(b, grid, order)).values for order in orders]
    expected = torch.stack(values)
    pair = (0, 1)
    np.testing.assert_allclose(result.null_mean[pair], expected.mean(0)[pair], atol=1e-9)

    unpermuted = computed(plain, selected(a, grid.flatten()), selected(b, grid.flatten()))
    np.testing.assert_allclose(result.observed[pair], unpermuted.values[pair], atol=1e-9)

    reached = (expected[:, 0, 1] >= unpermuted.values[pair] - 1e-10).sum()
    assert float(result.p_values[pair]) == pytest.approx((1 + float(reached)) / 24)
    # Values are of all samples, with a null and without.
    torch.testing.assert_close(result.values, computed(plain, *((a, b) if two else (a,))).values, rtol=0, atol=0)


def test_training_and_held_out_rows_are_exchanged_among_themselves():
    count = sum(LENGTHS)
    a = ragged(residuals(0, layers=2, tokens=count))
    b = ragged(residuals(1, layers=2, tokens=count, width=5))

    result = computed(lsim.LinearPredictivity(permutations=23, ridge=1.0, **SPLIT), a, b)
    out = oracles.held_out_rows(len(LENGTHS), 0.5, 0)
    row_samples = samples_of(a, False)
    grids = []
    for held_out in (False, True):
        index = torch.tensor([i for i, row in enumerate(row_samples.row.tolist()) if out[row] is held_out])
        grids.append(index[draw_grid(row_samples.select(index), 64 * len(index), 0, 1, 1)])
    drawn = row_samples.select(torch.cat([grid.flatten() for grid in grids]).sort().values)
    orders = [draw_permutations(23, len(grid), pool_key(drawn, 0)) for grid in grids]
    values = []
    for pair_orders in zip(*orders, strict=True):
        # Rows in the order of the data, as the analyzer reads them.
        left_sides = [selected(a, grid.flatten()) for grid in grids]
        right = [exchanged(b, grid, order) for grid, order in zip(grids, pair_orders, strict=True)]
        place = torch.cat([grid.flatten() for grid in grids]).argsort()
        sides = [selected(_joined(side), place) for side in (left_sides, right)]
        values.append(computed(lsim.LinearPredictivity(ridge=1.0, **SPLIT), *sides).values[0, 1])

    np.testing.assert_allclose(result.null_mean[0, 1], torch.stack(values).mean(), atol=1e-9)


def _joined(views: list[View]) -> View:
    parts = {}
    for name in ("tokens", "sequence", "position", "row"):
        parts[name] = torch.cat([getattr(part, name) for part in views])
    return replace(views[0], activations=torch.cat([part.activations for part in views], 1), **parts)


@pytest.mark.parametrize("name", PAIRS)
def test_independent_samples_are_exchanged_one_by_one(name):
    """A row of one sample, and `unit="token"` for samples of one row, have one null."""
    x = residuals(0, layers=3, tokens=24)
    by_row = computed(PAIRS[name](permutations=40), samples(x))
    by_token = computed(PAIRS[name](permutations=40, unit="token"), samples(x))
    spread = (by_row.null_threshold - by_row.null_mean)[0, 1]

    np.testing.assert_allclose(by_row.null_mean[0, 1], by_token.null_mean[0, 1], atol=float(spread))
    np.testing.assert_allclose(by_row.values, by_token.values, atol=1e-9)


POOLED = {
    "CKA": lsim.CKA(permutations=19),
    "biased CKA": lsim.CKA(estimator="biased"),
    "CKA of last tokens": lsim.CKA(level="sequence", pool="last", permutations=19, minibatch=24),
    "RSA": lsim.RSA(permutations=19),
    "MutualKNN": lsim.MutualKNN(k=3, permutations=19),
    "Procrustes": lsim.Procrustes(permutations=19),
    "CCA": lsim.CCA(permutations=19),
    "Procrustes of rows": lsim.Procrustes(level="sequence", permutations=19),
    "LinearPredictivity": lsim.LinearPredictivity(permutations=19),
}


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:Intervals of")
@pytest.mark.parametrize("analyzer", POOLED.values(), ids=POOLED)
def test_a_result_does_not_depend_on_the_rows_of_a_forward_pass(analyzer):
    model = tiny_llama()
    rows = [random_tokens(1, 17 + i % 9, seed=i)[0] for i in range(40)]
    first = None

    for batch_size in (5, 16, 40):
        result = lsim.analyze(model, lsim.Data(rows, batch_size=batch_size), [analyzer], intervals=batch_size == 5)[
            analyzer.name
        ]
        first = first or result
        for field in result.tensor_fields():
            torch.testing.assert_close(getattr(result, field), getattr(first, field), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_longer_run_of_rows_has_more_pools():
    model = tiny_llama()
    rows = random_tokens(40, 32)

    result = lsim.analyze(model, rows, lsim.CKA())["cka"]

    # 16 rows of 32 tokens are two minibatches; the last eight rows are one.
    assert (result.minibatches, result.samples) == (5, 1280)
    assert 8 <= result.texts <= 16

    of_rows = lsim.analyze(model, rows, lsim.CKA(level="sequence"))["cka"]
    assert (of_rows.minibatches, of_rows.samples, of_rows.texts) == (1, 40, 40)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rows", "length", "warned"), [(4, 20, True), (7, 40, True), (8, 40, False)])
@pytest.mark.parametrize("analyzer", [lsim.RSA(), lsim.CKA()])
def test_few_rows_are_warned_of(analyzer, rows, length, warned):
    [result] = lsim.analyze(tiny_llama(), random_tokens(rows, length), analyzer).values()
    assert any(f"{rows} texts on average" in warning for warning in result.provenance.warnings) is warned


def test_draws_depend_on_the_rows_and_the_seed():
    tokens = random_tokens(8, 12).flatten()
    plain_samples = samples_of(replace(view(residuals(0, tokens=96), rows=8), tokens=tokens), False)
    changed_samples = samples_of(
        replace(view(residuals(0, tokens=96), rows=8), tokens=tokens + (torch.arange(96) == 50)), False
    )

    def order(all_samples, seed: int = 0) -> list[int]:
        return torch.cat(draw_minibatches(all_samples, 32, seed, 4, True)).tolist()

    assert sorted(order(plain_samples)) == list(range(96))
    assert order(plain_samples) == order(plain_samples)
    assert order(plain_samples) != order(plain_samples, seed=1)
    # Another token changes the draw of its row alone.
    assert order(plain_samples) != order(changed_samples)
    assert not torch.equal(draw_grid(plain_samples, 48, 0), draw_grid(plain_samples, 48, 1))
    assert draw_grid(plain_samples, 48, 0).shape == (8, 6)
    assert pool_key(plain_samples, 0) != pool_key(changed_samples, 0)


def test_minibatches_are_whole():
    all_samples = samples_of(samples(residuals(0, tokens=64)), False)
    assert [len(part) for part in draw_minibatches(all_samples, 10, 0, 4, True)] == [10] * 6

    few = all_samples.select(torch.arange(7))
    assert [len(part) for part in draw_minibatches(few, 10, 0, 4, True)] == [7]
    assert draw_minibatches(all_samples.select(torch.arange(3)), 10, 0, 4, True) == []

    # At most 64 samples of a row, and four rows at least.
    long = samples_of(view(residuals(0, tokens=400), rows=4), False)
    assert [len(part) for part in draw_minibatches(long, 400, 0, 4, True)] == [256]
    assert draw_minibatches(samples_of(view(residuals(0, tokens=90), rows=3), False), 90, 0, 4, True) == []


def test_permutations_follow_their_key_and_grow_by_more():
    few = draw_permutations(3, 8, 5)
    six = draw_permutations(6, 8, 5)

    assert torch.equal(few, six[:3])
    assert all(sorted(permutation.tolist()) == list(range(8)) for permutation in six)
    assert len({tuple(permutation.tolist()) for permutation in six}) == 6
    assert not torch.equal(few, draw_permutations(3, 8, 6))
    assert draw_permutations(0, 8, 5).shape == (0, 8)


@pytest.mark.parametrize("make", [PAIRS["cka"], PAIRS["biased cka"], PAIRS["rsa"], PAIRS["mutual_knn"]])
def test_models_that_are_apart_give_what_they_give_together(make):
    """From statistics of each, as of models on servers."""
    count = sum(LENGTHS)
    for analyzer in (make(permutations=20), make(minibatch=20), make(permutations=20, unit="token")):
        a = ragged(residuals(0, tokens=count))
        b = ragged(residuals(1, layers=3, tokens=count, width=5))
        exchange = analyzer.exchange()
        joined = exchange.join(*(exchange.prepare(exchange.kernel(side)) for side in (a, b)))
        together = analyzer.kernel(Sums())(a, b)
        assert joined.keys() == together.keys()
        for field, value in together.items():
            torch.testing.assert_close(joined[field], value, rtol=1e-9, atol=1e-9)


def test_a_pool_of_too_few_rows_adds_nothing():
    few = view(residuals(0, tokens=9), rows=3)
    assert lsim.CKA(permutations=19).kernel(Sums())(few) == {}
    assert lsim.CKA().exchange().kernel(few) == {}


def test_what_crosses_between_models_is_as_large_as_was_said():
    """Upper triangles in float32 and the row of each sample, of minibatches and of the null."""
    wide_view = view(residuals(0, tokens=320).astype(np.float32), rows=16)
    for analyzer in (lsim.CKA(), lsim.CKA(permutations=19), lsim.CKA(minibatch=64)):
        exchange = analyzer.exchange()
        sent = sum(part.numel() * part.element_size() for part in exchange.kernel(wide_view).values())
        assert exchange.size(16, 20.0, 4) == pytest.approx(sent, rel=0.02)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_compare_and_compare_grid_exchange_the_same_rows():
    models = {"a": tiny_llama(), "b": tiny_llama(seed=1), "c": tiny_llama(seed=2)}
    rows = random_tokens(8, 16)
    analyzer = lsim.CKA(permutations=40)

    grid = lsim.compare_grid(models, lsim.Data(rows, batch_size=2), analyzer)
    null = ("observed", "calibrated", "p_values", "null_mean", "null_threshold", "max_p_value")

    for pair in (("a", "b"), ("a", "c")):
        alone = called(lsim.compare, *(models[name] for name in pair), rows, analyzer, batch_size=2)
        for name in null:
            torch.testing.assert_close(getattr(grid[pair], name), getattr(alone, name), rtol=1e-6, atol=1e-6)

    result = lsim.analyze(models["b"], lsim.Data(rows, batch_size=2), [analyzer])["cka"]
    # A model beside itself has no pair of a layer and itself.
    torch.testing.assert_close(grid["b", "b"].max_calibrated, result.max_calibrated, rtol=1e-6, atol=1e-6)
    assert float(result.max_value) < 1
    assert torch.equal(grid["b", "a"].p_values, grid["a", "b"].p_values.T)


def test_related_layers_stand_out():
    model = tiny_llama()
    rows = random_tokens(32, 20)

    related = lsim.analyze(model, rows, [lsim.CKA(permutations=99)])["cka"]

    assert torch.equal(related.p_values, related.p_values.T)
    assert bool((related.p_values.diagonal(1) == 0.01).all())
    assert related.headline()["p-value of the maximum over pairs of layers"] == 0.01


def test_the_null_of_a_layer_without_differences_is_nan():
    x = residuals(0, tokens=30)
    x[1] = 1.0

    with pytest.warns(lsim.LayersimWarning, match="not defined"):
        result = computed(lsim.CKA(permutations=19), view(x, rows=10))

    assert bool(result.p_values[1].isnan().all())
    assert not bool(result.p_values[0, 2:].isnan().any())
    assert 0 < float(result.max_p_value) <= 1

    # Also where a row of the null differs that is in no minibatch. The null has the first rows.
    drawn = torch.cat(draw_minibatches(samples_of(samples(x), False), 20, 0, 4, True)).tolist()
    x[1, next(row for row in range(20) if row not in drawn)] = 2.0
    with pytest.warns(lsim.LayersimWarning, match="not defined"):
        result = computed(lsim.CKA(minibatch=20, permutations=19), samples(x))
    for field in (result.values, result.observed, result.p_values):
        assert field[1].isnan().all()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lsim.CKA, {"permutations": 200, "estimator": "exact"}),
        (lsim.CKA, {"deconfound": "input", "average": "cka"}),
    ],
)
def test_wrong_options_are_refused(make, options):
    with pytest.raises(lsim.LayersimError, match=next(iter(options))):
        make(**options)


def test_a_null_that_does_not_fit_is_refused_before_the_run():
    with pytest.raises(lsim.LayersimError, match="max_memory_gb"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.CKA(permutations=100, max_memory_gb=1e-6))
    models = {name: tiny_llama(seed=n) for n, name in enumerate("abc")}
    with pytest.raises(lsim.LayersimError, match="max_memory_gb"):
        lsim.compare_grid(models, random_tokens(), lsim.CKA(permutations=100, max_memory_gb=2e-4))
