"""The logit lens: predictions of each layer by the final norm and unembedding, compared with targets and the last layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.norms import beyond_rounding, unit_vectors
from ..activations.view import Kernel, View, targets
from ..architectures.unembed import LayerHeads
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, result_class, typed, without_nan
from ..core.arguments import FilePath, PositiveFloat, Probability
from ..core.intervals import with_margin
from ..core.result_declarations import NOT_MEASURED, last_entry
from ..core.site_names import site_in_words
from ..core.wording import brief
from ..data.batches import Batch
from ..data.labels import NO_LABEL, is_none, label_key, warn_of_unused
from ..data.positions import PositionRule
from ..lens.exit_heads import ExitHeads, as_heads
from ..lens.single_tokens import as_tokens, has_rows, refuse_rows, token_ids
from ..lens.statistics import bad_logits, ids_at, read_lens, read_positions, read_vectors
from ..sources.activation_checks import need_known_norm, refuse_bad_logits
from ..sources.model_description import ModelDescription
from .analyzer import JIANG, Analyzer, LabelledAnalyzer, Run, need_head, need_tokens
from .cosine import mean_kernel
from .needs import Needs

# Agreement from which on the prediction of a layer is mostly that of the last one.
SETTLED = 0.5


@typed
@dataclass(frozen=True, eq=False)
class LensAnalyzer(LabelledAnalyzer):
    """Base class of analyzers that apply an output head to each layer.

    Args:
        norm: see `LogitLens`, as for all options.
        lens_memory_mb: see `LogitLens`.
        heads: see `LogitLens`.
    """

    optional_labels: ClassVar[bool] = True

    norm: Literal["final", "none"] = "final"
    lens_memory_mb: PositiveFloat = 128
    heads: ExitHeads | FilePath | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", as_heads(self.heads, self.norm))

    @property
    def needs(self) -> Needs:
        return replace(super().needs, head="logits")

    def check(self, *models: ModelDescription) -> None:
        need_head(models[0], type(self).__name__, targets=not is_none(self.labels), own_labels=self.needs.own_labels)
        if self.norm == "none":
            need_known_norm(models[0])
        if isinstance(self.heads, ExitHeads):
            self.heads.check(models[0])

    @property
    def lens(self) -> dict[str, Any]:
        """A dict of keyword arguments for kernels: norm, memory limit and heads of the lens."""
        return {
            "normed": self.norm == "final",
            "memory_mb": float(self.lens_memory_mb),
            "heads": self.heads.plain if isinstance(self.heads, ExitHeads) else None,
        }

    def check_sums(self, sums: Sums, run: Run, targets: int = 1) -> None:
        """Raise an error if labels are missing or logits are not finite; warn of unused labels.

        Positions of a text without a next token, such as the last one, have predictions: only means over targets are NaN.

        Args:
            sums: sums over all batches.
            run: the finished run.
            targets: number of positions with a target.
        """
        warn_of_unused(self.labels, run.provenance)
        refuse_bad_logits(sums["bad"], run.layers)
        if not (isinstance(self.labels, str) and self.labels in ("none", "next_token")):
            need_tokens(targets, 1, type(self).__name__, "positions with a target")

    def unembedding(self, run: Run) -> str:
        """Text of the formula from a residual x to logits; with `heads`, the formula for the layers below the last."""
        if run.head is None:
            return ""
        head = run.head if self.heads is None else replace(run.head, parts=(*run.head.parts[:-1], "heads[layer]"))
        return head.written(self.norm == "final")


def _targets(result: LogitLensResult) -> Tensor:
    """Number of positions with a target."""
    return torch.tensor(float(result.targets), dtype=torch.float64)


@result_class
class LogitLensResult(Result):
    """Loss, accuracy, agreement and entropy of the logit lens at each block. Float64, in nats.

    Attributes:
        values: `layer`, the same as `cross_entropy`: mean of -ln p(target) over positions with a target.
        perplexity: `layer`, exp of the cross-entropy.
        accuracy: `layer`, fraction of positions with a target whose most likely token is the target.
        top_k_accuracy: `k layer`, fraction of positions whose target is among the k most likely tokens. Of equal logits, the
            lower token id counts as more likely.
        target_probability: `layer`, mean p(target).
        agreement: `layer`, fraction of all positions whose most likely token is the last layer's.
        kl_to_final: `layer`, mean KL(last layer || this layer); exactly 0 at the last layer.
        entropy: `layer`, mean entropy of the predicted distribution.
        step_share: `layer`, fraction of positions with a target for which p(target) rises strictly at the step to this layer
            (equation 4 of the paper). NaN at the first layer.
        step_share_if_closer: `layer`, the same among the positions whose cosine to the last layer rises at this step, for which
            theorem 2.2 predicts 1. NaN without such positions.
        lost_share: `layer`, fraction of positions with a target at which this layer predicts the target and a later one does
            not. 0 if predictions that are correct stay so, as the paper says of saturation.
        monotone_share: fraction of positions with a target for which p(target) rises strictly at every block after the first.
        rank: `layer`, mean over all positions of the rank of the token in `ranks`: 1 + the number of tokens with a strictly
            larger logit, so that 1 is the most likely token, and tokens with equal logits share the better rank. NaN without
            `ranks`, as for the next two.
        reciprocal_rank: `layer`, mean of 1 / rank. A few positions of very large rank decide the mean rank, but hardly change
            this mean.
        ranked_probability: `layer`, mean probability of the token in `ranks`.
        ks: the values of k in `top_k_accuracy`.
        positions: number of positions.
        targets: number of positions with a target.
        unembedding: the map from the residual x to logits; with `norm="none"` or `heads`, the map below the last layer.
    """

    cross_entropy = ValuesAlias()
    values: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Cross-entropy",
        unit="nats",
        title="Cross-entropy of each layer's prediction",
        caption="In nats, against the target, with the final norm and unembedding applied after that block "
        + JIANG.format("figure 9 b"),
        better="lower",
        within=(0, math.inf),
    )
    perplexity: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Perplexity",
        title="Perplexity of the lens at each layer",
        better="lower",
        scale="log",
        within=(1, math.inf),
    )
    accuracy: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Accuracy",
        unit="fraction",
        title="Accuracy of the lens at each layer",
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
        units=_targets,
    )
    top_k_accuracy: Float64[Tensor, "k layer"] = axes(
        "k",
        "layer",
        label="Accuracy",
        unit="fraction",
        title="Accuracy of each layer's prediction",
        caption="Fraction of positions whose target is among the layer's k most likely tokens "
        + JIANG.format("equation 2 and figure 2 a-b"),
        within=(0, 1),
        by_chance=(0, 1),
        units=_targets,
    )
    target_probability: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Probability",
        title="Probability of the target",
        caption="Theorem 2.2 predicts a rise at every layer " + JIANG.format("section 2.2"),
        within=(0, 1),
    )
    agreement: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Agreement",
        unit="fraction",
        title="Agreement with the final prediction",
        caption="Fraction of positions at which the layer's most likely token is the last layer's "
        + JIANG.format("section 2.2"),
        better="higher",
        within=(0, 1),
        by_chance=(0, 1),
        certain=last_entry,
    )
    kl_to_final: Float64[Tensor, " layer"] = axes(
        "layer",
        label="KL divergence",
        unit="nats",
        title="KL divergence from the last layer",
        caption="KL(last layer || this layer) in nats. The logit lens is by nostalgebraist (2020), this measure by "
        "Belrose et al. 2023.",
        within=(0, math.inf),
    )
    entropy: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Entropy",
        unit="nats",
        title="Entropy of each layer's prediction",
        caption="In nats; low where a layer is confident, whether it is right or wrong (Aubry et al. 2025, figure 24, row 4).",
        within=(0, math.inf),
    )
    step_share: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Positions",
        unit="fraction",
        title="Positions at which the target becomes more likely",
        within=(0, 1),
        by_chance=(0, 1),
        units=_targets,
    )
    step_share_if_closer: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Positions",
        unit="fraction",
        title="Where the residual comes closer to the last layer",
        caption="Fraction of the positions whose cosine to the last layer rises at which the target becomes more likely too. "
        "Theorem 2.2 predicts 1 " + JIANG.format("section 2.2"),
        within=(0, 1),
        by_chance=(0, 1),
    )
    lost_share: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Positions",
        unit="fraction",
        title="Correct predictions that a later layer loses",
        within=(0, 1),
        by_chance=(0, 1),
        certain=last_entry,
        units=_targets,
    )
    monotone_share: Float64[Tensor, ""] = axes(within=(0, 1), by_chance=(0, 1), units=_targets)
    rank: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Mean rank (1: most likely)",
        title="Rank of the given token",
        caption="1 + the number of tokens with a larger logit, mean over positions (nostalgebraist 2020).",
        better="lower",
        scale="log",
        default=NOT_MEASURED,
        within=(1, math.inf),
    )
    reciprocal_rank: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Mean of 1 / rank",
        title="Reciprocal rank of the given token",
        default=NOT_MEASURED,
        within=(0, 1),
        by_chance=(0, 1),
    )
    ranked_probability: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Probability",
        title="Probability of the given token",
        caption="Mean over positions of the probability of the token in `ranks`.",
        default=NOT_MEASURED,
        within=(0, 1),
    )
    ks: tuple[int, ...]
    positions: int
    targets: int
    unembedding: str

    @typed
    def effective_depth(self, eps: Probability) -> int:
        r"""Smallest number of blocks after which accuracy is at least 1 - eps; all blocks if no layer reaches that value.

        $$d^\epsilon = \min \{ l : \mathrm{Acc}^{(l)} \ge 1 - \epsilon \}$$

        Args:
            eps: largest error rate, 0 to 1.

        Raises:
            LayersimError: no position has a target, so that there is no accuracy.

        Source:
            Jiang, Zhou and Zhu 2024, definition 3.1.
        """
        if not self.targets:
            raise LayersimError(
                f"effective_depth({eps:g}) needs an accuracy, and none of the {self.positions} positions has a target. Count "
                "positions with a next token, or pass labels= to LogitLens."
            )
        reached = (self.accuracy >= 1 - eps).nonzero()[:, 0]
        blocks = self._blocks_run()
        return blocks[int(reached[0])] if len(reached) else blocks[-1]

    def headline(self) -> dict[str, float]:
        middle = len(self.values) // 2
        block = site_in_words(self.layers[1:][middle])
        return without_nan(
            {
                "accuracy of the last layer": self.accuracy[-1],
                f"accuracy after {block}": self.accuracy[middle],
                "perplexity of the last layer": self.perplexity[-1],
                f"agreement of {block} with the last": self.agreement[middle],
                "positions that rise at every block (fraction)": self.monotone_share,
                "mean rank of the given token at the last layer": self.rank[-1],
                f"mean rank of the given token after {block}": self.rank[middle],
            }
        )

    def finding(self) -> str:
        not_settled = (self.agreement < SETTLED).nonzero()[:, 0]
        first = int(not_settled[-1]) + 1 if len(not_settled) else 0
        if not 0 < first < len(self.values):
            return ""
        agreement = with_margin(self, lambda result: result.agreement[first], percent=True)
        correct = with_margin(self, lambda result: result.accuracy[-1], percent=True)
        where = site_in_words(self.layers[1:][first])
        accuracy = "" if math.isnan(float(self.accuracy[-1])) else f"; the last layer predicts {correct} of the targets"
        if first == len(self.values) - 1:
            return f"No block before the last gives the final prediction at {100 * SETTLED:.0f} % of the positions{accuracy}."
        return f"From {where} on, the prediction is mostly the last layer's ({agreement} of the positions there){accuracy}."

    def _blocks_run(self) -> list[int]:
        """Number of blocks run up to each layer, including a block of which only the attention has run."""
        blocks = [name.rpartition(".")[0] for name in self.layers[1:]]
        if not any(name.endswith(".hook_resid_mid") for name in self.layers):
            return list(range(1, len(blocks) + 1))
        order = {block: number for number, block in enumerate(dict.fromkeys(blocks), start=1)}
        return [order[block] for block in blocks]


@typed
@dataclass(frozen=True, eq=False)
class LogitLens(LensAnalyzer):
    r"""Logit lens: loss, accuracy, agreement and entropy of each layer's predictions by the final norm and unembedding.

    $$\mathrm{logits}^{(l)} = W_U \, \mathrm{norm}(x^l), \qquad
    \mathrm{CE}^{(l)} = -\frac{1}{N} \sum_t \ln \mathrm{softmax}(\mathrm{logits}^{(l)}_t)_{y_t}$$

    with the model's own final norm, unembedding, logit scaling and soft-cap. On the first row of a run, the lens at the last
    layer is checked against the model's own logits. Logits are computed in the model's dtype, for all blocks of a few tokens
    at a time, and reduced in float64.

    Args:
        norm: "final" applies the model's final norm to every layer (Geva et al. 2022, the usual definition); "none" to the last
            layer only (Jiang, Zhou and Zhu's code). The choice changes all results, see docs/lens.md.
        top_k: the k of top-k accuracy.
        labels: the targets. "next_token": the following token; fields that need a target are NaN if no counted position has
            one, as at `positions="last"`. "data": the data's own column `labels` or `label`. Or a tensor,
            `row` or `row pos`. A label is the target at its own position and is not shifted. -100 marks a position without a
            target. "none" measures agreement, KL divergence and entropy only; fields that need a target are NaN.
        center: centring for the cosine in `step_share_if_closer`. "none" takes raw residuals; "dataset" subtracts each layer's
            mean over all counted tokens, as the paper and `Cosine()` do, which takes a first pass over the data.
        lens_memory_mb: megabytes for the logits of one chunk of tokens; at least one token at all layers is computed.
        heads: `ExitHeads` of the layers below the last, or their file; None for the model's own head at every layer.
        ranks: a token whose rank and probability are measured at every counted position, such as " Paris": the text of one
            token, its id, or a list of these with one for each row of the data. With `Data(texts, positions="last")` it is
            the rank of an answer. Independent of `labels`.

    Source:
        nostalgebraist 2020; Geva et al. 2022; Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 2, theorem 2.2,
        definition 3.1, figures 2 and 9.

    Examples:
        The last layer's predictions are the model's own.

        >>> import tl_layersim as lsim
        >>> lens = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.LogitLens()])["logit_lens"]
        >>> float(lens.agreement[-1]), float(lens.kl_to_final[-1]), bool(lens.accuracy[-1] > lens.accuracy[0])
        (1.0, 0.0, True)

        The rank of an answer after each block.

        >>> data = lsim.Data("Once upon a time there was a little", positions="last")
        >>> lens = lsim.analyze(lsim.demo_model(), data, lsim.LogitLens(ranks=" dog"))["logit_lens"]
        >>> int(lens.rank[3]), int(lens.rank[-1])
        (36, 4)
    """

    name: ClassVar[str] = "logit_lens"

    top_k: int | tuple[int, ...] | list[int] = (1, 5)
    labels: Any = "next_token"
    center: Literal["none", "dataset"] = "none"
    ranks: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ranks", as_tokens(self.ranks, "ranks"))
        ks = (self.top_k,) if isinstance(self.top_k, int) else tuple(self.top_k)
        object.__setattr__(self, "top_k", ks)
        if not ks or min(ks) < 1:
            raise LayersimError(f"`top_k` is {brief(self.top_k)}; it must be one or more numbers, each at least 1.")

    @property
    def needs(self) -> Needs:
        return replace(
            super().needs,
            sites="stream",
            resid_mid=True,
            single_texts=has_rows(self.ranks),
            one_pass='LogitLens(center="none")',
        )

    def first_kernel(self) -> Kernel | None:
        return mean_kernel if self.center == "dataset" else None

    def settled(self, model: ModelDescription, positions: PositionRule | None) -> Analyzer:
        return replace(self, ranks=token_ids(self.ranks, model, "ranks"))

    def check_batch(self, batch: Batch, model: ModelDescription) -> None:
        super().check_batch(batch, model)
        if isinstance(self.ranks, Tensor):
            refuse_rows(self.ranks, batch, "ranks")

    def kernel(self, first: Sums) -> Kernel:
        mean = first["total"] / first["count"] if first else None
        ks = cast(tuple[int, ...], self.top_k)
        return partial(lens_kernel, ks=ks, labels=self.labels, mean=mean, ranks=self.ranks, **self.lens)

    def compute(self, sums: Sums, run: Run) -> LogitLensResult:
        count = int(sums["count"])
        targets = int(sums["targets"])
        self.check_sums(sums, run, targets)
        if isinstance(self.ranks, Tensor):
            warn_of_unused(self.ranks, run.provenance, "ranks")
        # Without targets, 0 / 0 is NaN.
        cross_entropy = -sums["log_prob"] / targets
        unknown = torch.full_like(cross_entropy, math.nan)
        has_ranks = self.ranks is not None
        return LogitLensResult(
            values=cross_entropy,
            perplexity=cross_entropy.exp(),
            accuracy=sums["correct"].double() / targets,
            top_k_accuracy=sums["top_k"].double() / targets,
            target_probability=sums["prob"] / targets,
            agreement=sums["agree"].double() / count,
            kl_to_final=sums["kl"] / count,
            entropy=sums["entropy"] / count,
            step_share=_prepend_nan(sums["steps"].double() / targets),
            step_share_if_closer=_prepend_nan(sums["steps closer"].double() / sums["closer"]),
            lost_share=sums["lost"].double() / targets,
            monotone_share=sums["rising"].double() / targets,
            rank=sums["rank"].double() / count if has_ranks else unknown,
            reciprocal_rank=sums["reciprocal rank"] / count if has_ranks else unknown,
            ranked_probability=sums["rank prob"] / count if has_ranks else unknown,
            ks=cast(tuple[int, ...], self.top_k),
            positions=count,
            targets=targets,
            unembedding=self.unembedding(run),
            layers=run.layers,
            provenance=run.provenance,
        )


def _prepend_nan(shares: Tensor) -> Tensor:
    """Prepend NaN for the first layer, which has no earlier layer to compare with."""
    return torch.cat([torch.full((1,), math.nan, dtype=torch.float64), shares])


def lens_kernel(
    view: View,
    *,
    normed: bool,
    ks: tuple[int, ...],
    labels: str | Tensor,
    memory_mb: float,
    mean: Tensor | None = None,
    heads: LayerHeads | None = None,
    ranks: int | Tensor | None = None,
) -> dict[str, Tensor]:
    """Sum the loss, ranks and entropy of every layer's predictions over positions.

    Args:
        view: activations of one batch.
        normed: whether the final norm is applied to every layer, not only to the last one.
        ks: the values of k for top-k accuracy.
        labels: the targets, see `LogitLens`.
        memory_mb: megabytes for logits.
        mean: `residual d_model` to subtract for the cosine, None for no centring.
        heads: heads for the layers below the last; None to use the model's own head at every layer.
        ranks: id of the token whose rank is read, or `row`, an id for each row of the data; None for none.
    """
    index = read_positions(view)
    target = targets(view, labels, index)
    ids = None if ranks is None else ids_at(view, ranks, index)
    # Before the lens, whose logits are the most memory.
    closer = _closer_to_last(view, mean)
    lens = read_lens(view, target, normed, memory_mb, max(ks), label_key(labels), heads, ids)
    has_target = target != NO_LABEL
    log_prob = lens["target_log_prob"][:, has_target]
    # Number of tokens that are ranked before the target.
    before = lens["before"][:, has_target]
    rises = log_prob[1:] > log_prob[:-1]
    correct = before == 0
    wrong_from_here_on = (~correct).flip(0).cumsum(0).flip(0)
    closer = closer[:, has_target]
    of_ranks: dict[str, Tensor] = {}
    if ids is not None:
        of_ranks = {
            "rank": lens["rank"].sum(1),
            "reciprocal rank": (1 / lens["rank"].double()).sum(1),
            "rank prob": lens["rank_prob"].sum(1),
        }
    return of_ranks | {
        "steps": rises.sum(1),
        "steps closer": (rises & closer).sum(1),
        "closer": closer.sum(1),
        "lost": (correct & (wrong_from_here_on > 0)).sum(1),
        "count": torch.tensor(len(target)),
        "targets": has_target.sum(),
        "log_prob": log_prob.sum(1),
        "prob": log_prob.exp().sum(1),
        "correct": correct.sum(1),
        "top_k": torch.stack([(before < k).sum(1) for k in ks]),
        "rising": rises.all(0).sum(),
        "agree": (lens["best"] == lens["best"][-1]).sum(1),
        "kl": lens["kl"].sum(1),
        "entropy": lens["entropy"].sum(1),
        "bad": bad_logits(lens),
    }


def _closer_to_last(view: View, mean: Tensor | None) -> Tensor:
    """Whether each block after the first raises the cosine to the last layer (`step position`).

    Args:
        view: activations of one batch.
        mean: `residual d_model` to subtract, None for no centring.
    """
    last = None
    cosines = []
    has_direction = []
    # Layer by layer from the last, because a copy of all of them would be large.
    for layer in reversed(range(1, len(view.activations))):
        residual = read_vectors(view, view.activations[layer : layer + 1])
        offset = None
        if mean is not None:
            # A head that reads several vectors of a row reads them as one long vector.
            offset = mean[layer].to(residual).repeat(residual.shape[-1] // mean.shape[-1])
            residual = residual - offset
        unit, norm = unit_vectors(residual)
        last = unit if last is None else last
        cosines.append((unit * last).sum(-1)[0])
        defined_here = norm > 0 if offset is None else beyond_rounding(residual, offset)
        has_direction.append(defined_here[0])
    cosine = torch.stack(cosines[::-1])
    defined = torch.stack(has_direction[::-1])
    return (cosine[1:] > cosine[:-1]) & defined[1:] & defined[:-1] & defined[-1]
