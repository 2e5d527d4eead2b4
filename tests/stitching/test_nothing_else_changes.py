"""Stitching changes nothing of the models, and runs no more of them than it must."""

from __future__ import annotations

import warnings

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote.open_model import open_split_model

from ..models.tiny_models import tiny_llama
from .helpers import QUICK, lsim_batches, rows


class TestNothingElseChanges:
    @pytest.mark.light("identity")
    @pytest.mark.parametrize("kind", ["identity", "affine", "affine-norm"])
    def test_no_gradient_reaches_a_weight(self, kind):
        front, back = tiny_llama().train(), tiny_llama(seed=1).train()
        list(back.parameters())[3].requires_grad_(False)
        flags = [[p.requires_grad for p in m.parameters()] for m in (front, back)]
        sums = [[float(p.detach().double().sum()) for p in m.parameters()] for m in (front, back)]
        more = {} if kind == "identity" else {"fit": "lstsq+sgd", "training": QUICK}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lsim.LayersimWarning)
            lsim.stitch(front, back, lsim.Data(rows(), batch_size=6), at=(1, 1), adapter=kind, **more)
        assert front.training
        for model, flag, total in zip((front, back), flags, sums, strict=True):
            assert all(p.grad is None for p in model.parameters())
            assert [p.requires_grad for p in model.parameters()] == flag
            assert [float(p.detach().double().sum()) for p in model.parameters()] == total
            assert model.training
            for module in model.modules():
                assert "forward" not in vars(module)
                assert not module._forward_hooks
                assert not module._forward_pre_hooks

    def test_nor_after_an_exception(self, monkeypatch):
        front, back = tiny_llama(), tiny_llama(seed=1)
        monkeypatch.setattr(back.lm_head, "forward", lambda x: (_ for _ in ()).throw(RuntimeError("broken head")))
        with pytest.raises(lsim.LayersimError, match="broken head"):
            lsim.stitch(front, back, rows(), at=(1, 1), adapter="identity")
        for model in (front, back):
            assert all(p.requires_grad for p in model.parameters())
            for module in model.model.modules():
                assert "forward" not in vars(module)
                assert not module._forward_hooks
                assert not module._forward_pre_hooks

    def test_no_block_below_the_stitch_point_runs_in_a_step(self):
        front, back = tiny_llama(4), tiny_llama(4, seed=1)
        runs = dict.fromkeys(range(4), 0)
        for number, block in enumerate(back.model.layers):
            block.mlp.register_forward_hook(lambda *_, n=number: runs.update({n: runs[n] + 1}))
        split_model, other = open_split_model(back), open_split_model(front)
        batches = lsim_batches(rows(4))
        split_model.tuples()
        runs.update(dict.fromkeys(runs, 0))
        split_model.loss_and_gradient(batches[0], batches[0].next_tokens, 3, other.hidden(batches[0], 3))
        assert runs == {0: 0, 1: 0, 2: 0, 3: 1}

    def test_the_front_runs_once_a_batch(self, monkeypatch):
        from tl_layersim.sources.partial_forward import LocalSplitModel

        calls = []
        plain = LocalSplitModel.hidden
        monkeypatch.setattr(
            LocalSplitModel,
            "hidden",
            lambda self, batch, layer: calls.append(self.model.weights_hash) or plain(self, batch, layer),
        )
        front, back = tiny_llama(), tiny_llama(seed=1)
        result = lsim.stitch(
            front, back, lsim.Data(rows(20), batch_size=4), at=(0, 0), adapter="affine-norm", fit="sgd", training=QUICK
        )
        own = result.provenance.weights_hash.split(" | ")[0]
        # Four batches of the fit, and one of the evaluation.
        assert calls.count(own) == 4 + 1

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_inside_a_users_own_contexts(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        options = {"at": (1, 1), "adapter": "affine-norm", "fit": "sgd", "training": QUICK}
        data = lsim.Data(rows(), batch_size=6)
        plain = lsim.stitch(front, back, data, **options)
        with torch.no_grad():
            assert lsim.stitch(front, back, data, **options).penalty == plain.penalty
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert lsim.stitch(front, back, data, **options).penalty == plain.penalty
        with torch.inference_mode():
            assert lsim.stitch(front, back, data, **options).penalty == plain.penalty

    def test_hooks_below_the_stitch_point_do_not_touch_what_is_put_there(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        plain = lsim.stitch(front, back, rows(4), at=(1, 1), adapter="identity")
        handles = [back.model.layers[0].register_forward_hook(lambda _m, _a, out: out * 3)]
        handles.append(back.model.layers[0].register_forward_pre_hook(lambda _m, args: (args[0] * 2,)))
        assert lsim.stitch(front, back, rows(4), at=(1, 1), adapter="identity").loss == plain.loss
        assert lsim.stitch(front, back, rows(4), at=(1, 1), adapter="identity").back_loss != plain.back_loss
        for handle in handles:
            handle.remove()

    def test_warnings_point_to_the_users_line(self):
        with pytest.warns(lsim.LayersimWarning) as caught:
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), lsim.Data(rows(2), batch_size=1), at=(0, 0), fit="lstsq")
        assert caught[0].filename == __file__

    def test_a_block_that_does_not_run_is_refused_in_words(self):
        # As in a compiled graph, which runs past its modules.
        model = tiny_llama()
        model.spare = torch.nn.Linear(32, 32)
        with pytest.raises(lsim.LayersimError, match=r"spare\b.* never"):
            lsim.stitch(
                lsim.open_model(model, layers=["model.layers.0", "spare"]), tiny_llama(), rows(4), at=(1, 1), adapter="identity"
            )
