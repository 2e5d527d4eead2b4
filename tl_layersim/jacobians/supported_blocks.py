"""Checks that the blocks of a model can be differentiated and have a skip connection."""

from __future__ import annotations

from torch import Tensor

from ..core.errors import LayersimError
from ..sources.identity import EDIT, refuse_edits
from ..sources.model_description import ModelDescription

# Largest relative error of finite differences.
TOO_COARSE = 0.1


def refuse_post_norm(model: ModelDescription) -> None:
    """Raise an error if the blocks are post-norm, which have no residual branch.

    Raises:
        LayersimError: the blocks are post-norm.
    """
    if "post-norm" in model.basis:
        raise LayersimError(
            f"The blocks of {model.name} have no residual branch: each block ends in a layer norm. CKA and Cosine accept "
            "this model."
        )


def need_calls(model: ModelDescription, what: str, differences: bool, k: int = 0) -> None:
    """Raise an error if a model's blocks cannot be differentiated.

    Args:
        model: the model.
        what: the analyzer or function, for the message.
        differences: whether finite differences are used, which need no gradients.
        k: largest number of singular vectors; 0 for none.

    Raises:
        LayersimError: the blocks are post-norm, cannot be replayed, or are on a server without gradients; the model has
            nnsight edits, and half precision or no gradients; or it has fewer than k dimensions.
    """
    refuse_post_norm(model)
    if differences or model.calls != "gradients":
        refuse_edits(model.changes, what)
    elif EDIT in model.changes and model.dtype not in ("torch.float32", "torch.float64"):
        raise LayersimError(
            f"`model` is edited and has dtype {model.dtype}, which is too coarse for the derivatives of {what}. Load the model "
            "in float32."
        )
    if model.calls == "none":
        raise LayersimError(
            f"{what} replays single blocks, which {model.source} does not allow. A custom source must set "
            "ModelDescription(calls='values') or ModelDescription(calls='gradients')."
        )
    if model.calls == "values" and not differences:
        raise LayersimError(
            f"{what} needs gradients through blocks, which the sandbox of this server does not provide. Use "
            "method='finite-difference'."
        )
    if k > (model.d_model or k):
        raise LayersimError(f"`k` is {k}; it must be at most {model.d_model}, the d_model of {model.name}.")


def refuse_failed_replay(differs: Tensor, no_skip: Tensor, step_error: Tensor, layers: tuple[str, ...]) -> None:
    """Raise an error if a block, run again, gave another output or has no skip connection.

    Too coarse finite differences raise an error too.

    Args:
        differs: `layer`, number of replays whose output differs from the forward pass.
        no_skip: `layer`, number of replays without a skip connection.
        step_error: `layer`, error of finite differences.
        layers: residual layers, starting with the input of block 0.

    Raises:
        LayersimError: names the blocks.
    """
    failed = [name for name, n in zip(layers[1:], differs, strict=True) if n]
    if failed:
        raise LayersimError(
            f"The output of a replayed block differs from the forward pass: {', '.join(failed[:4])}. Call model.eval(), and "
            "leave out torch.autocast and hooks with random outputs."
        )
    failed = [name for name, n in zip(layers[1:], no_skip, strict=True) if n]
    if failed:
        raise LayersimError(
            f"Blocks have no residual branch, because they do not add their input to their output: {', '.join(failed[:4])}."
        )
    coarse = [f"{name}: {100 * float(e):.0f} %" for name, e in zip(layers[1:], step_error, strict=True) if e > TOO_COARSE]
    if coarse:
        raise LayersimError(
            f"Finite differences are too coarse for these blocks, with a step_error above {100 * TOO_COARSE:.0f} %: "
            f"{', '.join(coarse[:4])}. Use method='dense' or weights in float32."
        )
