"""Time of `tl_layersim.analyze` with intervals, permutations or other sites, beside the model or the run without them.

    python benchmarks/bench_options.py --model path/to/llama --data text.txt --out table.md

All runs take turns in one process, in another order in each round, on one thread; ratios are of the same round, in processor
time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# First: it sets what other packages read when they are imported.
from bench_analyze import forward, load, machine
from turns import ratios, spread, take_turns

import tl_layersim as lsim

BOTH = (lsim.Cosine(center="none"), lsim.CKA())
SUBLAYERS = {"at": ["resid_post", "attn_out", "mlp_out"]}
# Label, analyzers, options of the call, and the run to which the time is compared.
VARIANTS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "both": ("`Cosine`, `CKA`", BOTH, {}, "forward"),
    "intervals": ("`Cosine`, `CKA`, `intervals=True`", BOTH, {"intervals": True}, "both"),
    "sublayers": ("`CKA`, residual stream, attention and MLP", (lsim.CKA(),), SUBLAYERS, "forward"),
    "heads": ('`CKA`, `at="z", per_head=True`', (lsim.CKA(),), {"at": "z", "per_head": True}, "forward"),
    "contribution": ("`Contribution`", (lsim.Contribution(),), {}, "forward"),
    "cka": ("`CKA()`", (lsim.CKA(),), {}, "forward"),
    "cka-200": ("`CKA(permutations=200)`", (lsim.CKA(permutations=200),), {}, "cka"),
    "cka-1000": ("`CKA(permutations=1000)`", (lsim.CKA(permutations=1000),), {}, "cka"),
    "biased-200": ("biased `CKA(permutations=200)`", (lsim.CKA(estimator="biased", permutations=200),), {}, "cka"),
    "rsa": ("`RSA()`", (lsim.RSA(),), {}, "cka"),
    "rsa-200": ("`RSA(permutations=200)`", (lsim.RSA(permutations=200),), {}, "cka"),
    "knn": ("`MutualKNN()`", (lsim.MutualKNN(),), {}, "cka"),
    "knn-200": ("`MutualKNN(permutations=200)`", (lsim.MutualKNN(permutations=200),), {}, "cka"),
}


def measured(model: Any, tokens: Any, rows: int, analyzers: list[Any], **options: Any) -> Any:
    """A run that reads its data anew."""
    return lsim.analyze(model, lsim.Data(tokens, batch_size=rows), analyzers, **options)


def main() -> None:
    """Measure every variant, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Llama-like Hugging Face model, of about 135M parameters")
    parser.add_argument("--data", required=True, help="text file that the tokens are taken from")
    parser.add_argument("--batch", type=int, default=16, help="rows of tokens")
    parser.add_argument("--rows", type=int, default=4, help="rows in a forward pass")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0 for its own choice")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants to run")
    parser.add_argument("--out", help="file for the table, in Markdown")
    parser.set_defaults(shape=None)
    args = parser.parse_args()
    models, tokens = load(args)
    run_model = forward(models.hf, **models.options)
    works: dict[str, Callable[[], Any]] = {"forward": lambda: [run_model(rows) for rows in tokens.split(args.rows)]}
    for name in dict.fromkeys(one for chosen in args.only for one in (VARIANTS[chosen][3], chosen)):
        if name in VARIANTS:
            _, analyzers, options, _ = VARIANTS[name]
            works[name] = partial(measured, models.hf, tokens, args.rows, list(analyzers), **options)
    for work in works.values():  # The first run of each fills caches and imports modules.
        work()
    times = take_turns(works, args.repeats)
    lines = ["| run | processor seconds | beside | ratio |", "| --- | ---: | --- | ---: |"]
    for name in args.only:
        label, _, _, base = VARIANTS[name]
        beside = VARIANTS[base][0] if base in VARIANTS else "forward pass"
        lines.append(
            f"| {label} | {spread(times[name]['processor'])} | {beside} | {spread(ratios(times, name, base, 'processor'))} |"
        )
    text = "\n".join([*lines, "", machine(args)]) + "\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
