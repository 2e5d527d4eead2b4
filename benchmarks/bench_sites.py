"""Time of `tl_layersim.analyze` at hook points beside the model's bare forward pass.

    python benchmarks/bench_sites.py --model path/to/llama --data text.txt --out table.md

Every run stands right after a bare forward pass of its own in one process, so that drift of the machine cancels in ratios.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when the packages below are imported. Nothing is fetched, and progress bars are no part of the measurement.
os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim

COSINE_AND_CKA = (lsim.Cosine(center="none"), lsim.CKA())
# Label, analyzers, and the sites that they read.
VARIANTS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "default": ("`Cosine`, `CKA`, residual stream", COSINE_AND_CKA, {}),
    "families": (
        '`CKA`, `at=["resid_post", "attn_out", "mlp_out"]`',
        (lsim.CKA(),),
        {"at": ["resid_post", "attn_out", "mlp_out"]},
    ),
    "both": (
        '`Cosine`, `CKA`, `at=["resid_post", "attn_out", "mlp_out"]`',
        COSINE_AND_CKA,
        {"at": ["resid_post", "attn_out", "mlp_out"]},
    ),
    "heads": ('`CKA`, `at="z", per_head=True`', (lsim.CKA(),), {"at": "z", "per_head": True}),
    "contribution": ("`Contribution`", (lsim.Contribution(),), {}),
}


def load(args: argparse.Namespace) -> tuple[Any, Tensor]:
    """The model, and rows of tokens from the text file."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    need = args.batch * args.seq_len
    ids = tokenizer(Path(args.data).read_text(encoding="utf-8")[: 20 * need], add_special_tokens=False, verbose=False)
    return model, torch.tensor(ids["input_ids"][:need]).view(args.batch, args.seq_len)


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Measure every variant, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Llama-like Hugging Face model, of about 135M parameters")
    parser.add_argument("--data", required=True, help="text file that the tokens are taken from")
    parser.add_argument("--batch", type=int, default=16, help="rows of tokens")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants to run")
    parser.add_argument("--out", help="file for the table, in Markdown")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    model, tokens = load(args)

    def bare() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False)

    def blocks() -> None:
        with torch.no_grad():
            model.model(tokens, use_cache=False)

    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in args.only}
    seconds(bare)
    for repeat in range(args.repeats + 1):
        for name in args.only:
            _, analyzers, options = VARIANTS[name]
            row = (
                seconds(bare),
                seconds(blocks),
                seconds(lambda a=analyzers, o=options: lsim.analyze(model, tokens, list(a), batch_size=len(tokens), **o)),
            )
            # The first round fills caches and imports modules.
            if repeat:
                times[name].append(row)
    lines = ["| analyzers and sites | sites | seconds | / forward | / blocks alone |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, rows in times.items():
        label, analyzers, options = VARIANTS[name]
        report = lsim.analyze(model, tokens[:2, :32], list(analyzers), **options)
        sites = len(next(iter(report.values())).layers)
        ratios = [statistics.median(row[2] / row[side] for row in rows) for side in (0, 1)]
        spread = f"{min(r[2] / r[0] for r in rows):.2f} to {max(r[2] / r[0] for r in rows):.2f}"
        middle = statistics.median(row[2] for row in rows)
        lines.append(f"| {label} | {sites} | {middle:.2f} | {ratios[0]:.2f} ({spread}) | {ratios[1]:.2f} |")
    lines += ["", f"{args.batch} x {args.seq_len} tokens, float32, median (range) of {args.repeats}; {os.cpu_count()} cores, "]
    lines[-1] += f"load {os.getloadavg()[0]:.1f} at the end; Python {platform.python_version()}, torch {torch.__version__}."
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
