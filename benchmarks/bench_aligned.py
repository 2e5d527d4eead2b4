"""A step of aligned training beside a standard one, and beside other ways to write it: time against FLOPs, and memory.

    python benchmarks/bench_aligned.py --model LLAMA --data text.txt --out table.md

Forward, backward and AdamW on rows of 256 tokens. Variants are run in turn, so that drift of the machine cancels in the
ratios of each round; memory is the peak of one process per variant above the model, its gradients and the optimiser's moments.
FLOPs count the products with weight matrices, forward once and backward twice: six times parameters times tokens, the
unembedding once for a standard step and once a layer for an aligned one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_analyze import machine, with_peak
from bench_stitching import rows_of
from studies.real_models import load
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tl_layersim as lsim
from tl_layersim.training.losses import layer_weights

LENGTH = 256
NAMES = {
    "standard": "standard: the model's own loss",
    "ours": "aligned: `aligned_loss`",
    "drawn": "aligned: `layers_per_step=2`",
    "naive": "aligned, all logits of all layers at once",
    "layerwise": "aligned, one checkpointed loss a layer",
}


class Steps:
    """One optimiser step, in several ways."""

    def __init__(self, model: Any, tokens: Tensor) -> None:
        self.model, self.tokens = model.train(), tokens
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.layers = model.config.num_hidden_layers
        self.weights = layer_weights("linear", self.layers)
        # Moments and gradients are there before anything is weighed.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimiser.step()

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=False)

    def standard(self) -> None:
        self.step(self.model(self.tokens, labels=self.tokens, use_cache=False).loss)

    def ours(self) -> None:
        self.step(lsim.training.aligned_loss(self.model, self.tokens))

    def drawn(self) -> None:
        terms = lsim.AlignedTraining(layers_per_step=2, schedule="always").terms(self.count, self.layers)
        self.count += 1
        chosen = [terms.get(layer, 0.0) for layer in range(1, self.layers + 1)]
        total = sum(chosen)
        self.step(total * lsim.training.aligned_loss(self.model, self.tokens, weights=[w / total for w in chosen]))

    count = 0

    def hidden(self) -> list[Tensor]:
        """What the head reads of each layer."""
        found = self.model.model(self.tokens, output_hidden_states=True, use_cache=False).hidden_states[1:]
        return [*(self.model.model.norm(x) for x in found[:-1]), found[-1]]

    def loss_of(self, x: Tensor) -> Tensor:
        logits = self.model.lm_head(x)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())

    def naive(self) -> None:
        logits = self.model.lm_head(torch.stack(self.hidden()))[:, :, :-1].float()
        right = self.tokens[:, 1:].flatten()
        parts = [torch.nn.functional.cross_entropy(z.flatten(0, 1), right) for z in logits]
        self.step(sum(w * part for w, part in zip(self.weights, parts, strict=True)))

    def layerwise(self) -> None:
        parts = [checkpoint(self.loss_of, x, use_reentrant=False) for x in self.hidden()]
        self.step(sum(w * part for w, part in zip(self.weights, parts, strict=True)))

    def flops(self, unembeddings: int) -> float:
        """Of the products with weights."""
        head = self.model.lm_head.weight
        inside = sum(p.numel() for p in self.model.model.layers.parameters() if p.dim() > 1)
        return 6.0 * self.tokens.numel() * (inside + unembeddings * head.numel())


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def child(options: argparse.Namespace) -> None:
    """Weigh one variant in a process of its own."""
    model = load(options.model)
    steps = Steps(model, rows_of(model, Path(options.data), options.rows, LENGTH))
    _, peak = with_peak(getattr(steps, options.child))
    print(json.dumps(peak))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=NAMES)
    options = parser.parse_args()
    options.batch, options.seq_len, options.repeats = options.rows, LENGTH, options.rounds
    if options.child:
        child(options)
        return
    model = load(options.model)
    steps = Steps(model, rows_of(model, Path(options.data), options.rows, LENGTH))
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for round_number in range(options.rounds + 1):
        for name in NAMES:
            seconds = timed(getattr(steps, name))
            if round_number:
                times[name].append(seconds)
    peaks = {}
    for name in NAMES:
        command = [sys.executable, "-W", "ignore", __file__, "--model", options.model, "--data", options.data]
        done = subprocess.run(
            [*command, "--rows", str(options.rows), "--child", name], capture_output=True, text=True, check=True
        )
        peaks[name] = json.loads(done.stdout.strip().splitlines()[-1])
    ratio = steps.flops(steps.layers) / steps.flops(1)

    def beside(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))

    lines = [
        f"{machine(options)} {steps.tokens.numel()} tokens in {options.rows} rows, {steps.layers} layers, vocabulary "
        f"{len(model.lm_head.weight)}, d_model {model.config.hidden_size}. An aligned step has {ratio:.2f} times a standard "
        "step's FLOPs.",
        "",
        "| step | seconds | of a standard step | of its FLOP ratio | peak MB | of standard's |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, text in NAMES.items():
        share = beside(name, "standard")
        allowed = {"standard": 1.0, "drawn": None}.get(name, ratio)
        of_flops = "" if allowed is None else f"{share / allowed:.2f}"
        lines.append(
            f"| {text} | {statistics.median(times[name]):.2f} | {share:.2f} | {of_flops} | {peaks[name]:.0f} | "
            f"{peaks[name] / peaks['standard']:.2f} |"
        )
    table = "\n".join(lines)
    print(table)
    if options.out:
        options.out.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
