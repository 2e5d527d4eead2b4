"""`linear_probe`: accuracy of a linear classifier on the frozen activations of each site."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal  # noqa: F401 (annotations of the base class are resolved here)

import numpy as np
import torch
from torch import Tensor

from ..activations.view import Kernel, View
from ..analyzers.analyzer import Run
from ..analyzers.linear_probe import (
    LinearProbe,
    LinearProbeResult,
    ProbeAnalyzer,
    ProbeOptions,
    ProbeWeights,
    control_classes,
    control_part,
    labelled,
    warn_of_constant,
)
from ..core.arguments import FilePath, PositiveFloat, PositiveInt, typed
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError, shown, warn
from ..core.sums import Sums
from ..core.wording import brief
from ..data.batches import Batch, Batches
from ..data.data import Data
from ..data.row import ModelInputs
from ..data.texts import groups_as_list
from ..remote.open_model import open_source
from ..sources.open_local import OpenedModel
from ..sources.source import position_counter
from .analyze_and_compare import analyze
from .run_arguments import with_tokenizer
from .site_plan import DEFAULT, AtArgument
from .vectors_as_data import data_of_call


@dataclass
class KeptSamples:
    """Training samples of one run of `linear_probe` with a `LogisticProbe`, batch by batch.

    Attributes:
        activations: for each batch, the activations of its training samples, `site sample width`.
        targets: for each batch, the class of each training sample.
        test: for each batch, the class of each held-out sample.
        control: for each batch, the part of the control labels that each sample belongs to.
        widths: widths of the sites.
        stopped: indices of the sites at which a fit did not converge.
        constant: indices of the sites at which all samples are equal.
    """

    activations: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    test: list[Tensor] = field(default_factory=list)
    control: list[Tensor] = field(default_factory=list)
    widths: tuple[int, ...] = ()
    stopped: list[int] = field(default_factory=list)
    constant: list[int] = field(default_factory=list)


@typed
@dataclass(frozen=True, eq=False)
class LogisticProbe(ProbeOptions):
    """Options of `linear_probe` for logistic regression on the frozen activations of each site.

    The regression is multinomial, and activations are standardised. A first pass over the data keeps the activations of
    training samples in memory, on which the probes are fitted. A second pass counts predictions on held-out samples. Intervals
    hold the fitted probes fixed and vary the held-out rows. Kept activations are no sums, so this is no analyzer for `analyze`:
    servers, several processes and checkpoints raise an error.

    Args:
        labels: see `LinearProbe`; the options up to `seed` are the same.
        test_fraction: see `LinearProbe`.
        first_test_row: see `LinearProbe`.
        seed: see `LinearProbe`.
        max_memory_gb: limit for the kept activations, in GB.
        control: see `LinearProbe`.
        C: inverse strength of the L2 penalty, as in scikit-learn.
        max_iter: largest number of iterations of the optimiser.
    """

    C: PositiveFloat = 1.0
    max_iter: PositiveInt = 1000


@dataclass(frozen=True, eq=False)
class LogisticProbeRun(LogisticProbe, ProbeAnalyzer):
    """The analyzer of one run of `linear_probe` with a `LogisticProbe`, made with the options of the latter.

    Attributes:
        samples: the training samples that the first pass keeps.
    """

    name: ClassVar[str] = "linear_probe"

    samples: KeptSamples = field(default_factory=KeptSamples, init=False, repr=False)

    def first_kernel(self) -> Kernel | None:
        return partial(keep_kernel, samples=self.samples, probe=self)

    def counts(self, first: Sums) -> tuple[Tensor, Tensor]:
        train_classes = torch.cat(self.samples.targets)
        test_classes = torch.cat(self.samples.test)
        classes = torch.cat([train_classes, test_classes])
        number = int(classes.max()) + 1 if len(classes) else 1
        return torch.bincount(train_classes, minlength=number), torch.bincount(test_classes, minlength=number)

    def fit(self, first: Sums, control: bool = False) -> ProbeWeights:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        samples = self.samples
        class_counts, _ = self.counts(first)
        target = torch.cat(samples.targets)
        if control:
            target = control_classes(class_counts)[torch.cat(samples.control)]
        sites = len(samples.widths)
        weight = torch.zeros(sites, max(samples.widths), len(class_counts), dtype=torch.float64)
        # A class without a training sample is never predicted.
        offset = torch.full((sites, len(class_counts)), -math.inf, dtype=torch.float64)
        samples.constant = []
        for site, width in enumerate(samples.widths):
            x = torch.cat([batch[site, :, :width] for batch in samples.activations]).double().numpy()
            if not np.ptp(x, axis=0).any():
                samples.constant.append(site)
            scaler = StandardScaler()
            regression = LogisticRegression(C=self.C, max_iter=self.max_iter)
            with warnings.catch_warnings(record=True) as issued:
                warnings.simplefilter("always")
                regression.fit(scaler.fit_transform(x), target.numpy())
            for warning in issued:
                if issubclass(warning.category, ConvergenceWarning):
                    samples.stopped.append(site)
                else:
                    warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            classes = torch.tensor(regression.classes_)
            # Two classes have one score: that of the second, above 0 for the second.
            scored_classes = classes[-len(regression.coef_) :]
            scores = torch.tensor(regression.coef_) / torch.tensor(scaler.scale_)
            offset[site, classes] = 0.0
            weight[site, :width, scored_classes] = scores.T
            offset[site, scored_classes] = torch.tensor(regression.intercept_) - scores @ torch.tensor(scaler.mean_)
        return weight, offset

    def compute(self, sums: Sums, run: Run) -> LinearProbeResult:
        samples = self.samples
        warn_of_constant([run.layers[site] for site in samples.constant])
        if samples.stopped:
            # A site is named once, though the fit to the control labels may stop there too.
            stopped = [run.layers[site] for site in dict.fromkeys(samples.stopped)]
            warn(
                f"The logistic regression stopped at max_iter={self.max_iter} before it converged, at {', '.join(stopped[:4])}"
                f"{' and other sites' if len(stopped) > 4 else ''}. Pass a larger max_iter=, or a smaller C=."
            )
        return self.result(sums, run, "logistic", max(samples.widths))


def keep_kernel(view: View, *, samples: KeptSamples, probe: ProbeOptions) -> dict[str, Tensor]:
    """Append the training samples of one batch to `samples`. This kernel needs a model in this process.

    Args:
        view: activations of one batch.
        samples: receives the activations.
        probe: the probe, which decides which samples are kept.

    Raises:
        LayersimError: the activations need more memory than the limit.
    """
    target, train, test = labelled(view, probe.labels, probe.split)
    target = target.cpu()
    train = train.cpu()
    test = test.cpu()
    samples.activations.append(view.activations[:, train.to(view.activations.device)].cpu())
    samples.widths = view.widths or (view.activations.shape[-1],) * len(view.activations)
    samples.targets.append(target[train])
    samples.test.append(target[test])
    if probe.control is not None:
        samples.control.append(control_part(view, probe.control, probe.seed).cpu()[train])
    kept_bytes = sum(batch.numel() * batch.element_size() for batch in samples.activations)
    if not kept_bytes <= probe.max_memory_gb * 1e9:
        count = sum(map(len, samples.targets))
        raise LayersimError(
            f"`max_memory_gb` is {probe.max_memory_gb:g}, but logistic regression keeps {kept_bytes / 1e9:.2f} GB of "
            f"activations after {count} samples. Use LinearProbe, fewer sites (`at`) or fewer positions."
        )
    return {"samples": train.sum()}


@typed
def linear_probe(
    model: Any,
    data: Any = None,
    probe: LinearProbe | LogisticProbe | None = None,
    *,
    test_data: Any = None,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    checkpoint: FilePath | None = None,
) -> LinearProbeResult:
    """Accuracy of a linear classifier at each site, measured on held-out rows.

    The classifier reads frozen activations, and is fitted at each site on its own. Nothing in the model changes. A sample is a
    counted position, see `positions` of `Data`: by default every position, or the position that the model's head reads.

    Args:
        model: as in `analyze`.
        data: as in `analyze`. Some of its rows are held out, unless `test_data` is given.
        probe: `LinearProbe` fits in closed form from sums, in two passes over the data, and runs on servers. `LogisticProbe`
            keeps the activations of training samples in memory, for models in this process. Default:
            `LinearProbe(labels="data")`, which reads the classes from the data's own column.
        test_data: held-out data of the same kind; the probes are then fitted on all of `data`. The probe's labels are then
            "next_token", or "data": both parts have a column of labels, such as {"input_ids": tokens, "labels": classes}.
        at: see `analyze`; all further options are the same.
        per_head: see `analyze`.
        intervals: see `analyze`; intervals hold the fitted probes fixed and vary the held-out rows.
        checkpoint: see `analyze`.

    Returns:
        A `LinearProbeResult`.

    Raises:
        LayersimError: there is only one class, there are too few samples, a label is below 0, or memory is too small; or as
            `analyze`.

    Source:
        See `LinearProbe`.

    Examples:
        Whether a text's last token has an even id, which the embedding knows best.

        >>> import tl_layersim as lsim
        >>> model, texts = lsim.demo_model(), lsim.demo_text()[:60]
        >>> ids = [model.tokenizer(text)["input_ids"][:16] for text in texts]
        >>> even = lsim.LinearProbe(labels=[row[-1] % 2 for row in ids])
        >>> probe = lsim.linear_probe(model, lsim.Data(ids, positions="last"), even)
        >>> probe.accuracy.shape, probe.labels
        (torch.Size([9]), (0, 1))
    """
    probe = probe or LinearProbe(labels="data")
    data = data_of_call(data, [OpenedModel.of(model)])
    if isinstance(probe, LogisticProbe):
        remote = OpenedModel.of(model).remote
        _, ranks = rank_and_size()
        excluded = {
            "`checkpoint`": checkpoint is not None,
            f"remote={shown(remote)}": remote is not False,
            f"{ranks} processes": ranks > 1,
        }
        for condition, is_present in excluded.items():
            if is_present:
                raise LayersimError(
                    f"LogisticProbe cannot run with {condition}: it keeps activations in the memory of one process. Use "
                    "LinearProbe."
                )
    if test_data is not None:
        first_test_row, data = _with_test_data(model, data, probe, test_data, at)
        probe = replace(probe, first_test_row=first_test_row)
    analyzer = LogisticProbeRun(**vars(probe)) if isinstance(probe, LogisticProbe) else probe
    report = analyze(model, data, [analyzer], at=at, per_head=per_head, intervals=intervals, checkpoint=checkpoint)
    result: LinearProbeResult = report["linear_probe"]
    return result


def _with_test_data(model: Any, data: Data, probe: ProbeOptions, test_data: Any, at: AtArgument) -> tuple[int, Data]:
    """The index of the first held-out row, and the data with the rows of `test_data` after its own.

    Raises:
        LayersimError: `test_data` has no rows or no labels, or its rows cannot be read.
    """
    if isinstance(probe.labels, Tensor):
        raise LayersimError(
            '`labels` of the probe holds no labels of `test_data`. Pass labels="data", and the labels as a column of '
            '`data` and of `test_data`, such as {"input_ids": tokens, "labels": classes}.'
        )
    parts = []
    for part in (data, data.like(test_data)):
        # An iterator would be gone after its rows are counted.
        parts.append(replace(part, source=list(part.source)) if part.read_once else part)
    # `analyze` verifies the model.
    source = open_source(replace(OpenedModel.of(model), verify=None), either_stack=True, at=at)
    described = with_tokenizer(source.model, data.tokenizer)
    counter = position_counter([source])
    training_rows = Batches(parts[0], described, count_positions=counter).count_rows()
    # Read here, because `analyze` would name errors in it after `data`.
    held_out = Batches(replace(parts[1], tokenizer=data.tokenizer), described, count_positions=counter, argument="test_data")
    # All rows are read, not the first alone: an error in any of them is to be named after `test_data`.
    if not sum(1 for _ in held_out.rows()):
        raise LayersimError(f"`test_data` is {brief(test_data)}, which has no rows; it must have one or more.")
    groups = _joint_groups(parts, described, counter)
    return training_rows, replace(data, source=[part.source for part in parts], groups=groups)


def _joint_groups(parts: Sequence[Data], model: ModelInputs, count_positions: Callable[[Batch], int] | None) -> Any:
    """The groups of the rows of several data sets that are read one after the other.

    Raises:
        LayersimError: the groups of one are a column, and those of another are not.
    """
    options = [part.groups for part in parts]
    if all(option is None or isinstance(option, str) for option in options):
        if options[0] != options[1]:
            raise LayersimError(
                f"`groups` is {options[0]!r} in `data` and {options[1]!r} in `test_data`; both must have one column."
            )
        return options[0]
    joint: list[Any] = []
    for number, part in enumerate(parts):
        values = groups_as_list(part.groups)
        if isinstance(part.groups, str):
            raise LayersimError(
                f"`groups` is the column {part.groups!r} in one part of the data; it must be a sequence in both."
            )
        if values is None:
            # Each row is a text of its own.
            rows = Batches(part, model, count_positions=count_positions).count_rows()
            values = [(number, row) for row in range(rows)]
        joint += values
    return joint
