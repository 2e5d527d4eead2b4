"""`compare_grid`: all pairs of many models, with one forward pass of each model per batch."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
import xarray

import tl_layersim as lsim
from tl_layersim.reporting.many_model_figures import clusters
from tl_layersim.reporting.style import GREY

from ..models.tiny_models import noisy, random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from ..running.options import called
from ..running.runs import Passes

pytestmark = pytest.mark.filterwarnings("ignore:The vocabularies have:UserWarning")
CKAS = [lsim.CKA(minibatch=16), lsim.CKA(minibatch=16, estimator="biased"), lsim.CKA(estimator="exact")]


def two_groups(each: int = 2) -> dict[str, torch.nn.Module]:
    """Copies of two models with noise: x0, y0, x1, y1, ..."""
    bases = {"x": tiny_llama(dtype=torch.float64), "y": tiny_llama(dtype=torch.float64, seed=1)}
    return {f"{name}{i}": noisy(base, 7 * i + len(name)) for i in range(each) for name, base in bases.items()}


def text_rows() -> dict[str, torch.Tensor]:
    """Rows of tokens with padding and a last batch of one row."""
    tokens, mask = random_tokens(9, 20), torch.ones(9, 20, dtype=torch.long)
    mask[1, 12:] = 0
    mask[5, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


class TestGrid:
    @pytest.fixture(scope="class")
    def models(self):
        return two_groups()

    @pytest.fixture(scope="class")
    def grid(self, models):
        return lsim.compare_grid(models, lsim.Data(text_rows(), batch_size=4), lsim.CKA(minibatch=16), groups=[*"xyxy"])

    @pytest.mark.light("minibatch")
    @pytest.mark.parametrize("cka", CKAS, ids=lambda cka: cka.estimator)
    def test_each_pair_is_what_compare_gives(self, models, cka):
        grid = lsim.compare_grid(models, lsim.Data(text_rows(), batch_size=4), cka)
        names = list(models)
        for i, j in ((0, 1), (3, 0), (2, 2)):
            a, b = names[i], names[j]
            one, own = lsim.compare(models[a], models[b], lsim.Data(text_rows(), batch_size=4), cka), grid[a, b]
            assert type(own) is type(one)
            for name in one.tensor_fields():
                torch.testing.assert_close(getattr(own, name), getattr(one, name), rtol=1e-9, atol=1e-10, equal_nan=True)
            assert float(grid.values[i, j]) == pytest.approx(one.distance(), abs=1e-6)
            recorded, expected = (dict(vars(result.provenance)) for result in (own, one))
            # What is said of the data is said once, of the grid.
            for name in ("seconds", "warnings"):
                recorded.pop(name), expected.pop(name)
            assert recorded == expected
            assert (own.samples, own.minibatches, own.column_layers) == (one.samples, one.minibatches, one.column_layers)

    def test_the_distance_is_equation_two(self, grid):
        for i, a in enumerate(grid.models):
            for j, b in enumerate(grid.models):
                cka = np.asarray(grid[a, b].values)
                # The outputs of the three blocks, without the embedding.
                angles = [math.acos(min(1.0, max(-1.0, cka[layer, layer]))) for layer in (1, 2, 3)]
                assert float(grid.values[i, j]) == pytest.approx(math.sqrt(sum(angle**2 for angle in angles)), abs=1e-9)
        assert torch.equal(grid.values, grid.values.T)

    @pytest.mark.light("minibatch")
    @pytest.mark.parametrize("cka", [CKAS[0], CKAS[2]], ids=lambda cka: cka.estimator)
    def test_each_model_runs_once_a_batch(self, cka):
        models = two_groups()
        passes = Passes(models)
        lsim.compare_grid(models, lsim.Data(text_rows(), batch_size=4), cka)
        # One watched row, and one row alone beside its batch. The exact estimator needs the means of a first pass.
        assert passes.counts == dict.fromkeys(models, 2 + (6 if cka.estimator == "exact" else 3))

    def test_statistics_are_computed_once_a_model_and_batch(self, models, monkeypatch):
        from tl_layersim.analyzers import _pairwise

        triangles, count = _pairwise.upper_triangles, []
        monkeypatch.setattr(_pairwise, "upper_triangles", lambda *args: count.append(1) or triangles(*args))
        lsim.compare_grid(models, lsim.Data(random_tokens(8, 16), batch_size=4), lsim.CKA(minibatch=16))
        # Eight minibatches.
        assert len(count) == len(models) * 8

    def test_groups_are_told_apart(self, grid):
        merges = clusters(grid.values.numpy())
        assert merges[-1, 2] > 5 * merges[-2, 2]
        means = lsim.many.compare_groups(grid)["mean"]
        assert means.sel(comparison="between groups") == means.sel(comparison="x and y")
        assert means.sel(comparison="x and y") > 5 * means.sel(comparison="within groups")

    def test_an_index_that_is_no_pair(self, grid):
        for wrong in ("x0", ("x0",), ("x0", "z"), 0):
            with pytest.raises(lsim.LayersimError, match=re.escape(repr(wrong))):
                grid[wrong]

    def test_tables(self, grid):
        frame = grid.to_frame()
        assert (len(frame), set(frame.columns)) == (16, {"row_model", "column_model", "distance"})
        tables = grid.to_xarray()
        assert float(tables["distance"].sel(row_model="x0", column_model="y1")) == float(grid.values[0, 3])
        assert tables["by_site"].dims == ("row_model", "column_model", "site")
        assert (tables["distance"].attrs["long_name"], tables["distance"].attrs["units"]) == ("CKA distance", "radians")
        assert tables["by_site"].attrs["long_name"] == "CKA"
        found = lsim.many.compare_groups(tables["distance"], grid.groups)
        xarray.testing.assert_equal(found, lsim.many.compare_groups(grid))

    def test_figures(self, grid, tmp_path):
        heat = grid.plot()
        names = [re.sub("<[^>]*>", "", text) for text in heat.layout.xaxis.ticktext]
        assert [name[0] for name in names] in ([*"xxyy"], [*"yyxx"])
        order = [grid.models.index(name) for name in names]
        np.testing.assert_allclose(heat.data[0].z, grid.values[order][:, order])
        tree = lsim.many.dendrogram(grid)
        merges = clusters(grid.values.numpy())
        colours = {max(trace.y): trace.line.color for trace in tree.data if trace.y[0] is not None}
        np.testing.assert_allclose(sorted(colours), merges[:, 2])
        # The last link joins the groups; every other one is of one group.
        assert [colours[height] == GREY for height in sorted(colours)] == [False, False, True]
        points = lsim.plot(lsim.many.compare_groups(grid)).data
        np.testing.assert_allclose([np.nanmax(one.y) for one in points], lsim.many.compare_groups(grid)["mean"][2:])
        assert lsim.Report({"grid": grid}).to_html(tmp_path / "page.html").exists()

    def test_groups_by_site(self, grid):
        found = lsim.many.compare_groups(grid, field="by_site")
        pairs = {"within x": [("x0", "x1")], "within y": [("y0", "y1")]}
        pairs["x and y"] = [("x0", "y0"), ("x0", "y1"), ("x1", "y0"), ("x1", "y1")]
        for name, own in pairs.items():
            each = np.stack([np.diagonal(grid[pair].values) for pair in own])
            np.testing.assert_allclose(found["mean"].sel(comparison=name), each.mean(0))
            np.testing.assert_allclose(
                found["sd"].sel(comparison=name), each.std(0, ddof=1) if len(each) > 1 else np.full(4, math.nan)
            )
        assert tuple(found["site"].values) == grid["x0", "y0"].layers
        # Similarities are smaller between groups.
        assert (found["difference"][1:] < 0).all()
        assert found["p_value"][1:].values == pytest.approx(1 / 3)
        lines = [trace for trace in lsim.plot(found).data if trace.name]
        assert [line.name for line in lines] == list(pairs)
        np.testing.assert_allclose(lines[2].y, found["mean"][4])
        other = lsim.many.compare_groups(grid, {"x0": 1, "x1": 2, "y0": 1, "y1": 2}, field="by_site")
        assert list(other["comparison"].values[2:]) == ["within 1", "within 2", "1 and 2"]

    def test_without_groups(self, models, tmp_path):
        grid = lsim.compare_grid(models, text_rows(), lsim.CKA(minibatch=16))
        assert grid.groups == ()
        assert not lsim.many.dendrogram(grid).layout.showlegend
        with pytest.raises(lsim.LayersimError, match=r"`groups`.*None"):
            lsim.many.compare_groups(grid)
        with pytest.raises(lsim.LayersimError, match=r"`relabelings`.* 0"):
            lsim.many.compare_groups(grid, [*"xyxy"], relabelings=0)
        assert float(lsim.many.compare_groups(grid, [*"xyxy"])["p_value"]) == pytest.approx(1 / 3)

    def test_save_and_load(self, grid, tmp_path):
        again = lsim.load(grid.save(tmp_path / "grid.safetensors"))
        assert type(again) is type(grid)
        assert torch.equal(again.values, grid.values)
        assert (again.models, again.groups, again.provenance) == (grid.models, grid.groups, grid.provenance)
        for pair in (("x0", "y1"), ("y1", "x0"), ("x0", "x0")):
            assert torch.equal(again[pair].values, grid[pair].values)
            assert again[pair].provenance == grid[pair].provenance
        inside = lsim.load(lsim.Report({"many": grid}).save(tmp_path / "report.safetensors"))["many"]
        assert torch.equal(inside["y0", "y1"].effective_samples, grid["y0", "y1"].effective_samples)

    @pytest.mark.heavy("many models")
    def test_a_checkpoint_is_resumed(self, models, grid, tmp_path):
        path, data = tmp_path / "run.safetensors", text_rows()

        def broken():
            for number in range(9):
                if number == 5:
                    raise KeyboardInterrupt
                yield {name: values[number].tolist() for name, values in data.items()}

        rows = [{name: values[number].tolist() for name, values in data.items()} for number in range(9)]
        call = {"groups": [*"xyxy"], "batch_size": 4, "checkpoint": path}
        with pytest.raises(KeyboardInterrupt):
            called(lsim.compare_grid, models, broken(), lsim.CKA(minibatch=16), **call)
        assert path.exists()
        again = called(lsim.compare_grid, models, rows, lsim.CKA(minibatch=16), **call)
        whole = lsim.compare_grid(models, lsim.Data(rows, batch_size=4), lsim.CKA(minibatch=16))
        assert torch.equal(again.values, whole.values)
        with pytest.raises(lsim.LayersimError):
            lsim.compare_grid(
                dict(list(models.items())[:3]), lsim.Data(rows, batch_size=4), lsim.CKA(minibatch=16), checkpoint=path
            )


class TestModels:
    def test_widths_and_kinds_may_differ(self):
        models = {"llama": tiny_llama(), "gpt2": tiny_gpt2(), "wide": wide()}
        data = random_tokens(6, 16)
        grid = lsim.compare_grid(models, data, lsim.CKA(minibatch=16))
        for a, b in (("llama", "wide"), ("wide", "gpt2")):
            one = lsim.compare(models[a], models[b], data, lsim.CKA(minibatch=16))
            torch.testing.assert_close(grid[a, b].values, one.values, rtol=1e-9, atol=1e-9)

    def test_other_sites_and_positions(self):
        models = {"a": tiny_llama(), "b": tiny_llama(seed=1), "c": tiny_gpt2()}
        options = {"at": "attn_out", "positions": slice(2, None), "batch_size": 3}
        data = random_tokens(6, 16)
        grid = called(lsim.compare_grid, models, data, lsim.CKA(minibatch=16), **options)
        one = called(lsim.compare, models["b"], models["c"], data, lsim.CKA(minibatch=16), **options)
        torch.testing.assert_close(grid["b", "c"].values, one.values, rtol=1e-9, atol=1e-9)
        assert grid["b", "c"].layers == one.layers == tuple(f"blocks.{i}.hook_attn_out" for i in range(3))
        assert float(grid.values[1, 2]) == pytest.approx(one.distance(), abs=1e-9)

    def test_depths_that_differ(self):
        models = {"a": tiny_llama(), "deep": tiny_llama(5)}
        with pytest.raises(lsim.LayersimError, match="a: 4, deep: 6"):
            lsim.compare_grid(models, random_tokens(), lsim.CKA(minibatch=16))
        grid = lsim.compare_grid(
            models,
            random_tokens(),
            lsim.CKA(minibatch=16),
            distance=lambda result: float(result.values[-1, -1].clamp(-1, 1).arccos()),
        )
        assert grid["a", "deep"].values.shape == (4, 6)
        with pytest.raises(lsim.LayersimError, match="by_site"):
            lsim.many.compare_groups(grid, ["x", "y"], field="by_site")
        assert "by_site" not in grid.to_xarray()
        assert float(grid.values[0, 1]) == pytest.approx(math.acos(float(grid["a", "deep"].values[-1, -1])))

    def test_a_tokenizer_of_any_model_reads_texts(self):
        models = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
        models["b"].tokenizer = tiny_tokenizer()
        texts = ["w3 w4 w5 w6 w7 w8", "w9 w10 w11 w12 w13 w14 w15"] * 2
        grid = lsim.compare_grid(models, texts, lsim.CKA(minibatch=4))
        assert grid.provenance.tokens == 30
        models["a"].tokenizer = tiny_tokenizer(90)
        with pytest.raises(lsim.LayersimError, match=r"'w90' is not in .* and has id 90 in "):
            lsim.compare_grid(models, texts, lsim.CKA(minibatch=4))

    @pytest.mark.filterwarnings("ignore:cka. one dimension")
    def test_a_distance_that_is_not_defined(self):
        models = two_groups()
        flat = copy.deepcopy(models["x0"])
        with torch.no_grad():
            # Every token has one and the same residual.
            flat.model.embed_tokens.weight.copy_(flat.model.embed_tokens.weight[:1].expand(100, -1))
            for block in flat.model.layers:
                block.self_attn.o_proj.weight.zero_()
                block.mlp.down_proj.weight.zero_()
        with pytest.raises(lsim.LayersimError, match=r"x0.*flat.*CKA"):
            lsim.compare_grid(models | {"flat": flat}, text_rows(), lsim.CKA(minibatch=16))

    def test_activations_that_are_not_finite(self):
        models = two_groups()
        with torch.no_grad():
            models["x1"].model.layers[1].mlp.down_proj.weight.fill_(math.nan)
        with pytest.raises(lsim.LayersimError, match=r"NaN or infinite in .*model 3.*weights .*float16"):
            lsim.compare_grid(models, text_rows(), lsim.CKA(minibatch=16))


def wide():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=100, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def test_the_limit_of_memory_holds_for_the_sums_of_all_pairs():
    models = {name: tiny_llama(seed=seed) for seed, name in enumerate("abc")}
    with pytest.raises(lsim.LayersimError, match="`max_memory_gb` is 1e-06"):
        lsim.compare_grid(models, random_tokens(32), lsim.CKA(minibatch=8, max_memory_gb=1e-6))
