"""Early exit at a confidence threshold: accuracy, agreement and speed-up for many thresholds in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.row_pools import samples_of
from ..activations.view import Kernel, View, targets
from ..architectures.unembed import LayerHeads
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, typed, warn, without_nan
from ..core.arguments import Probability
from ..core.intervals import with_margin
from ..core.result_declarations import Declaration, result_class, texts_of_part
from ..core.wording import amount, brief
from ..data.labels import NO_LABEL, label_key
from ..lens.statistics import RANKED, bad_logits, read_lens, read_positions
from ._samples import held_out, text_of
from .analyzer import JIANG, Run
from .logit_lens import LensAnalyzer
from .needs import Needs

MOST_THRESHOLDS = 10_000
THRESHOLDS = (*(i / 20 for i in range(20)), 0.97, 0.98, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99999, 1.0)
EXITS_SOURCE = JIANG.format("section 3 and figure 7")


@dataclass(frozen=True)
class ExitPoint:
    """Results of early exit at one threshold of `ExitCurve`.

    Attributes:
        threshold: threshold on the top probability.
        exits: `layer`, number of positions that exit after each block.
        accuracy: fraction of predictions at the exits that are correct.
        agreement: fraction of predictions at the exits that equal the full model's.
        perplexity: exp of the mean cross-entropy at the exits.
        speedup: blocks of the full model divided by blocks run; the cost of the exit checks is not included.
    """

    threshold: float
    exits: Tensor
    accuracy: float
    agreement: float
    perplexity: float
    speedup: float


def _whole_model(result: ExitCurveResult) -> Tensor:
    """Thresholds at which all blocks run, so that predictions are those of the last layer (`threshold`)."""
    return torch.tensor(result.thresholds) >= 1


def _whole_model_exits(result: ExitCurveResult) -> Tensor:
    """The same over exits (`threshold 1`)."""
    return _whole_model(result)[:, None]


def _texts_of_parts(result: ExitCurveResult) -> Tensor:
    """Number of texts in each half of the texts (`part 1`), see `texts_of_part`."""
    positions = result.part_exits[:, 0].sum(-1, keepdim=True)
    return texts_of_part(result, positions, positions.sum())


@result_class
class ExitCurveResult(Result):
    """Accuracy, agreement and speed-up of early exit at each threshold. All tensors are float64.

    Attributes:
        values: `threshold layer`, the same as `exits`: number of positions that exit after each block.
        accuracy: `threshold`, fraction of correct predictions at the exits, among positions with a target.
        agreement: `threshold`, fraction of positions whose prediction at the exit equals the last layer's; 1 at threshold 1.
        perplexity: `threshold`, exp of the mean cross-entropy at the exits.
        speedup: `threshold`, blocks of the full model divided by blocks run, L N / (sum of blocks run).
        part_exits: `part threshold layer`, `exits` in each half of the texts: the half on which `threshold_for` chooses, and
            the held-out half. A row's index decides its half; if rows have no index, its tokens do.
        part_accuracy: `part threshold`, `accuracy` of each half; NaN for a half without rows.
        part_agreement: `part threshold`, `agreement` of each half.
        part_perplexity: `part threshold`, `perplexity` of each half.
        thresholds: the thresholds, ascending.
        positions: number of positions.
        targets: number of positions with a target.
        unembedding: the map from the residual x to logits.
        chosen: threshold of the headline numbers; None for the lowest one with the agreement that the analyzer asks for.
    """

    # Labels of the `part` axis: the texts that `threshold_for` chooses on, and the held-out texts.
    parts: ClassVar[tuple[str, str]] = ("choice", "held-out")
    exits = ValuesAlias()
    values: Float64[Tensor, "threshold layer"] = axes(
        "threshold",
        "layer",
        label="Positions",
        title="Positions that exit at each block",
        caption="Fraction of positions, for each threshold of the top probability " + EXITS_SOURCE,
        within=(0, math.inf),
        by_chance=(0, 1),
        certain=_whole_model_exits,
        out_of="values",
        summed=("layer",),
        drawn="fractions",
    )
    accuracy: Float64[Tensor, " threshold"] = axes(
        "threshold",
        label="Accuracy",
        unit="fraction",
        title="Accuracy of early exits by threshold",
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
    )
    agreement: Float64[Tensor, " threshold"] = axes(
        "threshold",
        label="Agreement",
        unit="fraction",
        title="Agreement of early exits with the last layer by threshold",
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
        certain=_whole_model,
    )
    perplexity: Float64[Tensor, " threshold"] = axes(
        "threshold",
        label="Perplexity",
        title="Perplexity of early exits by threshold",
        better="lower",
        scale="log",
        within=(1, math.inf),
    )
    speedup: Float64[Tensor, " threshold"] = axes(
        "threshold",
        label="Speed-up (all blocks / blocks run)",
        title="Speed-up of early exits against their agreement",
        caption="A point for each threshold of the top probability: blocks of the full model over blocks run, against the "
        "fraction of predictions at the exits that equal the last layer's. An exit check is an unembedding, which in a small "
        "model costs more than a block; the paper's ratio does not include it " + EXITS_SOURCE,
        within=(1, math.inf),
        drawn="agreement",
    )
    part_exits: Float64[Tensor, "part threshold layer"] = axes(
        "part",
        "threshold",
        "layer",
        within=(0, math.inf),
        by_chance=(0, 1),
        certain=_whole_model_exits,
        out_of="part_exits",
        summed=("part", "layer"),
    )
    part_accuracy: Float64[Tensor, "part threshold"] = axes(
        "part", "threshold", label="Accuracy", unit="fraction", within=(0, 1), by_chance=(0, 1), units=_texts_of_parts
    )
    part_agreement: Float64[Tensor, "part threshold"] = axes(
        "part",
        "threshold",
        label="Agreement with the last layer",
        unit="fraction",
        within=(0, 1),
        by_chance=(0, 1),
        certain=_whole_model,
        units=_texts_of_parts,
    )
    part_perplexity: Float64[Tensor, "part threshold"] = axes(
        "part", "threshold", label="Perplexity", scale="log", within=(1, math.inf)
    )
    thresholds: tuple[float, ...]
    positions: int
    targets: int
    unembedding: str
    chosen: float | None = None

    @property
    def pictures(self) -> tuple[Declaration, ...]:
        # What exits gain comes before where they are.
        return super().pictures[::-1]

    @typed
    def at(self, threshold: Probability, held_out: bool = False) -> ExitPoint:
        """Exits, accuracy, agreement, perplexity and speed-up at one of the measured thresholds.

        Args:
            threshold: one of `thresholds`.
            held_out: whether to read the held-out half of the texts, on which `threshold_for` does not choose; NaN, with a
                warning, if all texts are in one half. False reads all rows.

        Raises:
            LayersimError: the threshold was not measured.
        """
        nearest = min(range(len(self.thresholds)), key=lambda i: abs(self.thresholds[i] - threshold))
        if abs(self.thresholds[nearest] - threshold) > 1e-9:
            raise LayersimError(
                f"`threshold` is {threshold:g}; the measured thresholds are {', '.join(f'{t:g}' for t in self.thresholds)}."
            )
        if held_out and self._in_one_half:
            warn(
                f"`held_out` is True, but the numbers are NaN: the {amount(self.provenance.texts, 'text')} of the data, whose "
                f"rows stay together, {'is' if self.provenance.texts == 1 else 'are'} in one half. Pass more texts, or groups "
                "of fewer rows."
            )
        return self._point(nearest, held_out)

    @property
    def _in_one_half(self) -> bool:
        """Whether one half of the texts is empty. Thresholds are then chosen on all rows, and none are held out."""
        return bool(self.part_agreement.isnan().any())

    def _point(self, threshold_index: int, held_out: bool) -> ExitPoint:
        """The `ExitPoint` of a threshold, by its index."""
        # Without a held-out half, its numbers are NaN.
        factor = math.nan if held_out and self._in_one_half else 1.0
        if held_out:
            prefix = "part_"
            index: tuple[int, ...] = (1, threshold_index)
            exits = self.part_exits[index]
        else:
            prefix = ""
            index = (threshold_index,)
            exits = self.values[index]
        rates = {}
        for name in ("accuracy", "agreement", "perplexity"):
            rates[name] = factor * float(getattr(self, prefix + name)[index])
        speedup = factor * float(_speedup(exits))
        return ExitPoint(threshold=self.thresholds[threshold_index], exits=exits, speedup=speedup, **rates)

    @typed
    def threshold_for(self, *, agreement: Probability | None = None, accuracy: Probability | None = None) -> float:
        """Lowest measured threshold that has the required agreement and accuracy.

        All higher measured thresholds have them too. The lowest threshold is the fastest. It is chosen on one half of the
        texts, on which its agreement is too high. `at(threshold, held_out=True)` has its agreement on the other half.

        At threshold 1 no position exits early. If this threshold is returned, no lower measured threshold is sufficient, and
        more thresholds close to 1 should be measured.

        Args:
            agreement: smallest agreement with the full model, 0 to 1; None not to require any.
            accuracy: smallest accuracy, 0 to 1; None not to require any.

        Raises:
            LayersimError: neither value was given, or no measured threshold reaches them.
        """
        if agreement is None and accuracy is None:
            raise LayersimError("`agreement` and `accuracy` are None; at least one must be a number from 0 to 1.")
        threshold = self.lowest_threshold(agreement, accuracy)
        if threshold is None:
            requirements = {"agreement": agreement, "accuracy": accuracy}
            required = " and ".join(f"{name} {least:g}" for name, least in requirements.items() if least is not None)
            agreements, accuracies = self._choice()
            raise LayersimError(
                f"No measured threshold reaches {required}; the highest threshold, {self.thresholds[-1]:g}, has agreement "
                f"{float(agreements[-1]):.4g} and accuracy {float(accuracies[-1]):.4g}."
            )
        return threshold

    @typed
    def lowest_threshold(self, agreement: int | float | None, accuracy: int | float | None = None) -> float | None:
        """Lowest measured threshold that has the required agreement and accuracy; None if there is none.

        All higher measured thresholds have them too.

        Args:
            agreement: smallest agreement; None not to require any.
            accuracy: smallest accuracy; None not to require any.
        """
        agreements, accuracies = self._choice()
        enough = agreements >= (agreement or 0)
        if accuracy is not None:
            enough &= accuracies >= accuracy
        # From this threshold on: a single threshold may reach the values by chance, with worse ones above it.
        holds = enough.flip(0).long().cumprod(0).flip(0).nonzero()[:, 0]
        return self.thresholds[int(holds[0])] if len(holds) else None

    def _choice(self) -> tuple[Tensor, Tensor]:
        """Agreement and accuracy (each `threshold`) that are compared with the required values to choose a threshold.

        They are measured on half of the texts, or on all rows if a half is empty.
        """
        if self._in_one_half:
            return self.agreement, self.accuracy
        return self.part_agreement[0], self.part_accuracy[0]

    @property
    def wanted(self) -> float:
        """Agreement of the headline's threshold, as the analyzer asks for it."""
        option = self.provenance.options.get("agreement")
        # A result of a user's own program may have no such option.
        return float(option) if isinstance(option, int | float) else 0.95

    def _threshold(self) -> float | None:
        """Threshold of the headline numbers."""
        return self.lowest_threshold(self.wanted) if self.chosen is None else self.chosen

    def with_replicates(self, replicates: tuple[Any, ...], block_tokens: tuple[int, ...]) -> Result:
        # Intervals are those at the threshold of all rows.
        at_this_threshold = tuple(replace(replicate, chosen=self._threshold()) for replicate in replicates)
        return super().with_replicates(at_this_threshold, block_tokens)

    def headline(self) -> dict[str, float]:
        threshold = self._threshold()
        if threshold is None:
            return {f"agreement at threshold {self.thresholds[-1]:g}": float(self.agreement[-1])}
        point = self._point(self.thresholds.index(threshold), held_out=True)
        return without_nan(
            {
                f"threshold with {100 * self.wanted:g} % agreement": threshold,
                "its agreement on held-out rows": point.agreement,
                "its speed-up in blocks": point.speedup,
                "its accuracy": point.accuracy,
                f"accuracy at threshold {self.thresholds[-1]:g}": self._point(-1, held_out=True).accuracy,
            }
        )

    def finding(self) -> str:
        threshold = self._threshold()
        if threshold is None or self._in_one_half:
            return ""
        index = self.thresholds.index(threshold)
        agreement = with_margin(self, lambda result: result._point(index, held_out=True).agreement, percent=True)
        speedup = with_margin(self, lambda result: result._point(index, held_out=True).speedup)
        return (
            f"Early exit at a top probability of {threshold:g} agrees with the whole model at {agreement} of the positions, "
            f"with a speed-up in blocks of {speedup}, on the half of the texts that was not used to choose the threshold."
        )


@typed
@dataclass(frozen=True, eq=False)
class ExitCurve(LensAnalyzer):
    r"""Early exit at a confidence threshold: accuracy, agreement and speed-up for many thresholds in one pass.

    A position exits after the first block whose top softmax probability exceeds the threshold, otherwise after the last block.
    With m_i positions that exit after block i, the speed-up in blocks is

    $$\frac{\sum_{i=1}^{L} L \, m_i}{\sum_{i=1}^{L} i \, m_i}.$$

    Args:
        thresholds: 1 to 10,000 thresholds, each from 0 to 1. At 0 every position exits after the first block; at 1 no position
            exits early.
        norm: "final" applies the model's final norm to every layer, "none" to the last layer only; see `LogitLens`.
        labels: the targets; see `LogitLens`.
        lens_memory_mb: megabytes for the logits of one chunk of tokens.
        heads: `ExitHeads` of the layers below the last, or their file; see `LogitLens`.
        agreement: minimum agreement with the full model, 0 to 1. The lowest threshold with this agreement is recommended: the
            headline numbers are those at this threshold.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3, figure 7.

    Examples:
        At threshold 1 every position runs through the full model. At 0 it runs through one of 8 blocks.

        >>> import tl_layersim as lsim
        >>> curve = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.ExitCurve()])["exit_curve"]
        >>> curve.at(1.0).agreement, curve.at(1.0).speedup, curve.at(0).speedup
        (1.0, 1.0, 8.0)
    """

    name: ClassVar[str] = "exit_curve"

    thresholds: float | int | tuple[float | int, ...] | list[float | int] = THRESHOLDS
    labels: Any = "next_token"
    agreement: Probability = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        option = (self.thresholds,) if isinstance(self.thresholds, float | int) else self.thresholds
        thresholds = tuple(sorted({float(value) for value in option}))
        object.__setattr__(self, "thresholds", thresholds)
        outside = [value for value in thresholds if not 0 <= value <= 1]
        if outside or not 0 < len(thresholds) <= MOST_THRESHOLDS:
            raise LayersimError(
                f"`thresholds` holds {brief(outside[:4] or thresholds)}; it must hold 1 to {MOST_THRESHOLDS} numbers from 0 to "
                "1."
            )

    @property
    def needs(self) -> Needs:
        return replace(super().needs, sites="every_block")

    def kernel(self, first: Sums) -> Kernel:
        levels = torch.tensor(self.thresholds, dtype=torch.float64)
        return partial(exit_kernel, thresholds=levels, labels=self.labels, **self.lens)

    def compute(self, sums: Sums, run: Run) -> ExitCurveResult:
        count = int(sums["count"].sum())
        targets = int(sums["targets"].sum())
        self.check_sums(sums, run, targets)
        part_exits = sums["exits"].double()
        exits = part_exits.sum(0)
        part_counts = sums["count"][:, None]
        part_targets = sums["targets"][:, None]
        return ExitCurveResult(
            values=exits,
            accuracy=sums["correct"].sum(0).double() / targets,
            agreement=sums["agree"].sum(0).double() / count,
            perplexity=(-sums["log_prob"].sum(0) / targets).exp(),
            speedup=_speedup(exits),
            part_exits=part_exits,
            part_accuracy=sums["correct"].double() / part_targets,
            part_agreement=sums["agree"].double() / part_counts,
            part_perplexity=(-sums["log_prob"] / part_targets).exp(),
            thresholds=cast(tuple[float, ...], self.thresholds),
            positions=count,
            targets=targets,
            unembedding=self.unembedding(run),
            layers=run.layers,
            provenance=run.provenance,
        )


def exit_kernel(
    view: View,
    *,
    thresholds: Tensor,
    normed: bool,
    labels: str | Tensor,
    memory_mb: float,
    heads: LayerHeads | None = None,
) -> dict[str, Tensor]:
    """Count exits at each layer, and correct and agreeing predictions, for each threshold.

    Log-probabilities of the targets are summed too. The two halves of the rows are summed separately.

    Args:
        view: activations of one batch.
        thresholds: thresholds on the top probability.
        normed: whether the final norm is applied to every layer, not only to the last one.
        labels: the targets, see `LogitLens`.
        memory_mb: megabytes for logits.
        heads: heads for the layers below the last; None to use the model's own head at every layer.
    """
    index = read_positions(view)
    part = _half_of_token(view)
    target = targets(view, labels, index)
    if index is not None:
        part = part[index.to(part.device)]
    lens = read_lens(view, target, normed, memory_mb, RANKED, label_key(labels), heads)
    top = lens["best_prob"]
    best = lens["best"]
    layers = len(top)
    part = part.to(top.device)
    has_target = target != NO_LABEL

    def by_part(values: Tensor, part: Tensor) -> Tensor:
        return torch.stack([values[part == number].sum() for number in (0, 1)])

    out: dict[str, list[Tensor]] = {"exits": [], "correct": [], "agree": [], "log_prob": []}
    for threshold in thresholds.to(top.device):
        confident = top > threshold
        confident[-1] = True
        layer = confident.int().argmax(0, keepdim=True)
        prediction = best.gather(0, layer)[0]
        out["exits"].append(torch.bincount(part * layers + layer[0], minlength=2 * layers).view(2, layers))
        before = lens["before"].gather(0, layer)[0]
        out["correct"].append(by_part(before[has_target] == 0, part[has_target]))
        out["agree"].append(by_part(prediction == best[-1], part))
        log_prob = lens["target_log_prob"].gather(0, layer)[0]
        out["log_prob"].append(by_part(log_prob[has_target], part[has_target]))
    sums = {name: torch.stack(values, dim=1) for name, values in out.items()}
    sums["count"] = torch.bincount(part, minlength=2)
    sums["targets"] = by_part(has_target.to(part.device), part)
    sums["bad"] = bad_logits(lens)
    return sums


def _half_of_token(view: View) -> Tensor:
    """Which half of the texts each token is in (`token`): 0 to choose thresholds, 1 held out."""
    rows = samples_of(view, whole_rows=True)
    row_of_token = torch.unique_consecutive(view.sequence.cpu(), return_inverse=True)[1]
    # By a hash of the row's token ids, for rows whose text is not known.
    by_hash = (rows.key % 2 == 1)[row_of_token]
    if view.row is None:
        return by_hash.long()
    text = text_of(view).cpu()
    return torch.where(text >= 0, held_out(text, 0.5, 0), by_hash).long()


def _speedup(exits: Tensor) -> Tensor:
    """Blocks of the full model divided by blocks run.

    Args:
        exits: `... layer`, number of positions that exit after each block.
    """
    layers = exits.shape[-1]
    return layers * exits.sum(-1) / (exits @ torch.arange(1, layers + 1, dtype=torch.float64))
