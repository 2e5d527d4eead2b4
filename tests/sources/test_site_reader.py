"""HookedSource: activations of one forward pass at sites that run once each and in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batch
from tl_layersim.sources.hooked_module import HookedSource, whole_tensor


class Parts(torch.nn.Module):
    """Runs its parts in an order."""

    def __init__(self, runs: tuple[int, ...]) -> None:
        super().__init__()
        self.runs, self.embed = runs, torch.nn.Embedding(3, 4)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens):
        hidden = [self.embed(tokens)]
        for part in self.runs:
            hidden.append(self.parts[part](hidden[-1]))
        self.hidden = hidden
        return hidden[-1]


def source(*runs: int) -> HookedSource:
    return HookedSource(Parts(runs), ["parts.0", "parts.1"])


def batch(counted: torch.Tensor) -> Batch:
    return Batch(torch.arange(6).view(2, 3) % 3, torch.ones(2, 3, dtype=torch.bool), counted, 0)


def test_it_stores_the_counted_positions_of_each_site():
    counted, read = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool(), source(0, 1)
    found = read.collect(batch(counted))
    read.module(batch(counted).tokens)
    assert torch.equal(found.activations, torch.stack(read.module.hidden)[:, counted])
    assert found.sites == read.model.layers


@pytest.mark.parametrize(
    ("order", "runs", "site", "before"), [((0, 1, 2), (1,), 2, 0), ((0, 1, 2), (0, 0), 0, None), (None, (1, 1), 2, None)]
)
def test_a_site_out_of_order_or_twice_is_refused(order, runs, site, before):
    read = source(*runs)
    read.reading = replace(read.reading, order=order)
    points = read.reading.points
    when = "twice" if before is None else f"before {points[before].name}"
    with pytest.raises(lsim.LayersimError, match=rf" {points[site].name} .*{points[site].module}\b.* {when}"):
        read.collect(batch(torch.ones(2, 3, dtype=torch.bool)))


def test_a_site_that_does_not_run_is_refused():
    with pytest.raises(lsim.LayersimError, match="2 of 3 sites"):
        source(0).collect(batch(torch.ones(2, 3, dtype=torch.bool)))


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
