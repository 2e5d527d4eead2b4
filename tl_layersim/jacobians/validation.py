"""Refusals of models whose blocks cannot be differentiated, or have no skip connection."""

from __future__ import annotations

from torch import Tensor

from ..core.errors import LayersimError
from ..models.model_info import Model

# Beyond this relative error finite differences measure rounding.
TOO_COARSE = 0.1


def need_calls(model: Model, what: str, differences: bool) -> None:
    """Refuse a model whose blocks cannot be differentiated, or have no residual branch."""
    if "post-norm" in model.basis:
        raise LayersimError(
            f"The blocks of {model.name} have no residual branch: each ends in a layer norm, so block minus input is none.",
            given=model.basis,
            expected="pre-norm blocks, which add to the residual stream",
            do="another model; CKA and Cosine read this one",
        )
    if model.calls == "none":
        raise LayersimError(
            f"{what} calls blocks again, which this source does not offer.",
            given=f"{model.source}, whose views have no calls",
            expected="a TransformerLens, nnsight or Hugging Face model",
            do="in a source of your own: Model(calls=...), and views with calls while self.calling",
        )
    if model.calls == "values" and not differences:
        raise LayersimError(
            f"{what} differentiates blocks, and this server runs requests in a sandbox that weights stay out of.",
            given=model.source,
            expected="a trusted server, or a method that needs values alone",
            do="method='finite-difference': central differences, whose error the result states",
        )


def need_memory(memory_mb: float) -> None:
    """Refuse a budget that is none."""
    if not 0 < memory_mb < float("inf"):
        raise LayersimError(
            "Jacobians need some memory.", given=f"memory_mb={memory_mb}", expected="megabytes, above 0", do="memory_mb=1024"
        )


def refuse_failed_replay(differs: Tensor, no_skip: Tensor, step_error: Tensor, layers: tuple[str, ...]) -> None:
    """Refuse Jacobians of blocks that do something else when called again, or do not add to what they are given.

    Args:
        differs: `layer`, how often a block did not give what it had given.
        no_skip: `layer`, how often what entered did not come through.
        step_error: `layer`, of finite differences.
        layers: residual layers, what enters block 0 first.
    """
    where = [name for name, n in zip(layers[1:], differs, strict=True) if n]
    if where:
        raise LayersimError(
            "A block that is called again with its own arguments does not give what it gave.",
            given=", ".join(where[:4]),
            expected="blocks without dropout, caches or other state",
            do="model.eval(), no torch.autocast around the call, and no hooks that change what blocks give from call to call",
        )
    where = [name for name, n in zip(layers[1:], no_skip, strict=True) if n]
    if where:
        raise LayersimError(
            "A block does not add to what it is given, so block minus input is no branch of it.",
            given=f"{', '.join(where[:4])}: what enters does not come through",
            expected="pre-norm blocks, which add to the residual stream",
            do="whole blocks in layers=, or another model; CKA and Cosine read this one",
        )
    coarse = [f"{name}: {float(e):.0%}" for name, e in zip(layers[1:], step_error, strict=True) if e > TOO_COARSE]
    if coarse:
        raise LayersimError(
            "Finite differences are too coarse for these blocks.",
            given=f"a product changes with twice the step, {', '.join(coarse[:4])}",
            expected=f"a step_error of at most {TOO_COARSE:.0%}",
            do="method='dense', on a trusted server if the model is on one; or weights in float32",
        )
