"""Penalties between models as a matrix, groups of models, and how often fronts run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.stitching import activation_store

from ..tiny_models import noisy, tiny_llama
from .helpers import rotated, rows


def texts() -> list[str]:
    return [text[:60] for text in lsim.demo_text()[:4]]


class TestGroups:
    @pytest.fixture(scope="class")
    def models(self):
        """Copies of the demo model with a little noise, and copies of the same model in another basis."""
        base = lsim.demo_model()
        turned = rotated(base)[0]
        turned.tokenizer = base.tokenizer
        made = {"p0": noisy(base, 0), "q0": noisy(turned, 1), "p1": noisy(base, 2), "q1": noisy(turned, 3)}
        for model in made.values():
            model.tokenizer = base.tokenizer
        return made

    @pytest.fixture(scope="class")
    def grid(self, models):
        return lsim.stitch_grid(
            models, lsim.Data(texts(), seq_len=16), layers=[1, 5], adapter="identity", groups={n: n[0] for n in models}
        )

    def test_each_pair_is_a_stitch(self, models, grid):
        found = grid.between_models(1)
        own = grid.between_models("blocks.5.hook_resid_post", of="accuracy_penalty")
        for a, b in (("p0", "q1"), ("q1", "p0"), ("p0", "p1"), ("q0", "q0")):
            one = lsim.stitch(models[a], models[b], lsim.Data(texts(), seq_len=16), at=(5, 5), adapter="identity")
            place = found.models.index(a), found.models.index(b)
            assert float(found.values[place]) == one.penalty
            assert float(own.values[place]) == pytest.approx(one.accuracy_penalty)

    def test_groups_are_told_apart(self, grid):
        found = grid.between_models()
        torch.testing.assert_close(found.values, grid.penalty.mean(-1))
        assert [found.models[n][0] for n in found.order] in ([*"ppqq"], [*"qqpp"])
        groups = found.compare_groups()
        assert groups.comparisons == ("within groups", "between groups", "within p", "within q", "p into q", "q into p")
        assert groups.count.tolist() == [4, 8, 2, 2, 4, 4]
        assert float(groups.values[1]) > float(groups.values[0]) + 1
        assert groups.p_value == groups.smallest_p == pytest.approx(1 / 3)

    def test_groups_by_stitch_point(self, grid):
        found = grid.groups_by_seam()
        assert found.comparisons == ("within p", "within q", "p into q", "q into p")
        p, q = [0, 2], [1, 3]
        torch.testing.assert_close(found.values[0], (grid.penalty[0, 2] + grid.penalty[2, 0]) / 2)
        torch.testing.assert_close(found.values[3], grid.penalty[q][:, p].mean((0, 1)))
        torch.testing.assert_close(found.sd[2], grid.penalty[p][:, q].flatten(0, 1).std(0))
        assert found.plot().layout.yaxis.title.text == "Stitching penalty (nats per token)"
        accuracy = grid.groups_by_seam(["a", "a", "a", "b"], of="accuracy_penalty")
        assert accuracy.comparisons == ("within a", "a into b", "b into a")
        torch.testing.assert_close(accuracy.values[1], grid.accuracy_penalty[:3, 3].mean(0))

    def test_figures_and_files(self, grid, tmp_path):
        found = grid.between_models(0)
        heat = found.plot()
        assert heat.layout.yaxis.title.text == "Front (lower blocks)"
        assert heat.layout.xaxis.title.text == "Back (upper blocks)"
        assert heat.data[0].colorbar.title.text == "Stitching penalty (nats per token)"
        order = list(found.order)
        np.testing.assert_allclose(heat.data[0].z, found.values[order][:, order])
        # 0 has the middle colour where a stitch is better than the back alone.
        assert bool((found.values < 0).any())
        assert heat.data[0].zmin == -heat.data[0].zmax
        colours = {trace.name: trace.line.color for trace in grid.plot().data}
        assert colours["p0 into q0"] != colours["q0 into p0"]
        assert found.plot("dendrogram").layout.yaxis.title.text == "Stitching penalty (nats per token)"
        assert "Stitching penalty within and between groups" in found.plot("groups").layout.title.text
        mean = grid.between_models()
        for field in ("penalty", "dendrogram", "groups"):
            assert "identity adapter, blocks.1.hook_resid_post" in found.plot(field).layout.title.subtitle.text
            assert "identity adapter, mean over 2 stitch points" in mean.plot(field).layout.title.subtitle.text
        accuracy = grid.between_models(0, "accuracy_penalty")
        assert accuracy.plot().data[0].colorbar.title.text == "Accuracy penalty (fraction of targets)"
        again = lsim.load(found.save(tmp_path / "penalties.safetensors"))
        assert torch.equal(again.values, found.values)
        assert (again.seam, again.groups, again.kind) == (found.seam, found.groups, "identity")
        assert lsim.load(grid.save(tmp_path / "grid.safetensors")).groups == grid.groups
        assert "penalty" in found.to_frame().columns
        page = lsim.Report({"penalties": found}).to_html(tmp_path / "page.html").read_text()
        assert "Stitching penalty between models" in page

    def test_refusals(self, models, grid):
        for wrong in (2, -1, "blocks.0.hook_resid_post"):
            with pytest.raises(lsim.LayersimError, match=f"`seam`.*{wrong}"):
                grid.between_models(wrong)
        with pytest.raises(lsim.LayersimError, match="`groups`"):
            lsim.stitch_grid(models, texts(), adapter="identity", groups={"p0": "p"})
        one = lsim.stitch_grid({"a": tiny_llama()}, rows(), adapter="identity")
        with pytest.raises(lsim.LayersimError, match=r"\bgrid\b.*\ba\b"):
            one.between_models()


class Passes:
    """Counts calls of the blocks of a model's stack."""

    def __init__(self, model: torch.nn.Module, block: int) -> None:
        self.count = 0
        model.model.layers[block].mlp.register_forward_pre_hook(lambda *_: setattr(self, "count", self.count + 1))


def test_a_front_runs_once_a_batch_for_all_backs(tmp_path):
    counts = []
    for number, options in ((2, {}), (4, {}), (4, {"cache": tmp_path})):
        made = {f"m{n}": tiny_llama(seed=n) for n in range(number)}
        passes = Passes(made["m0"], 0)
        grid = lsim.stitch_grid(made, lsim.Data(rows(20), batch_size=2), layers=[0], adapter="identity", **options)
        assert len(grid.batch_tokens) == 10
        counts.append(passes.count)
    # 10 batches as a front, 10 as a back alone, and a few passes of one row that check the split; for any number of backs.
    assert counts == [23] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fit", ["lstsq", "sgd"])
def test_fits_read_the_same_activations(fit, monkeypatch):
    made = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
    data, options = lsim.Data(rows(80), batch_size=4), {"adapter": "affine", "fit": fit}
    options |= {"training": lsim.StitchTraining(steps=3)} if fit == "sgd" else {}
    grid = lsim.stitch_grid(made, data, layers=[1], **options)
    one = lsim.stitch(made["a"], made["b"], data, at=(1, 1), **options)
    assert float(grid.penalty[0, 1, 0]) == one.penalty


def test_activations_that_do_not_fit_are_computed_anew(monkeypatch, capfd):
    made = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
    kept = lsim.stitch_grid(made, rows(), layers=[0], adapter="identity")
    monkeypatch.setattr(activation_store, "_free", lambda folder: (1000.0, "memory"))
    anew = lsim.stitch_grid(made, rows(), layers=[0], adapter="identity")
    assert torch.equal(anew.penalty, kept.penalty)
    assert "do not fit into memory and are computed anew for each back" in capfd.readouterr().err
