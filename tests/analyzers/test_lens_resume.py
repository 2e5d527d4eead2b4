"""Checkpoints of runs of the lens."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama
from ..views import worst


def test_what_is_saved_can_be_resumed(tmp_path):
    model, tokens = tiny_llama(), random_tokens(12, 9)
    every = [lsim.LogitLens(), lsim.Saturation(center="dataset"), lsim.ExitCurve(), lsim.Trajectory(), lsim.NeuralCollapse()]
    whole = lsim.analyze(model, lsim.Data(tokens, batch_size=3), every)

    class Stop(Exception):
        pass

    class Cut(list):
        def __iter__(self):
            for i, row in enumerate(super().__iter__()):
                if i == 7 and self.armed:
                    raise Stop
                yield row

    rows = Cut(list(tokens))
    rows.armed = True
    path = tmp_path / "run.part"
    with pytest.raises(Stop):
        lsim.analyze(model, lsim.Data(rows, batch_size=3), every, checkpoint=path)
    rows.armed = False
    resumed = lsim.analyze(model, lsim.Data(rows, batch_size=3), every, checkpoint=path)
    for name in whole:
        assert worst(resumed[name], whole[name]) == 0
