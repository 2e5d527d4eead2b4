"""Replay of a block: attention with second derivatives, and checks of the replayed output.

All functions are serialised by value and run on NDIF servers too, so they use only torch and the standard library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from ..activations.block_call import BlockCall
from ..activations.norms import norms

# Largest relative difference between a block's output and its replay, by dtype of the model. Models in float64 compute
# norms, rotations and softmax in float32.
REPLAY_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Factor by which the skip-connection check lengthens a residual. The branch of a pre-norm block is the same for residuals of
# this length and of twice this length, so the two outputs differ exactly as the residuals do.
LENGTHENING = 1e4
# Autograd nodes that pass a gradient on unchanged.
IDENTITY_NODES = ("Alias", "Clone", "Index", "IndexPut", "Reshape", "ReshapeAlias", "ToCopy", "UnsafeView", "View")


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
    """Whether y is x plus another term: in the autograd graph, only sums, reshapes and copies lead from x to y.

    Args:
        x: a leaf of the autograd graph.
        y: a tensor computed from x.
    """
    waiting, seen = [y.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is x:
            return True
        name = node.name().removesuffix("0").removesuffix("Backward")
        following = [one for one, _ in node.next_functions]
        if name in IDENTITY_NODES or (name == "Add" and getattr(node, "_saved_alpha", 1) == 1):
            waiting += following
    return False


def plain_attention() -> Any:
    """A context manager: attention is computed by matmuls and a softmax, which have second and batched derivatives."""
    return attention.sdpa_kernel([attention.SDPBackend.MATH])


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
