"""From a residual to logits with the model's own modules: final norm, unembedding, logit scaling and soft-cap.

`Unembed` and `unembed_gap` travel to NDIF servers by value, as source: they may use torch and the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HeadModule = Callable[[Tensor], Any]
# Heads that give classes and not words.
CLASSIFIERS = ("score", "classifier")


@dataclass(frozen=True)
class Head:
    """What stands between the last block and the logits, by module path: known before anything runs.

    Attributes:
        norm: path of the final norm, "" where the model has none.
        parts: paths of what turns the normed residual into logits, in order.
        reads: which positions of a row are classified: "every" one, or the "first" or "last" of it.
        scale: what logits are multiplied with.
        soft_cap: c, where the model says c tanh(logits / c); None where it does not.
    """

    norm: str
    parts: tuple[str, ...]
    reads: str = "every"
    scale: float = 1.0
    soft_cap: float | None = None

    def __str__(self) -> str:
        text = "x" if not self.norm else f"{self.norm}(x)"
        for part in self.parts:
            text = f"{part}({text})"
        if self.scale != 1.0:
            text = f"{self.scale:g} {text}"
        return text if self.soft_cap is None else f"{self.soft_cap:g} tanh({text} / {self.soft_cap:g})"


@dataclass(frozen=True)
class Unembed:
    """The model's own way from a residual to logits; call it on `... d_model` for `... vocabulary`, in the model's dtype.

    Attributes:
        norm: the final norm, None where the model has none.
        parts: what follows it, in order.
        reads: see `Head`.
        scale: see `Head`.
        soft_cap: see `Head`.
        dtype: of the head's weights, None where it has none that are floats.
        norm_dtype: of the norm's weights, None where it has none: it then takes what the head takes.
        device: of the head's weights, None where the modules move what they are given by themselves.
        linear: the last part itself where it is nothing but a product on this machine: logits can then go into memory that is
            used again, which saves a CPU a fifth of the time.
    """

    norm: HeadModule | None
    parts: tuple[HeadModule, ...]
    reads: str
    scale: float
    soft_cap: float | None
    dtype: torch.dtype | None
    device: torch.device | None
    linear: torch.nn.Linear | None = None
    norm_dtype: torch.dtype | None = None

    def raw(self, x: Tensor, normed: bool = True, spare: Tensor | None = None) -> Tensor:
        """What the last part gives, before scale and soft-cap; in `spare`, `token vocabulary`, if there is one to be used."""
        shape = x.shape
        if normed:
            x = self.normed(x)
        # One row of many positions; heads that read one position of a row are given many rows of one.
        x = x.reshape(1, -1, shape[-1]) if self.reads == "every" else x.reshape(-1, 1, shape[-1])
        x = x.to(device=self.device, dtype=self.dtype)
        for part in self.parts if spare is None or self.linear is None else self.parts[:-1]:
            # A norm that is kept in float32 hands on float32, which a half-precision head would refuse.
            x = tensor_of(part(x if self.dtype is None else x.to(self.dtype)))
        if spare is not None and self.linear is not None:
            x = x.reshape(-1, x.shape[-1]).to(self.linear.weight.dtype)
            weight, bias, out = self.linear.weight.T, self.linear.bias, spare[: len(x)]
            x = torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
        return x.reshape(*shape[:-1], x.shape[-1])

    def normed(self, x: Tensor) -> Tensor:
        """The final norm of residuals `... d_model`, in the model's dtype; the residuals themselves where it has none."""
        if self.norm is None:
            return x
        given = x.to(device=self.device, dtype=self.norm_dtype or self.dtype).reshape(1, -1, x.shape[-1])
        return tensor_of(self.norm(given)).reshape(x.shape)

    def __call__(self, x: Tensor, normed: bool = True, spare: Tensor | None = None) -> Tensor:
        """Logits of residuals; `normed` says whether the final norm is applied, `spare` see `raw`."""
        return self.finish(self.raw(x, normed, spare))

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and soft-cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def tensor_of(output: Any) -> Tensor:
    """The logits, or the residual, in what a module or a model returned: itself, `.logits`, or the first tensor."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value
    raise ValueError(f"{type(output).__name__} has no tensor in it, where logits or a residual were expected")


def plain_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """The module, if it is a linear layer, lives here, and does nothing else."""
    plain = type(module) is torch.nn.Linear and "forward" not in vars(module) and not module.weight.is_meta
    return module if plain and isinstance(module, torch.nn.Linear) else None


def unembed_gap(unembed: Unembed, hidden: Tensor, logits: Tensor, last: int, finished: bool = True) -> Tensor:
    """How far the lens at the last layer is from the model's own logits, on the end of one row: a number and its scale.

    Args:
        unembed: the lens.
        hidden: `pos d_model`, what left the last block at the row's positions.
        logits: `pos vocabulary` of the model at the same positions, fewer where it gave only the last; of a classifier
            `classes`.
        last: index in the row of its last position that the model attended to.
        finished: whether the logits are past scale and soft-cap.

    Returns:
        `2`, float64: the Euclidean norm of the difference, and that of the logits; infinite and NaN for another shape. A norm,
        and not the largest difference: half precision is off here and there, a wrong head everywhere.
    """
    if unembed.reads == "every":
        count = min(8, logits.shape[0])
        hidden, logits = hidden[-count:], logits[-count:]
    else:
        hidden = hidden[last if unembed.reads == "last" else 0]
    found = unembed(hidden) if finished else unembed.raw(hidden)
    if found.shape != logits.shape:
        return torch.tensor([torch.inf, torch.nan], dtype=torch.float64)
    theirs, ours = logits.detach().double().cpu(), found.detach().double().cpu()
    # Where both overflow, or say -inf, they agree.
    finite = theirs.isfinite() | ours.isfinite()
    return torch.stack([torch.where(finite, ours - theirs, 0.0).norm(), torch.where(theirs.isfinite(), theirs, 0.0).norm()])


def rounding(*dtypes: torch.dtype) -> float:
    """The relative difference that the coarsest of these dtypes explains."""
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    # Half precision rounds at every step of the norm and the product; float32 in sums of another order.
    return 2.5 * eps if eps > 1e-4 else 500 * eps
