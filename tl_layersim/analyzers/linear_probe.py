"""Linear probes: accuracy of a linear classifier on frozen activations, at each site."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.errors import LayersimError, as_fraction, warn
from ..core.results import Picture, Result, axes
from ..core.sums import Sums
from ..core.wording import amount
from ..data.batches import Batch
from ..data.labels import NO_LABEL, as_labels, label_source, warn_of_unused
from ..models.model_info import Model
from ..models.targets import check_batch_labels, targets
from ..models.view import Kernel, View, tokens_alone
from ._probe_kernels import labelled, probe_counts_kernel, probe_sums_kernel
from ._ridge import ridge_probe, samples_differ
from .base import Analyzer, Run, need_whole_rows


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LinearProbeResult(Result):
    """Accuracy of a linear probe at each site, on rows that it was not fitted on. All tensors are float64.

    Attributes:
        values: `residual`, the same as `accuracy`: fraction of held-out samples whose class the probe predicts.
        train_accuracy: `residual`, the same of training samples. Far above `accuracy`, the probe has too few samples for the
            width of the site.
        majority: accuracy on held-out samples of always predicting the most frequent class of the training samples.
        confusion: `residual label prediction`, number of held-out samples of each class that were predicted as each class.
        samples: `label`, number of training samples of each class.
        test_samples: `label`, number of held-out samples of each class.
        labels: the classes, ascending.
        method: "ridge" or "logistic".
    """

    values_name: ClassVar[str] = "accuracy"
    values: Float64[Tensor, " residual"] = axes("residual", within=(0, 1))
    train_accuracy: Float64[Tensor, " residual"] = axes("residual", within=(0, 1))
    majority: Float64[Tensor, ""] = axes(within=None)
    confusion: Float64[Tensor, "residual label prediction"] = axes(
        "residual", "label", "prediction", within=(0, math.inf), out_of="confusion"
    )
    samples: Float64[Tensor, " label"] = axes("label", within=None)
    test_samples: Float64[Tensor, " label"] = axes("label", within=None)
    labels: tuple[int, ...]
    method: str

    pictures: ClassVar[tuple[Picture, ...]] = (
        Picture(
            "accuracy",
            "Accuracy of a linear probe at each site",
            "Fraction of held-out samples that a linear classifier on the frozen activations of the site predicts (Alain and "
            "Bengio 2016; Jiang, Zhou and Zhu 2024, appendix B.4, figure 17).",
        ),
    )

    @property
    def accuracy(self) -> Tensor:
        """Accuracy on held-out samples, `residual`; the same as `values`."""
        return self.values

    @property
    def predictions(self) -> tuple[int, ...]:
        """The classes that are predicted, the same as `labels`."""
        return self.labels

    def baseline(self, field: str) -> tuple[str, float] | None:
        return ("most frequent class in training", float(self.majority)) if field == "accuracy" else None

    def measured_on(self, field: str) -> str:
        train, test, classes = int(self.samples.sum()), int(self.test_samples.sum()), len(self.labels)
        return f"{train:,} training and {amount(test, 'held-out sample')}, {classes} classes (chance:\u00a0{1 / classes:.3g})"

    def headline(self) -> dict[str, float]:
        best = int(self.values.argmax())
        first = self.first_layer()
        ends = {f"probe accuracy at {'the embedding' if first == 'embedding' else first}": float(self.values[0])}
        if len(self.values) > 1:
            ends["probe accuracy at the last site"] = float(self.values[-1])
        return ends | {
            f"highest probe accuracy, at {self.layers[best]}": float(self.values[best]),
            "accuracy of the most frequent class": float(self.majority),
            "held-out samples": float(self.test_samples.sum()),
        }


@typed
@dataclass(frozen=True, eq=False)
class ProbeAnalyzer(Analyzer):
    """A probe with labels, whose held-out rows are chosen by their numbers. Subclasses fit the probe.

    Args:
        labels: see `LinearProbe`, as for all options.
        test_fraction: see `LinearProbe`.
        first_test_row: see `LinearProbe`.
        seed: see `LinearProbe`.
        max_memory_gb: see `LinearProbe`.
    """

    labels: Any = "next_token"
    test_fraction: int | float = 0.2
    first_test_row: int | None = None
    seed: int = 0
    max_memory_gb: int | float = 4.0

    def __post_init__(self) -> None:
        labels = as_labels(self.labels)
        object.__setattr__(self, "labels", labels)
        if isinstance(labels, Tensor):
            _check_classes(labels, None)
            if len(set(labels[labels != NO_LABEL].tolist())) < 2:
                raise LayersimError(
                    "`labels` of a linear probe must have two classes.",
                    given=f"{labels.numel()} labels: {sorted(set(labels.flatten().tolist()))}",
                    expected=f"at least two different whole numbers beside {NO_LABEL}",
                    do="check the labels",
                )
        if not 0 < self.test_fraction < 1:
            raise LayersimError(
                "`test_fraction` must be between 0 and 1.",
                given=f"test_fraction={self.test_fraction}",
                expected="a fraction of the rows, above 0 and below 1",
                do=as_fraction("test_fraction", self.test_fraction) or "test_fraction=0.2",
            )

    @property
    def label_source(self) -> str:
        return label_source(self.labels)

    @property
    def needs_positions(self) -> bool:
        # Next tokens are targets of single positions.
        return not self.label_source

    @property
    def split(self) -> tuple[float, int, int | None]:
        """The options that decide which rows are held out, as `held_out` takes them."""
        return (float(self.test_fraction), self.seed, self.first_test_row)

    def labelled_samples(self, view: View) -> tuple[Tensor, Tensor, Tensor]:
        """The class of each sample, whether it is a training sample and whether it is held out, each `sample`.

        Args:
            view: activations of one batch.
        """
        return labelled(view, self.labels, self.split)

    def check_batch(self, batch: Batch, model: Model) -> None:
        check_batch_labels(self.labels, batch)
        need_whole_rows(batch, "a linear probe")
        if not isinstance(self.labels, Tensor):
            _check_classes(targets(tokens_alone(batch), self.labels), None)


@typed
@dataclass(frozen=True, eq=False)
class LinearProbe(ProbeAnalyzer):
    r"""Accuracy of a linear classifier (ridge regression on one-hot labels) on frozen activations, at each site.

    $$\hat W = (\Sigma + \mathrm{ridge} \, \mathrm{diag} \, \Sigma)^{-1} \, \frac{1}{n} \sum_i (x_i - \bar x)(y_i - \bar y)',
    \qquad \Sigma = \frac{1}{n} \sum_i (x_i - \bar x)(x_i - \bar x)'$$

    with the activations x of the n training samples and their one-hot labels y. This is ridge regression on dimensions that are
    scaled to a standard deviation of 1. The prediction is the class with the largest entry of $\hat W'(x - \bar x) + \bar y$:
    the intercept is not penalised. A first pass over the data sums over training samples, and a second pass counts predictions
    on held-out samples, so no activation is kept.

    Rows of the data are held out, never single positions of a row: positions of one row are not independent. The number of a
    row decides alone, so the choice does not depend on batches.

    Args:
        labels: the classes, whole numbers from 0. "next_token" takes the following token as the class of a position; "data" the
            data's own column `labels` or `label`; or labels, `row` or `row pos`. -100 marks a sample without class.
        test_fraction: fraction of the rows that are held out, spread evenly over the data.
        first_test_row: hold out this row of the data and all after it, in place of a fraction.
        seed: of the choice of held-out rows.
        max_memory_gb: limit for the sums, sites x width x (width + classes) numbers; a larger requirement is refused before
            the run.
        ridge: strength of the penalty relative to the variance of each dimension, above 0; docs/probes.md compares some.
        max_classes: a number above every class of "data" and "next_token", which sets the size of the sums.

    Source:
        Alain and Bengio 2016 (arXiv 1610.01644). Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.4 and figure 17,
        transfer a DeiT from ImageNet to CIFAR-10: they "only fine-tune a linear classifier, with the feature mapping fixed",
        and report accuracy by layer. The paper gives neither optimiser nor whether one classifier serves all layers. Here each
        site has a classifier of its own, in closed form.

    Examples:
        >>> import tl_layersim as lsim
        >>> tokens = lsim.demo_model().tokenizer(lsim.demo_text()[:40], truncation=True, max_length=16)["input_ids"]
        >>> labels = [row[0] % 2 for row in tokens]
        >>> report = lsim.analyze(lsim.demo_model(), tokens, [lsim.LinearProbe(labels=labels)], positions="last")
        >>> report["linear_probe"].accuracy.shape
        torch.Size([9])
    """

    name: ClassVar[str] = "linear_probe"

    ridge: int | float = 0.1
    max_classes: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ridge < math.inf:
            raise LayersimError(
                "`ridge` must be above 0.", given=f"ridge={self.ridge}", expected="a finite number", do="ridge=0.1"
            )
        if self.max_classes < 2:
            raise LayersimError(
                "`max_classes` must be at least 2.",
                given=f"max_classes={self.max_classes}",
                expected="a number above every class",
                do="max_classes=100",
            )

    @property
    def classes(self) -> int:
        """A number above every class, which sets the size of the sums."""
        return max(int(self.labels.max()) + 1, 2) if isinstance(self.labels, Tensor) else self.max_classes

    def check_sites(self, *models: Model) -> None:
        super().check_sites(*models)
        model = models[0]
        if model.widest is None:
            return
        # The batch's sums, the running sums, and the new sums while the two are added.
        need = 3 * 8 * len(model.layers) * model.widest * (model.widest + self.classes) / 1e9
        if not need <= self.max_memory_gb:
            raise LayersimError(
                "The sums of a linear probe need more memory than `max_memory_gb`.",
                given=f"{len(model.layers)} sites x {model.widest} x ({model.widest} + {self.classes}) numbers: {need:.1f} GB",
                expected=f"at most max_memory_gb={self.max_memory_gb:g}",
                do=f"max_memory_gb={math.ceil(need)}; or fewer sites, at=['blocks.0.hook_resid_post', ...]",
            )

    def check_batch(self, batch: Batch, model: Model) -> None:
        super().check_batch(batch, model)
        if not isinstance(self.labels, Tensor):
            _check_classes(targets(tokens_alone(batch), self.labels), self.max_classes)

    def first_kernel(self) -> Kernel | None:
        return partial(probe_sums_kernel, labels=self.labels, classes=self.classes, split=self.split)

    def kernel(self, first: Sums) -> Kernel:
        train, test = first["train"], first["test"]
        need_samples(train, test)
        classes = (train + test).nonzero()[:, 0]
        weight, offset = zip(
            *(
                ridge_probe(second, total, train, float(self.ridge))
                for second, total in zip(first["second"], first["total"], strict=True)
            ),
            strict=True,
        )
        return partial(
            probe_counts_kernel,
            labels=self.labels,
            classes=classes,
            weight=torch.stack(weight)[..., classes],
            offset=torch.stack(offset)[:, classes],
            split=self.split,
        )

    def compute(self, sums: Sums, run: Run) -> LinearProbeResult:
        warn_of_unused(self.labels, run.provenance)
        train, test = run.first["train"], run.first["test"]
        second, total = run.first["second"], run.first["total"].sum(1)
        constant = [
            name
            for name, moments, mean in zip(run.layers, second, total / train.sum(), strict=True)
            if not samples_differ(moments / train.sum(), mean)
        ]
        warn_of_constant(constant)
        return probe_result(sums["confusion"], sums["train_correct"], train, test, run, "ridge")


def probe_result(
    confusion: Tensor, train_correct: Tensor, train: Tensor, test: Tensor, run: Run, method: str
) -> LinearProbeResult:
    """The result of probes from the counts of their predictions.

    Args:
        confusion: `site class class`, over the classes that have samples.
        train_correct: `site`, number of correct predictions on training samples.
        train: number of training samples of every class.
        test: number of held-out samples of every class.
        run: the finished run.
        method: of the fit.
    """
    classes = (train + test).nonzero()[:, 0]
    return LinearProbeResult(
        values=confusion.diagonal(dim1=1, dim2=2).sum(1).double() / test.sum(),
        train_accuracy=train_correct.double() / train.sum(),
        majority=test[train.argmax()].double() / test.sum(),
        confusion=confusion.double(),
        samples=train[classes].double(),
        test_samples=test[classes].double(),
        labels=tuple(classes.tolist()),
        method=method,
        layers=run.layers,
        provenance=run.provenance,
    )


def need_samples(train: Tensor, test: Tensor) -> None:
    """Refuse training samples of one class, or of no class, and a run without held-out samples.

    Args:
        train: number of training samples of every class.
        test: number of held-out samples of every class.

    Raises:
        LayersimError: there are too few samples.
    """
    given = f"{int(train.sum())} training samples in {int((train > 0).sum())} classes, {int(test.sum())} held-out samples"
    if int((train > 0).sum()) < 2:
        only = train.nonzero()[:, 0].tolist()
        raise LayersimError(
            "A linear probe needs training samples of two classes.",
            given=given + (f"; every training sample has class {only[0]}" if only else ""),
            expected="at least two classes among the training rows",
            do="pass more data, or check `labels`: row i of the labels belongs to row i of the data",
        )
    if not int(test.sum()):
        raise LayersimError(
            "A linear probe needs held-out samples.",
            given=given,
            expected="at least one row with a label among the held-out rows",
            do="pass more data, a larger test_fraction=, or test_data= of linear_probe",
        )


def warn_of_constant(sites: list[str]) -> None:
    """Warn of sites at which all training samples are equal.

    Args:
        sites: their names.
    """
    if sites:
        warn(
            f"All training samples are equal at {', '.join(sites[:4])}{' and other sites' if len(sites) > 4 else ''}, as [CLS] "
            "tokens are before the first attention: a probe predicts the most frequent class there."
        )


def _check_classes(labels: Tensor, limit: int | None) -> None:
    """Refuse negative classes, and classes at or above a limit."""
    known = labels[labels != NO_LABEL]
    if not len(known):
        return
    low, high = int(known.min()), int(known.max())
    if low < 0:
        raise LayersimError(
            "`labels` of a linear probe must be 0 or more.",
            given=f"labels from {low} to {high}",
            expected=f"classes numbered from 0, and {NO_LABEL} where a label is missing",
            do="labels=labels - labels.min(), or numpy.unique(labels, return_inverse=True)[1]",
        )
    if limit is not None and high >= limit:
        raise LayersimError(
            "`labels` holds a class that is not below `max_classes`.",
            given=f"class {high} with max_classes={limit}",
            expected=f"classes from 0 to {limit - 1}",
            do=f"max_classes={high + 1}; or classes that are numbered from 0 without gaps",
        )
