"""CKA that a few samples decide is said to be so, with the remedy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import tl_layersim as lsim
from tl_layersim.analyzers import Run
from tl_layersim.core import Sums

from ..views import from_views, layer_run, provenance, residuals, samples


def with_share(share: float, samples: int = 1000, seed: int = 0) -> np.ndarray:
    """Residuals of which layer 2 has about this share of effective samples: some are so much further from the mean."""
    x = residuals(seed, tokens=samples)
    far = np.arange(samples) % 50 == 0
    low, high = 1.0, 100.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        y = x[2] * np.where(far, middle, 1.0)[:, None]
        r = ((y - y.mean(0)) ** 2).sum(1)
        low, high = (middle, high) if r.sum() ** 2 / (r**2).sum() / samples > share else (low, middle)
    x[2] = y
    return x


@pytest.mark.parametrize("estimator", ["minibatch", "exact"])
@pytest.mark.parametrize("share", [0.03, 0.056, 0.15])
def test_below_a_fifth_of_effective_samples_there_is_a_warning_with_the_remedy(estimator, share):
    match = r"massive activations at 1 layers, blocks\.1\.hook_resid_post(.|\n)*of 1000 \(.*%\)(.|\n)*skip_first=2"
    with pytest.warns(lsim.LayersimWarning, match=match):
        found = from_views(lsim.CKA(estimator=estimator, minibatch=1000), [samples(with_share(share))])
    assert float(found.effective_samples[2]) / 1000 == pytest.approx(share, rel=0.05)


def test_above_a_fifth_there_is_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_views(lsim.CKA(minibatch=1000), [samples(with_share(0.25))])


def test_where_first_tokens_are_left_out_already_more_are_proposed():
    from tl_layersim.models.view import reduce

    analyzer = lsim.CKA()
    sums = Sums.of(reduce({"k": analyzer.kernel(Sums())}, samples(with_share(0.05)))[1]["k"])
    run = layer_run(4)
    run = Run(run.layers, run.layers, provenance(options={"skip_first": 2}), Sums())
    with pytest.warns(lsim.LayersimWarning, match="skip_first=4"):
        analyzer.compute(sums, run)
