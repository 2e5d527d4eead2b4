"""Effects of skipping one block on the contributions of later blocks and on the output probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel
from ..core.arguments import NonNegativeInt, PositiveFloat, typed
from ..core.errors import LayersimError, warn
from ..core.findings import with_margin
from ..core.results import Result, axes
from ..core.sums import Sums
from ..jacobians.supported_blocks import need_calls, refuse_failed_replay
from ..sources.model import Model
from ._skip_effect_kernel import skip_effect_kernel
from .analyzer import CSORDAS, Analyzer, Run, SiteNeed


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SkipEffectResult(Result):
    """Effects of skipping each block: means over tokens, and means over rows of the largest effect. Float64.

    Attributes:
        values: `skipped affected`, mean over tokens of the relative change |c - c~| / |c| of the affected block's contribution
            c when the skipped block is left out. NaN unless the affected block is above the skipped one. Tokens with c = 0 have
            no relative change and are omitted; a `LayersimWarning` names the block.
        largest: `skipped affected`, the largest relative change in a row, averaged over rows.
        later: `skipped affected`, as `values`, but the block is skipped only before a split of the row, and the change is
            measured only after it. NaN for `splits=0`.
        later_largest: `skipped affected`, `largest` for the tokens of `later`.
        probability_change: `skipped`, mean over tokens of |p - p~|, the Euclidean norm of the change of the output
            probabilities, at most sqrt(2). NaN for a model without a known head, or with a head of one output.
        probability_change_largest: `skipped`, the largest such norm in a row, averaged over rows.
        later_probability_change: `skipped`, `probability_change` for the tokens of `later`. NaN for a head that reads the first
            position of a row, or several: it reads positions at which the block is skipped.
        later_probability_change_largest: `skipped`, `probability_change_largest` for the tokens of `later`.
    """

    file_kind: ClassVar[str] = "skip_effect"
    values: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change",
        title="Effect of a skipped block on later blocks",
        caption="Relative change of each block's contribution to the residual stream when an earlier block is skipped, mean "
        "over tokens. A dark row is a block on which no later block depends "
        + CSORDAS.format("figure 3, with maxima instead of means"),
        within=(0, math.inf),
    )
    largest: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change (largest in a row)",
        title="Largest relative change in a row, when a block is skipped",
        within=(0, math.inf),
    )
    later: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change",
        title="Effect of a skipped block on later positions",
        caption="The same, but the block is skipped only in the first part of each row and the change is measured in the "
        "rest, which the block reaches through attention " + CSORDAS.format("figure 3"),
        within=(0, math.inf),
    )
    later_largest: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change (largest in a row)",
        title="Largest relative change of later tokens in a row, when a block is skipped",
        within=(0, math.inf),
    )
    probability_change: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (norm)",
        title="Effect of a skipped block on the output probabilities",
        caption="Norm of the change of the output probabilities, mean over tokens " + CSORDAS.format("figure 3"),
        within=(0, math.sqrt(2)),
    )
    probability_change_largest: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (largest norm in a row)",
        title="Largest change of the predictions in a row, when a block is skipped",
        within=(0, math.sqrt(2)),
    )
    later_probability_change: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (norm)",
        title="Change of later predictions when a block is skipped",
        within=(0, math.sqrt(2)),
    )
    later_probability_change_largest: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (largest norm in a row)",
        title="Largest change of later predictions in a row, when a block is skipped",
        within=(0, math.sqrt(2)),
    )

    def headline(self) -> dict[str, float]:
        half = len(self.values) // 2
        numbers = {
            "relative change, mean over pairs": self.values.nanmean(),
            "relative change, first half skipped": self.values[:half].nanmean(),
            "relative change, second half skipped": self.values[half:].nanmean(),
            "relative change at later positions": self.later.nanmean(),
            "change of the probabilities, mean": self.probability_change.nanmean(),
        }
        return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}

    def finding(self) -> str:
        half = len(self.values) // 2
        if not half or bool(self.values.isnan().all()):
            return ""
        every = with_margin(self, lambda one: one.values.nanmean())
        first = with_margin(self, lambda one: one.values[:half].nanmean())
        second = with_margin(self, lambda one: one.values[half:].nanmean())
        return (
            f"Skipping a block changes what later blocks add by a relative {every} on average: {first} in the first half of "
            f"the blocks, {second} in the second."
        )


@typed
@dataclass(frozen=True, kw_only=True)
class SkipEffect(Analyzer):
    r"""Skip one block, and measure how much the contributions of all later blocks and the output probabilities change.

    $$
    c^l_t = x^l_t - x^{l-1}_t, \qquad
    E_{sl} = \operatorname{mean}_t \frac{\lVert c^l_t - \tilde c^l_t \rVert}{\lVert c^l_t \rVert}, \qquad
    P_s = \operatorname{mean}_t \lVert p_t - \tilde p_t \rVert
    $$

    A skipped block s passes its input on unchanged; c~ and p~ are the contributions of the blocks l > s and the output
    probabilities that result. Blocks are run again on whole rows, with the arguments of their own calls. In a first variant
    the block is skipped at all positions. In a second variant the block is skipped at the positions before a split, and effects
    are measured at the positions from the split on, at which the block itself runs: these positions depend on the skipped
    computation through attention only. A row of n positions is split at floor(n i / (splits + 1)) for i = 1 to `splits`; the
    authors draw splits at random.

    Args:
        keep_first: number of first positions of each row at which no block is skipped and no effect is measured: 1 as in the
            authors' code, because many language models attend to the first token from everywhere; 0 for encoders.
        splits: number of splits of each row for `later`, each of which costs about half a forward pass for each block; 0 leaves
            `later` out.
        lens_memory_mb: megabytes for the logits and probabilities of one chunk of tokens.

    Source:
        Csordás, Manning and Potts 2025 (arXiv 2505.13898), section 3, figure 3. The figure shows maxima over positions
        and prompts.

    Examples:
        The first block of the demo model matters to every later block, the last but one to the last block alone.

        >>> import tl_layersim as lsim
        >>> data = lsim.Data(lsim.demo_text()[:2], seq_len=32)
        >>> effect = lsim.analyze(lsim.demo_model(), data, lsim.SkipEffect())["skip_effect"]
        >>> effect.values.shape, int(effect.values[0].isfinite().sum()), int(effect.values[-2].isfinite().sum())
        (torch.Size([8, 8]), 7, 1)
        >>> bool(effect.values[0].nanmean() > effect.values[4].nanmean())
        True
    """

    name: ClassVar[str] = "skip_effect"
    needs_sites: ClassVar[SiteNeed] = "every_block"
    needs_unembed: ClassVar[bool] = True
    needs_calls: ClassVar[bool] = True

    keep_first: NonNegativeInt = 1
    splits: NonNegativeInt = 1
    lens_memory_mb: PositiveFloat = 128

    @property
    def whole_rows(self) -> bool:
        return True

    def check(self, *models: Model) -> None:
        [model] = models
        need_calls(model, type(self).__name__, differences=True)

    def cost(self, model: Model) -> str:
        blocks = len(model.layers) - 1
        # Each block once to check its replay, and the blocks above each skipped block.
        passes = (blocks - 1) * (1 + (1 + self.splits) * blocks / 2) / max(blocks, 1)
        return f"SkipEffect: each batch costs about {passes + 1:.3g} forward passes, for {blocks} skipped blocks."

    def kernel(self, first: Sums) -> Kernel:
        return partial(skip_effect_kernel, keep_first=self.keep_first, splits=self.splits, memory_mb=float(self.lens_memory_mb))

    def compute(self, sums: Sums, run: Run) -> SkipEffectResult:
        blocks = len(run.layers) - 1
        none = torch.zeros(blocks, dtype=torch.float64)
        refuse_failed_replay(sums["differs"], none, none, run.layers)
        pairs = torch.ones(blocks, blocks).triu(1).bool()
        if not bool(sums["count"].any() if blocks > 1 else sums["output_count"].any()):
            raise LayersimError(
                f"SkipEffect skips blocks at the counted tokens after the first {self.keep_first} of a row (`keep_first`); "
                f"none of {run.provenance.tokens} tokens is after them."
            )
        finite = sums["total"].isfinite().all(-1) & sums["output_total"].isfinite()
        finite &= sums["later total"].isfinite().all(-1) & sums["later output_total"].isfinite()
        bad = [name for name, is_finite in zip(run.layers[1:], finite, strict=True) if not is_finite]
        if bad:
            raise LayersimError(
                f"Activations are NaN or infinite when {', '.join(bad[:4])} is skipped. Load the model in float32 or bfloat16."
            )
        counts = sums["count"]
        most = int(counts.amax())
        for skipped, affected in ((counts < most) & pairs).nonzero()[:1].tolist():
            warn(
                f"Tokens to which a block adds nothing have no relative change and are omitted: {run.layers[affected + 1]} at "
                f"{most - int(counts[skipped, affected])} of {most} tokens."
            )
        # 0 / 0 is NaN, for pairs and variants that were not measured.
        means = {
            f"{later}{output}{largest}": sums[f"{later}{output}{total}"] / sums[f"{later}{output}{count}"]
            for later in ("", "later ")
            for output in ("", "output_")
            for largest, total, count in (("mean", "total", "count"), ("largest", "peak", "rows"))
        }
        return SkipEffectResult(
            values=means["mean"],
            largest=means["largest"],
            later=means["later mean"],
            later_largest=means["later largest"],
            probability_change=means["output_mean"],
            probability_change_largest=means["output_largest"],
            later_probability_change=means["later output_mean"],
            later_probability_change_largest=means["later output_largest"],
            layers=run.layers,
            provenance=run.provenance,
        )
