"""Time of `tl_layersim.analyze` at hook points beside the model's bare forward pass.

    python benchmarks/bench_sites.py --model path/to/llama --data text.txt --out table.md

All variants and the bare passes take turns in one process, in another order in each round, on one thread; ratios are of the
same round, in processor time. The FLOPs of the matrix products, over those of the blocks alone, say what the ratio would be if
nothing else cost time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# First: it sets what other packages read when they are imported.
from bench_analyze import forward, load, machine
from turns import CLOCKS, product_flops, ratios, spread, take_turns

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


def measured(model: Any, tokens: Any, analyzers: list[Any], **options: Any) -> Any:
    """A run that reads its data anew."""
    return lsim.analyze(model, lsim.Data(tokens, batch_size=len(tokens)), analyzers, **options)


def main() -> None:
    """Measure every variant, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Llama-like Hugging Face model, of about 135M parameters")
    parser.add_argument("--data", required=True, help="text file that the tokens are taken from")
    parser.add_argument("--batch", type=int, default=16, help="rows of tokens")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0 for its own choice")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants to run")
    parser.add_argument("--out", help="file for the table, in Markdown")
    parser.set_defaults(shape=None)
    args = parser.parse_args()
    models, tokens = load(args)
    works: dict[str, Callable[[], Any]] = {
        "forward": partial(forward(models.hf, **models.options), tokens),
        "blocks": partial(forward(models.hf.base_model, **models.options), tokens),
    }
    for name in args.only:
        _, analyzers, options = VARIANTS[name]
        works[name] = partial(measured, models.hf, tokens, list(analyzers), **options)
    # The first run of each fills caches and imports modules.
    flops = {name: product_flops(work) for name, work in works.items()}
    times = take_turns(works, args.repeats)
    lines = [
        "| analyzers and sites | sites | seconds | processor seconds | / forward | / blocks alone | products' FLOPs / blocks |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in args.only:
        label, analyzers, options = VARIANTS[name]
        report = lsim.analyze(models.hf, tokens[:4, :32], list(analyzers), **options)
        cells = [label, str(len(next(iter(report.values())).layers))]
        cells += [spread(times[name][clock]) for clock in CLOCKS]
        cells += [spread(ratios(times, name, other, "processor")) for other in ("forward", "blocks")]
        cells.append(f"{flops[name] / flops['blocks']:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join([*lines, "", machine(args)]) + "\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
