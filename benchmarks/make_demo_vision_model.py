"""Make the vision demo: two small vision transformers for scikit-learn's digits, one trained as usual and one aligned.

    python benchmarks/make_demo_vision_model.py --out FOLDER

Both start from the same random weights and see the same images in the same order. Float16 weights are written to FOLDER and
FOLDER/aligned, with the accuracy of each block on held-out images. README.md of `tl_layersim/demo/vision` has the run.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import tl_layersim as lsim
from tl_layersim.demo import demo_images


def new_model(seed: int) -> ViTForImageClassification:
    """A vision transformer with random weights."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=192,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        # At this width the usual 0.02 takes several times as many steps.
        initializer_range=0.1,
    )
    return ViTForImageClassification(config)


def moved_by_a_pixel(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image at random by at most one pixel in each direction; the border is background."""
    bordered = torch.nn.functional.pad(pixels, (1, 1, 1, 1), value=-1.0)
    top, left = torch.randint(0, 3, (2, len(pixels)), generator=generator)
    cut = [image[:, y : y + 8, x : x + 8] for image, y, x in zip(bordered, top.tolist(), left.tolist(), strict=True)]
    return torch.stack(cut)


def make_pair() -> None:
    """Train and write both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--copies", type=int, default=4, help="shifted copies of each image")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train, test = demo_images("train"), demo_images("test")
    generator = torch.Generator().manual_seed(options.seed)
    copies = [moved_by_a_pixel(train["pixel_values"], generator) for _ in range(options.copies)]
    data = {"pixel_values": torch.cat(copies), "labels": train["labels"].repeat(options.copies)}
    for objective, folder in (("standard", options.out), ("aligned", options.out / "aligned")):
        folder.mkdir(parents=True, exist_ok=True)
        model = new_model(options.seed)
        training = lsim.AlignedTraining(
            objective=objective,
            steps=options.steps,
            lr=options.lr,
            warmup=options.steps // 10,
            weight_decay=0.05,
            eval_every=options.steps // 3,
            seed=options.seed,
        )
        result = lsim.finetune_aligned(model, lsim.Data(data, batch_size=64), training, eval_data=test)
        result.to_frame("accuracy").to_csv(folder / "accuracy.csv", index=False)
        model.half().save_pretrained(folder)
        print(objective, [round(value, 3) for value in result.accuracy[-1].tolist()])


if __name__ == "__main__":
    make_pair()
