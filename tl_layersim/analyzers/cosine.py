"""Cosine similarity between the residual layers of one model, averaged over tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..activations.norms import LEAST_TOKENS, beyond_rounding, norms, unit_vectors
from ..activations.view import Kernel, View
from ..core import LayerMatrix, LayersimError, Sums, axes, quantiles_from_histogram, result_class, typed, warn
from ..core.intervals import QUANTILES
from ..core.site_names import site_in_words
from ..sources.model_description import ModelDescription
from ._samples import check_finite
from .analyzer import JIANG, Analyzer, Run, listed, omitted_at
from .needs import Needs
from .trajectory import log_histogram, quantiles_of_logs

# Bins of the histograms over [-1, 1], whose quantiles are off by a thousandth at most.
BINS = 2000
# First tokens of a row whose part in the mean is summed apart. More would make results of servers large.
MEAN_PLACES = 2
# Shift of the mean by first tokens from which a run warns, relative to the other tokens. A cosine of two such layers moves by
# about 0.1.
LARGEST_SHIFT = 0.4


def _same_layer(result: CosineResult) -> Tensor:
    """Mask of the pairs of a layer with itself (`row column`)."""
    return torch.eye(len(result.layers), dtype=torch.bool)


@result_class
class CosineResult(LayerMatrix):
    """Cosine similarity between residual layers: means and distributions over tokens. All tensors are float64.

    Attributes:
        values: `residual residual`, mean over tokens of COS(l, l'); symmetric, 1 on the diagonal. A token has no cosine at a
            layer where its residual is zero (with centring: equal to the mean, up to rounding), and is omitted there. The
            layer's row and column are NaN if no token is left. A `LayersimWarning` names such layers.
        std: `residual residual`, standard deviation over tokens (divided by N).
        below_zero: `residual residual`, fraction of tokens with a negative cosine.
        to_last: `quantile residual`, quantiles over tokens of COS(l, L), exact to one of 2000 histogram bins over [-1, 1].
        to_last_minimum: `residual`, smallest COS(l, L) of a token, rounded down to the edge of its histogram bin (figure 10).
        to_last_outliers: `residual`, fraction of tokens whose COS(l, L) is an outlier of a box plot: more than 1.5
            interquartile ranges below the first or above the third quartile, by whole histogram bins.
        adjacent: `quantile layer`, quantiles over tokens of COS(l - 1, l), exact to one such bin.
        norm_ratio: `layer`, mean over tokens of |x| / |f(x)| for each block with input x and update f(x). Infinite if a token's
            update is 0; NaN if a site and the one before it are not the input and the output of one block.
        norm_ratio_quantiles: `quantile layer`, quantiles over tokens of the same ratio, from histograms with bins of a
            hundredth of a decade.
        step_share: `layer`, fraction of tokens with COS(l - 1, L) < COS(l, L), as theorem 2.1 predicts for every token.
        triple_share: `layer`, fraction of pairs of layers l1 < l2 < l with COS(l1, l) < COS(l2, l), over all tokens, as theorem
            2.1 predicts for every pair. NaN at the first block, which has one layer below it.
        monotone_share: fraction of tokens for which COS(l, L) rises strictly at every l from 0 on, among the tokens that have
            a cosine at every layer.
        angular: `residual residual`, mean over tokens of arccos(cosine) / pi, always of raw residuals; 0 for equal directions,
            1/2 for right angles. A token is omitted at a layer where its residual is zero.
        block_influence: `layer`, 1 minus the mean over tokens of the cosine between a block's raw input and output; low if the
            block hardly changes the direction of the stream. NaN as `norm_ratio`.
        mean: `residual d_model`, the subtracted mean (no columns for center="none"), for use in `Cosine(center=...)`.
        quantiles: levels of the quantiles in `to_last` and `adjacent`.
    """

    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Cosine similarity",
        title="Cosine similarity between layers",
        caption="Mean over tokens of the cosine between a token's activations at two layers. The mean over the data is "
        "subtracted first, unless the run says center=none. A plateau of high values at the end marks layers that change the "
        "residual little (Jiang, Zhou and Zhu 2024, section 2.1, figure 2 c-d).",
        within=(-1, 1),
    )
    std: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Standard deviation of the cosine",
        title="Spread of the cosine between layers over tokens",
        within=(0, 1),
    )
    below_zero: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Tokens with a negative cosine",
        unit="fraction",
        title="Tokens whose activations at two layers point apart",
        within=(0, 1),
        by_chance=(0, 1),
        certain=_same_layer,
    )
    to_last: Float64[Tensor, "quantile row"] = axes(
        "quantile",
        "residual",
        label="Cosine similarity",
        title="Cosine similarity to the last layer",
        caption="Cosine between a token's activations at each layer and at the last layer, as quantiles over tokens. Theorem "
        "2.1 predicts a rise with depth (Jiang, Zhou and Zhu 2024, figure 2 a-b).",
        within=(-1, 1),
    )
    to_last_minimum: Float64[Tensor, " row"] = axes(
        "residual",
        label="Smallest cosine similarity",
        title="Smallest cosine of a token to the last layer",
        within=None,
    )
    to_last_outliers: Float64[Tensor, " row"] = axes(
        "residual",
        label="Outliers",
        unit="fraction of tokens",
        title="Outliers of the cosine to the last layer",
        within=(0, 1),
        by_chance=(0,),
    )
    adjacent: Float64[Tensor, "quantile layer"] = axes(
        "quantile",
        "layer",
        label="Cosine similarity",
        title="Cosine of adjacent layers",
        caption="Cosine between a token's activations at a layer and at the layer before it, as quantiles over tokens "
        "(Jiang, Zhou and Zhu 2024, appendix, figure 11 left).",
        within=(-1, 1),
    )
    norm_ratio: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Stream norm / update norm",
        title="Stream norm over update norm",
        caption="At high values the residual stream passes a block almost unchanged "
        "(Jiang, Zhou and Zhu 2024, appendix, figure 11 right).",
        within=(0, math.inf),
    )
    norm_ratio_quantiles: Float64[Tensor, "quantile layer"] = axes(
        "quantile",
        "layer",
        label="Stream norm / update norm",
        title="Stream norm over update norm, over tokens",
        caption="Quantiles over tokens of the norm of a block's input over that of its update "
        + JIANG.format("appendix B.2, figure 11 right"),
        within=(0, math.inf),
    )
    step_share: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Tokens",
        unit="fraction",
        title="Tokens that come closer to their last layer",
        caption="Fraction of tokens whose cosine to the last layer rises in each block; all of them on a geodesic "
        + JIANG.format("theorem 2.1"),
        within=(0, 1),
        by_chance=(0, 1),
    )
    triple_share: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Pairs of layers and tokens",
        unit="fraction",
        title="Pairs of layers in the order of their cosines to a layer",
        within=(0, 1),
        by_chance=(0, 1),
    )
    monotone_share: Float64[Tensor, ""] = axes(within=(0, 1), by_chance=(0, 1))
    angular: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Angular distance",
        unit="fraction of pi",
        title="Angular distance between layers",
        caption="Mean over tokens of the angle between a token's raw activations at two layers, in units of pi. Blocks "
        "between two close layers can be left out with little change (Gromov et al. 2024).",
        within=(0, 1),
    )
    block_influence: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Block influence (1 - cosine)",
        title="How much each block turns the stream",
        caption="1 minus the mean cosine of a block's raw input and output: low for blocks that change the stream's direction "
        "little (Men et al. 2024).",
        within=(0, 2),
    )
    mean: Float64[Tensor, "row d_model"] = axes(
        "residual", "dimension", label="Mean activation", title="Mean activation at each layer", within=None
    )
    quantiles: tuple[float, ...] = QUANTILES

    @typed
    def angular_by_gap(self, n: int) -> Tensor:
        """Angular distance between the input and the output of every n consecutive blocks, d(l, l + n).

        Args:
            n: number of blocks.

        Returns:
            `start`, the distance for each index l of the first block, from 0: L - n + 1 values.

        Raises:
            LayersimError: there are fewer than n blocks, or the sites are not the residual stream after every block.

        Source:
            Gromov et al. 2024 (arXiv 2403.17887). The paper takes the last token of each row,
            `positions="last"`, and raw activations, as `angular` does.

        Examples:
            >>> import tl_layersim as lsim
            >>> cosine = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.Cosine())["cosine"]
            >>> cosine.angular_by_gap(2).shape, len(cosine.blocks_to_drop(2))
            (torch.Size([7]), 2)
        """
        blocks = len(self.layers) - 1
        if bool(self.block_influence.isnan().any()):
            raise LayersimError(
                "The angular distance over n blocks needs the residual stream after every block and no token of zero norm; "
                f"the sites of this result are {listed(self.layers)}."
            )
        if not 1 <= n <= blocks:
            raise LayersimError(f"`n` is {n}; it must be from 1 to {blocks}, the number of blocks.")
        return self.angular.diagonal(n).clone()

    def blocks_to_drop(self, n: int) -> tuple[int, ...]:
        """Indices of the n consecutive blocks with the smallest angular distance between input and output.

        Args:
            n: number of blocks.

        Raises:
            LayersimError: as for `angular_by_gap`.

        Source:
            Gromov et al. 2024.
        """
        start = int(self.angular_by_gap(n).argmin())
        return tuple(range(start, start + n))

    def headline(self) -> dict[str, float]:
        to_last = self.values[:, -1]
        steps = to_last.diff()
        steps = steps[~steps.isnan()]
        if len(to_last) == 1:
            return {}
        if not self.in_depth_order:
            return self.sites_headline("COS")
        return {
            f"COS({self.first_layer()}, last)": float(to_last[0]),
            "COS(last but one, last)": float(to_last[-2]),
            "rising steps (fraction)": float((steps > 0).double().mean() if len(steps) else math.nan),
            "tokens that rise at every step (fraction)": float(self.monotone_share),
        }


@typed
@dataclass(frozen=True, eq=False)
class Cosine(Analyzer):
    r"""Cosine similarity between a token's residuals at every pair of layers, averaged over tokens.

    $$\mathrm{COS}(l, l') = \frac{1}{N} \sum_t \frac{\langle x_t^l - \mu^l, x_t^{l'} - \mu^{l'} \rangle}
    {|x_t^l - \mu^l| \, |x_t^{l'} - \mu^{l'}|}$$

    The norm ratio of figure 11, angular distances and block influence are of raw residuals, independently of the centring.

    Args:
        center: "dataset" subtracts each layer's mean over all counted tokens (the paper's footnote 2), which takes a first pass
            over the data; "none" subtracts nothing; a tensor `residual d_model` is subtracted as it is.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 2.1, theorem 2.1, figures 2, 4, 10 and 11. Angular distance: Gromov
        et al. 2024 (arXiv 2403.17887). Block influence: Men et al. 2024 (arXiv 2403.03853).

    Examples:
        The cosine of a layer with itself is 1.

        >>> import tl_layersim as lsim
        >>> cosine = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Cosine()])["cosine"]
        >>> cosine.values.shape, bool((cosine.values.diagonal() == 1).all())
        (torch.Size([9, 9]), True)
    """

    name: ClassVar[str] = "cosine"

    center: Literal["dataset", "none"] | Float[Tensor, "residual d_model"] = "dataset"

    def __post_init__(self) -> None:
        if isinstance(self.center, Tensor):
            check_finite("center", self.center)

    @property
    def needs(self) -> Needs:
        is_raw = isinstance(self.center, str) and self.center == "none"
        return Needs(
            sites="equal_width",
            one_pass='Cosine(center="none"), or Cosine(center=mean) with the .mean of an earlier result',
            dominance=("power" if is_raw else "variance",),
        )

    def check_sites(self, *models: ModelDescription) -> None:
        super().check_sites(*models)
        if isinstance(self.center, Tensor):
            model = models[0]
            wrong_width = model.widest is not None and self.center.shape[-1] != model.widest
            if self.center.shape[0] != len(model.layers) or wrong_width:
                raise LayersimError(
                    f"`center` has shape {tuple(self.center.shape)}; for the sites of {model.name}, it must have shape "
                    f"({len(model.layers)}, {model.widest or 'd_model'})."
                )

    def first_kernel(self) -> Kernel | None:
        return mean_kernel if isinstance(self.center, str) and self.center == "dataset" else None

    def kernel(self, first: Sums) -> Kernel:
        # A mean that is given does not depend on the tokens of this run.
        return partial(cosine_kernel, mean=self._mean(first), mean_of_tokens=bool(first))

    def _mean(self, first: Sums) -> Tensor | None:
        if isinstance(self.center, Tensor):
            return self.center.to(torch.float64)
        return first["total"] / first["count"] if first else None

    def compute(self, sums: Sums, run: Run) -> CosineResult:
        count = int(sums["count"])
        offset = self._mean(run.first)
        # Number of tokens that have a cosine at both layers; 0 / 0 is NaN.
        pairs = sums["pairs"].double()
        condition = "is zero" if offset is None else "equals the mean"
        if not bool(sums["pairs"].any()):
            raise LayersimError(
                f"The cosine is not defined at any layer: at every layer, the residual of all {count} tokens {condition}."
            )
        omitted = omitted_at(run.layers, count - sums["pairs"].diagonal(), count)
        if omitted:
            warn(
                f"The cosine is not defined for tokens whose residual {condition} up to rounding. These tokens are omitted: "
                f"{omitted}. A layer is NaN if all tokens are omitted."
            )
        if "place count" in sums.fields:
            text = moved_mean(sums, run)
            if text:
                warn(text)
        mean = sums["sum"] / pairs
        diagonal = torch.eye(len(pairs), dtype=torch.bool) & (pairs > 0)
        # Rounding can yield cosines above 1 and variances below 0. The cosine of a layer with itself is exactly 1.
        std = (sums["square"] / pairs - mean**2).clamp(min=0).sqrt().masked_fill(diagonal, 0)
        to_last = quantiles_from_histogram(sums["to_last"], -1.0, 1.0, QUANTILES)
        to_last[:, -1] = to_last[:, -1].masked_fill(diagonal[-1, -1], 1)
        minimum, outliers = _minimum_and_outliers(sums["to_last"])
        minimum[-1] = minimum[-1].masked_fill(diagonal[-1, -1], 1)
        raw = sums["raw_pairs"].double()
        adjacent = adjacent_sites(run.layers, run.models[0].stream)
        return CosineResult(
            values=mean.clamp(-1, 1).masked_fill(diagonal, 1),
            std=std,
            below_zero=sums["negative"].double() / pairs,
            to_last=to_last,
            to_last_minimum=minimum,
            to_last_outliers=outliers,
            adjacent=quantiles_from_histogram(sums["adjacent"], -1.0, 1.0, QUANTILES),
            norm_ratio=(sums["norm_ratio"] / count).where(adjacent, math.nan),
            norm_ratio_quantiles=quantiles_of_logs(sums["norm_ratio bins"]).where(adjacent, math.nan),
            step_share=sums["steps"][0].double() / sums["steps"][1],
            triple_share=sums["triples"][0].double() / sums["triples"][1],
            angular=(sums["angle"] / (math.pi * raw)).masked_fill(torch.eye(len(raw), dtype=torch.bool) & (raw > 0), 0),
            block_influence=(1 - sums["raw_adjacent"] / raw.diagonal(1)).clamp(0, 2).where(adjacent, math.nan),
            monotone_share=sums["monotone"].double() / sums["whole"],
            mean=torch.zeros(len(run.layers), 0, dtype=torch.float64) if offset is None else offset,
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
        )


def _minimum_and_outliers(histogram: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum of each histogram over [-1, 1], and its fraction of outliers (each `series`); NaN for an empty histogram.

    Outliers lie more than 1.5 interquartile ranges outside the quartiles.
    """
    total = histogram.sum(-1)
    edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64)
    low, high = quantiles_from_histogram(histogram, -1.0, 1.0, (0.25, 0.75))
    reach = 1.5 * (high - low)
    outside = (edges[1:] <= (low - reach)[:, None]) | (edges[:-1] >= (high + reach)[:, None])
    minimum = edges[(histogram > 0).double().argmax(-1)].masked_fill(total == 0, math.nan)
    return minimum, (histogram * outside).sum(-1).double() / total


def adjacent_sites(layers: tuple[str, ...], stream: str) -> Tensor:
    """Whether exactly one block lies between each site and the site before it (`layer`).

    Args:
        layers: names of the sites, the input of block 0 first.
        stream: see `ModelDescription`.
    """
    if stream != "parts":
        return torch.full((len(layers) - 1,), stream == "whole")
    adjacent = []
    for before, after in itertools.pairwise(layers):
        stack, _, number = after.removesuffix(".hook_resid_post").rpartition(".")
        inputs: tuple[str, ...] = ()
        if number.isdigit():
            inputs = (f"{stack}.{number}.hook_resid_pre", f"{stack}.{int(number) - 1}.hook_resid_post")
        adjacent.append(before in inputs)
    return torch.tensor(adjacent, dtype=torch.bool)


def mean_kernel(view: View) -> dict[str, Tensor]:
    """Sum of the residual over tokens, and the number of tokens."""
    return {
        # Layer by layer, because a sum in another dtype first copies all its terms.
        "total": torch.stack([layer.sum(0, dtype=torch.float64) for layer in view.activations]),
        "count": torch.tensor(view.activations.shape[1]),
    }


def moved_mean(sums: Sums, run: Run) -> str:
    """Warning that the first tokens of rows move the mean that is subtracted; "" for no warning.

    A mean that the first tokens have moved by q times the root mean square of the other centred tokens adds a common direction
    to these, and so about q^2 / (1 + q^2) to their cosines.

    Args:
        sums: sums of `cosine_kernel`.
        run: the finished run.
    """
    count = sums["place count"].double()
    total = sums["place sum"]
    power = sums["place power"]
    if int(count.sum()) < LEAST_TOKENS:
        return ""
    moved = []
    # Root mean square of the centred tokens at each of the first positions (`site place`).
    length = (power / count).sqrt()
    for start in range(1, MEAN_PLACES + 1):
        later_tokens = count[start:].sum()
        # All centred tokens sum to 0.
        shift = total[:, :start].sum(1).norm(dim=-1) / later_tokens
        spread = (power[:, start:].sum(1) / later_tokens - shift.square()).clamp(min=0).sqrt()
        size = length[:, :start].nan_to_num(nan=0.0).amax(1)
        moved.append(torch.stack([shift / spread, size / spread]))
    shifts, sizes = torch.stack(moved, 1).nan_to_num(nan=0.0, posinf=0.0)
    # Numbers of first tokens at which the shift has reached three quarters of its largest value.
    largest = shifts.amax(0)
    moved_sites = (largest > LARGEST_SHIFT).nonzero()[:, 0].tolist()
    if not moved_sites:
        return ""
    needed = max(int((shifts[:, site] >= 0.75 * largest[site]).int().argmax()) + 1 for site in moved_sites)
    site = max(moved_sites, key=lambda number: float(largest[number]))
    longest = int(length[site, :needed].nan_to_num(nan=0.0).argmax())
    remedy = f"skip_first={needed} leaves out these tokens."
    if run.provenance.options.get("positions", "all") != "all":
        remedy = f"Leave the first {needed} out of positions=."
    ratio = float(sizes[needed - 1, site])
    return (
        f"The first tokens of rows decide the mean that Cosine subtracts at {len(moved_sites)} "
        f"site{'s' * (len(moved_sites) > 1)}. At {site_in_words(run.layers[site])}, those at position {longest} of a row are "
        f"{ratio:.3g} times as long as the others, and the mean moves by {float(largest[site]):.2g} times the length of the "
        f"others. {remedy}"
    )


def cosine_kernel(view: View, *, mean: Tensor | None, mean_of_tokens: bool = False) -> dict[str, Tensor]:
    """Sums, counts and histograms of the cosines between layers, over the tokens of a batch.

    Tokens are processed in chunks, so that intermediate tensors are small beside the residual.

    Args:
        view: activations of one batch.
        mean: `residual d_model` to subtract, None for no centring.
        mean_of_tokens: whether `mean` is the mean of all tokens; sums over first tokens, by their place, then show its causes.
    """
    # The widths may be known only now, and a view pads narrower sites with zeros.
    for number, width in enumerate(view.widths):
        if width != view.widths[0]:
            raise LayersimError(
                f"Cosine needs sites of equal width; {view.sites[0]} has width {view.widths[0]}, and {view.sites[number]} "
                f"has width {width}."
            )
    x = view.activations
    layers, tokens, _ = x.shape
    device = x.device
    out = {
        "count": torch.tensor(tokens),
        "whole": torch.tensor(0, device=device),
        "pairs": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "sum": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "square": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "negative": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "to_last": torch.zeros(layers, BINS, dtype=torch.int64, device=device),
        "adjacent": torch.zeros(layers - 1, BINS, dtype=torch.int64, device=device),
        "norm_ratio": torch.zeros(layers - 1, dtype=torch.float64, device=device),
        "monotone": torch.tensor(0, device=device),
        "steps": torch.zeros(2, layers - 1, dtype=torch.int64, device=device),
        "triples": torch.zeros(2, layers - 1, dtype=torch.int64, device=device),
        "raw_pairs": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "angle": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "raw_adjacent": torch.zeros(layers - 1, dtype=torch.float64, device=device),
    }
    offset = None if mean is None else mean.to(x)[:, None]
    place = view.position.to(device).clamp(max=MEAN_PLACES)
    if mean_of_tokens:
        out["place count"] = torch.bincount(place, minlength=MEAN_PLACES + 1)
        out["place power"] = torch.zeros(layers, MEAN_PLACES + 1, dtype=torch.float64, device=device)
        out["place sum"] = torch.zeros(layers, MEAN_PLACES + 1, x.shape[-1], dtype=torch.float64, device=device)
    ratios = [torch.zeros(layers - 1, 0, dtype=torch.float64, device=device)]
    for start in range(0, tokens, 256):
        chunk = x[:, start : start + 256]
        raw, norm = unit_vectors(chunk)
        ratios.append(norm[:-1] / norms(chunk[1:] - chunk[:-1]))
        out["norm_ratio"] += ratios[-1].sum(1)
        if offset is None:
            defined = (norm > 0).T
            cosine = _cosines(raw, defined)
        else:
            centred = chunk - offset
            defined = beyond_rounding(centred, offset).T
            if mean_of_tokens:
                place_of_token = place[start : start + 256]
                out["place power"].index_add_(1, place_of_token, norms(centred).square())
                out["place sum"].index_add_(1, place_of_token, centred.double())
            cosine = _cosines(unit_vectors(centred)[0], defined)
        counted = defined.double()
        out["pairs"] += (counted.T @ counted).long()
        out["whole"] += defined.all(1).sum()
        out["sum"] += cosine.sum(0, dtype=torch.float64)
        # Squared in float64: near 1, rounding of float32 squares would exceed the spread.
        out["square"] += cosine.double().square().sum(0)
        out["negative"] += (cosine < 0).sum(0)
        last = cosine[:, :, -1]
        rises = last[:, 1:] > last[:, :-1]
        defined_pair = defined[:, 1:] & defined[:, :-1]
        defined_step = defined_pair & defined[:, -1:]
        out["monotone"] += (rises.all(1) & defined.all(1)).sum()
        out["steps"] += torch.stack([(rises & defined_step).sum(0), defined_step.sum(0)])
        out["triples"] += _ordered_triples(cosine, defined)
        out["to_last"] += _histogram(last, defined & defined[:, -1:])
        out["adjacent"] += _histogram(cosine.diagonal(offset=1, dim1=1, dim2=2), defined_pair)
        # From here on without centring.
        if mean is not None:
            defined = (norm > 0).T
            cosine = _cosines(raw, defined)
            counted = defined.double()
        out["raw_pairs"] += (counted.T @ counted).long()
        out["raw_adjacent"] += cosine.diagonal(offset=1, dim1=1, dim2=2).sum(0, dtype=torch.float64)
        angle = cosine.arccos()
        if not bool(defined.all()):
            angle = angle * (defined[:, :, None] & defined[:, None, :])
        out["angle"] += angle.sum(0, dtype=torch.float64)
    ratio = torch.cat(ratios, 1)
    return out | {"norm_ratio bins": log_histogram(ratio, ~ratio.isnan())}


def _cosines(unit: Tensor, defined: Tensor) -> Tensor:
    """Cosines between the layers of each token (`token layer layer`); 0 if a vector has no direction.

    Args:
        unit: `layer token d_model`, vectors of norm 1.
        defined: `token layer`, whether the vector has a direction.
    """
    unit = unit.transpose(0, 1)
    cosine = torch.bmm(unit, unit.transpose(1, 2)).clamp(-1, 1)
    return cosine if bool(defined.all()) else cosine * (defined[:, :, None] & defined[:, None, :])


def _ordered_triples(cosine: Tensor, defined: Tensor) -> Tensor:
    """Numbers of ordered triples of layers and of all triples, for each last layer of a triple (`2 layer`).

    A triple l1 < l2 < l3 is ordered if COS(l1, l3) < COS(l2, l3).

    Args:
        cosine: `token layer layer`.
        defined: `token layer`, whether the vector has a direction.
    """
    layers_below = defined.long().cumsum(1)[:, :-1]
    pairs = (layers_below * (layers_below - 1) // 2 * defined[:, 1:]).sum(0)
    # A cosine that is not defined is NaN, which is neither smaller nor larger than another. Tokens last: adjacent in memory.
    c = cosine.where(defined[:, :, None] & defined[:, None, :], torch.nan).permute(1, 2, 0).contiguous()
    # By l2, l3 and token, the number of l1; one gap l2 - l1 at a time.
    smaller = torch.zeros(c.shape, dtype=torch.int16, device=c.device)
    for gap in range(1, len(c) - 1):
        smaller[gap:-1, gap + 1 :] += c[: -1 - gap, gap + 1 :] < c[gap:-1, gap + 1 :]
    ordered = smaller.sum(-1).triu(1).sum(0)[1:]
    return torch.stack([ordered, pairs])


def _histogram(values: Tensor, defined: Tensor) -> Tensor:
    """Histogram over [-1, 1] of the `defined` values of each column, from `token series` to `series bin`."""
    index = ((values + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
    series = values.shape[1]
    index = index + BINS * torch.arange(series, device=values.device)
    return torch.bincount(index[defined], minlength=series * BINS).reshape(series, BINS)
