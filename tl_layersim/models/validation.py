"""Refusals of activations that are not finite, and of a logit lens that does not reproduce the model's logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .model_info import Model
from .unembed import rounding


def lens_gap(model: Model, measure: Callable[[], Tensor]) -> Tensor:
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


def need_stream(model: Model, what: str, parts: bool = False) -> None:
    """Refuse sites that are not the residual stream.

    Args:
        model: what is known of it.
        what: needs the stream.
        parts: whether blocks may be left out between the layers.
    """
    if model.stream == "none":
        raise LayersimError(
            f"{what} needs the residual stream, and these modules do not hand it on.",
            given=f"layers=[{', '.join(model.layers[1:4])}{', ...' if len(model.layers) > 4 else ''}]",
            expected="whole blocks, each of which is given what the one before it gives",
            do="leave out layers=, or name the blocks themselves; Cosine and CKA read any modules",
        )
    if model.stream == "parts" and not parts:
        raise LayersimError(
            f"{what} needs every block of the residual stream, and some are left out.",
            given=", ".join(model.layers),
            expected="blocks that follow one another",
            do="leave out layers=; Cosine, CKA and LogitLens read any of the blocks",
        )
