"""Logits are made in chunks of the memory that was given, and what is not finite is counted in all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..views import from_views, own_head, residuals, view

ANALYZERS = [lsim.LogitLens, lsim.ExitCurve, lsim.Saturation]


class Watched:
    """An unembedding that remembers how many bytes of logits it gave at once."""

    def __init__(self, unembed) -> None:
        self.unembed, self.sizes = unembed, []

    def __getattr__(self, name):
        return getattr(self.unembed, name)

    def __call__(self, *arguments):
        logits = self.unembed(*arguments)
        self.sizes.append(logits.numel() * logits.element_size())
        return logits


@pytest.mark.parametrize("analyzer", ANALYZERS)
def test_no_more_logits_are_made_at_once_than_memory_was_given_for(analyzer):
    x = residuals(0, tokens=60)

    def sizes(megabytes: float) -> list[int]:
        watched = Watched(own_head())
        from_views(analyzer(lens_memory_mb=megabytes), [view(x, unembed=watched)])
        return watched.sizes

    few, many = sizes(0.05), sizes(10)
    assert max(few) <= 0.05 * 2**20
    # Yet more than half of it: chunks are as large as they may be.
    assert max(few) > 0.025 * 2**20
    assert len(many) < len(few)
    if analyzer is not lsim.Saturation:
        assert sum(few) == sum(many) == 3 * 60 * 300 * 8


@pytest.mark.parametrize("analyzer", ANALYZERS)
def test_positions_with_infinite_logits_are_counted_over_all_chunks(analyzer):
    x = residuals(0, tokens=40)
    # Far apart, so that no chunk has both.
    x[2, [3, 27]] = 1e300
    head = own_head(np.full((300, 8), 1e20) * np.sign(np.random.default_rng(0).normal(size=(300, 8))))
    with pytest.raises(lsim.LayersimError, match=r"\b2 .*hook_resid_post"):
        from_views(analyzer(norm="none", lens_memory_mb=0.01), [view(x, unembed=head)])


def test_results_do_not_depend_on_the_memory():
    x = residuals(3, tokens=50)
    for analyzer in ANALYZERS:
        one, other = (from_views(analyzer(lens_memory_mb=mb), [view(x)]) for mb in (0.003, 50))
        torch.testing.assert_close(one.values, other.values, rtol=1e-12, atol=0)
