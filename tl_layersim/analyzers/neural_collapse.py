"""Neural collapse (NC1, NC2 and NC3) at each layer: variability within classes, and the geometry of the class means."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..activations.view import Kernel, View, row_ends, targets
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, result_class, typed, warn
from ..core.arguments import Limit, TwoOrMore
from ..core.wording import brief
from ..data.labels import NO_LABEL, warn_of_unused
from ..data.positions import PositionRule
from ..sources.activation_checks import need_stream
from ..sources.model_description import ModelDescription
from ._moments import warn_of_few_samples
from ._samples import check_classes, check_finite, samples
from .analyzer import Analyzer, LabelledAnalyzer, Run, need_head, sites_where
from .needs import Needs

# Ids that are counted to determine the most frequent classes; no vocabulary is larger.
COUNTED_IDS = 2**19


class UndefinedCollapseError(LayersimError):
    """The data has fewer than two classes, a class without samples, or no more samples than classes."""


@result_class
class NeuralCollapseResult(Result):
    """NC1, NC2 and NC3 of each layer, with the variability within and between classes. All tensors are float64.

    Attributes:
        values: `residual`, the same as `nc1`; 0 if every class is a single point. NaN if all classes have the same mean, for
            example at the embedding if all samples end in the same token. A `LayersimWarning` names such layers.
        nc2: `residual`, mean over pairs of classes of |cos(m_k, m_k') + 1 / (K - 1)|, with m_k the class mean minus the global
            mean; 0 for equal angles as wide as possible, as in a simplex. NaN if a class mean is the global mean.
        equinorm: `residual`, standard deviation over classes of |m_k| divided by the mean of |m_k|; 0 for equal norms.
        nc3: `residual`, squared distance |W / |W| - M / |M||^2 in Frobenius norms, with W the rows of `classifier` minus their
            mean and M the m_k as rows, from 0 to 4; 0 if they align, 2 if they are orthogonal. NaN without `classifier`.
        within: `residual`, tr(S_W), the mean squared distance of a sample from its class mean.
        between: `residual`, tr(S_B), the mean over classes of the squared distance of the class mean from the global mean.
        samples: `label`, number of samples in each class.
        labels: the classes, most frequent first.
    """

    nc1 = ValuesAlias()
    values: Float64[Tensor, " residual"] = axes(
        "residual",
        label="NC1",
        unit="variability within / between classes",
        title="Within-class variability collapse",
        caption="NC1 of each layer: low where samples of a class are close together relative to the distances between classes "
        "(Jiang, Zhou and Zhu 2024, appendix B.3, figure 16; Papyan, Han and Donoho 2020).",
        better="lower",
        scale="log",
        within=(0, math.inf),
    )
    nc2: Float64[Tensor, " residual"] = axes(
        "residual",
        label="NC2",
        unit="difference of cosines",
        title="Angles between class means",
        caption="Mean difference of the cosines between class means from those of a simplex, -1 / (K - 1): low where classes "
        "are equally far apart (Papyan, Han and Donoho 2020, figure 4; Jiang, Zhou and Zhu 2024, section 2.2).",
        better="lower",
        within=(0, 2),
    )
    equinorm: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Spread of the norms of class means",
        unit="standard deviation / mean",
        title="Norms of class means",
        better="lower",
        within=(0, math.inf),
    )
    nc3: Float64[Tensor, " residual"] = axes(
        "residual",
        label="NC3",
        unit="squared distance",
        title="Class means and classifier",
        caption="Squared distance between the classifier's rows and the class means, both scaled to norm 1: 0 if they align, 2 "
        "if they are orthogonal; needs NeuralCollapse(classifier=...) (Papyan, Han and Donoho 2020, figure 5; Jiang, Zhou and "
        "Zhu 2024, section 2.2).",
        better="lower",
        within=(0, 4),
    )
    within: Float64[Tensor, " residual"] = axes(
        "residual", label="Variance within classes", title="Variance within classes at each layer", within=(0, math.inf)
    )
    between: Float64[Tensor, " residual"] = axes(
        "residual", label="Variance between classes", title="Variance between classes at each layer", within=(0, math.inf)
    )
    samples: Float64[Tensor, " label"] = axes(
        "label", label="Samples", title="Samples of each class", within=(0, math.inf), by_chance=(0, 1), out_of="samples"
    )
    labels: tuple[int, ...]


@typed
@dataclass(frozen=True, eq=False)
class NeuralCollapse(LabelledAnalyzer):
    r"""Neural collapse: variability within and between classes (NC1), and the geometry of the class means (NC2, NC3).

    $$\mathrm{NC}_1 = \frac{1}{K} \mathrm{tr}(\Sigma_W \Sigma_B^{+}), \quad
    \Sigma_W = \frac{1}{N} \sum_{k, i} (h_{k i} - \bar h_k)(h_{k i} - \bar h_k)', \quad
    \Sigma_B = \frac{1}{K} \sum_k (\bar h_k - \bar h)(\bar h_k - \bar h)'$$

    with N samples in K classes, $\bar h_k$ the mean of a class and $\bar h$ the mean of all samples. For classes of equal size
    this is the paper's definition. For other sizes, as in common implementations, all samples have equal weight in the first
    matrix and all classes have equal weight in the second. With $m_k = \bar h_k - \bar h$, and W and M the matrices of the
    classifier's rows (minus their mean) and of the $m_k$,

    $$\mathrm{NC}_2 = \frac{1}{K (K - 1)} \sum_{k \ne k'} \Big| \cos(m_k, m_{k'}) + \frac{1}{K - 1} \Big|, \qquad
    \mathrm{NC}_3 = \Big\| \frac{W}{\|W\|_F} - \frac{M}{\|M\|_F} \Big\|_F^2$$

    Args:
        labels: the classes. "next_token": the following token. "data": the data's own column `labels` or `label`. Or a tensor,
            `row` or `row pos`. -100 marks a position without a class.
        classes: number of classes: the most frequent ones, found by a first pass over the data without the model. Or the ids of
            the classes.
        level: the unit of a sample: "token", or "sequence" for a row. "auto" is "token" for next tokens, else "sequence".
        pool: for level="sequence": the row's "last" counted token, its "first", or the "mean" of all; "head" for the vector of
            a row that a classifier reads, before the final norm: [CLS], the mean of the patches, or both, concatenated. None is
            "head" if the model's head reads whole rows and `positions` keeps what it reads, else "last". At sites other than
            the residual stream, None is "first", "last" or, for a head that reads several positions, "mean". The choice is
            recorded as `provenance.options["pool"]`.
        classifier: W for NC3, `class d_model`: the weight of the model's last linear layer, whose row k belongs to class k,
            such as `model.lm_head.weight` for next tokens. A final norm scales the residual before it: the weight times the
            gain of the norm has the basis of the residual. None for no NC3.
        max_memory_gb: limit for the second moments, layers x d_model^2 numbers; a run that needs more raises an error before it
            starts.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.3, footnote 5 and figure 16, and section 2.2 for NC2 and
        NC3; Papyan, Han and Donoho 2020 (arXiv 2008.08186), figures 2, 4 and 5. Rows of W are centred here, because a vector
        that is added to all of them changes no prediction.

    Examples:
        >>> import tl_layersim as lsim
        >>> collapse = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:8], [lsim.NeuralCollapse()])["neural_collapse"]
        >>> collapse.nc1.shape, len(collapse.labels), bool((collapse.nc1 > 0).all())
        (torch.Size([9]), 10, True)

        Class means turn towards the rows of the unembedding.

        >>> model = lsim.demo_model()
        >>> weight = model.lm_head.weight.detach() * model.model.norm.weight.detach()
        >>> known = lsim.analyze(model, lsim.demo_text()[:8], lsim.NeuralCollapse(classifier=weight))["neural_collapse"]
        >>> bool(known.nc3[-1] < known.nc3[1])
        True
    """

    name: ClassVar[str] = "neural_collapse"

    labels: Any = "next_token"
    classes: TwoOrMore | tuple[int, ...] | list[int] = 10
    level: Literal["auto", "token", "sequence"] = "auto"
    pool: Literal["last", "first", "mean", "head"] | None = None
    classifier: Float[Tensor, "class d_model"] | None = None
    max_memory_gb: Limit = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.classes, list):
            object.__setattr__(self, "classes", tuple(self.classes))
        if isinstance(self.classes, tuple) and len(set(self.classes)) < 2:
            raise LayersimError(f"`classes` is {brief(self.classes)}; it must name two different classes or more.")
        if self.classifier is not None:
            check_finite("classifier", self.classifier)

    @property
    def needs(self) -> Needs:
        return replace(
            super().needs,
            head="positions" if self.pool == "head" and self._samples_are_rows else "none",
            whole_rows=self._samples_are_rows,
            first_pass="data",
            one_pass="NeuralCollapse(classes=(id, id, ...)) with the ids of the classes",
        )

    @property
    def _samples_are_rows(self) -> bool:
        if self.level != "auto":
            return self.level == "sequence"
        return not (isinstance(self.labels, str) and self.labels == "next_token")

    def settled(self, model: ModelDescription, positions: PositionRule | None) -> Analyzer:
        if self.pool is not None or not self._samples_are_rows:
            return self
        head = model.head
        if head is None or head.reads == "every" or positions not in (None, "all", head.reads):
            return replace(self, pool="last")
        if model.stream in ("whole", "parts"):
            return replace(self, pool="head")
        by_head: dict[str, Literal["first", "last", "mean"]] = {"first": "first", "last": "last", "rows": "mean"}
        return replace(self, pool=by_head[head.reads])

    def sum_numbers(self, *models: ModelDescription) -> float:
        return len(models[0].layers) * self._width(models[0]) ** 2

    def _width(self, model: ModelDescription) -> int:
        """Width of a sample; 0 if it is not known."""
        pool = model.head.pool if self.needs.positions_of_head and model.head is not None else None
        return (model.widest or 0) * (1 if pool is None else pool.vectors)

    def check_sites(self, *models: ModelDescription) -> None:
        super().check_sites(*models)
        width = self._width(models[0])
        if self.classifier is not None and width and self.classifier.shape[1] != width:
            raise LayersimError(
                f"`classifier` has shape {tuple(self.classifier.shape)}; for {models[0].name} it must have shape "
                f"(classes, {width})."
            )

    def check(self, *models: ModelDescription) -> None:
        if not self.needs.positions_of_head:
            return
        for model in models:
            need_head(model, "NeuralCollapse(pool='head')")
            need_stream(model, "NeuralCollapse(pool='head')", parts=True)
            if model.head is not None and model.head.reads == "every":
                raise LayersimError(
                    f"`pool` is 'head'; it must be 'last', 'first' or 'mean', because the head of {model.name} reads every "
                    "position."
                )

    def first_kernel(self) -> Kernel | None:
        if isinstance(self.classes, tuple):
            return None
        return partial(class_counts_kernel, labels=self.labels, by_row=self._samples_are_rows)

    def kernel(self, first: Sums) -> Kernel:
        # A default that no model has settled, as under `attach`, is that of a model without a head.
        pool = self.pool or "last"
        level = "sequence" if self._samples_are_rows else "token"
        return partial(collapse_kernel, labels=self.labels, classes=self._classes(first), level=level, pool=pool)

    def _classes(self, first: Sums) -> Tensor:
        if isinstance(self.classes, tuple):
            return torch.tensor(list(dict.fromkeys(self.classes)))
        counts = first["labels"]
        # A stable sort takes the lowest ids of equally frequent classes, on every machine.
        order = counts.argsort(descending=True, stable=True)[: self.classes]
        return order[counts[order] > 0]

    def compute(self, sums: Sums, run: Run) -> NeuralCollapseResult:
        warn_of_unused(self.labels, run.provenance)
        counts = sums["samples"].double()
        classes = self._classes(run.first)
        if len(counts) < 2 or bool((counts < 1).any()) or int(counts.sum()) <= len(counts):
            class_sizes = [f"{int(n)} samples of class {int(c)}" for c, n in zip(classes[:6], counts[:6], strict=True)]
            raise UndefinedCollapseError(
                "NeuralCollapse needs two classes or more, samples of each, and more samples than classes; the data has "
                f"{', '.join(class_sizes) or 'no class'}."
            )
        warn_of_few_samples("NeuralCollapse", int(counts.sum()), sums["second"].shape[-1], "samples")
        if self.classifier is not None and not 0 <= int(classes.min()) <= int(classes.max()) < len(self.classifier):
            raise LayersimError(
                f"`classifier` has {len(self.classifier)} rows; it must have one for each class, and the data has classes from "
                f"{int(classes.min())} to {int(classes.max())}."
            )
        nc1_of_sites = []
        within_of_sites = []
        between_of_sites = []
        for total, second in zip(sums["total"], sums["second"], strict=True):
            nc1_of_site, within_of_site, between_of_site = collapse(counts, total, second)
            nc1_of_sites.append(nc1_of_site)
            within_of_sites.append(within_of_site)
            between_of_sites.append(between_of_site)
        nc1 = torch.stack(nc1_of_sites)
        between = torch.stack(between_of_sites)
        undefined = sites_where(run.layers, nc1.isnan())
        if undefined:
            warn(
                f"NC1 is not defined at {undefined}, and NaN there: all classes have the same mean, for example "
                "because all samples are the same token."
            )
        centred_means = sums["total"] / counts[:, None] - sums["total"].sum(1, keepdim=True) / counts.sum()
        centred_means = centred_means.masked_fill(between.eq(0)[:, None, None], 0)
        return NeuralCollapseResult(
            values=nc1,
            nc2=simplex_gap(centred_means),
            equinorm=centred_means.norm(dim=-1).std(-1, correction=0) / centred_means.norm(dim=-1).mean(-1),
            nc3=self._duality_gap(centred_means, classes),
            within=torch.stack(within_of_sites),
            between=between,
            samples=counts,
            labels=tuple(classes.tolist()),
            layers=run.layers,
            provenance=run.provenance,
        )

    def _duality_gap(self, centred_means: Tensor, classes: Tensor) -> Tensor:
        """NC3 of each layer (`layer`); NaN without a classifier.

        Args:
            centred_means: class means minus the global mean, `layer class d_model`.
            classes: ids of the classes.
        """
        if self.classifier is None:
            return torch.full((len(centred_means),), math.nan, dtype=torch.float64)
        weight = self.classifier.detach().cpu().double()[classes]
        weight = weight - weight.mean(0)
        means = centred_means / centred_means.flatten(1).norm(dim=1)[:, None, None]
        gap: Tensor = (weight / weight.norm() - means).square().sum((1, 2))
        return gap


def simplex_gap(centred_means: Tensor) -> Tensor:
    """NC2 of each layer (`layer`): mean over pairs of classes of |cos + 1 / (K - 1)|.

    Args:
        centred_means: class means minus the global mean, `layer class d_model`.
    """
    unit = centred_means / centred_means.norm(dim=-1, keepdim=True)
    k = centred_means.shape[1]
    gap: Tensor = ((unit @ unit.mT).clamp(-1, 1) + 1 / (k - 1)).abs()
    gap = gap.masked_fill(torch.eye(k, dtype=torch.bool), 0).sum((1, 2)) / (k * (k - 1))
    return gap


def collapse(counts: Tensor, total: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NC1, tr(S_W) and tr(S_B) of one layer.

    Args:
        counts: `class`, number of samples in each class.
        total: `class d_model`, sums over the samples of each class.
        second: `d_model d_model`, second moments of all samples.
    """
    n = counts.sum()
    k = len(counts)
    means = total / counts[:, None]
    centred_means = means - total.sum(0) / n
    within = (second - (means * counts[:, None]).T @ means) / n
    within_trace = within.diagonal().sum().clamp(min=0)
    # S_B = M'M / K with M = `centred_means`, so its pseudo-inverse follows from a singular value decomposition of this small
    # matrix.
    _, sigma, basis = torch.linalg.svd(centred_means / math.sqrt(k), full_matrices=False)
    # Class means minus the mean of all samples span k - 1 directions. Directions within the rounding error of the means are
    # not among them.
    scale = max(float(sigma.max()), float(means.norm(dim=1).max()))
    floor = scale * max(centred_means.shape) * torch.finfo(torch.float64).eps
    spanned = (sigma > floor) & (torch.arange(len(sigma)) < k - 1)
    if not bool(spanned.any()):
        # All classes have the same mean.
        undefined = torch.tensor(math.nan, dtype=torch.float64)
        return undefined, within_trace, torch.zeros((), dtype=torch.float64)
    basis = basis[spanned]
    sigma = sigma[spanned]
    spread = torch.einsum("rd,de,re->r", basis, within, basis).clamp(min=0)
    return (spread / sigma**2).sum() / k, within_trace, (centred_means**2).sum() / k


def class_counts_kernel(view: View, *, labels: str | Tensor, by_row: bool) -> dict[str, Tensor]:
    """Number of samples of each class.

    Args:
        view: activations of one batch.
        labels: the classes.
        by_row: whether a sample is a row, not a token.
    """
    classes = targets(view, labels)
    if by_row:
        classes = classes[row_ends(view)]
    classes = classes[classes != NO_LABEL]
    check_classes(classes, COUNTED_IDS)
    return {"labels": torch.bincount(classes, minlength=COUNTED_IDS)}


def collapse_kernel(view: View, *, labels: str | Tensor, classes: Tensor, level: str, pool: str) -> dict[str, Tensor]:
    """Size and sum of each class, and the second moments of all samples. Float64.

    Args:
        view: activations of one batch.
        labels: the class of each position.
        classes: ids of the classes to include.
        level: "token" or "sequence".
        pool: for "sequence", "last", "first", "mean" or "head".
    """
    target = targets(view, labels)
    if level == "sequence":
        target = target[row_ends(view)]
    match = target[:, None] == classes.to(target.device)
    member = match.any(1)
    x = samples(view, level=level, pool=pool)[:, member]
    match = match[member].double()
    total = []
    second = []
    for layer in x:
        rows = layer.double()
        total.append(match.T @ rows)
        second.append(rows.T @ rows)
    return {"samples": match.sum(0).long(), "total": torch.stack(total), "second": torch.stack(second)}
