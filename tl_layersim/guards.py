"""What is looked at while a run goes on, and ends it: activations that are not finite, a lens that is not the model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import LayersimError
from .source import Model
from .unembed import rounding


def refuse_other_logits(gap: Tensor, model: Model, computed: torch.dtype = torch.float32) -> None:
    """Refuse a lens that does not say at the last layer what the model says.

    Args:
        gap: the largest difference, and the largest logit.
        model: whose they are.
        computed: the coarsest dtype that the model's own logits went through, where that is not the dtype of its weights.
    """
    difference, largest = gap.tolist()
    own = getattr(torch, model.dtype.removeprefix("torch."), torch.float32)
    if difference <= rounding(own, computed) * max(1.0, largest):
        return
    raise LayersimError(
        "The lens at the last layer does not give the model's own logits.",
        given=f"{model.head}: off by {difference:.3g} where logits go up to {largest:.3g}",
        expected="the model's logits to rounding",
        do="unembed=['path.of.final_norm', 'path.of.head'], the modules in order; a head whose output is changed by a hook, or "
        "by code around it, cannot be read",
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
