"""Mutual nearest neighbours between residual layers of one model or of two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core import Sums, axes, result_class, typed
from ..core.arguments import PositiveInt
from ._pairwise import (
    MatrixFunction,
    MinibatchMatrix,
    PairRelation,
    RelationFunction,
    SampleMatrixAnalyzer,
    dissimilarities,
    relation_of_matrices,
)
from .analyzer import Run, Weight


@result_class
class MutualKNNResult(MinibatchMatrix):
    """Fraction of nearest neighbours that samples share between two layers, with its permutation null.

    The fields of the null are those of `CalibratedMatrix`; they are NaN without `MutualKNN(permutations=...)`.

    Attributes:
        values: `residual residual`, or `residual_a residual_b` between two models, in [0, 1].
        chance: expected value for random neighbours: the mean over samples of k / (number of samples in other texts).
        k: number of neighbours.
        samples: number of tokens (or sequences) in all minibatches.
        minibatches: number of minibatches.
        texts: number of different texts in a minibatch, averaged over minibatches.
    """

    measure: ClassVar[str] = "shared neighbours"
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Shared neighbours",
        unit="fraction",
        title="Mutual nearest neighbours of layers",
        caption="Fraction of the k nearest neighbours of a token at one layer that are also among its k nearest at the other "
        "(Huh et al. 2024). Tokens of one text are no neighbours; neighbours at random share the fraction `chance`.",
        within=(0, 1),
        by_chance=(0,),
    )
    chance: Float64[Tensor, ""] = axes(within=(0, 1))
    k: int

    def headline(self) -> dict[str, float]:
        return super().headline() | {"expected for neighbours at random": float(self.chance)}


@typed
@dataclass(frozen=True)
class MutualKNN(SampleMatrixAnalyzer):
    r"""Mutual nearest neighbours: the fraction of k nearest neighbours that a sample shares between two layers.

    $$m_{\mathrm{NN}}(l, l') = \frac{1}{N} \sum_i \frac{|S_k^l(i) \cap S_k^{l'}(i)|}{k}$$

    with the k nearest neighbours S of a sample within its minibatch, the samples of its own text left out. Minibatches are
    drawn as for `CKA`. A larger minibatch is a harder test: `chance` is the mean of k / (number of samples of other texts).

    Samples at equal distance, such as equal tokens before the first attention, share the places that are left among the k: of
    m samples for p places, each is a neighbour by p / m. The value is then the expected overlap if each layer breaks ties at
    random. The value of a layer with itself may therefore be below 1, and the order of samples changes nothing.

    Args:
        k: number of neighbours.
        metric: "cosine": neighbours have the largest inner product of normalised vectors (Huh et al.). "euclidean": neighbours
            have the smallest distance.
        minibatch: number of samples in a minibatch, n, at least k + 2; see `CKA`. A pool of fewer than k + 2 samples is not
            used.
        unit: see `CKA`.
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token.
        seed: random seed of the draws and of the permutations.
        max_memory_gb: limit for the sums of the null.
        permutations: number of random pairings of texts for the null, see `CKA`; 0 for no null.

    Source:
        Huh, Cheung, Wang and Isola 2024 (arXiv 2405.07987). The null is that of `CalibratedMatrix`.

    Examples:
        More neighbours are shared than neighbours at random would be.

        >>> import tl_layersim as lsim
        >>> knn = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.MutualKNN(k=5, minibatch=64)])["mutual_knn"]
        >>> knn.values.shape, bool(knn.values[-2, -1] > 3 * knn.chance), round(float(knn.chance), 3)
        (torch.Size([9, 9]), True, 0.105)
    """

    name: ClassVar[str] = "mutual_knn"
    weighs: ClassVar[tuple[Weight, ...]] = ("power",)

    k: PositiveInt = 10
    metric: Literal["cosine", "euclidean"] = "cosine"

    @property
    def formula(self) -> tuple[MatrixFunction, RelationFunction]:
        return partial(dissimilarities, kind=self.metric), partial(nearest_neighbours, k=self.k)

    @property
    def least(self) -> int:
        return max(4, self.k + 2)

    def compute(self, sums: Sums, run: Run) -> MutualKNNResult:
        self.need_rows("samples" in sums.fields, run)
        # The average of many terms of 1 may be above 1 by rounding.
        values = (sums["xy"] / (self.k * sums["samples"])).clamp(0, 1)
        null_scale = self.k * sums.fields.get("null samples", values)
        return MutualKNNResult(
            chance=sums["chance_x"][0] / int(sums["samples"]),
            k=self.k,
            **self.similarities(sums, run, values, null_scale),
        )


def nearest_neighbours(matrix: Tensor, text: Tensor | None, texts: int, by_text: bool, *, k: int) -> PairRelation:
    """Adjacency matrix of each layer's graph of k nearest neighbours, as a `PairRelation`.

    Its `numbers` are the sums over samples of k / (number of samples in other texts).

    Args:
        matrix: dissimilarities, `layer n n`.
        text: `n`, the text of each sample; samples of one text are no neighbours. None if all samples are from different texts.
        texts: number of texts.
        by_text: whether to return the terms by text too.
        k: number of neighbours.
    """
    layers, n = matrix.shape[:2]
    text = torch.arange(n) if text is None else text
    same_text = (text[:, None] == text).to(matrix.device)
    between_texts = matrix.masked_fill(same_text, torch.inf)
    furthest = between_texts.kthvalue(k, dim=-1, keepdim=True).values
    nearer = (between_texts < furthest).double()
    # Neighbours at the same distance as the k-th share the places that are free.
    tied = (between_texts == furthest).double()
    places = k - nearer.sum(-1, keepdim=True)
    graph = nearer + tied * places / tied.sum(-1, keepdim=True)
    chance = (k / (n - same_text.sum(1).double())).sum()
    return relation_of_matrices(graph.flatten(1), texts if by_text else None, {"chance_{}": chance.expand(layers)})
