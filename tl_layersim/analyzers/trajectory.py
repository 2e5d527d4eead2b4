"""Trajectories of tokens through the layers: line-shape score, expodistance, equidistance and norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.norms import norms, unit_vectors
from ..activations.view import Kernel, View
from ..architectures.hook_points import site_name
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, quantiles_from_histogram, result_class, typed, warn
from ..core.arguments import TwoOrMore
from ..core.intervals import QUANTILES, with_margin
from ..sources.model_description import ModelDescription
from ._samples import counted_rows, defined_by_row, prompt_fields, row_counts_kernel, sums_by_row
from .analyzer import AUBRY, JIANG, Analyzer, Run, need_head, omitted_at
from .needs import Needs

# Range of the logarithmic histograms of unbounded quantities, in decades.
DECADES = (-6.0, 8.0)
# Quantities of a token's whole path, whose means over each row of the data are fields too.
PROMPT_FIELDS = ("lss", "expodistance", "equidistance")
QUANTITIES = ("norm", "update", "growth", *PROMPT_FIELDS, "windowed", "curvature", "deviation")


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and quantiles of a quantity over tokens.

    Attributes:
        mean: mean over tokens.
        std: standard deviation over tokens (divided by N).
        quantiles: quantiles over tokens.
    """

    mean: Tensor
    std: Tensor
    quantiles: Tensor


@result_class
class TrajectoryResult(Result):
    """Shape of the tokens' paths through the layers, as distributions over tokens. All tensors are float64.

    Attributes:
        values: `residual`, the same as `norm`: mean over tokens of |x^l|. Growth and expodistance omit tokens whose residual
            is zero, and the line-shape score omits tokens whose update is zero; a `LayersimWarning` names the layers. NaN if no
            token is left.
        norm_quantiles: `quantile residual`, quantiles of the norm over tokens.
        update_norm: `layer`, mean over tokens of |x^l - x^{l-1}|, the norm of the update of block l.
        update_norm_quantiles: `quantile layer`, quantiles over tokens.
        geodesic_deviation: `residual`, mean over tokens of the distance of x^l from the point of the straight path of L equal
            steps, (1 - l / L) x^0 + (l / L) x^L, divided by |x^L - x^0|; 0 at both ends. Tokens with x^L = x^0 are omitted.
        growth: `layer`, mean over tokens of alpha^l = ln(|x^l| / |x^{l-1}|).
        lss_mean: mean line-shape score over tokens.
        lss_std: standard deviation of the line-shape score over tokens.
        lss_quantiles: `quantile`, quantiles of the line-shape score over tokens.
        expodistance_mean: mean expodistance over tokens. A single token with almost equal norms at the first and last layer
            dominates the mean; the median is robust.
        expodistance_std: standard deviation of the expodistance over tokens.
        expodistance_quantiles: `quantile`, quantiles of the expodistance over tokens.
        equidistance_mean: mean equidistance over tokens: the coefficient of variation of the update norms.
        equidistance_std: standard deviation of the equidistance over tokens.
        equidistance_quantiles: `quantile`, quantiles of the equidistance over tokens.
        windowed_lss: `centre`, mean line-shape score of the `window` steps around each layer; empty without a window.
        curvature: `residual`, mean angle in radians between consecutive steps from token to token at a layer: between v_k and
            v_{k+1}, with v_k = x_{k+1} - x_k, over all positions k whose next two positions are counted too. 0 for a straight
            path, pi / 2 for a random walk, and 2 pi / 3 for independent positions. Angles with a step of length zero are
            omitted. NaN without angles, for example with one position in each row.
        prompt_lss: `prompt_row`, mean line-shape score over the tokens of each row of the data; NaN if no token of the row has
            one. Empty with `per_prompt=False`.
        prompt_expodistance: `prompt_row`, mean expodistance over the tokens of each row.
        prompt_equidistance: `prompt_row`, mean equidistance over the tokens of each row.
        prompt_norm: `prompt_row residual`, mean norm over the tokens of each row.
        prompt_tokens: `prompt_row`, number of counted tokens of each row.
        prompt_rows: indices of the rows in the data.
        turns: number of triples of positions in the mean of the curvature.
        window: number of steps of the windowed line-shape score; 0 without it.
        final_norm: whether the last layer was read after the model's final norm.
        quantiles: levels of the quantile fields, computed from histograms with bins of a hundredth of a decade; values below
            1e-6 are given as 0.
    """

    norm = ValuesAlias()
    values: Float64[Tensor, " residual"] = axes(
        "residual", label="Norm of the residual", title="Norm of the residual stream at each layer", within=(0, math.inf)
    )
    norm_quantiles: Float64[Tensor, "quantile residual"] = axes(
        "quantile",
        "residual",
        label="Norm of the residual",
        title="Norm of the residual stream over tokens",
        caption="Quantiles over tokens, by layer " + AUBRY.format("figures 23 and 24, row 3"),
        within=(0, math.inf),
    )
    update_norm: Float64[Tensor, " layer"] = axes(
        "layer", label="Norm of the update", title="Norm of the update of each block", within=(0, math.inf)
    )
    update_norm_quantiles: Float64[Tensor, "quantile layer"] = axes(
        "quantile",
        "layer",
        label="Norm of the update",
        title="Norm of the update of each block over tokens",
        caption="Updates are equally long if layers are equidistant, which they are not in trained language models "
        + AUBRY.format("figures 23 and 24, row 3"),
        within=(0, math.inf),
    )
    growth: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Growth of the norm, ln(after / before)",
        title="Growth of the residual stream's norm in each block",
        caption="ln(|x| after / |x| before) of each block; equal at every block if norms grow exponentially "
        + AUBRY.format("section 3.3"),
    )
    geodesic_deviation: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Distance / distance from first to last layer",
        title="Distance from the straight path of equal steps",
        caption="Mean distance of a token's residual from the point that it would have on a straight path of equal steps, the "
        "geodesic that theorem 2.1 assumes " + JIANG.format("equation 6"),
        within=(0, math.inf),
    )
    lss_mean: Float64[Tensor, ""] = axes(label="Line-shape score", within=(1, math.inf))
    lss_std: Float64[Tensor, ""] = axes(within=(0, math.inf))
    lss_quantiles: Float64[Tensor, " quantile"] = axes(
        "quantile",
        label="Line-shape score",
        title="Line-shape score over tokens",
        caption="Quantiles over tokens; 1 is a straight path through the layers " + AUBRY.format("figures 23 and 24, row 1"),
        within=(1, math.inf),
    )
    expodistance_mean: Float64[Tensor, ""] = axes(label="Expodistance", within=(0, math.inf))
    expodistance_std: Float64[Tensor, ""] = axes(within=(0, math.inf))
    expodistance_quantiles: Float64[Tensor, " quantile"] = axes(
        "quantile", label="Expodistance", title="Expodistance over tokens", within=(0, math.inf)
    )
    equidistance_mean: Float64[Tensor, ""] = axes(label="Equidistance", within=(0, math.inf))
    equidistance_std: Float64[Tensor, ""] = axes(within=(0, math.inf))
    equidistance_quantiles: Float64[Tensor, " quantile"] = axes(
        "quantile", label="Equidistance", title="Equidistance of updates over tokens", within=(0, math.inf)
    )
    windowed_lss: Float64[Tensor, " centre"] = axes(
        "centre",
        label="Line-shape score",
        title="Line-shape score around each layer",
        caption="1 for a straight line, about the square root of the number of steps for independent steps; needs "
        "Trajectory(window=...) " + AUBRY.format("figures 24 and 25"),
        within=(1, math.inf),
    )
    curvature: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Angle between steps",
        unit="radians",
        title="Curvature from token to token",
        scale="free",
        caption="Mean angle between consecutive steps from token to token at each layer: lower where a row's tokens move "
        "along a straighter path (Hosseini and Fedorenko 2023; Skean et al. 2025, section 3). Independent positions have 2 "
        "pi / 3.",
        within=(0, math.pi),
    )
    prompt_lss: Float64[Tensor, " prompt_row"] = axes(
        "prompt_row", label="Line-shape score", title="Line-shape score of each row of the data", within=None
    )
    prompt_expodistance: Float64[Tensor, " prompt_row"] = axes(
        "prompt_row", label="Expodistance", title="Expodistance of each row of the data", within=None
    )
    prompt_equidistance: Float64[Tensor, " prompt_row"] = axes(
        "prompt_row", label="Equidistance", title="Equidistance of each row of the data", within=None
    )
    prompt_norm: Float64[Tensor, "prompt_row residual"] = axes(
        "prompt_row", "residual", label="Norm of the residual", title="Norm on each row of the data", within=None
    )
    prompt_tokens: Float64[Tensor, " prompt_row"] = axes(
        "prompt_row", label="Tokens", title="Tokens of each row of the data", within=None
    )
    prompt_rows: tuple[int, ...] = ()
    turns: int = 0
    window: int
    final_norm: bool = False
    quantiles: tuple[float, ...] = QUANTILES

    @property
    def lss(self) -> Spread:
        """Distribution of the line-shape score over tokens; 1 for a straight line."""
        return Spread(self.lss_mean, self.lss_std, self.lss_quantiles)

    @property
    def expodistance(self) -> Spread:
        """Distribution of the expodistance over tokens; 0 if norms grow exponentially with depth."""
        return Spread(self.expodistance_mean, self.expodistance_std, self.expodistance_quantiles)

    @property
    def equidistance(self) -> Spread:
        """Distribution of the equidistance over tokens; 0 if all steps are equally long."""
        return Spread(self.equidistance_mean, self.equidistance_std, self.equidistance_quantiles)

    @typed
    def by_prompt(self, field: Literal["lss", "expodistance", "equidistance"] = "lss") -> dict[str, float]:
        """Mean of a quantity over the tokens of each row of the data. `relate` takes this mapping.

        Args:
            field: name of the quantity.

        Returns:
            The values without NaN, by names such as "row 3".

        Raises:
            LayersimError: the run had `per_prompt=False`.
        """
        return defined_by_row(getattr(self, f"prompt_{field}"), self.prompt_rows, "Trajectory")

    def baselines(self, field: str) -> dict[str, float]:
        if field == "windowed_lss" and self.window:
            return {f"independent steps (√{self.window})": math.sqrt(self.window), "straight path": 1.0}
        return {"independent positions (2π/3)": 2 * math.pi / 3} if field == "curvature" else {}

    def measured_on(self, field: str) -> str:
        return f"windows of {self.window} blocks" if field == "windowed_lss" else ""

    @property
    def centres(self) -> tuple[str, ...]:
        """Labels of the `centre` axis: the layer in the middle of each window."""
        if not self.window:
            return ()
        start = self.window // 2
        return self.layers[start : start + len(self.layers) - self.window]

    def headline(self) -> dict[str, float]:
        median = self.quantiles.index(0.5)
        return {
            "line-shape score (1: a straight line)": float(self.lss_mean),
            "expodistance, median (0: exponential growth)": float(self.expodistance_quantiles[median]),
            "equidistance (0: equal steps)": float(self.equidistance_mean),
            f"norm {'after the final norm' if self.final_norm else 'at the last layer'} over norm of the embedding": float(
                self.values[-1] / self.values[0]
            ),
        }

    def finding(self) -> str:
        growth = with_margin(self, lambda result: result.values[-1] / result.values[0])
        straight = with_margin(self, lambda result: result.lss_mean)
        return (
            f"The norm of a residual {'after the final norm' if self.final_norm else 'at the last layer'} is {growth} times "
            f"that at the first; the line-shape score of its path is {straight} (1: a straight line)."
        )


@typed
@dataclass(frozen=True, eq=False)
class Trajectory(Analyzer):
    r"""Shape of a token's trajectory through the layers: line-shape score, expodistance, equidistance and norms.

    With the steps $u^l = x^l - x^{l-1}$ of a token over L blocks and $\alpha^l = \ln(|x^l| / |x^{l-1}|)$:

    $$\mathrm{LSS} = \frac{L}{\big| \sum_l u^l / |u^l| \big|}, \qquad
    \mathrm{ED} = \frac{\mathrm{Var}_l \, \alpha^l}{(\mathrm{mean}_l \, \alpha^l)^2}, \qquad
    \mathrm{equidistance} = \frac{\mathrm{std}_l |u^l|}{\mathrm{mean}_l |u^l|}$$

    with variances divided by L. Expodistance is a squared coefficient of variation, equidistance is not squared. Squared
    equidistances have the mean `equidistance_mean ** 2 + equidistance_std ** 2` and the quantiles
    `equidistance_quantiles ** 2`. LSS is at least 1, and 1 for a straight line; n independent steps in
    many dimensions have about the square root of n. Expodistance is 0 if norms grow exponentially,
    equidistance is 0 if all steps are equally long.

    The path begins at the input of block 0 and ends at the output of the last block, before the final norm. In the paper $x^L$
    is the representation after the final norm (section 2, the last block): `final_norm=True`.

    Args:
        window: number of steps of an additional windowed LSS around each layer; None for the LSS of the whole trajectory only.
        final_norm: whether the path ends at the residual stream after the model's final norm. All fields at the last layer then
            describe this point. A model without a final norm, or one that pools before it, raises an error.
        per_prompt: whether to give means over the tokens of each row of the data too. A first pass without the model then
            counts the rows. A row is a prompt, so packed rows raise an error.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), sections 3.2 and 3.3, equations 15 to 18, appendix A.3, figures 23 to 25; Gai and
        Zhang 2021 for the line-shape score. Geodesic deviation: Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), assumption 1 and
        equation 6. Curvature: Hosseini and Fedorenko 2023 (arXiv 2311.04930), Skean et al. 2025
        (arXiv 2502.02013), section 3; their mean over rows of means is equal for rows of equal length.

    Examples:
        >>> import tl_layersim as lsim
        >>> path = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Trajectory(window=4)])["trajectory"]
        >>> normed = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.Trajectory(final_norm=True))["trajectory"]
        >>> bool((normed.norm == path.norm)[:-1].all()), bool(normed.norm[-1] == path.norm[-1])
        (True, False)
        >>> bool(path.lss.mean > 1), path.windowed_lss.shape, path.centres[0]
        (True, torch.Size([5]), 'blocks.1.hook_resid_post')
    """

    name: ClassVar[str] = "trajectory"

    window: TwoOrMore | None = None
    final_norm: bool = False
    per_prompt: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(
            sites="every_block",
            head="norm" if self.final_norm else "none",
            single_texts=self.per_prompt,
            first_pass="data",
            dominance=("power",),
        )

    def check(self, *models: ModelDescription) -> None:
        if self.final_norm:
            need_head(models[0], "Trajectory(final_norm=True)")
            head = models[0].head
            # Logits need a final norm of each position.
            if head is not None and (not head.norm or (head.pool is not None and head.pool.before_norm)):
                raise LayersimError(
                    f"`final_norm` is True; it must be False for {models[0].name}, whose head does not normalise "
                    f"single positions: {head}."
                )
        blocks = len(models[0].layers) - 1
        if self.window is not None and self.window > blocks:
            raise LayersimError(
                f"`window` is {self.window}; it must be at most {blocks}, the number of blocks of {models[0].name}."
            )

    def first_kernel(self) -> Kernel | None:
        return row_counts_kernel if self.per_prompt else None

    def kernel(self, first: Sums) -> Kernel:
        rows = counted_rows(first) if self.per_prompt else None
        return partial(trajectory_kernel, window=self.window or 0, final_norm=self.final_norm, rows=rows)

    def compute(self, sums: Sums, run: Run) -> TrajectoryResult:
        count = int(sums["count"])
        for measures, vector, names in (
            ("Growth and expodistance are", "residual", run.layers),
            ("The line-shape score is", "update", run.layers[1:]),
        ):
            omitted = omitted_at(names, sums[f"zero_{vector}"], count)
            if omitted:
                warn(f"{measures} not defined for tokens whose {vector} is zero. These tokens are omitted: {omitted}.")
        if int(sums["flat"]):
            warn(
                f"{int(sums['flat'])} of {count} tokens have no expodistance, because their norm is the same at the first and "
                "the last layer."
            )

        mean = {name: sums[name] / sums[f"{name} known"] for name in QUANTITIES}
        distributions: dict[str, Any] = {}
        for name in PROMPT_FIELDS:
            variance = sums[f"{name}^2"] / sums[f"{name} known"] - mean[name] ** 2
            distributions[f"{name}_mean"] = mean[name]
            distributions[f"{name}_std"] = variance.clamp(min=0).sqrt()
            distributions[f"{name}_quantiles"] = quantiles_of_logs(sums[f"{name} bins"])
        prompts: dict[str, Any] = {}
        for name in PROMPT_FIELDS:
            prompts |= prompt_fields(name, sums, run.first)
        tokens = prompts["prompt_tokens"]
        prompts["prompt_norm"] = sums["prompt norm"] / tokens[:, None] if run.first else tokens.new_zeros(0, len(run.layers))
        layers = run.layers
        if self.final_norm:
            layers = (*layers[:-1], site_name("ln_final", 0, layers[-1].rpartition("blocks.")[0]))
        return TrajectoryResult(
            values=mean["norm"],
            norm_quantiles=quantiles_of_logs(sums["norm bins"]),
            update_norm=mean["update"],
            update_norm_quantiles=quantiles_of_logs(sums["update bins"]),
            growth=mean["growth"],
            geodesic_deviation=mean["deviation"],
            windowed_lss=mean["windowed"],
            curvature=mean["curvature"],
            turns=int(sums["turns"]),
            window=self.window or 0,
            final_norm=self.final_norm,
            layers=layers,
            provenance=run.provenance,
            **distributions,
            **prompts,
        )


def quantiles_of_logs(histogram: Tensor) -> Tensor:
    """Quantiles of the values that `log_histogram` counted: `... bin` to `quantile ...`. Values in the first bin become 0."""
    values = 10 ** quantiles_from_histogram(histogram, *DECADES, QUANTILES)
    return values.masked_fill(values <= 10 ** (DECADES[0] + 0.01), 0)


def trajectory_kernel(view: View, *, window: int, final_norm: bool = False, rows: Tensor | None = None) -> dict[str, Tensor]:
    """Sums and histograms of the quantities of trajectories, over the tokens of a batch.

    Tokens are processed in chunks, so that intermediate tensors are small beside the residual.

    Args:
        view: activations of one batch.
        window: steps of the windowed LSS, 0 for none.
        final_norm: whether the last layer is read after the model's final norm.
        rows: indices of all rows of the data, to sum by row; None not to sum by row.
    """
    x = view.activations
    tokens = x.shape[1]
    last = x[-1]
    if final_norm:
        assert view.unembed is not None
        last = view.unembed.normed(last).to(x)
    chunks: dict[str, list[Tensor]] = {}
    for start in range(0, tokens, 256):
        for name, value in _paths(_with_last(x, last, start, start + 256), window).items():
            chunks.setdefault(name, []).append(value)
    quantities = {name: torch.cat(values, -1) for name, values in chunks.items()}
    quantities["curvature"] = _angles(view, last)
    out = {
        "count": torch.tensor(tokens),
        "zero_residual": (quantities["norm"] == 0).sum(-1),
        "zero_update": (quantities["update"] == 0).sum(-1),
        "flat": (quantities["mean growth"] == 0).sum(),
        "turns": torch.tensor(quantities["curvature"].shape[1]),
    }
    for name in QUANTITIES:
        defined = ~quantities[name].isnan()
        values = quantities[name].where(defined, 0)
        out[name] = values.sum(-1)
        out[f"{name} known"] = defined.sum(-1)
        if name in PROMPT_FIELDS:
            out[f"{name}^2"] = values.square().sum(-1)
        if name not in ("growth", "windowed", "curvature", "deviation"):
            out[f"{name} bins"] = log_histogram(quantities[name], defined)
    if rows is not None:
        assert view.row is not None
        for name in PROMPT_FIELDS:
            defined = ~quantities[name].isnan()
            out[f"prompt {name}"] = sums_by_row(quantities[name].where(defined, 0), view.row, rows)
            out[f"prompt {name} known"] = sums_by_row(defined, view.row, rows)
        out["prompt norm"] = sums_by_row(quantities["norm"].T, view.row, rows)
        out["prompt tokens"] = sums_by_row(torch.ones(tokens, device=x.device), view.row, rows)
    return out


def _with_last(x: Tensor, last: Tensor, start: int, end: int) -> Tensor:
    """Residuals of the tokens `start` to `end` (`layer token d_model`) with the last layer replaced by `last`."""
    return torch.cat([x[:-1, start:end], last[None, start:end]])


def _angles(view: View, last: Tensor) -> Tensor:
    """Angles at each layer between a row's consecutive steps from one token to the next (`layer triple`), float64.

    A triple is three consecutive positions of a row. NaN where two neighbours are equal: their step has no direction.

    Args:
        view: activations of one batch.
        last: `token d_model`, residuals of the last layer.
    """
    x = view.activations
    row = view.sequence
    step_length = view.position.diff()
    triples = (row[2:] == row[:-2]) & (step_length[1:] == 1) & (step_length[:-1] == 1)
    # The empty part makes a batch without triples an empty tensor.
    parts = [torch.zeros(len(x), 0, dtype=torch.float64, device=x.device)]
    for start in range(0, len(triples), 256):
        inside = triples[start : start + 256].to(x.device)
        step = _with_last(x, last, start, start + len(inside) + 2).diff(dim=1)
        unit, length = unit_vectors(step)
        unit = unit.where(length[..., None] > 0, torch.nan)
        before = unit[:, :-1][:, inside]
        after = unit[:, 1:][:, inside]
        # Exact at small angles too, where an arccos is not.
        parts.append(2 * torch.atan2((after - before).double().norm(dim=-1), (after + before).double().norm(dim=-1)))
    return torch.cat(parts, 1)


def _paths(x: Tensor, window: int) -> dict[str, Tensor]:
    """A dict of each token's trajectory measures, such as its line-shape score: `layer token` or `token`, float64.

    Args:
        x: residuals, `layer token d_model`.
        window: steps of the windowed line-shape score, 0 for none.
    """
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
    depth = torch.arange(len(x), device=x.device).to(x)[:, None, None] / blocks
    deviations = []
    for residual, fraction in zip(x, depth, strict=True):
        # Distance from the point of the straight path at the same depth.
        deviations.append(norms(residual - (1 - fraction) * x[0] - fraction * x[-1]))
    deviation = torch.stack(deviations)

    def score(steps: int) -> Tensor:
        """Line-shape score of each segment of `steps` steps; NaN if a step is zero."""
        distance = (travelled[steps:] - travelled[: len(x) - steps]).norm(dim=-1)
        # At least 1 by the triangle inequality; rounding of unit steps can leave a straight path just below.
        lss: Tensor = (steps / distance).clamp(min=1).where(still[steps:] == still[: len(x) - steps], torch.nan)
        return lss

    return {
        "norm": norm,
        "update": update,
        "deviation": deviation / length.where(length > 0, torch.nan),
        "growth": growth,
        "mean growth": mean_growth,
        "lss": score(blocks)[0],
        "expodistance": growth.var(0, correction=0) / mean_growth.where(mean_growth != 0, torch.nan).square(),
        "equidistance": update.std(0, correction=0) / update.mean(0),
        "windowed": score(window) if window else norm[:0],
    }


def log_histogram(values: Tensor, counted: Tensor) -> Tensor:
    """Histograms with bins of a hundredth of a decade, `... token` to `... bin`, of the values that are `counted`."""
    low, high = DECADES
    bins = int((high - low) * 100)
    flat = values.flatten(0, -2) if values.dim() > 1 else values[None]
    decades = flat.clamp(min=10**low).log10().nan_to_num(low, posinf=high) - low
    index = (decades * 100).long().clamp(0, bins - 1)
    offset = bins * torch.arange(len(flat), device=values.device)[:, None]
    counts = torch.bincount((index + offset)[counted.reshape(flat.shape)], minlength=bins * len(flat))
    return counts.reshape(*values.shape[:-1], bins)
