"""`evaluate_layers`: measures of every layer of two models side by side, such as before and after a fine-tune."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..analysis.api import analyze
from ..analyzers.base import Analyzer
from ..analyzers.cosine import Cosine
from ..analyzers.exit_curve import THRESHOLDS, ExitCurve
from ..analyzers.logit_lens import LogitLens
from ..analyzers.neural_collapse import NeuralCollapse
from ..analyzers.saturation import Saturation
from ..analyzers.task_metrics import TaskMetrics
from ..core.argument_checks import typed
from ..core.bounds import Fraction, PositiveInt, Probability, Seed
from ..core.errors import LayersimError, warn
from ..core.provenance import Provenance
from ..core.results import Report, Result
from ..data.data import Data
from ..early_exit.api import EarlyExit
from ..early_exit.layer_generation import generate_from_layers
from ..models.exit_heads import ExitHeads, as_heads
from ..models.open import OpenedModel
from ..models.targets import gives_classes, usual_labels
from ..remote.open import open_source
from .layer_evaluation_results import GenerationQuality, LayerChange, MetricChange, coherence, diversity

SHORTEST = 4
Heads: TypeAlias = ExitHeads | str | os.PathLike[str] | None


@typed
@dataclass(frozen=True)
class Continuations:
    """Texts that every layer of the models of `evaluate_layers` continues, and how they are sampled and judged.

    Attributes:
        prompts: the texts.
        new_tokens: largest number of tokens of a continuation.
        top_p: of nucleus sampling.
        embed: turns texts into a table of embeddings `text dimension`, such as `SentenceTransformer(...).encode`; without it no
            coherence is measured.
        seed: of the sampling.

    Examples:
        >>> import tl_layersim as lsim
        >>> pair, text = (lsim.demo_model(), lsim.demo_model(aligned=True)), lsim.demo_text()[:4]
        >>> told = lsim.Continuations(["Once upon a time"], new_tokens=8)
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
    """Compare the layers of two models: lens, saturation, cosine, exits, effective depth and neural collapse, side by side.

    Args:
        before: a model, as in `analyze`; one with as many layers as the other.
        after: the other model.
        data: a `Data`, or raw data: held-out data, not the training data.
        names: of the two models.
        heads: for each model the `ExitHeads` of its layers below the last, or their file; None for the model's own head.
        labels: the targets, see `LogitLens`. Default: next tokens; for a classifier, and for rows without
            tokens that have labels, the data's own.
        threshold: of early exit.
        eps: of the effective depth, see `LogitLensResult.effective_depth`.
        center: see `Cosine`.
        continuations: prompts that each layer of each model continues (Hugging Face language models), such as
            `Continuations(["Once upon a time"])`; None for no generation.

    Returns:
        A `Report` with `"layers"` (`LayerChange`), the whole `"cosine_before"` and `"cosine_after"` (keys that `names` does not
        change), `"task_metrics"` (`MetricChange`) of classifiers, and `"generation"` (`GenerationQuality`) with
        `continuations`. `to_html` writes the page.

    Raises:
        LayersimError: the models differ in depth, or read different tokens.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), figures 5 to 9, 16, appendix C.2.

    Examples:
        >>> import tl_layersim as lsim
        >>> report = lsim.evaluate_layers(lsim.demo_model(), lsim.demo_model(aligned=True), lsim.demo_text()[:8])
        >>> first, second = report["layers"].early_share
        >>> bool(second > first)
        True
    """
    data, models = Data.of(data), (OpenedModel.of(before), OpenedModel.of(after))
    pair = [open_source(opened, either_stack=True).model for opened in models]
    if len(pair[0].layers) != len(pair[1].layers):
        raise LayersimError(
            f"`before` has {len(pair[0].layers) - 1} blocks and `after` {len(pair[1].layers) - 1}; evaluate_layers needs the "
            "same number. Use compare."
        )
    targets = usual_labels(labels, [(model, opened.model) for model, opened in zip(pair, models, strict=True)], data.source)
    thresholds = tuple(sorted({*THRESHOLDS, float(threshold)}))
    own = [as_heads(one) for one in heads]
    for one, model in zip(own, pair, strict=True):
        if one is not None:
            one.check(model)
    reports = [
        analyze(opened, data, _analyzers(targets, thresholds, center, one, gives_classes(pair[0])))
        for opened, one in zip(models, own, strict=True)
    ]
    runs = [report["logit_lens"].provenance for report in reports]
    if runs[0].data != runs[1].data:
        raise LayersimError(
            "`before` and `after` did not read the same tokens, because their tokenizers differ. Use Data(..., tokenizer=...)."
        )
    # What the head reads of a row; the last token if it reads every position.
    pool: Literal["head", "last"] = "last" if pair[0].head is None or pair[0].head.reads == "every" else "head"
    collapse = [_collapse(opened, data, NeuralCollapse(labels=targets, pool=pool)) for opened in models]
    read_by = {"norm": [_norm(one) for one in own], "heads": [None if one is None else str(one) for one in own]}
    both = replace(
        runs[0],
        options=runs[0].options | read_by,
        **{name: _both(runs, name) for name in ("model", "config_hash", "weights_hash", "source")},
    )
    change = _change(reports, collapse, both, names, float(threshold), float(eps), center)
    results: dict[str, Result] = {"layers": change}
    results |= {"cosine_before": reports[0]["cosine"], "cosine_after": reports[1]["cosine"]}
    if "task_metrics" in reports[0]:
        results["task_metrics"] = _metric_change(reports, change)
    if continuations is not None:
        results["generation"] = _quality(list(zip(models, own, strict=True)), continuations, data.tokenizer, change)
    return Report(results)


def _analyzers(
    targets: Any,
    thresholds: tuple[float, ...],
    center: Literal["dataset", "none"],
    heads: ExitHeads | None,
    classifies: bool,
) -> list[Analyzer]:
    """The analyzers of one model, whose layers are read as its heads were trained."""
    norm = _norm(heads)
    return [
        LogitLens(norm=norm, labels=targets, heads=heads),
        Saturation(norm=norm, heads=heads),
        Cosine(center=center),
        ExitCurve(thresholds=thresholds, norm=norm, labels=targets, heads=heads),
        *([TaskMetrics(norm=norm, labels=targets, heads=heads)] if classifies else []),
    ]


def _norm(heads: ExitHeads | None) -> Literal["final", "none"]:
    """The norm with which the layers of a model are read."""
    return "final" if heads is None else heads.norm


def _both(runs: list[Provenance], name: str) -> str:
    return " | ".join(getattr(run, name) for run in runs)


def _collapse(opened: OpenedModel, data: Data, analyzer: NeuralCollapse) -> Tensor | None:
    """NC1 by layer; None if the data has fewer than two classes."""
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

    size = len(lenses[0].layers)
    return LayerChange(
        values=both([lens.values for lens in lenses]),
        perplexity=both([lens.perplexity for lens in lenses]),
        accuracy=both([lens.accuracy for lens in lenses]),
        agreement=both([lens.agreement for lens in lenses]),
        saturated=both([r["saturation"].cumulative / r["saturation"].cumulative[-1] for r in reports]),
        cosine_to_last=both([report["cosine"].values[:, -1] for report in reports]),
        exits=both([point.exits / point.exits.sum() for point in points]),
        nc1=both([torch.full((size,), torch.nan) if nc1 is None else nc1 for nc1 in collapse]),
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


def _metric_change(reports: list[Report], like: LayerChange) -> MetricChange:
    """The task metrics of both models."""
    metrics = [report["task_metrics"] for report in reports]
    return MetricChange(
        values=torch.stack([one.f1 for one in metrics]),
        mcc=torch.stack([one.mcc for one in metrics]),
        models=like.models,
        layers=like.layers,
        provenance=like.provenance,
    )


def _quality(
    models: Sequence[tuple[OpenedModel, ExitHeads | None]], given: Continuations, tokenizer: Any, like: LayerChange
) -> GenerationQuality:
    """Diversity and coherence of continuations from each layer of two models, each with the heads of its layers."""
    depth, prompts, embed = like.values.shape[1], list(given.prompts), given.embed
    most = depth * len(prompts) * given.new_tokens
    varied, coherent, counted = (torch.full((2, depth), torch.nan, dtype=torch.float64) for _ in range(3))
    with tqdm(total=2 * most, desc="generating", unit="token", disable=None) as bar:
        for number, (opened, heads) in enumerate(models):
            early = EarlyExit(opened, 0.0, at="all", heads=heads)
            written = generate_from_layers(
                early,
                prompts,
                max_new_tokens=given.new_tokens,
                top_p=float(given.top_p),
                seed=given.seed,
                tokenizer=tokenizer,
                on_tokens=bar.update,
            )
            for layer, rows in enumerate(written):
                kept = [i for i, row in enumerate(rows) if len(row.tokens) >= SHORTEST]
                counted[number, layer] = len(kept)
                if kept:
                    varied[number, layer] = float(np.mean([diversity(rows[i].tokens.tolist()) for i in kept]))
                if kept and embed is not None:
                    tables = [embed(texts) for texts in ([prompts[i] for i in kept], [rows[i].text for i in kept])]
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
