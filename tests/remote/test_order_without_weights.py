"""The order in which a model reaches its hook points, found without its weights."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.blocks import anatomy_of, choose_stacks
from tl_layersim.architectures.site_selection import points_at, site_map
from tl_layersim.remote.source import order_without_weights
from tl_layersim.sources.source import firing_order

from ..models.tiny_models import random_tokens
from ..models.wrapped_models import LAYOUTS, build

ROW = (random_tokens(1, 5),), {}


def without_weights(model, dtype=torch.float32):
    with torch.device("meta"):
        return type(model)(model.config).to(dtype)


def every_point(model):
    """Every site, each tensor once."""
    anatomy = choose_stacks(model, anatomy_of(model), None)
    sites = site_map(model, anatomy)
    points = [point for family in sites.families() for point in points_at(sites, family)]
    return anatomy, tuple({point.name: point for point in points}.values())


@pytest.mark.light("Llama", "Mixtral", "MPNet")
@pytest.mark.parametrize("family", LAYOUTS)
def test_a_model_without_weights_shows_the_order_of_the_model(family):
    model = build(family)
    anatomy, points = every_point(model)
    modules = {point.module: model.get_submodule(point.module) for point in points}
    expected = firing_order(points, modules, lambda: model(random_tokens(1, 4)))
    # Real checkpoints of mixtures of experts are in bfloat16, and torch has no grouped products of float32 without values.
    dtype = torch.bfloat16 if family == "Mixtral" else torch.float32
    empty = without_weights(model, dtype)
    assert order_without_weights(empty, anatomy, points, ROW) == expected


def test_without_a_forward_pass_the_order_is_that_of_the_list():
    model = build("Mixtral")
    anatomy, points = every_point(model)
    modules = {point.module: model.get_submodule(point.module) for point in points}
    expected, widths = firing_order(points, modules, lambda: model(random_tokens(1, 4)))
    assert len(set(widths)) > 1
    empty = without_weights(model)
    assert order_without_weights(empty, anatomy, points, ROW) == (expected, ())
    some = points_at(site_map(empty, anatomy), "model.layers.1.mlp.gate")
    with pytest.raises(lsim.LayersimError, match=r"cannot be found without the model's weights(.|\n)*RuntimeError"):
        order_without_weights(empty, anatomy, some, ROW)


def test_a_module_that_never_runs_is_named():
    model = build("GPT2")
    model.spare = torch.nn.Linear(2, 2)
    anatomy = choose_stacks(model, anatomy_of(model), None)
    points = points_at(site_map(model, anatomy), "spare")
    with pytest.raises(lsim.LayersimError, match=r"`at`.*\bspare\b"):
        order_without_weights(model.to("meta"), anatomy, points, ROW)


def test_models_of_other_inputs_show_their_order_on_the_data():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4
    )
    model = ViTForImageClassification(config).eval()
    anatomy, points = every_point(model)
    modules = {point.module: model.get_submodule(point.module) for point in points}
    pixels = {"pixel_values": torch.randn(1, 3, 8, 8)}
    expected = firing_order(points, modules, lambda: model(**pixels))
    empty = without_weights(model)
    assert order_without_weights(empty, anatomy, points, ((), pixels)) == expected
