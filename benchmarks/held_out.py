"""Measures with held-out rows: one nuisance dimension, selectivity of probes, and the optimism of a chosen threshold.

python benchmarks/held_out.py [FOLDER_OF_MODEL]

`docs/probes.md` and `docs/exits.md` have the numbers.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

import tl_layersim as lsim

WIDTH, TARGETS, ROWS = 20, 5, 400


class Targets(torch.nn.Module):
    """Takes one vector and returns another."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return targets + 0 * x.sum()


class TwoSites(torch.nn.Module):
    """A site of the first `WIDTH` + 1 columns of the data, and a site of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Targets()
        self.unused = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x[:, : WIDTH + 1], x[:, WIDTH + 1 :])


def nuisance(spread: float, seed: int) -> tuple[float, float]:
    """R2 of linear predictivity and accuracy of a ridge probe, with a nuisance dimension of this standard deviation."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    signal = draw(ROWS, WIDTH)
    targets = signal @ draw(WIDTH, TARGETS) / WIDTH**0.5 + 0.3 * draw(ROWS, TARGETS)
    labels = (targets + draw(ROWS, TARGETS) * 0.3).argmax(1)
    x = torch.cat([signal, spread * draw(ROWS, 1), targets], dim=1)
    probe = lsim.LinearProbe(labels=labels)
    report = lsim.analyze(TwoSites(), {"x": x}, [lsim.LinearPredictivity(), probe], layers=["step"], batch_size=ROWS)
    return float(report["linear_predictivity"].values[0, 1]), float(report["linear_probe"].accuracy[0])


def main(folder: str | None = None) -> None:
    warnings.simplefilter("ignore", lsim.LayersimWarning)
    print("### One nuisance dimension of 21, mean of 10 data sets\n")
    print("| its sd | R2 | accuracy of the probe |\n| --- | --- | --- |")
    for spread in (0.0, 1.0, 10.0, 100.0, 1000.0):
        r2, accuracy = torch.tensor([nuisance(spread, seed) for seed in range(10)]).mean(0).tolist()
        print(f"| {spread:g} | {r2:.3f} | {accuracy:.3f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
