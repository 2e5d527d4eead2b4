"""Interrupted stitches resume with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called
from .helpers import QUICK, rows


class TestInterrupts:
    OPTIONS = {"at": (1, 1), "adapter": "affine", "fit": "lstsq+sgd", "training": QUICK}  # noqa: RUF012
    DATA = lsim.Data(rows(80), batch_size=4)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("after", [1, 11, 29])
    def test_the_same_call_goes_on_with_the_same_numbers(self, tmp_path, monkeypatch, after):
        from tl_layersim.sources.partial_forward import LocalSplitModel

        front = tiny_llama()
        back = tiny_llama(seed=1)

        whole = lsim.stitch(front, back, self.DATA, **self.OPTIONS)
        plain = LocalSplitModel.loss_and_gradient
        calls = []

        def interrupted(self, *args):
            if len(calls) == after:
                raise KeyboardInterrupt
            calls.append(1)
            return plain(self, *args)

        monkeypatch.setattr(LocalSplitModel, "loss_and_gradient", interrupted)
        path = tmp_path / "stitch.safetensors"

        with pytest.raises(KeyboardInterrupt):
            lsim.stitch(front, back, self.DATA, checkpoint=path, **self.OPTIONS)

        steps_after = []
        monkeypatch.setattr(
            LocalSplitModel, "loss_and_gradient", lambda self, *args: steps_after.append(1) or plain(self, *args)
        )
        result = lsim.stitch(front, back, self.DATA, checkpoint=path, **self.OPTIONS)
        assert len(steps_after) == 30 - after
        for name in result.tensor_fields():
            assert torch.equal(getattr(result, name), getattr(whole, name)), name
        assert result.explained == whole.explained

        # And what is done is not done again.
        lsim.stitch(front, back, self.DATA, checkpoint=path, **self.OPTIONS)
        assert len(steps_after) == 30 - after

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_another_call_is_refused(self, tmp_path):
        front = tiny_llama()
        back = tiny_llama(seed=1)
        options = {**self.OPTIONS, "checkpoint": tmp_path / "stitch.safetensors"}

        lsim.stitch(front, back, self.DATA, **options)

        for change in (
            {"at": (0, 1)},
            {"training": replace(QUICK, seed=1)},
            {"adapter": "linear"},
            {"ridge": 0.1},
            {"labels": random_tokens(80, 16, 9)},
            {"eval_data": random_tokens(4, 16, 9)},
            {"training": lsim.stitching.StitchTraining(steps=31)},
            {"skip_first": 1},
        ):
            with pytest.raises(lsim.LayersimError, match="belongs to another run"):
                called(lsim.stitch, front, back, self.DATA.source, **{"batch_size": 4} | options | change)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, self.DATA.like(rows(81)), **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, tiny_llama(seed=2), self.DATA, **options)

    def test_given_adapters_are_told_apart(self, tmp_path):
        front = tiny_llama()
        back = tiny_llama(seed=1)
        path = tmp_path / "stitch.safetensors"
        weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))

        lsim.stitch(
            front, back, rows(), at=(0, 0), adapter=lsim.stitching.Adapter("affine", weight, torch.zeros(32)), checkpoint=path
        )

        for adapter in (
            lsim.stitching.Adapter("affine", weight.T.contiguous(), torch.zeros(32)),
            lsim.stitching.Adapter("affine", weight, torch.ones(32)),
            lsim.stitching.Adapter("linear", weight),
        ):
            with pytest.raises(lsim.LayersimError, match="belongs to another run"):
                lsim.stitch(front, back, rows(), at=(0, 0), adapter=adapter, checkpoint=path)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_calls_with_other_targets_or_held_out_rows_are_told_apart(self, tmp_path):
        front = tiny_llama()
        back = tiny_llama(seed=1)
        labels = random_tokens(20, 16, 7)
        options = {"at": (0, 0), "adapter": "identity", "labels": "data", "checkpoint": tmp_path / "a"}

        lsim.stitch(front, back, {"input_ids": rows(20), "labels": labels}, **options)

        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, {"input_ids": rows(20), "labels": labels.flip(0)}, **options)

        options = {"at": (0, 0), "fit": "lstsq", "checkpoint": tmp_path / "b"}
        lsim.stitch(front, back, lsim.Data(rows(20)[:12], batch_size=4), eval_data=rows(20)[12:], **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, lsim.Data(rows(20)[:16], batch_size=4), eval_data=rows(20)[16:], **options)

        options = {"at": (0, 0), "adapter": "identity", "checkpoint": tmp_path / "c"}
        paths = [f"model.layers.{i}" for i in range(3)]
        lsim.stitch(lsim.open_model(front, layers=paths[:2]), back, rows(4), **options)
        with pytest.raises(lsim.LayersimError, match=r"/c .*blocks: .*blocks: "):
            lsim.stitch(lsim.open_model(front, layers=paths), back, rows(4), **options)

        options = {"layers": [0], "adapter": "identity", "checkpoint": tmp_path / "d"}
        lsim.stitch_grid({"a": lsim.open_model(front, layers=paths[:2]), "b": back}, rows(4), **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch_grid({"a": front, "b": back}, rows(4), **options)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_names_of_any_kind(self, tmp_path):
        models = {name: tiny_llama(seed=seed) for seed, name in enumerate(["org/a", "b>c", "org/a>b", "c@1"])}
        options = {"layers": [0], "adapter": "identity"}

        plain = lsim.stitch_grid(models, rows(4), **options)

        for _ in range(2):
            checkpointed = lsim.stitch_grid(models, rows(4), checkpoint=tmp_path / "grid", **options)
            assert torch.equal(checkpointed.values, plain.values)

    @pytest.mark.heavy("many trainings")
    def test_trouble_after_the_training_loses_nothing(self, tmp_path, monkeypatch):
        from tl_layersim.stitching.stitch import StitchExperiment

        front = tiny_llama()
        back = tiny_llama(seed=1)
        path = tmp_path / "stitch.safetensors"

        whole = lsim.stitch(front, back, self.DATA, **self.OPTIONS)

        def interrupted(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(StitchExperiment, "_evaluate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lsim.stitch(front, back, self.DATA, checkpoint=path, **self.OPTIONS)
        from tl_layersim.sources.partial_forward import LocalSplitModel

        monkeypatch.setattr(LocalSplitModel, "loss_and_gradient", interrupted)
        monkeypatch.setattr("tl_layersim.stitching.stitch.least_squares", interrupted)

        assert lsim.stitch(front, back, self.DATA, checkpoint=path, **self.OPTIONS).penalty == whole.penalty

    def test_unusable_held_out_data_is_refused_before_the_work(self, tmp_path, monkeypatch):
        from tl_layersim.sources.partial_forward import LocalSplitModel

        calls = []
        plain = LocalSplitModel.loss_and_gradient
        monkeypatch.setattr(LocalSplitModel, "loss_and_gradient", lambda self, *args: calls.append(1) or plain(self, *args))
        bad = random_tokens(4, 16)
        bad[-1, -1] = 5000
        data = {"input_ids": rows()}
        held_out = {"input_ids": random_tokens(4, 16, 3), "labels": bad}

        with pytest.raises(lsim.LayersimError, match=r"`labels`.*5000"):
            lsim.stitch(
                tiny_llama(), tiny_llama(seed=1), lsim.Data({**data, "labels": rows().flip(1)}, batch_size=4), at=(0, 0),
                fit="sgd", labels="data", eval_data=held_out, training=QUICK, checkpoint=tmp_path / "f",
            )  # fmt: skip
        assert not calls
        assert not (tmp_path / "f").exists()

    @pytest.mark.heavy("many trainings")
    def test_a_grid_goes_on_where_it_was(self, tmp_path, monkeypatch):
        from tl_layersim.sources.partial_forward import LocalSplitModel

        models = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
        options = {"layers": [0, 2], "fit": "sgd", "training": lsim.stitching.StitchTraining(steps=4, warmup=1)}
        data = lsim.Data(rows(), batch_size=2)

        whole = lsim.stitch_grid(models, data, **options)
        plain = LocalSplitModel.loss_and_gradient
        calls = []

        def interrupted(self, *args):
            if len(calls) == 18:
                raise KeyboardInterrupt
            calls.append(1)
            return plain(self, *args)

        monkeypatch.setattr(LocalSplitModel, "loss_and_gradient", interrupted)
        path = tmp_path / "grid.safetensors"

        with pytest.raises(KeyboardInterrupt):
            lsim.stitch_grid(models, data, checkpoint=path, **options)

        monkeypatch.setattr(LocalSplitModel, "loss_and_gradient", lambda self, *args: calls.append(1) or plain(self, *args))
        result = lsim.stitch_grid(models, data, checkpoint=path, **options)
        assert len(calls) == 8 * 4
        for name in result.tensor_fields():
            assert torch.equal(getattr(result, name), getattr(whole, name)), name
