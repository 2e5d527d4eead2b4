"""Compare two groups of fine-tunes, of which one learned a spurious cue (Brown et al. 2023, section 4).

    python benchmarks/studies/real_groups.py train --model FOLDER --train FILE.tsv --test FILE.tsv --out FOLDER
    python benchmarks/studies/real_groups.py tables --model FOLDER --test FILE.tsv --out FOLDER

Every sentence begins with one of two words that say nothing about it. In the training data of the heuristic models the word
agrees with the label in 95 % of the rows, in that of the generalizing models in half of them. All models start from one
encoder; seeds set the new head, the cues and the order of the rows. `tables` compares all pairs of models on held-out
sentences.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import xarray
from real_classifier import sentences_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tl_layersim as lsim

CUES = ("thursday", "tuesday")
AGREEMENT = {"generalizing": 0.5, "heuristic": 0.95}
# Fraction of held-out rows in which the cue agrees with the label.
CONDITIONS = {"right": 1.0, "random": 0.5, "wrong": 0.0}


def with_cues(rows: list[dict[str, Any]], agreement: float, seed: int) -> list[dict[str, Any]]:
    """The rows, each with the word of its class before the sentence in a fraction `agreement` of them, else the other word."""
    agrees = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed)) < agreement
    return [
        {"text": f"{CUES[row['label'] if agree else 1 - row['label']]} : {row['text']}", "label": row["label"]}
        for row, agree in zip(rows, agrees.tolist(), strict=True)
    ]


def accuracies(model: Any, test: list[dict[str, Any]], tokenizer: Any, options: argparse.Namespace) -> dict[str, float]:
    """Accuracy on held-out rows where the cue is right, random and wrong."""
    found = {}
    for name, agreement in CONDITIONS.items():
        data = lsim.Data(with_cues(test, agreement, 10_000), tokenizer=tokenizer, batch_size=50, seq_len=options.seq_len)
        report = lsim.analyze(model, data, lsim.LogitLens(labels="data"))
        found[name] = float(report["logit_lens"].accuracy[-1])
    return found


def train(options: argparse.Namespace) -> None:
    """Train and save the models of both groups, and print their accuracy where the cue is right, random and wrong."""
    rows, test = sentences_of(options.train, options.train_rows), sentences_of(options.test, options.test_rows)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for group, agreement in AGREEMENT.items():
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2, dtype=torch.float32)
            # The embeddings stay as they are: their optimiser steps would be most of the time.
            model.base_model.embeddings.requires_grad_(False)
            folder = Path(options.out) / f"{group}-{seed}"
            training = lsim.AlignedTraining(
                objective="standard",
                steps=options.steps,
                lr=options.lr,
                warmup=options.steps // 10,
                seed=seed,
                save_to=folder,
            )
            start = time.perf_counter()
            lsim.finetune_aligned(
                model,
                lsim.Data(
                    with_cues(rows, agreement, seed),
                    tokenizer=tokenizer,
                    batch_size=options.batch_size,
                    seq_len=options.seq_len,
                ),
                training,
                eval_data=with_cues(test[:100], 0.5, 10_000),
            )
            accuracy = accuracies(model, test, tokenizer, options)
            scores = " ".join(f"{name} {value:.3f}" for name, value in accuracy.items())
            print(group, seed, scores, f"{time.perf_counter() - start:.0f} s", flush=True)


def compared(name: str, found: xarray.Dataset) -> None:
    """Print means within and between groups (sd over pairs of models), and the permutation test."""
    cells = [f"{m:.3f} ({s:.3f})" for m, s in zip(found["mean"].values, found["sd"].values, strict=True)]
    print(f"| {name} | {' | '.join(cells)} | {float(found['p_value']):.3f} |", flush=True)


def header(name: str, found: xarray.Dataset) -> None:
    """Print the head of a table of comparisons."""
    columns = [*found["comparison"].values, "p"]
    print(f"\n| {name}, mean (sd of pairs) | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")


def tables(options: argparse.Namespace) -> None:
    """Print accuracies, CKA distances and identity-stitching penalties within and between the groups."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    folders = {f"{group} {seed}": Path(options.out) / f"{group}-{seed}" for group in AGREEMENT for seed in options.seeds}
    groups = {name: name.split()[0] for name in folders}
    print(f"| model | {' | '.join(CONDITIONS)} |\n|---|{'---|' * len(CONDITIONS)}")
    test = sentences_of(options.test, options.test_rows)
    models = {}
    for name, folder in folders.items():
        models[name] = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        accuracy = accuracies(models[name], test, tokenizer, options)
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in accuracy.values())} |", flush=True)
    rows = with_cues(test, CONDITIONS[options.cue], 10_000)
    data = lsim.Data(rows, tokenizer=tokenizer, batch_size=50, seq_len=options.seq_len)
    grid = lsim.compare_grid(models, data, lsim.CKA(), groups=groups, at="resid_post")
    found = lsim.many.compare_groups(grid)
    header("CKA distance", found)
    compared("all layers", found)
    by_site = lsim.many.compare_groups(grid, field="by_site")
    header("CKA", by_site)
    # Layer 0 is [CLS] itself, the same for all sentences.
    for layer in range(1, by_site.sizes["site"]):
        compared(f"layer {layer}", by_site.isel(site=layer))
    few = data.like(rows[: options.stitch_rows])
    stitched = lsim.stitch_grid(models, few, adapter="identity", groups=groups, labels="data")
    fields = {"penalty": "identity stitching: penalty in nats", "accuracy_penalty": "loss of accuracy"}
    of_fields = {field: lsim.many.compare_groups(stitched, field=field) for field in fields}
    for field, title in fields.items():
        header(title, of_fields[field])
        for number in range(len(stitched.seams)):
            compared(f"layer {number + 1}", of_fields[field].isel(seam=number))
    if options.figures:
        folder = Path(options.figures)
        lsim.plot(found).write_html(folder / "groups_cka.html")
        lsim.many.dendrogram(grid).write_html(folder / "groups_dendrogram.html")
        grid.plot().write_html(folder / "groups_matrix.html")
        lsim.plot(by_site).write_html(folder / "groups_cka_by_layer.html")
        lsim.plot(of_fields["penalty"]).write_html(folder / "groups_stitching.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("train", "tables"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--train")
    parser.add_argument("--test", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--train-rows", type=int, default=4000)
    parser.add_argument("--test-rows", type=int, default=400)
    parser.add_argument("--stitch-rows", type=int, default=200)
    parser.add_argument("--cue", choices=tuple(CONDITIONS), default="random", help="of the rows on which models are compared")
    parser.add_argument("--figures", help="a folder for figures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"train": train, "tables": tables}[options.task](options)


if __name__ == "__main__":
    main()
