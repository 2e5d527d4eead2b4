"""Tiny random DETRs, and images with the objects in them."""

from __future__ import annotations

import torch

BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8],
    "depths": [1],
    "layer_type": "basic",
    "out_features": ["stage1"],
}
CLASSES, QUERIES, LAYERS = 3, 4, 3
COUNTS = (1, 0, 3, 2)


def tiny_detr(auxiliary_loss: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0, **more):
    """A random DETR in evaluation mode, whose norms and biases are random too."""
    from transformers import DetrConfig, DetrForObjectDetection

    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": LAYERS, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 4}
    options = sizes | heads | {"num_queries": QUERIES, "num_labels": CLASSES, "auxiliary_loss": auxiliary_loss} | more
    torch.manual_seed(seed)
    model = DetrForObjectDetection(DetrConfig(backbone_config=BACKBONE, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def annotation(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Objects whose boxes lie inside the image."""
    size = 0.1 + 0.4 * torch.rand(count, 2, generator=generator)
    centre = size / 2 + (1 - size) * torch.rand(count, 2, generator=generator)
    return {"class_labels": torch.randint(0, CLASSES, (count,), generator=generator), "boxes": torch.cat([centre, size], 1)}


def scenes(counts=COUNTS, seed: int = 0) -> dict:
    """Images with these numbers of objects; the second is smaller than the others, and padded."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(len(counts), 3, 32, 32, generator=generator)
    mask = torch.ones(len(counts), 32, 32, dtype=torch.long)
    if len(counts) > 1:
        pixels[1, :, :, 20:], mask[1, :, 20:] = 0, 0
    return {"pixel_values": pixels, "pixel_mask": mask, "labels": [annotation(count, generator) for count in counts]}


def outputs_by_layer(model, data) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `layer row query class` and boxes `layer row query 4` by hooks of the tests' own, in float64.

    With auxiliary losses, transformers applies the norm twice to the last layer's output.
    """
    seen, handles = [], []
    for layer in model.model.decoder.layers:
        handles.append(layer.register_forward_hook(lambda _m, _a, out: seen.append(out.detach().double())))
    with torch.no_grad():
        model(pixel_values=data["pixel_values"].to(model.dtype), pixel_mask=data.get("pixel_mask"))
    for handle in handles:
        handle.remove()
    norm, last = model.model.decoder.layernorm, len(seen) - 1

    def normed(x):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        return scaled * norm.weight.double() + norm.bias.double()

    def linear(x, module):
        return x @ module.weight.double().T + module.bias.double()

    with torch.no_grad():
        hidden = [normed(x) for x in seen]
        if model.config.auxiliary_loss:
            hidden[last] = normed(hidden[last])
        logits = torch.stack([linear(x, model.class_labels_classifier) for x in hidden])
        boxes = []
        for x in hidden:
            for module in model.bbox_predictor.layers[:-1]:
                x = linear(x, module).clamp(min=0)
            boxes.append(1 / (1 + (-linear(x, model.bbox_predictor.layers[-1])).exp()))
    return logits, torch.stack(boxes)
