"""Intervals and p-values of similarities against populations that are written down: texts whose tokens depend on each other.

    python benchmarks/studies/populations.py --simulations 500 --out table.md

Run from the root of the repository: the populations are those of the tests. A text has 8 to 120 tokens, AR(1) or with an effect
of the text that is 10 % of the variance. p-values are of 19 permutations, with which 5 % of all are .05 exactly.

The tokens of the documents of `--kinds` wander through all their rows by an AR(1) at .9 with a scale of each document, and each
place has a mean of its own. ± is the binomial standard error.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import tl_layersim as lsim
from tests.inputs.populations import How, cka_coverage, documents, of_pairs, population_cka, rejections, wandering_documents

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
# Kinds of documents, see `lengths_of_documents`, and how they are given.
KINDS: dict[str, tuple[How, ...]] = {
    "1 row": ("rows",),
    "2 rows": ("groups", "cut"),
    "4 rows": ("groups", "cut"),
    "16 rows": ("groups", "cut"),
    "1 to 6 rows": ("groups",),
    "5 to 80 tokens": ("cut",),
}
# Half of the texts are held out, because a null of few held-out texts has few different pairings.
OF_DOCUMENTS = {**MEASURES, "LinearPredictivity": lsim.LinearPredictivity(permutations=19, test_fraction=0.5)}
# Simulations of one view: pairs of all its sites are computed, of which one a simulation is read.
AT_ONCE = 10
# The same for all measures in one run.
PAIRS_AT_ONCE = 5


def share(p_values: Tensor) -> str:
    """Share of p-values that are at most .05, with its standard error."""
    rate = float((p_values <= 0.05).double().mean())
    return f"{rate:.1%} ± {math.sqrt(rate * (1 - rate) / len(p_values)):.1%}"


def rejections_of_documents(kinds: Sequence[str], simulations: int) -> list[str]:
    """Rows of a table of p-values of all measures on documents; those given in two ways are simulated half in each way.

    Args:
        kinds: kinds of documents.
        simulations: number of simulations where nothing is shared; a fifth of it where 60 % is.
    """
    lines = [
        f"| documents of | given as | measure | p at most .05, nothing shared (n = {simulations}) | 60 % shared |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in kinds:
        shares: dict[str, list[str]] = {}
        for shared, count in ((0.0, simulations), (0.6, max(simulations // 5, PAIRS_AT_ONCE))):
            p_values: dict[str, list[Tensor]] = {}
            for seed in range(count // PAIRS_AT_ONCE):
                how = KINDS[kind][seed % len(KINDS[kind])]
                report = wandering_documents(list(OF_DOCUMENTS.values()), kind, PAIRS_AT_ONCE, shared, seed, how)
                for name, result in zip(OF_DOCUMENTS, report.values(), strict=True):
                    p_values.setdefault(name, []).append(of_pairs(result.p_values))
            for name, each in p_values.items():
                shares.setdefault(name, []).append(share(torch.cat(each)))
        for name, (none, some) in shares.items():
            lines.append(f"| {kind} | {' and '.join(KINDS[kind])} | {name} | {none} | {some} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--texts", type=int, nargs="*", default=[64, 128, 512])
    parser.add_argument("--measures", nargs="*", default=list(MEASURES))
    parser.add_argument(
        "--documents", nargs="*", default=["CKA", "RSA", "Procrustes"], help="measures of documents of several rows"
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="kinds of wandering documents")
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
    if args.kinds:
        lines += ["", *rejections_of_documents(args.kinds, args.simulations)]
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
