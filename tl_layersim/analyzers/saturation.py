"""Saturation: the layer after which a token's most likely next token no longer changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.norms import beyond_rounding
from ..activations.view import Kernel, View
from ..architectures.unembed import LayerHeads
from ..core import Result, Sums, ValuesAlias, axes, result_class, typed, warn, without_nan
from ..core.intervals import with_margin
from ..core.result_declarations import last_entry
from ..lens.statistics import read_vectors, saturation_layers
from .analyzer import Run, omitted_at
from .cosine import mean_kernel
from .logit_lens import LensAnalyzer
from .needs import Needs

SATURATION_SOURCE = "(Jiang, Zhou and Zhu 2024, {}; saturation events were defined by Geva et al. 2022)."


@result_class
class SaturationResult(Result):
    """Number of tokens that saturate at each block, and mean cosine of their residuals to the last layer. Tensors are float64.

    Attributes:
        values: `layer`, the same as `counts`: number of tokens that saturate at each block.
        cumulative: `layer`, fraction of tokens that saturate at this block or before; 1 at the last block.
        early_share: fraction of tokens that saturate before the last block.
        cosine_to_last: `layer`, cosine between the residuals at a block and at the last block, mean over the tokens that
            saturate at the block. NaN without such tokens, or if all their residuals are zero (with centring: equal to the
            mean).
        correlation: Pearson correlation of `counts` and `cosine_to_last` over all blocks but the last; NaN if fewer than three
            blocks have a cosine, or if either is constant.
        unembedding: the map from the residual x to logits.
    """

    counts = ValuesAlias()
    values: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Tokens that saturate",
        title="Tokens that saturate at each block",
        caption="Number of tokens whose most likely next token is final from each block on "
        + SATURATION_SOURCE.format("figures 1 c, 3 and 19"),
        within=(0, math.inf),
        by_chance=(0, 1),
        out_of="values",
        drawn="bars",
    )
    cumulative: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Tokens",
        unit="fraction",
        title="Tokens that have saturated by each layer",
        caption="Fraction of tokens that saturate at each block or before " + SATURATION_SOURCE.format("figures 1 c, 3 and 19"),
        within=(0, 1),
        by_chance=(0, 1),
        certain=last_entry,
    )
    early_share: Float64[Tensor, ""] = axes(
        label="Positions that saturate before the last layer",
        unit="fraction",
        within=(0, 1),
        by_chance=(0, 1),
    )
    cosine_to_last: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Cosine similarity",
        title="Cosine to the last layer, by saturation layer",
        caption="Mean cosine to the residual at the last layer, of the tokens that saturate at each block "
        + SATURATION_SOURCE.format("figures 3 and 6"),
        within=(-1, 1),
    )
    correlation: Float64[Tensor, ""] = axes(within=(-1, 1))
    unembedding: str

    def headline(self) -> dict[str, float]:
        blocks = torch.arange(len(self.values), dtype=torch.float64)
        return without_nan(
            {
                "saturated before the last block (fraction)": self.early_share,
                "mean saturation block": (self.values * blocks).sum() / self.values.sum(),
                "correlation with the cosine to the last layer": self.correlation,
            }
        )

    def finding(self) -> str:
        early = with_margin(self, lambda result: result.early_share, percent=True)
        return f"{early} of the tokens have their final prediction before the last block."


@typed
@dataclass(frozen=True, eq=False)
class Saturation(LensAnalyzer):
    r"""Saturation layer of each token: the first block after which its most likely next token no longer changes.

    $$l_t = \min \{ l : \arg\max_v \mathrm{logits}^{(l)}_{t v} = \dots = \arg\max_v \mathrm{logits}^{(L)}_{t v} \}$$

    The result is exact and cheaper than the logit lens: from the last block down, logits are computed only for tokens that
    agree with the final prediction so far. In one run with a `LogitLens` or `ExitCurve` listed before it, with the same norm
    and heads, it reuses their logits. Of equal logits the lowest id counts as most likely.

    Args:
        norm: "final" applies the model's final norm to every layer, "none" to the last layer only; see `LogitLens`.
        center: centring for the cosine to the last layer. "none" takes raw residuals; "dataset" subtracts each layer's mean
            over all counted tokens, as `Cosine()` does, which takes a first pass over the data.
        lens_memory_mb: megabytes for the logits of one chunk of tokens.
        heads: `ExitHeads` of the layers below the last, or their file; see `LogitLens`.

    Source:
        Geva et al. 2022; Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 2.2, figures 1 c, 3, 6 and 19.

    Examples:
        Every token saturates at the last block at the latest.

        >>> import tl_layersim as lsim
        >>> saturation = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Saturation()])["saturation"]
        >>> int(saturation.counts.sum()) == saturation.provenance.tokens, float(saturation.cumulative[-1])
        (True, 1.0)
    """

    name: ClassVar[str] = "saturation"

    center: Literal["none", "dataset"] = "none"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, sites="every_block", one_pass='Saturation(center="none")')

    def first_kernel(self) -> Kernel | None:
        return mean_kernel if self.center == "dataset" else None

    def kernel(self, first: Sums) -> Kernel:
        mean = first["total"] / first["count"] if first else None
        return partial(saturation_kernel, mean=mean, **self.lens)

    def compute(self, sums: Sums, run: Run) -> SaturationResult:
        counts = sums["counts"].double()
        total = int(sums["counts"].sum())
        self.check_sums(sums, run)
        omitted = omitted_at(run.layers[1:], sums["counts"] - sums["known"], sums["counts"])
        if omitted:
            warn(
                f"The cosine is not defined for tokens whose residual {'equals the mean' if run.first else 'is zero'} up to "
                f"rounding. `cosine_to_last` omits these tokens: {omitted}."
            )
        # 0 / 0 is NaN, at blocks without tokens that have a cosine.
        cosine = (sums["cosine"] / sums["known"]).clamp(-1, 1)
        # The cosine of the last block's residual with itself is exactly 1.
        cosine[-1] = 1.0 if sums["known"][-1] else math.nan
        return SaturationResult(
            values=counts,
            cumulative=counts.cumsum(0) / total,
            early_share=counts[:-1].sum() / total,
            cosine_to_last=cosine,
            correlation=_correlation(counts[:-1], cosine[:-1]),
            unembedding=self.unembedding(run),
            layers=run.layers,
            provenance=run.provenance,
        )


def _correlation(counts: Tensor, cosine: Tensor) -> Tensor:
    """Pearson correlation of counts and cosines over blocks, without blocks of NaN cosine.

    NaN for fewer than three blocks or constant values.
    """
    defined = ~cosine.isnan()
    x = counts[defined]
    y = cosine[defined]
    if len(x) < 3 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return torch.tensor(math.nan, dtype=torch.float64)
    return torch.corrcoef(torch.stack([x, y]))[0, 1]


def saturation_kernel(
    view: View, *, normed: bool, mean: Tensor | None, memory_mb: float, heads: LayerHeads | None = None
) -> dict[str, Tensor]:
    """Count tokens that saturate at each block, and sum their cosines to the last layer.

    Args:
        view: activations of one batch.
        normed: whether the final norm is applied to every layer, not only to the last one.
        mean: `residual d_model` to subtract for the cosine, None for no centring.
        memory_mb: megabytes for logits.
        heads: heads for the layers below the last; None to use the model's own head at every layer.
    """
    layer, bad = saturation_layers(view, normed, memory_mb, heads)
    x = read_vectors(view, view.activations)
    blocks = len(x) - 1
    width = x.shape[-1]
    mean = torch.zeros(len(x), width, dtype=torch.float64) if mean is None else mean
    # A head that reads rows may read several vectors, one after the other, each of which has this mean.
    mean = mean.to(x.device).repeat(1, width // mean.shape[-1])
    index = torch.arange(len(layer), device=layer.device)
    # The mean at the saturation layer and at the last layer, `2 token d_model`.
    offset = torch.stack([mean[layer + 1], mean[-1].expand(len(layer), -1)])
    centred = torch.stack([x[layer + 1, index], x[-1, index]]).double() - offset
    has_cosine = beyond_rounding(centred.to(x), offset.to(x)).all(0)
    saturated, last = centred
    cosine = ((saturated * last).sum(-1) / (saturated.norm(dim=-1) * last.norm(dim=-1)))[has_cosine]
    layer_with_cosine = layer[has_cosine]
    return {
        "counts": torch.bincount(layer, minlength=blocks),
        "cosine": torch.zeros(blocks, dtype=torch.float64, device=layer.device).index_add(0, layer_with_cosine, cosine),
        "known": torch.bincount(layer_with_cosine, minlength=blocks),
        "bad": bad,
    }
