"""Sites and tokens for which a measure is not defined: NaN there, a name in a warning, and every other number as before."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import Sums

from .. import oracles
from ..inputs.views import from_views, layer_run, residuals, view
from ..models.tiny_models import random_tokens, tiny_llama

FIRST = r"blocks\.0\.hook_resid_pre"
SAME = 3.7 * np.random.default_rng(1).normal(size=8)


def with_same_samples(dtype=np.float64, tokens: int = 120) -> np.ndarray:
    """Every sample is the same at layer 0, as [CLS] is at the embedding of a ViT."""
    x = residuals(0, tokens=tokens).astype(dtype)
    x[0] = SAME
    return x


def rest_equals(actual, expected: np.ndarray, atol: float = 1e-6) -> None:
    """Layers 1 on are as expected, layer 0 is NaN."""
    values = np.asarray(actual)
    assert np.isnan(values[0]).all()
    assert np.isnan(values[:, 0]).all()
    np.testing.assert_allclose(values[1:, 1:], expected[1:, 1:], atol=atol)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(
    ("dtype", "noise", "estimator"),
    [(np.float32, 1e-7, name) for name in ("minibatch", "biased", "exact")]
    + [(np.float64, 0.0, "minibatch"), (np.float32, 0.0, "exact")],
)
def test_cka_of_a_site_at_which_all_samples_are_the_same_is_nan(dtype, estimator, noise):
    """Also where a GPU's order of addition makes a last digit of difference."""
    x = with_same_samples(dtype)
    x[0] *= (1 + noise * np.sign(np.random.default_rng(2).normal(size=x[0].shape))).astype(dtype)

    with pytest.warns(lsim.LayersimWarning, match=f"CKA is not defined at {FIRST}, and NaN there"):
        result = from_views(lsim.CKA(estimator=estimator), [view(x, rows=8)])
    wide = x.astype(np.float64)
    wide[0] = residuals(0, tokens=120)[0]
    expected = oracles.oracle_cka([wide - wide.mean(1, keepdims=True)], biased=estimator == "biased", rows=15)["values"]

    rest_equals(result.values, expected, 1e-4 if dtype == np.float32 else 1e-9)
    assert result.effective_samples.isnan().tolist() == [True, False, False, False]
    assert 0 < result.headline()["smallest effective fraction of samples"] < 1
    assert np.isnan(result.distance()) == np.isnan(result.values.diagonal()[1:]).any()
    assert np.isfinite(result.plot().data[0].zmin)
    assert result.to_frame()["values"].isna().sum() == 7
    assert "nan" in repr(result)


def test_cka_between_two_models_is_nan_in_the_row_of_the_one_site():
    x = with_same_samples()
    y = residuals(5, layers=3, tokens=120)
    kernel = lsim.CKA().kernel(Sums())

    sums = Sums.of(kernel(view(x, rows=8), view(y, rows=8)))
    with pytest.warns(lsim.LayersimWarning, match=FIRST):
        result = lsim.CKA().compute(sums, layer_run(4, 3))

    assert result.values.isnan()[0].all()
    assert not result.values.isnan()[1:].any()
    assert not result.column_effective_samples.isnan().any()


def test_the_distance_of_models_is_nan_where_a_block_is_not_defined():
    x = residuals(0, tokens=120)
    x[2] = SAME

    with pytest.warns(lsim.LayersimWarning, match=r"blocks\.1\.hook_resid_post"):
        result = from_views(lsim.CKA(), [view(x, rows=8)])

    assert np.isnan(result.distance())


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_centred_cosine_of_a_site_at_which_all_samples_are_the_same_is_nan(dtype):
    x = with_same_samples(dtype)
    with pytest.warns(lsim.LayersimWarning, match=f"{FIRST}: 120 of 120"):
        result = from_views(lsim.Cosine(), [view(x, rows=8)])
    wide = x.astype(np.float64)
    wide[0] = residuals(0, tokens=120)[0]
    expected = oracles.oracle_cosine([wide])

    for name in ("values", "std", "below_zero"):
        rest_equals(getattr(result, name), expected[name])
    np.testing.assert_allclose(result.to_last[:, 1:], expected["to_last"][:, 1:], atol=2e-3)
    assert result.to_last[:, 0].isnan().all()
    assert result.adjacent[:, 0].isnan().all()
    np.testing.assert_allclose(result.adjacent[:, 1:], expected["adjacent"][:, 1:], atol=2e-3)
    assert result.monotone_share.isnan()
    assert np.isfinite(result.plot().data[0].zmin)

    result.plot("to_last")
    steps = "rising steps (fraction)"
    last = expected["values"][1:, -1]
    assert result.headline()[steps] == pytest.approx(np.mean(np.diff(last) > 0))


def test_one_zero_token_is_left_out_of_the_cosines_of_its_site_alone():
    x = residuals(0)
    x[2, 5] = 0

    with pytest.warns(lsim.LayersimWarning, match=r"is zero(.|\n)*blocks\.1\.hook_resid_post: 1 of 40"):
        result = from_views(lsim.Cosine(center="none"), [view(x, rows=8)])
    whole = oracles.oracle_cosine([residuals(0)], center="none")
    less = oracles.oracle_cosine([np.delete(residuals(0), 5, axis=1)], center="none")
    at = torch.arange(4) == 2
    touched = (at[:, None] | at).numpy()

    for name in ("values", "std", "below_zero"):
        expected = np.where(touched, less[name], whole[name])
        np.testing.assert_allclose(getattr(result, name), expected, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(result.monotone_share, less["monotone_share"])
    np.testing.assert_allclose(result.to_last[:, 2], less["to_last"][:, 2], atol=2e-3)


def test_one_zero_token_leaves_the_other_saturation_events_their_cosine():
    x = residuals(0)
    x[1:, 3] = 0

    with pytest.warns(lsim.LayersimWarning, match="residual is zero"):
        result = from_views(lsim.Saturation(), [view(x, rows=8)])
    without = from_views(lsim.Saturation(), [view(np.delete(x, 3, axis=1), np.delete(oracles.tokens_of(40), 3))])

    assert result.counts.sum() == 40
    np.testing.assert_allclose(result.cosine_to_last, without.cosine_to_last, atol=1e-12)


def test_a_block_that_adds_nothing_to_a_token_leaves_the_other_paths_their_shape():
    x = residuals(0)
    x[2, 4] = x[1, 4]

    with pytest.warns(lsim.LayersimWarning, match=r"update is zero.*: blocks\.1\.hook_resid_post: 1 of 40"):
        result = from_views(lsim.Trajectory(window=2), [view(x, rows=8)])
    less = oracles.oracle_trajectory([np.delete(x, 4, axis=1)], 2)

    np.testing.assert_allclose(result.lss_mean, less["lss_mean"], rtol=1e-9)
    np.testing.assert_allclose(result.windowed_lss, less["windowed_lss"], rtol=1e-9)

    whole = np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(result.norm, whole.mean(1), rtol=1e-9)

    update = np.linalg.norm(np.diff(x, axis=0), axis=-1)
    np.testing.assert_allclose(result.update_norm, update.mean(1), rtol=1e-9)
    np.testing.assert_allclose(result.equidistance.mean, np.mean(update.std(0) / update.mean(0)), rtol=1e-9)


def test_a_block_that_adds_nothing_at_all_leaves_norms_and_growth():
    x = residuals(0)
    x[2] = x[1]

    with pytest.warns(lsim.LayersimWarning, match=r"blocks\.1\.hook_resid_post: 40 of 40"):
        result = from_views(lsim.Trajectory(), [view(x, rows=8)])

    assert result.lss.mean.isnan()
    assert result.lss.quantiles.isnan().all()
    assert result.update_norm[1] == 0
    assert (result.update_norm_quantiles[:, 1] == 0).all()

    norm = np.linalg.norm(x, axis=-1)
    growth = np.log(norm[1:] / norm[:-1])
    np.testing.assert_allclose(result.growth, growth.mean(1), atol=1e-12)
    np.testing.assert_allclose(result.expodistance.mean, np.mean(growth.var(0) / growth.mean(0) ** 2), rtol=1e-9)


def test_a_zero_residual_and_a_flat_path_are_left_out_of_what_they_do_not_define():
    x = residuals(0)
    x[0, 3] = 0
    x[-1, 7] = x[0, 7]

    with pytest.warns(lsim.LayersimWarning) as record:
        result = from_views(lsim.Trajectory(), [view(x, rows=8)])
    text = "\n".join(str(warning.message) for warning in record)

    assert re.search(r"residual is zero.*: blocks\.0\.hook_resid_pre: 1 of 40", text)
    assert "1 of 40 tokens have no expodistance" in text

    less = oracles.oracle_trajectory([np.delete(x, [3, 7], axis=1)])
    np.testing.assert_allclose(result.expodistance_mean, less["expodistance_mean"], rtol=1e-9)
    np.testing.assert_allclose(
        result.growth[0],
        np.delete(np.log(np.linalg.norm(x[1], axis=-1)), 3).mean()
        - np.log(np.linalg.norm(np.delete(x[0], 3, axis=0), axis=-1)).mean(),
        rtol=1e-9,
    )


@pytest.mark.filterwarnings("ignore:`labels` has 40 rows")
def test_neural_collapse_names_the_site_where_all_classes_have_one_mean():
    x = residuals(0)
    label = torch.arange(40) % 2
    x[0] = SAME

    with pytest.warns(lsim.LayersimWarning, match=f"NC1 is not defined at {FIRST}, and NaN there"):
        result = from_views(
            lsim.NeuralCollapse(labels=label, level="token"), [view(x, row=torch.arange(40), column=torch.zeros(40).long())]
        )

    assert result.nc1.isnan().tolist() == [True, False, False, False]


def test_a_block_that_does_nothing_leaves_the_coupling_of_the_others():
    model = tiny_llama().double()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()

    with pytest.warns(lsim.LayersimWarning, match=r"Coupling is not defined for blocks\.1\.hook_resid_post"):
        result = lsim.analyze(model, random_tokens(2, 6), lsim.BlockCoupling(k=3))["block_coupling"]

    assert result.values[1].isnan().all()
    assert result.values[:, 1].isnan().all()
    assert not result.values[0, 2].isnan()
    assert np.isfinite(result.mean())


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_degenerate_site_is_shown_in_a_report_and_saved(tmp_path):
    with pytest.warns(lsim.LayersimWarning, match="CKA is not defined"):
        result = from_views(lsim.CKA(), [view(with_same_samples(), rows=8)])
    report = lsim.Report({"cka": result})

    assert "nan" in report.to_html(tmp_path / "page.html").read_text()

    loaded = lsim.load(report.save(tmp_path / "report.safetensors"))["cka"]
    assert torch.equal(loaded.values.isnan(), result.values.isnan())
