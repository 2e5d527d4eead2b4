"""Stitching models of every kind gives one answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import tiny_gpt2
from .helpers import QUICK, gpt2_of_kind, rows


class TestEveryKind:
    """HookedTransformer, TransformerBridge, nnsight and plain models on either side give one answer."""

    @pytest.fixture(scope="class")
    def expected(self):
        return lsim.stitch(
            tiny_gpt2(0), tiny_gpt2(1), lsim.Data(rows(), batch_size=4), at=(1, 0), adapter="affine", fit="lstsq"
        )

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("kind", ["bridge", "nnsight", "wrapped", "hooked"])
    @pytest.mark.parametrize("side", ["front", "back"])
    def test_one_answer(self, kind, side, expected):
        models = [tiny_gpt2(0), tiny_gpt2(1)]
        models[side == "back"] = gpt2_of_kind(kind, int(side == "back"))

        result = lsim.stitch(*models, lsim.Data(rows(), batch_size=4), at=(1, 0), adapter="affine", fit="lstsq")

        assert result.loss == pytest.approx(expected.loss, abs=2e-6)
        assert result.back_loss == pytest.approx(expected.back_loss, abs=2e-6)
        torch.testing.assert_close(result.weight, expected.weight, rtol=1e-3, atol=1e-4)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("kind", ["bridge", "nnsight", "wrapped", "hooked"])
    def test_training_through_it(self, kind):
        plain, remote_grid = (
            lsim.stitch(
                tiny_gpt2(0), back, lsim.Data(rows(), batch_size=4), at=(1, 1), adapter="affine-norm", fit="sgd", training=QUICK
            )
            for back in (tiny_gpt2(1), gpt2_of_kind(kind, 1))
        )
        np.testing.assert_allclose(remote_grid.curve, plain.curve, atol=2e-5)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("kind", ["bridge", "nnsight", "wrapped", "hooked"])
    def test_the_stitched_model_of_it(self, kind):
        tokens = rows(4, 8)
        result = lsim.stitch(gpt2_of_kind(kind, 0), gpt2_of_kind(kind, 1), tokens, at=(1, 0), adapter="identity")
        plain = lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), tokens, at=(1, 0), adapter="identity")
        with torch.no_grad():
            stitched_logits = result.model(tokens)
            plain_output = plain.model(tokens)
        stitched_logits = getattr(stitched_logits, "logits", stitched_logits)

        torch.testing.assert_close(stitched_logits, plain_output.logits, rtol=1e-4, atol=1e-5)

        lens = lsim.analyze(result.model, tokens, [lsim.LogitLens()])["logit_lens"]
        assert float(lens.cross_entropy[-1]) == pytest.approx(result.loss, abs=1e-5)
        assert lens.layers == ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.2.hook_resid_post")

    def test_models_are_left_as_they_were(self):
        bridge = gpt2_of_kind("bridge", 1)
        tokens = rows(4, 8)
        before = bridge(tokens)
        keys = [set(vars(block)) for block in bridge.blocks]

        result = lsim.stitch(tiny_gpt2(0), bridge, tokens, at=(1, 1), adapter="identity")
        result.model(tokens)

        assert torch.equal(bridge(tokens), before)
        assert [set(vars(block)) for block in bridge.blocks] == keys

    @pytest.mark.heavy("a simulated server")
    @pytest.mark.parametrize("fit", ["lstsq", "sgd"])
    def test_in_nnsights_simulation_of_a_server(self, fit):
        options = {"at": (1, 0), "adapter": "affine", "fit": fit}
        data = lsim.Data(rows(), batch_size=6)
        options |= {"training": lsim.stitching.StitchTraining(steps=3, warmup=1)} if fit == "sgd" else {}
        there = [lsim.open_model(gpt2_of_kind("nnsight", seed), remote="local") for seed in (0, 1)]

        here = lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), data, **options)
        result = lsim.stitch(*there, data, **options)

        assert result.loss == pytest.approx(here.loss, abs=1e-6)
        assert result.back_loss == pytest.approx(here.back_loss, abs=1e-6)
        np.testing.assert_allclose(result.curve, here.curve, atol=1e-6)

        mixed = lsim.stitch(tiny_gpt2(0), there[1], data, **options)
        assert mixed.loss == pytest.approx(here.loss, abs=1e-6)
        with pytest.raises(lsim.LayersimError, match="`model`"):
            _ = mixed.model

    @pytest.mark.heavy("a simulated server")
    def test_each_model_of_a_grid_is_opened_in_its_own_way(self):
        here = {"a": tiny_gpt2(0), "b": tiny_gpt2(1)}
        there = {
            "a": lsim.open_model(here["a"], layers=[f"transformer.h.{i}" for i in range(2)]),
            "b": lsim.open_model(gpt2_of_kind("nnsight", 1), remote="local"),
        }

        plain, mixed = (
            lsim.stitch_grid(grid_models, rows(4, 8), layers=[0, 1], adapter="identity") for grid_models in (here, there)
        )

        torch.testing.assert_close(mixed.loss, plain.loss, rtol=0, atol=1e-6)

    @pytest.mark.heavy("a simulated server")
    def test_both_ends_of_a_remote_back(self):
        there = gpt2_of_kind("nnsight", 1)
        first = "blocks.0.hook_resid_pre"
        for at in ((2, 2), (first, first)):
            here = lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), rows(4, 8), at=at, adapter="identity")
            result = lsim.stitch(tiny_gpt2(0), lsim.open_model(there, remote="local"), rows(4, 8), at=at, adapter="identity")
            assert result.loss == pytest.approx(here.loss, abs=1e-6)
