"""Coverage of the confidence intervals in simulations with dependent tokens, beside intervals that ignore the dependence.

    python benchmarks/studies/coverage.py --simulations 2000 --out table.md

Run from the root of the repository: the simulation is that of the tests.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.core.coverage_simulation import coverage, lengths_of
from tests.core.interval_cases import CASES, coverage_of
from tests.inputs.populations import How, document_coverage

# Numbers of batches that give 16, 24 and 32 blocks; the last of 32 is half as large as the others.
BATCHES = (16, 24, 63)
# Rows of a document, and number of documents.
DOCUMENTS = ((2, 32), (4, 32), (16, 32), (4, 8), (16, 8))
GIVEN: dict[How, str] = {
    "groups": "rows with their document as group",
    "cut": "documents, cut by `seq_len`",
    "rows": "rows alone",
}
# Simulations of one run, each of which is a layer.
AT_ONCE = 100


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
    lines += ["", "| rows of a document | documents | given as | accuracy | cross-entropy |", "| --- | --- | --- | --- | --- |"]
    warnings.simplefilter("ignore")
    for rows, count in DOCUMENTS:
        for how, words in GIVEN.items():
            each = [document_coverage(count, rows, 8, AT_ONCE, seed, how) for seed in range(args.simulations // AT_ONCE)]
            shares = [sum(one[name] for one in each) / len(each) for name in ("accuracy", "cross_entropy")]
            lines.append(f"| {rows} | {count} | {words} | {shares[0]:.1%} | {shares[1]:.1%} |")
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
