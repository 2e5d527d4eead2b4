"""`compare_grid` with analyzers of other kinds, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import Kernel, View
from tl_layersim.analyzers import Analyzer, Needs, Run
from tl_layersim.core import LayerMatrix, Sums

from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called
from ..running.runs import Passes


def mean_kernel(*views: View) -> dict[str, torch.Tensor]:
    return {
        "total": torch.stack([view.activations.sum((1, 2)).double() for view in (views[0], views[-1])]),
        "count": torch.tensor(views[0].activations.shape[1]),
    }


def product_kernel(*views: View, mean: torch.Tensor) -> dict[str, torch.Tensor]:
    sums = [view.activations.double().sum((1, 2)) for view in (views[0], views[-1])]
    return {"products": torch.outer(sums[0] - mean[0], 2 * sums[1]), "count": torch.tensor(1)}


@dataclass(frozen=True)
class Product(Analyzer):
    """A measure that depends on the order of two models, with a first pass and without statistics of each model."""

    name: ClassVar[str] = "product"
    needs = Needs(models="one_or_two")
    scale: float = 1.0

    def first_kernel(self) -> Kernel:
        return mean_kernel

    def kernel(self, first: Sums) -> Kernel:
        return partial(product_kernel, mean=first["total"] / first["count"])

    def compute(self, sums: Sums, run: Run) -> LayerMatrix:
        return LayerMatrix(
            values=sums["products"] * self.scale,
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
        )


class TestOtherAnalyzers:
    @pytest.mark.heavy("many models")
    def test_a_measure_that_depends_on_the_order(self):
        def first_row(result):
            return result.values[0].abs().mean()

        models = {"a": tiny_llama(), "b": tiny_llama(seed=1), "c": tiny_llama(seed=2)}
        passes = Passes(models)
        data = random_tokens(6, 12)

        grid = lsim.compare_grid(models, lsim.Data(data, batch_size=3), Product(), distance=first_row)

        # Two batches: a look at the widths, the first pass and the main one.
        # Two passes over three times two rows: forward passes have a power of two of rows.
        # One watched row, and one row alone beside its batch.
        assert passes.counts == dict.fromkeys(models, 2 + 6)
        for i, a in enumerate(models):
            for j, b in enumerate(models):
                pair_result = lsim.compare(models[a], models[b], lsim.Data(data, batch_size=3), Product())
                torch.testing.assert_close(grid[a, b].values, pair_result.values)
                assert float(grid.values[i, j]) == pytest.approx(float(first_row(pair_result)))
        assert not torch.equal(grid.values, grid.values.T)

        groups = lsim.many.compare_groups(grid, [*"xxy"])
        assert list(groups["comparison"].values[2:]) == ["within x", "x into y", "y into x"]

    def test_a_distance_must_be_stated(self):
        models = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
        with pytest.raises(lsim.LayersimError, match=r"`distance`.*None"):
            lsim.compare_grid(models, random_tokens(), Product())

    def test_exact_sums_of_all_pairs_must_fit(self):
        models = {name: tiny_llama() for name in "abcd"}
        need = 3 * 8 * (4 * 32) ** 2 / 1e9

        lsim.compare(models["a"], models["b"], random_tokens(), lsim.CKA(estimator="exact", max_memory_gb=4 * need))

        with pytest.raises(lsim.LayersimError, match="`max_memory_gb`"):
            lsim.compare_grid(models, random_tokens(), lsim.CKA(estimator="exact", max_memory_gb=4 * need))


def test_refusals():
    models = {name: tiny_llama(seed=n) for n, name in enumerate("abc")}
    for models_argument, analyzer, options, message in (
        (list(models.values()), lsim.CKA(), {}, "`models`.*list"),
        (dict(enumerate(models.values())), lsim.CKA(), {}, "`models`.*dict"),
        ({"a": models["a"]}, lsim.CKA(), {}, "`models`.* 1 "),
        (models, lsim.CKA(), {"groups": [*"xy"]}, r"`groups`.*\['x', 'y'\]"),
        (models, lsim.CKA(), {"groups": "xyx"}, "`groups`.*xyx"),
        (models, lsim.CKA(), {"groups": {"a": 1, "b": 1}}, "`groups`.*dict of 2"),
        (models, lsim.CKA(), {"groups": {"a": 1, "b": 1, "c": 2, "d": 2}}, "`groups`.*dict of 4"),
        (models, lsim.CKA(), {"groups": [1, 1, 1]}, r"`groups`.* 3\b"),
        (models, lsim.CKA(), {"groups": [1, 2, 3]}, r"`groups`.* 1, 1, 1\b"),
        (models, lsim.Cosine(), {}, "Cosine cannot compare two models"),
        (models, [lsim.CKA(), lsim.Cosine()], {}, "Cosine cannot compare two models"),
    ):
        with pytest.raises(lsim.LayersimError, match=message):
            called(lsim.compare_grid, models_argument, random_tokens(), analyzer, **options)
