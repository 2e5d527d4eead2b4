"""Penalties between groups of models, and how often fronts run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.stitching import activation_store

from ..models.tiny_models import noisy, tiny_llama
from .helpers import rotated, rows


def texts() -> list[str]:
    return [text[:60] for text in lsim.demo_text()[:4]]


@pytest.mark.heavy("a grid of stitches")
class TestGroups:
    @pytest.fixture(scope="class")
    def models(self):
        """Copies of the demo model with a little noise, and copies of the same model in another basis."""
        base = lsim.demo_model()
        turned = rotated(base)[0]
        turned.tokenizer = base.tokenizer
        models = {"p0": noisy(base, 0), "q0": noisy(turned, 1), "p1": noisy(base, 2), "q1": noisy(turned, 3)}
        for model in models.values():
            model.tokenizer = base.tokenizer
        return models

    @pytest.fixture(scope="class")
    def grid(self, models):
        return lsim.stitch_grid(
            models, lsim.Data(texts(), seq_len=16), layers=[1, 5], adapter="identity", groups={n: n[0] for n in models}
        )

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_each_pair_is_a_stitch(self, models, grid):
        table = grid.to_xarray().sel(seam="blocks.5.hook_resid_post")
        for a, b in (("p0", "q1"), ("q1", "p0"), ("p0", "p1"), ("q0", "q0")):
            pair_result = lsim.stitch(models[a], models[b], lsim.Data(texts(), seq_len=16), at=(5, 5), adapter="identity")
            cell = table.sel(front=a, back=b)
            assert float(cell["penalty"]) == pair_result.penalty
            assert float(cell["accuracy_penalty"]) == pytest.approx(pair_result.accuracy_penalty)
        assert table["penalty"].attrs["units"] == "nats per token"

    def test_groups_are_told_apart(self, grid):
        groups = lsim.many.compare_groups(grid.to_xarray()["penalty"].mean("seam"), grid.groups)
        names = ["within groups", "between groups", "within p", "within q", "p into q", "q into p"]

        assert list(groups["comparison"].values) == names
        assert groups["count"].values.tolist() == [4, 8, 2, 2, 4, 4]
        assert float(groups["difference"]) > 1
        assert float(groups["p_value"]) == float(groups["smallest_p"]) == pytest.approx(1 / 3)

    def test_groups_by_stitch_point(self, grid):
        groups = lsim.many.compare_groups(grid)
        p = [0, 2]
        q = [1, 3]
        mean = groups["mean"].sel

        np.testing.assert_allclose(mean(comparison="within p"), (grid.penalty[0, 2] + grid.penalty[2, 0]) / 2)
        np.testing.assert_allclose(mean(comparison="q into p"), grid.penalty[q][:, p].mean((0, 1)))

        deviation = groups["sd"].sel(comparison="p into q")
        np.testing.assert_allclose(deviation, grid.penalty[p][:, q].flatten(0, 1).std(0))
        assert groups["p_value"].dims == ("seam",)

        accuracy = lsim.many.compare_groups(grid, ["a", "a", "a", "b"], field="accuracy_penalty")
        assert list(accuracy["comparison"].values[2:]) == ["within a", "a into b", "b into a"]
        np.testing.assert_allclose(accuracy["mean"][3], grid.accuracy_penalty[:3, 3].mean(0))

        lines = [trace for trace in lsim.plot(groups).data if trace.name]
        np.testing.assert_allclose([line.y for line in lines], groups["mean"][2:])

    def test_figures_and_files(self, grid, tmp_path):
        penalty = grid.to_xarray()["penalty"]
        links = lsim.many.dendrogram(penalty.isel(seam=0), grid.groups).data

        assert len([link for link in links if link.mode == "lines"]) == 3
        np.testing.assert_allclose(lsim.plot(penalty.isel(seam=0), over=("back", "front")).data[0].z, grid.penalty[..., 0])

        colours = {trace.name: trace.line.color for trace in grid.plot().data}
        assert colours["p0 into q0"] != colours["q0 into p0"]
        assert lsim.load(grid.save(tmp_path / "grid.safetensors")).groups == grid.groups

    def test_refusals(self, models):
        with pytest.raises(lsim.LayersimError, match="`groups`"):
            lsim.stitch_grid(models, texts(), adapter="identity", groups={"p0": "p"})


class Passes:
    """Counts calls of the blocks of a model's stack."""

    def __init__(self, model: torch.nn.Module, block: int) -> None:
        self.count = 0
        model.model.layers[block].mlp.register_forward_pre_hook(lambda *_: setattr(self, "count", self.count + 1))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_front_runs_once_a_batch_for_all_backs(tmp_path):
    counts = []
    for number, options in ((2, {}), (4, {}), (4, {"cache": tmp_path})):
        models = {f"m{n}": tiny_llama(seed=n) for n in range(number)}
        passes = Passes(models["m0"], 0)
        grid = lsim.stitch_grid(models, lsim.Data(rows(20), batch_size=2), layers=[0], adapter="identity", **options)
        assert len(grid.text_tokens) == 20
        counts.append(passes.count)
    # 10 batches as a front, 10 as a back alone, and a few passes of one row that check the split; for any number of backs.
    assert counts == [26] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy("many stitches")
@pytest.mark.parametrize("fit", ["lstsq", "sgd"])
def test_fits_read_the_same_activations(fit, monkeypatch):
    models = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
    data = lsim.Data(rows(80), batch_size=4)
    options = {"adapter": "affine", "fit": fit}
    options |= {"training": lsim.stitching.StitchTraining(steps=3)} if fit == "sgd" else {}

    grid = lsim.stitch_grid(models, data, layers=[1], **options)
    pair_result = lsim.stitch(models["a"], models["b"], data, at=(1, 1), **options)

    assert float(grid.penalty[0, 1, 0]) == pair_result.penalty


@pytest.mark.heavy("many stitches")
def test_activations_that_do_not_fit_are_computed_anew(monkeypatch, capfd):
    models = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
    with_store = lsim.stitch_grid(models, rows(), layers=[0], adapter="identity")
    monkeypatch.setattr(activation_store, "_free_bytes", lambda folder: (1000.0, "memory"))
    anew = lsim.stitch_grid(models, rows(), layers=[0], adapter="identity")

    assert torch.equal(anew.penalty, with_store.penalty)
    assert "do not fit into memory" in capfd.readouterr().err
