"""Declared bounds of result fields: a pair, and kept by every value."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.core.result_declarations import below, declarations

from ..views import from_views, residuals, view_for

ANALYZERS = sorted(find_analyzers().items())
# Random walks; a few samples of large norm; layers that are multiples of each other, so that paths are straight and cosines 1.
DATA = {
    "walk": lambda seed: residuals(seed, tokens=30),
    "few": lambda seed: residuals(seed, tokens=18) * 1e4,
    "straight": lambda seed: residuals(seed, layers=1, tokens=30).repeat(4, axis=0) * [[[1]], [[2]], [[4]], [[9]]],
}


@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("name", "cls"), ANALYZERS, ids=[name for name, _ in ANALYZERS])
def test_every_value_lies_within_the_bounds_of_its_field(name, cls, data):
    result = from_views(cls(), [view_for(cls, DATA[data](seed)) for seed in range(2)])
    for field, declared in declarations(result).items():
        if declared.within is not None:
            low, high = declared.within
            values = getattr(result, field)
            values = values[values.isfinite()]
            assert ((values >= low - 1e-9) & (values <= high + 1e-9)).all(), (field, values.min(), values.max())


def test_bounds_are_pairs_in_ascending_order():
    for module in pkgutil.walk_packages(lsim.__path__, "tl_layersim."):
        importlib.import_module(module.name)
    bounds = [(cls, one.within) for cls in below(lsim.Result) for one in declarations(cls).values() if one.within]
    assert len(bounds) > 100
    for cls, (low, high) in bounds:
        assert low < high, cls
