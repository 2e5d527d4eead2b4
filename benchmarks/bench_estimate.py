"""Estimated beside measured FLOPs, time and memory of `tl_layersim.analyze`.

    python benchmarks/bench_estimate.py --models path/to/llama path/to/another --tokens 8192

For each model: `lsim.estimate`, then `lsim.analyze` of as many random tokens, in turns in one process; and for one batch the
FLOPs that torch counts, attention as matrix products, and the peak of the memory that torch's profiler counts. `gpt2` stands
for GPT-2's shape at 6 layers with random weights. `--clock processor` compares processor time, where other programs run too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1")

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

import tl_layersim as lsim
from tl_layersim.analyzers import Analyzer
from tl_layersim.costs import estimate as estimating

ROWS, LENGTH = 4, 128
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2"], help="folders of causal language models, or gpt2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    ratios = ("GFLOP of a batch", f"seconds ({options.clock})", "peak MB")
    print("| model | analyzers |" + "".join(f" {name}, estimated | measured | ratio |" for name in ratios))
    print("| --- | --- |" + " ---: |" * 9)
    for name in options.models:
        model = (
            AutoModelForCausalLM.from_config(GPT2Config(n_layer=6))
            if name == "gpt2"
            else AutoModelForCausalLM.from_pretrained(name)
        ).eval()
        vocabulary = model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (options.tokens // LENGTH, LENGTH), generator=generator)
        for analyzers in ([lsim.Cosine(center="none"), lsim.CKA()], [lsim.Saturation()]):
            print(row(name, model, tokens, analyzers, options.repeats, CLOCKS[options.clock]), flush=True)


def row(
    name: str,
    model: torch.nn.Module,
    tokens: torch.Tensor,
    analyzers: list[Analyzer],
    repeats: int,
    clock: Callable[[], float],
) -> str:
    expected, taken = [], []
    for _ in range(repeats):
        with mock.patch.object(estimating, "time", SimpleNamespace(perf_counter=clock)):
            cost = lsim.estimate(model, analyzers, tokens=tokens.numel(), batch_size=ROWS, seq_len=LENGTH)
        expected.append(cost.seconds)
        start = clock()
        lsim.analyze(model, lsim.Data(tokens, batch_size=ROWS), analyzers)
        taken.append(clock() - start)
    peak = measured_peak(model, tokens[:ROWS], analyzers)
    flops = sum(cost.flops.values()) * ROWS * LENGTH / cost.tokens
    counted = measured_flops(model, tokens[:ROWS], analyzers)
    middle, before = statistics.median(taken), statistics.median(expected)
    return " | ".join(
        [
            f"| {os.path.basename(os.path.normpath(name))}",
            ", ".join(type(analyzer).__name__ for analyzer in analyzers),
            f"{flops / 1e9:.2f} | {counted / 1e9:.2f} | {flops / counted:.3f}",
            f"{before:.2f} ({min(expected):.2f} to {max(expected):.2f})",
            f"{middle:.2f} ({min(taken):.2f} to {max(taken):.2f}) | {before / middle:.2f}",
            f"{cost.activations_bytes / 1e6:.0f} | {peak / 1e6:.0f} | {cost.activations_bytes / peak:.2f} |",
        ]
    )


def measured_flops(model: torch.nn.Module, tokens: torch.Tensor, analyzers: list[Analyzer]) -> int:
    """FLOPs that torch counts in a run of one batch; attention unfused, which is counted fused on GPUs only."""
    fused = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        lsim.analyze(model, lsim.Data(tokens, batch_size=ROWS), analyzers)
    model.set_attn_implementation(fused)
    return counter.get_total_flops()


def measured_peak(model: torch.nn.Module, tokens: torch.Tensor, analyzers: list[Analyzer]) -> int:
    """Most bytes that torch's allocator held at once during a run of one batch, beside what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        lsim.analyze(model, lsim.Data(tokens, batch_size=ROWS), analyzers)
    held = peak = 0
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    main()
