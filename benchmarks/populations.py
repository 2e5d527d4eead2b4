"""Intervals and p-values of similarities against populations that are written down: texts whose tokens depend on each other.

    python benchmarks/populations.py --simulations 500 --out table.md

Run from the root of the repository: the populations are those of the tests. A text has 8 to 120 tokens, AR(1) or with an effect
of the text that is 10 % of the variance. p-values are of 19 permutations, with which 5 % of all are .05 exactly.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tl_layersim as lsim
from tests.populations import cka_coverage, documents, of_pairs, population_cka, rejections

# By name, AR(1) and share of the text's effect.
DEPENDENCE = {"AR(1) at .5": (0.5, 0.0), "AR(1) at .9": (0.9, 0.0), "10 % effect of the text": (0.0, 0.1)}
MEASURES = {
    "CKA": lsim.CKA(permutations=19),
    "RSA": lsim.RSA(permutations=19),
    "MutualKNN": lsim.MutualKNN(k=5, permutations=19),
    "Procrustes": lsim.Procrustes(permutations=19),
    "CCA": lsim.CCA(permutations=19),
    "LinearPredictivity": lsim.LinearPredictivity(permutations=19),
}
# Simulations of one view: pairs of all its sites are computed, of which one a simulation is read.
AT_ONCE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--texts", type=int, nargs="*", default=[64, 128, 512])
    parser.add_argument("--measures", nargs="*", default=list(MEASURES))
    parser.add_argument(
        "--documents", nargs="*", default=["CKA", "RSA", "Procrustes"], help="measures of documents of several rows"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = range(args.simulations // AT_ONCE)
    lines = []

    def show(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    if args.texts:
        show("| tokens | texts | covered by 95 % intervals of CKA | bias |\n| --- | --- | --- | --- |")
    for count in args.texts:
        for name, (rho, effect) in DEPENDENCE.items():
            found = [cka_coverage(count, AT_ONCE, rho, effect, seed) for seed in seeds]
            covered = sum(each for each, _ in found) / len(found)
            show(f"| {name} | {count} | {covered:.1%} | {float(torch.cat([bias for _, bias in found]).mean()):+.4f} |")
    if args.measures:
        show("\n| measure | tokens | rows | p at most .05, nothing shared | 40 % shared |\n| --- | --- | --- | --- | --- |")
    for measure in args.measures:
        for name, (rho, effect) in DEPENDENCE.items():
            for count in (8, 64):
                shares = []
                for shared in (0.0, 0.4):
                    own = [rejections(MEASURES[measure], count, AT_ONCE, rho, effect, shared, seed)[0] for seed in seeds]
                    shares.append(sum(own) / len(own))
                show(f"| {measure} | {name} | {count} | {shares[0]:.1%} | {shares[1]:.0%} |")
    if args.documents:
        show("\n| measure | rows of a document | given as | p at most .05, nothing shared | 40 % shared |")
        show("| --- | --- | --- | --- | --- |")
    for measure in args.documents:
        for rows, count in ((2, 32), (4, 16), (16, 16)):
            for how in ("groups", "cut", "rows"):
                shares = []
                for shared in (0.0, 0.4):
                    each = [documents(MEASURES[measure], count, rows, 20, AT_ONCE, shared, seed, how, False) for seed in seeds]
                    p_values = torch.cat([of_pairs(one.p_values) for one in each])
                    shares.append(float((p_values <= 0.05).double().mean()))
                show(f"| {measure} | {rows} | {how} | {shares[0]:.1%} | {shares[1]:.0%} |")
    if "CKA" in args.documents:
        show("\n| rows of a document | documents | given as | covered by 95 % intervals of CKA | bias |")
        show("| --- | --- | --- | --- | --- |")
        truth = population_cka(0.6)
        for rows, count in ((2, 128), (4, 64), (16, 64)):
            for how in ("groups", "cut", "rows"):
                found = [documents(lsim.CKA(), count, rows, 20, AT_ONCE, 0.6, seed, how, True) for seed in seeds]
                intervals = [one.interval("values") for one in found]
                low, high, value = (
                    torch.cat([of_pairs(getattr(one, end)) for one in intervals]) for end in ("low", "high", "value")
                )
                covered = float(((low <= truth) & (truth <= high)).double().mean())
                show(f"| {rows} | {count} | {how} | {covered:.1%} | {float((value - truth).mean()):+.4f} |")
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
