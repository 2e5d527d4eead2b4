"""A DETR with and without auxiliary losses: class accuracy and box error of every decoder layer (Jiang et al. 2024, figure 18).

Trains two tiny DETRs on images of coloured rectangles, one with the loss of its last layer alone and one with transformers'
auxiliary losses, and measures every decoder layer on held-out images. Writes figures to examples/out. A minute and a half on
one core.
"""

from __future__ import annotations

from pathlib import Path

import pandas
import plotly.express as px
import torch
from transformers import DetrConfig, DetrForObjectDetection

from tl_layersim.vision import detection_by_layer

SIZE, CLASSES, BATCH, STEPS = 24, 3, 32, 1000
COLOURS = torch.eye(CLASSES)
BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [32],
    "depths": [1],
    "layer_type": "basic",
    "out_features": ["stage1"],
}
SIZES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}


def images(count: int, generator: torch.Generator) -> dict:
    """Images of one or two coloured rectangles on noise, with their classes and boxes."""
    pixels, labels = 0.1 * torch.randn(count, 3, SIZE, SIZE, generator=generator), []
    for image in pixels:
        number = int(torch.randint(1, 3, (), generator=generator))
        classes = torch.randint(0, CLASSES, (number,), generator=generator)
        boxes = []
        for colour in COLOURS[classes]:
            w, h = torch.randint(6, 13, (2,), generator=generator).tolist()
            x, y = (int(torch.randint(0, SIZE - side + 1, (), generator=generator)) for side in (w, h))
            image[:, y : y + h, x : x + w] = colour[:, None, None]
            boxes.append([(x + w / 2) / SIZE, (y + h / 2) / SIZE, w / SIZE, h / SIZE])
        labels.append({"class_labels": classes, "boxes": torch.tensor(boxes)})
    return {"pixel_values": pixels, "labels": labels}


def trained(auxiliary_loss: bool) -> DetrForObjectDetection:
    """A DETR that is trained on new images in every step."""
    torch.manual_seed(0)
    options = SIZES | HEADS | {"num_queries": 6, "num_labels": CLASSES, "dropout": 0.0}
    model = DetrForObjectDetection(DetrConfig(backbone_config=BACKBONE, auxiliary_loss=auxiliary_loss, **options))
    model.model.unfreeze_backbone()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**images(BATCH, generator)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def main() -> None:
    held_out, tables = images(256, torch.Generator().manual_seed(2)), {}
    for name, auxiliary_loss in (("loss of the last layer", False), ("auxiliary losses", True)):
        tables[name] = detection_by_layer(trained(auxiliary_loss), held_out).to_frame()
        print(name, tables[name].round(3).to_string(index=False), sep="\n")
    both = pandas.concat(tables, names=["training"]).reset_index(level="training")
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    for field in ("accuracy", "box_l1", "giou"):
        px.line(both, x="layer", y=field, color="training", markers=True).write_html(out / f"detection_{field}.html")


if __name__ == "__main__":
    main()
