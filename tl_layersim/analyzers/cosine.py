"""Cosine similarity between the residual layers of one model, token by token."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..core.histogram import QUANTILES, quantiles_from_histogram
from ..core.results import LayerMatrix, Picture, axes
from ..core.sums import Sums
from ..core.typed import typed
from ..models.layer_logits import read_positions
from ..models.model_info import Model
from ..models.view import Kernel, View
from ._hsic import beyond_rounding
from .base import Analyzer, Run, need_head, need_tokens


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CosineResult(LayerMatrix):
    """What `Cosine` measures. All tensors are float64.

    Attributes:
        values: `residual residual`, mean over tokens of COS(l, l'); symmetric, 1 on the diagonal. A token whose residual is
            zero (after centring: the mean itself, up to rounding) has no cosine there and is left out at that layer; NaN in the
            row and column of a layer where that is every token. A `LayersimWarning` names the layers.
        std: `residual residual`, standard deviation over tokens (divided by N).
        below_zero: `residual residual`, share of tokens whose cosine is negative.
        to_last: `quantile residual`, quantiles over tokens of COS(l, L), to within one histogram bin.
        adjacent: `quantile layer`, quantiles over tokens of COS(l - 1, l), to within one histogram bin.
        norm_ratio: `layer`, mean over tokens of |x| / |f(x)| of each block, x what enters it, f(x) what it adds; infinite if
            a block adds nothing to some token; NaN where `layers=` leaves out blocks before it, or names modules that are none.
        monotone_share: share of tokens for which COS(l, L) rises strictly at every l, l = 0 included; of those that have a
            cosine at every layer.
        mean: `residual d_model`, what was subtracted (no columns for center="none"). Give it to `Cosine(center=...)`.
        quantiles: the levels of the two quantile fields.
    """

    std: Float64[Tensor, "row column"] = axes("row", "column")
    below_zero: Float64[Tensor, "row column"] = axes("row", "column")
    to_last: Float64[Tensor, "quantile row"] = axes("quantile", "residual")
    adjacent: Float64[Tensor, "quantile layer"] = axes("quantile", "layer")
    norm_ratio: Float64[Tensor, " layer"] = axes("layer")
    monotone_share: Float64[Tensor, ""] = axes()
    mean: Float64[Tensor, "row d_model"] = axes("residual", "dimension")
    quantiles: tuple[float, ...] = QUANTILES

    pictures: ClassVar[tuple[Picture, ...]] = (
        Picture(
            "values",
            "Cosine similarity between layers",
            "Mean over tokens of the cosine between a token's residual at two layers; a plateau of high values at the end "
            "marks layers that change little (Jiang, Zhou and Zhu 2024, section 2.1, figure 2 c-d).",
        ),
        Picture(
            "to_last",
            "Cosine similarity to the last layer",
            "How far each layer already points where the last layer will point, as quantiles over tokens; theorem 2.1 "
            "expects a rise with depth (Jiang, Zhou and Zhu 2024, figure 2 a-b).",
        ),
        Picture(
            "adjacent",
            "Cosine of adjacent layers",
            "How little each block turns a token's residual, as quantiles over tokens "
            "(Jiang, Zhou and Zhu 2024, appendix, figure 11 left).",
        ),
        Picture(
            "norm_ratio",
            "Stream norm over update norm",
            "High values say that the residual stream passes a block almost unchanged "
            "(Jiang, Zhou and Zhu 2024, appendix, figure 11 right).",
        ),
    )

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Labels of the `dimension` axis of `mean`."""
        return tuple(range(self.mean.shape[-1]))

    def headline(self) -> dict[str, float]:
        to_last = self.values[:, -1]
        steps = to_last.diff()
        steps = steps[~steps.isnan()]
        return {
            f"COS({self.first_layer()}, last)": float(to_last[0]),
            "COS(last but one, last)": float(to_last[-2]),
            "share of steps at which mean COS to the last layer rises": float(
                (steps > 0).double().mean() if len(steps) else math.nan
            ),
            "share of tokens whose COS to the last layer rises at every step": float(self.monotone_share),
        }


@typed
@dataclass(frozen=True, eq=False)
class Cosine(Analyzer):
    r"""Cosine similarity of a token's residual at every pair of layers, with its spread over tokens.

    $$\mathrm{COS}(l, l') = \frac{1}{N} \sum_t \frac{\langle x_t^l - \mu^l, x_t^{l'} - \mu^{l'} \rangle}
    {|x_t^l - \mu^l| \, |x_t^{l'} - \mu^{l'}|}$$

    The norm ratio of figure 11 is of raw residuals whatever the centring.

    Args:
        center: "dataset" subtracts each layer's mean over all counted tokens (the paper's footnote 2; a first pass over the
            data sums it); "none" subtracts nothing; a tensor `residual d_model` is subtracted as it is.
        histogram_bins: bins over [-1, 1] of the histograms that quantiles are read from; their error is below 2 / bins.
        positions: "every" counted token; "head" only those that the model's head reads: [CLS] or the last token of a row
            classifier, as in the paper's figures of classifiers, and every token of a language model.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 2.1, theorem 2.1, figures 2, 4 and 11.

    Example:
        >>> import tl_layersim as lsim
        >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Cosine()])
        >>> report["cosine"].values.shape
        torch.Size([9, 9])
    """

    name: ClassVar[str] = "cosine"
    one_pass: ClassVar[str] = 'Cosine(center="none"), or Cosine(center=mean) with the .mean of an earlier result'

    center: Literal["dataset", "none"] | Tensor = "dataset"
    histogram_bins: int = 2000
    positions: Literal["every", "head"] = "every"

    def __post_init__(self) -> None:
        if isinstance(self.center, Tensor) and (self.center.dim() != 2 or not bool(self.center.isfinite().all())):
            raise LayersimError(
                "A mean to subtract has a finite number for each layer and dimension.",
                given=f"a tensor of shape {tuple(self.center.shape)}, {int((~self.center.isfinite()).sum())} not finite",
                expected="residual x d_model, finite",
                do='Cosine(center=report["cosine"].mean)',
            )
        if self.histogram_bins < 2:
            raise LayersimError(
                "Cosine needs bins to count in.",
                given=f"histogram_bins={self.histogram_bins}",
                expected="2 or more",
                do="Cosine(histogram_bins=2000)",
            )

    def check(self, *models: Model) -> None:
        if self.positions == "head":
            need_head(models[0], "Cosine(positions='head')")
        if isinstance(self.center, Tensor):
            model = models[0]
            wrong_width = model.d_model is not None and self.center.shape[-1] != model.d_model
            if self.center.shape[0] != len(model.layers) or wrong_width:
                raise LayersimError(
                    "The given mean does not fit the model.",
                    given=f"center of shape {tuple(self.center.shape)}",
                    expected=f"({len(model.layers)}, {model.d_model or 'd_model'}): residual layers x d_model",
                    do='Cosine(center=report["cosine"].mean), from a run of Cosine(center="dataset") on the same model',
                )

    def first_kernel(self) -> Kernel | None:
        if not isinstance(self.center, str) or self.center != "dataset":
            return None
        return partial(mean_kernel, at_head=True) if self.positions == "head" else mean_kernel

    def kernel(self, first: Sums) -> Kernel:
        kernel = partial(cosine_kernel, mean=self._mean(first), bins=self.histogram_bins)
        return partial(kernel, at_head=True) if self.positions == "head" else kernel

    def _mean(self, first: Sums) -> Tensor | None:
        if isinstance(self.center, Tensor):
            return self.center.to(torch.float64)
        return first["total"] / first["count"] if first else None

    def compute(self, sums: Sums, run: Run) -> CosineResult:
        count = int(sums["count"])
        offset = self._mean(run.first)
        need_tokens(count, 2 if run.first else 1, "Cosine")
        # How many tokens have a cosine at both layers; 0 / 0 is NaN.
        pairs = sums["pairs"].double()
        warn_of_zeros(count - sums["pairs"].diagonal(), count, run.layers, offset is not None)
        mean = sums["sum"] / pairs
        itself = torch.eye(len(pairs), dtype=torch.bool) & (pairs > 0)
        # Rounding may carry a cosine past 1 and a variance below 0; with itself a layer's cosine is 1, without spread.
        std = (sums["square"] / pairs - mean**2).clamp(min=0).sqrt().masked_fill(itself, 0)
        to_last = quantiles_from_histogram(sums["to_last"], -1.0, 1.0, QUANTILES)
        to_last[:, -1] = to_last[:, -1].masked_fill(itself[-1, -1], 1)
        return CosineResult(
            values=mean.clamp(-1, 1).masked_fill(itself, 1),
            std=std,
            below_zero=sums["negative"].double() / pairs,
            to_last=to_last,
            adjacent=quantiles_from_histogram(sums["adjacent"], -1.0, 1.0, QUANTILES),
            norm_ratio=(sums["norm_ratio"] / count).where(adjacent_sites(run.layers, run.stream), math.nan),
            monotone_share=sums["monotone"].double() / sums["whole"],
            mean=torch.zeros(len(run.layers), 0, dtype=torch.float64) if offset is None else offset,
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
        )


def adjacent_sites(layers: tuple[str, ...], stream: str) -> Tensor:
    """`layer`, whether what stands between a site and the one before it is one block."""
    if stream != "parts":
        return torch.full((len(layers) - 1,), stream == "whole")
    number = [int(name.split(".")[1]) for name in layers]
    # What enters a block has that block's number.
    return torch.tensor([True, *(b - a == 1 for a, b in itertools.pairwise(number[1:]))])


def warn_of_zeros(zero: Tensor, count: int, layers: tuple[str, ...], centred: bool) -> None:
    """Name the layers at which tokens have no cosine; refuse a run where no token has one.

    Args:
        zero: `layer`, how many tokens.
        count: of all tokens.
        layers: names of the layers.
        centred: whether a mean was subtracted.
    """
    where = [f"{name}: {int(n)} of {count}" for name, n in zip(layers, zero, strict=True) if n]
    what = "is the mean itself" if centred else "is zero"
    if bool((zero == count).all()):
        raise LayersimError(
            "The cosine of a zero vector is not defined, and there is no other.",
            given=f"{count} tokens whose residual {what} at every layer",
            expected="residuals that differ from " + ("their mean" if centred else "zero"),
            do="pass more varied data" + (', or Cosine(center="none")' if centred else ""),
        )
    if where:
        warn(
            f"Cosines of tokens whose residual {what} up to rounding are not defined, and left out: "
            f"{', '.join(where[:4])}{' and at other layers' if len(where) > 4 else ''}. Where that is every token, as at a "
            "first token or [CLS] before the first attention, values are NaN."
        )


def mean_kernel(view: View, *, at_head: bool = False) -> dict[str, Tensor]:
    """Sum of the residual over tokens, and how many there are."""
    x = lens_positions(view) if at_head else view.residual
    return {
        # Layer by layer: a sum with another dtype first makes a copy of all that it sums.
        "total": torch.stack([layer.sum(0, dtype=torch.float64) for layer in x]),
        "count": torch.tensor(x.shape[1]),
    }


def lens_positions(view: View) -> Tensor:
    """`layer token d_model`: the residual at the positions that the head reads."""
    index = read_positions(view)
    return view.residual if index is None else view.residual[:, index]


def cosine_kernel(view: View, *, mean: Tensor | None, bins: int, at_head: bool = False) -> dict[str, Tensor]:
    """Sums over tokens of cosines between all layers, their squares, signs and histograms.

    Tokens go through in chunks so that the working copy stays small beside the residual itself.
    """
    x = lens_positions(view) if at_head else view.residual
    layers, tokens, _ = x.shape
    device = x.device
    out = {
        "count": torch.tensor(tokens),
        "whole": torch.tensor(0, device=device),
        "pairs": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "sum": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "square": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "negative": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "to_last": torch.zeros(layers, bins, dtype=torch.int64, device=device),
        "adjacent": torch.zeros(layers - 1, bins, dtype=torch.int64, device=device),
        "norm_ratio": torch.zeros(layers - 1, dtype=torch.float64, device=device),
        "monotone": torch.tensor(0, device=device),
    }
    offset = x.new_zeros(layers, 1, 1) if mean is None else mean.to(x)[:, None]
    for start in range(0, tokens, 256):
        chunk = x[:, start : start + 256]
        ratio = chunk[:-1].norm(dim=-1) / (chunk[1:] - chunk[:-1]).norm(dim=-1)
        out["norm_ratio"] += ratio.sum(1, dtype=torch.float64)
        centred = chunk - offset
        norm = centred.norm(dim=-1, keepdim=True)
        known = beyond_rounding(centred, offset)
        whole = bool(known.all())
        known = known.T
        unit = (centred / norm.clamp(min=torch.finfo(x.dtype).tiny)).transpose(0, 1)
        cosine = torch.bmm(unit, unit.transpose(1, 2)).clamp(-1, 1)
        if not whole:
            # Zero adds nothing to the sums, and is counted nowhere.
            cosine = cosine * (known[:, :, None] & known[:, None, :])
        seen = known.double()
        out["pairs"] += (seen.T @ seen).long()
        out["whole"] += known.all(1).sum()
        out["sum"] += cosine.sum(0, dtype=torch.float64)
        # Squared in float64: near 1 the spread would be lost in the rounding of float32 squares.
        out["square"] += cosine.double().square().sum(0)
        out["negative"] += (cosine < 0).sum(0)
        last = cosine[:, :, -1]
        out["monotone"] += ((last[:, 1:] > last[:, :-1]).all(1) & known.all(1)).sum()
        out["to_last"] += _count(last, known & known[:, -1:], bins)
        out["adjacent"] += _count(cosine.diagonal(offset=1, dim1=1, dim2=2), known[:, 1:] & known[:, :-1], bins)
    return out


def _count(values: Tensor, known: Tensor, bins: int) -> Tensor:
    """Histogram over [-1, 1] of the known ones in each column of `values` (token series): series bin."""
    index = ((values + 1) * (bins / 2)).long().clamp(0, bins - 1)
    series = values.shape[1]
    index = index + bins * torch.arange(series, device=values.device)
    return torch.bincount(index[known], minlength=series * bins).reshape(series, bins)
