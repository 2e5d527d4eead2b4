"""`pixel_values` of three axes: one image, or rows of patches, by what the model takes."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim

from ..models.own_models import AddingBlock

COSINE = lsim.Cosine(center="none")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# Rows and columns of patches of each image.
SHAPES = torch.tensor([[4, 4], [2, 4], [3, 3], [2, 2]])


class Patches(torch.nn.Module):
    """Blocks that read the vectors of patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(AddingBlock(16) for _ in range(2))

    def forward(self, pixel_values):
        for layer in self.layers:
            pixel_values = layer(pixel_values)
        return pixel_values


def opened():
    return lsim.open_model(Patches().eval(), layers=["layers.0", "layers.1"])


def siglip2():
    torch.manual_seed(0)
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SIZES, patch_size=4, num_patches=16)).eval()


def vit():
    torch.manual_seed(0)
    return transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=16, patch_size=8)).eval()


def padded_patches():
    counts = SHAPES.prod(1)
    return {
        "pixel_values": torch.randn(4, 16, 48, generator=torch.Generator().manual_seed(0)),
        "pixel_attention_mask": (torch.arange(16) < counts[:, None]).long(),
        "spatial_shapes": SHAPES,
    }


@pytest.mark.parametrize("as_list", [False, True], ids=["tensor", "list"])
def test_rows_of_patches_are_rows(as_list):
    x = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        last = Patches()(x)
    expected = torch.nn.functional.cosine_similarity(x.double(), last.double(), dim=-1).mean()

    result = lsim.analyze(opened(), lsim.Data({"pixel_values": list(x) if as_list else x}, positions="all"), COSINE)["cosine"]

    assert (result.provenance.sequences, result.provenance.tokens) == (8, 40)
    assert float(result.values[0, -1]) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_patches_with_padding_are_measured_without_it(size):
    model = siglip2()
    data = padded_patches()
    stream = [[], []]
    blocks = [module for name, module in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
    handles = [
        blocks[0].register_forward_pre_hook(lambda _m, args: stream[0].append(args[0][0])),
        blocks[1].register_forward_hook(lambda _m, _args, output: stream[1].append(output[0])),
    ]
    with torch.no_grad():
        for row, count in enumerate(SHAPES.prod(1).tolist()):
            cut = {name: values[row : row + 1] for name, values in data.items()}
            model(**cut | {name: cut[name][:, :count] for name in ("pixel_values", "pixel_attention_mask")})
    for handle in handles:
        handle.remove()
    x, y = (torch.cat(parts).double() for parts in stream)
    expected = torch.nn.functional.cosine_similarity(x, y, dim=-1).mean()

    result = lsim.analyze(model, lsim.Data(data, batch_size=size), COSINE)["cosine"]

    assert result.provenance.tokens == int(SHAPES.prod(1).sum())
    assert float(result.values[0, -1]) == pytest.approx(float(expected), abs=1e-6)


def test_a_mask_of_ones_may_be_left_out():
    data = {"pixel_values": torch.randn(3, 16, 48), "spatial_shapes": SHAPES[:1].expand(3, 2)}
    assert lsim.analyze(siglip2(), data, COSINE)["cosine"].provenance.tokens == 48


@pytest.mark.parametrize(("shape", "rows"), [((3, 16, 16), 1), ((5, 3, 16, 16), 5)])
def test_images_are_images(shape, rows):
    assert lsim.analyze(vit(), {"pixel_values": torch.randn(shape)}, COSINE)["cosine"].provenance.sequences == rows


REFUSED = {
    "images for a model of patches": (siglip2, (2, 3, 16, 16), "2 x 3 x 16 x 16"),
    "patches for a model of images": (vit, (8, 5, 16), "8 x 5 x 16"),
    "either": (opened, (3, 5, 16), "3 x 5 x 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_axes_are_refused_with_the_column_and_its_shape(case):
    make, shape, named = REFUSED[case]
    with pytest.raises(lsim.LayersimError, match=rf"`pixel_values`.*{named}"):
        lsim.analyze(make(), {"pixel_values": torch.randn(shape)}, COSINE)
