"""How near each layer is to what the last one says."""

from __future__ import annotations

import math

import numpy as np
import torch

import tl_layersim as lsim

from .. import oracles
from ..tiny_models import random_tokens, tiny_llama
from ..views import from_views, residuals, view, worst
from ..wrapped_models import lively, read_logits


def test_saturation_with_a_centre_and_without():
    x = [residuals(i, tokens=25) for i in range(3)]
    for center in ("none", "dataset"):
        found = from_views(lsim.Saturation(center=center, norm="none"), [view(b) for b in x])
        expected = oracles.oracle_saturation(x, norm=False, center=center == "dataset")
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name), value, atol=1e-9, err_msg=name)


def test_a_layer_that_excludes_what_the_last_allows_is_infinitely_far():
    logits = np.zeros((2, 3, 40))
    logits[:, 0, 7] = -np.inf
    assert read_logits(logits, torch.tensor([1, 1]))["kl"].tolist() == [[math.inf] * 2, [0.0] * 2, [0.0] * 2]


def test_what_is_shared_is_what_each_would_find_alone():
    """More ranks than another asked for, another norm, other labels: none of them is taken from what is not theirs."""
    model, tokens = lively(tiny_llama()), random_tokens(4, 12)
    every = [lsim.ExitCurve(), lsim.LogitLens(top_k=(1, 20), norm="none"), lsim.Saturation(norm="none")]
    together = lsim.analyze(model, tokens, every)
    swapped = lsim.analyze(model, tokens, [lsim.ExitCurve(), lsim.LogitLens(top_k=(1, 20)), lsim.Saturation()])
    for analyzer in every:
        alone = lsim.analyze(model, tokens, analyzer)[analyzer.name]
        assert worst(together[analyzer.name], alone) < 1e-5
    assert worst(swapped["logit_lens"], lsim.analyze(model, tokens, lsim.LogitLens(top_k=(1, 20)))["logit_lens"]) < 1e-5
    mixed = lsim.analyze(model, tokens, [lsim.LogitLens(), lsim.Saturation(norm="none")])["saturation"]
    assert torch.equal(mixed.counts, together["saturation"].counts)
    assert not torch.equal(mixed.counts, swapped["saturation"].counts)


def test_a_later_token_with_low_logits_is_read_as_well_as_the_first():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 3, 200))
    low = logits.copy()
    low[1:] -= 101
    exact, found = read_logits(logits, torch.arange(5)), read_logits(low.astype(np.float32), torch.arange(5))
    for name in ("best_prob", "target_log_prob", "entropy", "kl"):
        np.testing.assert_allclose(found[name], exact[name], atol=2e-4, err_msg=name)
