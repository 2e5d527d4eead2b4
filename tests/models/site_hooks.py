"""Tensors of sites, read by plain torch hooks of the tests on the modules that `lsim.sites` names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import tl_layersim as lsim

from .tiny_models import family, tiny_gpt2, tiny_llama
from .wrapped_models import lively

# Norms have weights, so that what is before them cannot pass for what is after.
MODELS = {
    "llama": lambda: lively(tiny_llama()),
    "gpt2": lambda: lively(tiny_gpt2()),
    "neox": lambda: lively(family("neox")),
    "bert": lambda: lively(family("bert")),
}
D_HEAD = 8


def read_sites(model, table, data) -> dict[str, torch.Tensor]:
    """The tensor of each site `batch pos width`; slices of a fused projection are cut by the tests' own rules."""
    seen: dict[str, torch.Tensor] = {}
    handles = []
    for name, place in zip(table.name, table.module, strict=True):
        path, side = place.removesuffix(")").split(" (")
        module = model.get_submodule(path)
        if side.endswith("input"):

            def before(_module, args, kwargs, name=name):
                seen[name] = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)).clone()

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:

            def after(_module, _args, output, name=name, side=side):
                output = output if isinstance(output, torch.Tensor) else output[0]
                seen[name] = split(model, output, name[-1]) if side.startswith("part") else output.clone()

            handles.append(module.register_forward_hook(after))
    mask = data.get("attention_mask", torch.ones_like(data["input_ids"]))
    with torch.no_grad():
        # Positions are counted from the first attended token, so that padding on the left changes nothing.
        model(**data, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for handle in handles:
        handle.remove()
    return seen


def split(model, fused: torch.Tensor, which: str) -> torch.Tensor:
    """Queries, keys or values of a fused projection: GPT-2 stacks them, GPT-NeoX interleaves them by head."""
    number = "qkv".index(which)
    if "GPT2" in type(model).__name__:
        return fused.chunk(3, dim=-1)[number]
    heads = fused.shape[-1] // (3 * D_HEAD)
    return torch.cat([fused[..., (3 * head + number) * D_HEAD :][..., :D_HEAD] for head in range(heads)], dim=-1)


def head_part(tensor: torch.Tensor, site: str) -> torch.Tensor:
    """The part of a site's tensor that belongs to the head that the name ends with, if it ends with one."""
    if not site.endswith("]"):
        return tensor
    number = int(site.removesuffix("]").split("[")[1])
    return tensor[..., number * D_HEAD : (number + 1) * D_HEAD]


def site_samples(model, data, sites: Sequence[str]) -> list[np.ndarray]:
    """For each site, `token width` of the counted tokens in float64."""
    tensors = read_sites(model, lsim.sites(model), data)
    kept = data.get("attention_mask", torch.ones_like(data["input_ids"])).bool()
    return [head_part(tensors[site.split("[")[0]], site)[kept].double().numpy() for site in sites]
