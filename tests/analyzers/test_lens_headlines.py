"""The headlines of the logit lens and of saturation, against naive code."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tl_layersim as lsim

from .. import oracles
from ..views import from_views, residuals, view


def test_the_headline_of_the_logit_lens_is_of_the_last_block_and_the_middle_one():
    x = residuals(0, layers=6, tokens=60)
    found = from_views(lsim.LogitLens(), [view(x)])
    expected = oracles.oracle_logit_lens([x])
    # Blocks 0 to 4: the middle one is block 2.
    assert found.headline() == pytest.approx(
        {
            "accuracy of the last layer": expected["accuracy"][4],
            "accuracy after block 2": expected["accuracy"][2],
            "perplexity of the last layer": expected["perplexity"][4],
            "agreement of block 2 with the last": expected["agreement"][2],
            "positions that rise at every block (fraction)": float(expected["monotone_share"]),
        }
    )


def test_the_headline_of_saturation_is_the_mean_block_of_tokens():
    x = residuals(1, layers=6, tokens=300)
    found = from_views(lsim.Saturation(), [view(x)])
    expected = oracles.oracle_saturation([x])
    counts = expected["values"]
    mean = sum(block * count for block, count in enumerate(counts)) / 300
    assert 0 < mean < 4
    said = found.headline()
    assert said["saturated before the last block (fraction)"] == pytest.approx(1 - counts[-1] / 300)
    assert said["mean saturation block"] == pytest.approx(mean)
    correlation = float(expected["correlation"])
    assert not math.isnan(correlation)
    assert said["correlation with the cosine to the last layer"] == pytest.approx(correlation)


def test_without_early_events_there_is_no_correlation_to_speak_of():
    # Every layer says something else than the last.
    x = np.stack([np.tile(oracles.HEAD[word], (20, 1)) for word in (0, 1, 2, 3)]) + 0.0
    found = from_views(lsim.Saturation(), [view(x)])
    assert found.counts.tolist() == [0, 0, 20]
    assert list(found.headline().values()) == [0, 2]
