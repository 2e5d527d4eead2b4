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
from ..analyzers.neural_collapse import NeuralCollapse
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
            last = {f"{name}: {metric} of the last layer": float(values[number, -1]) for metric, values in metrics}
            numbers |= {metric: value for metric, value in last.items() if not math.isnan(value)}
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
    data, models = Data.of(data), (OpenedModel.of(before, "before"), OpenedModel.of(after, "after"))
    refuse_one_model({"before": before, "after": after})
    pair = [open_source(opened, either_stack=True).model for opened in models]
    if len(pair[0].layers) != len(pair[1].layers):
        raise LayersimError(
            f"`before` has {len(pair[0].layers) - 1} blocks and `after` {len(pair[1].layers) - 1}; evaluate_layers needs the "
            "same number. Use compare."
        )
    targets = usual_labels(labels, [(model, opened.model) for model, opened in zip(pair, models, strict=True)], data.source)
    thresholds = tuple(sorted({*THRESHOLDS, float(threshold)}))
    own = [as_heads(one) for one in heads]
    reports, norms = [], ["final" if one is None else one.norm for one in own]
    for opened, one, norm in zip(models, own, norms, strict=True):
        analyzers: list[Analyzer] = [
            LogitLens(norm=norm, labels=targets, heads=one),
            Saturation(norm=norm, heads=one),
            Cosine(center=center),
            ExitCurve(thresholds=thresholds, norm=norm, labels=targets, heads=one),
        ]
        if gives_classes(pair[0]):
            analyzers.append(TaskMetrics(norm=norm, labels=targets, heads=one))
        reports.append(analyze(opened, data, analyzers))
    runs = [report["logit_lens"].provenance for report in reports]
    if runs[0].data != runs[1].data:
        raise LayersimError(
            "`before` and `after` did not read the same tokens, because their tokenizers differ. Use Data(..., tokenizer=...)."
        )
    # The position that the head reads; the last token if the head reads every position.
    pool: Literal["head", "last"] = "last" if pair[0].head is None or pair[0].head.reads == "every" else "head"
    collapse = [_collapse(opened, data, NeuralCollapse(labels=targets, pool=pool)) for opened in models]
    read_by = {"norm": norms, "heads": [None if one is None else str(one) for one in own]}
    both = replace(
        runs[0],
        options=runs[0].options | read_by,
        **{name: JOINT.join(getattr(run, name) for run in runs) for name in ("model", "config_hash", "weights_hash", "source")},
    )
    change = _change(reports, collapse, both, names, float(threshold), float(eps), center)
    results: dict[str, Result] = {"layers": change}
    results |= {"cosine_before": reports[0]["cosine"], "cosine_after": reports[1]["cosine"]}
    if continuations is not None:
        results["generation"] = _quality(list(zip(models, own, strict=True)), continuations, data.tokenizer, change)
    return Report(results)


def _collapse(opened: OpenedModel, data: Data, analyzer: NeuralCollapse) -> Tensor | None:
    """Neural collapse (NC1) of each layer (`residual`). None if the data has fewer than two classes."""
    try:
        nc1: Tensor = analyze(opened, data, [analyzer])["neural_collapse"].values
    except LayersimError as error:
        if "class" not in str(error):
            raise
        warn(f"NC1 is left out: {error}")
        return None
    return nc1


def _change(
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

    def both(values: list[Any]) -> Tensor:
        return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])

    nothing = torch.full((len(lenses[0].layers),), torch.nan)
    metrics = [
        (one["task_metrics"].f1, one["task_metrics"].mcc) if "task_metrics" in one else (nothing[1:],) * 2 for one in reports
    ]
    return LayerChange(
        values=both([lens.values for lens in lenses]),
        perplexity=both([lens.perplexity for lens in lenses]),
        accuracy=both([lens.accuracy for lens in lenses]),
        agreement=both([lens.agreement for lens in lenses]),
        saturated=both([r["saturation"].cumulative / r["saturation"].cumulative[-1] for r in reports]),
        cosine_to_last=both([report["cosine"].values[:, -1] for report in reports]),
        exits=both([point.exits / point.exits.sum() for point in points]),
        nc1=both([nothing if nc1 is None else nc1 for nc1 in collapse]),
        f1=both([f1 for f1, _ in metrics]),
        mcc=both([mcc for _, mcc in metrics]),
        early_share=both([report["saturation"].early_share for report in reports]),
        exit_accuracy=both([point.accuracy for point in points]),
        exit_agreement=both([point.agreement for point in points]),
        speedup=both([point.speedup for point in points]),
        speedup_at_agreement=both([curve.at(curve.threshold_for(agreement=0.95), held_out=True).speedup for curve in curves]),
        effective_depth=both([float(lens.effective_depth(eps)) for lens in lenses]),
        models=names,
        threshold=threshold,
        eps=eps,
        center=center,
        layers=lenses[0].layers,
        provenance=run,
    )


def _quality(
    models: Sequence[tuple[OpenedModel, ExitHeads | None]], given: Continuations, tokenizer: Any, like: LayerChange
) -> GenerationQuality:
    depth, prompts, embed = like.values.shape[1], list(given.prompts), given.embed
    most = depth * len(prompts) * given.new_tokens
    varied, coherent, counted = (torch.full((2, depth), torch.nan, dtype=torch.float64) for _ in range(3))
    with tqdm(total=2 * most, desc="generating", unit="token", disable=None) as bar:
        for number, (opened, heads) in enumerate(models):
            written = EarlyExit(opened, 0.0, at="all", heads=heads).generate_from_layers(
                prompts,
                max_new_tokens=given.new_tokens,
                top_p=float(given.top_p),
                seed=given.seed,
                tokenizer=tokenizer,
                on_tokens=bar.update,
            )
            for layer, rows in enumerate(written):
                kept = [i for i, (tokens, _) in enumerate(rows) if len(tokens) >= SHORTEST]
                counted[number, layer] = len(kept)
                if kept:
                    varied[number, layer] = float(np.mean([diversity(rows[i][0].tolist()) for i in kept]))
                if kept and embed is not None:
                    tables = [embed(texts) for texts in ([prompts[i] for i in kept], [rows[i][1] for i in kept])]
                    coherent[number, layer] = coherence(*(torch.as_tensor(np.asarray(table)) for table in tables))
            # Rows that end early have fewer tokens.
            bar.update((number + 1) * most - bar.n)
    settings = {"new_tokens": given.new_tokens, "top_p": float(given.top_p), "prompts": len(prompts)}
    return GenerationQuality(
        values=varied,
        coherence=coherent,
        texts=counted,
        models=like.models,
        layers=like.layers,
        provenance=replace(like.provenance, options=settings, seed=given.seed),
    )
