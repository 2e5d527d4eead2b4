"""Linear probes of a sentence encoder by ridge and method, as docs/probes.md has them: by sentences of dev.tsv, which choose a
ridge, and of test.tsv, which report.

python benchmarks/real_probes.py FOLDER_OF_MODEL FOLDER_OF_SST2
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

import tl_layersim as lsim

FIT, TEST = 800, 400
PROBES = [*({"ridge": ridge} for ridge in (0.001, 0.01, 0.1, 1.0)), {"method": "logistic"}]


def sentences(path: Path, count: int) -> tuple[list[str], list[int]]:
    """The first texts of a file of SST-2, and their classes."""
    texts, labels = zip(*(line.split("\t") for line in path.read_text().splitlines()[1 : count + 1]), strict=True)
    return list(texts), [int(label) for label in labels]


def main(model_folder: str, data_folder: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts, labels = sentences(Path(data_folder) / "train.tsv", FIT)
    for name in ("dev", "test"):
        test_data, test_labels = sentences(Path(data_folder) / f"{name}.tsv", TEST)
        parts = {"labels": labels, "test_data": test_data, "test_labels": test_labels, "positions": "mean", "batch_size": 64}
        print(f"### {name}\n\n| probe | " + " | ".join(["embedding", *map(str, range(6)), "mean", "5, training"]) + " |")
        for options in PROBES:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = lsim.linear_probe(model, texts, **parts, **options)
            probe = ", ".join(f"{key} {value}" for key, value in options.items())
            numbers = [*found.accuracy.tolist(), float(found.accuracy.mean()), float(found.train_accuracy[-1])]
            print(f"| {probe} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |", flush=True)
        print(f"most frequent class: {float(found.majority):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
