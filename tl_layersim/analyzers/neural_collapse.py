"""Neural collapse (NC1): variability within classes relative to variability between classes, at each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View, row_ends, targets
from ..core.arguments import Limit, typed
from ..core.errors import LayersimError, warn
from ..core.results import Result, axes
from ..core.sums import Sums
from ..core.wording import brief
from ..data.labels import NO_LABEL, warn_of_unused
from ..data.positions import PositionRule
from ..sources.checks import need_stream
from ..sources.model import Model
from ._minibatch_draws import samples
from .analyzer import Analyzer, LabelledAnalyzer, Run, listed, need_head

# Ids that are counted to determine the most frequent classes; no vocabulary is larger.
COUNTED_IDS = 2**19


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NeuralCollapseResult(Result):
    """NC1 of each layer, with the variability within and between classes. All tensors are float64.

    Attributes:
        values: `residual`, the same as `nc1`; 0 if every class is a single point. NaN if all classes have the same mean, for
            example at the embedding if all samples end in the same token. A `LayersimWarning` names such layers.
        within: `residual`, tr(S_W), the mean squared distance of a sample from its class mean.
        between: `residual`, tr(S_B), the mean over classes of the squared distance of the class mean from the global mean.
        samples: `label`, number of samples in each class.
        labels: the classes, most frequent first.
    """

    file_kind: ClassVar[str] = "neural_collapse"
    values_name: ClassVar[str] = "nc1"
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
    within: Float64[Tensor, " residual"] = axes(
        "residual", label="Variance within classes", title="Variance within classes at each layer", within=(0, math.inf)
    )
    between: Float64[Tensor, " residual"] = axes(
        "residual", label="Variance between classes", title="Variance between classes at each layer", within=(0, math.inf)
    )
    samples: Float64[Tensor, " label"] = axes(
        "label", label="Samples", title="Samples of each class", within=(0, math.inf), out_of="samples"
    )
    labels: tuple[int, ...]

    @property
    def nc1(self) -> Tensor:
        """NC1 of each layer, `residual`; the same as `values`."""
        return self.values


@typed
@dataclass(frozen=True, eq=False)
class NeuralCollapse(LabelledAnalyzer):
    r"""Within-class variability collapse (NC1): covariance within classes relative to that between classes.

    $$\mathrm{NC}_1 = \frac{1}{K} \mathrm{tr}(\Sigma_W \Sigma_B^{+}), \quad
    \Sigma_W = \frac{1}{N} \sum_{k, i} (h_{k i} - \bar h_k)(h_{k i} - \bar h_k)', \quad
    \Sigma_B = \frac{1}{K} \sum_k (\bar h_k - \bar h)(\bar h_k - \bar h)'$$

    with N samples in K classes, $\bar h_k$ the mean of a class and $\bar h$ the mean of all samples. For classes of equal size
    this is the paper's definition. For other sizes, as in common implementations, all samples have equal weight in the first
    matrix and all classes have equal weight in the second.

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
        max_memory_gb: limit for the second moments, layers x d_model^2 numbers; a run that needs more raises an error before it
            starts.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.3, footnote 5 and figure 16; Papyan, Han and Donoho 2020.

    Examples:
        >>> import tl_layersim as lsim
        >>> collapse = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:8], [lsim.NeuralCollapse()])["neural_collapse"]
        >>> collapse.nc1.shape, len(collapse.labels), bool((collapse.nc1 > 0).all())
        (torch.Size([9]), 10, True)
    """

    name: ClassVar[str] = "neural_collapse"
    one_pass: ClassVar[str] = "NeuralCollapse(classes=(id, id, ...)) with the ids of the classes"
    first_without_model: ClassVar[bool] = True

    labels: Any = "next_token"
    classes: int | tuple[int, ...] | list[int] = 10
    level: Literal["auto", "token", "sequence"] = "auto"
    pool: Literal["last", "first", "mean", "head"] | None = None
    max_memory_gb: Limit = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.classes, list):
            object.__setattr__(self, "classes", tuple(self.classes))
        least = self.classes if isinstance(self.classes, int) else len(set(self.classes))
        if least < 2:
            raise LayersimError(f"`classes` is {brief(self.classes)}; it must be at least 2, or name two classes or more.")

    @property
    def whole_rows(self) -> bool:
        return self._level() == "sequence"

    def _level(self) -> str:
        if self.level != "auto":
            return self.level
        return "token" if isinstance(self.labels, str) and self.labels == "next_token" else "sequence"

    def settled(self, model: Model, positions: PositionRule | None) -> Analyzer:
        if self.pool is not None or not self.whole_rows:
            return self
        head = model.head
        if head is None or head.reads == "every" or positions not in (None, "all", head.reads):
            return replace(self, pool="last")
        if model.stream in ("whole", "parts"):
            return replace(self, pool="head")
        by_head: dict[str, Literal["first", "last", "mean"]] = {"first": "first", "last": "last", "rows": "mean"}
        return replace(self, pool=by_head[head.reads])

    def sum_numbers(self, *models: Model) -> float:
        model = models[0]
        pool = model.head.pool if self.reads_head and model.head is not None else None
        return len(model.layers) * ((model.widest or 0) * (1 if pool is None else pool.vectors)) ** 2

    @property
    def reads_head(self) -> bool:
        return self.pool == "head" and self.whole_rows

    def check(self, *models: Model) -> None:
        if not self.reads_head:
            return
        for model in models:
            need_head(model, "NeuralCollapse(pool='head')")
            need_stream(model, "NeuralCollapse(pool='head')", parts=True)
            if model.head is not None and model.head.reads == "every":
                raise LayersimError(
                    f"`pool` is 'head', but the head of {model.name} reads every position and gives no class of a row."
                )

    def first_kernel(self) -> Kernel | None:
        if isinstance(self.classes, tuple):
            return None
        return partial(class_counts_kernel, labels=self.labels, by_row=self.whole_rows)

    def kernel(self, first: Sums) -> Kernel:
        # A default that no model has settled, as under `attach`, is that of a model without a head.
        pool = self.pool or "last"
        return partial(collapse_kernel, labels=self.labels, classes=self._classes(first), level=self._level(), pool=pool)

    def _classes(self, first: Sums) -> Tensor:
        if isinstance(self.classes, tuple):
            return torch.tensor(list(dict.fromkeys(self.classes)))
        counts = first["labels"]
        # A stable sort takes the lowest ids of equally frequent classes, on every machine.
        order = counts.argsort(descending=True, stable=True)[: self.classes]
        return order[counts[order] > 0]

    def compute(self, sums: Sums, run: Run) -> NeuralCollapseResult:
        warn_of_unused(self.labels, run.provenance)
        counts, classes = sums["samples"].double(), self._classes(run.first)
        if len(counts) < 2 or bool((counts < 1).any()) or int(counts.sum()) <= len(counts):
            raise LayersimError(
                "Collapse needs two classes, a sample in each, and more samples than classes; the data has "
                + (", ".join(f"{int(n)} of class {int(c)}" for c, n in zip(classes[:6], counts[:6], strict=True)) or "no class")
                + "."
            )
        if int(counts.sum()) < sums["second"].shape[-1]:
            warn(
                f"NeuralCollapse rests on {int(counts.sum()):,} samples of {sums['second'].shape[-1]:,} dimensions: with fewer "
                "samples than dimensions NC1 depends on the number of samples. Pass more data, or fewer classes=."
            )
        nc1, within, between = zip(
            *(collapse(counts, total, second) for total, second in zip(sums["total"], sums["second"], strict=True)), strict=True
        )
        undefined = [name for name, value in zip(run.layers, nc1, strict=True) if math.isnan(value)]
        if undefined:
            warn(
                f"NC1 is not defined at {listed(undefined)}, and NaN there: all classes have the same "
                "mean, as they do if all samples end, or begin, in the same token."
            )
        return NeuralCollapseResult(
            values=torch.stack(nc1),
            within=torch.stack(within),
            between=torch.stack(between),
            samples=counts,
            labels=tuple(classes.tolist()),
            layers=run.layers,
            provenance=run.provenance,
        )


def collapse(counts: Tensor, total: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NC1, tr(S_W) and tr(S_B) of one layer.

    Args:
        counts: `class`, number of samples in each class.
        total: `class d_model`, sums over the samples of each class.
        second: `d_model d_model`, second moments of all samples.
    """
    n, k = counts.sum(), len(counts)
    means = total / counts[:, None]
    away = means - total.sum(0) / n
    within = (second - (means * counts[:, None]).T @ means) / n
    # S_B = away' away / K, so its pseudo-inverse follows from a singular value decomposition of the small matrix `away`.
    _, sigma, basis = torch.linalg.svd(away / math.sqrt(k), full_matrices=False)
    # Class means minus the mean of all samples span k - 1 directions. Directions within the rounding error of the means are
    # not among them.
    floor = max(float(sigma.max()), float(means.norm(dim=1).max())) * max(away.shape) * torch.finfo(torch.float64).eps
    kept = (sigma > floor) & (torch.arange(len(sigma)) < k - 1)
    if not bool(kept.any()):
        # All classes have the same mean.
        undefined = torch.tensor(math.nan, dtype=torch.float64)
        return undefined, within.diagonal().sum().clamp(min=0), torch.zeros((), dtype=torch.float64)
    basis, sigma = basis[kept], sigma[kept]
    spread = torch.einsum("rd,de,re->r", basis, within, basis).clamp(min=0)
    return (spread / sigma**2).sum() / k, within.diagonal().sum().clamp(min=0), (away**2).sum() / k


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
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < COUNTED_IDS:
        raise LayersimError(
            f"`labels` are numbers from {int(classes.min())} to {int(classes.max())}; classes are 0 to {COUNTED_IDS - 1}, and "
            f"{NO_LABEL} means no label."
        )
    return {"labels": torch.bincount(classes, minlength=COUNTED_IDS)}


def collapse_kernel(view: View, *, labels: str | Tensor, classes: Tensor, level: str, pool: str) -> dict[str, Tensor]:
    """Number of samples and sum of the samples of each class, and second moments of all samples. Float64.

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
    total, second = [], []
    for layer in x:
        rows = layer.double()
        total.append(match.T @ rows)
        second.append(rows.T @ rows)
    return {"samples": match.sum(0).long(), "total": torch.stack(total), "second": torch.stack(second)}
