"""Processor time of the kernel of each similarity measure on random activations, and size of its sums.

    python benchmarks/bench_measures.py --sites 5 --samples 1024

The model does not run: the numbers are what a measure adds to a forward pass. `--widths` are those of a small and of a large
model.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.activations.view import reduce
from tl_layersim.core import Sums


def view_of(sites: int, samples: int, width: int) -> View:
    """Random activations: a walk over sites, of rows of 128 samples."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(sites, samples, width, generator=generator)
    tokens = torch.randint(50_000, (samples,), generator=generator)
    place = torch.arange(samples)
    names = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(sites - 1)))
    rows = {"sequence": place // 128, "position": place % 128, "row": place // 128}
    return View(steps.cumsum(0), tokens, sites=names, widths=(width,) * sites, next_token=tokens.roll(-1), **rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--widths", type=int, nargs="+", default=[576, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    analyzers = {
        "Cosine": lsim.Cosine(center="none"),
        "CKA": lsim.CKA(),
        "CKA, 200 permutations": lsim.CKA(permutations=200),
        "CKA, exact": lsim.CKA(estimator="exact"),
        "RSA": lsim.RSA(),
        "MutualKNN": lsim.MutualKNN(),
        "Procrustes": lsim.Procrustes(),
        "CCA": lsim.CCA(),
        "LinearPredictivity": lsim.LinearPredictivity(),
        "EffectiveRank": lsim.EffectiveRank(),
    }
    print(
        f"{options.sites} sites, {torch.get_num_threads()} threads; processor seconds for 1,000 tokens, and size of the sums\n"
    )
    print("| measure | " + " | ".join(f"d = {width} | sums" for width in options.widths) + " |")
    print("| --- |" + " --- | --- |" * len(options.widths))
    cells: dict[str, list[str]] = {name: [] for name in analyzers}
    for width in options.widths:
        for name, analyzer in analyzers.items():
            first_kernel = analyzer.first_kernel()
            first = (
                Sums()
                if first_kernel is None
                else Sums.of(reduce({"k": first_kernel}, view_of(options.sites, options.samples, width))[1]["k"])
            )
            kernel = analyzer.kernel(first)
            seconds = []
            for _ in range(options.repeats):
                # Procrustes and CCA would share the products of one view.
                view = view_of(options.sites, options.samples, width)
                began = time.process_time()
                out = reduce({"k": kernel}, view)[1]["k"]
                seconds.append(time.process_time() - began)
            size = sum(value.numel() * 8 for value in out.values()) / 1e6
            each = statistics.median(seconds) * 1000 / options.samples
            cells[name] += [f"{each:.2f} s", f"{size:,.1f} MB"]
    for name, own in cells.items():
        print(f"| {name} | " + " | ".join(own) + " |")


if __name__ == "__main__":
    main()
