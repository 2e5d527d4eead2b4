"""Results of stitching: `StitchResult` and `StitchGrid`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.arguments import OpenFraction, typed
from ..core.errors import LayersimError
from ..core.intervals import jackknife_interval
from ..core.result_declarations import JOINT, Declaration, result_class
from ..core.results import Result, axes
from ..core.sums import first_block_size
from ..core.wording import amount
from .adapters import Adapter

if TYPE_CHECKING:
    import plotly.graph_objects
    import xarray

    from .stitched_model import StitchedModel


# Sums over each text of the evaluation: targets, and losses and correct predictions of the stitched and of the back model.
TEXT_SUMS = ("tokens", "loss", "back_loss", "correct", "back_correct")


class Interval(NamedTuple):
    """A mean over tokens with its confidence interval over texts."""

    value: float
    low: float
    high: float


def over_texts(sums: Tensor, tokens: Tensor, confidence: float) -> Interval:
    """Mean over tokens, with its confidence interval over texts.

    Texts are the independent units. The interval is that of `analyze` (`core.intervals`): the ratio of the two sums is computed
    again without each of 16 to 32 blocks of consecutive texts, or without each text if there are fewer. NaN for fewer than
    two texts with targets.

    Args:
        sums: `text`, sums of the averaged quantity.
        tokens: `text`, token counts; texts without tokens are left out.
        confidence: the level, such as 0.95.

    Source:
        Wolter 2007, Introduction to Variance Estimation, chapter 4.

    Examples:
        >>> import torch
        >>> over_texts(torch.tensor([2.0, 4.0]).double(), torch.tensor([2.0, 2.0]).double(), 0.95).value
        1.5
    """
    has_tokens = tokens > 0
    sums = sums[has_tokens]
    tokens = tokens[has_tokens]
    size = first_block_size(len(tokens))
    block_sums = torch.stack([block.sum() for block in torch.split(sums, size)])
    block_tokens = torch.stack([block.sum() for block in torch.split(tokens, size)])
    value = block_sums.sum() / block_tokens.sum()
    if len(block_tokens) < 2:
        return Interval(float(value), math.nan, math.nan)
    values_without_block = (block_sums.sum() - block_sums) / (block_tokens.sum() - block_tokens)
    interval = jackknife_interval(value, values_without_block, confidence)
    return Interval(float(value), float(interval.low), float(interval.high))


@result_class
class StitchResult(Result):
    """Losses of a stitched model and of its back model alone.

    Tensors are float64. Losses are in nats per token (per row for a classifier), on data that the adapter was not fitted on.

    `join` is a function from an adapter to the stitched model, None if a model is on a server. Files do not hold it.

    Attributes:
        values: `step`, the same as `curve`: the training loss at each step; empty if nothing was trained.
        text_tokens: `evaluation_text`, number of targets in each text of the evaluation.
        text_loss: `evaluation_text`, sum of the stitched model's cross-entropy.
        text_back_loss: `evaluation_text`, sum of the cross-entropy of the back model alone.
        text_correct: `evaluation_text`, number of correct top-1 predictions of the stitched model.
        text_back_correct: `evaluation_text`, number of correct top-1 predictions of the back model alone.
        weight: weight of the adapter, `back_dim front_dim`; empty if it has none.
        bias: bias of the adapter, `back_bias`; empty if it has none.
        kind: the kind of adapter.
        fit: method of the fit; "" if the adapter was not fitted.
        explained: R² of least squares on the tokens of the fit; NaN without least squares.
        stopped: the step, from 1, at which the loss exploded; 0 if it did not.
        layers: names of the front model's layer and of the back model's layer.
        unit: unit of a target: "token", or "row" for a classifier.
    """

    values_name = "curve"
    former_names: ClassVar[Mapping[str, str]] = {f"batch_{name}": f"text_{name}" for name in TEXT_SUMS}
    values: Float64[Tensor, " step"] = axes(
        "step",
        label="Loss",
        unit="nats",
        title="Learning curve of the adapter",
        caption="Cross-entropy of the stitched model on the training batch of each step. Horizontal lines: cross-entropy of "
        "the stitched model, and of the back alone, on texts kept out of the training (Brown et al. 2023, figure 6). "
        "Training batches are other texts, so compare the two lines with each other.",
        within=(0, math.inf),
    )
    text_tokens: Float64[Tensor, " evaluation_text"] = axes(
        "evaluation_text", label="Targets", title="Targets of each text", within=(0, math.inf)
    )
    text_loss: Float64[Tensor, " evaluation_text"] = axes(
        "evaluation_text",
        label="Summed cross-entropy of the stitched model",
        unit="nats",
        title="Cross-entropy of the stitched model, by text",
        within=(0, math.inf),
    )
    text_back_loss: Float64[Tensor, " evaluation_text"] = axes(
        "evaluation_text",
        label="Summed cross-entropy of the back alone",
        unit="nats",
        title="Cross-entropy of the back alone, by text",
        within=(0, math.inf),
    )
    text_correct: Float64[Tensor, " evaluation_text"] = axes(
        "evaluation_text",
        label="Right predictions of the stitched model",
        title="Right predictions of the stitched model, by text",
        within=(0, math.inf),
    )
    text_back_correct: Float64[Tensor, " evaluation_text"] = axes(
        "evaluation_text",
        label="Right predictions of the back alone",
        title="Right predictions of the back alone, by text",
        within=(0, math.inf),
    )
    weight: Float64[Tensor, "back_dim front_dim"] = axes(
        "back_dim", "front_dim", label="Weight of the adapter", title="Weight of the adapter by dimension"
    )
    bias: Float64[Tensor, " back_bias"] = axes(
        "back_bias", label="Bias of the adapter", title="Bias of the adapter by dimension"
    )
    kind: str
    fit: str
    explained: float
    stopped: int
    unit: str
    join: InitVar[Callable[[Adapter], Any] | None] = None

    def __post_init__(self, join: Callable[[Adapter], Any] | None) -> None:
        super().__post_init__()
        object.__setattr__(self, "_join", join)

    @property
    def curve(self) -> Tensor:
        """Training loss in nats (`step`); the same tensor as `values`."""
        return self.values

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the stitched model."""
        return float(self.text_loss.sum() / self.text_tokens.sum())

    @property
    def back_loss(self) -> float:
        """Mean cross-entropy of the back model alone."""
        return float(self.text_back_loss.sum() / self.text_tokens.sum())

    @property
    def penalty(self) -> float:
        """The stitching penalty, `loss - back_loss`."""
        return self.penalty_interval().value

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy of the stitched model."""
        return float(self.text_correct.sum() / self.text_tokens.sum())

    @property
    def back_accuracy(self) -> float:
        """Top-1 accuracy of the back model alone."""
        return float(self.text_back_correct.sum() / self.text_tokens.sum())

    @property
    def accuracy_penalty(self) -> float:
        """The accuracy penalty, `back_accuracy - accuracy`: above 0 if the stitched model is worse."""
        return self.accuracy_interval().value

    @typed
    def penalty_interval(self, confidence: OpenFraction = 0.95) -> Interval:
        """The penalty, with its confidence interval over texts, from paired differences of the two losses."""
        return over_texts(self.text_loss - self.text_back_loss, self.text_tokens, confidence)

    @typed
    def accuracy_interval(self, confidence: OpenFraction = 0.95) -> Interval:
        """The accuracy penalty, with its confidence interval over texts."""
        return over_texts(self.text_back_correct - self.text_correct, self.text_tokens, confidence)

    @property
    def adapter(self) -> Adapter:
        """The adapter, in float64 if a model is in float64, else in float32."""
        dtype = torch.float64 if "float64" in self.provenance.dtype else torch.float32
        weight = self.weight.to(dtype) if len(self.weight) else None
        bias = self.bias.to(dtype) if len(self.bias) else None
        return Adapter(self.kind, weight, bias)

    @cached_property
    def model(self) -> StitchedModel:
        """The stitched model, which runs, generates and can be analysed.

        Raises:
            LayersimError: the result was read from a file, or one of its models is on a server.
        """
        join: Callable[[Adapter], StitchedModel] | None = vars(self)["_join"]
        if join is None:
            raise LayersimError(
                "`model` is not available for a result from a file or of a remote model. Call stitch with "
                "adapter=result.adapter and both models in this process."
            )
        return join(self.adapter)

    def __repr__(self) -> str:
        kind_and_fit = f"{self.kind}, {self.fit}" if self.fit else self.kind
        names = self.provenance.model.split(JOINT)
        # A model that is stitched to itself is recorded once.
        front, back = (names * 2)[:2]
        lines = [f"StitchResult({self.layers[0]} of {front}", f"  into {self.layers[1]} of {back}, {kind_and_fit})"]
        lines += [f"  {key} = {value:.4g}" for key, value in self.headline().items()]
        lines.append(f"  over {self.provenance.tokens} {self.unit}s in {amount(len(self.text_tokens), 'text')}")
        return "\n".join(lines)

    @typed
    def plot(
        self, field: str | None = None, width: Literal["column", "text"] | None = None, title: str | None = None
    ) -> plotly.graph_objects.Figure:
        """Plot the learning curve (`"curve"`) or the penalty of each text (`"penalty"`).

        Default: the learning curve if there is one.
        """
        from ..reporting.lines_and_bars import Series, lines, with_baselines
        from ..reporting.style import with_provenance, with_size

        if field != "penalty" and (field or len(self.values)):
            return super().plot(field, width, title)
        penalties = (self.text_loss - self.text_back_loss) / self.text_tokens
        series = Series("each text", penalties.numpy())
        texts = tuple(range(len(penalties)))
        fig = lines(texts, [series], "Stitching penalty of each text", f"Penalty (nats per {self.unit})", "evaluation_text")
        mean, low, high = self.penalty_interval()
        baselines = {"mean": mean}
        # Fewer than two texts have no interval.
        if math.isfinite(low):
            baselines["95 % interval, lower end"] = low
        if math.isfinite(high):
            baselines["95 % interval, upper end"] = high
        fig = with_baselines(fig, baselines)
        return with_size(with_provenance(fig, self.provenance), width, title)

    def baselines(self, field: str) -> dict[str, float]:
        if field != "values":
            return {}
        return {"stitched, held-out": self.loss, "back alone, held-out": self.back_loss}

    def headline(self) -> dict[str, float]:
        _, low, high = self.penalty_interval()
        return {
            f"penalty, nats per {self.unit}": self.penalty,
            "penalty, lower end of the 95 % interval": low,
            "penalty, upper end of the 95 % interval": high,
            "loss": self.loss,
            "loss of the back alone": self.back_loss,
            "accuracy penalty": self.accuracy_penalty,
        }

    def finding(self) -> str:
        value, low, high = self.penalty_interval()
        interval = f" (95 % interval: {low:.4g} to {high:.4g})" if math.isfinite(low) else ""
        return f"Penalty: {value:.4g} nats per {self.unit}{interval}."


@result_class
class StitchGrid(Result):
    """Stitching penalties of all ordered pairs of models, and of each model with itself, at each stitch point.

    Tensors are float64; `seam` is the axis of stitch points.

    Attributes:
        values: `front back seam`, the same as `penalty`: loss of the stitched model minus loss of the back model alone, in
            nats.
        low: lower end of the penalty's 95 % confidence interval over texts.
        high: upper end of the interval.
        loss: loss of the stitched model.
        back_loss: loss of the back model alone.
        accuracy: top-1 accuracy of the stitched model.
        accuracy_penalty: accuracy of the back model alone minus accuracy of the stitched model.
        accuracy_low: lower end of the accuracy penalty's interval.
        accuracy_high: upper end of the accuracy penalty's interval.
        stopped: the step, from 1, at which a training exploded; 0 if none did.
        text_tokens: `evaluation_text`, number of targets in each text of the evaluation, the same for all stitches.
        text_penalty: `front back seam evaluation_text`, sums of the loss differences, for `penalty_difference`.
        fronts: names of the models.
        seams: labels of the stitch points: the layer of each model.
        kind: the kind of adapter.
        fit: method of the fit.
        unit: unit of a target: "token", or "row" for a classifier.
        groups: group of each model; empty if no groups were given.
    """

    values_name = "penalty"
    former_names: ClassVar[Mapping[str, str]] = {"batch_tokens": "text_tokens", "batch_penalty": "text_penalty"}
    values: Float64[Tensor, "front back seam"] = axes(
        "front",
        "back",
        "seam",
        label="Stitching penalty",
        unit="nats",
        title="Stitching penalty of each direction by layer",
        caption="How many nats per token the back loses when it reads the front's layer through an adapter, with 95 % "
        "intervals over texts; dashed: a model with itself, the cost of fitting alone (Brown et al. 2023, figure 1).",
    )
    low: Float64[Tensor, "front back seam"] = axes("front", "back", "seam", label="Lower end of the penalty", unit="nats")
    high: Float64[Tensor, "front back seam"] = axes("front", "back", "seam", label="Upper end of the penalty", unit="nats")
    loss: Float64[Tensor, "front back seam"] = axes(
        "front", "back", "seam", label="Cross-entropy of the stitched model", unit="nats", within=(0, math.inf)
    )
    back_loss: Float64[Tensor, "front back seam"] = axes(
        "front", "back", "seam", label="Cross-entropy of the back alone", unit="nats", within=(0, math.inf)
    )
    accuracy: Float64[Tensor, "front back seam"] = axes(
        "front",
        "back",
        "seam",
        label="Accuracy of the stitched model",
        unit="fraction of targets",
        title="Accuracy at each layer",
        better="higher",
        within=(0, 1),
    )
    accuracy_penalty: Float64[Tensor, "front back seam"] = axes(
        "front",
        "back",
        "seam",
        label="Accuracy penalty",
        unit="fraction of targets",
        title="Loss of accuracy by stitching, by layer",
        caption="The accuracy that the back loses in the same stitches (Brown et al. 2023, figure 2).",
        within=(-1, 1),
    )
    accuracy_low: Float64[Tensor, "front back seam"] = axes(
        "front", "back", "seam", label="Lower end of the accuracy penalty", unit="fraction of targets"
    )
    accuracy_high: Float64[Tensor, "front back seam"] = axes(
        "front", "back", "seam", label="Upper end of the accuracy penalty", unit="fraction of targets"
    )
    stopped: Float64[Tensor, "front back seam"] = axes(
        "front", "back", "seam", label="Step at which the training was stopped (0: none)", within=(0, math.inf)
    )
    text_tokens: Float64[Tensor, " evaluation_text"] = axes(
        "evaluation_text", label="Targets", title="Targets of each text", within=(0, math.inf)
    )
    text_penalty: Float64[Tensor, "front back seam evaluation_text"] = axes("front", "back", "seam", "evaluation_text")
    fronts: tuple[str, ...]
    seams: tuple[str, ...]
    kind: str
    fit: str
    unit: str
    groups: tuple[str, ...] = ()

    @property
    def backs(self) -> tuple[str, ...]:
        """Names of the back models; the same as `fronts`."""
        return self.fronts

    @property
    def penalty(self) -> Tensor:
        """Stitching penalties in nats (`front back seam`). A seam is a stitch point. The same tensor as `values`."""
        return self.values

    def declared(self, field: str = "values") -> Declaration:
        declaration = super().declared(field)
        unit = declaration.unit.replace("of targets", f"of {self.unit}s")
        if unit == "nats":
            unit = f"nats per {self.unit}"
        return replace(declaration, unit=unit)

    @typed
    def penalty_difference(
        self, stitch: tuple[str, str], other: tuple[str, str], confidence: OpenFraction = 0.95
    ) -> xarray.Dataset:
        """The penalty of `stitch` minus the penalty of `other` at each stitch point, with its confidence interval over texts.

        `("a", "b")` minus `("b", "a")` is the asymmetry of two models: it is above 0 if "b" loses more by the layers of "a"
        than "a" by those of "b". `("a", "b")` minus `("b", "b")` is the penalty without the cost or gain of fitting an adapter
        on these texts. With identity or least squares, self-stitches cost nothing, so the difference equals the penalty.

        Args:
            stitch: names of the front model and of the back model.
            other: names of both models of the stitch that is subtracted.
            confidence: level of the interval, such as 0.95.

        Returns:
            `difference`, `difference_low` and `difference_high` over `seam`, in nats.

        Raises:
            LayersimError: a name is not the name of a model.
        """
        import xarray

        for name in (*stitch, *other):
            if name not in self.fronts:
                raise LayersimError(f"{name!r} is not a model of this grid; the models are {', '.join(self.fronts)}.")
        difference_sums = self._penalty_sums(stitch) - self._penalty_sums(other)
        intervals = [over_texts(sums, self.text_tokens, confidence) for sums in difference_sums]
        attributes = {"long_name": "Difference of penalties", "units": f"nats per {self.unit}"}
        variables = {
            "difference": ("seam", [interval.value for interval in intervals], attributes),
            "difference_low": ("seam", [interval.low for interval in intervals], attributes),
            "difference_high": ("seam", [interval.high for interval in intervals], attributes),
        }
        return xarray.Dataset(variables, {"seam": list(self.seams)})

    def _penalty_sums(self, stitch: tuple[str, str]) -> Tensor:
        """Sums of the loss differences of a pair of front and back model (`seam evaluation_text`)."""
        front, back = stitch
        return self.text_penalty[self.fronts.index(front), self.fronts.index(back)]

    def __repr__(self) -> str:
        kind_and_fit = f"{self.kind}, {self.fit}" if self.fit else self.kind
        lines = [f"StitchGrid({', '.join(self.fronts)}: {len(self.seams)} stitch points, {kind_and_fit})"]
        lines += [f"  {key} = {value:.4g}" for key, value in self.headline().items()]
        return "\n".join(lines)

    @typed
    def plot(
        self, field: str | None = None, width: Literal["column", "text"] | None = None, title: str | None = None
    ) -> plotly.graph_objects.Figure:
        """Plot a field over stitch points, with a line for each pair of front and back model.

        Lines of a model with itself are dashed.
        """
        from ..reporting.many_model_figures import stitch_lines
        from ..reporting.style import intervals_in_words, with_size, with_subtitle

        field = "penalty" if field in (None, "values") else field
        if field != "penalty" and self.tensor_fields().get(field) != ("front", "back", "seam"):
            return super().plot(field, width, title)
        intervals = {"penalty": (self.low, self.high), "accuracy_penalty": (self.accuracy_low, self.accuracy_high)}
        values = self.values if field == "penalty" else getattr(self, field)
        low, high = intervals.get(field, (values, values))
        declared = self.declared(field)
        words = (declared.title, declared.words)
        fig = stitch_lines(values.numpy(), low.numpy(), high.numpy(), self.fronts, self.seams, words)
        adapter = f"{self.kind} adapter, fitted by {self.fit}" if self.fit else f"{self.kind} adapter"
        evaluation = f"{int(self.text_tokens.sum()):,} {self.unit}s of evaluation"
        fig = with_subtitle(fig, f"{adapter} · {evaluation}")
        fig = with_subtitle(fig, intervals_in_words(fig))
        return with_size(fig, width, title)

    def headline(self) -> dict[str, float]:
        with_itself = torch.eye(len(self.fronts), dtype=torch.bool)
        headline = {}
        if len(self.fronts) > 1:
            penalty = float(self.values[~with_itself].mean())
            headline["penalty of two models, mean over directions and stitch points"] = penalty
        headline["penalty of models with themselves, mean over stitch points"] = float(self.values[with_itself].mean())
        return headline
