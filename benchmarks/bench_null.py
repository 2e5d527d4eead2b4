"""Time of `CKA(permutations=...)` beside the same pass without permutations.

    python benchmarks/bench_null.py --model path/to/llama --data text.txt --out table.md

Every run stands right after a run without permutations in one process, so that drift of the machine cancels in ratios.
Processor seconds are shown beside wall-clock seconds, because other processes may share the machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

# Read when the packages below are imported. Nothing is fetched, and progress bars are no part of the measurement.
os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim

# Label, and the analyzer beside `CKA()`.
VARIANTS: dict[str, Any] = {
    "`CKA(permutations=200)`": lsim.CKA(permutations=200),
    "`CKA(permutations=1000)`": lsim.CKA(permutations=1000),
    '`CKA(estimator="biased", permutations=200)`': lsim.CKA(estimator="biased", permutations=200),
    "`RSA()`": lsim.RSA(),
    "`RSA(permutations=200)`": lsim.RSA(permutations=200),
    "`MutualKNN()`": lsim.MutualKNN(),
    "`MutualKNN(permutations=200)`": lsim.MutualKNN(permutations=200),
}


def load(args: argparse.Namespace) -> tuple[Any, Tensor]:
    """The model, and rows of tokens from the text file."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    need = args.batch * args.seq_len
    ids = tokenizer(Path(args.data).read_text(encoding="utf-8")[: 20 * need], add_special_tokens=False, verbose=False)
    return model, torch.tensor(ids["input_ids"][:need]).view(args.batch, args.seq_len)


def seconds(model: Any, tokens: Tensor, analyzer: Any) -> tuple[float, float]:
    """Wall-clock and processor seconds of one analysis."""
    gc.collect()
    start, own = time.perf_counter(), time.process_time()
    lsim.analyze(model, lsim.Data(tokens, batch_size=len(tokens)), [analyzer])
    return time.perf_counter() - start, time.process_time() - own


def main() -> None:
    """Measure every variant, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Llama-like Hugging Face model, of about 135M parameters")
    parser.add_argument("--data", required=True, help="text file that the tokens are taken from")
    parser.add_argument("--batch", type=int, default=4, help="rows of tokens")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="file for the table, in Markdown")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    model, tokens = load(args)
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in VARIANTS}
    for repeat in range(args.repeats + 1):
        for name, analyzer in VARIANTS.items():
            row = (*seconds(model, tokens, lsim.CKA()), *seconds(model, tokens, analyzer))
            # The first round fills caches and imports modules.
            if repeat:
                times[name].append(row)
    lines = ["| analyzer | seconds | / `CKA()` | processor seconds | / `CKA()` |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, rows in times.items():
        cells = []
        for side in (0, 1):
            ratios = [row[side + 2] / row[side] for row in rows]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells += [f"{statistics.median(row[side + 2] for row in rows):.2f}", spread]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"{args.batch} x {args.seq_len} tokens, float32, minibatches of 256, median (range) of {args.repeats}; "]
    lines[-1] += f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} at the end; "
    lines[-1] += f"Python {platform.python_version()}, torch {torch.__version__}."
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
