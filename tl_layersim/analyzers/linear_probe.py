"""Linear probes: accuracy of a linear classifier on frozen activations, at each site."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View, targets, tokens_alone
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, result_class, typed, warn
from ..core.arguments import Limit, NonNegativeInt, OpenFraction, PositiveFloat, Seed, TwoOrMore
from ..core.integer_hash import mixed
from ..core.result_declarations import texts_of_part
from ..core.wording import amount, brief
from ..data.batches import Batch
from ..data.labels import NO_LABEL, as_labels, warn_of_unused
from ..sources.model_description import ModelDescription
from ._moments import ridge_probe, samples_differ, warn_of_few_samples, warn_of_few_texts
from ._samples import GOLDEN, SHIFT, check_classes, held_out, text_of
from .analyzer import LabelledAnalyzer, Run, listed
from .needs import Needs

# Weights `site width class` and offsets `site class`, over all classes.
ProbeWeights: TypeAlias = tuple[Tensor, Tensor]
# A control label is drawn for each token type or row by a hash, in as many equal parts.
CONTROL_PARTS = 128


def _held_out_texts(result: LinearProbeResult) -> Tensor:
    """Number of held-out texts, see `texts_of_part`."""
    return texts_of_part(result, result.test_samples.sum(), result.test_samples.sum() + result.samples.sum())


def _training_texts(result: LinearProbeResult) -> Tensor:
    """Number of training texts, see `texts_of_part`."""
    return texts_of_part(result, result.samples.sum(), result.test_samples.sum() + result.samples.sum())


@result_class
class LinearProbeResult(Result):
    """Accuracy of a linear probe at each site, on held-out rows. All tensors are float64.

    Attributes:
        values: `residual`, the same as `accuracy`: fraction of held-out samples whose class the probe predicts.
        train_accuracy: `residual`, accuracy on training samples. If it is far above `accuracy`, the probe has too few samples
            for the width of the site.
        majority: accuracy on held-out samples of always predicting the most frequent training class.
        confusion: `residual label prediction`, number of held-out samples of each class that were predicted as each class.
        control_accuracy: `residual`, accuracy on held-out samples of probes for control labels; NaN without a control task.
        selectivity: `residual`, `accuracy` minus `control_accuracy` (Hewitt and Liang 2019). A probe that finds any labels has
            a selectivity near 0.
        samples: `label`, number of training samples of each class.
        test_samples: `label`, number of held-out samples of each class.
        labels: the classes, ascending.
        method: "ridge" or "logistic".
    """

    accuracy = ValuesAlias()
    values: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Accuracy on held-out samples",
        unit="fraction",
        title="Accuracy of a linear probe at each site",
        caption="Fraction of held-out samples that a linear classifier on the frozen activations of the site predicts (Alain "
        "and Bengio 2016; Jiang, Zhou and Zhu 2024, appendix B.4, figure 17).",
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
        units=_held_out_texts,
    )
    train_accuracy: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Accuracy on training samples",
        unit="fraction",
        title="Accuracy of the probe on its training samples",
        within=(0, 1),
        by_chance=(0, 1),
        units=_training_texts,
    )
    control_accuracy: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Accuracy on control labels",
        unit="fraction",
        title="Accuracy of a linear probe of control labels",
        within=(0, 1),
        by_chance=(0, 1),
        units=_held_out_texts,
    )
    selectivity: Float64[Tensor, " residual"] = axes(
        "residual", label="Selectivity (difference of fractions)", title="Selectivity of a linear probe", within=(-1, 1)
    )
    majority: Float64[Tensor, ""] = axes(label="accuracy of the most frequent class", within=None)
    confusion: Float64[Tensor, "residual label prediction"] = axes(
        "residual",
        "label",
        "prediction",
        within=(0, math.inf),
        by_chance=(0, 1),
        units=_held_out_texts,
        out_of="confusion",
        summed=("label", "prediction"),
    )
    samples: Float64[Tensor, " label"] = axes(
        "label", label="Training samples", title="Training samples of each class", within=None
    )
    test_samples: Float64[Tensor, " label"] = axes(
        "label", label="Held-out samples", title="Held-out samples of each class", within=None
    )
    labels: tuple[int, ...]
    method: str

    @property
    def predictions(self) -> tuple[int, ...]:
        """Labels of the `prediction` axis: the classes in `labels`."""
        return self.labels

    def baselines(self, field: str) -> dict[str, float]:
        return {"most frequent class in training": float(self.majority)} if field == "values" else {}

    def measured_on(self, field: str) -> str:
        train = int(self.samples.sum())
        test = int(self.test_samples.sum())
        classes = len(self.labels)
        return f"{train:,} training and {amount(test, 'held-out sample')}, {classes} classes (chance:\u00a0{1 / classes:.3g})"

    def headline(self) -> dict[str, float]:
        best = int(self.values.argmax())
        at_best = {f"highest accuracy, at {self.layers[best]}": float(self.values[best])}
        if not bool(self.selectivity.isnan().any()):
            at_best[f"selectivity at {self.layers[best]}"] = float(self.selectivity[best])
        return super().headline() | at_best


@typed
@dataclass(frozen=True, eq=False)
class ProbeOptions:
    """The options that probes of all kinds have.

    Args:
        labels: see `LinearProbe`; all options are the same.
        test_fraction: see `LinearProbe`.
        first_test_row: see `LinearProbe`.
        seed: see `LinearProbe`.
        max_memory_gb: see `LinearProbe`.
        control: see `LinearProbe`.
    """

    labels: Any = "next_token"
    test_fraction: OpenFraction = 0.2
    first_test_row: NonNegativeInt | None = None
    seed: Seed = 0
    max_memory_gb: Limit = 4.0
    control: Literal["token", "row"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", as_labels(self.labels))
        if isinstance(self.labels, Tensor):
            classes = sorted(set(self.labels[self.labels != NO_LABEL].tolist()))
            if len(classes) < 2:
                raise LayersimError(
                    f"`labels` has the classes {brief(classes)}; it must have two classes or more, besides {NO_LABEL} for no "
                    "class."
                )

    @property
    def split(self) -> partial[Tensor]:
        """Function from the texts of samples, or with `first_test_row` from their rows, to a mask of held-out samples."""
        return partial(held_out, fraction=float(self.test_fraction), seed=self.seed, first_row=self.first_test_row)


@dataclass(frozen=True, eq=False)
class ProbeAnalyzer(ProbeOptions, LabelledAnalyzer):
    """Base class of analyzers that train probes to predict labels.

    Whole texts are held out by the index of their first row. Subclasses fit the probe in a first pass over the data.
    """

    @property
    def needs(self) -> Needs:
        # Whole texts of the data are held out.
        return replace(super().needs, single_texts=True)

    def check_batch(self, batch: Batch, model: ModelDescription) -> None:
        super().check_batch(batch, model)
        if self.control == "token" and (batch.pooled or not batch.has_tokens):
            reason = "means of rows have no token" if batch.pooled else "samples have no token ids"
            raise LayersimError(f"`control` is 'token'; it must be 'row' or None, because {reason}.")
        classes = targets(tokens_alone(batch), self.labels)
        remedy = "Pass a larger max_classes=."
        if isinstance(self.labels, str) and self.labels == "next_token":
            # Few readers of this message mean to predict one of thousands of tokens.
            remedy = "The labels are next tokens (labels='next_token'); for classes pass labels=, for tokens max_classes=."
        check_classes(classes[classes != NO_LABEL], getattr(self, "classes", math.inf), remedy)

    @abstractmethod
    def counts(self, first: Sums) -> tuple[Tensor, Tensor]:
        """Number of training samples by class, and number of held-out samples by class.

        Args:
            first: sums of the first pass.
        """

    @abstractmethod
    def fit(self, first: Sums, control: bool = False) -> ProbeWeights:
        """Fit the probes of all sites.

        Args:
            first: sums of the first pass.
            control: whether to fit probes for control labels.
        """

    def kernel(self, first: Sums) -> Kernel:
        train, test = self.counts(first)
        trained_classes = train.nonzero()[:, 0].tolist()
        class_count = amount(len(trained_classes), "class", "classes")
        samples = f"{int(train.sum())} training samples of {class_count} and {int(test.sum())} held-out samples"
        if not trained_classes and int(test.sum()):
            raise LayersimError(
                f"A linear probe needs training samples, but all {int(test.sum())} samples are of held-out texts: rows of one "
                "text or group stay together. Pass more texts or groups, or test_data=."
            )
        if len(trained_classes) < 2:
            raise LayersimError(f"A linear probe needs training samples of two classes; the data has {samples}.")
        if not int(test.sum()):
            raise LayersimError(
                f"A linear probe needs held-out samples; the data has {samples}. Rows of one text or group stay together: pass "
                "more texts, a larger test_fraction=, or test_data=."
            )
        classes = (train + test).nonzero()[:, 0]
        weight, offset = self.fit(first)
        control = None
        if self.control is not None:
            control_weight, control_offset = self.fit(first, control=True)
            numbers = torch.searchsorted(classes, control_classes(train))
            control = (self.control, numbers, control_weight[..., classes], control_offset[:, classes])
        return partial(
            probe_counts_kernel,
            labels=self.labels,
            classes=classes,
            weight=weight[..., classes],
            offset=offset[:, classes],
            split=self.split,
            control=control,
        )

    def result(self, sums: Sums, run: Run, method: str, width: int) -> LinearProbeResult:
        """Make the result from the counts of predictions.

        Args:
            sums: sums of the main pass. If they lack a block of the data, accuracies are over the samples that are left.
            run: the finished run.
            method: the method of the fit, "ridge" or "logistic".
            width: width of the widest site.
        """
        warn_of_unused(self.labels, run.provenance)
        train, test = self.counts(run.first)
        classes = (train + test).nonzero()[:, 0]
        warn_of_few_samples("LinearProbe", int(train.sum()), width, "samples")
        warn_of_few_texts("LinearProbe", int(sums["test_texts"]))
        confusion = sums["confusion"].double()
        tested = confusion[0].sum(1)
        accuracy = confusion.diagonal(dim1=1, dim2=2).sum(1) / tested.sum()
        control = torch.full_like(accuracy, math.nan)
        if self.control is not None:
            control = sums["control_correct"].double() / tested.sum()
        return LinearProbeResult(
            values=accuracy,
            train_accuracy=sums["train_correct"].double() / sums["train"],
            control_accuracy=control,
            selectivity=accuracy - control,
            majority=tested[torch.searchsorted(classes, train.argmax())] / tested.sum(),
            confusion=confusion,
            samples=train[classes].double(),
            test_samples=tested,
            labels=tuple(classes.tolist()),
            method=method,
            layers=run.layers,
            provenance=run.provenance,
        )


@typed
@dataclass(frozen=True, eq=False)
class LinearProbe(ProbeAnalyzer):
    r"""Accuracy of a linear classifier on frozen activations at each site, by ridge regression on one-hot labels.

    $$\hat W = (\Sigma + \mathrm{ridge} \, \mathrm{diag} \, \Sigma)^{-1} \, \frac{1}{n} \sum_i (x_i - \bar x)(y_i - \bar y)',
    \qquad \Sigma = \frac{1}{n} \sum_i (x_i - \bar x)(x_i - \bar x)'$$

    with the activations x of the n training samples and their one-hot labels y. This is ridge regression on dimensions that are
    scaled to a standard deviation of 1. The prediction is the class with the largest entry of $\hat W'(x - \bar x) + \bar y$:
    the intercept is not penalised. A first pass over the data sums over training samples, and a second pass counts predictions
    on held-out samples, so no activation is kept. Intervals hold the fitted probes fixed and vary the held-out rows.

    Whole texts are held out, with all rows that are cut from them or have their group: rows of one text are not independent.
    The number of a text's first row decides alone, so the choice does not depend on batches.

    Args:
        labels: the classes, whole numbers from 0. "next_token": the following token. "data": the data's own column `labels` or
            `label`. Or a tensor, `row` or `row pos`. -100 marks a sample without a class.
        test_fraction: fraction of the texts that are held out, spread evenly over the data.
        first_test_row: index of the first held-out row; all rows after it are held out too. Replaces `test_fraction`.
        seed: random seed of the choice of held-out texts.
        max_memory_gb: limit for the sums, sites x width x (width + classes) numbers; a run that needs more raises an error
            before it starts.
        control: also fit probes for control labels, drawn at random with the frequencies of the classes: one for each "token"
            type, or for each "row" if labels belong to rows. None for no control task.
        ridge: strength of the penalty relative to the variance of each dimension, above 0; docs/probes.md compares some.
        max_classes: a number above every class of "data" and "next_token"; it sets the size of the sums.

    Source:
        Alain and Bengio 2016 (arXiv 1610.01644). Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.4 and figure 17,
        transfer a DeiT from ImageNet to CIFAR-10: they "only fine-tune a linear classifier, with the feature mapping fixed",
        and report accuracy by layer. The paper gives neither optimiser nor whether one classifier serves all layers. Here each
        site has a classifier of its own, in closed form. Control tasks and selectivity: Hewitt and Liang 2019
        (arXiv 1909.03368).

    Examples:
        >>> import tl_layersim as lsim
        >>> tokens = lsim.demo_model().tokenizer(lsim.demo_text()[:40], truncation=True, max_length=16)["input_ids"]
        >>> labels = [row[0] % 2 for row in tokens]
        >>> report = lsim.analyze(lsim.demo_model(), lsim.Data(tokens, positions="last"), [lsim.LinearProbe(labels=labels)])
        >>> report["linear_probe"].accuracy.shape
        torch.Size([9])
    """

    name: ClassVar[str] = "linear_probe"

    ridge: PositiveFloat = 0.1
    max_classes: TwoOrMore = 100

    @property
    def needs(self) -> Needs:
        return replace(super().needs, largest_sums="first")

    @property
    def classes(self) -> int:
        """Number of classes for which sums are kept: the largest class plus one, or `max_classes`."""
        return max(int(self.labels.max()) + 1, 2) if isinstance(self.labels, Tensor) else self.max_classes

    def sum_numbers(self, *models: ModelDescription) -> float:
        width = models[0].widest or 0
        return len(models[0].layers) * width * (width + self.classes + CONTROL_PARTS * (self.control is not None))

    def first_kernel(self) -> Kernel | None:
        return partial(probe_sums_kernel, labels=self.labels, classes=self.classes, split=self.split, control=self.control)

    def counts(self, first: Sums) -> tuple[Tensor, Tensor]:
        return first["train"], first["test"]

    def fit(self, first: Sums, control: bool = False) -> ProbeWeights:
        totals = first["total"]
        counts = first["train"]
        if control:
            part = control_classes(counts)
            totals = torch.zeros_like(totals).index_add_(1, part, first["parts"])
            counts = torch.zeros_like(counts).index_add_(0, part, first["part_samples"])
        weights = []
        offsets = []
        for second, total in zip(first["second"], totals, strict=True):
            weight, offset = ridge_probe(second, total, counts, float(self.ridge))
            weights.append(weight)
            offsets.append(offset)
        return torch.stack(weights), torch.stack(offsets)

    def compute(self, sums: Sums, run: Run) -> LinearProbeResult:
        second = run.first["second"]
        train = run.first["train"].sum()
        means = run.first["total"].sum(1) / train
        constant_sites = []
        for name, moments, mean in zip(run.layers, second, means, strict=True):
            if not samples_differ(moments / train, mean):
                constant_sites.append(name)
        warn_of_constant(constant_sites)
        return self.result(sums, run, "ridge", second.shape[-1])


def warn_of_constant(sites: list[str]) -> None:
    """Warn of sites at which all training samples are equal.

    Args:
        sites: names of the sites.
    """
    if sites:
        warn(
            f"All training samples are equal at {listed(sites)}, like [CLS] tokens before the first attention. The probe "
            "predicts the most frequent class there."
        )


def labelled(view: View, labels: str | Tensor, split: partial[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Class of each sample, and masks of the training and of the held-out samples.

    A sample without a label is in neither mask.

    Args:
        view: activations of one batch.
        labels: the classes.
        split: see `ProbeAnalyzer.split`.
    """
    target = targets(view, labels)
    unit = unit_of_split(view, split)
    has_label = target != NO_LABEL
    test = split(unit.to(target.device))
    return target, has_label & ~test, has_label & test


def unit_of_split(view: View, split: partial[Tensor]) -> Tensor:
    """What `split` holds out as a whole: the text of each sample, or its row if the first held-out row is given (`sample`)."""
    if split.keywords["first_row"] is None:
        return text_of(view)
    assert view.row is not None
    return view.row


def control_part(view: View, control: str, seed: int) -> Tensor:
    """Index of each sample's group in the control task (`sample`), hashed from its token id or row.

    All samples of a group have the same random control label.

    Args:
        view: activations of one batch.
        control: "token" or "row".
        seed: random seed of the hash.
    """
    unit = view.tokens if control == "token" else view.row
    assert unit is not None
    return mixed(unit.long() * GOLDEN + seed * SHIFT + 1) % CONTROL_PARTS


def control_classes(counts: Tensor) -> Tensor:
    """Control label of each group of the control task (`group`). Classes are as frequent as among the training samples.

    Args:
        counts: `class`, number of training samples in each class.

    Examples:
        >>> torch.bincount(control_classes(torch.tensor([6, 0, 2]))).tolist()
        [96, 0, 32]
    """
    shares = counts.cumsum(0).double() / counts.sum()
    middles = (torch.arange(CONTROL_PARTS).double() + 0.5) / CONTROL_PARTS
    return torch.searchsorted(shares, middles)


def probe_sums_kernel(
    view: View, *, labels: str | Tensor, classes: int, split: partial[Tensor], control: str | None = None
) -> dict[str, Tensor]:
    """Sums for the fit of the probes: second moments, class sums and class sizes. Float64.

    Args:
        view: activations of one batch.
        labels: the classes.
        classes: a number above every class.
        split: see `ProbeAnalyzer.split`.
        control: the unit that control labels are drawn for, "token" or "row"; None for no control labels. Their sums
            are `parts` and `part_samples`.
    """
    target, train, test = labelled(view, labels, split)
    device = view.activations.device
    width = view.activations.shape[-1]
    # The group of each training sample, and the number of groups.
    groups = {"total": (target[train], classes)}
    if control is not None:
        part = control_part(view, control, split.keywords["seed"]).to(target.device)
        groups["parts"] = (part[train], CONTROL_PARTS)
    sums = {}
    for name, (_, count) in groups.items():
        sums[name] = torch.zeros(len(view.activations), count, width, dtype=torch.float64, device=device)
    second = []
    for site, layer in enumerate(view.activations):
        rows = layer[train.to(device)].double()
        second.append(rows.T @ rows)
        for name, (group, _) in groups.items():
            # The groups of this batch alone, of which there are few.
            groups_of_batch: Tensor = torch.unique(group)
            member = (group[:, None] == groups_of_batch).double().to(device)
            sums[name][site, groups_of_batch.to(device)] = member.T @ rows
    if control is not None:
        sums["part_samples"] = torch.bincount(groups["parts"][0], minlength=CONTROL_PARTS)
    return {
        "second": torch.stack(second),
        **sums,
        "train": torch.bincount(target[train], minlength=classes),
        "test": torch.bincount(target[test], minlength=classes),
    }


def probe_counts_kernel(
    view: View,
    *,
    labels: str | Tensor,
    classes: Tensor,
    weight: Tensor,
    offset: Tensor,
    split: partial[Tensor],
    control: tuple[str, Tensor, Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Confusion matrices on held-out samples, and numbers of correct predictions on training samples.

    Args:
        view: activations of one batch.
        labels: the class of each sample.
        classes: `class`, ascending.
        weight: `site width class`, weights of the probes.
        offset: `site class`, offsets of the probes; -inf for classes without training samples.
        split: see `ProbeAnalyzer.split`.
        control: for control labels: "token" or "row", the index of each part's class, and the weights and offsets of their
            probes. None for no control labels.
    """
    target, train, test = labelled(view, labels, split)
    text = unit_of_split(view, split).to(test.device)
    out = {"train": train.sum(), "test_texts": torch.tensor(len(torch.unique(text[test])))}
    device = view.activations.device
    number = torch.searchsorted(classes.to(target.device), target).to(device)
    train = train.to(device)
    test = test.to(device)
    k = len(classes)
    confusion = []
    correct = []
    for layer, w, b in zip(view.activations, weight.to(device), offset.to(device), strict=True):
        # argmax takes the lowest class among equal scores.
        predicted = (layer.double() @ w + b).argmax(1)
        confusion.append(torch.bincount(number[test] * k + predicted[test], minlength=k * k).view(k, k))
        correct.append((predicted == number)[train].sum())
    out |= {"confusion": torch.stack(confusion), "train_correct": torch.stack(correct)}
    if control is not None:
        unit, class_of_part, weight, offset = control
        number = class_of_part[control_part(view, unit, split.keywords["seed"]).cpu()].to(device)
        control_correct = []
        for layer, w, b in zip(view.activations, weight.to(device), offset.to(device), strict=True):
            predicted = (layer.double() @ w + b).argmax(1)
            control_correct.append((predicted == number)[test].sum())
        out["control_correct"] = torch.stack(control_correct)
    return out
