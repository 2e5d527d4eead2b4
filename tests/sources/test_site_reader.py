"""SiteReader: activations of one forward pass at sites that run once each and in order."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.hook_points import residual_points
from tl_layersim.data.batches import Batch
from tl_layersim.sources.hooked import SiteReader, whole_tensor

POINTS = residual_points(("in", "a", "b"), ("parts.0", "parts.1"))


def reader(counted, order=(0, 1, 2)):
    return SiteReader(POINTS, ("in", "a", "b"), order, Batch(torch.zeros(2, 3, dtype=torch.int64), counted, counted, 0))


def test_it_stores_the_counted_positions_of_each_site():
    counted, hidden = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool(), torch.randn(3, 2, 3, 4)
    read = reader(counted)
    for site in range(3):
        assert not read.is_complete
        read.read([site], hidden[site])
    assert read.is_complete
    assert read.seen == [0, 1, 2]
    assert torch.equal(read.buffer.activations, hidden[:, counted])


@pytest.mark.parametrize(("order", "ran"), [((0, 1, 2), (0, 2)), ((0, 1, 2), (0, 1, 0)), (None, (2, 0, 2))])
def test_a_site_out_of_order_or_twice_is_refused(order, ran):
    read = reader(torch.ones(2, 3, dtype=torch.bool), order)
    for site in ran[:-1]:
        read.read([site], torch.ones(2, 3, 4))
    with pytest.raises(
        lsim.LayersimError, match=rf"{POINTS[ran[-1]].name} ran after {len(ran) - 1} of 3 .* {POINTS[ran[-1]].module}"
    ):
        read.read([ran[-1]], torch.ones(2, 3, 4))


def test_sharded_activations_are_refused_and_copies_are_not():
    class Placed(torch.Tensor):
        @staticmethod
        def __new__(cls, values, is_replicate):
            made = torch.Tensor._make_subclass(cls, values)
            made.placements = [type("Placement", (), {"is_replicate": lambda _: is_replicate})()]
            made.to_local = lambda: values
            return made

    plain = torch.ones(2, 3, 4)
    assert whole_tensor(plain, "a") is plain
    assert whole_tensor(Placed(plain, True), "a") is plain
    with pytest.raises(lsim.LayersimError, match=r"at a.* 2 x 3 x 4"):
        whole_tensor(Placed(plain, False), "a")
