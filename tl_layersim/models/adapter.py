"""Adapters: the maps that carry one model's residual stream into another's, and their fit in closed form from sums.

Everything but `Adapter` and `solve` travels to NDIF servers by value, as source: torch and the standard library alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..core.errors import LayersimError
from ..core.typed import named

KINDS = ("identity", "linear", "affine", "affine-norm")
# Directions of the front's features with less than this share of the largest one's weight are rounding.
RANK = 1e-13


@named
class Adapter(nn.Module):
    """A map from the front's residual stream to the back's. Call it on `... d_front` for `... d_back`.

    | kind | map |
    | --- | --- |
    | `identity` | h |
    | `linear` | W h |
    | `affine` | W h + b |
    | `affine-norm` | h + W LN(h) + b, with a layer norm that has no weights; W LN(h) + b where the widths differ |

    Args:
        kind: one of these.
        weight: `d_back d_front`; None for `identity`.
        bias: `d_back`; None for `identity` and `linear`.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 3 and appendix C.1; `affine-norm` in the form of Belrose et al. 2023
        (arXiv 2303.08112).

    Example:
        >>> import torch, tl_layersim as lsim
        >>> turn = lsim.Adapter("linear", torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
        >>> turn(torch.tensor([1.0, 2.0]))
        tensor([ 2., -1.])
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, kind: str, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__()
        wanted = (kind != "identity", kind not in ("identity", "linear"))
        if not isinstance(kind, str) or kind not in KINDS or (weight is not None, bias is not None) != wanted:
            has = " and ".join(name for name, part in (("a weight", weight), ("a bias", bias)) if part is not None)
            raise LayersimError(
                "This is no adapter.",
                given=f"{kind!r} with {has or 'nothing'}",
                expected=f"one of {', '.join(KINDS)}, with a weight but for identity, and a bias for the affine ones",
                do="Adapter('affine', weight, bias)",
            )
        if weight is not None and (weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1])):
            raise LayersimError(
                "The parts of this adapter do not fit each other.",
                given=f"shapes {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}",
                expected="a weight d_back x d_front, and a bias d_back",
                do="Adapter('affine', weight, bias)",
            )
        if weight is not None and not weight.is_floating_point():
            raise LayersimError(
                "An adapter multiplies, and whole numbers would cut residuals to whole numbers.",
                given=f"a weight of {weight.dtype}",
                expected="floating-point weights",
                do="weight.float()",
            )
        self.kind = kind
        # Buffers: an adapter that is done is moved and saved with a model, and trained by nobody by accident.
        self.register_buffer("weight", None if weight is None else weight.detach().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """The mapped residual, in the adapter's dtype; of `identity` in its own."""
        if self.weight is None:
            return hidden
        return mapped(self.kind, hidden.to(self.weight.dtype), self.weight, self.bias)

    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of its kind and numbers."""
        found = hashlib.sha256(self.kind.encode())
        for part in (self.weight, self.bias):
            found.update(b"|" if part is None else part.detach().double().cpu().contiguous().numpy().tobytes() + b"|")
        return found.hexdigest()[:12]

    def extra_repr(self) -> str:
        return self.kind if self.weight is None else f"{self.kind}, {self.weight.shape[1]} -> {self.weight.shape[0]}"


def features(kind: str, hidden: Tensor) -> Tensor:
    """What the weights of an adapter are applied to: the residual, or its layer norm."""
    return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:]) if kind == "affine-norm" else hidden


def skips(kind: str, d_front: int, d_back: int) -> bool:
    """Whether the residual itself comes through beside what the weights make of it."""
    return kind == "affine-norm" and d_front == d_back


def mapped(kind: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The adapter's map with these weights."""
    out = torch.nn.functional.linear(features(kind, hidden), weight, bias)
    return hidden + out if skips(kind, hidden.shape[-1], weight.shape[0]) else out


def own_moments(kind: str, hidden: Tensor) -> dict[str, Tensor]:
    """Sums over tokens `token d_front` of the front alone: what the closed form needs of it."""
    u = features(kind, hidden.double())
    return {"count": torch.tensor(u.shape[0]), "u": u.sum(0), "uu": u.T @ u}


def cross_moments(kind: str, hidden: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Sums over tokens of front `token d_front` and back `token d_back` together: what the closed form needs of both."""
    hidden, target = hidden.double(), target.double()
    u = features(kind, hidden)
    if skips(kind, hidden.shape[-1], target.shape[-1]):
        target = target - hidden
    return {"t": target.sum(0), "ut": u.T @ target, "tt": target.square().sum()}


def typical_size(hidden: Tensor) -> float:
    """Geometric mean over tokens `token d_model` of the root mean square of each: a few massive tokens do not set it."""
    size = hidden.double().square().mean(-1).sqrt()
    return float(size[size > 0].log().mean().exp()) if bool((size > 0).any()) else 1.0


def solve(kind: str, moments: Mapping[str, Tensor], ridge: float) -> tuple[Tensor, Tensor | None, float]:
    """Weight and bias that bring the map nearest to the back's residual in squares, and the share that they explain.

    Args:
        kind: of the adapter.
        moments: sums of `own_moments` and `cross_moments` over all tokens.
        ridge: what is added to the diagonal of X'X, in units of its mean.

    Returns:
        `d_back d_front`, `d_back` or None, and R² over the tokens of the fit (for an adapter that skips: of what is left after
        the residual itself).
    """
    n, uu, ut = float(moments["count"]), moments["uu"], moments["ut"]
    if kind != "linear":
        uu = uu - torch.outer(moments["u"], moments["u"]) / n
        ut = ut - torch.outer(moments["u"], moments["t"]) / n
    damped = uu + ridge * uu.diagonal().mean() * torch.eye(len(uu), dtype=uu.dtype)
    # Features of very different sizes, as massive activations are, would cost digits.
    size = damped.diagonal().clamp(min=0).sqrt()
    size = torch.where(size > 0, size, 1.0)
    values, vectors = torch.linalg.eigh(damped / size / size[:, None])
    # Directions that no token has are left at zero, which gives the smallest weights.
    inverse = torch.where(values > RANK * values[-1], 1.0 / values, 0.0)
    weight = ((vectors * inverse) @ (vectors.T @ (ut / size[:, None]))).T / size
    bias = None if kind == "linear" else (moments["t"] - weight @ moments["u"]) / n
    total = moments["tt"] - (moments["t"].square().sum() / n if bias is not None else 0.0)
    left = total - 2 * (weight.T * ut).sum() + ((weight @ uu) * weight).sum()
    return weight, bias, float(1.0 - left / total) if total > 0 else float("nan")
