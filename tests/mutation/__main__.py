"""Sample mutants, run the tests that reach each, and say which survive: `python -m tests.mutation --help`."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import random
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeVar

from .mutants import Mutant, mutants_of
from .running import PACKAGE, ROOT, Child, prepare

# The files whose tests are of all analyzers.
EVERY = ("contract/test_analyzers*.py", "test_headlines*.py", "test_degenerate*.py", "test_positions*.py", "test_evaluate*.py")
# The measures, wherever they stand in the package, and the test files that may reach them, wherever they stand in `tests`.
# Which tests do reach a function is recorded. The doctests of a module are always among its tests.
MODULES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("cka.py", "_samples.py"),
        ("test_cka*.py", "test_hsic*.py", "test_bounds_of_measures.py", *EVERY),
    ),
    (("analyzers/cosine.py",), ("test_cosine*.py", "test_bounds_of_measures.py", *EVERY)),
    (("effective_rank.py",), ("test_effective_rank.py", "test_bounds_of_measures.py", *EVERY)),
    (
        ("collapse.py", "neural_collapse.py"),
        ("test_collapse*.py", "test_neural_collapse*.py", "test_bounds_of_measures.py", *EVERY),
    ),
    (
        ("contribution.py", "skip_effect.py"),
        (
            *("test_contribution*.py", "test_skip_effect*.py", "test_every_source_depth.py", "test_bounds_of_measures.py"),
            *EVERY,
        ),
    ),
    (
        ("trajectory.py",),
        ("test_trajectory*.py", "test_per_prompt.py", "test_bounds_of_measures.py", *EVERY),
    ),
    # test_coverage.py draws thousands of data sets, which no mutant has time for.
    (
        ("core/sums.py", "core/intervals.py", "report_assembly.py"),
        ("test_jackknife.py", "test_blocks.py", "test_headline_intervals.py", "engine/test_intervals.py"),
    ),
    (
        ("many/differences.py",),
        ("test_differences.py", "test_relative_depth.py"),
    ),
    (
        ("many/sweep.py", "report_tables.py"),
        ("many/test_sweep.py", "test_report_tables.py"),
    ),
    (("many/fits.py",), ("test_exponential_fits.py", "test_score_relation.py")),
    # What is measured between two sites has tests of its own; those of all analyzers take minutes to record.
    (("_permutation_null.py",), ("test_permutation_null.py", "test_cka_null.py", "test_bounds_of_measures.py")),
    (("_pairwise.py",), ("test_cka_null.py", "test_cka_apart.py", "test_rsa.py", "test_mutual_knn.py")),
    (("rsa.py",), ("test_rsa.py", "test_bounds_of_measures.py")),
    (("mutual_knn.py",), ("test_mutual_knn.py", "test_bounds_of_measures.py")),
    (("procrustes.py",), ("test_procrustes.py", "test_covariances.py", "test_bounds_of_measures.py")),
    (("cca.py",), ("test_cca.py", "test_covariances.py", "test_bounds_of_measures.py")),
    (("linear_predictivity.py",), ("test_linear_predictivity.py", "test_covariances.py")),
    (
        ("_moments.py",),
        ("test_covariances.py", "test_procrustes.py", "test_cca.py", "test_linear_predictivity.py"),
    ),
    (
        (
            "core/cross_entropy.py",
            "lens/statistics.py",
            "logit_lens.py",
            "saturation.py",
            "exit_curve.py",
        ),
        (
            *("test_lens*.py", "test_logit*.py", "test_chunked_logit_lens.py", "test_token_figures.py"),
            *("test_exit_*.py", "test_saturation*.py", "test_cross_entropy*.py", "test_bounds_of_measures.py", *EVERY),
        ),
    ),
    (
        ("coupling.py", "block_coupling.py", "spectrum.py"),
        (
            *("test_coupling*.py", "test_block_coupling*.py", "test_singular*.py"),
            *("test_bounds_of_measures.py", *EVERY),
        ),
    ),
    (("stitching/fitting.py", "adapters/*.py"), ("test_adapter*.py", "stitching/*.py")),
    (
        ("losses.py", "objectives/*.py"),
        (
            "test_aligned*.py",
            "test_losses*.py",
            "test_objective*.py",
            "test_schedule.py",
            "training/test_api.py",
            "test_training_objectives.py",
        ),
    ),
    (
        ("pairs.py", "pairwise_summation.py", "sums.py"),
        ("test_pairwise*.py", "test_sums.py", "test_cka*.py", "test_engine*.py", *EVERY),
    ),
)
WORK = ROOT / ".mutation"
EXPLAINED = Path(__file__).parent / "explained.toml"
# The tests of a mutant take at most so many seconds of their own, the fastest first.
BUDGET = 60.0
T = TypeVar("T")
Tests = dict[str, tuple[float, frozenset[str]]]


@dataclass(frozen=True)
class Plan:
    """A mutant and the tests that reach it, the fastest first.

    Attributes:
        mutant: the mutant.
        tests: their ids.
        seconds: that they took without it.
        left_out: how many more reach it, for which there is no time.
    """

    mutant: Mutant
    tests: list[str]
    seconds: float
    left_out: int


def main() -> int:
    """Run, print the survivors and the score, write JSON; 1 if there are survivors that nobody has explained."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing of the measures.")
    parser.add_argument("modules", nargs="*", help="file names or patterns such as 'hsic.py' or 'analyzers/*'; default: all")
    parser.add_argument("--count", type=int, default=150, help="how many mutants to sample (default 150)")
    parser.add_argument("--least", type=int, default=4, help="how many of each module at least (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="how many processes at once (default 1)")
    parser.add_argument("--again", type=Path, help="run only what survived in this JSON file")
    parser.add_argument(
        "--out", type=Path, default=WORK / "result.json", help="JSON file to write (default .mutation/result.json)"
    )
    parser.add_argument("--list", action="store_true", help="count the mutants of each module and stop")
    options = parser.parse_args()
    groups = find(options.modules)
    everything = {path: mutants_of(path, str(path.relative_to(ROOT))) for path in groups}
    if options.list:
        for path, mutants in everything.items():
            print(f"{len(mutants):5}  {path.relative_to(ROOT)}")
        return 0
    if options.again:
        earlier = json.loads(options.again.read_text())["mutants"]
        survived = {item["key"] for item in earlier if item["outcome"] == "survived"}
        chosen = [mutant for mutants in everything.values() for mutant in mutants if mutant.key in survived]
    else:
        chosen = sample(everything, options.count, options.least, options.seed)
    WORK.mkdir(exist_ok=True)
    prepare()
    used = {mutant.path for mutant in chosen}
    tests = record({file for path in used for file in groups[path]}, options.jobs)
    plans = [Plan(mutant, *pick(mutant, {file: tests[file] for file in groups[mutant.path]})) for mutant in chosen]
    controls(plans, options.jobs)
    return report(list(run(plans, options.jobs)), options.out, options.seed)


def find(patterns: list[str]) -> dict[Path, list[Path]]:
    """Each module of the table that a pattern fits, and its files of tests."""
    found: dict[Path, list[Path]] = {}
    for sources, tests in MODULES:
        files = sorted({file for name in tests for file in (ROOT / "tests").rglob(name) if file.parent.name != "ndif"})
        for path in sorted({path for name in sources for path in (ROOT / PACKAGE).rglob(name)}):
            name = str(path.relative_to(ROOT / PACKAGE))
            if not patterns or any(fnmatch.fnmatch(name, one) or fnmatch.fnmatch(path.name, one) for one in patterns):
                found[path] = [*files, path]
    return found


def sample(everything: dict[Path, list[Mutant]], count: int, least: int, seed: int) -> list[Mutant]:
    """So many mutants, of each module in proportion to how many it has, but no fewer than the least."""
    total = sum(map(len, everything.values()))
    chosen = []
    for path, mutants in sorted(everything.items()):
        # A module's own seed: its sample does not change with the other modules.
        generator = random.Random(f"{seed} {path.relative_to(ROOT / PACKAGE)}")
        share = max(least, round(count * len(mutants) / max(total, 1)))
        chosen += generator.sample(mutants, min(share, len(mutants)))
    return chosen


def together(starts: Iterable[tuple[T, Callable[[], Child]]], jobs: int) -> Iterator[tuple[T, Child, int | None, float]]:
    """Start children, so many at once, and give what `Child.poll` says of each as they end."""
    running: list[tuple[T, Child]] = []
    waiting = iter(starts)
    while True:
        while len(running) < jobs and (following := next(waiting, None)) is not None:
            running.append((following[0], following[1]()))
        if not running:
            return
        time.sleep(0.05)
        for what, child in list(running):
            answer = child.poll()
            if answer is not None:
                running.remove((what, child))
                yield what, child, *answer


def record(files: set[Path], jobs: int) -> dict[Path, Tests]:
    """Of each file of tests, what passes: seconds, and the functions that were called. Remembered while nothing changes."""
    code = hashlib.sha256()
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        code.update(path.read_bytes())
    digests = {path: hashlib.sha256(code.digest() + path.read_bytes()).hexdigest()[:16] for path in files}
    kept = {path: WORK / f"tests-{path.stem}-{digest}.json" for path, digest in digests.items()}
    missing = [path for path in sorted(files) if not kept[path].exists()]
    starts = ((path, partial(Child, [str(path)], 1800, WORK / f"{path.stem}.log", record=kept[path])) for path in missing)
    for path, child, code_, seconds in together(starts, jobs):
        print(f"recorded {path.relative_to(ROOT)} in {seconds:.0f} s", flush=True)
        # 5: no tests, as in a module without doctests. 1: what fails without a mutant is left out.
        if code_ not in (0, 1, 5):
            raise SystemExit(f"{path.relative_to(ROOT)} could not be run, see {child.log}")
    found = {}
    for path in files:
        data = json.loads(kept[path].read_text())
        shared = frozenset(data["shared"])
        found[path] = {test: (item["seconds"], shared | set(item["calls"])) for test, item in data["tests"].items()}
    return found


def pick(mutant: Mutant, files: dict[Path, Tests]) -> tuple[list[str], float, int]:
    """The tests that call the function of a mutant, or all tests of its files if it stands in no function; see `Plan`."""
    place = f"{mutant.path.relative_to(ROOT)}::{mutant.function.removesuffix('.<locals>')}"
    whole = not mutant.function.endswith(".<locals>")
    module = f"{mutant.path.relative_to(ROOT)}::"
    reaching = sorted(
        (seconds, test, any(call.startswith(module) for call in calls))
        for tests in files.values()
        for test, (seconds, calls) in tests.items()
        # What a module does when it is imported may reach a test that calls none of its functions.
        if whole or place in calls
    )
    many = max(1, sum(total <= BUDGET for total in accumulate(seconds for seconds, *_ in reaching)))
    # Tests that call the module first: the controls take these.
    chosen = sorted(reaching[:many], key=lambda item: not item[2])
    return [test for _, test, _ in chosen], sum(seconds for seconds, *_ in chosen), len(reaching[many:])


def controls(plans: list[Plan], jobs: int) -> None:
    """Refuse to go on unless tests pass on each module as it is, loaded as a mutant is, and fail on one that only raises."""
    first = {plan.mutant.path: plan.tests[:8] for plan in reversed(plans) if plan.tests}
    starts = (
        ((path, text), partial(Child, tests, 240, log_of(f"control-{path.stem}-{len(text)}"), mutant=(path, text)))
        for path, tests in first.items()
        for text in (path.read_text(), "raise RuntimeError")
    )
    for (path, text), child, code, _ in together(starts, jobs):
        if (code == 0) is (text == "raise RuntimeError"):
            raise SystemExit(f"the control of {path.relative_to(ROOT)} went wrong, see {child.log}")
        child.log.unlink()


def run(plans: list[Plan], jobs: int) -> Iterator[dict[str, object]]:
    """What became of each mutant."""
    starts = (
        (plan, partial(Child, plan.tests, 60 + 8 * plan.seconds, log_of(str(n)), mutant=(plan.mutant.path, plan.mutant.source)))
        for n, plan in enumerate(plans)
        if plan.tests
    )
    ended = ((plan, child.log, code, seconds) for plan, child, code, seconds in together(starts, jobs))
    unreached = ((plan, None, 0, 0.0) for plan in plans if not plan.tests)
    for number, (plan, log, code, seconds) in enumerate(chain(unreached, ended), 1):
        said = log.read_text(errors="replace").splitlines() if log is not None else []
        outcome = "timeout" if code is None else "survived" if code == 0 else "killed"
        mutant = plan.mutant
        place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
        print(f"{number:4}/{len(plans)}  {outcome:9} {seconds:5.1f} s  {place}", flush=True)
        if log is not None:
            log.unlink()
        yield {
            "place": place,
            "function": mutant.function.removesuffix(".<locals>"),
            "kind": mutant.kind,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "tests": len(plan.tests),
            "left out": plan.left_out,
            "by": next((line for line in reversed(said) if line.startswith(("FAILED ", "ERROR "))), ""),
            "diff": mutant.diff,
            "key": mutant.key,
        }


def log_of(name: str) -> Path:
    """A file for what a child prints, of this process alone."""
    return WORK / f"{os.getpid()}-{name}.log"


def report(outcomes: list[dict[str, object]], out: Path, seed: int) -> int:
    """Print survivors and the score, and write all of it."""
    explained = {}
    if EXPLAINED.exists():
        explained = {item["change"].strip(): item["why"] for item in tomllib.loads(EXPLAINED.read_text())["survivor"]}
    for item in outcomes:
        if item["outcome"] == "survived" and item["key"] in explained:
            item["outcome"] = "explained"
    for item in outcomes:
        if item["outcome"] == "survived":
            print(
                f"\n{item['diff']}\n  in {item['function'] or 'the module'}, {item['tests']} tests, {item['left out']} left out"
            )
    counts = Counter(item["outcome"] for item in outcomes)
    killed, left = counts["killed"] + counts["timeout"], counts["survived"]
    print(
        f"\n{len(outcomes)} mutants, seed {seed}: {killed} killed ({counts['timeout']} by the time limit), "
        f"{counts['explained']} explained, {left} survived"
    )
    print(f"score {killed / max(len(outcomes), 1):.1%}; {killed / max(killed + left, 1):.1%} of those not explained")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"seed": seed, "counts": counts, "mutants": outcomes}, indent=1))
    print(f"written to {out}")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
