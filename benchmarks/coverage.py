"""Coverage of the confidence intervals in simulations with dependent tokens, beside intervals that ignore the dependence.

    python benchmarks/coverage.py --simulations 2000 --out table.md

Run from the root of the repository: the simulation is that of the tests.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.core.coverage_simulation import coverage, lengths_of
from tests.core.interval_cases import CASES, coverage_of

# Numbers of batches that give 16, 24 and 32 blocks; the last of 32 is half as large as the others.
BATCHES = (16, 24, 63)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=4, help="documents in a batch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "| statistic | blocks | texts | covered by 95 % intervals | with independent tokens | error / true error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for batches in BATCHES:
        for unequal in (False, True):
            found = coverage(lengths_of(batches, args.documents, unequal), args.simulations, seed=batches)
            for name, own in found.items():
                texts = "of 8 to 120 tokens" if unequal else "of 40 tokens"
                naive = f"{own['naive']:.1%}" if own["naive"] == own["naive"] else "-"
                numbers = f"{own['coverage']:.1%} | {naive} | {own['ratio']:.2f}"
                lines.append(f"| {name} | {own['blocks']:.0f} | {texts} | {numbers} |")
                print(lines[-1], flush=True)
    lines += ["", "| 16 blocks | covered | symmetric about the value | warned of drift |", "| --- | --- | --- | --- |"]
    for name in CASES:
        own = coverage_of(name, args.simulations)
        lines.append(f"| {name} | {own.now:.1%} | {own.symmetric:.1%} | {own.warned:.1%} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
