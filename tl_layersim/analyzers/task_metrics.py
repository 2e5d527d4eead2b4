"""Task metrics of each layer's predictions: F1 and Matthews correlation, or correlations with scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View, targets
from ..architectures.unembed import LayerHeads
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, result_class, typed, warn, without_nan
from ..core.arguments import Limit
from ..core.sums import need_memory
from ..data.labels import NO_LABEL, label_key, number_tensor
from ..lens.statistics import bad_logits, head_input, logits_of_layers, read_lens, read_positions
from ..lens.targets import gives_classes
from ..sources.model_description import ModelDescription
from .analyzer import Run, need_tokens, sites_where
from .logit_lens import LensAnalyzer
from .needs import Needs


def _samples_of_classes(result: TaskMetricsResult) -> Tensor:
    """Number of samples that decide the F1 of each class, at most (`label layer`).

    F1 = 2 J / (1 + J), with J the fraction of right predictions among the samples whose label or prediction is the class. Near
    0, F1 is twice J, so that half as many samples give its interval.
    """
    confusion = result.confusion
    right = confusion.diagonal(dim1=1, dim2=2)
    label_or_prediction = confusion.sum(2) + confusion.sum(1) - right
    return label_or_prediction.clamp(max=result.provenance.texts).T / 2


def _samples_of_rarest_class(result: TaskMetricsResult) -> Tensor:
    """The same for the class with the fewest samples, on which macro F1 depends as much as on others (`layer`)."""
    samples = _samples_of_classes(result)
    return samples.where(samples > 0, math.inf).amin(0)


@result_class
class TaskMetricsResult(Result):
    """F1, accuracy and Matthews correlation of a classifier's lens predictions at each block. All tensors are float64.

    Attributes:
        values: `layer`, the same as `f1`: macro F1, the mean of the F1 of all classes that are a label or a prediction at the
            layer.
        accuracy: `layer`, fraction of labelled positions whose label is predicted.
        mcc: `layer`, Matthews correlation coefficient, for any number of classes; 0 if all predictions, or all labels, are one
            class.
        f1_by_class: `label layer`, F1 of each class against all others; NaN if it is neither a label nor a prediction. With two
            classes, the entry of class 1 is binary F1.
        confusion: `layer label prediction`, number of positions for each class and predicted class.
        labels: the classes of the head, from 0.
    """

    f1 = ValuesAlias()
    values: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Macro F1 (0 to 1)",
        title="Macro F1 of each layer's prediction",
        caption="Mean over classes of the harmonic mean of precision and recall, with the model's head applied after that "
        "block (Jiang, Zhou and Zhu 2024, figures 8 and 21, show the accuracy).",
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
        units=_samples_of_rarest_class,
    )
    accuracy: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Accuracy",
        unit="fraction",
        title="Accuracy at each layer",
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
    )
    mcc: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Matthews correlation",
        title="Matthews correlation of each layer's prediction",
        caption="1 where all predictions are right, 0 where they say nothing of the label (Matthews 1975; Gorodkin 2004).",
        better="higher",
        within=(-1, 1),
        by_chance=(-1, 1),
    )
    f1_by_class: Float64[Tensor, "label layer"] = axes(
        "label",
        "layer",
        label="F1 (0 to 1)",
        title="F1 of each class, by layer",
        within=(0, 1),
        by_chance=(0, 1),
        units=_samples_of_classes,
    )
    confusion: Float64[Tensor, "layer label prediction"] = axes(
        "layer",
        "label",
        "prediction",
        within=(0, math.inf),
        by_chance=(0, 1),
        out_of="confusion",
        summed=("label", "prediction"),
    )
    labels: tuple[int, ...]

    @property
    def predictions(self) -> tuple[int, ...]:
        """Labels of the `prediction` axis: the classes in `labels`."""
        return self.labels

    def headline(self) -> dict[str, float]:
        binary = {"F1 of class 1 at the last layer": self.f1_by_class[1, -1]} if len(self.labels) == 2 else {}
        return without_nan(
            {
                "macro F1 of the last layer": self.values[-1],
                **binary,
                "Matthews correlation of the last layer": self.mcc[-1],
                "accuracy of the last layer": self.accuracy[-1],
            }
        )


@result_class
class RegressionMetricsResult(Result):
    """Correlations of a regression head's lens predictions with the scores, at each block. All tensors are float64.

    Attributes:
        values: `layer`, the same as `spearman`: rank correlation of predictions and scores; NaN if all predictions of the layer
            are equal.
        pearson: `layer`, linear correlation of predictions and scores; NaN if all predictions of the layer are equal.
        rows: number of rows with a score.
    """

    spearman = ValuesAlias()
    values: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Spearman correlation",
        title="Rank correlation of each layer's prediction",
        caption="Spearman correlation with the scores, with the model's own head applied after that block (Spearman 1904).",
        within=(-1, 1),
    )
    pearson: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Pearson correlation",
        title="Linear correlation of each layer's prediction",
        caption="Pearson correlation with the scores, with the model's own head applied after that block (Pearson 1895).",
        within=(-1, 1),
    )
    rows: int

    def headline(self) -> dict[str, float]:
        return without_nan(
            {
                "Spearman correlation of the last layer": self.values[-1],
                "Pearson correlation of the last layer": self.pearson[-1],
            }
        )


@typed
@dataclass(frozen=True, eq=False)
class TaskMetrics(LensAnalyzer):
    r"""F1 and Matthews correlation of each layer's predictions; for a regression head, correlations with scores.

    With the confusion matrix $C^{(l)}_{ab}$, the number of positions with label a at which block l predicts b,

    $$F_1^{(l)}(a) = \frac{2 C^{(l)}_{aa}}{\sum_b (C^{(l)}_{ab} + C^{(l)}_{ba})}, \qquad
    \mathrm{MCC}^{(l)} = \frac{n \, \mathrm{tr} C^{(l)} - t' p}{\sqrt{(n^2 - t't)(n^2 - p'p)}}$$

    where t and p are the sums of rows and columns and n of all entries. scikit-learn computes both from the confusion matrix.
    SciPy computes the correlations of regression heads (one output, as of sentence similarity) from a table of the predictions
    of all rows.

    Args:
        labels: the targets, as in `LogitLens`: "next_token", "data", or whole numbers `row` or `row pos`, the classes of the
            head. For a regression head: scores, floats `row`, NaN for a row without a score.
        norm: as in `LogitLens`.
        lens_memory_mb: megabytes for the logits of one chunk of tokens.
        max_memory_gb: limit for the sums: layers x classes^2 numbers, or layers x rows for a regression head.
        heads: `ExitHeads` of the layers below the last, or their file; see `LogitLens`.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), figures 8 and 21 (GLUE; accuracy alone); Wang et al. 2018 (arXiv
        1804.07461), table 1, for the metrics of each task; Gorodkin 2004, equation 8, for several classes.

    Examples:
        Of next tokens, on a model of a small vocabulary. At the last layer, accuracy is the model's own.

        >>> import tl_layersim as lsim
        >>> model, texts = lsim.demo_model(), lsim.demo_text()[:4]
        >>> report = lsim.analyze(model, texts, [lsim.LogitLens(), lsim.TaskMetrics()])
        >>> metrics = report["task_metrics"]
        >>> metrics.mcc.shape, bool((metrics.accuracy == report["logit_lens"].accuracy).all())
        (torch.Size([8]), True)
    """

    name: ClassVar[str] = "task_metrics"
    optional_labels: ClassVar[bool] = False

    labels: Any = "next_token"
    max_memory_gb: Limit = 4.0

    @property
    def needs(self) -> Needs:
        return replace(super().needs, sites="stream", resid_mid=True)

    def read_labels(self) -> str | Tensor:
        scores = _as_scores(self.labels)
        return super().read_labels() if scores is None else scores

    @property
    def is_regression(self) -> bool:
        """Whether the labels are scores of a regression head."""
        return isinstance(self.labels, Tensor) and self.labels.is_floating_point()

    def sum_numbers(self, *models: ModelDescription) -> float:
        # The number of classes of a classifier is known when it has run.
        classes = 0 if gives_classes(models[0]) else models[0].vocabulary or 0
        return (len(models[0].layers) - 1) * (len(self.labels) if self.is_regression else classes**2)

    def kernel(self, first: Sums) -> Kernel:
        if self.is_regression:
            options = {name: value for name, value in self.lens.items() if name != "memory_mb"}
            return partial(scores_kernel, rows=torch.arange(len(self.labels)), **options)
        return partial(confusion_kernel, labels=self.labels, max_memory_gb=float(self.max_memory_gb), **self.lens)

    def compute(self, sums: Sums, run: Run) -> Result:
        if self.is_regression:
            self.check_sums(sums, run)
            return _correlations(sums["scores"], sums["count"], self.labels, run)
        confusion = sums["confusion"]
        count = int(confusion[0].sum())
        self.check_sums(sums, run, count)
        f1 = []
        f1_by_class = []
        mcc = []
        for table in confusion:
            layer_f1, layer_f1_by_class, layer_mcc = _metrics(table)
            f1.append(layer_f1)
            f1_by_class.append(layer_f1_by_class)
            mcc.append(layer_mcc)
        return TaskMetricsResult(
            values=torch.tensor(f1, dtype=torch.float64),
            accuracy=confusion.diagonal(dim1=1, dim2=2).sum(1).double() / count,
            mcc=torch.tensor(mcc, dtype=torch.float64),
            f1_by_class=torch.stack(f1_by_class, dim=1),
            confusion=confusion.double(),
            labels=tuple(range(confusion.shape[1])),
            layers=run.layers,
            provenance=run.provenance,
        )


def _as_scores(labels: Any) -> Tensor | None:
    """Scores of rows as float64; None if the labels are classes.

    Raises:
        LayersimError: the labels are floats of another shape.
    """
    if isinstance(labels, str):
        return None
    try:
        table = number_tensor(labels if isinstance(labels, Tensor) else np.array(labels))
    except (TypeError, ValueError, RuntimeError):
        return None
    if not table.is_floating_point():
        return None
    if table.dim() != 1:
        raise LayersimError(
            f"`labels` has shape {tuple(table.shape)}; for a regression head it must hold a score for each row, NaN for a row "
            "without one."
        )
    return table.detach().cpu().double()


def _metrics(confusion: Tensor) -> tuple[float, Tensor, float]:
    """Macro F1, F1 by class and the Matthews correlation of one layer, from its confusion matrix `class class`."""
    from sklearn.metrics import f1_score, matthews_corrcoef

    # One line for each filled cell, weighted by its count.
    cells = confusion.nonzero().numpy()
    label = cells[:, 0]
    predicted = cells[:, 1]
    weight = confusion[confusion != 0].numpy()
    occurring = np.unique(cells)
    by_class = torch.full((len(confusion),), math.nan, dtype=torch.float64)
    f1 = f1_score(label, predicted, labels=occurring, average=None, sample_weight=weight, zero_division=0.0)
    by_class[torch.as_tensor(occurring)] = torch.as_tensor(f1, dtype=torch.float64)
    macro = f1_score(label, predicted, average="macro", sample_weight=weight, zero_division=0.0)
    return float(macro), by_class, float(matthews_corrcoef(label, predicted, sample_weight=weight))


def _correlations(scores: Tensor, count: Tensor, labels: Tensor, run: Run) -> RegressionMetricsResult:
    """Pearson and Spearman correlations of each layer's predictions (`layer row`) with the scores (`row`).

    Args:
        scores: the predictions.
        count: `row`, number of predictions of each row.
        labels: `row`, the scores; NaN for a row without a score.
        run: the finished run.

    Raises:
        LayersimError: a row has several predictions, or fewer than two rows have both a prediction and a score.
    """
    from scipy.stats import pearsonr, spearmanr

    if int(count.max()) > 1:
        raise LayersimError(
            f"`labels` holds one score for each text, but text {int(count.argmax())} is split into {int(count.max())} "
            "rows, each with a prediction. Pass a larger `seq_len` to Data."
        )
    scored = (count == 1) & ~labels.isnan()
    need_tokens(int(scored.sum()), 2, "A correlation", "rows with a score")
    row_scores = labels[scored].numpy()
    if not np.ptp(row_scores):
        raise LayersimError(
            f"`labels` are {row_scores[0]:g} in all {len(row_scores)} rows; a correlation needs scores that differ."
        )

    def by_layer(correlation: Callable[..., Any]) -> Tensor:
        correlations = []
        for predictions in scores[:, scored].numpy():
            # Equal predictions have no correlation, and SciPy would warn.
            if np.ptp(predictions):
                correlations.append(float(correlation(predictions, row_scores).statistic))
            else:
                correlations.append(math.nan)
        return torch.tensor(correlations, dtype=torch.float64)

    result = RegressionMetricsResult(
        values=by_layer(spearmanr),
        pearson=by_layer(pearsonr),
        rows=len(row_scores),
        layers=run.layers,
        provenance=run.provenance,
    )
    constant_sites = sites_where(run.layers[1:], result.values.isnan())
    if constant_sites:
        warn(f"The correlation is NaN at {constant_sites}, because all predictions are equal there.")
    return result


def confusion_kernel(
    view: View,
    *,
    labels: str | Tensor,
    normed: bool,
    memory_mb: float,
    max_memory_gb: float,
    heads: LayerHeads | None = None,
) -> dict[str, Tensor]:
    """Confusion matrices of a classifier's lens predictions (`layer class class`).

    Args:
        view: activations of one batch.
        labels: the classes.
        normed: whether the final norm is applied to every layer, not only to the last one.
        memory_mb: limit for the logits, in MB.
        max_memory_gb: limit for the sums, in GB.
        heads: heads for the layers below the last; None to use the model's own head at every layer.

    Raises:
        LayersimError: the head has one output, or so many outputs that the sums exceed the limit.
    """
    assert view.unembed is not None
    target = targets(view, labels, read_positions(view))
    layers = len(view.activations) - 1
    last, needs_norm = head_input(view, view.activations[-1:], True)
    classes = view.unembed(last[:, :1], needs_norm).shape[-1]
    if classes == 1:
        raise LayersimError(
            "`labels` are classes, but the head has one output. A regression head needs scores: labels.float()."
        )
    # The batch's table, the running sum, and the new sum while the two are added.
    need_memory("The sums of TaskMetrics", 3 * 8 * layers * classes**2 / 1e9, max_memory_gb, "LogitLens takes less.")
    lens = read_lens(view, target, normed, memory_mb, 1, label_key(labels), heads)
    has_label = target != NO_LABEL
    cells = target[has_label].to(last.device) * classes + lens["best"][:, has_label]
    counts = [torch.bincount(row, minlength=classes**2).view(classes, classes) for row in cells]
    return {"confusion": torch.stack(counts), "bad": bad_logits(lens)}


def scores_kernel(view: View, *, rows: Tensor, normed: bool, heads: LayerHeads | None = None) -> dict[str, Tensor]:
    """Lens predictions of a regression head (`layer row`); zero for rows of other batches.

    Args:
        view: activations of one batch.
        rows: indices of all rows of the data.
        normed: whether the final norm is applied to every layer; at the last layer it always is.
        heads: heads for the layers below the last; None to use the model's own head at every layer.

    Raises:
        LayersimError: the head has several outputs.
    """
    assert view.unembed is not None
    row = targets(view, rows, read_positions(view))
    x, needs_norm = head_input(view, view.activations[1:], normed)
    heads = None if heads is None else heads.fitting(view.unembed, x)
    z = logits_of_layers(view.unembed, x, needs_norm, normed, heads)
    if z.shape[-1] != 1:
        raise LayersimError(
            f"`labels` are floats, but the head has {z.shape[-1]} outputs. A classifier needs classes: labels.long()."
        )
    z = z[..., 0].T.to(x.device).double()
    scores = torch.zeros(len(x), len(rows), dtype=torch.float64, device=x.device)
    scores.index_add_(1, row.to(x.device), z)
    return {
        "scores": scores,
        "count": torch.bincount(row, minlength=len(rows)),
        "bad": (~z.isfinite()).sum(1),
    }
