"""Checks of the replayed output of a block.

All functions are serialised by value and run on NDIF servers too, so they use only torch and the standard library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations.block_call import BlockCall
from ..activations.norms import norms

# Largest relative difference between a block's output and its replay, by dtype of the model. Models in float64 compute
# norms, rotations and softmax in float32.
REPLAY_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Factor by which the skip-connection check lengthens a residual. The branch of a pre-norm block is the same for residuals of
# this length and of twice this length, so the two outputs differ exactly as the residuals do.
LENGTHENING = 1e4
# Autograd nodes of views, copies and changes in place, which pass a gradient or parts of it on unchanged.
VIEWS = ("Alias", "AsStrided", "Index", "IndexPut", "Reshape", "ReshapeAlias", "Select", "Slice", "UnsafeView", "View")
IDENTITY_NODES = (*VIEWS, "Clone", "CopyBackwards", "CopySlices", "ToCopy")


def lengthening(x: Tensor) -> Tensor:
    """The factor by which each residual is scaled up: `LENGTHENING`, or less if the dtype would overflow.

    Args:
        x: `sample d_model`, residuals.

    Returns:
        `sample 1`.
    """
    largest = torch.finfo(x.dtype).max / 4 / norms(x)[..., None].clamp(min=1e-30)
    factor: Tensor = largest.clamp(max=LENGTHENING).to(x.dtype)
    return factor


def adds_input(x: Tensor, y: Tensor) -> bool:
    """Whether y is x, or elements of x, plus another term: along sums, reshapes and copies of the autograd graph, the
    derivative is 1.

    Args:
        x: a leaf of the autograd graph.
        y: a tensor computed from x.
    """
    passed = _passed_on(y.grad_fn, torch.ones_like(y), x)
    return passed is not None and int((passed == 1).sum()) == int(passed.count_nonzero()) == y.numel()


def _passed_on(node: Any, gradient: Tensor, x: Tensor) -> Tensor | None:
    """The gradient at x along sums and `IDENTITY_NODES`; None if no such nodes lead to x."""
    if node is None:
        return None
    if getattr(node, "variable", None) is x:
        return gradient
    name = node.name().removeprefix("torch::autograd::").removesuffix("0").removesuffix("Backward")
    if name not in IDENTITY_NODES and (name != "Add" or getattr(node, "_saved_alpha", 1) != 1):
        return None
    passed = node(gradient)
    total = None
    # The node of a change in place gives a gradient of its constants too.
    for (following, _), own in zip(node.next_functions, (passed,) if isinstance(passed, Tensor) else passed, strict=False):
        part = None if own is None else _passed_on(following, own, x)
        total = part if total is None else total if part is None else total + part
    return total


def reproduces(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether the residuals a and b are equal up to the rounding of a dtype, in every sample.

    Args:
        a: `sample d_model`, output of the replayed block.
        b: `sample d_model`, output in the model's forward pass.
        dtype: dtype of the model's activations.
    """
    allowed = REPLAY_TOLERANCE.get(dtype, 8 * torch.finfo(dtype).eps)
    return bool((norms(a - b) <= allowed * norms(b)).all())


def is_remote(call: BlockCall) -> bool:
    """Whether the block's weights are in another process, where their dtype cannot be changed."""
    module = getattr(call.block, "_module", call.block)
    if not isinstance(module, torch.nn.Module) or any(hasattr(part, "_hf_hook") for part in module.modules()):
        # Weights that accelerate has offloaded are brought into this process.
        return False
    first = next(module.parameters(), None)
    return first is not None and first.is_meta
