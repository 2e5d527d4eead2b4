"""The logit lens: what each layer would say if it were the last, against the truth and against the last layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.errors import LayersimError
from ..core.results import Picture, Result, axes
from ..core.sums import Sums
from ..core.typed import typed
from ..data.batches import Batch
from ..data.labels import NO_LABEL, as_labels, label_key, label_source, warn_of_unused
from ..models.layer_logits import bad_logits, read_lens, read_positions
from ..models.model_info import Model
from ..models.targets import check_batch_labels, with_labels
from ..models.validation import refuse_bad_logits
from ..models.view import Kernel, View
from .base import Analyzer, Run, check_memory, need_head, need_tokens

JIANG = "(Jiang, Zhou and Zhu 2024, {})."


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LogitLensResult(Result):
    """What `LogitLens` measures. All tensors are float64, one number for each block unless said; natural logarithms.

    Attributes:
        values: `layer`, the same as `cross_entropy`: mean of -ln p(target), over positions that have a target.
        perplexity: `layer`, exp of it.
        accuracy: `layer`, share of positions with a target whose first choice is the target.
        top_k_accuracy: `k layer`, share whose target is among the first k choices; of equal logits the lower id comes first.
        target_probability: `layer`, mean p(target).
        agreement: `layer`, share of all positions whose first choice is the last layer's.
        kl_to_final: `layer`, mean KL(last layer || this layer); exactly 0 at the last.
        entropy: `layer`, mean entropy of what the layer says.
        monotone_share: share of positions with a target whose p(target) rises strictly at every block after the first.
        ks: the k of `top_k_accuracy`.
        positions: how many positions were read.
        targets: how many of them have a target.
        unembedding: what turned x into logits; with `norm="none"`, below the last layer.
    """

    values_name: ClassVar[str] = "cross_entropy"
    values: Float64[Tensor, " layer"] = axes("layer")
    perplexity: Float64[Tensor, " layer"] = axes("layer")
    accuracy: Float64[Tensor, " layer"] = axes("layer")
    top_k_accuracy: Float64[Tensor, "k layer"] = axes("k", "layer")
    target_probability: Float64[Tensor, " layer"] = axes("layer")
    agreement: Float64[Tensor, " layer"] = axes("layer")
    kl_to_final: Float64[Tensor, " layer"] = axes("layer")
    entropy: Float64[Tensor, " layer"] = axes("layer")
    monotone_share: Float64[Tensor, ""] = axes()
    ks: tuple[int, ...]
    positions: int
    targets: int
    unembedding: str

    pictures: ClassVar[tuple[Picture, ...]] = (
        Picture(
            "cross_entropy",
            "Cross-entropy of each layer's prediction",
            "In nats, against the right answer, if the model stopped after that block " + JIANG.format("figure 9 b"),
        ),
        Picture(
            "top_k_accuracy",
            "Accuracy of each layer's prediction",
            "Share of positions whose right answer is among the layer's first choices "
            + JIANG.format("equation 2 and figure 2 a-b"),
        ),
        Picture(
            "agreement",
            "Agreement with the final prediction",
            "Share of positions at which the layer's first choice is already the last layer's " + JIANG.format("section 2.2"),
        ),
        Picture(
            "kl_to_final",
            "KL divergence from the last layer",
            "KL(last layer || this layer) in nats; the logit lens is nostalgebraist's (2020), this measure of it that of "
            "Belrose et al. 2023.",
        ),
        Picture(
            "entropy",
            "Entropy of each layer's prediction",
            "In nats; a layer that is sure of something, right or wrong, reads low (Aubry et al. 2025, figure 24, row 4).",
        ),
        Picture(
            "target_probability",
            "Probability of the right answer",
            "Theorem 2.2 expects it to rise at every layer " + JIANG.format("section 2.2"),
        ),
    )

    @property
    def cross_entropy(self) -> Tensor:
        """`layer`, the same as `values`."""
        return self.values

    def effective_depth(self, eps: float) -> int:
        r"""The least number of blocks l, from 1 on, with accuracy at least 1 - eps; L if there is none.

        $$d^\epsilon = \min \{ l : \mathrm{Acc}^{(l)} \ge 1 - \epsilon \}$$

        Source:
            Jiang, Zhou and Zhu 2024, definition 3.1.
        """
        if not 0 <= eps <= 1:
            raise LayersimError("eps is a share.", given=f"eps={eps}", expected="0 to 1", do="effective_depth(0.1)")
        reached = (self.accuracy >= 1 - eps).nonzero()[:, 0]
        return int(reached[0]) + 1 if len(reached) else len(self.accuracy)

    def headline(self) -> dict[str, float]:
        middle = len(self.values) // 2
        block = self.layers[1:][middle].removesuffix(".hook_resid_post").removeprefix("blocks.")
        return {
            "accuracy of the last layer": float(self.accuracy[-1]),
            f"accuracy after block {block}": float(self.accuracy[middle]),
            "perplexity of the last layer": float(self.perplexity[-1]),
            f"agreement of block {block} with the last": float(self.agreement[middle]),
            "share of positions whose target probability rises at every block": float(self.monotone_share),
        }


@typed
@dataclass(frozen=True, eq=False)
class LogitLens(Analyzer):
    r"""What each layer would say if the model stopped there: loss, accuracy, agreement, entropy.

    $$\mathrm{logits}^{(l)} = W_U \, \mathrm{norm}(x^l), \qquad
    \mathrm{CE}^{(l)} = -\frac{1}{N} \sum_t \ln \mathrm{softmax}(\mathrm{logits}^{(l)}_t)_{y_t}$$

    with the model's own final norm, unembedding, logit scaling and soft-cap. That this gives the model's own logits at the
    last layer is checked on the first row of a run. Logits are computed in the model's dtype and reduced in float64; they
    are never held: all blocks of a few tokens at a time.

    Args:
        norm: "final" applies the model's final norm to every layer (Geva et al. 2022, and what is usually meant); "none" to the
            last alone, where the model has it (Jiang, Zhou and Zhu's code). The choice changes everything: see the docs.
        top_k: the k of top-k accuracy.
        labels: "next_token"; "data" for the data's own column `labels` or `label`; or labels themselves, `row` or `row pos`. A
            label is what the model should say at that position: nothing is shifted. -100 has no target.
        lens_memory_mb: for the logits of one chunk, at least those of one token at all layers.

    Source:
        nostalgebraist 2020; Geva et al. 2022; Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 2, theorem 2.2,
        definition 3.1, figures 2 and 9.

    Example:
        >>> import tl_layersim as lsim
        >>> found = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.LogitLens()])["logit_lens"]
        >>> bool(found.accuracy[-1] > found.accuracy[0]), int((found.kl_to_final == 0).sum())
        (True, 1)
    """

    name: ClassVar[str] = "logit_lens"
    needs_stream: ClassVar[bool] = True
    needs_unembed: ClassVar[bool] = True

    norm: Literal["final", "none"] = "final"
    top_k: int | tuple[int, ...] | list[int] = (1, 5)
    labels: Any = "next_token"
    lens_memory_mb: int | float = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", as_labels(self.labels))
        check_memory(self.lens_memory_mb)
        ks = (self.top_k,) if isinstance(self.top_k, int) else tuple(self.top_k)
        object.__setattr__(self, "top_k", ks)
        if not ks or min(ks) < 1:
            raise LayersimError(
                "k counts from 1.", given=f"top_k={self.top_k}", expected="one or more, each above 0", do="top_k=(1, 5)"
            )

    @property
    def label_source(self) -> str:
        return label_source(self.labels)

    def check(self, *models: Model) -> None:
        need_head(models[0], "LogitLens", targets=True, own_labels=bool(self.label_source))

    def check_batch(self, batch: Batch, model: Model) -> None:
        check_batch_labels(self.labels, batch, model)

    def kernel(self, first: Sums) -> Kernel:
        return partial(
            lens_kernel,
            normed=self.norm == "final",
            ks=self._ks(),
            labels=self.labels,
            memory_mb=float(self.lens_memory_mb),
        )

    def _ks(self) -> tuple[int, ...]:
        return cast(tuple[int, ...], self.top_k)

    def compute(self, sums: Sums, run: Run) -> LogitLensResult:
        warn_of_unused(self.labels, run.provenance)
        count, targets = int(sums["count"]), int(sums["targets"])
        need_tokens(count, 1, "LogitLens", "positions that the head reads")
        refuse_bad_logits(sums["bad"], run.layers)
        need_tokens(targets, 1, "LogitLens", "positions with a target")
        cross_entropy = -sums["log_prob"] / targets
        return LogitLensResult(
            values=cross_entropy,
            perplexity=cross_entropy.exp(),
            accuracy=sums["correct"].double() / targets,
            top_k_accuracy=sums["top_k"].double() / targets,
            target_probability=sums["prob"] / targets,
            agreement=sums["agree"].double() / count,
            kl_to_final=sums["kl"] / count,
            entropy=sums["entropy"] / count,
            monotone_share=sums["rising"].double() / targets,
            ks=self._ks(),
            positions=count,
            targets=targets,
            unembedding=unembedding(run, self.norm),
            layers=run.layers,
            provenance=run.provenance,
        )


def unembedding(run: Run, norm: str) -> str:
    """What turned a residual into logits, in words."""
    text = str(run.head) if run.head is not None else ""
    return text.replace(f"{run.head.norm}(x)", "x") if run.head and run.head.norm and norm == "none" else text


def lens_kernel(view: View, *, normed: bool, ks: tuple[int, ...], labels: str | Tensor, memory_mb: float) -> dict[str, Tensor]:
    """Sums over positions of what every layer says."""
    target = with_labels(view, labels, read_positions(view))
    lens = read_lens(view, target, normed, memory_mb, max(ks), label_key(labels))
    known = target != NO_LABEL
    log_prob, before = lens["target_log_prob"][:, known], lens["before"][:, known]
    return {
        "count": torch.tensor(len(target)),
        "targets": known.sum(),
        "log_prob": log_prob.sum(1),
        "prob": log_prob.exp().sum(1),
        "correct": (before == 0).sum(1),
        "top_k": torch.stack([(before < k).sum(1) for k in ks]),
        "rising": (log_prob[1:] > log_prob[:-1]).all(0).sum(),
        "agree": (lens["best"] == lens["best"][-1]).sum(1),
        "kl": lens["kl"].sum(1),
        "entropy": lens["entropy"].sum(1),
        "bad": bad_logits(lens),
    }
