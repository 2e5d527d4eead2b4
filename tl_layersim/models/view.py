"""View: the activations of one batch as an analyzer's kernel sees them, and how kernels are run on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .block_call import BlockCall
from .unembed import Unembed

if TYPE_CHECKING:
    from ..data.batches import Batch


Kernel = Callable[..., dict[str, Tensor]]
Reduced = tuple[list[Tensor], dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class View:
    """The counted tokens of one batch, without padding.

    Attributes:
        residual: `layer token d_model`, float32 (float64 if the model is); layer 0 is what enters block 0.
        tokens: `token`, token ids.
        sequence: `token`, which row of the batch each token stands in, ascending. Under `attach` every forward pass has
            rows of its own, so a cached generation step is a row of one token.
        position: `token`, where in that row, ascending within a row.
        next_token: `token`, the id that follows in the row, `NO_LABEL` where nothing attended does. None where a source leaves
            it to be read off the counted tokens.
        row: `token`, which row of the data it came from. None where a source does not know.
        column: `token`, which position of that row it was, padding and what was cut off before it included.
        labels: `token`, the data's own label at that position, `NO_LABEL` where it has none. None if the data has no labels.
        unembed: the model's own way from a residual to logits. None where there is none, or none that is known.
        calls: the blocks as the model called them, each of which can be called again. None where no analyzer asks for them.
        memo: what one kernel computed of this view and another may use.
    """

    residual: Tensor
    tokens: Tensor
    sequence: Tensor
    position: Tensor
    next_token: Tensor | None = None
    row: Tensor | None = None
    column: Tensor | None = None
    labels: Tensor | None = None
    unembed: Unembed | None = None
    calls: tuple[BlockCall, ...] | None = None
    memo: dict[str, Any] = field(default_factory=dict, compare=False)


def place(buffer: Tensor | None, layer: int, n_layers: int, hidden: Tensor, keep: Tensor) -> Tensor:
    """Copy the kept rows of one layer's activations into the buffer that becomes `View.residual`.

    Copied at once so that the model can free each layer's own activations: one batch of residuals is all that is held.

    Args:
        buffer: what the call for layer 0 returned; None for layer 0.
        layer: index of the residual layer, 0 to n_layers - 1.
        n_layers: how many residual layers there are.
        hidden: `batch pos d_model`, any dtype, any device.
        keep: indices into the flattened `batch pos`, on any device.
    """
    if buffer is None:
        # Sums are float64; Apple's GPUs have none, so the view of such a model lives on the CPU.
        device = torch.device("cpu") if hidden.device.type == "mps" else hidden.device
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # A layer that is never placed must not pass for numbers.
        buffer = torch.full((n_layers, keep.numel(), hidden.shape[-1]), torch.nan, dtype=dtype, device=device)
    if hidden.dim() != 3 or hidden.shape[-1] != buffer.shape[-1]:
        raise LayersimError(
            "The modules that are read give activations of different shapes, which have no cosine and no mean in common."
            if hidden.dim() == 3
            else "The modules that are read give activations that are not batch x pos x width.",
            given=f"shape {tuple(hidden.shape)} at site {layer}, {'what enters the first module' if not layer else 'a module'}",
            expected=f"batch x pos x {buffer.shape[-1]} at every site",
            do="layers= with modules of one width, such as the blocks of one stage of a Swin; feature maps of convolutions are "
            "not read",
        )
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    buffer[layer] = rows.index_select(0, keep.to(rows.device))
    return buffer


def reduce(kernels: Mapping[str, Kernel], *views: View) -> Reduced:
    """Run each kernel on the views, outside autograd and autocast, with full float32 products; count what is not finite.

    Returns:
        For each view `layer`, how many of its activations are NaN or infinite; and by kernel name what it returned,
        nothing if any view holds such values.
    """
    before = _set_precision(None)
    try:
        device = views[0].residual.device.type
        # Not in inference mode either, in which a kernel could not differentiate a block.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type=device, enabled=False):
            not_finite = [_count_not_finite(view.residual) for view in views]
            if any(bool(count.any()) for count in not_finite):
                return not_finite, {}
            return not_finite, {name: kernel(*views) for name, kernel in kernels.items()}
    finally:
        _set_precision(before)


def _count_not_finite(residual: Tensor) -> Tensor:
    # A sum is finite only if all its terms are: one cheap pass; the count is made where it fails.
    if bool(torch.isfinite(residual.sum())):
        return torch.zeros(residual.shape[0], dtype=torch.int64)
    return (~torch.isfinite(residual)).sum((1, 2)).cpu()


def _set_precision(values: list[str] | None) -> list[str]:
    """Set how float32 products are made, None for in full float32, and return how they were.

    A user, or a server, may have allowed TF32 or bfloat16 for speed. No decorator here: what is shipped loses it.
    """
    backends: list[Any] = [getattr(backend, "matmul", None) for backend in (torch.backends.cuda, torch.backends.mkldnn)]
    if all(hasattr(backend, "fp32_precision") for backend in backends):
        before = [backend.fp32_precision for backend in backends]
        for backend, value in zip(backends, values or ["ieee", "ieee"], strict=True):
            backend.fp32_precision = value
        return before
    # Older torch, where this one setting covers both.
    before = [torch.get_float32_matmul_precision()]
    torch.set_float32_matmul_precision(values[0] if values else "highest")
    return before


def tokens_alone(batch: Batch) -> View:
    """A view of a batch that no model has run on: without layers."""
    index = batch.counted.nonzero()
    at = (index[:, 0], index[:, 1])
    return View(
        residual=torch.empty(0, len(index), 0),
        tokens=batch.tokens[at],
        sequence=index[:, 0],
        position=index[:, 1],
        next_token=batch.next_tokens[at],
        row=batch.sources[0][at],
        column=batch.sources[1][at],
        labels=None if batch.labels is None else batch.labels[at],
    )


def row_ends(view: View) -> Tensor:
    """Index of the last counted token of each row."""
    lengths: Tensor = torch.unique_consecutive(view.sequence, return_counts=True)[1]
    return lengths.cumsum(0) - 1
