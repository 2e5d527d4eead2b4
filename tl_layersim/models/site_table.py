"""`sites`: the table of the places in a model at which `at=` can read activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.argument_checks import typed
from .hook_points import site_map
from .module_sites import find_stacks
from .open import OpenedModel, is_nnsight, unsupported_model
from .site_map import Site
from .transformer_lens import is_transformer_lens

if TYPE_CHECKING:
    import pandas


@typed
def sites(model: Any) -> pandas.DataFrame:
    """List the sites of a model, in the order in which it computes them.

    A site is a place at which activations are read, and `at=` selects sites: `at="attn_out"` all sites of a family, and
    `at=["blocks.0.hook_attn_out"]` one by its name. Other hook points of a TransformerLens model (`model.hook_dict`) and the
    modules of any model (`model.named_modules()`) can be named in `at=` too; they are not in the table.

    Args:
        model: a TransformerLens, Hugging Face, nnsight or other torch model; or what `open_model` returns. It is not run.

    Returns:
        A pandas table with the columns `name`; `family`; `block`, the number of the block; `module`, which is read, with its
        input or its output; and `heads`, the number of heads into which `per_head=True` divides the site, 0 for none. The
        family `resid_post` begins with the first site of `resid_pre`.

    Raises:
        LayersimError: the type of the model is not supported, or its blocks are not known.

    Examples:
        >>> import tl_layersim as lsim
        >>> table = lsim.sites(lsim.demo_model())
        >>> print(table[table.family == "z"].head(2).to_string(index=False))
                        name family  block                                  module  heads
        blocks.0.attn.hook_z      z      0 model.layers.0.self_attn.o_proj (input)      4
        blocks.1.attn.hook_z      z      1 model.layers.1.self_attn.o_proj (input)      4
    """
    import pandas

    opened = OpenedModel.of(model)
    model = opened.model
    module = model._module if is_nnsight(model) else model
    if not isinstance(module, torch.nn.Module):
        raise unsupported_model(model)
    known = site_map(module, [] if is_transformer_lens(module) else find_stacks(module, opened.layers))
    rows = [(site.point.name, site.family, site.block, _module(site), len(site.heads)) for site in known.sites]
    table = pandas.DataFrame(rows, columns=["name", "family", "block", "module", "heads"])
    return table.astype({"block": "Int64"})


def _module(site: Site) -> str:
    """The module that is read, in words."""
    side = "input" if site.point.incoming else "output"
    return f"{site.point.module} ({side if site.point.part is None else f'part of the {side}'})"
