"""Linear probes by logistic regression (scikit-learn), on activations that are kept in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..analyzers.base import Run
from ..analyzers.linear_probe import LinearProbeResult, ProbeAnalyzer, need_samples, probe_result, warn_of_constant
from ..core.argument_checks import typed
from ..core.errors import LayersimError, warn
from ..core.sums import Sums
from ..data.labels import warn_of_unused
from ..models.view import Kernel, View


@dataclass
class KeptSamples:
    """Activations of the samples that have a label, batch by batch.

    Attributes:
        activations: of each batch, `site sample width`.
        widths: of the sites.
        targets: of each batch, the class of each sample.
        test: of each batch, whether each sample is held out.
    """

    activations: list[Tensor] = field(default_factory=list)
    widths: tuple[int, ...] = ()
    targets: list[Tensor] = field(default_factory=list)
    test: list[Tensor] = field(default_factory=list)


@typed
@dataclass(frozen=True, eq=False)
class LogisticProbe(ProbeAnalyzer):
    """Accuracy of multinomial logistic regression on standardised frozen activations, at each site.

    Args:
        labels: see `LinearProbe`, as for the options up to `max_memory_gb`.
        test_fraction: see `LinearProbe`.
        first_test_row: see `LinearProbe`.
        seed: see `LinearProbe`.
        max_memory_gb: limit for the activations that are kept.
        C: inverse strength of the L2 penalty, as in scikit-learn.
        max_iter: most iterations of the optimiser.
    """

    name: ClassVar[str] = "linear_probe"

    C: int | float = 1.0
    max_iter: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.C < math.inf and self.max_iter >= 1):
            raise LayersimError(
                "`C` must be above 0, and `max_iter` at least 1.",
                given=f"C={self.C}, max_iter={self.max_iter}",
                expected="a finite number above 0, and a whole number",
                do="leave them out for the defaults",
            )

    def kernel(self, first: Sums) -> Kernel:
        # Not a field: fields are options, which are recorded.
        kept = KeptSamples()
        object.__setattr__(self, "_kept", kept)
        return partial(keep_kernel, kept=kept, samples=self.labelled_samples, max_memory_gb=self.max_memory_gb)

    def compute(self, sums: Sums, run: Run) -> LinearProbeResult:
        warn_of_unused(self.labels, run.provenance)
        kept: KeptSamples = self._kept  # type: ignore[attr-defined]  # set by `kernel`
        target, test = torch.cat(kept.targets).numpy(), torch.cat(kept.test).numpy()
        size = int(target.max(initial=0)) + 1
        train_counts, test_counts = (torch.tensor(np.bincount(target[part], minlength=size)) for part in (~test, test))
        need_samples(train_counts, test_counts)
        classes = (train_counts + test_counts).nonzero()[:, 0].numpy()
        confusion, correct, stopped, constant = [], [], [], []
        for site, (name, width) in enumerate(zip(run.layers, kept.widths, strict=True)):
            x = torch.cat([batch[site, :, :width] for batch in kept.activations]).double().numpy()
            if not np.ptp(x[~test], axis=0).any():
                constant.append(name)
            predicted, converged = self._fit(x, target, test)
            if not converged:
                stopped.append(name)
            cells = np.searchsorted(classes, target[test]) * len(classes) + np.searchsorted(classes, predicted[test])
            confusion.append(np.bincount(cells, minlength=len(classes) ** 2).reshape(len(classes), len(classes)))
            correct.append(int((predicted == target)[~test].sum()))
        warn_of_constant(constant)
        if stopped:
            warn(
                f"The logistic regression stopped at max_iter={self.max_iter} before it converged, at {', '.join(stopped[:4])}"
                f"{' and other sites' if len(stopped) > 4 else ''}. Pass a larger max_iter=, or a smaller C=."
            )
        tables = torch.tensor(np.stack(confusion)), torch.tensor(correct)
        return probe_result(*tables, train_counts, test_counts, run, "logistic")

    def _fit(self, x: np.ndarray, target: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, bool]:
        """The predicted class of every sample, by a fit on the training samples; and whether the fit converged."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        probe = make_pipeline(StandardScaler(), LogisticRegression(C=self.C, max_iter=self.max_iter))
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            probe.fit(x[~test], target[~test])
        for other in issued:
            if not issubclass(other.category, ConvergenceWarning):
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        return probe.predict(x), not any(issubclass(one.category, ConvergenceWarning) for one in issued)


def keep_kernel(
    view: View, *, kept: KeptSamples, samples: Callable[[View], tuple[Tensor, Tensor, Tensor]], max_memory_gb: float
) -> dict[str, Tensor]:
    """Keep the activations of the labelled samples of a batch; for models in this process only.

    Args:
        view: activations of one batch.
        kept: receives them.
        samples: gives the class of each sample, and whether it is a training sample or held out.
        max_memory_gb: limit for all that is kept.

    Raises:
        LayersimError: the activations need more memory.
    """
    target, train, test = samples(view)
    known = train | test
    kept.activations.append(view.activations[:, known.to(view.activations.device)].cpu())
    kept.widths = view.widths or (view.activations.shape[-1],) * len(view.activations)
    kept.targets.append(target[known].cpu())
    kept.test.append(test[known].cpu())
    held = sum(batch.numel() * batch.element_size() for batch in kept.activations)
    if not held <= max_memory_gb * 1e9:
        raise LayersimError(
            "The activations that logistic regression keeps need more memory than `max_memory_gb`.",
            given=f"{held / 1e9:.2f} GB after {sum(map(len, kept.targets))} samples at {len(view.activations)} sites",
            expected=f"at most max_memory_gb={max_memory_gb:g}",
            do='method="ridge", which keeps sums only; fewer sites (at=) or samples (positions="last"); or a larger limit',
        )
    return {"samples": known.sum()}
