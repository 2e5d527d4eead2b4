"""What ends a run: activations that are not finite, a lens that is not the model's, blocks that cannot be called again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import LayersimError
from .source import Model
from .unembed import rounding

# Beyond this relative error finite differences measure rounding.
TOO_COARSE = 0.1


def gap_or_refusal(model: Model, measure: Callable[[], Tensor]) -> Tensor:
    """What `measure` gives; a head that cannot even be called as it was found is refused like one that says something else."""
    try:
        return measure()
    except (RuntimeError, TypeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise other_logits(model, f"cannot be called so: {first[:160]}", "modules that follow one another") from error


def refuse_other_logits(gap: Tensor, model: Model, computed: torch.dtype = torch.float32) -> None:
    """Refuse a lens that does not say at the last layer what the model says.

    Args:
        gap: what `unembed_gap` gives.
        model: whose they are.
        computed: the coarsest dtype that the model's own logits went through, where that is not the dtype of its weights.
    """
    difference, size = gap.tolist()
    own = getattr(torch, model.dtype.removeprefix("torch."), torch.float32)
    allowed = rounding(own, computed)
    if difference <= allowed * max(size, 1e-3):
        return
    off = "logits of another shape" if math.isnan(size) else f"off by {difference / max(size, 1e-3):.2g} of their size"
    raise other_logits(model, off, f"the model's logits to rounding, {allowed:.1g} of their size")


def other_logits(model: Model, given: str, expected: str) -> LayersimError:
    """The refusal of a lens that is not the model's."""
    return LayersimError(
        "The lens at the last layer does not give the model's own logits.",
        given=f"{model.head}: {given}",
        expected=expected,
        do="unembed=['path.of.final_norm', 'path.of.head'], the modules in order; if they are right: blocks named with layers= "
        "must hand on the whole stream, the last one included, and no hook or code may change what the head gives",
    )


def refuse_not_finite(counts: Sequence[Tensor], layers: Sequence[tuple[str, ...]], where: str) -> None:
    """Name the layers whose activations are not finite, instead of averaging them in."""
    for number, (names, count) in enumerate(zip(layers, counts, strict=True)):
        if len(names) != len(count):
            raise LayersimError(
                "The view does not have the layers that the model is said to have.",
                given=f"{len(count)} residual layers",
                expected=f"{len(names)}: {names[0]} to {names[-1]}",
                do="see that the source's model.layers and the first axis of view.residual agree",
            )
        bad = {name: int(n) for name, n in zip(names, count, strict=True) if n}
        if bad:
            raise LayersimError(
                f"Activations are NaN or infinite in {where}" + (f", model {number + 1}." if len(layers) > 1 else "."),
                given=", ".join(f"{name}: {count} values" for name, count in list(bad.items())[:4]),
                expected="finite activations",
                do="load the model in float32 or bfloat16, and check its weights from the first layer named on",
            )


def refuse_bad_logits(bad: Tensor, layers: Sequence[str]) -> None:
    """Name the layers whose logits are not finite, instead of averaging them in.

    Args:
        bad: `layer`, at how many positions.
        layers: the residual layers, what enters block 0 first.
    """
    where = {name: int(n) for name, n in zip(layers[1:], bad, strict=True) if n}
    if where:
        raise LayersimError(
            "Logits are NaN or infinite.",
            given=", ".join(f"{name}: at {n} positions" for name, n in list(where.items())[:4]),
            expected="finite logits; -inf for ids that cannot be said",
            do="load the model in float32 or bfloat16: float16 overflows above 65504",
        )


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


def refuse_trouble(differs: Tensor, no_skip: Tensor, step_error: Tensor, layers: tuple[str, ...]) -> None:
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
            do="another model; CKA and Cosine read this one",
        )
    coarse = [f"{name}: {float(e):.0%}" for name, e in zip(layers[1:], step_error, strict=True) if e > TOO_COARSE]
    if coarse:
        raise LayersimError(
            "Finite differences are too coarse for these blocks.",
            given=f"a product changes with twice the step, {', '.join(coarse[:4])}",
            expected=f"a step_error of at most {TOO_COARSE:.0%}",
            do="method='dense', on a trusted server if the model is on one; or weights in float32",
        )
