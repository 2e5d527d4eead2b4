"""Time of `tl_layersim.analyze` with intervals beside the same run without them.

    python benchmarks/bench_intervals.py --model path/to/llama --tokens 8192

Both variants take turns in one process on the same tokens, so that drift of the machine cancels in ratios. Processor time is
measured beside wall time, because other work on the machine does not count in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1")

import torch
from transformers import AutoModelForCausalLM

import tl_layersim as lsim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a causal language model; the demo model if left out")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128, help="tokens in a row")
    parser.add_argument("--rows", type=int, default=4, help="rows in a batch")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model).eval() if options.model else lsim.demo_model()
    vocabulary = model.get_input_embeddings().num_embeddings
    rows = torch.randint(
        vocabulary, (options.tokens // options.length, options.length), generator=torch.Generator().manual_seed(0)
    )
    analyzers = [lsim.Cosine(center="none"), lsim.CKA()]

    def seconds(intervals: bool) -> tuple[float, float]:
        wall, processor = time.perf_counter(), time.process_time()
        lsim.analyze(model, lsim.Data(rows, batch_size=options.rows), analyzers, intervals=intervals)
        return time.perf_counter() - wall, time.process_time() - processor

    seconds(False), seconds(True)
    pairs = []
    for number in range(options.repeats):
        # Each goes first in turn.
        order = (False, True) if number % 2 == 0 else (True, False)
        taken = {intervals: seconds(intervals) for intervals in order}
        pairs.append((taken[False], taken[True]))
    print(f"{options.tokens} tokens, {torch.get_num_threads()} threads, {options.repeats} repeats: with intervals over without")
    for clock, name in enumerate(("wall time", "processor time")):
        ratios = [after[clock] / before[clock] for before, after in pairs]
        without = statistics.median(before[clock] for before, _ in pairs)
        print(f"{name}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), {without:.2f} s without")


if __name__ == "__main__":
    main()
