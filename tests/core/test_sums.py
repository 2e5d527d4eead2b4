"""Sums of batches."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import Sums
from tl_layersim.core.sums import DataBlock, added


def test_sums_are_widened_before_they_are_added():
    half = Sums.of({"x": torch.tensor(2048.0, dtype=torch.float16), "n": torch.tensor(100, dtype=torch.int8)})
    total = half + Sums.of({"x": torch.tensor(1.0), "n": torch.tensor(100)})
    assert (total["x"].dtype, float(total["x"])) == (torch.float64, 2049.0)
    assert (total["n"].dtype, int(total["n"])) == (torch.int64, 200)
    assert float(added({"x": torch.tensor(2.0**24)}, {"x": torch.tensor(1.0)})["x"]) == 2**24 + 1


def test_a_field_of_one_side_is_kept():
    total = added({"x": torch.tensor(1)}, {"y": torch.tensor(0.5)})

    assert total == {"x": torch.tensor(1), "y": torch.tensor(0.5)}


def test_a_kernel_whose_shapes_depend_on_the_batch_is_named():
    """Broadcasting would add a sum of one site to that of each of three sites."""
    one_site = DataBlock(1, 5, {"own": Sums({"norm": torch.zeros(1)})})
    three_sites = DataBlock(1, 5, {"own": Sums({"norm": torch.zeros(3)})})

    with pytest.raises(lsim.LayersimError, match=r"'own'.*'norm'.*\(1,\).*\(3,\)"):
        one_site + three_sites
    with pytest.raises(lsim.LayersimError, match=r"'norm'.*\(1,\).*\(3,\)"):
        one_site.sums["own"] + three_sites.sums["own"]
