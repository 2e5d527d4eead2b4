"""Train small vision transformers on CIFAR-10 with the four objectives of `finetune_aligned`, and compare their layers.

    python benchmarks/studies/real_vit.py train --train train.npz --test test.npz --out FOLDER
    python benchmarks/studies/real_vit.py tables --test test.npz --out FOLDER
    python benchmarks/studies/real_vit.py checkpoints --test test.npz --out FOLDER

The files hold `x` (uint8, image 32 32 3) and `y`. The model has the proportions of DeiT-tiny (heads of a third of the width,
a feed-forward of four widths), scaled to 32 x 32 images, and starts from random weights. Every arm starts from the same weights
and sees the same augmented images in the same order. `train` saves each arm after some of its steps; `tables` prints the layers
of the trained models, `checkpoints` the coupling of blocks and the paths of [CLS] after each of the saved steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import ViTConfig, ViTForImageClassification

import tl_layersim as lsim

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARMS: dict[str, dict[str, Any]] = {
    "standard": {"objective": "standard"},
    "aligned": {"objective": "aligned"},
    "cosine-reg": {"objective": "cosine-reg", "cosine_over": "attended"},
    "multi-head": {"objective": "multi-head"},
}
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def images_of(path: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images `image 3 32 32` in -1 to 1, and their classes."""
    found = np.load(path)
    pixels = torch.from_numpy(found["x"][:count]).permute(0, 3, 1, 2).float()
    return pixels / 127.5 - 1, torch.from_numpy(found["y"][:count]).long()


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image flipped at random, and cut at random out of itself with a border of 4."""
    count, _, height, width = pixels.shape
    flip = torch.rand(count, generator=generator) < 0.5
    bordered = torch.nn.functional.pad(
        torch.where(flip[:, None, None, None], pixels.flip(-1), pixels), (4, 4, 4, 4), value=-1.0
    )
    top, left = torch.randint(0, 9, (2, count), generator=generator)
    cut = torch.stack([image[:, y : y + height, x : x + width] for image, y, x in zip(bordered, top, left, strict=True)])
    return cut.contiguous()


def new_model(options: argparse.Namespace) -> ViTForImageClassification:
    """A vision transformer with random weights."""
    torch.manual_seed(options.seed)
    config = ViTConfig(
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=3,
        intermediate_size=4 * options.width,
        image_size=32,
        patch_size=options.patch,
        num_labels=len(CLASSES),
        id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)},
    )
    return ViTForImageClassification(config)


@contextmanager
def saved_after(steps: list[int], model: ViTForImageClassification, folder: Path) -> Iterator[None]:
    """A context that saves the model after some steps of the optimiser, step 0 included."""
    done = 0

    def save(*_: object) -> None:
        nonlocal done
        done += 1
        if done in steps:
            model.save_pretrained(folder / f"step{done}")

    model.save_pretrained(folder / "step0")
    handle = register_optimizer_step_post_hook(save)
    try:
        yield
    finally:
        handle.remove()


def train(options: argparse.Namespace) -> None:
    """Train each arm, and save it."""
    pixels, labels = images_of(options.train)
    copies = min(options.copies, -(-options.steps * options.batch_size // len(pixels)))
    generator = torch.Generator().manual_seed(options.seed)
    data = {
        "pixel_values": torch.cat([augmented(pixels, generator) for _ in range(copies)]),
        "labels": labels.repeat(copies),
    }
    test_pixels, test_labels = images_of(options.test, 500)
    held_out = {"pixel_values": test_pixels, "labels": test_labels}
    for arm in options.arms:
        folder = Path(options.out) / f"{arm}-seed{options.seed}"
        model = new_model(options)
        training = lsim.AlignedTraining(
            steps=options.steps,
            lr=options.lr,
            warmup=options.steps // 10,
            weight_decay=0.05,
            seed=options.seed,
            save_to=folder / "final",
            **ARMS[arm],
        )
        start = time.perf_counter()
        with saved_after([options.steps * part // 16 for part in (1, 2, 4, 6, 8, 10, 12, 14, 16)], model, folder):
            result = lsim.finetune_aligned(model, lsim.Data(data, batch_size=options.batch_size), training, eval_data=held_out)
        seconds = time.perf_counter() - start
        record = {"seconds": seconds, "accuracy": result.accuracy.tolist(), "loss": result.loss.tolist(), **vars(options)}
        (folder / "record.json").write_text(json.dumps(record))
        print(arm, f"{seconds:.0f} s", " ".join(f"{x:.3f}" for x in result.accuracy[-1].tolist()), flush=True)


def trained_arms(options: argparse.Namespace) -> dict[str, Path]:
    """The folders of the arms that are trained, by name of the arm."""
    folders = {arm: Path(options.out) / f"{arm}-seed{options.seed}" for arm in options.arms}
    return {arm: folder for arm, folder in folders.items() if (folder / "final" / "config.json").exists()}


def loaded(folder: Path) -> ViTForImageClassification:
    """A saved model."""
    return ViTForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()


def row(name: str, values: Iterable[float], digits: int = 3) -> None:
    """Print a line of a table."""
    cells = [f"{value:.{digits}f}" if isinstance(value, float) else str(value) for value in values]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def header(name: str, columns: Iterable[object]) -> None:
    """Print the head of a table."""
    names = [str(column) for column in columns]
    print(f"\n| {name} | {' | '.join(names)} |\n|---|{'---|' * len(names)}")


def tables(options: argparse.Namespace) -> None:
    """Print what the layers of each arm predict on test images, and how they relate to the last."""
    pixels, labels = images_of(options.test, options.test_images)
    data = {"pixel_values": pixels, "labels": labels}
    reports: dict[str, Any] = {}
    probes: dict[str, Any] = {}
    for arm, folder in trained_arms(options).items():
        model = loaded(folder / "final")
        readings = {arm: {}}
        if (folder / "final" / "heads.safetensors").exists():
            readings = {f"{arm}, own heads": {"heads": folder / "final" / "heads.safetensors"}, f"{arm}, last head": {}}
        for name, heads in readings.items():
            analyzers = [
                lsim.LogitLens(labels="data", **heads),
                lsim.Saturation(**heads),
                lsim.ExitCurve(thresholds=(*THRESHOLDS, 1.0), labels="data", **heads),
                lsim.Cosine(),
                lsim.CKA(),
                lsim.NeuralCollapse(labels="data", pool="head"),
            ]
            reports[name] = lsim.analyze(model, lsim.Data(data, batch_size=100, positions="first"), analyzers)
        probes[arm] = lsim.linear_probe(model, lsim.Data(data, batch_size=100, positions="first"))
    # Before the first block, [CLS] is the same for all images.
    blocks = range(1, options.layers + 1)
    header("accuracy after block", blocks)
    for name, report in reports.items():
        row(name, report["logit_lens"].accuracy.tolist())
    header("accuracy of a ridge probe of [CLS]", blocks)
    for name, probe in probes.items():
        row(name, probe.accuracy[1:].tolist())
    header("COS to the last block", blocks)
    for name, report in reports.items():
        row(name, report["cosine"].values[1:, -1].tolist())
    header("CKA to the last block", blocks)
    for name, report in reports.items():
        row(name, report["cka"].values[1:, -1].tolist())
    header("saturated at or before block", blocks)
    for name, report in reports.items():
        row(name, report["saturation"].cumulative.tolist())
    header("NC1", blocks)
    for name, report in reports.items():
        row(name, report["neural_collapse"].nc1[1:].tolist(), 1)
    header("exit threshold", (*THRESHOLDS, 1))
    for name, report in reports.items():
        curve = report["exit_curve"]
        row(f"{name}: accuracy", curve.accuracy.tolist())
        row(f"{name}: agreement", curve.agreement.tolist())
        row(f"{name}: speed-up in blocks", curve.speedup.tolist(), 2)
    header("", ("accuracy", "blocks for it less 2 points", "blocks for it less 5 points"))
    for name, report in reports.items():
        lens = report["logit_lens"]
        last = float(lens.accuracy[-1])
        depths = [lens.effective_depth(min(1.0, 1 - last + below)) for below in (0.02, 0.05)]
        row(name, (last, *depths))


def checkpoints(options: argparse.Namespace) -> None:
    """Print accuracy, coupling of blocks and line-shape score after each of the saved steps of an arm."""
    pixels, labels = images_of(options.test, 1000)
    data = {"pixel_values": pixels, "labels": labels}
    few = {"pixel_values": pixels[: options.prompts], "labels": labels[: options.prompts]}
    for arm, folder in trained_arms(options).items():
        names = ("accuracy", "coupling", "of neighbours", "of random vectors", "LSS", "expodistance", "norm of [CLS]")
        header(f"{arm}, steps", names)
        steps = sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))
        for step in steps:
            model = loaded(folder / f"step{step}")
            lens = lsim.analyze(model, lsim.Data(data, batch_size=100), [lsim.LogitLens(labels="data"), lsim.Trajectory()])
            prompts = lsim.Data(few, batch_size=8)
            coupling = lsim.analyze(model, prompts, lsim.BlockCoupling(k=10, tokens=(0,)))["block_coupling"]
            path = lens["trajectory"]
            near = coupling.coupling.diagonal(1).tolist() + coupling.coupling.diagonal(-1).tolist()
            row(
                str(step),
                (
                    float(lens["logit_lens"].accuracy[-1]),
                    coupling.mean(),
                    float(np.mean(near)),
                    coupling.mean("null_coupling"),
                    float(path.lss_mean),
                    float(path.expodistance_quantiles[path.quantiles.index(0.5)]),
                    float(path.norm[-1]),
                ),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("train", "tables", "checkpoints"))
    parser.add_argument("--train")
    parser.add_argument("--test", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--patch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--copies", type=int, default=8, help="augmented copies of each image")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-images", type=int, default=5000)
    parser.add_argument("--prompts", type=int, default=16, help="images whose Jacobians are computed")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"train": train, "tables": tables, "checkpoints": checkpoints}[options.task](options)


if __name__ == "__main__":
    main()
