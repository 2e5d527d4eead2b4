"""Intervals cover the value of the population, and p-values are uniform where nothing is shared, on dependent tokens.

`benchmarks/studies/populations.py` is the long version.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom

import tl_layersim as lsim

from ..inputs.populations import cka_coverage, of_pairs, rejections, wandering_documents

pytestmark = [pytest.mark.heavy("a simulation"), pytest.mark.filterwarnings("ignore")]
MEASURES = [lsim.CKA, lsim.RSA, lsim.MutualKNN, lsim.Procrustes, lsim.CCA, lsim.LinearPredictivity]
SIMULATIONS = 10


@pytest.mark.parametrize(("rho", "effect"), [(0.5, 0.0), (0.9, 0.0), (0.0, 0.1)])
def test_intervals_of_cka_cover_the_population_value_without_bias(rho, effect):
    found = [cka_coverage(64, SIMULATIONS, rho, effect, seed) for seed in range(4)]
    bias = torch.cat([own for _, own in found])
    assert abs(float(bias.mean())) < 4 * float(bias.std()) / len(bias) ** 0.5
    # Of intervals that cover in 95 %, fewer in one of ten thousand.
    assert sum(each for each, _ in found) * SIMULATIONS >= binom.ppf(1e-4, 4 * SIMULATIONS, 0.95)


@pytest.mark.parametrize("measure", MEASURES)
def test_independent_sites_are_rarely_called_similar_and_related_ones_often(measure):
    analyzer = measure(permutations=19)
    of_none, of_some = (
        sum(rejections(analyzer, 16, SIMULATIONS, 0.9, 0.0, shared, seed)[0] for seed in range(3)) * SIMULATIONS
        for shared in (0.0, 0.6)
    )
    assert of_none <= binom.ppf(1 - 1e-4, 3 * SIMULATIONS, 0.05)
    assert of_some > binom.ppf(1 - 1e-4, 3 * SIMULATIONS, 0.05)


@pytest.mark.parametrize(("kind", "how"), [("4 rows", "cut"), ("1 to 6 rows", "groups")])
def test_independent_sites_of_documents_of_several_rows_are_rarely_called_similar_and_related_ones_often(kind, how):
    """Tokens wander through all rows of a document, and each place has a mean of its own."""
    analyzers = [measure(permutations=19) for measure in MEASURES[:-1]]
    analyzers.append(lsim.LinearPredictivity(permutations=19, test_fraction=0.5))
    runs = {shared: [wandering_documents(analyzers, kind, 5, shared, seed, how) for seed in range(2)] for shared in (0.0, 0.6)}
    most = binom.ppf(1 - 1e-4, 10, 0.05)
    for analyzer in analyzers:
        of_none, of_some = (
            sum(int((of_pairs(report[analyzer.name].p_values) <= 0.05).sum()) for report in reports)
            for reports in runs.values()
        )
        assert of_none <= most < of_some, analyzer.name
