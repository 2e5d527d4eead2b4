"""Feature maps of convolutions, through every source, against float64 oracles written from the maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf

import tl_layersim as lsim
from tl_layersim.architectures.hook_points import Channels, channel_axis, channels_at, positions_of, to_positions

from .. import oracles
from ..models.wrapped_models import nnsight
from ..running.options import called

PIXELS = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SOURCES = {
    "module": (lambda m: m, {}),
    "NNsight": (nnsight, {}),
    "NNsight remote=local": (nnsight, {"remote": "local"}),
}
CKA = lsim.CKA(estimator="exact")


class Net(torch.nn.Module):
    """Two convolutions of one size, one of another, and a linear map; every module is named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Conv2d(3, 5, 3, padding=1)
        self.body = torch.nn.Sequential(torch.nn.Conv2d(5, 5, 3, padding=1), torch.nn.GELU(), torch.nn.MaxPool2d(4))
        self.wide = torch.nn.Conv2d(5, 7, 2, stride=2)
        self.classes = torch.nn.Linear(7, 3)
        self.double().eval()

    def forward(self, pixel_values):
        x = self.wide(self.body(self.stem(pixel_values)))
        return self.classes(x.mean((2, 3)))


def resnet():
    torch.manual_seed(0)
    config = hf.ResNetConfig(embedding_size=5, hidden_sizes=[6, 9], depths=[1, 2], layer_type="basic")
    return hf.ResNetModel(config).eval().double()


def convnext():
    torch.manual_seed(0)
    return hf.ConvNextModel(hf.ConvNextConfig(num_stages=2, hidden_sizes=[10, 12], depths=[1, 1])).eval().double()


def maps(model, paths) -> list[torch.Tensor]:
    """The output of each module, by hooks of the test's own."""
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(lambda _m, _a, out, path=path: outputs.update({path: out}))
        for path in paths
    ]
    with torch.no_grad():
        model(PIXELS)
    for hook in hooks:
        hook.remove()
    return [outputs[path] for path in paths]


def places(map_of: torch.Tensor) -> np.ndarray:
    """One vector of channels for each image, row and column, counted out by hand."""
    batch, _, height, width = map_of.shape
    vectors = [map_of[b, :, h, w] for b in range(batch) for h in range(height) for w in range(width)]
    return torch.stack(vectors).numpy()


def values(report) -> np.ndarray:
    return report["cka"].values.numpy()


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("source", SOURCES)
def test_places_of_a_map_are_positions(source):
    model = Net()
    at = ["stem", "body.0", "body.1"]
    wrap, options = SOURCES[source]
    stack = np.stack([places(x) for x in maps(model, at)])
    report = called(lsim.analyze, wrap(model), PIXELS, [lsim.Cosine(center="none"), CKA], at=at, batch_size=4, **options)
    expected = oracles.oracle_cosine([stack], center="none")["values"]

    np.testing.assert_allclose(report["cosine"].values, expected, atol=1e-12)
    assert report["cosine"].layers == tuple(at)
    assert report["cosine"].provenance.tokens == 6 * 16 * 16


@pytest.mark.parametrize("source", ["module", "NNsight"])
def test_maps_of_different_sizes_are_compared_by_their_means(source):
    model = Net()
    at = ["stem", "body.2", "wide", "classes"]
    wrap, options = SOURCES[source]
    outputs = maps(model, at)
    means = [x.mean((2, 3)).numpy() for x in outputs[:3]] + [outputs[3].numpy()]

    one_minibatch = called(
        lsim.analyze, wrap(model), PIXELS, lsim.CKA(minibatch=6), at=at, positions="mean", batch_size=6, **options
    )
    report = called(lsim.analyze, wrap(model), PIXELS, CKA, at=at, positions="mean", batch_size=4, **options)

    np.testing.assert_allclose(values(report), oracles_cka(means), atol=1e-9)
    assert one_minibatch["cka"].values.shape == (4, 4)
    assert report["cka"].provenance.tokens == 6 * 256
    with pytest.raises(lsim.LayersimError, match=r"body\.2 are not batch x pos(.|\n)*positions='mean'"):
        called(lsim.analyze, wrap(model), PIXELS, CKA, at=at, **options)
    with pytest.raises(lsim.LayersimError, match=r"are not batch x pos"):
        called(lsim.analyze, wrap(model), PIXELS, CKA, at=at, positions="mean", skip_first=1, **options)


def oracles_cka(sites: list[np.ndarray]) -> np.ndarray:
    return np.array([[oracles.oracle_cka([x[None]], [y[None]], exact=True)["values"][0, 0] for y in sites] for x in sites])


@pytest.mark.parametrize("make", [resnet, convnext])
@pytest.mark.parametrize("source", ["module", "NNsight"])
def test_stages_of_models_of_convolutions(make, source):
    model = make()
    at = ["encoder.stages.0", "encoder.stages.1"]
    wrap, options = SOURCES[source]
    means = [x.mean((2, 3)).numpy() for x in maps(model, at)]

    report = called(lsim.analyze, wrap(model), PIXELS, CKA, at=at, positions="mean", **options)

    np.testing.assert_allclose(values(report), oracles_cka(means), atol=1e-9)


def test_channels_last_maps_inside_a_convnext():
    model = convnext()
    at = ["encoder.stages.0.layers.0.pwconv1", "encoder.stages.0.layers.0.act"]
    outputs = maps(model, at)
    assert outputs[0].shape == (6, 4, 4, 40)

    stack = np.stack([x.reshape(-1, 40).numpy() for x in outputs])
    result = lsim.analyze(model, lsim.Data(PIXELS, positions="all"), lsim.Cosine(center="none"), at=at)["cosine"]
    np.testing.assert_allclose(result.values, oracles.oracle_cosine([stack], center="none")["values"], atol=1e-12)


def test_forward_passes_of_a_loop():
    model = Net()
    at = ["stem", "body.1"]
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none"), at=at) as probe:
        model(PIXELS[:4])
        model(PIXELS[4:])
    stack = np.stack([places(x) for x in maps(model, at)])
    result = probe.results()["cosine"]

    np.testing.assert_allclose(result.values, oracles.oracle_cosine([stack], center="none")["values"], atol=1e-12)

    with torch.no_grad(), lsim.attach(model, lsim.CKA(), at=["stem", "wide", "classes"], positions="mean") as probe:
        model(PIXELS)
    *outputs, last = maps(model, ["stem", "wide", "classes"])
    means = [*(x.mean((2, 3)).numpy() for x in outputs), last.numpy()]

    np.testing.assert_allclose(values(probe.results()), oracles_cka(means), atol=1e-9)


def test_two_kinds_of_models_are_compared_on_the_same_images():
    a = Net()
    b = resnet()
    [first], [second] = maps(a, ["stem"]), maps(b, ["encoder.stages.1"])
    pair = lsim.open_model(a, layers=["stem"]), lsim.open_model(b, layers=["encoder.stages.1"])
    at = ("stem", "encoder.stages.1").__contains__
    result = lsim.compare(*pair, lsim.Data(PIXELS, positions="mean"), CKA, at=at)
    expected = oracles.oracle_cka([first.mean((2, 3)).numpy()[None]], [second.mean((2, 3)).numpy()[None]], exact=True)

    np.testing.assert_allclose(result.values, expected["values"], atol=1e-9)


def test_positions_are_in_the_order_of_rows_of_the_map():
    x = torch.randn(2, 3, 4, 5)
    for feature_map, channels in ((x, Channels(1)), (x.movedim(1, -1), Channels(-1))):
        np.testing.assert_array_equal(to_positions(feature_map, channels).flatten(0, 1), places(x))
        assert positions_of(feature_map.shape, channels) == 20
    assert positions_of((2, 7)) == positions_of((2, 7), Channels(1)) == 1
    assert positions_of((2, 7, 3)) == 7


def test_what_modules_tell_of_channels():
    net = Net()
    text = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert channels_at(net, "stem") == channels_at(net, "body.1") == channels_at(net, "body.2") == Channels(1)
    assert channels_at(net, "classes") == Channels(-1)
    assert channels_at(net, "body") == Channels(None, (5,), ())
    assert channels_at(text, "0") is None

    channels = Channels(None, (8, 16), (16,))
    assert channel_axis((2, 8, 4, 4), channels, "x") == 1
    assert channel_axis((2, 4, 4, 16), channels, "x") == -1
    for shape in ((2, 8, 4, 16), (2, 5, 4, 4)):
        with pytest.raises(lsim.LayersimError, match=r" here\b.*\b4 x (16|4)\b"):
            channel_axis(shape, channels, "here")
    # A norm over whole maps, of all their axes.
    assert channels_at(torch.nn.Sequential(net.stem, torch.nn.LayerNorm((5, 16, 16))), "1") == Channels(1)
    # Either axis of patches may be that of a convolution.
    with pytest.raises(lsim.LayersimError, match="channel axis"):
        channel_axis((2, 16, 8), Channels(None, (8, 16)), "here")
    # Patches that a module makes of a map, in either order.
    assert channel_axis((2, 49, 16), channels, "x") == -1
    assert channel_axis((2, 16, 49), channels, "x") == 1


def test_a_vision_transformer_is_read_as_before():
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=16, patch_size=4
    )
    torch.manual_seed(0)
    model = hf.ViTModel(config).eval().double()
    at = ["embeddings.patch_embeddings.projection", "embeddings", "layers.0", "layers.1"]
    patches = maps(model, at[:1])
    means = [patches[0].mean((2, 3)).numpy(), *(x.mean(1).numpy() for x in maps(model, at[1:]))]

    report = lsim.analyze(model, lsim.Data(PIXELS, positions="mean"), CKA, at=at)

    np.testing.assert_allclose(values(report), oracles_cka(means), atol=1e-9)


class Permute(torch.nn.Module):
    """Channels of a map become its last axis."""

    def forward(self, x):
        return x.movedim(1, -1)


def test_a_permutation_does_not_inherit_the_axis_of_the_convolution_before_it():
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 6, 1)
    norm = torch.nn.LayerNorm(6)
    last = torch.nn.Linear(6, 5)
    net = torch.nn.Sequential(conv, Permute(), torch.nn.Dropout(), norm, last, torch.nn.GELU()).double().eval()
    at = ["0", "1", "2", "3", "4", "5"]
    x = PIXELS[..., :4, :5]

    for square in (False, True):
        stack = [net[:3](x), net[:4](x), net[:6](x)] if square else [net[:i](x) for i in range(1, 7)]
        names = ["2", "3", "5"] if square else at
        means = [a.mean((2, 3) if i == 0 and not square else (1, 2)).detach().numpy() for i, a in enumerate(stack)]
        report = lsim.analyze(net, lsim.Data(x, positions="mean"), CKA, at=names)
        np.testing.assert_allclose(values(report), oracles_cka(means), atol=1e-9)
    for name in ("1", "2"):
        with pytest.raises(lsim.LayersimError, match="channel axis"):
            lsim.analyze(net, PIXELS[..., :6, :6], CKA, at=[name, "3"])

    patches = torch.nn.Sequential(torch.nn.Sequential(conv, torch.nn.Flatten(2), Permute()), last)
    for name in ("0", "0.2"):
        assert channel_axis((6, 20, 6), channels_at(patches, name), name) == -1
        with pytest.raises(lsim.LayersimError, match="channel axis"):
            channel_axis((6, 6, 6), channels_at(patches, name), name)

    beside = torch.nn.ModuleDict({"conv": conv, "turned": Permute()})
    assert channel_axis((6, 4, 5, 6), channels_at(beside, "turned"), "turned") == -1

    back = torch.nn.Sequential(conv, last, Permute())
    assert channel_axis((6, 5, 4, 4), channels_at(back, "2"), "2") == 1
    assert channel_axis((6, 4, 4, 6), channels_at(torch.nn.Sequential(conv, Permute()), ""), "") == -1


def test_the_axis_of_a_convolution_is_certain_in_text_too():
    assert channel_axis((8, 10, 5), Channels(1), "c", 10) == 1
    assert channel_axis((8, 10, 5), Channels(None, (5,)), "c", 10) == -1

    class Text(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.conv = torch.nn.Embedding(30, 7), torch.nn.Conv1d(7, 10, 3, padding=1, stride=2)

        def forward(self, input_ids):
            return self.conv(self.embed(input_ids).transpose(1, 2)).mean(-1)

    torch.manual_seed(0)
    model = Text().double().eval()
    tokens = torch.randint(2, 30, (8, 10))
    with pytest.raises(lsim.LayersimError, match=r"conv.* \d x 5 x 10"):
        lsim.analyze(model, tokens, CKA, at=["conv"])
