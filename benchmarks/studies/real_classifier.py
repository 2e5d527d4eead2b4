"""Fine-tune a real BERT-type encoder as a classifier, standard and aligned with the same budget and several seeds.

    python benchmarks/studies/real_classifier.py --model FOLDER --train FILE.tsv --test FILE.tsv
    python benchmarks/studies/real_classifier.py --model FOLDER --train TEXT.txt --test TEXT.txt --task pairs

`--task sentences`: the files have a sentence and a label (or a label and a sentence) in each line. `--task pairs`: the files
are plain text with a paragraph in each line; two sentences are of class 1 if the second follows the first in its paragraph, and
of class 0 if it comes from another paragraph. Prints held-out results by layer, with the standard deviation over seeds; each
layer is read by the model's own pooler and classifier. `--save FOLDER` keeps the models; models that the folder holds are not
trained again.
"""

from __future__ import annotations

import argparse
import csv
import random
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

TABLES = (
    ("accuracy", "held-out accuracy"),
    ("f1", "macro F1"),
    ("mcc", "Matthews correlation"),
    ("cosine", "cosine to the last layer"),
)


def sentences_of(path: str, count: int) -> list[dict[str, Any]]:
    """Sentences with their classes."""
    found = []
    with Path(path).open(encoding="utf-8") as file:
        for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            first, second = line[:2]
            text, label = (first, second) if second.strip() in "01" else (second, first)
            if label.strip() in ("0", "1"):
                found.append({"text": text, "label": int(label)})
    return found[:count]


def pairs_of(path: str, count: int) -> list[dict[str, Any]]:
    """Pairs of sentences, half of which follow one another in a paragraph of the file."""
    text = Path(path).read_text(encoding="utf-8").replace("<unk>", "[UNK]").replace(" @-@ ", "-")
    lines = [line.strip() for line in text.splitlines()]
    paragraphs = [[s for s in line.split(" . ") if 25 < len(s) < 110] for line in lines if not line.startswith("=")]
    pairs = [(a, b) for sentences in paragraphs for a, b in zip(sentences[::2], sentences[1::2], strict=False)]
    draw = random.Random(0)
    draw.shuffle(pairs)
    found = []
    for number, (first, second) in enumerate(pairs[:count]):
        follows = number % 2
        other = draw.choice(pairs)[1]
        found.append({"first": first, "second": second if follows else other, "label": follows})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--task", choices=("sentences", "pairs"), default="sentences")
    parser.add_argument("--save")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--train-rows", type=int, default=6000)
    parser.add_argument("--test-rows", type=int, default=872)
    parser.add_argument("--freeze-embeddings", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows_of = sentences_of if options.task == "sentences" else pairs_of
    train, test = rows_of(options.train, options.train_rows), rows_of(options.test, options.test_rows)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    reading: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": options.batch_size, "seq_len": options.seq_len}
    if options.task == "pairs":
        reading["column"] = ("first", "second")
    held_out = lsim.Data(test, **reading)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.arms}
    for seed in options.seeds:
        for name in options.arms:
            start = time.perf_counter()
            folder = None if options.save is None else Path(options.save) / f"{options.task}-{name}-{seed}"
            kept = folder is not None and (folder / "config.json").exists()
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder if kept else options.model, num_labels=2, dtype=torch.float32
            )
            if not kept:
                model.base_model.embeddings.requires_grad_(not options.freeze_embeddings)
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                training = lsim.AlignedTraining(
                    steps=options.steps, lr=options.lr, warmup=options.steps // 10, seed=seed, save_to=folder, **ARMS[name]
                )
                # The held-out rows are evaluated below; a few of them are enough for the curves of the training.
                lsim.finetune_aligned(model, lsim.Data(train, **reading), training, eval_data=test[:64])
            analyzers = [lsim.LogitLens(labels="data"), lsim.TaskMetrics(labels="data"), lsim.Saturation(), lsim.Cosine()]
            report = lsim.analyze(model, held_out, analyzers)
            lens, saturation = report["logit_lens"], report["saturation"]
            found[name].append(
                {
                    "accuracy": lens.accuracy.tolist(),
                    "f1": report["task_metrics"].f1.tolist(),
                    "mcc": report["task_metrics"].mcc.tolist(),
                    # Definition 3.1, with an accuracy 2 points below that of the last layer as the one to reach.
                    "depth": lens.effective_depth(min(1.0, 1.02 - float(lens.accuracy[-1]))),
                    "early": float(saturation.early_share),
                    "cosine": report["cosine"].values[1:, -1].tolist(),
                }
            )
            scores = " ".join(f"{share:.3f}" for share in found[name][-1]["accuracy"])
            print(name, seed, scores, f"{time.perf_counter() - start:.0f} s", flush=True)
    layers = len(found[options.arms[0]][0]["accuracy"])
    for field, title in TABLES:
        heads = " | ".join(f"layer {i + 1}" for i in range(layers))
        print(f"\n| {title}, mean (sd over seeds) | {heads} |\n|---|{'---|' * layers}")
        for name, runs in found.items():
            table = np.array([run[field] for run in runs])
            spread = table.std(0, ddof=1) if len(runs) > 1 else np.zeros(layers)
            print(f"| {name} | {' | '.join(f'{m:.3f} ({s:.3f})' for m, s in zip(table.mean(0), spread, strict=True))} |")
    print(f"\n| | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for field, title in (
        ("early", "saturated before the last layer"),
        ("depth", "effective depth (2 points below the last layer)"),
    ):
        cells = [f"{np.mean([run[field] for run in runs]):.3f}" for runs in found.values()]
        print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
