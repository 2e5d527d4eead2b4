"""The means that a block coupling is summed up in, against loops over pairs of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import tl_layersim as lsim
from tl_layersim.analyzers.block_coupling import BlockCouplingResult

from ..views import from_views, residuals, view


def measured(normalize: bool = True) -> BlockCouplingResult:
    analyzer = lsim.BlockCoupling(k=(3, 2), normalize=normalize)
    return from_views(analyzer, [view(residuals(seed, layers=5, tokens=9)) for seed in range(2)])


def over_pairs(matrix: np.ndarray, which: Callable[[int, int], bool]) -> float:
    return float(np.mean([matrix[a, b] for a, b in itertools.product(range(len(matrix)), repeat=2) if which(a, b)]))


@pytest.mark.parametrize("normalize", [True, False])
def test_the_headline_is_of_pairs_of_different_blocks(normalize):
    found = measured(normalize)
    own = 1.0 if normalize else 0.0
    values, null = own - found.values.numpy(), own - found.null.numpy()
    expected = [
        over_pairs(values, lambda a, b: a != b),
        over_pairs(null, lambda a, b: a != b),
        over_pairs(values, lambda a, b: abs(a - b) == 1),
    ]
    said = found.headline()
    assert list(said.values()) == pytest.approx(expected, rel=1e-12)
    assert next(iter(said)).startswith(("coupling" if normalize else "-m") + ", k = 3")
    np.testing.assert_allclose(found.coupling, values, rtol=1e-12)
    np.testing.assert_allclose(found.null_coupling, null, rtol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_means_of_a_table_are_in_the_order_of_their_labels(normalize):
    found = measured(normalize)
    means = dict(zip(found.pair_kinds, found.mean_coupling.tolist(), strict=True))
    expected = {"all pairs": found.mean(), "neighbours": found.neighbours(), "random vectors": found.mean("null_coupling")}
    assert means == pytest.approx(expected, rel=1e-12)
    assert len(set(means.values())) == 3


@pytest.mark.parametrize("normalize", [True, False])
def test_means_of_each_k(normalize):
    found = measured(normalize)
    own = 1.0 if normalize else 0.0
    for number, k in enumerate((3, 2)):
        values, null = found.by_k[number].numpy(), found.null_by_k[number].numpy()
        for field, matrix in {"values": values, "null": null, "coupling": own - values, "null_coupling": own - null}.items():
            assert found.mean(field, k) == pytest.approx(over_pairs(matrix, lambda a, b: a != b), rel=1e-12)
    assert found.mean("std") == pytest.approx(over_pairs(found.std.numpy(), lambda a, b: a != b))
    for field, k in (("coupling", 4), ("std", 3), ("defined", 2)):
        with pytest.raises(lsim.LayersimError, match=f"`k`.*{field!r}"):
            found.mean(field, k)


def test_the_mean_over_lengths_is_the_mean_over_prompts():
    """One prompt of 9 tokens and one of 5: octaves 8 to 15 and 4 to 7."""
    views = [view(residuals(0, layers=5, tokens=9)), view(residuals(1, layers=5, tokens=5))]
    found = from_views(lsim.BlockCoupling(k=3), views)
    assert found.lengths == ("4 to 7", "8 to 15")
    assert found.length_count.tolist() == [1, 1]
    alone = [from_views(lsim.BlockCoupling(k=3), [one]).mean() for one in reversed(views)]
    np.testing.assert_allclose(found.by_length, alone, rtol=1e-12)
    # One prompt of each length has no spread.
    assert bool(found.by_length_std.isnan().all())
    assert found.measured_on("by_length").startswith("1, 1 ")
