"""Linear probes by logistic regression (scikit-learn), on activations that are kept in memory."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal  # noqa: F401 (annotations of the base class are resolved here)

import numpy as np
import torch
from torch import Tensor

from ..analyzers.base import Run
from ..analyzers.linear_probe import LinearProbeResult, ProbeAnalyzer, ProbeWeights, warn_of_constant
from ..analyzers.probe_kernels import control_classes, control_part
from ..core.argument_checks import typed
from ..core.bounds import PositiveFloat, PositiveInt
from ..core.errors import LayersimError, warn
from ..core.sums import Sums
from ..models.view import Kernel, View


@dataclass
class KeptSamples:
    """Activations of the training samples, batch by batch, and what became of the fits to them.

    Attributes:
        activations: of each batch, `site sample width`.
        targets: of each batch, the class of each sample.
        test: of each batch, the class of each held-out sample.
        control: of each batch, the part of the control labels of each sample.
        widths: of the sites.
        stopped: numbers of the sites at which a fit did not converge.
        constant: numbers of the sites at which all samples are equal.
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
class LogisticProbe(ProbeAnalyzer):
    """Accuracy of multinomial logistic regression on standardised frozen activations, at each site.

    A first pass over the data keeps the activations of training samples, on which the probes are fitted. A second pass counts
    predictions on held-out samples. Intervals hold the fitted probes fixed and vary the held-out rows.

    Args:
        labels: see `LinearProbe`, as for the options up to `max_memory_gb`.
        test_fraction: see `LinearProbe`.
        first_test_row: see `LinearProbe`.
        seed: see `LinearProbe`.
        max_memory_gb: limit for the activations that are kept.
        control: see `LinearProbe`.
        C: inverse strength of the L2 penalty, as in scikit-learn.
        max_iter: most iterations of the optimiser.
    """

    name: ClassVar[str] = "linear_probe"

    C: PositiveFloat = 1.0
    max_iter: PositiveInt = 1000
    # Not an option: set by `first_kernel`.
    _kept: ClassVar[KeptSamples]

    def first_kernel(self) -> Kernel | None:
        # Not a field: fields are options, which are recorded.
        kept = KeptSamples()
        object.__setattr__(self, "_kept", kept)
        return partial(keep_kernel, kept=kept, probe=self)

    def counts(self, first: Sums) -> tuple[Tensor, Tensor]:
        targets, test = torch.cat(self._kept.targets), torch.cat(self._kept.test)
        size = int(torch.cat([targets, test]).max()) + 1 if len(targets) + len(test) else 1
        return torch.bincount(targets, minlength=size), torch.bincount(test, minlength=size)

    def fit(self, first: Sums) -> ProbeWeights:
        return self._fit(torch.cat(self._kept.targets), len(self.counts(first)[0]))

    def fit_control(self, first: Sums) -> ProbeWeights:
        train = self.counts(first)[0]
        return self._fit(control_classes(train)[torch.cat(self._kept.control)], len(train))

    def compute(self, sums: Sums, run: Run) -> LinearProbeResult:
        kept = self._kept
        warn_of_constant([run.layers[site] for site in kept.constant])
        if kept.stopped:
            stopped = [run.layers[site] for site in dict.fromkeys(kept.stopped)]
            warn(
                f"The logistic regression stopped at max_iter={self.max_iter} before it converged, at {', '.join(stopped[:4])}"
                f"{' and other sites' if len(stopped) > 4 else ''}. Pass a larger max_iter=, or a smaller C=."
            )
        return self.result(sums, run, "logistic", max(kept.widths))

    def _fit(self, target: Tensor, classes: int) -> ProbeWeights:
        """Logistic regressions of all sites on the training samples that were kept.

        Args:
            target: `sample`, the class of each training sample.
            classes: a number above every class.
        """
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        kept = self._kept
        weight = torch.zeros(len(kept.widths), max(kept.widths), classes, dtype=torch.float64)
        offset = torch.full((len(kept.widths), classes), -math.inf, dtype=torch.float64)
        kept.constant = []
        for site, width in enumerate(kept.widths):
            x = torch.cat([batch[site, :, :width] for batch in kept.activations]).double().numpy()
            if not np.ptp(x, axis=0).any():
                kept.constant.append(site)
            scaler, probe = StandardScaler(), LogisticRegression(C=self.C, max_iter=self.max_iter)
            with warnings.catch_warnings(record=True) as issued:
                warnings.simplefilter("always")
                probe.fit(scaler.fit_transform(x), target.numpy())
            for other in issued:
                if issubclass(other.category, ConvergenceWarning):
                    kept.stopped.append(site)
                else:
                    warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
            # Two classes have one score: that of the second, above 0 for the second.
            scores, known = torch.tensor(probe.coef_), torch.tensor(probe.classes_)[-len(probe.coef_) :]
            scores = scores / torch.tensor(scaler.scale_)
            offset[site, torch.tensor(probe.classes_)] = 0.0
            weight[site, :width, known] = scores.T
            offset[site, known] = torch.tensor(probe.intercept_) - scores @ torch.tensor(scaler.mean_)
        return weight, offset


def keep_kernel(view: View, *, kept: KeptSamples, probe: LogisticProbe) -> dict[str, Tensor]:
    """Keep the activations of the training samples of a batch; for models in this process only.

    Args:
        view: activations of one batch.
        kept: receives them.
        probe: whose samples they are.

    Raises:
        LayersimError: the activations need more memory.
    """
    target, train, test = (part.cpu() for part in probe.labelled_samples(view))
    kept.activations.append(view.activations[:, train.to(view.activations.device)].cpu())
    kept.widths = view.widths or (view.activations.shape[-1],) * len(view.activations)
    kept.targets.append(target[train])
    kept.test.append(target[test])
    if probe.control is not None:
        kept.control.append(control_part(view, probe.control, probe.seed).cpu()[train])
    held = sum(batch.numel() * batch.element_size() for batch in kept.activations)
    if not held <= probe.max_memory_gb * 1e9:
        raise LayersimError(
            f"`max_memory_gb` is {probe.max_memory_gb:g}, and logistic regression keeps {held / 1e9:.2f} GB of activations "
            f"after {sum(map(len, kept.targets))} samples. Use LinearProbe, fewer sites (`at`) or fewer positions."
        )
    return {"samples": train.sum()}
