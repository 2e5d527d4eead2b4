"""Fine-tune a real BERT-type encoder as a sentence classifier, standard and aligned with the same budget and several seeds.

    python benchmarks/real_classifier.py --model FOLDER --train FILE.tsv --test FILE.tsv

The files have a sentence and a label (or a label and a sentence) in each line. Prints held-out accuracy by layer, with the
standard deviation over seeds: each layer read by the model's own pooler and classifier.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tl_layersim as lsim

ARMS: dict[str, dict[str, Any]] = {
    "standard": {"objective": "standard"},
    "alternating": {"schedule": "alternating"},
    "always": {"schedule": "always"},
}


def rows_of(path: str, count: int) -> list[dict[str, Any]]:
    """Sentences with their classes."""
    found = []
    with Path(path).open(encoding="utf-8") as file:
        for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            first, second = line[:2]
            text, label = (first, second) if second.strip() in "01" else (second, first)
            if label.strip() in ("0", "1"):
                found.append({"text": text, "label": int(label)})
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--train-rows", type=int, default=6000)
    parser.add_argument("--test-rows", type=int, default=872)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    train, test = rows_of(options.train, options.train_rows), rows_of(options.test, options.test_rows)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    found: dict[str, list[Any]] = {name: [] for name in ARMS}
    for seed in options.seeds:
        for name, how in ARMS.items():
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2, dtype=torch.float32)
            training = lsim.AlignedTraining(steps=options.steps, lr=options.lr, warmup=options.steps // 10, seed=seed, **how)
            start = time.perf_counter()
            result = lsim.finetune_aligned(
                model, train, training, eval_data=test, tokenizer=tokenizer, batch_size=options.batch_size, seq_len=64
            )
            found[name].append(result.accuracy[-1].tolist())
            scores = " ".join(f"{share:.3f}" for share in found[name][-1])
            print(name, seed, scores, f"{time.perf_counter() - start:.0f} s", flush=True)
    layers = len(found["standard"][0])
    print(f"\n| held-out accuracy | {' | '.join(f'layer {i + 1}' for i in range(layers))} |\n|---|{'---|' * layers}")
    for name, runs in found.items():
        mean, spread = np.mean(runs, 0), np.std(runs, 0, ddof=1) if len(runs) > 1 else np.zeros(layers)
        print(f"| {name} | {' | '.join(f'{m:.3f} ± {s:.3f}' for m, s in zip(mean, spread, strict=True))} |")


if __name__ == "__main__":
    main()
