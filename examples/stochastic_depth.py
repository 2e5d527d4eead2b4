"""Coupling of the blocks of small ViTs at several rates of stochastic depth (Aubry et al. 2025, section 3.4, appendix A.7).

Stochastic depth, mixup and a cosine schedule in Hugging Face's Trainer; the paper's model is larger and trains for 500 epochs.

python examples/stochastic_depth.py                      # scikit-learn's digits
python examples/stochastic_depth.py train.npz test.npz   # CIFAR-10: `x` (uint8, image 32 32 3) and `y`
"""

import sys
import tempfile

import numpy as np
import torch
from torch.nn.functional import cross_entropy, one_hot
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import tl_layersim as lsim
from tl_layersim.demo import demo_images

RATES = (0.0, 0.15, 0.3)
STEPS = 150


class DropPath(torch.nn.Module):
    """Drops a branch of a block for each image with a probability, in training only."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.rate
        return branch * kept / (1 - self.rate)


def images() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if len(sys.argv) < 3:
        return demo_images("train"), demo_images()
    found = [np.load(path) for path in sys.argv[1:3]]
    pixels = [torch.from_numpy(one["x"]).permute(0, 3, 1, 2).float() / 127.5 - 1 for one in found]
    return tuple({"pixel_values": x, "labels": torch.from_numpy(one["y"]).long()} for x, one in zip(pixels, found, strict=True))


def mixup(rows: list[dict[str, torch.Tensor]], alpha: float = 0.8) -> dict[str, torch.Tensor]:
    pixels = torch.stack([row["pixel_values"] for row in rows])
    labels = one_hot(torch.stack([row["labels"] for row in rows]), 10).float()
    share, order = torch.distributions.Beta(alpha, alpha).sample(), torch.randperm(len(rows))
    return {name: share * x + (1 - share) * x[order] for name, x in (("pixel_values", pixels), ("labels", labels))}


def trained(data: dict[str, torch.Tensor], rate: float) -> ViTForImageClassification:
    channels, size = data["pixel_values"].shape[1:3]
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=192,
        image_size=size,
        patch_size=size // 4,
        num_channels=channels,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    for number, block in enumerate(model.vit.layers):
        # As in DeiT, the rate rises with depth, and applies to the attention and to the MLP.
        block.dropout = DropPath(rate * number / (len(model.vit.layers) - 1))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=128,
            learning_rate=5e-4,
            weight_decay=0.05,
            lr_scheduler_type="cosine",
            warmup_steps=STEPS * 30 // 500,
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = [{name: column[i] for name, column in data.items()} for i in range(len(data["labels"]))]
        Trainer(
            model,
            settings,
            train_dataset=rows,
            data_collator=mixup,
            compute_loss_func=lambda outputs, labels, **_: cross_entropy(outputs.logits, labels),
        ).train()
    return model.cpu().eval()


train, test = images()
coupling, accuracy = {}, {}
for rate in RATES:
    model = trained(train, rate)
    lens = lsim.analyze(model, lsim.Data(test, batch_size=100), lsim.LogitLens(labels="data"))["logit_lens"]
    few = lsim.Data({"pixel_values": test["pixel_values"][:16]}, batch_size=8)
    found = lsim.analyze(model, few, lsim.BlockCoupling(tokens=(0,)))["block_coupling"]
    name = f"rate {rate:g}"
    coupling[name], accuracy[name] = found.mean(), float(lens.accuracy[-1])
    chance = found.mean("null_coupling")
    print(f"{name}: coupling {coupling[name]:.3f}, random vectors {chance:.3f}, accuracy {accuracy[name]:.3f}")
print(lsim.many.relate(coupling, accuracy))
