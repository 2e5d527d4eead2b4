"""Time and memory of the lens and of saturation beside the bare matrix products, and beside what one would write by hand.

    python benchmarks/bench_lens.py --model path/to/llama --data text.txt --out table.md

All variants read the same residuals of the same tokens with the same weights (those that run the model themselves have its
forward pass subtracted). Times are interleaved in one process: each run stands beside the bare products of its own, so that
drift of the machine cancels in ratios. Memory is taken in one process per variant.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_analyze import Models, load, machine, with_peak
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.activations.view import reduce
from tl_layersim.analyzers import Analyzer
from tl_layersim.core import Sums
from tl_layersim.data.batches import Batches
from tl_layersim.data.data import Data
from tl_layersim.lens.statistics import read_lens, saturation_layers
from tl_layersim.remote.open_model import open_source

MEMORY_MB = 128


class Case:
    """The residuals of one batch, and the ways to read them."""

    def __init__(self, models: Models, tokens: Tensor) -> None:
        self.models, self.tokens = models, tokens
        source = open_source(models.hf)
        self.batch = next(iter(Batches(Data(tokens, batch_size=len(tokens)), source.model)))
        self.view = source.collect(self.batch)
        self.weight = models.hf.lm_head.weight.detach()
        self.layers = self.view.activations.shape[0] - 1
        # As many rows at once as the lens takes.
        self.rows = int(MEMORY_MB * 2**20 / (4 * len(self.weight))) // self.layers * self.layers

    def fresh(self) -> View:
        """The view without what an earlier run remembered."""
        v = self.view
        return View(v.activations, v.tokens, v.sequence, v.position, v.next_token, v.row, unembed=v.unembed)

    def bare(self) -> None:
        """L matrix products, one block after the other, in chunks of as many rows; nothing is made of them."""
        for layer in self.view.activations[1:]:
            for start in range(0, len(layer), self.rows):
                layer[start : start + self.rows] @ self.weight.T

    def bare_whole(self) -> None:
        """L matrix products, each of all tokens of the batch at once."""
        for layer in self.view.activations[1:]:
            layer @ self.weight.T

    def kernel(self, analyzer: Analyzer) -> None:
        reduce({"k": analyzer.kernel(Sums())}, self.fresh())

    def full(self) -> None:
        self.kernel(lsim.LogitLens(lens_memory_mb=MEMORY_MB))

    def full_without_norm(self) -> None:
        self.kernel(lsim.LogitLens(norm="none", lens_memory_mb=MEMORY_MB))

    def saturation(self) -> None:
        self.kernel(lsim.Saturation(lens_memory_mb=MEMORY_MB))

    def exits(self) -> None:
        self.kernel(lsim.ExitCurve(lens_memory_mb=MEMORY_MB))

    def all_three(self) -> None:
        kernels = {a.name: a.kernel(Sums()) for a in (lsim.LogitLens(), lsim.ExitCurve(), lsim.Saturation())}
        reduce(kernels, self.fresh())

    def by_hand(self) -> None:
        """run_with_cache of the residuals, then a careful loop: layer by layer, row of the batch by row."""
        with torch.no_grad():
            names = [f"blocks.{i}.hook_resid_post" for i in range(self.layers)]
            final, cache = self.bridge.run_with_cache(self.tokens, names_filter=names)
            target = self.tokens[:, 1:]
            for name in names:
                for i in range(len(self.tokens)):
                    logits = self.bridge.unembed(self.bridge.ln_final(cache[name][i : i + 1]))[0]
                    log_p, log_q = logits.log_softmax(-1), final[i].log_softmax(-1)
                    log_p[:-1].gather(-1, target[i][:, None]).sum()
                    (logits.argmax(-1) == final[i].argmax(-1)).sum()
                    logits[:-1].topk(5, -1)
                    -(log_p.exp() * log_p).sum(-1)
                    (log_q.exp() * (log_q - log_p)).sum(-1)

    def transformer_lens(self) -> None:
        """TransformerLens's own, row by row: ranks of the next token and entropies."""
        from transformer_lens.tools.analysis import logit_lens

        with torch.no_grad():
            for row in self.tokens:
                logit_lens(self.bridge, row[None, :-1], positions=None, targets=row[None, 1:]).rank_trajectory()

    @property
    def bridge(self):
        if not hasattr(self, "_bridge"):
            self._bridge = self.models.bridge()
        return self._bridge

    def forward_bridge(self) -> None:
        with torch.no_grad():
            self.bridge(self.tokens)


# Name: label, what runs, and whether the model's forward pass is in it.
VARIANTS: dict[str, tuple[str, Callable[[Case], None], bool]] = {
    "bare": ("L products, chunks of the lens's size", Case.bare, False),
    "bare-whole": ("L products, each of all tokens", Case.bare_whole, False),
    "lens": ("`LogitLens()`", Case.full, False),
    "lens-none": ('`LogitLens(norm="none")`', Case.full_without_norm, False),
    "saturation": ("`Saturation()`", Case.saturation, False),
    "exits": ("`ExitCurve()`", Case.exits, False),
    "three": ("`LogitLens()`, `ExitCurve()`, `Saturation()` in one run", Case.all_three, False),
    "hand": ("run_with_cache, loop", Case.by_hand, True),
    "tl": ("TransformerLens's logit_lens, row by row", Case.transformer_lens, True),
}


def peak(name: str, args: argparse.Namespace) -> float:
    """In a process of its own: highest resident size during one run, less what stood there before, in MB."""
    case = Case(*load(args))
    if VARIANTS[name][2]:
        case.forward_bridge()
    return with_peak(lambda: VARIANTS[name][1](case))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Llama-like Hugging Face model")
    parser.add_argument("--data", required=True, help="text file that the tokens are taken from")
    parser.add_argument("--batch", type=int, default=8, help="rows of tokens")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 for its own choice")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants to run")
    parser.add_argument("--out", help="file for the table, in Markdown")
    parser.add_argument("--peak-of", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        print(json.dumps(peak(args.peak_of, args)))
        return
    peaks = {}
    for name in args.only:
        done = subprocess.run([sys.executable, *sys.argv, "--peak-of", name], capture_output=True, text=True, check=False)
        peaks[name] = f"{json.loads(done.stdout.splitlines()[-1]):.0f}" if done.returncode == 0 else "failed"
        print(f"memory of {name}: {peaks[name]} MB", file=sys.stderr, flush=True)
    case = Case(*load(args))

    def seconds(work: Callable[[Case], None]) -> float:
        gc.collect()
        start = time.perf_counter()
        work(case)
        return time.perf_counter() - start

    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in args.only}
    seconds(Case.bare)
    for repeat in range(args.repeats):
        for name in args.only:
            # Before and after: one bare run beside another says how far a single one can be trusted.
            before = seconds(Case.bare)
            forward = seconds(Case.forward_bridge) if VARIANTS[name][2] else 0.0
            own = seconds(VARIANTS[name][1]) - forward
            rows[name].append((own, (before + seconds(Case.bare)) / 2))
            print(f"time {repeat} of {name}: {own:.2f} s, bare {rows[name][-1][1]:.2f} s", file=sys.stderr, flush=True)
    ratio = {name: statistics.median(own / bare for own, bare in found) for name, found in rows.items()}
    lines = ["| variant | seconds | / L products | peak MB beyond residuals and model |", "| --- | ---: | ---: | ---: |"]
    for name in args.only:
        own = statistics.median(own for own, _ in rows[name])
        lines.append(f"| {VARIANTS[name][0]} | {own:.2f} | {ratio[name]:.2f} | {peaks[name]} |")
    if {"lens", "saturation"} <= set(ratio):
        lines.append(f"\n- Saturation takes {ratio['saturation'] / ratio['lens']:.2f} of the full lens.")
        view = case.fresh()
        with torch.no_grad():
            walked, _ = saturation_layers(case.fresh(), True, MEMORY_MB)
            read_lens(view, torch.full_like(view.tokens, -100), True, MEMORY_MB, 5, "none")
        same = (walked == saturation_layers(view, True, MEMORY_MB)[0]).sum()
        lines.append(f"- Saturation layers found by both ways agree at {int(same)} of {len(walked)} tokens.")
    text = "\n".join(lines) + f"\n\n{machine(args)}\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
