"""Results of `evaluate_layers`: measures of every layer, and the quality of generated text, for two models side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.results import Result, axes
from ..core.wording import amount

# Fields of `LayerChange` at its one threshold.
AT_THRESHOLD = ("exits", "exit_accuracy", "exit_agreement", "speedup")
SOURCE = " (Jiang, Zhou and Zhu 2024, {})."


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerChange(Result):
    """Measures by layer of two models on the same data, such as before and after a fine-tune. Tensors are float64.

    Attributes:
        values: `model layer`, the same as `cross_entropy`, of the lens in nats.
        perplexity: `model layer`, exp of it.
        accuracy: `model layer`, fraction of targets that the layer predicts.
        agreement: `model layer`, fraction of positions at which its prediction is the last layer's.
        saturated: `model layer`, fraction of positions whose prediction does not change from this layer on, or from one below.
        cosine_to_last: `model residual`, mean cosine to the output of the last block, centred as `center` says, at the
            positions that the head reads: [CLS] or the last token of a classifier of rows, every token of a language model.
        exits: `model layer`, fraction of positions that exit after each block at `threshold`.
        nc1: `model residual`, collapse within classes, see `NeuralCollapse`, of a classifier of rows at the position that the
            head reads; NaN where the data has fewer than two classes, or all classes have the same mean.
        early_share: `model`, fraction of positions that saturate before the last layer.
        exit_accuracy: `model`, accuracy of early exit at `threshold`.
        exit_agreement: `model`, agreement of early exit at `threshold` with the last layer.
        speedup: `model`, blocks of the whole model over blocks run at `threshold`; checks are not counted.
        speedup_at_agreement: `model`, the speed-up at the lowest measured threshold from which on the agreement is 95 %.
        effective_depth: `model`, the least number of blocks with accuracy 1 - `eps`, all blocks where none has it.
        models: names of the two models.
        threshold: of the top probability.
        eps: of the effective depth.
        center: the centring of cosines, see `Cosine`.
    """

    file_kind: ClassVar[str] = "layer_change"
    values_name = "cross_entropy"
    values: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Cross-entropy",
        unit="nats",
        title="Cross-entropy of each layer",
        caption="Cross-entropy of the lens at each layer (nats)" + SOURCE.format("figure 9"),
        better="lower",
        within=(0, math.inf),
    )
    perplexity: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Perplexity",
        title="Perplexity at each layer",
        better="lower",
        scale="log",
        within=(1, math.inf),
    )
    accuracy: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Accuracy",
        unit="fraction",
        title="Accuracy of each layer",
        caption="Fraction of targets that the lens predicts" + SOURCE.format("equation 2, figure 5"),
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
    )
    agreement: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Agreement",
        unit="fraction",
        title="Agreement with the last layer",
        caption="Fraction of positions at which the lens predicts the same as at the last layer.",
        better="higher",
        within=(0, 1),
        by_chance=(0,),
    )
    saturated: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Positions",
        unit="fraction",
        title="Positions that have saturated",
        caption="By layer, cumulative" + SOURCE.format("figure 6"),
        within=(0, 1),
        by_chance=(0,),
    )
    cosine_to_last: Float64[Tensor, "model residual"] = axes(
        "model",
        "residual",
        label="Cosine similarity to the last layer",
        title="Cosine to the last layer",
        caption="Mean over positions" + SOURCE.format("figure 5"),
        within=(-1, 1),
    )
    exits: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Positions",
        unit="fraction",
        title="Where positions exit",
        caption="Fraction of positions, at one threshold" + SOURCE.format("figure 7"),
        within=(0, 1),
    )
    nc1: Float64[Tensor, "model residual"] = axes(
        "model",
        "residual",
        label="NC1 (variability within / between classes)",
        title="Collapse within classes",
        caption="NC1, lower is more collapsed" + SOURCE.format("figure 16"),
        better="lower",
        scale="log",
        within=(0, math.inf),
    )
    early_share: Float64[Tensor, " model"] = axes(
        "model",
        label="Positions that saturate before the last layer",
        unit="fraction",
        title="Positions that saturate before the last layer",
        within=(0, 1),
        by_chance=(0, 1),
    )
    exit_accuracy: Float64[Tensor, " model"] = axes(
        "model",
        label="Accuracy at the exits",
        unit="fraction",
        title="Accuracy at the exits of each model",
        within=(0, 1),
        by_chance=(0, 1),
    )
    exit_agreement: Float64[Tensor, " model"] = axes(
        "model",
        label="Agreement at the exits",
        unit="fraction",
        title="Agreement of the exits with the last layer",
        within=(0, 1),
        by_chance=(0,),
    )
    speedup: Float64[Tensor, " model"] = axes(
        "model", label="All blocks / blocks run", title="Speed-up of each model", within=(1, math.inf)
    )
    speedup_at_agreement: Float64[Tensor, " model"] = axes(
        "model",
        label="Speed-up at 95 % agreement (all blocks / blocks run)",
        title="Speed-up at 95 % agreement of each model",
        within=None,
    )
    effective_depth: Float64[Tensor, " model"] = axes(
        "model", label="Effective depth", unit="blocks", title="Effective depth of each model", within=None
    )
    models: tuple[str, ...]
    threshold: float
    eps: float
    center: str

    @property
    def cross_entropy(self) -> Tensor:
        """Cross-entropies in nats, `model layer`, the same as `values`."""
        return self.values

    def measured_on(self, field: str) -> str:
        if field not in AT_THRESHOLD:
            return ""
        samples = amount(self.provenance.tokens, "row" if self.provenance.tokens == self.provenance.sequences else "token")
        return f"{samples}, threshold of the top probability: {self.threshold:g}"

    def headline(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for number, name in enumerate(self.models):
            numbers |= {
                f"{name}: perplexity of the last layer": float(self.perplexity[number, -1]),
                f"{name}: accuracy of the last layer": float(self.accuracy[number, -1]),
                f"{name}: saturated before the last layer": float(self.early_share[number]),
                f"{name}: cosine of the first block to the last": float(self.cosine_to_last[number, 1]),
                f"{name}: speed-up in blocks at 95 % agreement": float(self.speedup_at_agreement[number]),
            }
        return numbers


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MetricChange(Result):
    """Metrics of the lens predictions by layer of two classifiers on the same data, see `TaskMetrics`. Tensors are float64.

    Attributes:
        values: `model layer`, the same as `f1`, the mean of the F1 of all classes.
        mcc: `model layer`, Matthews correlation coefficient.
        models: names of the two models.
    """

    file_kind: ClassVar[str] = "metric_change"
    values_name = "f1"
    values: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Macro F1 (0 to 1)",
        title="Macro F1 of each layer",
        caption="Mean over classes of the F1 of the lens predictions" + SOURCE.format("figure 8"),
        better="higher",
        within=(0, 1),
    )
    mcc: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Matthews correlation",
        title="Matthews correlation of each layer",
        caption="Of the lens predictions with the labels (Matthews 1975).",
        better="higher",
        within=(-1, 1),
    )
    models: tuple[str, ...]

    @property
    def f1(self) -> Tensor:
        """Macro F1, `model layer`; the same as `values`."""
        return self.values

    def headline(self) -> dict[str, float]:
        return {
            f"{name}: {metric} of the last layer": float(values[number, -1])
            for number, name in enumerate(self.models)
            for metric, values in (("macro F1", self.values), ("Matthews correlation", self.mcc))
        }


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationQuality(Result):
    """Quality of text that is generated from each layer by nucleus sampling from its lens. Tensors are float64.

    Attributes:
        values: `model layer`, the same as `diversity`: mean over texts of the product over n = 2, 3, 4 of different n-grams of
            tokens over all n-grams; 1 where no n-gram is repeated.
        coherence: `model layer`, mean cosine of the embeddings of prompt and continuation; NaN without an embedder.
        texts: `model layer`, number of continuations that are long enough to count.
        models: names of the two models.
    """

    file_kind: ClassVar[str] = "generation_quality"
    values_name = "diversity"
    values: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Diversity (0 to 1)",
        title="Diversity of text from each layer",
        caption="1 where no n-gram is repeated" + SOURCE.format("C.2"),
        better="higher",
        within=(0, 1),
    )
    coherence: Float64[Tensor, "model layer"] = axes(
        "model",
        "layer",
        label="Cosine similarity",
        title="Coherence with the prompt",
        caption="Cosine of sentence embeddings" + SOURCE.format("C.2, figure 9"),
        better="higher",
        within=(-1, 1),
    )
    texts: Float64[Tensor, "model layer"] = axes(
        "model", "layer", label="Texts that count", title="Texts that count, at each layer", within=(0, math.inf)
    )
    models: tuple[str, ...]

    def headline(self) -> dict[str, float]:
        middle = self.values.shape[1] // 2
        return {
            f"{name}: diversity from block {layer}": float(self.values[number, layer])
            for number, name in enumerate(self.models)
            for layer in (middle, self.values.shape[1] - 1)
        }


def diversity(tokens: list[int]) -> float:
    """Product over n = 2, 3, 4 of the fraction of distinct n-grams in a text of four tokens or more.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix C.2.

    Examples:
        >>> round(diversity([1, 2, 1, 2, 1]), 4)
        0.3333
    """
    product = 1.0
    for n in (2, 3, 4):
        grams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
        product *= len(set(grams)) / len(grams)
    return product


def coherence(before: Tensor, after: Tensor) -> float:
    """Mean cosine of the embeddings `text dimension` of prompts and continuations.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix C.2.
    """
    return float(torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1).mean())
