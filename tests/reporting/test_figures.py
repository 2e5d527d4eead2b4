"""Pictures of results."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..core.helpers import curve
from ..tiny_models import random_tokens, tiny_llama


@pytest.fixture(scope="module")
def report():
    return lsim.analyze(tiny_llama(), random_tokens(), [lsim.Cosine(), lsim.CKA(minibatch=16)])


def test_plots_carry_layer_names(report):
    fig = report["cosine"].plot()
    assert list(fig.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert list(fig.data[0].customdata[0][0]) == ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"]
    assert len(report["cosine"].plot("to_last").data) == 5
    assert list(report["cosine"].plot("norm_ratio").layout.xaxis.ticktext) == ["0", "1", "2"]
    assert curve().plot().data[0].y.tolist() == [0, 1, 2]
