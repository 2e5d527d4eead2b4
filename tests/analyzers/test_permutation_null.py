"""The statistics of a permutation null: p-values, thresholds, calibrated values and the maximum over pairs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers._permutation_null import CalibratedMatrix, calibrated_values, is_one_model, null_fields, p_values
from tl_layersim.architectures.blocks import layer_names

from ..inputs.views import provenance
from .helpers import _described


def similarities(permutations: int = 40, rows: int = 3, columns: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    values = values if rows != columns else (values + values.T) / 2
    return values, torch.rand(permutations, rows, columns, generator=generator, dtype=torch.float64) * 0.8


def result(values: torch.Tensor, null: torch.Tensor | None = None, one_model: bool = True) -> CalibratedMatrix:
    fields = {} if null is None else null_fields(values, null, one_model=one_model)
    names = [layer_names(size - 1) for size in values.shape]
    return CalibratedMatrix(values=values, layers=names[0], column_layers=names[1], provenance=provenance(), **fields)


def by_hand(value: float, null: list[float]) -> tuple[float, float, float]:
    """p-value, threshold and calibrated value, counted one by one."""
    p = (1 + sum(permuted >= value for permuted in null)) / (1 + len(null))
    pooled = sorted([value, *null])
    threshold = next(value for i, value in enumerate(pooled, start=1) if i >= 0.95 * len(pooled) - 1e-9)
    return p, threshold, min(max(0.0, (value - threshold) / max(1 - threshold, 1e-12)), 1.0)


@pytest.mark.parametrize("permutations", [19, 20, 40, 99, 100, 200])
@pytest.mark.parametrize("one_model", [True, False])
def test_every_field_is_counted_by_hand(permutations, one_model):
    values, null = similarities(permutations)
    matrix = result(values, null, one_model)

    assert matrix.permutations == permutations
    for a, b in itertools.product(range(3), range(3)):
        sample = null[:, min(a, b) if one_model else a, max(a, b) if one_model else b].tolist()
        p, threshold, calibrated = by_hand(float(values[a, b]), sample)
        assert float(matrix.p_values[a, b]) == pytest.approx(p, abs=1e-12)
        assert float(matrix.null_threshold[a, b]) == threshold
        assert float(matrix.calibrated[a, b]) == pytest.approx(calibrated, abs=1e-12)
        assert float(matrix.null_mean[a, b]) == pytest.approx(np.mean(sample), abs=1e-12)

    pairs = [(a, b) for a in range(3) for b in range(3) if a < b or not one_model]
    largest = max(float(values[pair]) for pair in pairs)
    maxima = []
    for permuted in null:
        maxima.append(max(float(permuted[pair]) for pair in pairs))
    p, _, calibrated = by_hand(largest, maxima)
    assert [float(number) for number in (matrix.max_value, matrix.max_p_value)] == [largest, p]
    assert float(matrix.max_calibrated) == pytest.approx(calibrated, abs=1e-12)


def test_it_equals_calibrated_similarity():
    reference = pytest.importorskip("calibrated_similarity")
    values, null = similarities(60, 2, 3)
    values = values.float()
    null = null.float()
    matrix = result(values.double(), null.double(), one_model=False)
    numbers = torch.arange(1.0, 61)

    for a, b in itertools.product(range(2), range(3)):
        # Its similarity function receives the observed samples first, then one permutation after the other.
        calls = iter([values[a, b], *null[:, a, b]])
        arguments = (torch.ones(4, 1), torch.ones(4, 1), lambda x, y, calls=calls: next(calls))
        expected = reference.calibrate(*arguments, K=60)
        actual = (matrix.calibrated[a, b], matrix.p_values[a, b], matrix.null_threshold[a, b])
        np.testing.assert_allclose([float(x) for x in actual], [float(x) for x in expected], atol=1e-6)

    calls = iter([*values.flatten(), *null.flatten()])
    layers = [torch.ones(4, 1)] * 2, [torch.ones(4, 1)] * 3
    expected = reference.calibrate_layers(*layers, lambda x, y: next(calls), agg="max", K=60)
    actual = (matrix.max_calibrated, matrix.max_p_value)
    np.testing.assert_allclose([float(x) for x in actual], [float(x) for x in expected[:2]], atol=1e-6)
    assert len(numbers) == matrix.permutations


def test_a_null_value_equal_to_the_observed_one_counts():
    assert p_values(torch.tensor(0.5), torch.tensor([0.5, 0.4, 0.6])).item() == 0.75
    assert math.isnan(p_values(torch.tensor(math.nan), torch.zeros(19)).item())


def test_no_value_beats_a_null_that_reaches_one():
    assert calibrated_values(torch.tensor(1.0), torch.tensor(1.0)).item() == 0
    assert calibrated_values(torch.tensor(0.2), torch.tensor(-0.6)).item() == pytest.approx(0.5)


def test_a_layer_that_is_not_defined_is_nan_and_no_part_of_the_maximum():
    values, null = similarities()
    values[2], values[:, 2], null[:, 2], null[:, :, 2] = (math.nan,) * 4
    matrix = result(values, null)
    small = result(values[:2, :2].contiguous(), null[:, :2, :2].contiguous())

    for name in ("calibrated", "p_values", "null_mean", "null_threshold"):
        field = getattr(matrix, name)
        assert bool(field[..., 2, :].isnan().all() and field[..., :, 2].isnan().all())
        assert torch.equal(field[..., :2, :2], getattr(small, name))
    for name in ("max_value", "max_p_value", "max_calibrated"):
        assert torch.equal(getattr(matrix, name), getattr(small, name))


def test_one_site_has_no_pair_and_so_no_maximum():
    values, null = similarities(rows=1, columns=1)
    alone = result(values, null)
    two = result(values, null, one_model=False)

    assert all(math.isnan(getattr(alone, name)) for name in ("max_value", "max_p_value", "max_calibrated"))
    assert float(two.max_value) == float(values)


class TestWithoutPermutations:
    def test_the_numbers_of_the_null_are_nan(self):
        values, _ = similarities()
        matrix = result(values)

        assert matrix.permutations == 0
        for name in matrix.tensor_fields().keys() - {"values"}:
            assert bool(getattr(matrix, name).isnan().all()), name
        assert not any("calibrated" in name or "p-value" in name for name in matrix.headline())
        assert null_fields(values, torch.zeros(0, 3, 3), one_model=True) == {}

    def test_tables_leave_them_out_and_plots_refuse(self):
        matrix = result(similarities()[0])
        assert list(matrix.to_frame()) == ["row_layer", "column_layer", "values"]
        assert matrix.to_frame("calibrated")["calibrated"].isna().all()
        for field in ("calibrated", "p_values", "null_mean"):
            with pytest.raises(lsim.LayersimError, match=f"`field`.*{field}"):
                matrix.plot(field)
        matrix.plot()

    def test_permutations_without_their_numbers_are_refused(self):
        values, _ = similarities()
        with pytest.raises(lsim.LayersimError, match=r"`observed`.*`permutations` is 20"):
            CalibratedMatrix(
                values=values, layers=layer_names(2), column_layers=layer_names(2), provenance=provenance(), permutations=20
            )


def test_tables_headlines_files_and_figures(tmp_path):
    values, null = similarities()
    matrix = result(values, null)

    assert list(matrix.to_frame())[2:] == ["values", "observed", "calibrated", "p_values", "null_mean", "null_threshold"]
    assert matrix.headline()["calibrated maximum over pairs of layers"] == float(matrix.max_calibrated)
    assert matrix.headline()["p-value of the maximum over pairs of layers"] == float(matrix.max_p_value)

    loaded = lsim.load(matrix.save(tmp_path / "null.safetensors"))
    assert type(loaded) is CalibratedMatrix
    for name in matrix.tensor_fields():
        torch.testing.assert_close(getattr(loaded, name), getattr(matrix, name), rtol=0, atol=0, equal_nan=True)

    shown = [picture for picture in matrix.pictures if picture.name != "values"]
    assert [picture.name for picture in shown] == ["calibrated", "p_values", "null_mean", "null_threshold"]
    for picture in shown:
        expected = getattr(matrix, picture.name).numpy().copy()
        if picture.name == "p_values":
            # A layer is never unrelated to itself.
            np.fill_diagonal(expected, np.nan)
        np.testing.assert_allclose(matrix.plot(picture.name).data[0].z, expected)


def test_rows_and_columns_are_exchanged_in_every_field():
    values, null = similarities(rows=2, columns=3)
    matrix = result(values, null, one_model=False)
    transposed = matrix.transposed()

    assert (transposed.layers, transposed.column_layers) == (matrix.column_layers, matrix.layers)

    expected = result(values.T.contiguous(), null.transpose(1, 2).contiguous(), one_model=False)
    for name in matrix.tensor_fields():
        torch.testing.assert_close(getattr(transposed, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [-1, 1, 18])
def test_too_few_permutations_are_refused(count):
    for cls in (lsim.CKA, lsim.RSA, lsim.MutualKNN, lsim.CCA, lsim.Procrustes, lsim.LinearPredictivity):
        with pytest.raises(lsim.LayersimError, match=f"`permutations`.* {count}, "):
            cls(permutations=count)


def test_the_least_permutations_can_be_significant():
    assert (lsim.CKA(permutations=0).permutations, lsim.CKA(permutations=19).permutations) == (0, 19)

    values = torch.ones(1, 1, dtype=torch.float64)
    null = torch.zeros(19, 1, 1, dtype=torch.float64)
    matrix = result(values, null, one_model=False)
    assert (float(matrix.p_values), float(matrix.calibrated)) == (0.05, 1)


def test_the_sums_of_the_null_must_fit_the_memory():
    """Four sites: 3 x 8 bytes x 4 x 4 x permutations; of three models six pairs."""
    model = _described()

    def check(permutations: int, models: list, limit: float) -> None:
        lsim.RSA(permutations=permutations, max_memory_gb=limit).check_sites(*models)

    check(100, [model], 38_400e-9)
    check(100, [model, model], 38_400e-9)
    check(0, [model], 1e-12)
    check(100, [model] * 3, 6 * 38_400e-9)

    for models in ([model], [model, model]):
        with pytest.raises(lsim.LayersimError, match=r"RSA.*`max_memory_gb`.*permutations"):
            check(100, models, 38_399e-9)
    with pytest.raises(lsim.LayersimError, match="`max_memory_gb`"):
        check(100, [model] * 3, 6 * 38_399e-9)
    with pytest.raises(lsim.LayersimError, match="`max_memory_gb`"):
        check(100, [model], 18 * 384e-9)


def test_a_model_beside_itself_is_one_model():
    model = _described()
    described = _described()

    assert is_one_model(())
    assert is_one_model((model,))
    assert is_one_model((model, model))
    assert not is_one_model((model, described))


@pytest.mark.parametrize("value", [1e-16, 0.3, 1.0, -50.0])
def test_null_values_below_the_observed_one_by_rounding_count_as_equal(value):
    observed = torch.tensor(value, dtype=torch.float64)
    size = max(abs(value), 1)

    assert float(p_values(observed, observed - torch.full((19,), 9e-11 * size, dtype=torch.float64))) == 1
    assert float(p_values(observed, observed - torch.full((19,), 2e-10 * size, dtype=torch.float64))) == 1 / 20
    assert float(calibrated_values(observed, observed - 1e-15)) == 0
