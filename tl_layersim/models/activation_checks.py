"""Checks that activations are finite, and that the logit lens reproduces the model's logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..architectures.unembed import rounding
from ..core.errors import LayersimError
from ..data.batches import Batch
from .model_info import Model
from .out_of_memory import is_out_of_memory
from .source import CanUnembed, Source


def lens_gap(model: Model, measure: Callable[[], Tensor]) -> Tensor:
    """Run `measure`, which compares the lens with the model's logits; failures of the head become a `LayersimError`.

    Args:
        model: the model.
        measure: calls `unembed_gap`.

    Raises:
        LayersimError: the head cannot be called.
    """
    try:
        return measure()
    except LayersimError:
        # The data, not the head, is refused: the error names what is wrong with it.
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise other_logits(model, f"fails: {first[:160]}") from error


def check_lens(source: Source, batch: Batch) -> None:
    """Refuse a source whose logit lens does not reproduce the model's logits on the batch's first row.

    Raises:
        LayersimError: the lens differs, the head cannot be called, or the source cannot compare them.
    """
    if not isinstance(source, CanUnembed):
        raise LayersimError(
            f"The model of {type(source).__name__} has the head {source.model.head}, so the source must be a `CanUnembed`, "
            "whose `unembed_gap` checks the logit lens."
        )
    refuse_other_logits(lens_gap(source.model, lambda: source.unembed_gap(batch)), source.model)


def refuse_other_logits(gap: Tensor, model: Model, computed: torch.dtype = torch.float32) -> None:
    """Refuse a lens that does not reproduce the model's logits at the last layer.

    Args:
        gap: as `unembed_gap` returns it.
        model: the model.
        computed: the coarsest dtype in which the model's own logits were computed, where it is not that of its weights.
    """
    difference, size = gap.tolist()
    own = getattr(torch, model.dtype.removeprefix("torch."), torch.float32)
    allowed = rounding(own, computed)
    if difference <= allowed * max(size, 1e-3):
        return
    off = "gives logits of another shape" if math.isnan(size) else f"is off by {difference / max(size, 1e-3):.2g} of their size"
    raise other_logits(model, off)


def other_logits(model: Model, given: str) -> LayersimError:
    """The error for a lens that does not reproduce the model's logits."""
    return LayersimError(
        f"The logit lens at the last layer does not give the model's own logits: {model.head} {given}. Name the final norm "
        "and the head as unembed=['path.of.norm', 'path.of.head']; hooks on the head and blocks left out of layers= change "
        "logits too."
    )


def refuse_not_finite(counts: Sequence[Tensor], layers: Sequence[tuple[str, ...]], where: str) -> None:
    """Refuse activations that are not finite, and name their layers.

    Args:
        counts: for each model `layer`, the number of activations that are not finite.
        layers: for each model, the names of its layers.
        where: the batch, for the message.
    """
    for number, (names, count) in enumerate(zip(layers, counts, strict=True)):
        if len(names) != len(count):
            raise LayersimError(
                f"`view.activations` has {len(count)} residual layers, and `model.layers` names {len(names)}, {names[0]} to "
                f"{names[-1]}."
            )
        bad = {name: int(n) for name, n in zip(names, count, strict=True) if n}
        if bad:
            raise LayersimError(
                f"Activations are NaN or infinite in {where}{f', model {number + 1}' if len(layers) > 1 else ''}: "
                + ", ".join(f"{count} values at {name}" for name, count in list(bad.items())[:4])
                + ". Load the model in float32 or bfloat16."
            )


def refuse_bad_logits(bad: Tensor, layers: Sequence[str]) -> None:
    """Refuse logits that are not finite, and name their layers.

    Args:
        bad: `layer`, the number of positions with such logits.
        layers: the residual layers, with the input of block 0 first.
    """
    where = {name: int(n) for name, n in zip(layers[1:], bad, strict=True) if n}
    if where:
        raise LayersimError(
            "Logits are NaN or infinite, "
            + ", ".join(f"at {n} positions of {name}" for name, n in list(where.items())[:4])
            + ". Load the model in float32 or bfloat16."
        )


def need_stream(model: Model, what: str, parts: bool = False) -> None:
    """Refuse sites that are not the residual stream.

    Args:
        model: the description of the model.
        what: the analyzer or function that needs the residual stream, for the message.
        parts: whether blocks may be left out between the layers.
    """
    named = ", ".join(model.layers[1:4]) + (", ..." if len(model.layers) > 4 else "")
    if model.stream == "none":
        raise LayersimError(
            f"{what} needs the residual stream, and these modules do not pass it on: {named}. Leave out layers=, or name "
            "whole blocks."
        )
    if model.stream == "parts" and not parts:
        raise LayersimError(f"{what} needs every block of the residual stream, and layers= names {named}.")


def need_equal_width(model: Model, what: str) -> None:
    """Refuse sites of different widths.

    Args:
        model: the description of the model with these sites.
        what: the analyzer that needs one width, for the message.
    """
    if len(set(model.widths)) > 1:
        odd = next(n for n, width in enumerate(model.widths) if width != model.widths[0])
        raise LayersimError(
            f"{what} needs sites of equal width: {model.layers[0]} has width {model.widths[0]} and {model.layers[odd]} has "
            f"width {model.widths[odd]}. CKA takes sites of different widths."
        )
