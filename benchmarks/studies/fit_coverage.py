"""Intervals and errors of fits, couplings, interventions and reliabilities, in simulations.

    python benchmarks/studies/fit_coverage.py --simulations 200 --texts 64 --out table.md

Run from the root of the repository: the models are those of the tests. Fits are of points with independent normal, skewed and
autocorrelated errors. The true value of a coupling, an intervention or a reliability is its mean over all simulations.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import tl_layersim as lsim
from tests.models.tiny_models import tiny_llama
from tests.models.token_bank import data_of, opened
from tl_layersim.core.intervals import bounds_of

Errors = Callable[[np.random.Generator, int], Any]


def autocorrelated(rng: np.random.Generator, count: int) -> Any:
    """Errors of variance 1, of which neighbours have a correlation of .8."""
    found = rng.normal(size=count)
    for place in range(1, count):
        found[place] = 0.8 * found[place - 1] + 0.6 * found[place]
    return found


ERRORS: Mapping[str, Errors] = {
    "normal": lambda rng, count: rng.normal(size=count),
    "skewed": lambda rng, count: rng.exponential(size=count) - 1,
    "autocorrelated": autocorrelated,
}


def relations(simulations: int) -> list[str]:
    """Coverage of the slope or rate of `relate`, and p at most .05 where scores do not depend on values."""
    lines = ["| `relate` | errors | points | covered | p at most .05, no relation |", "| --- | --- | --- | --- | --- |"]
    rng = np.random.default_rng(0)
    for shape in ("line", "exponential"):
        for errors in ("normal", "skewed"):
            for count in (4, 8, 32):
                covered, rejected = [], []
                for _ in range(simulations):
                    x = rng.uniform(size=count)
                    noise = ERRORS[errors](rng, count)
                    mean = 2 * np.exp(x) if shape == "exponential" else 2 + x
                    row = lsim.many.relate(x, mean + 0.3 * noise, shape=shape).to_frame().iloc[0]
                    covered.append(row["low"] <= 1 <= row["high"])
                    none = lsim.many.relate(x, 2 + 0.3 * noise, shape=shape).to_frame().iloc[0]
                    rejected.append(none["p_value"] <= 0.05)
                lines.append(f"| {shape} | {errors} | {count} | {np.mean(covered):.1%} | {np.mean(rejected):.1%} |")
                print(lines[-1], flush=True)
    return lines


def growth(simulations: int) -> list[str]:
    """Coverage of the rate of `exponential_fit` by Student's t and its standard error."""
    from scipy.stats import t

    lines = ["| `exponential_fit` | sites | rate within t · se |", "| --- | --- | --- |"]
    rng = np.random.default_rng(1)
    for errors in ERRORS:
        for count in (6, 13, 31):
            depth, covered = np.arange(count), []
            for _ in range(simulations):
                norms = 10 * np.exp(0.1 * depth) + ERRORS[errors](rng, count)
                fit = lsim.many.exponential_fit(xarray.DataArray(norms, dims="residual"))
                margin = float(t.ppf(0.975, count - 2)) * float(fit["rate_se"])
                covered.append(abs(float(fit["rate"]) - 0.1) <= margin)
            lines.append(f"| {errors} | {count} | {np.mean(covered):.1%} |")
            print(lines[-1], flush=True)
    return lines


def fields_of(results: list[Any]) -> list[tuple[str, float, float]]:
    """For each field: how often intervals contain its mean over all results, on average and for the worst entry."""
    found = []
    for field, within in bounds_of(results[0]).items():
        values = torch.stack([getattr(one, field) for one in results])
        if within is None or bool(values.isnan().all()):
            continue
        truth = values.nanmean(0)
        inside = []
        for one in results:
            _, low, high, error = one.interval(field)
            known = ~low.isnan() & (error > 0)
            inside.append(((low <= truth) & (truth <= high)).double().where(known, math.nan))
        share = torch.stack(inside).nanmean(0)
        if not bool(share.isnan().all()):
            found.append((field, float(share.nanmean()), float(share.nan_to_num(1).min())))
    return found


def prompts(count: int, generator: torch.Generator) -> lsim.Data:
    """Random prompts of 4 to 12 tokens, in 16 forward passes: BlockCoupling has no more blocks than forward passes."""
    lengths = torch.randint(4, 13, (count,), generator=generator).tolist()
    drawn = [torch.randint(3, 90, (length,), generator=generator) for length in lengths]
    return lsim.Data(drawn, batch_size=max(1, count // 16))


def models(simulations: int, texts: int) -> list[str]:
    """Coverage of the fields of BlockCoupling and of InterventionEffect on a random model."""
    error = math.sqrt(0.05 * 0.95 / simulations)
    lines = [
        f"| measure, {texts} prompts, {simulations} simulations | field | covered (± {error:.1%}) | least often |",
        "| --- | --- | --- | --- |",
    ]
    model, generator = tiny_llama(), torch.Generator().manual_seed(0)
    edited = copy.deepcopy(model)
    edited.model.layers[0].mlp.down_proj.weight.data.mul_(3)

    def coupling(data: lsim.Data) -> Any:
        return lsim.analyze(model, data, lsim.BlockCoupling(k=4), intervals=True)["block_coupling"]

    def effect(data: lsim.Data) -> Any:
        return lsim.compare(model, edited, data, lsim.InterventionEffect(), intervals=True)

    for name, measure in (("BlockCoupling", coupling), ("InterventionEffect", effect)):
        print(f"{name}: {simulations} simulations", flush=True)
        results = [measure(prompts(texts, generator)) for _ in range(simulations)]
        for field, mean, least in fields_of(results):
            lines.append(f"| {name} | {field} | {mean:.1%} | {least:.1%} |")
            print(lines[-1], flush=True)
    return lines


def bank(texts: int, sites: int, generator: torch.Generator) -> tuple[list[int], Tensor, Tensor]:
    """Lengths of texts, and activations of two models (`token site width`) that share what they add at each site."""
    lengths = torch.randint(8, 33, (texts,), generator=generator).tolist()
    shape = (sum(lengths), sites, 6)
    shared, one, other = (torch.randn(shape, generator=generator).cumsum(1) for _ in range(3))
    return lengths, shared + one, shared + other


def reliabilities(simulations: int, texts: int) -> list[str]:
    """The noise ceiling of CKA between two models, beside the correlation that it stands for."""
    lines = [f"| CKA of two models, {texts} texts | mean |", "| --- | --- |"]
    generator = torch.Generator().manual_seed(0)
    results = []
    for _ in range(simulations):
        lengths, one, other = bank(texts, 5, generator)
        results.append(lsim.compare(opened(one), opened(other), data_of(lengths), lsim.CKA(), intervals=True))
    values = torch.stack([one.values.flatten() for one in results])
    population = values.mean(0)
    reached = [float(torch.corrcoef(torch.stack([one, population]))[0, 1]) for one in values]
    again = [float(torch.corrcoef(values[[n, n - 1]])[0, 1]) for n in range(1, len(values))]
    for name, numbers in {
        "`split_half`": [float(one.split_half) for one in results],
        "correlation of the values of two samples": again,
        "`noise_ceiling`": [float(one.noise_ceiling) for one in results],
        "correlation of values and population values": reached,
    }.items():
        lines.append(f"| {name} | {np.mean(numbers):.3f} ± {np.std(numbers) / len(numbers) ** 0.5:.3f} |")
        print(lines[-1], flush=True)
    return lines


PARTS: Mapping[str, Callable[[int, int], list[str]]] = {
    "relations": lambda simulations, _: relations(10 * simulations),
    "growth": lambda simulations, _: growth(10 * simulations),
    "reliabilities": reliabilities,
    "models": models,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=200)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tables = [PARTS[name](args.simulations, args.texts) for name in args.parts]
    if args.out:
        args.out.write_text("\n\n".join("\n".join(table) for table in tables) + "\n")


if __name__ == "__main__":
    main()
