"""Linear probes of a sentence encoder by ridge and method, as docs/probes.md has them.

python benchmarks/studies/real_probes.py FOLDER_OF_MODEL FOLDER_OF_SST2

Sentences of dev.tsv show which ridge is best for how many training samples, those of test.tsv the accuracy of each block.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tl_layersim as lsim
from tl_layersim.analyzers.linear_probe import LinearProbeResult

COUNTS, FIT, TEST = (200, 800, 3200), 800, 400
PROBES: dict[str, Callable[..., Any]] = {
    f"ridge {ridge}": partial(lsim.LinearProbe, ridge=ridge) for ridge in (0.001, 0.01, 0.1, 1.0)
}
PROBES["logistic"] = lsim.LogisticProbe


def sentences(path: Path, count: int) -> dict[str, list[Any]]:
    """The first texts of a file of SST-2, and their classes."""
    texts, labels = zip(*(line.split("\t") for line in path.read_text().splitlines()[1 : count + 1]), strict=True)
    return {"text": list(texts), "label": [int(label) for label in labels]}


def main(model_folder: str, data_folder: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(model_folder)
    warnings.simplefilter("error")

    def probe(count: int, part: str, kind: Callable[..., Any]) -> LinearProbeResult:
        data = lsim.Data(sentences(Path(data_folder) / "train.tsv", count), positions="mean", batch_size=64)
        held_out = sentences(Path(data_folder) / f"{part}.tsv", TEST)
        return lsim.linear_probe(model, data, kind(labels="data"), test_data=held_out)

    def show(name: str, numbers: list[float]) -> None:
        print(f"| {name} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |", flush=True)

    print("| dev.tsv, mean of all sites | " + " | ".join(f"{count} training samples" for count in COUNTS) + " |")
    for name, kind in PROBES.items():
        show(name, [float(probe(count, "dev", kind).accuracy.mean()) for count in COUNTS])
    print("| test.tsv | " + " | ".join(["embedding", *map(str, range(6)), "5, on training samples"]) + " |")
    for name, kind in PROBES.items():
        found = probe(FIT, "test", kind)
        show(name, [*found.accuracy.tolist(), float(found.train_accuracy[-1])])
    print(f"most frequent class: {float(found.majority):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
