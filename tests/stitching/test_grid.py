"""Grids of stitches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import tiny_llama
from .helpers import QUICK, rows


class TestGrid:
    @pytest.fixture(scope="class")
    def models(self):
        return {"a": tiny_llama(), "b": tiny_llama(seed=1)}

    @pytest.fixture(scope="class")
    def grid(self, models):
        return lsim.stitch_grid(models, lsim.Data(rows(80), batch_size=4), fit="lstsq")

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_each_cell_is_a_stitch(self, models, grid):
        assert grid.fronts == ("a", "b")
        assert grid.seams == tuple(f"blocks.{i}.hook_resid_post" for i in range(3))
        for i, a in enumerate(models):
            for j, b in enumerate(models):
                for s in (0, 2):
                    pair_result = lsim.stitch(models[a], models[b], lsim.Data(rows(80), batch_size=4), at=(s, s), fit="lstsq")
                    assert float(grid.penalty[i, j, s]) == pair_result.penalty
                    assert float(grid.loss[i, j, s]) == pair_result.loss
                    assert (float(grid.low[i, j, s]), float(grid.high[i, j, s])) == tuple(pair_result.penalty_interval())[1:]
                    assert float(grid.accuracy_penalty[i, j, s]) == pair_result.accuracy_penalty

    def test_asymmetry(self, grid):
        difference = grid.penalty_difference(("a", "b"), ("b", "a"))
        np.testing.assert_allclose(difference["difference"], grid.penalty[0, 1] - grid.penalty[1, 0], atol=1e-12)
        assert (difference["difference_low"] <= difference["difference"]).all()
        assert (difference["difference"] <= difference["difference_high"]).all()

        swapped = grid.penalty_difference(("b", "a"), ("a", "b"))
        np.testing.assert_allclose(swapped["difference"], -difference["difference"], atol=1e-12)
        with pytest.raises(lsim.LayersimError, match="'c'"):
            grid.penalty_difference(("a", "c"), ("c", "a"))

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_beyond_what_fitting_costs(self, models):
        # Trained, so that models with themselves do not come out at zero.
        options = {"layers": [0, 1], "fit": "sgd", "adapter": "affine-norm", "training": QUICK}
        grid = lsim.stitch_grid(models, lsim.Data(rows(40), batch_size=8), **options)

        assert grid.penalty[0, 0].abs().min() > 1e-3

        self_traces = [trace for trace in grid.plot().data if trace.name in ("a into a", "b into b")]
        assert len({trace.marker.symbol for trace in self_traces}) == len({trace.line.dash for trace in self_traces}) == 2
        for front, back, a, b in (("a", "b", 0, 1), ("b", "a", 1, 0)):
            difference = grid.penalty_difference((front, back), (back, back))
            np.testing.assert_allclose(difference["difference"], grid.penalty[a, b] - grid.penalty[b, b])
            assert (difference["difference_low"] < difference["difference"]).all()
            assert (difference["difference"] < difference["difference_high"]).all()

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_tables_plots_and_files(self, grid, tmp_path):
        table = grid.to_frame()
        assert len(table) == 2 * 2 * 3
        assert {"front", "back", "seam", "penalty", "low", "high", "loss", "back_loss", "accuracy_penalty"} <= set(
            table.columns
        )

        figure = grid.plot()
        lines = [trace.name for trace in figure.data if trace.name]
        assert lines == ["a into b", "b into a", "a into a", "b into b"]
        assert figure.layout.title.subtitle.text.endswith("bands: 95 % intervals")
        assert "bands" not in grid.plot("loss").layout.title.subtitle.text
        assert list(figure.layout.xaxis.ticktext) == ["0", "1", "2"]
        assert grid.plot("accuracy_penalty").data[0].fill == "toself"
        np.testing.assert_allclose(grid.plot("loss").data[0].y, grid.loss[0, 1])
        assert figure.layout.title.subtitle.text.startswith("affine adapter, fitted by lstsq · ")

        loaded = lsim.load(grid.save(tmp_path / "grid.safetensors"))
        assert torch.equal(loaded.values, grid.values)

        page = lsim.Report({"stitches": grid}).to_html(tmp_path / "page.html").read_text()
        assert "Stitching penalty" in page

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_models_of_different_depths(self, models):
        mixed = {"a": models["a"], "deep": tiny_llama(5, seed=2)}
        with pytest.raises(lsim.LayersimError, match=r"`layers`.*3 layers for a, 5 layers for deep"):
            lsim.stitch_grid(mixed, rows(), adapter="identity")

        grid = lsim.stitch_grid(mixed, rows(), adapter="identity", layers={"a": [0, 2], "deep": [1, 4]})
        pair_result = lsim.stitch(mixed["deep"], mixed["a"], rows(), at=(1, 0), adapter="identity")
        assert float(grid.penalty[1, 0, 0]) == pair_result.penalty
        assert grid.seams[0] == "a blocks.0.hook_resid_post, deep blocks.1.hook_resid_post"
        assert grid.penalty[0, 0].abs().max() == 0

    @pytest.mark.parametrize("layers", [[], {"a": [1]}, {"a": [1, 2], "b": [1]}])
    def test_stitch_points_that_do_not_fit(self, models, layers):
        with pytest.raises(lsim.LayersimError, match="`layers`"):
            lsim.stitch_grid(models, rows(), adapter="identity", layers=layers)

    def test_a_stitch_point_counts_once(self, models):
        for layers in ([2, 1, -1], {name: [1, 2, 1] for name in models}):
            with pytest.raises(lsim.LayersimError, match=r"`layers`.*(\[2, 1, -1\]|dict of 2 str)"):
                lsim.stitch_grid(models, rows(), adapter="identity", layers=layers)

    def test_models_without_names(self, models):
        for unnamed in (list(models.values()), {}):
            with pytest.raises(lsim.LayersimError, match="`models`"):
                lsim.stitch_grid(unnamed, rows(), adapter="identity")
