"""Coverage of the intervals of each measure, on texts of unequal lengths with effects of the text.

    python benchmarks/studies/measure_coverage.py --simulations 300 --texts 64 --out table.md

Run from the root of the repository: the model is that of the tests. The covered quantity is the mean of the statistic over all
simulations, so that a bias that depends on the number of texts is no error, see `standard_error`. A field's coverage is the
mean over its entries, beside that of the entry that is covered least often.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import tl_layersim as lsim
from tests.models.token_bank import data_of, opened
from tl_layersim.core.intervals import bounds_of

SITES, WIDTH = 4, 6


def chosen_threshold(result: Any) -> float:
    """The lowest threshold that agrees with the whole model at 95 % of the positions of the half for choosing."""
    agreement = result.part_agreement[0]
    enough = (agreement >= 0.95).nonzero()[:, 0]
    return float(result.thresholds[int(enough[0]) if len(enough) else -1])


def sample(texts: int, generator: torch.Generator) -> tuple[list[int], Tensor, Tensor]:
    """Lengths of the texts; activations `token site width`, of which a fifth of the variance is the text's; a class a token."""
    lengths = (4 + 28 * torch.rand(texts, generator=generator) ** 2).long().tolist()
    label = torch.randint(WIDTH, (sum(lengths),), generator=generator)
    text = torch.repeat_interleave(torch.arange(texts), torch.tensor(lengths))
    shared = torch.randn(texts, SITES, WIDTH, generator=generator)[text]
    own = torch.randn(sum(lengths), SITES, WIDTH, generator=generator)
    stream = (math.sqrt(0.8) * own + math.sqrt(0.2) * shared).cumsum(1)
    # Deeper sites know the class better.
    signal = torch.nn.functional.one_hot(label, WIDTH)[:, None] * torch.linspace(0.3, 3, SITES)[:, None]
    return lengths, stream + signal, label


def analyzers() -> list[Any]:
    return [
        lsim.LogitLens(labels="data"),
        lsim.Saturation(),
        lsim.ExitCurve(labels="data", thresholds=(0.3, 0.5, 0.7, 0.9, 1.0)),
        lsim.Trajectory(),
        lsim.EffectiveRank(),
        lsim.NeuralCollapse(labels="data"),
        lsim.RSA(),
        lsim.MutualKNN(k=3),
        lsim.CKA(),
    ]


def field_intervals(result: Any) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Value and ends of the interval of each field; of counts as fractions of their total, which differs by sample."""
    found = {}
    for field, within in bounds_of(result).items():
        if within is not None and not bool(getattr(result, field).isnan().all()):
            declared = result.declared(field)
            total = declared.total(result) if declared.out_of else 1.0
            value, low, high = (part / total for part in result.interval(field)[:3])
            found[field] = (value, low, high)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=300)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[str, str], list[tuple[Tensor, Tensor, Tensor]]] = {}
    chosen: list[tuple[int, Tensor, Tensor]] = []
    for _ in range(args.simulations):
        lengths, bank, label = sample(args.texts, generator)
        report = lsim.analyze(opened(bank), data_of(lengths, label), analyzers(), intervals=True)
        for name, result in report.items():
            for field, ends in field_intervals(result).items():
                found.setdefault((name, field), []).append(ends)
        exits = report["exit_curve"]
        place = exits.thresholds.index(chosen_threshold(exits))
        _, low, high, _ = exits.interval("part_agreement")
        chosen.append((place, low[1, place], high[1, place]))
    lines = [f"| measure, {args.texts} texts | field | covered | least often |", "| --- | --- | --- | --- |"]
    for (name, field), each in found.items():
        values, lows, highs = (torch.stack(column) for column in zip(*each, strict=True))
        truth = values.nanmean(0)
        inside = ((lows <= truth + 1e-12) & (truth - 1e-12 <= highs)).double().where(~lows.isnan(), math.nan).nanmean(0)
        lines.append(f"| {name} | {field} | {float(inside.nanmean()):.1%} | {float(inside.nan_to_num(1).min()):.1%} |")
        print(lines[-1], flush=True)
    agreement = torch.stack([value for value, _, _ in found["exit_curve", "part_agreement"]]).mean(0)[1]
    inside = [float(low) <= float(agreement[place]) <= float(high) for place, low, high in chosen]
    lines.append(f"| exit_curve | held-out agreement at the chosen threshold | {sum(inside) / len(inside):.1%} | |")
    print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
