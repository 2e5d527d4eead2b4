"""Early exit: what stopping at the first confident layer would say, and what it would save, for many thresholds at once."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.errors import LayersimError, as_fraction
from ..core.results import Picture, Result, axes
from ..core.sums import Sums
from ..core.typed import named, typed
from ..data.batches import Batch
from ..data.labels import NO_LABEL, as_labels, label_key, label_source, warn_of_unused
from ..models.layer_logits import RANKED, bad_logits, read_lens, read_positions
from ..models.model_info import Model
from ..models.targets import check_batch_labels, with_labels
from ..models.validation import refuse_bad_logits
from ..models.view import Kernel, View
from .base import Analyzer, Run, check_memory, need_head, need_tokens
from .logit_lens import unembedding

THRESHOLDS = (*(i / 20 for i in range(20)), 0.97, 0.98, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99999, 1.0)
SOURCE = "(Jiang, Zhou and Zhu 2024, section 3 and figure 7)."


@named
@dataclass(frozen=True)
class ExitPoint:
    """An `ExitCurve` at one threshold.

    Attributes:
        threshold: of the top probability.
        exits: `layer`, how many positions exit after each block.
        accuracy: share of what is emitted that is right.
        agreement: share of what is emitted that the whole model would have said.
        perplexity: exp of the mean cross-entropy at the exits.
        speedup: blocks of the whole model over blocks run; the cost of asking is not in it.
    """

    threshold: float
    exits: Tensor
    accuracy: float
    agreement: float
    perplexity: float
    speedup: float


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExitCurveResult(Result):
    """What `ExitCurve` measures. All tensors are float64.

    Attributes:
        values: `threshold layer`, the same as `exits`: how many positions exit after each block.
        accuracy: `threshold`, share of positions with a target at which what is emitted is the target.
        agreement: `threshold`, share of all positions at which it is what the last layer says; 1 at threshold 1.
        perplexity: `threshold`, exp of the mean cross-entropy at the exits.
        speedup: `threshold`, L N / sum of blocks run.
        thresholds: ascending.
        positions: how many positions were read.
        targets: how many of them have a target.
        unembedding: what turned x into logits.
    """

    values_name: ClassVar[str] = "exits"
    values: Float64[Tensor, "threshold layer"] = axes("threshold", "layer")
    accuracy: Float64[Tensor, " threshold"] = axes("threshold")
    agreement: Float64[Tensor, " threshold"] = axes("threshold")
    perplexity: Float64[Tensor, " threshold"] = axes("threshold")
    speedup: Float64[Tensor, " threshold"] = axes("threshold")
    thresholds: tuple[float, ...]
    positions: int
    targets: int
    unembedding: str

    pictures: ClassVar[tuple[Picture, ...]] = (
        Picture("exits", "Positions that exit at each block", "For each threshold of the top probability " + SOURCE),
        Picture("accuracy", "Accuracy of what is emitted", "By threshold " + SOURCE),
        Picture(
            "agreement",
            "Agreement with the whole model",
            "Share of emitted predictions that the last layer would make too " + SOURCE,
        ),
        Picture(
            "speedup",
            "Speed-up in blocks",
            "Blocks of the whole model over blocks run. An exit check is an unembedding, which in a small model costs more "
            "than a block; the paper's ratio leaves it out " + SOURCE,
        ),
    )

    @property
    def exits(self) -> Tensor:
        """`threshold layer`, the same as `values`."""
        return self.values

    @typed
    def at(self, threshold: int | float) -> ExitPoint:
        """Everything at one of the thresholds that were measured.

        Raises:
            LayersimError: it was not among them; the error names the nearest.
        """
        if not 0 <= threshold <= 1:
            raise LayersimError(
                "`threshold` must be between 0 and 1.",
                given=f"at({threshold:g})",
                expected="a probability",
                do=as_fraction("threshold", threshold) or "at(0.9)",
            )
        near = min(range(len(self.thresholds)), key=lambda i: abs(self.thresholds[i] - threshold))
        if abs(self.thresholds[near] - threshold) > 1e-9:
            place = bisect.bisect(self.thresholds, threshold)
            raise LayersimError(
                "This threshold was not measured.",
                given=f"at({threshold})",
                expected=f"one of {', '.join(f'{t:g}' for t in self.thresholds)}",
                do=f"at({self.thresholds[near]:g}), or ExitCurve(thresholds="
                f"{tuple(round(t, 7) for t in (*self.thresholds[:place], threshold, *self.thresholds[place:]))})",
            )
        return ExitPoint(
            threshold=self.thresholds[near],
            exits=self.values[near],
            accuracy=float(self.accuracy[near]),
            agreement=float(self.agreement[near]),
            perplexity=float(self.perplexity[near]),
            speedup=float(self.speedup[near]),
        )

    @typed
    def threshold_for(self, *, agreement: int | float | None = None, accuracy: int | float | None = None) -> float:
        """The lowest measured threshold, and so the fastest, from which on both are at least this.

        At threshold 1 no position exits early: where that is the answer, no lower one that was measured is enough; measure more
        of them close to 1.

        Raises:
            LayersimError: neither was asked for, or no threshold gives it.
        """
        if agreement is None and accuracy is None:
            raise LayersimError(
                "What the threshold is for was not said.",
                given="threshold_for()",
                expected="agreement= or accuracy=",
                do="threshold_for(agreement=0.95)",
            )
        for name, share in (("agreement", agreement), ("accuracy", accuracy)):
            if share is not None and not 0 <= share <= 1:
                raise LayersimError(
                    f"`{name}` must be between 0 and 1.",
                    given=f"{name}={share:g}",
                    expected="a fraction of positions, 0 to 1",
                    do=as_fraction(name, share) or f"threshold_for({name}=0.95)",
                )
        enough = (self.agreement >= (agreement or 0)) & (self.accuracy >= (accuracy or 0))
        # From there on: a single lucky threshold below a bad one is no basis for a choice.
        holds = enough.flip(0).long().cumprod(0).flip(0).nonzero()[:, 0]
        if not len(holds):
            best = f"agreement {float(self.agreement[-1]):.4g} and accuracy {float(self.accuracy[-1]):.4g}"
            raise LayersimError(
                "No measured threshold gives this.",
                given=f"agreement={agreement}, accuracy={accuracy}",
                expected=f"at most what the highest threshold, {self.thresholds[-1]:g}, gives: {best}",
                do="ask for less, or measure with thresholds=(..., 1.0): at 1 no position exits early",
            )
        return self.thresholds[int(holds[0])]

    def headline(self) -> dict[str, float]:
        reached = (self.agreement >= 0.95).nonzero()[:, 0]
        if not len(reached):
            return {f"agreement at threshold {self.thresholds[-1]:g}": float(self.agreement[-1])}
        threshold = (
            self.threshold_for(agreement=0.95) if bool(self.agreement[-1] >= 0.95) else self.thresholds[int(reached[-1])]
        )
        point = self.at(threshold)
        return {
            "threshold with 95 % agreement": threshold,
            "its speed-up in blocks": point.speedup,
            "its accuracy": point.accuracy,
            "accuracy at the highest threshold": float(self.accuracy[-1]),
        }


@typed
@dataclass(frozen=True, eq=False)
class ExitCurve(Analyzer):
    r"""What early exit at a confidence threshold would emit and save, for many thresholds in one pass.

    A position exits after the first block whose top softmax probability exceeds the threshold, else after the last. With m_i
    positions that exit after block i, the speed-up in blocks is

    $$\frac{\sum_{i=1}^{L} L \, m_i}{\sum_{i=1}^{L} i \, m_i}.$$

    Args:
        thresholds: each between 0 and 1. At 0 everything exits after the first block, at 1 nothing exits early.
        norm: "final" applies the model's final norm to every layer, "none" to the last alone; see `LogitLens`.
        labels: what counts as right; see `LogitLens`.
        lens_memory_mb: for the logits of one chunk, at least those of one token at all layers.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3, figure 7.

    Example:
        >>> import tl_layersim as lsim
        >>> curve = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.ExitCurve()])["exit_curve"]
        >>> curve.at(1.0).agreement, curve.at(1.0).speedup, curve.at(0).speedup
        (1.0, 1.0, 8.0)
    """

    name: ClassVar[str] = "exit_curve"
    needs_every_block: ClassVar[bool] = True
    needs_unembed: ClassVar[bool] = True

    thresholds: float | int | tuple[float | int, ...] | list[float | int] = THRESHOLDS
    norm: Literal["final", "none"] = "final"
    labels: Any = "next_token"
    lens_memory_mb: int | float = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", as_labels(self.labels))
        check_memory(self.lens_memory_mb)
        several = (self.thresholds,) if isinstance(self.thresholds, float | int) else tuple(self.thresholds)
        object.__setattr__(self, "thresholds", several)
        wrong = [value for value in several if not 0 <= value <= 1]
        if not several or wrong:
            raise LayersimError(
                "`thresholds` must be between 0 and 1." if several else "`thresholds` is empty.",
                given=f"thresholds={self.thresholds}",
                expected="one or more probabilities",
                do=as_fraction("thresholds", wrong[0]) if wrong and 1 < wrong[0] <= 100 else "thresholds=(0.5, 0.9, 0.99)",
            )

    @property
    def label_source(self) -> str:
        return label_source(self.labels)

    def check(self, *models: Model) -> None:
        need_head(models[0], "ExitCurve", targets=True, own_labels=bool(self.label_source))

    def check_batch(self, batch: Batch, model: Model) -> None:
        check_batch_labels(self.labels, batch, model)

    def kernel(self, first: Sums) -> Kernel:
        levels = torch.tensor(self._ascending(), dtype=torch.float64)
        return partial(
            exit_kernel,
            thresholds=levels,
            normed=self.norm == "final",
            labels=self.labels,
            memory_mb=float(self.lens_memory_mb),
        )

    def _ascending(self) -> tuple[float, ...]:
        return tuple(sorted({float(t) for t in cast(tuple[float, ...], self.thresholds)}))

    def compute(self, sums: Sums, run: Run) -> ExitCurveResult:
        warn_of_unused(self.labels, run.provenance)
        count, targets = int(sums["count"]), int(sums["targets"])
        need_tokens(count, 1, "ExitCurve", "positions that the head reads")
        refuse_bad_logits(sums["bad"], run.layers)
        need_tokens(targets, 1, "ExitCurve", "positions with a target")
        exits = sums["exits"].double()
        layers = exits.shape[1]
        return ExitCurveResult(
            values=exits,
            accuracy=sums["correct"].double() / targets,
            agreement=sums["agree"].double() / count,
            perplexity=(-sums["log_prob"] / targets).exp(),
            speedup=layers * count / (exits @ torch.arange(1, layers + 1, dtype=torch.float64)),
            thresholds=self._ascending(),
            positions=count,
            targets=targets,
            unembedding=unembedding(run, self.norm),
            layers=run.layers,
            provenance=run.provenance,
        )


def exit_kernel(view: View, *, thresholds: Tensor, normed: bool, labels: str | Tensor, memory_mb: float) -> dict[str, Tensor]:
    """Sums over positions of where they exit at each threshold, and of what they then say."""
    target = with_labels(view, labels, read_positions(view))
    lens = read_lens(view, target, normed, memory_mb, RANKED, label_key(labels))
    top, best = lens["best_prob"], lens["best"]
    layers = len(top)
    known = target != NO_LABEL
    out: dict[str, list[Tensor]] = {"exits": [], "correct": [], "agree": [], "log_prob": []}
    for threshold in thresholds.to(top.device):
        sure = top > threshold
        sure[-1] = True
        layer = sure.int().argmax(0, keepdim=True)
        said = best.gather(0, layer)[0]
        out["exits"].append(torch.bincount(layer[0], minlength=layers))
        out["correct"].append((lens["before"].gather(0, layer)[0][known] == 0).sum())
        out["agree"].append((said == best[-1]).sum())
        out["log_prob"].append(lens["target_log_prob"].gather(0, layer)[0][known].sum())
    return {
        **{name: torch.stack(values) for name, values in out.items()},
        "count": torch.tensor(len(target)),
        "targets": known.sum(),
        "bad": bad_logits(lens),
    }
