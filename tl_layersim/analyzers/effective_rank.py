"""Effective rank: the number of directions that the samples of a site fill, from the eigenvalues of their covariance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View
from ..core import Result, Sums, ValuesAlias, axes, result_class, typed, warn
from ..core.arguments import Limit, PositiveInt
from ..core.intervals import with_margin
from ..core.site_names import site_in_words
from ..core.wording import number_text
from ..sources.model_description import ModelDescription
from ._moments import samples_differ
from .analyzer import Run, SampleAnalyzer, refuse_undefined
from .needs import Needs


@result_class
class EffectiveRankResult(Result):
    """Eigenvalues of each site's covariance, and the ranks computed from them. All tensors are float64.

    With the eigenvalues lambda of the covariance, in descending order, and the singular values sqrt(n lambda) of the matrix of
    the n centred samples. Every rank is at least 1, and at most the width of the site and n - 1. All are NaN at a site whose
    samples are equal; a `LayersimWarning` names such sites.

    Attributes:
        values: `residual`, the same as `effective_rank`: exp of the entropy of the singular values divided by their sum.
        eigenvalue_rank: `residual`, exp of the entropy of the eigenvalues divided by their sum; lower than `effective_rank`.
        participation_ratio: `residual`, (sum lambda)^2 / sum lambda^2; lower than `eigenvalue_rank`.
        stable_rank: `residual`, sum lambda / lambda_1, the squared Frobenius norm of the sample matrix over its squared
            spectral norm.
        directions_90: `residual`, smallest number of eigenvalues that add up to 90 % of the variance.
        spectrum: `residual direction`, the largest eigenvalues as fractions of the variance (the sum of all eigenvalues). 0
            beyond the width of the site.
        samples: number of tokens (or sequences), n.
        widths: width of each site.
    """

    effective_rank = ValuesAlias()
    values: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Effective rank",
        title="Effective rank of each layer",
        caption="Number of directions that the samples fill: exp of the entropy of the normalised singular values of the "
        "sample matrix, 1 for samples on a line, the width for equal variance in all directions (Roy and Vetterli 2007).",
        within=(1, math.inf),
    )
    eigenvalue_rank: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Effective rank of the eigenvalues",
        title="Effective rank of the eigenvalues at each layer",
        within=(1, math.inf),
    )
    participation_ratio: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Participation ratio",
        title="Participation ratio of each layer",
        caption="Squared sum of the eigenvalues of the covariance over the sum of their squares. Directions of large variance "
        "decide it, so a few massive activations lower it (Gao et al. 2017).",
        within=(1, math.inf),
    )
    stable_rank: Float64[Tensor, " residual"] = axes(
        "residual", label="Stable rank", title="Stable rank at each layer", within=(1, math.inf)
    )
    directions_90: Float64[Tensor, " residual"] = axes(
        "residual", label="Directions with 90 % of the variance", title="Directions that hold 90 % of the variance", within=None
    )
    spectrum: Float64[Tensor, "residual direction"] = axes(
        "residual",
        "direction",
        label="Variance",
        unit="fraction",
        title="Spectrum of the covariance",
        caption="Fraction of the variance in some of the principal directions, by depth (Roy and Vetterli 2007).",
        within=(0, 1),
    )
    samples: int
    widths: tuple[int, ...]

    def headline(self) -> dict[str, float]:
        defined = ~self.values.isnan()
        if not bool(defined.any()):
            return {}
        lowest_site = int(self.values.where(defined, math.inf).argmin())
        return super().headline() | {f"lowest effective rank, at {self.layers[lowest_site]}": float(self.values[lowest_site])}

    def finding(self) -> str:
        defined = (~self.values.isnan()).nonzero()[:, 0]
        if len(defined) < 2:
            return ""
        lowest_site = int(defined[self.values[defined].argmin()])
        last = int(defined[-1])
        lowest = number_text(float(self.values[lowest_site]))
        width = self.widths[lowest_site]
        at_last = with_margin(self, lambda result: result.values[last])
        return (
            f"The effective rank is lowest at {site_in_words(self.layers[lowest_site])} ({lowest} of {width} dimensions) "
            f"and {at_last} at {site_in_words(self.layers[last])}."
        )


@typed
@dataclass(frozen=True)
class EffectiveRank(SampleAnalyzer):
    r"""Effective rank: the number of directions that the samples of each site fill, from the eigenvalues of their covariance.

    $$\mathrm{erank} = \exp\Big(-\sum_k p_k \ln p_k\Big), \qquad p_k = \frac{\sigma_k}{\sum_j \sigma_j}$$

    with the singular values of the matrix of centred samples. The result also has the same of eigenvalues
    $\lambda_k = \sigma_k^2 / n$, the participation ratio $(\sum_k \lambda_k)^2 / \sum_k \lambda_k^2$, the stable rank and the
    number of directions with 90 % of the variance. All follow from sums over samples, so no activation is kept.

    Args:
        center: "dataset" subtracts the mean of all samples, so that ranks describe variance. "none" subtracts nothing, as in
            the papers; a large mean then counts as a direction and lowers the rank.
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS].
        top: number of eigenvalues in `spectrum`; all of them count in the ranks.
        max_memory_gb: limit for the sums, sites x width^2 numbers; a run that needs more raises an error before it starts.

    Source:
        Roy and Vetterli 2007, The effective rank, definition 1, on singular values; so is RankMe (Garrido et al. 2023,
        arXiv 2210.02885), which equals `center="none"`. Entropy of eigenvalues: Skean et al. 2025 (arXiv
        2502.02013), with `center="none"`. Participation ratio: Gao et al. 2017.

    Examples:
        >>> import tl_layersim as lsim
        >>> rank = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:40], lsim.EffectiveRank())["effective_rank"]
        >>> rank.values.shape, bool((rank.effective_rank < rank.widths[0]).all())
        (torch.Size([9]), True)
    """

    name: ClassVar[str] = "effective_rank"

    center: Literal["dataset", "none"] = "dataset"
    top: PositiveInt = 64
    max_memory_gb: Limit = 4.0

    @property
    def needs(self) -> Needs:
        return replace(super().needs, dominance=("samples", "variance" if self.center == "dataset" else "power"))

    def sum_numbers(self, *models: ModelDescription) -> float:
        return len(models[0].layers) * (models[0].widest or 0) ** 2

    def compute_seconds(self, model: ModelDescription) -> float:
        # The eigenvalues of one site of width 576 take about 0.03 seconds.
        return len(model.layers) * 0.03 * ((model.widest or 0) / 576) ** 3

    def kernel(self, first: Sums) -> Kernel:
        return partial(second_moments_kernel, rows=self.read)

    def compute(self, sums: Sums, run: Run) -> EffectiveRankResult:
        unit = self.sample_word
        n = int(sums["samples"])
        centred = self.center == "dataset"
        widths = tuple((sums["width"] // n).tolist())
        top = min(self.top, sums["second"].shape[-1])
        by_site = []
        for second, total in zip(sums["second"] / n, sums["total"] / n, strict=True):
            mean = total if centred else torch.zeros_like(total)
            by_site.append(_ranks(spectrum_of(second, mean), top))
        ranks: dict[str, Any] = {}
        for name in by_site[0]:
            ranks[name] = torch.stack([site_ranks[name] for site_ranks in by_site])
        reason = f"all {n} {unit} are equal up to rounding, like [CLS] tokens before the first attention"
        refuse_undefined("The effective rank", [(run.layers, ~ranks["values"].isnan())], reason)
        highest_rank = n - centred
        width = max(widths)
        if highest_rank < width:
            warn(
                f"Effective ranks rest on {n} {unit}, fewer than the width of {width}: no rank can exceed {highest_rank}, and "
                "all are biased downwards. Pass more data."
            )
        return EffectiveRankResult(samples=n, widths=widths, layers=run.layers, provenance=run.provenance, **ranks)


def spectrum_of(second: Tensor, mean: Tensor) -> Tensor:
    """Eigenvalues of the matrix of second moments about a mean, descending.

    Eigenvalues within the rounding error of the moments are 0; all are 0 if the samples do not differ from the mean.

    Args:
        second: `width width`, mean of x x' over the samples.
        mean: `width`, the mean to subtract.
    """
    if not samples_differ(second, mean):
        return torch.zeros_like(mean)
    values: Tensor = torch.linalg.eigvalsh(second - torch.outer(mean, mean)).flip(0)
    floor = len(values) * torch.finfo(torch.float64).eps * second.diagonal().sum()
    return values.where(values > floor, 0)


def _ranks(values: Tensor, top: int) -> dict[str, Tensor]:
    """A dict of the ranks and the spectrum of one site, from descending eigenvalues; NaN if all eigenvalues are 0."""
    total = values.sum()
    share = values / total
    return {
        "values": _exp_entropy(values.sqrt()),
        "eigenvalue_rank": _exp_entropy(values),
        "participation_ratio": 1 / share.square().sum(),
        "stable_rank": 1 / share[0],
        # Rounding of the sum must not add a direction.
        "directions_90": ((share.cumsum(0) < 0.9 - 1e-12).sum().double() + 1).where(total > 0, math.nan),
        "spectrum": share[:top],
    }


def _exp_entropy(values: Tensor) -> Tensor:
    """Exponential of the entropy of the values, normalised to sum 1."""
    p = values / values.sum()
    rank: Tensor = torch.special.entr(p).sum().exp()
    return rank


def second_moments_kernel(view: View, *, rows: partial[Tensor]) -> dict[str, Tensor]:
    """Sums of the samples and of their second moments, float64.

    Args:
        view: activations of one batch.
        rows: function that takes a view and returns its samples, `site sample width`.
    """
    x = rows(view)
    total = []
    second = []
    for site in x:
        samples = site.double()
        total.append(samples.sum(0))
        second.append(samples.T @ samples)
    count = x.shape[1]
    return {
        "samples": torch.tensor(count),
        "total": torch.stack(total),
        "second": torch.stack(second),
        # A site that is narrower than the widest one is padded with zeros: its width is this sum over the samples.
        "width": torch.tensor(view.widths or [x.shape[-1]] * len(x)) * count,
    }
