"""The range of each quantity, from its definition: intervals are cut there."""

from __future__ import annotations

import math

import pytest

from tl_layersim.analyzers.cca import CCAResult
from tl_layersim.analyzers.cka import CKAResult
from tl_layersim.analyzers.cosine import CosineResult
from tl_layersim.analyzers.effective_rank import EffectiveRankResult
from tl_layersim.analyzers.linear_predictivity import LinearPredictivityResult
from tl_layersim.analyzers.mutual_knn import MutualKNNResult
from tl_layersim.analyzers.procrustes import ProcrustesResult
from tl_layersim.analyzers.rsa import RSAResult
from tl_layersim.core.intervals import bounds_of

FRACTION, COSINE, COUNT, AT_MOST_ONE = (0, 1), (-1, 1), (0, math.inf), (-math.inf, 1)
# Similarities of the null are those of the measure less what it takes off, and have no lower end of their own.
NULL = {
    "calibrated": FRACTION,
    "p_values": None,
    "null_mean": AT_MOST_ONE,
    "null_quantiles": AT_MOST_ONE,
    "null_threshold": AT_MOST_ONE,
    "max_value": AT_MOST_ONE,
    "max_p_value": None,
    "max_threshold": AT_MOST_ONE,
    "max_calibrated": FRACTION,
    "max_null": None,
}
RANK = (1, math.inf)
EXPECTED = {
    CosineResult: dict.fromkeys(("values", "to_last", "adjacent"), COSINE)
    # Numbers from -1 to 1 have a standard deviation of 1 at most; 1 - cosine is 2 for the opposite direction.
    | dict.fromkeys(("std", "below_zero", "monotone_share", "angular"), FRACTION)
    | {"norm_ratio": COUNT, "block_influence": (0, 2), "mean": None},
    # By the inequality of Cauchy and Schwarz, which holds for U-centred Gram matrices too.
    CKAResult: NULL | {"values": COSINE} | dict.fromkeys(("effective_samples", "column_effective_samples"), (1, math.inf)),
    RSAResult: NULL | {"values": COSINE},
    MutualKNNResult: NULL | {"values": FRACTION, "chance": FRACTION},
    # 1 - R2 is a ratio of squares, without an upper end.
    LinearPredictivityResult: NULL | {"values": AT_MOST_ONE, "reverse": AT_MOST_ONE},
    CCAResult: NULL
    | dict.fromkeys(("values", "squared", "svcca", "pwcca", "column_pwcca"), FRACTION)
    | dict.fromkeys(("dimensions", "column_dimensions", "directions", "column_directions"), COUNT),
    # Both matrices have norm 1: their squared distance is at most 2 when the best rotation leaves them orthogonal.
    ProcrustesResult: NULL | {"values": FRACTION, "squared_distance": (0, 2), "angle": (0, math.pi / 2)},
    EffectiveRankResult: {
        "values": RANK,
        "eigenvalue_rank": RANK,
        "participation_ratio": RANK,
        "stable_rank": RANK,
        "directions_90": RANK,
        "spectrum": FRACTION,
    },
}


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_intervals_are_cut_at_the_range_of_the_quantity(kind):
    assert bounds_of(kind) == EXPECTED[kind]
