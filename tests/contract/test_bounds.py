"""Declared bounds of result fields: a pair, and kept by every value."""

from __future__ import annotations

import importlib
import pkgutil
from math import inf, pi, sqrt

import pytest

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.core.result_declarations import below, declarations

from ..inputs.views import from_views, residuals, view_for

ANALYZERS = sorted(find_analyzers().items())
# Random walks; a few samples of large norm; layers that are multiples of each other, so that paths are straight and cosines 1.
DATA = {
    "walk": lambda seed: residuals(seed, tokens=30),
    "few": lambda seed: residuals(seed, tokens=18) * 1e4,
    "straight": lambda seed: residuals(seed, layers=1, tokens=30).repeat(4, axis=0) * [[[1]], [[2]], [[4]], [[9]]],
}


@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("name", "cls"), ANALYZERS, ids=[name for name, _ in ANALYZERS])
def test_every_value_lies_within_the_bounds_of_its_field(name, cls, data):
    result = from_views(cls(), [view_for(cls, DATA[data](seed)) for seed in range(2)])
    for field, declared in declarations(result).items():
        if declared.within is not None:
            low, high = declared.within
            values = getattr(result, field)
            values = values[values.isfinite()]
            assert ((values >= low - 1e-9) & (values <= high + 1e-9)).all(), (field, values.min(), values.max())


def test_bounds_are_pairs_in_ascending_order():
    for module in pkgutil.walk_packages(lsim.__path__, "tl_layersim."):
        importlib.import_module(module.name)
    bounds = [
        (cls, declaration.within)
        for cls in below(lsim.Result)
        for declaration in declarations(cls).values()
        if declaration.within
    ]

    assert len(bounds) > 100
    for cls, (low, high) in bounds:
        assert low < high, cls


# By the definition of each quantity: shares and probabilities, cosines and correlations, norms, counts and angles.
RANGES = {
    "block_coupling": {
        (0, inf): "values std null by_k null_by_k singular_values path_error update_error length_count residual step_error",
        (0, 1): "defined left_alignment right_alignment cross_alignment left_share right_share whole_rows",
        (-inf, 1): "coupling by_length",
        (-inf, inf): "mean_coupling",
    },
    "cca": {(0, 1): "values squared svcca pwcca column_pwcca"},
    "cka": {(-1, 1): "values", (0, 1): "biased", (1, inf): "effective_samples column_effective_samples"},
    "contribution": {(0, inf): "values", (-1, 1): "cosine cosine_to_final"},
    "cosine": {
        (-1, 1): "values to_last adjacent",
        (0, 1): "std below_zero to_last_outliers step_share triple_share monotone_share angular",
        (0, inf): "norm_ratio norm_ratio_quantiles",
        (0, 2): "block_influence",
    },
    "effective_rank": {(1, inf): "values eigenvalue_rank participation_ratio stable_rank", (0, 1): "spectrum"},
    "exit_curve": {
        (0, inf): "values part_exits",
        (0, 1): "accuracy agreement part_accuracy part_agreement",
        (1, inf): "perplexity speedup part_perplexity",
    },
    "intervention_effect": {
        (-1, 1): "values",
        (0, inf): "relative_change kl_divergence",
        (0, 1): "top_changed",
        (-inf, inf): "saturation_shift",
    },
    "linear_predictivity": {(-inf, 1): "values reverse"},
    "linear_probe": {
        (0, 1): "values train_accuracy control_accuracy",
        (-1, 1): "selectivity",
        (0, inf): "confusion",
    },
    "logit_attribution": {(-inf, inf): "values by_block logit"},
    "logit_lens": {
        (0, inf): "values kl_to_final entropy",
        (1, inf): "perplexity rank",
        (0, 1): (
            "accuracy top_k_accuracy target_probability agreement step_share step_share_if_closer lost_share monotone_share "
            "reciprocal_rank ranked_probability"
        ),
    },
    "mutual_knn": {(0, 1): "values chance"},
    "neural_collapse": {(0, inf): "values equinorm within between samples", (0, 2): "nc2", (0, 4): "nc3"},
    "procrustes": {(0, 1): "values", (0, pi / 2): "angle", (0, inf): "euclidean"},
    "rsa": {(-1, 1): "values"},
    "similarity": {(-inf, inf): "values observed null_mean null_threshold"},
    "saturation": {(0, inf): "values", (0, 1): "cumulative early_share", (-1, 1): "cosine_to_last correlation"},
    "skip_effect": {
        (0, inf): "values largest later later_largest",
        (0, sqrt(2)): (
            "probability_change probability_change_largest later_probability_change later_probability_change_largest"
        ),
    },
    "task_metrics": {(0, 1): "values accuracy f1_by_class", (-1, 1): "mcc", (0, inf): "confusion"},
    "trajectory": {
        (0, inf): (
            "values norm_quantiles update_norm update_norm_quantiles geodesic_deviation lss_std expodistance_mean "
            "expodistance_std expodistance_quantiles equidistance_mean equidistance_std equidistance_quantiles"
        ),
        (-inf, inf): "growth",
        (1, inf): "lss_mean lss_quantiles windowed_lss",
        (0, pi): "curvature",
    },
}
CALIBRATED = dict.fromkeys(("observed", "calibrated", "null_mean", "null_threshold"), (-inf, 1))


@pytest.mark.parametrize("name", RANGES)
def test_bounds_are_the_range_of_the_quantity(name):
    [result] = [cls for cls in below(lsim.Result) if cls.__name__.lower() == f"{name.replace('_', '')}result"]
    expected = {field: bounds for bounds, fields in RANGES[name].items() for field in fields.split()}

    bounds_by_field = {
        field: declaration.within for field, declaration in declarations(result).items() if declaration.within is not None
    }

    assert bounds_by_field == {field: bounds for field, bounds in CALIBRATED.items() if field in bounds_by_field} | expected
