"""LinearPredictivity: held-out rows, both directions, the ridge, another implementation, and invariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, residuals, view
from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import between, map_of_condition, rotation


def rows_of(tokens: int) -> list[int]:
    return list(range(tokens))


def within_one_model(x: np.ndarray, **options):
    return from_views(lsim.LinearPredictivity(**options), [view(x, row=torch.arange(x.shape[1]))])


@pytest.mark.parametrize("ridge", [1e-6, 0.01, 10.0])
@pytest.mark.parametrize("widths", [(8, 8), (8, 5), (3, 8)])
def test_between_two_models_of_other_width_and_depth(ridge, widths):
    xs = [residuals(seed, tokens=40, width=widths[0]) for seed in range(3)]
    ys = [residuals(seed + 9, layers=3, tokens=40, width=widths[1]) + x[:3, :, :1] for seed, x in enumerate(xs)]

    result = between(lsim.LinearPredictivity(ridge=ridge), xs, ys)
    expected = oracles.oracle_linear_predictivity(xs, ys, ridge=ridge, rows=rows_of(40) * 3)

    for field, value in expected.items():
        np.testing.assert_allclose(getattr(result, field), value, atol=1e-9, err_msg=field)

    out = 3 * sum(oracles.held_out_rows(40))
    assert (result.samples, result.held_out_samples) == (120 - out, out)

    turned = result.transposed()
    swapped = between(lsim.LinearPredictivity(ridge=ridge), ys, xs)
    for field in expected:
        np.testing.assert_allclose(getattr(turned, field), getattr(swapped, field), atol=1e-9, err_msg=field)
    assert (turned.layers, turned.column_layers) == (swapped.layers, swapped.column_layers)


def test_the_r2_is_that_of_scikit_learn():
    x = residuals(0, tokens=80, width=6)[1]
    y = residuals(0, tokens=80, width=4)[2] + 0.3 * residuals(1, tokens=80, width=4)[1]
    out = np.array(oracles.held_out_rows(80))

    result = between(lsim.LinearPredictivity(ridge=0.05), [x[None]], [y[None]])
    # scikit-learn's penalty is of the sum of squares.
    ridge = make_pipeline(StandardScaler(), Ridge(alpha=0.05 * (~out).sum()))
    predicted = ridge.fit(x[~out], y[~out]).predict(x[out])

    assert float(result.values) == pytest.approx(r2_score(y[out], predicted, multioutput="variance_weighted"), abs=1e-9)

    tiny = between(lsim.LinearPredictivity(ridge=1e-9), [x[None]], [y[None]])
    plain = LinearRegression().fit(x[~out], y[~out]).predict(x[out])
    assert float(tiny.values) == pytest.approx(r2_score(y[out], plain, multioutput="variance_weighted"), abs=1e-6)


def test_rows_are_held_out_by_their_numbers():
    x = residuals(0, tokens=50)
    for options, oracle in (
        ({"test_fraction": 0.4}, {"fraction": 0.4}),
        ({"seed": 5}, {"seed": 5}),
        ({"test_fraction": 0.3, "seed": 2}, {"fraction": 0.3, "seed": 2}),
    ):
        expected = oracles.oracle_linear_predictivity([x], rows=rows_of(50), **oracle)["values"]
        np.testing.assert_allclose(within_one_model(x, **options).values, expected, atol=1e-9)

    # Whole rows: both tokens of a row are on one side.
    pairs = view(x, row=torch.arange(50) // 2)
    result = from_views(lsim.LinearPredictivity(), [pairs])
    expected = oracles.oracle_linear_predictivity([x], rows=[t // 2 for t in range(50)])["values"]
    np.testing.assert_allclose(result.values, expected, atol=1e-9)
    with pytest.warns(lsim.LayersimWarning, match=f"on {sum(oracles.held_out_rows(25))} held-out texts"):
        from_views(lsim.LinearPredictivity(), [pairs])


def test_r2_is_of_held_out_rows_and_so_not_optimistic():
    """Unrelated noise is predicted perfectly in-sample with as many dimensions as samples."""
    rng = np.random.default_rng(0)
    result = between(lsim.LinearPredictivity(), [rng.normal(size=(1, 100, 60))], [rng.normal(size=(1, 100, 60))])

    assert float(result.values) < 0

    large = between(lsim.LinearPredictivity(ridge=1e6), [rng.normal(size=(1, 100, 60))], [rng.normal(size=(1, 100, 60))])
    # The prediction is the training mean.
    assert float(large.values) == pytest.approx(0, abs=0.1)
    assert float(large.values) < 0


@pytest.mark.parametrize("widths", [(8, 8), (8, 3), (3, 8)])
def test_in_sample_least_squares_is_the_r2_of_kornblith(widths):
    xs = [residuals(seed, tokens=30, width=widths[0]) for seed in range(2)]
    ys = [residuals(seed + 9, layers=3, tokens=30, width=widths[1]) + x[:3, :, :1] for seed, x in enumerate(xs)]

    result = between(lsim.LinearPredictivity(ridge=0, test_fraction=0), xs, ys)
    x = np.concatenate(xs, 1)
    y = np.concatenate(ys, 1)
    expected = np.empty((len(x), len(y)))
    reverse = np.empty((len(x), len(y)))
    for row, column in np.ndindex(expected.shape):
        expected[row, column] = oracles.in_sample_r2(x[row], y[column])
        reverse[row, column] = oracles.in_sample_r2(y[column], x[row])

    np.testing.assert_allclose(result.values, expected, atol=1e-9)
    np.testing.assert_allclose(result.reverse, reverse, atol=1e-9)
    assert (result.samples, result.held_out_samples) == (60, 0)


def test_in_sample_r2_is_that_of_scikit_learn_and_the_result_says_so():
    x = residuals(0, tokens=50)
    result = from_views(lsim.LinearPredictivity(ridge=0, test_fraction=0), [view(x)])
    predicted = LinearRegression().fit(x[0], x[3]).predict(x[0])

    assert float(result.values[0, 3]) == pytest.approx(r2_score(x[3], predicted, multioutput="variance_weighted"), abs=1e-9)
    assert result.headline()["in-sample R2(embedding, last)"] == float(result.values[0, 3])
    assert "held-out R2(embedding, last)" in within_one_model(x).headline()


def test_least_squares_takes_the_directions_that_exist():
    """More dimensions than samples, and a dimension that is a sum of others: in-sample all is predicted."""
    x = residuals(0, layers=1, tokens=6, width=20)
    y = residuals(1, layers=1, tokens=6, width=20)

    result = between(lsim.LinearPredictivity(ridge=0, test_fraction=0), [x], [y])

    assert float(result.values) == pytest.approx(1, abs=1e-9)

    x = residuals(0, layers=1, tokens=60, width=5)
    x[..., 4] = x[..., 0] + x[..., 1]
    y = residuals(1, layers=1, tokens=60, width=3) + x[..., :3]
    result = between(lsim.LinearPredictivity(ridge=0, test_fraction=0), [x], [y])
    assert float(result.values) == pytest.approx(oracles.in_sample_r2(x[0, :, :4], y[0]), abs=1e-9)


def test_the_null_of_in_sample_r2_has_the_value_of_unrelated_samples():
    data = lsim.Data(list(random_tokens(64, 6)), batch_size=16)
    result = lsim.analyze(
        tiny_llama(),
        data,
        lsim.LinearPredictivity(ridge=0, test_fraction=0, level="sequence", permutations=19),
        at=["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"],
    )["linear_predictivity"]
    width = tiny_llama().config.hidden_size

    assert float(result.null_mean[0, 1]) == pytest.approx(width / 63, abs=0.05)
    assert float(result.p_values[0, 1]) == 0.05


def test_a_known_r2():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 4000, 3))
    y = np.concatenate([2 * x[..., :1], rng.normal(size=(1, 4000, 2))], axis=-1)

    result = between(lsim.LinearPredictivity(), [x], [y])

    # Four of six parts of the variance of y, and one of three of x.
    assert float(result.values) == pytest.approx(4 / 6, abs=0.03)
    assert float(result.reverse) == pytest.approx(1 / 3, abs=0.05)


def test_invariances():
    rng = np.random.default_rng(0)
    x = residuals(0, tokens=90)
    y = residuals(3, tokens=90) + 0.5 * residuals(0, tokens=90)

    plain = between(lsim.LinearPredictivity(), [x], [y])
    stretch = rng.uniform(0.1, 10, size=8)

    for turn, of_x, of_y in (
        (lambda z: 7 * z + rng.normal(size=8), True, True),
        (lambda z: stretch * z, True, False),
        (lambda z: z @ rotation(8), False, True),
    ):
        moved = between(lsim.LinearPredictivity(), [turn(x)], [y]).values
        assert torch.allclose(moved, plain.values, atol=1e-9) == of_x
        moved = between(lsim.LinearPredictivity(), [x], [turn(y)]).values
        assert torch.allclose(moved, plain.values, atol=1e-9) == of_y

    small = between(lsim.LinearPredictivity(ridge=1e-10), [x], [y])
    sheared = between(lsim.LinearPredictivity(ridge=1e-10), [x @ map_of_condition(8, 20)], [y])
    np.testing.assert_allclose(sheared.values, small.values, atol=1e-6)
    assert (sheared.reverse - small.reverse).abs().max() > 0.01

    strong = between(lsim.LinearPredictivity(ridge=0.1), [x @ map_of_condition(8, 20)], [y])
    assert (strong.values - between(lsim.LinearPredictivity(ridge=0.1), [x], [y]).values).abs().max() > 0.01


def test_a_linear_map_is_predicted_in_both_directions():
    x = residuals(0, tokens=90)
    result = between(lsim.LinearPredictivity(ridge=1e-9), [x], [x @ map_of_condition(8, 10) + 3])

    np.testing.assert_allclose(result.values.diagonal(), 1, atol=1e-6)
    np.testing.assert_allclose(result.reverse.diagonal(), 1, atol=1e-6)

    one_model = within_one_model(x)
    np.testing.assert_allclose(one_model.reverse, one_model.values.T, atol=0)
    assert (one_model.values - one_model.values.T).abs().max() > 0.01
    assert one_model.values.diagonal().min() > 0.99


def test_a_nuisance_dimension_of_any_size_costs_little():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 300, 20))
    noise = rng.normal(size=(1, 300, 1))
    y = x @ rng.normal(size=(20, 5)) + rng.normal(size=(1, 300, 5))

    alone = float(between(lsim.LinearPredictivity(), [x], [y]).values)

    assert alone > 0.9

    wider = [np.concatenate([x, spread * noise], -1) for spread in (1, 100, 1e4)]
    beside = [float(between(lsim.LinearPredictivity(), [samples], [y]).values) for samples in wider]
    assert beside == pytest.approx([beside[0]] * 3, abs=1e-9)
    assert beside[0] == pytest.approx(alone, abs=0.01)


def test_sites_of_other_widths_are_padded():
    x = residuals(0, tokens=60)
    x[1, :, 5:] = 0
    padded = view(x, row=torch.arange(60), widths=(8, 5, 8, 8))

    values = from_views(lsim.LinearPredictivity(ridge=0.5), [padded]).values
    test = np.array(oracles.held_out_rows(60))

    for a, b in ((1, 2), (2, 1), (0, 2)):
        left_samples, right = (x[i][:, :5] if i == 1 else x[i] for i in (a, b))
        assert float(values[a, b]) == pytest.approx(oracles.cross_products.ridge_r2(left_samples, right, test, 0.5), abs=1e-9)


def test_a_ridge_within_rounding_is_refused():
    x = residuals(0, tokens=60) + 1e4
    with pytest.raises(lsim.LayersimError, match="`ridge` is 1e-12") as error:
        within_one_model(x, ridge=1e-12)
    proposed = float(str(error.value).removesuffix(".").rsplit(" ", 1)[1])
    within_one_model(x, ridge=proposed)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ridge": -0.1}, "`ridge`.* -0.1"),
        ({"ridge": float("nan")}, "`ridge`.* nan"),
        ({"ridge": float("inf")}, "`ridge`.* inf"),
        ({"test_fraction": -0.1}, "`test_fraction`.* -0.1"),
        ({"test_fraction": 1.0}, "`test_fraction`.* 1.0"),
        ({"test_fraction": 20}, "`test_fraction`.* 20"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(lsim.LayersimError, match=text):
        lsim.LinearPredictivity(**options)


def test_two_samples_are_needed_on_either_side():
    # Multiples of the golden ratio: 0, 0.62, 0.24 and 0.85 after the point.
    x = residuals(0, tokens=4)
    assert within_one_model(x, test_fraction=0.3).held_out_samples == 2
    for fraction, held_out in ((0.1, 1), (0.7, 3)):
        with pytest.raises(lsim.LayersimError, match=f"has {4 - held_out} training and {held_out} held-out"):
            within_one_model(x, test_fraction=fraction)


def test_packed_rows_and_attach_are_refused():
    model = tiny_llama()
    with pytest.raises(lsim.LayersimError, match="`pack`"):
        lsim.analyze(lsim.demo_model(), lsim.Data(lsim.demo_text()[:6], pack=True, seq_len=12), lsim.LinearPredictivity())
    with pytest.raises(lsim.LayersimError, match=r"^LinearPredictivity "):
        lsim.attach(model, lsim.LinearPredictivity())


def test_the_headline():
    x = residuals(0, layers=6, tokens=90)
    result = within_one_model(x)
    expected = oracles.oracle_linear_predictivity([x], rows=rows_of(90))["values"]

    assert result.headline() == {
        "held-out R2(embedding, last)": pytest.approx(expected[0, 5]),
        "held-out R2(middle layer, last)": pytest.approx(expected[3, 5]),
        "held-out R2(last but one, last)": pytest.approx(expected[4, 5]),
    }
