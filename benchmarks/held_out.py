"""Measures with held-out rows: one nuisance dimension, selectivity of probes, and the optimism of a chosen threshold.

python benchmarks/held_out.py [FOLDER_OF_MODEL FILE_OF_TEXTS]

`docs/probes.md` and `docs/early_exit.md` have the numbers.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tl_layersim as lsim

WIDTH, TARGETS, ROWS, LENGTH = 20, 5, 400, 64


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
    report = lsim.analyze(
        lsim.open_model(TwoSites(), layers=["step"]), lsim.Data({"x": x}, batch_size=ROWS), [lsim.LinearPredictivity(), probe]
    )
    return float(report["linear_predictivity"].values[0, 1]), float(report["linear_probe"].accuracy[0])


def selectivity(model: Any, rows: list[list[int]]) -> None:
    """Accuracy and selectivity by layer of two labels: one of the token type, one of the token before."""
    words = [model.tokenizer.convert_ids_to_tokens(row) for row in rows]
    starts = torch.tensor([[int(word.startswith("\u2581")) for word in row] for row in words])
    before = torch.cat([torch.full((len(rows), 1), -100), starts[:, :-1]], dim=1)
    print("\n### Selectivity\n\n| label | measure | by layer |\n| --- | --- | --- |")
    for name, labels in {"the token starts a word": starts, "the token before starts a word": before}.items():
        for method, probe in {"ridge": lsim.LinearProbe, "logistic": lsim.LogisticProbe}.items():
            found = lsim.linear_probe(model, rows, probe(labels=labels, control="token"))
            for field in ("accuracy", "control_accuracy", "selectivity"):
                numbers = ", ".join(f"{value:.3f}" for value in getattr(found, field).tolist())
                print(f"| {name}, {method} | {field} | {numbers} |", flush=True)
        print(f"| {name} | most frequent class | {float(found.majority):.3f} |")


def optimism(model: Any, rows: list[list[int]]) -> None:
    """Agreement at the threshold for 95 %, on the rows that chose it and on the others."""
    print("\n### Agreement at the threshold for 95 %\n")
    print("| rows | data sets | rows that chose it | other rows | largest difference |\n| --- | --- | --- | --- | --- |")
    curve = lsim.ExitCurve(labels="none", thresholds=tuple(i / 100 for i in range(101)))
    for size in (8, 32):
        found = []
        for start in range(0, min(len(rows), 15 * size) - size + 1, size):
            one = lsim.analyze(model, rows[start : start + size], curve)["exit_curve"]
            threshold = one.threshold_for(agreement=0.95)
            chosen = float(one.part_agreement[0, one.thresholds.index(threshold)])
            found.append((chosen, one.at(threshold, held_out=True).agreement))
        both = torch.tensor(found)
        print(
            f"| {size} | {len(found)} | {float(both[:, 0].mean()):.3f} | {float(both[:, 1].mean()):.3f} | "
            f"{float((both[:, 0] - both[:, 1]).max()):.3f} |",
            flush=True,
        )


def main(folder: str | None = None, file: str | None = None) -> None:
    warnings.simplefilter("ignore", lsim.LayersimWarning)
    if folder is not None and file is not None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        model.tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [text for text in Path(file).read_text(encoding="utf-8").splitlines() if len(text) > 400]
        rows = [model.tokenizer(text)["input_ids"][:LENGTH] for text in texts]
        selectivity(model, rows[:150])
        optimism(model, rows)
    print("\n### One nuisance dimension of 21, mean of 10 data sets\n")
    print("| its sd | R2 | accuracy of the probe |\n| --- | --- | --- |")
    for spread in (0.0, 1.0, 10.0, 100.0, 1000.0):
        r2, accuracy = torch.tensor([nuisance(spread, seed) for seed in range(10)]).mean(0).tolist()
        print(f"| {spread:g} | {r2:.3f} | {accuracy:.3f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
