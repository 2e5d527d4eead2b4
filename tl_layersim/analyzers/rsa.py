"""Representational similarity analysis (RSA) between residual layers of one model or of two."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core import LayersimError, Sums, axes, result_class, typed
from ._pairwise import (
    MatrixFunction,
    MinibatchMatrix,
    PairRelation,
    RelationFunction,
    SampleMatrixAnalyzer,
    angles,
    average_ranks,
    dissimilarities,
    doubly_centred,
    relation_of_matrices,
)
from .analyzer import Run, refuse_undefined
from .needs import Needs


@result_class
class RSAResult(MinibatchMatrix):
    """Representational similarity between residual layers, with its permutation null.

    The fields of the null are those of `CalibratedMatrix`; they are NaN without `RSA(permutations=...)`.

    Attributes:
        values: `residual residual`, or `residual_a residual_b` between two models: correlation of the dissimilarities of two
            layers, or what `RSA(compare=...)` names. NaN in the row and column of a layer whose dissimilarities are all equal;
            a `LayersimWarning` names such layers.
        samples: number of tokens (or sequences) in all minibatches.
        minibatches: number of minibatches.
        texts: number of different texts in a minibatch, averaged over minibatches.
    """

    measure: ClassVar[str] = "RSA"
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Correlation of dissimilarities",
        title="Representational similarity between layers",
        caption="Correlation (or cosine) of the dissimilarities between tokens at two layers: 1 where the same tokens are near "
        "and far, 0 for unrelated layers (Kriegeskorte, Mur and Bandettini 2008).",
        within=(-1, 1),
    )

    @property
    def angle(self) -> Tensor:
        """`row column`, arccos of the correlation, in radians: the angle between vectors of dissimilarities, which is a metric.

        With compare="rho_a" and ties it is none, because a layer has an angle above 0 with itself.
        """
        return angles(self)


@typed
@dataclass(frozen=True)
class RSA(SampleMatrixAnalyzer):
    r"""Representational similarity analysis: correlation of the dissimilarities between samples, for all pairs of layers.

    $$\mathrm{RSA}(l, l') = \mathrm{corr}_{i < j}\big(d(x_i^l, x_j^l),\; d(x_i^{l'}, x_j^{l'})\big)$$

    The correlation is taken within minibatches of n samples, over their pairs of different texts, and averaged with the number
    of pairs as weight. Pairs of tokens of one text are left out, because these depend on each other. Minibatches are drawn as
    for `CKA`. A minibatch in which all dissimilarities of a layer are equal is left out of the averages of that layer with all
    others.

    Args:
        dissimilarity: measure of dissimilarity, d. "correlation" is 1 minus the Pearson correlation of two vectors over their
            dimensions, "cosine" 1 minus their cosine, "euclidean" their distance, "squared_euclidean" their squared distance
            divided by the number of dimensions, which rsatoolbox calls "euclidean". Dissimilarities are rounded to float32, so
            that equal samples tie.
        compare: "spearman" correlates the ranks of the dissimilarities; equal ones share the mean of their ranks. "pearson"
            correlates the dissimilarities, "cosine" does so without subtracting their mean. "rho_a" is the mean of Spearman's
            correlation over random breakings of ties, $12 \sum_i \tilde r_i \tilde s_i / (P^3 - P)$ with the centred ranks of P
            pairs: below 1 for a layer with itself if dissimilarities are equal. "whitened_cosine" and "whitened_pearson"
            are the cosine and the correlation under the covariance that dissimilarities of shared samples have; that is the
            cosine of the doubly centred matrices $-D/2$, and with "squared_euclidean" the biased linear CKA of the minibatch.
            They need all pairs, so level="sequence" with one row a text, or unit="token".
        minibatch: number of samples in a minibatch, n; see `CKA`.
        unit: see `CKA`.
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token.
        seed: random seed of the draws and of the permutations.
        deconfound: "input" regresses the embedding's dissimilarities out of each layer's, see `CKA`.
        max_memory_gb: limit for the sums of the null.
        permutations: number of random pairings of texts for the null, see `CKA`; 0 for no null.

    Source:
        Kriegeskorte, Mur and Bandettini 2008, doi:10.3389/neuro.06.004.2008. Schuett et al. 2023 (eLife 12:e82566) for rho_a;
        Diedrichsen et al. 2021 (arXiv 2007.02789) for whitening, and its equality with CKA. The null is that of
        `CalibratedMatrix`.

    Examples:
        The RSA of a layer with itself is 1.

        >>> import tl_layersim as lsim
        >>> rsa = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.RSA(minibatch=64)])["rsa"]
        >>> rsa.values.shape, round(float(rsa.values[4, 4]), 9)
        (torch.Size([9, 9]), 1.0)
    """

    name: ClassVar[str] = "rsa"

    dissimilarity: Literal["correlation", "cosine", "euclidean", "squared_euclidean"] = "correlation"
    compare: Literal["spearman", "pearson", "cosine", "rho_a", "whitened_cosine", "whitened_pearson"] = "spearman"
    deconfound: Literal["input"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deconfound is not None and self.compare == "rho_a":
            raise LayersimError(
                f"`deconfound` is {self.deconfound!r}; it needs a correlation, such as compare='spearman', not 'rho_a'."
            )

    @property
    def needs(self) -> Needs:
        return replace(super().needs, dominance=("samples", "power"))

    @property
    def formula(self) -> tuple[MatrixFunction, RelationFunction]:
        if self.compare.startswith("whitened"):
            relate = partial(whitened_dissimilarities, centre=self.compare == "whitened_pearson")
        else:
            relate = partial(scaled_dissimilarities, compare=self.compare)
        return partial(dissimilarities, kind=self.dissimilarity), relate

    def compute(self, sums: Sums, run: Run) -> RSAResult:
        self.need_rows("samples" in sums.fields, run)
        reason = f"all {self.sample_word} of a minibatch are equally dissimilar, like [CLS] tokens before the first attention"
        defined_rows = sums["xx"] > 0
        defined_columns = sums["yy"] > 0
        refuse_undefined("RSA", [(run.layers, defined_rows), (run.column_layers, defined_columns)], reason)
        # Pairs of samples of the minibatches in which both layers have unequal dissimilarities. 0 / 0 is NaN.
        scale = sums["norms"]
        null_scale = sums.fields.get("null norms", scale)
        if self.compare == "rho_a":
            # Pairs of samples of all minibatches, whatever ties they have.
            scale = sums["pairs_x"][0].where(defined_rows[:, None] & defined_columns, 0)
            null_scale = sums.fields.get("null pairs_x", scale)[0]
        values = (sums["xy"] / scale).clamp(-1, 1)
        inputs = None
        if self.deconfound is not None:
            inputs = (sums["x0"] / sums["x0 norms"], sums["y0"] / sums["y0 norms"])
        return RSAResult(**self.similarities(sums, run, values, null_scale, inputs))


def scaled_dissimilarities(matrix: Tensor, text: Tensor | None, texts: int, by_text: bool, *, compare: str) -> PairRelation:
    """Dissimilarities of all pairs of samples, or their ranks, centred and scaled as `compare` asks, as a `PairRelation`.

    The inner product of two layers is the number of pairs times the correlation. A layer of equal dissimilarities is 0, of
    cosines a layer of dissimilarities 0. Its `numbers` are the numbers of pairs.

    Args:
        matrix: dissimilarities, `layer n n`.
        text: `n`, the text of each sample; pairs that share a text are left out. None if all samples are from different texts.
        texts: number of texts.
        by_text: whether to return the terms by text too.
        compare: "spearman", "pearson", "cosine" or "rho_a", see `RSA`.
    """
    layers, n = matrix.shape[:2]
    first, second = torch.triu_indices(n, n, 1, device=matrix.device)
    if text is not None:
        between_texts = (text[first.cpu()] != text[second.cpu()]).to(matrix.device)
        first = first[between_texts]
        second = second[between_texts]
    pairs = matrix[:, first, second]
    count = len(first)
    # The mean of equal float32 numbers, or of equal ranks, is exact in float64: pairs that do not vary become 0.
    pairs = average_ranks(pairs) if compare in ("spearman", "rho_a") else pairs.double()
    if compare != "cosine":
        pairs = pairs - pairs.mean(1, keepdim=True)
    # The norm of the centred ranks 1, 2, ..., without ties.
    pairs = pairs / ((count**3 - count) / 12) ** 0.5 if compare == "rho_a" else torch.nn.functional.normalize(pairs, dim=1)
    # Each pair is in the matrix twice.
    pairs = pairs * math.sqrt(count / 2)
    relation = pairs.new_zeros(layers, n, n)
    relation[:, first, second] = pairs
    relation[:, second, first] = pairs
    numbers = {"pairs_{}": relation.new_full((layers,), count)}
    return relation_of_matrices(relation.flatten(1), texts if by_text else None, numbers)


def whitened_dissimilarities(matrix: Tensor, text: Tensor | None, texts: int, by_text: bool, *, centre: bool) -> PairRelation:
    """Doubly centred dissimilarities of all pairs of samples, normalised, as a `PairRelation`.

    Args:
        matrix: dissimilarities, `layer n n`.
        text: None, because each sample is of a text of its own.
        texts: number of texts.
        by_text: whether to return the terms by text too.
        centre: whether to subtract the mean over pairs first, for a correlation.

    Raises:
        LayersimError: samples share a text. Without all pairs, their covariance has no inverse in this form.
    """
    if text is not None:
        raise LayersimError(
            "`compare` of RSA is whitened, which needs all pairs of samples; pairs of one text are left out. Take one sample "
            'of each text, level="sequence", or unit="token".'
        )
    n = matrix.shape[1]
    count = n * (n - 1) // 2
    pairs = matrix.double()
    if centre:
        different = ~torch.eye(n, dtype=torch.bool, device=matrix.device)
        pairs = (pairs - pairs.sum((1, 2), keepdim=True) / (2 * count)) * different
    relation = torch.nn.functional.normalize(doubly_centred(pairs).flatten(1), dim=1) * math.sqrt(count)
    return relation_of_matrices(relation, texts if by_text else None)
