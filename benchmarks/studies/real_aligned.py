"""Fine-tune a real model with the same budget in five ways, with several seeds, and measure what became of its layers.

    python benchmarks/studies/real_aligned.py --model FOLDER --train FILE --test FILE --out FOLDER

Standard training, aligned training by turns with standard, aligned training at each step, multi-exit training, in which each
layer has a head of its own, and standard training with the cosine regulariser; with each seed the rows come in another order.
Each run is written as it ends, and a second call goes on with what is missing. Prints tables of means with the standard
deviation over seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim
from tl_layersim.lens import ExitHeads

ARMS = {
    "standard": {"objective": "standard"},
    "alternating": {"objective": "aligned", "schedule": "alternating"},
    "always": {"objective": "aligned", "schedule": "always"},
    "own heads": {"objective": "multi-head", "schedule": "always"},
    "cosine-reg": {"objective": "cosine-reg"},
}
THRESHOLD = 0.9


def load(folder: str) -> Any:
    """The model with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model.eval()


def paragraphs(path: str) -> list[str]:
    """Texts of some length."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [line.strip() for line in lines if len(line.strip()) > 200]


def measure(model: Any, texts: list[str], tokens: int, seq_len: int, heads: ExitHeads | None = None) -> dict[str, Any]:
    """What its layers say and how they lie, on held-out text; by heads of their own where they have them."""
    report = lsim.analyze(
        model,
        lsim.Data(texts, max_tokens=tokens, seq_len=seq_len, pack=True),
        [lsim.LogitLens(heads=heads), lsim.Saturation(heads=heads), lsim.Cosine(center="none"), lsim.ExitCurve(heads=heads)],
    )
    lens, exits = report["logit_lens"], report["exit_curve"]
    near = exits.threshold_for(agreement=0.95)
    blocks = torch.arange(1, lens.accuracy.shape[0] + 1, dtype=torch.float64)
    return {
        "perplexity": float(lens.perplexity[-1]),
        "perplexity by layer": lens.perplexity.tolist(),
        "accuracy by layer": lens.accuracy.tolist(),
        "agreement by layer": lens.agreement.tolist(),
        "early saturation": float(report["saturation"].early_share),
        "COS(1, L)": float(report["cosine"].values[1, -1]),
        "COS(L-1, L)": float(report["cosine"].values[-2, -1]),
        "COS to the last by layer": report["cosine"].values[1:, -1].tolist(),
        "blocks at 0.9": float(exits.at(THRESHOLD).exits @ blocks / exits.at(THRESHOLD).exits.sum()),
        "agreement at 0.9": exits.at(THRESHOLD).agreement,
        "accuracy at 0.9": exits.at(THRESHOLD).accuracy,
        "speedup in blocks at 95 % agreement": exits.at(near).speedup,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--test-tokens", type=int, default=8192)
    parser.add_argument("--save", action="store_true", help="keep the models of the first seed")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, test = paragraphs(options.train), paragraphs(options.test)
    before = options.out / "before.json"
    if not before.exists():
        before.write_text(json.dumps(measure(load(options.model), test, options.test_tokens, options.seq_len)))
    for seed in options.seeds:
        for arm in options.arms:
            how = ARMS[arm]
            file = options.out / f"{arm}-{seed}.json"
            if file.exists():
                continue
            model = load(options.model)
            training = lsim.AlignedTraining(
                steps=options.steps,
                lr=options.lr,
                warmup=options.steps // 10,
                seed=seed,
                save_to=options.out / f"model-{arm}" if options.save and seed == options.seeds[0] else None,
                **how,
            )
            start = time.perf_counter()
            kept = options.out / f"{arm}-{seed}.part"
            result = lsim.finetune_aligned(
                model,
                lsim.Data(train, batch_size=options.batch_size, seq_len=options.seq_len, pack=True),
                training,
                eval_data=test[:4],
                checkpoint=kept,
            )
            minutes = (time.perf_counter() - start) / 60
            heads = result.heads if how["objective"] == "multi-head" else None
            found = measure(model, test, options.test_tokens, options.seq_len, heads) | {"minutes": minutes}
            file.write_text(json.dumps(found))
            kept.unlink(missing_ok=True)
            print(arm, seed, f"{minutes:.1f} min, perplexity {found['perplexity']:.1f}", flush=True)
    table(options)


def table(options: argparse.Namespace) -> None:
    """Print means (sd over seeds)."""
    before = json.loads((options.out / "before.json").read_text())
    columns = {"before": [before]} | {
        arm: [json.loads((options.out / f"{arm}-{seed}.json").read_text()) for seed in options.seeds] for arm in options.arms
    }

    def cell(values: list[float], digits: int) -> str:
        spread = f" ({np.std(values, ddof=1):.{digits}f})" if len(values) > 1 else ""
        return f"{np.mean(values):.{digits}f}{spread}"

    print(f"\nMean (sd over seeds)\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, value in before.items():
        if not isinstance(value, list):
            digits = 1 if name == "perplexity" else 3
            print(f"| {name} | {' | '.join(cell([run[name] for run in runs], digits) for runs in columns.values())} |")
    for name in ("perplexity by layer", "accuracy by layer", "agreement by layer", "COS to the last by layer"):
        print(f"\n{name}\n\n| layer | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for layer in range(len(before[name])):
            cells = [cell([run[name][layer] for run in runs], 1 if "perp" in name else 3) for runs in columns.values()]
            print(f"| {layer + 1} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
