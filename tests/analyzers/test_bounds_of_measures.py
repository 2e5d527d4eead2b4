"""The range of each quantity, from its definition: intervals lie in it."""

from __future__ import annotations

import math

import pytest

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.core.intervals import bounds_of
from tl_layersim.core.result_declarations import below

FRACTION = (0, 1)
COSINE = (-1, 1)
POSITIVE = (0, math.inf)
AT_MOST_ONE = (-math.inf, 1)
# Similarities of the null are those of the measure less what it takes off, and have no lower end of their own.
NULL = {
    "observed": AT_MOST_ONE,
    "calibrated": AT_MOST_ONE,
    "p_values": None,
    "null_mean": AT_MOST_ONE,
    "null_threshold": AT_MOST_ONE,
    "max_value": None,
    "max_p_value": None,
    "max_calibrated": None,
    "split_half": None,
    "noise_ceiling": None,
}
RATIO = (1, math.inf)
EXPECTED = {
    "CosineResult": dict.fromkeys(("values", "to_last", "adjacent"), COSINE)
    # Numbers from -1 to 1 have a standard deviation of 1 at most; 1 - cosine is 2 for the opposite direction.
    | dict.fromkeys(
        ("std", "below_zero", "monotone_share", "step_share", "triple_share", "to_last_outliers", "angular"), FRACTION
    )
    | {
        "to_last_minimum": None,
        "norm_ratio": POSITIVE,
        "norm_ratio_quantiles": POSITIVE,
        "block_influence": (0, 2),
        "mean": None,
    },
    # By the inequality of Cauchy and Schwarz, which holds for U-centred Gram matrices too.
    "CKAResult": NULL
    | {"values": COSINE, "biased": FRACTION}
    | dict.fromkeys(("effective_samples", "column_effective_samples"), (1, math.inf)),
    "RSAResult": NULL | {"values": COSINE},
    "MutualKNNResult": NULL | {"values": FRACTION, "chance": FRACTION},
    # 1 - R2 is a ratio of squares, without an upper end.
    "LinearPredictivityResult": NULL | {"values": AT_MOST_ONE, "reverse": AT_MOST_ONE},
    "CCAResult": NULL
    | dict.fromkeys(("values", "squared", "svcca", "pwcca", "column_pwcca"), FRACTION)
    | dict.fromkeys(("dimensions", "column_dimensions", "directions", "column_directions")),
    "ProcrustesResult": NULL | {"values": FRACTION, "angle": (0, math.pi / 2), "euclidean": POSITIVE},
    "EffectiveRankResult": {
        "values": RATIO,
        "eigenvalue_rank": RATIO,
        "participation_ratio": RATIO,
        "stable_rank": RATIO,
        "directions_90": None,
        "spectrum": FRACTION,
    },
    "ContributionResult": {
        "values": POSITIVE,
        **dict.fromkeys(("cosine", "cosine_to_final"), COSINE),
    },
    # Two distributions are sqrt(2) apart when each is certain of another token.
    "SkipEffectResult": {
        **dict.fromkeys(("values", "largest", "later", "later_largest"), POSITIVE),
        **{
            f"{prefix}probability_change{suffix}": (0, math.sqrt(2)) for prefix in ("", "later_") for suffix in ("", "_largest")
        },
    },
    # A path is never shorter than the straight line.
    "TrajectoryResult": {
        **dict.fromkeys(("values", "norm_quantiles"), POSITIVE),
        **dict.fromkeys(("update_norm", "update_norm_quantiles", "geodesic_deviation"), POSITIVE),
        **{
            f"{name}{suffix}": POSITIVE
            for name in ("expodistance", "equidistance")
            for suffix in ("_mean", "_std", "_quantiles")
        },
        **dict.fromkeys(("lss_mean", "lss_quantiles", "windowed_lss"), RATIO),
        "lss_std": POSITIVE,
        "curvature": (0, math.pi),
        **dict.fromkeys(("prompt_lss", "prompt_expodistance", "prompt_equidistance", "prompt_norm", "prompt_tokens")),
    },
    # Miscoupling is a ratio of norms, and coupling 1 less it.
    "BlockCouplingResult": {
        **dict.fromkeys(("values", "std", "null", "by_k", "null_by_k", "singular_values"), POSITIVE),
        **dict.fromkeys(("length_count", "residual", "step_error"), POSITIVE),
        **dict.fromkeys(("coupling", "by_length"), AT_MOST_ONE),
        **dict.fromkeys(("path_error", "update_error"), POSITIVE),
        **dict.fromkeys(("defined", "whole_rows", "left_share", "right_share"), FRACTION),
        **dict.fromkeys(("left_alignment", "right_alignment", "cross_alignment"), FRACTION),
        "prompt_coupling": None,
        "prompt_tokens": None,
    },
    "LogitLensResult": {
        **dict.fromkeys(("values", "kl_to_final", "entropy"), POSITIVE),
        **dict.fromkeys(("accuracy", "top_k_accuracy", "target_probability", "agreement", "monotone_share"), FRACTION),
        **dict.fromkeys(("step_share", "step_share_if_closer", "lost_share"), FRACTION),
        **dict.fromkeys(("reciprocal_rank", "ranked_probability"), FRACTION),
        **dict.fromkeys(("perplexity", "rank"), RATIO),
    },
    "SaturationResult": {
        "values": POSITIVE,
        **dict.fromkeys(("cumulative", "early_share"), FRACTION),
        **dict.fromkeys(("cosine_to_last", "correlation"), COSINE),
    },
    "ExitCurveResult": {
        **dict.fromkeys(("values", "part_exits"), POSITIVE),
        **dict.fromkeys(("accuracy", "agreement", "part_accuracy", "part_agreement"), FRACTION),
        **dict.fromkeys(("perplexity", "speedup", "part_perplexity"), RATIO),
    },
    # 1 + 1 / (K - 1) is 2 for two classes; vectors of norm 1 are 2 apart.
    "NeuralCollapseResult": dict.fromkeys(("values", "within", "between", "samples", "equinorm"), POSITIVE)
    | {"nc2": (0, 2), "nc3": (0, 4)},
    "LinearProbeResult": {
        **dict.fromkeys(("values", "train_accuracy", "control_accuracy"), FRACTION),
        "selectivity": COSINE,
        "confusion": POSITIVE,
        **dict.fromkeys(("majority", "samples", "test_samples")),
    },
    "TaskMetricsResult": {
        **dict.fromkeys(("values", "accuracy", "f1_by_class"), FRACTION),
        "mcc": COSINE,
        "confusion": POSITIVE,
    },
    "RegressionMetricsResult": dict.fromkeys(("values", "pearson"), COSINE),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_intervals_lie_in_the_range_of_the_quantity(kind):
    find_analyzers()
    cls = {subclass.__name__: subclass for subclass in below(lsim.Result)}[kind]
    free = (-math.inf, math.inf)

    assert {name: bounds for name, bounds in bounds_of(cls).items() if bounds != free} == EXPECTED[kind]
