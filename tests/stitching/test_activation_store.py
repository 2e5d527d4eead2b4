"""Activations on disk and in memory."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote.open_model import open_split_model
from tl_layersim.stitching.activation_store import ActivationStore

from ..models.tiny_models import tiny_llama
from .helpers import QUICK, lsim_batches, rows


class TestCache:
    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_a_file_gives_the_same_numbers_and_goes_away(self, tmp_path, capsys):
        front = tiny_llama()
        back = tiny_llama(seed=1)
        options = {"at": (1, 1), "adapter": "affine-norm", "fit": "sgd", "training": QUICK}

        in_memory = lsim.stitch(front, back, lsim.Data(rows(), batch_size=6), **options)
        in_file = lsim.stitch(front, back, lsim.Data(rows(), batch_size=6), cache=tmp_path, **options)

        assert torch.equal(in_memory.curve, in_file.curve)
        assert not list(tmp_path.iterdir())
        # 20 of 24 rows of 16 positions of 32 float32.
        assert "41.0 kB in a file" in capsys.readouterr().err

    def test_too_much_for_memory(self, monkeypatch):
        from tl_layersim.stitching import activation_store

        monkeypatch.setattr(activation_store, "_free_bytes", lambda folder: (1000.0, "memory"))
        with pytest.raises(lsim.LayersimError, match=r"41\.0 kB\b.*1\.0 kB.*cache="):
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), lsim.Data(rows(), batch_size=6), at=(1, 1), fit="sgd", training=QUICK)

    def test_half_precision_is_kept_as_it_is(self):
        front = open_split_model(tiny_llama(dtype=torch.bfloat16))
        batches = tuple(lsim_batches(rows(8)))
        acts = ActivationStore(front, 2, batches)
        with acts.keep(None):
            assert acts[1].dtype == torch.bfloat16
            assert torch.equal(acts[1], front.hidden(batches[1], 2))

    def test_no_such_folder(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match=r"`cache` .*does not exist"):
            lsim.stitch(tiny_llama(), tiny_llama(), rows(), at=(0, 0), cache=tmp_path / "nowhere")
