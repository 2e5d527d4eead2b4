"""Kernel of `Trajectory`: sums over tokens of the shapes of their paths through the layers.

It is serialised by value and runs on servers too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations.norms import norms, unit_vectors
from ..activations.view import View
from ._values_by_row import sums_by_row

# Range of the logarithmic histograms of unbounded quantities, in decades.
DECADES = (-6.0, 8.0)
# Quantities of a token's whole path, whose means over each row of the data are fields too.
PROMPT_FIELDS = ("lss", "expodistance", "equidistance")


def trajectory_kernel(view: View, *, window: int, final_norm: bool = False, rows: Tensor | None = None) -> dict[str, Tensor]:
    """Sums over tokens of the quantities of their trajectories and of the squares, with logarithmic histograms.

    Tokens are processed in chunks, so that intermediate tensors are small beside the residual.

    Args:
        view: activations of one batch.
        window: steps of the windowed LSS, 0 for none.
        final_norm: whether the last layer is read after the model's final norm.
        rows: indices of all rows of the data, to sum by row; None not to sum by row.
    """
    x = view.activations
    tokens, last = x.shape[1], x[-1]
    if final_norm:
        assert view.unembed is not None
        last = view.unembed.normed(last).to(x)
    columns: dict[str, list[Tensor]] = {}
    for start in range(0, tokens, 256):
        for name, value in _paths(_ended(x, last, start, start + 256), window).items():
            columns.setdefault(name, []).append(value)
    of = {name: torch.cat(parts, -1) for name, parts in columns.items()}
    of["curvature"] = _angles(view, last)
    out = {
        "count": torch.tensor(tokens),
        "zero_residual": (of["norm"] == 0).sum(-1),
        "zero_update": (of["update"] == 0).sum(-1),
        "flat": (of["mean growth"] == 0).sum(),
        "turns": torch.tensor(of["curvature"].shape[1]),
    }
    for name in ("norm", "update", "growth", "lss", "expodistance", "equidistance", "windowed", "curvature", "deviation"):
        known = ~of[name].isnan()
        values = of[name].where(known, 0)
        out |= {name: values.sum(-1), f"{name}^2": values.square().sum(-1), f"{name} known": known.sum(-1)}
        if name not in ("growth", "windowed", "curvature", "deviation"):
            out[f"{name} bins"] = log_histogram(of[name], known)
    if rows is not None:
        assert view.row is not None
        for name in PROMPT_FIELDS:
            known = ~of[name].isnan()
            out[f"prompt {name}"] = sums_by_row(of[name].where(known, 0), view.row, rows)
            out[f"prompt {name} known"] = sums_by_row(known, view.row, rows)
        out["prompt norm"] = sums_by_row(of["norm"].T, view.row, rows)
        out["prompt tokens"] = sums_by_row(torch.ones(tokens, device=x.device), view.row, rows)
    return out


def _ended(x: Tensor, last: Tensor, start: int, end: int) -> Tensor:
    """Residuals `layer token d_model` of the tokens `start` to `end`; the last layer is read from `last`, `token d_model`."""
    return torch.cat([x[:-1, start:end], last[None, start:end]])


def _angles(view: View, last: Tensor) -> Tensor:
    """Angles between consecutive steps from token to token at each layer, `layer triple`, float64.

    A triple is three consecutive positions of a row. NaN where two neighbours are equal: their step has no direction.

    Args:
        view: activations of one batch.
        last: `token d_model`, residuals of the last layer.
    """
    x, row, position = view.activations, view.sequence, view.position
    triples = (row[2:] == row[:-2]) & (position.diff()[1:] == 1) & (position.diff()[:-1] == 1)
    parts = [torch.zeros(len(x), 0, dtype=torch.float64, device=x.device)]
    for start in range(0, len(triples), 256):
        inside = triples[start : start + 256].to(x.device)
        step = _ended(x, last, start, start + len(inside) + 2).diff(dim=1)
        unit, length = unit_vectors(step)
        unit = unit.where(length[..., None] > 0, torch.nan)
        before, after = unit[:, :-1][:, inside], unit[:, 1:][:, inside]
        # Exact at small angles too, where an arccos is not.
        parts.append(2 * torch.atan2((after - before).double().norm(dim=-1), (after + before).double().norm(dim=-1)))
    return torch.cat(parts, 1)


def _paths(x: Tensor, window: int) -> dict[str, Tensor]:
    """Quantities of each token's trajectory, `layer token` or `token`, from residuals `layer token d_model`. Float64."""
    step = x[1:] - x[:-1]
    unit, update = unit_vectors(step)
    norm = torch.stack([norms(layer) for layer in x])
    growth = (norm[1:] / norm[:-1]).log()
    growth = growth.where(growth.isfinite(), torch.nan)
    # The mean of the logarithms, which is exactly 0 where the first and the last norm are equal.
    mean_growth = (norm[-1] / norm[0]).log().where(~growth.isnan().any(0), torch.nan) / len(growth)
    # Cumulative sums of unit steps in float64: the sum over any segment is the difference of two of them.
    travelled = torch.zeros(len(x), *x.shape[1:], dtype=torch.float64, device=x.device)
    torch.cumsum(unit.double(), 0, out=travelled[1:])
    still = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    torch.cumsum(update == 0, 0, out=still[1:])
    blocks = len(step)
    length = norms(x[-1] - x[0])
    share = torch.arange(len(x), device=x.device).to(x)[:, None, None] / blocks
    away = torch.stack([norms(one - (1 - at) * x[0] - at * x[-1]) for one, at in zip(x, share, strict=True)])

    def score(steps: int) -> Tensor:
        """LSS of each segment of `steps` steps, NaN if a step is zero."""
        distance = (travelled[steps:] - travelled[: len(x) - steps]).norm(dim=-1)
        # At least 1 by the triangle inequality; rounding of unit steps can leave a straight path just below.
        lss: Tensor = (steps / distance).clamp(min=1).where(still[steps:] == still[: len(x) - steps], torch.nan)
        return lss

    return {
        "norm": norm,
        "update": update,
        "deviation": away / length.where(length > 0, torch.nan),
        "growth": growth,
        "mean growth": mean_growth,
        "lss": score(blocks)[0],
        "expodistance": growth.var(0, correction=0) / mean_growth.where(mean_growth != 0, torch.nan).square(),
        "equidistance": update.std(0, correction=0) / update.mean(0),
        "windowed": score(window) if window else norm[:0],
    }


def log_histogram(values: Tensor, known: Tensor) -> Tensor:
    """Histograms of the known values, `... token` to `... bin`, in bins of a hundredth of a decade."""
    low, high = DECADES
    bins = int((high - low) * 100)
    flat = values.flatten(0, -2) if values.dim() > 1 else values[None]
    index = ((flat.clamp(min=10**low).log10().nan_to_num(low, posinf=high) - low) * 100).long().clamp(0, bins - 1)
    offset = bins * torch.arange(len(flat), device=values.device)[:, None]
    counts = torch.bincount((index + offset)[known.reshape(flat.shape)], minlength=bins * len(flat))
    return counts.reshape(*values.shape[:-1], bins)
