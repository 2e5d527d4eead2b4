"""`evaluate_layers`: evaluate every layer of two models on the same data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from ..analyzers.analyzer import Analyzer
from ..analyzers.cosine import Cosine
from ..analyzers.exit_curve import THRESHOLDS, ExitCurve
from ..analyzers.logit_lens import LogitLens
from ..analyzers.neural_collapse import NeuralCollapse, UndefinedCollapseError
from ..analyzers.saturation import Saturation
from ..analyzers.task_metrics import TaskMetrics
from ..core.arguments import FilePath, Fraction, PositiveInt, Probability, Seed, typed
from ..core.errors import LayersimError, warn
from ..core.result_declarations import JOINT, Provenance, result_class
from ..core.results import Report, Result, axes
from ..core.wording import amount
from ..data.data import Data
from ..early_exit.early_exit import EarlyExit
from ..engine.analyze_and_compare import analyze
from ..lens.exit_heads import ExitHeads, as_heads
from ..lens.targets import gives_classes, usual_labels
from ..remote.open_model import open_source
from ..sources.open_local import OpenedModel
from ..sources.shared_modules import refuse_one_model

# Fields of `LayerChange` that depend on its threshold.
AT_THRESHOLD = ("exits", "exit_accuracy", "exit_agreement", "speedup")
SOURCE = " (Jiang, Zhou and Zhu 2024, {})."


@result_class
class LayerChange(Result):
    """Measures of each layer of two models on the same data. Tensors are float64.

    Attributes:
        values: `model layer`, the same as `cross_entropy`: cross-entropy of the logit lens in nats.
        perplexity: `model layer`, exp of the cross-entropy.
        accuracy: `model layer`, top-1 accuracy of the logit lens.
        agreement: `model layer`, fraction of positions with the same prediction as the last layer.
        saturated: `model layer`, fraction of positions whose prediction does not change after this layer.
        cosine_to_last: `model residual`, mean cosine to the output of the last block at the positions that the head reads:
            [CLS] or the last token for a classifier of rows, every token for a language model. `center` sets the centring.
        exits: `model layer`, fraction of positions that exit after each block at `threshold`.
        nc1: `model residual`, within-class collapse (see `NeuralCollapse`) of a classifier of rows at the position that the
            head reads; NaN if the data has fewer than two classes, or all classes have the same mean.
        f1: `model layer`, macro F1 of classifiers, the mean over classes (see `TaskMetrics`); NaN for other models.
        mcc: `model layer`, Matthews correlation coefficient of classifiers; NaN for other models.
        early_share: `model`, fraction of positions that saturate before the last layer.
        exit_accuracy: `model`, accuracy of early exit at `threshold`.
        exit_agreement: `model`, agreement of early exit at `threshold` with the full model.
        speedup: `model`, blocks of the whole model over blocks run at `threshold`; checks are not counted.
        speedup_at_agreement: `model`, speed-up at the lowest measured threshold that, like all higher ones, has an agreement of
            95 %.
        effective_depth: `model`, smallest number of blocks with accuracy 1 - `eps`; all blocks if none reaches it.
        models: names of the two models.
        threshold: exit threshold of the top probability.
        eps: tolerated error of the effective depth.
        center: centring of the cosines, see `Cosine`.
    """

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
    f1: Float64[Tensor, "model layer"] = axes(
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
        """Cross-entropies in nats (`model layer`); the same tensor as `values`."""
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
            metrics = (("macro F1", self.f1), ("Matthews correlation", self.mcc))
            for metric, values in metrics:
                last = float(values[number, -1])
                # Models other than classifiers have no F1 and no Matthews correlation.
                if not math.isnan(last):
                    numbers[f"{name}: {metric} of the last layer"] = last
        return numbers


@result_class
class GenerationQuality(Result):
    """Quality of text that is sampled from the logit lens of each layer. Tensors are float64.

    Attributes:
        values: `model layer`, the same as `diversity`: mean over texts of the function `diversity`; 1 if no n-gram is repeated.
        coherence: `model layer`, mean cosine between the embeddings of prompt and continuation; NaN without an embedder.
        texts: `model layer`, number of continuations that are long enough to count.
        models: names of the two models.
    """

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
    """Diversity of a text of four tokens or more: the product over n = 2, 3, 4 of the fraction of distinct n-grams.

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
    """Mean cosine between the embeddings of prompts and those of their continuations (both `text dimension`).

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix C.2.
    """
    return float(torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1).mean())


# Shortest continuation, in tokens, that has an n-gram of each length that `diversity` counts.
SHORTEST = 4
Heads: TypeAlias = ExitHeads | FilePath | None


@typed
@dataclass(frozen=True)
class Continuations:
    """Prompts and sampling settings for the generation in `evaluate_layers`.

    Attributes:
        prompts: the prompts.
        new_tokens: maximum number of new tokens.
        top_p: probability mass of nucleus sampling.
        embed: function from texts to embeddings `text dimension`, such as `SentenceTransformer(...).encode`; None to skip
            coherence.
        seed: seed of the sampling.

    Examples:
        >>> import tl_layersim as lsim
        >>> pair, text = (lsim.demo_model(), lsim.demo_model(aligned=True)), lsim.demo_text()[:4]
        >>> told = lsim.training.Continuations(["Once upon a time"], new_tokens=8)
        >>> lsim.evaluate_layers(*pair, text, continuations=told)["generation"].values.shape
        torch.Size([2, 8])
    """

    prompts: Sequence[str]
    _: KW_ONLY
    new_tokens: PositiveInt = 64
    top_p: Fraction = 0.95
    embed: Callable[[list[str]], Any] | None = None
    seed: Seed = 0


@typed
def evaluate_layers(
    before: Any,
    after: Any,
    data: Any,
    *,
    names: tuple[str, str] = ("before", "after"),
    heads: tuple[Heads, Heads] = (None, None),
    labels: Any = None,
    threshold: Probability = 0.9,
    eps: Probability = 0.1,
    center: Literal["dataset", "none"] = "dataset",
    continuations: Continuations | None = None,
) -> Report:
    """Evaluate each layer of two models on the same data.

    Args:
        before: a model, as in `analyze`. Both models must have the same number of layers.
        after: the other model.
        data: a `Data`, or raw data: held-out data, not the training data.
        names: names of the two models.
        heads: `ExitHeads` of the layers below the last, or their file, for each model; None for the model's own head.
        labels: the targets, see `LogitLens`. Default: next tokens; for a classifier, and for rows without
            tokens that have labels, the data's own.
        threshold: exit threshold of the top probability.
        eps: tolerated error of the effective depth, see `LogitLensResult.effective_depth`.
        center: see `Cosine`.
        continuations: prompts that each layer of each model continues (Hugging Face language models), such as
            `Continuations(["Once upon a time"])`; None for no generation.

    Returns:
        A `Report` with `"layers"` (`LayerChange`), `"cosine_before"` and `"cosine_after"` (whatever `names` is), and
        `"generation"` (`GenerationQuality`) with `continuations`. `to_html` writes the page.

    Raises:
        LayersimError: the models have different depths, or read different tokens.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), figures 5 to 9, 16, appendix C.2.

    Examples:
        >>> import tl_layersim as lsim
        >>> report = lsim.evaluate_layers(lsim.demo_model(), lsim.demo_model(aligned=True), lsim.demo_text()[:8])
        >>> first, second = report["layers"].early_share
        >>> bool(second > first)
        True
    """
    data = Data.of(data)
    models = (OpenedModel.of(before, "before"), OpenedModel.of(after, "after"))
    refuse_one_model({"before": before, "after": after})
    descriptions = [open_source(opened, either_stack=True).model for opened in models]
    layers_before = len(descriptions[0].layers)
    layers_after = len(descriptions[1].layers)
    if layers_before != layers_after:
        raise LayersimError(
            f"`before` has {layers_before - 1} blocks and `after` {layers_after - 1}; evaluate_layers needs the "
            "same number. Use compare."
        )
    described_modules = [(model, opened.model) for model, opened in zip(descriptions, models, strict=True)]
    targets = usual_labels(labels, described_modules, data.source)
    thresholds = tuple(sorted({*THRESHOLDS, float(threshold)}))
    heads_of_models = [as_heads(argument) for argument in heads]
    norms = ["final" if exit_heads is None else exit_heads.norm for exit_heads in heads_of_models]
    reports = []
    for opened, exit_heads, norm in zip(models, heads_of_models, norms, strict=True):
        analyzers: list[Analyzer] = [
            LogitLens(norm=norm, labels=targets, heads=exit_heads),
            Saturation(norm=norm, heads=exit_heads),
            Cosine(center=center),
            ExitCurve(thresholds=thresholds, norm=norm, labels=targets, heads=exit_heads),
        ]
        if gives_classes(descriptions[0]):
            analyzers.append(TaskMetrics(norm=norm, labels=targets, heads=exit_heads))
        reports.append(analyze(opened, data, analyzers))
    runs = [report["logit_lens"].provenance for report in reports]
    if runs[0].data != runs[1].data:
        raise LayersimError(
            "`before` and `after` did not read the same tokens, because their tokenizers differ. Use Data(..., tokenizer=...)."
        )
    # The position that the head reads; the last token if the head reads every position.
    head = descriptions[0].head
    pool: Literal["head", "last"] = "last" if head is None or head.reads == "every" else "head"
    collapse = [_neural_collapse(opened, data, NeuralCollapse(labels=targets, pool=pool)) for opened in models]
    lens_options = {"norm": norms, "heads": [None if exit_heads is None else str(exit_heads) for exit_heads in heads_of_models]}
    identity_fields = ("model", "config_hash", "weights_hash", "source")
    joint_run = replace(
        runs[0],
        options=runs[0].options | lens_options,
        **{field: JOINT.join(getattr(run, field) for run in runs) for field in identity_fields},
    )
    change = _layer_change(reports, collapse, joint_run, names, float(threshold), float(eps), center)
    results: dict[str, Result] = {
        "layers": change,
        "cosine_before": reports[0]["cosine"],
        "cosine_after": reports[1]["cosine"],
    }
    if continuations is not None:
        models_with_heads = list(zip(models, heads_of_models, strict=True))
        results["generation"] = _generation_quality(models_with_heads, continuations, data.tokenizer, change)
    return Report(results)


def _neural_collapse(opened: OpenedModel, data: Data, analyzer: NeuralCollapse) -> Tensor | None:
    """Neural collapse (NC1) of each layer (`residual`). None if the data has fewer than two classes."""
    try:
        nc1: Tensor = analyze(opened, data, [analyzer])["neural_collapse"].values
    except UndefinedCollapseError as error:
        warn(f"NC1 is left out: {error}")
        return None
    return nc1


def _layer_change(
    reports: list[Report],
    collapse: list[Tensor | None],
    run: Provenance,
    names: tuple[str, str],
    threshold: float,
    eps: float,
    center: str,
) -> LayerChange:
    lenses = [report["logit_lens"] for report in reports]
    curves = [report["exit_curve"] for report in reports]
    points = [curve.at(threshold) for curve in curves]

    def by_model(values: list[Any]) -> Tensor:
        return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])

    undefined = torch.full((len(lenses[0].layers),), torch.nan)
    f1 = []
    mcc = []
    for report in reports:
        if "task_metrics" in report:
            f1.append(report["task_metrics"].f1)
            mcc.append(report["task_metrics"].mcc)
        else:
            # `layers` has L + 1 residual sites, and these metrics have L layers.
            f1.append(undefined[1:])
            mcc.append(undefined[1:])
    saturations = [report["saturation"] for report in reports]
    at_agreement = [curve.at(curve.threshold_for(agreement=0.95), held_out=True) for curve in curves]
    return LayerChange(
        values=by_model([lens.values for lens in lenses]),
        perplexity=by_model([lens.perplexity for lens in lenses]),
        accuracy=by_model([lens.accuracy for lens in lenses]),
        agreement=by_model([lens.agreement for lens in lenses]),
        saturated=by_model([saturation.cumulative / saturation.cumulative[-1] for saturation in saturations]),
        cosine_to_last=by_model([report["cosine"].values[:, -1] for report in reports]),
        exits=by_model([point.exits / point.exits.sum() for point in points]),
        nc1=by_model([undefined if nc1 is None else nc1 for nc1 in collapse]),
        f1=by_model(f1),
        mcc=by_model(mcc),
        early_share=by_model([saturation.early_share for saturation in saturations]),
        exit_accuracy=by_model([point.accuracy for point in points]),
        exit_agreement=by_model([point.agreement for point in points]),
        speedup=by_model([point.speedup for point in points]),
        speedup_at_agreement=by_model([point.speedup for point in at_agreement]),
        effective_depth=by_model([float(lens.effective_depth(eps)) for lens in lenses]),
        models=names,
        threshold=threshold,
        eps=eps,
        center=center,
        layers=lenses[0].layers,
        provenance=run,
    )


def _generation_quality(
    models: Sequence[tuple[OpenedModel, ExitHeads | None]], continuations: Continuations, tokenizer: Any, change: LayerChange
) -> GenerationQuality:
    depth = change.values.shape[1]
    prompts = list(continuations.prompts)
    embed = continuations.embed
    tokens_per_model = depth * len(prompts) * continuations.new_tokens
    diversities = torch.full((2, depth), torch.nan, dtype=torch.float64)
    coherences = torch.full((2, depth), torch.nan, dtype=torch.float64)
    text_counts = torch.full((2, depth), torch.nan, dtype=torch.float64)
    with tqdm(total=2 * tokens_per_model, desc="generating", unit="token", disable=None) as bar:
        for number, (opened, heads) in enumerate(models):
            generated = EarlyExit(opened, 0.0, at="all", heads=heads).generate_from_layers(
                prompts,
                max_new_tokens=continuations.new_tokens,
                top_p=float(continuations.top_p),
                seed=continuations.seed,
                tokenizer=tokenizer,
                on_tokens=bar.update,
            )
            for layer, rows in enumerate(generated):
                long_rows = [i for i, (tokens, _) in enumerate(rows) if len(tokens) >= SHORTEST]
                text_counts[number, layer] = len(long_rows)
                if not long_rows:
                    continue
                diversities[number, layer] = float(np.mean([diversity(rows[i][0].tolist()) for i in long_rows]))
                if embed is not None:
                    prompt_embeddings = embed([prompts[i] for i in long_rows])
                    text_embeddings = embed([rows[i][1] for i in long_rows])
                    coherences[number, layer] = coherence(
                        torch.as_tensor(np.asarray(prompt_embeddings)), torch.as_tensor(np.asarray(text_embeddings))
                    )
            # Rows that end early have fewer tokens.
            bar.update((number + 1) * tokens_per_model - bar.n)
    settings = {
        "new_tokens": continuations.new_tokens,
        "top_p": float(continuations.top_p),
        "prompts": len(prompts),
    }
    return GenerationQuality(
        values=diversities,
        coherence=coherences,
        texts=text_counts,
        models=change.models,
        layers=change.layers,
        provenance=replace(change.provenance, options=settings, seed=continuations.seed),
    )
