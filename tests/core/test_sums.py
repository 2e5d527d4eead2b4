"""Sums of batches."""

from __future__ import annotations

import torch

from tl_layersim.activations.row_pools import added
from tl_layersim.core import Sums


def test_sums_are_widened_before_they_are_added():
    half = Sums.of({"x": torch.tensor(2048.0, dtype=torch.float16), "n": torch.tensor(100, dtype=torch.int8)})
    both = half + Sums.of({"x": torch.tensor(1.0), "n": torch.tensor(100)})
    assert (both["x"].dtype, float(both["x"])) == (torch.float64, 2049.0)
    assert (both["n"].dtype, int(both["n"])) == (torch.int64, 200)
    assert float(added(torch.tensor(2.0**24), torch.tensor(1.0))) == 2**24 + 1
