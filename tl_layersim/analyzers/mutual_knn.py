"""Mutual nearest neighbours between residual layers of one model or of two."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core import LayersimError, Sums, axes, result_class, typed
from ..core.arguments import PositiveInt
from ._pairwise import (
    MatrixFunction,
    MinibatchMatrix,
    PairFunction,
    PairRelation,
    RelationFunction,
    SampleMatrixAnalyzer,
    dissimilarities,
    relation_of_matrices,
)
from .analyzer import Run
from .needs import Needs

# Names of the measures in results.
MEASURES = {"mutual": "shared neighbours", "jaccard": "Jaccard index of neighbours", "cycle": "cycle-kNN", "cknna": "CKNNA"}


@result_class
class MutualKNNResult(MinibatchMatrix):
    """Similarity of the nearest neighbours that samples have at two layers, with its permutation null.

    The fields of the null are those of `CalibratedMatrix`; they are NaN without `MutualKNN(permutations=...)`.

    Attributes:
        values: `residual residual`, or `residual_a residual_b` between two models, in [0, 1]: what `overlap` names.
        chance: expected value of overlap="mutual" for random neighbours: the mean over samples of k / (number of samples in
            other texts); NaN for others.
        k: number of neighbours.
        overlap: how neighbours are compared, see `MutualKNN`.
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
        "(Huh et al. 2024), or their Jaccard index or cycles. Tokens of one text are no neighbours; neighbours at random share "
        "the fraction `chance`.",
        within=(0, 1),
        by_chance=(0,),
    )
    chance: Float64[Tensor, ""] = axes(within=(0, 1))
    k: int
    overlap: str = "mutual"

    def headline(self) -> dict[str, float]:
        measure = MEASURES[self.overlap]
        headline = {name.replace(self.measure, measure): number for name, number in super().headline().items()}
        if not self.chance.isnan():
            headline["expected for neighbours at random"] = float(self.chance)
        return headline


@result_class
class CKNNAResult(MutualKNNResult):
    """CKNNA between layers, with its permutation null: the fields of a `MutualKNNResult`, of which `chance` is NaN.

    Attributes:
        values: `residual residual`, or `residual_a residual_b` between two models. Values of unrelated layers may be slightly
            negative. NaN if the samples of a layer have no similar neighbours.
    """

    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="CKNNA",
        title="CKNNA of layers",
        caption="Centred kernel alignment over pairs of tokens of which the second is among the k nearest of the first at both "
        "layers: 1 for equal, about 0 for unrelated layers (Huh et al. 2024).",
        within=(-math.inf, math.inf),
    )


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

    `overlap` compares the neighbours in other ways. With |S| = k, and samples at equal distance counted as above,

    $$\mathrm{jaccard} = \frac{1}{N} \sum_i \frac{|S^l(i) \cap S^{l'}(i)|}{|S^l(i) \cup S^{l'}(i)|}, \qquad
    \mathrm{cycle} = \frac{1}{N} \big|\{i : \exists j \in S^{l'}(i),\; i \in S^l(j)\}\big|, \qquad
    \mathrm{CKNNA} = \frac{\mathrm{HSIC}(l, l')}{\sqrt{\mathrm{HSIC}(l, l)\,\mathrm{HSIC}(l', l')}}$$

    where HSIC is HSIC_1 of Song et al. (see `CKA`) of the cosines $K_{ij}$ and $L_{ij}$ of two layers, set to 0 unless j is a
    neighbour of i at both. "cycle" and "cknna" are not symmetric: "cycle" looks neighbours up at the column site first. For
    CKNNA the HSIC is summed over minibatches before they are divided.

    Args:
        k: number of neighbours.
        overlap: "mutual" for the fraction of shared neighbours, "jaccard" for their Jaccard index, "cycle" for the fraction of
            samples that are a neighbour of one of their neighbours, "cknna" for CKNNA, with metric="cosine" and k of 2 or more.
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
        Huh, Cheung, Wang and Isola 2024 (arXiv 2405.07987), as their code defines CKNNA and cycle-kNN; their equation of CKNNA
        subtracts the mean cosine of each sample from K and L instead of taking HSIC_1, and their code adds 1e-6 to its
        denominator. The Jaccard index as in Klabunde et al. 2023 (arXiv 2305.06329). The null is that of `CalibratedMatrix`.

    Examples:
        More neighbours are shared than neighbours at random would be.

        >>> import tl_layersim as lsim
        >>> knn = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.MutualKNN(k=5, minibatch=64)])["mutual_knn"]
        >>> knn.values.shape, bool(knn.values[-2, -1] > 3 * knn.chance), round(float(knn.chance), 3)
        (torch.Size([9, 9]), True, 0.105)
    """

    name: ClassVar[str] = "mutual_knn"

    k: PositiveInt = 10
    metric: Literal["cosine", "euclidean"] = "cosine"
    overlap: Literal["mutual", "jaccard", "cycle", "cknna"] = "mutual"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap == "cknna" and self.metric != "cosine":
            raise LayersimError(
                f"`metric` is {self.metric!r}; it must be 'cosine' for overlap='cknna', which compares cosines."
            )
        if self.overlap == "cknna" and self.k < 2:
            raise LayersimError(f"`k` is {self.k}; it must be 2 or more for overlap='cknna'.")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, symmetric=self.overlap in ("mutual", "jaccard"), dominance=("power",))

    @property
    def formula(self) -> tuple[MatrixFunction, RelationFunction]:
        pair = {"mutual": None, "jaccard": jaccard_index, "cycle": cycles, "cknna": masked_hsic}[self.overlap]
        return partial(dissimilarities, kind=self.metric), partial(nearest_neighbours, k=self.k, pair=pair)

    @property
    def least(self) -> int:
        return max(4, self.k + 2)

    def compute(self, sums: Sums, run: Run) -> MutualKNNResult:
        self.need_rows("samples" in sums.fields, run)
        fields: dict[str, Any] = {"k": self.k, "overlap": self.overlap, "chance": torch.tensor(math.nan, dtype=torch.float64)}
        null_samples = sums.fields.get("null samples", sums["samples"])
        if self.overlap == "cknna":
            values = sums["xy"] / _norms(sums["xx"], sums["yy"])
            null_scale = _norms(sums["null xx"], sums["null yy"]) if "null xx" in sums.fields else values
            return CKNNAResult(**fields, **self.similarities(sums, run, values, null_scale, symmetric=self.needs.symmetric))
        # A sample shares k neighbours at most.
        largest = self.k if self.overlap == "mutual" else 1
        if self.overlap == "mutual":
            fields["chance"] = sums["chance_x"][0] / int(sums["samples"])
        # The average of many terms of 1 may be above 1 by rounding.
        values = (sums["xy"] / (largest * sums["samples"])).clamp(0, 1)
        null_scale = largest * null_samples
        return MutualKNNResult(**fields, **self.similarities(sums, run, values, null_scale, symmetric=self.needs.symmetric))


def _norms(row_norms: Tensor, column_norms: Tensor) -> Tensor:
    """Denominator of CKNNA (`row column`); NaN for a site whose HSIC with itself is not positive."""
    row_roots = row_norms.where(row_norms > 0, math.nan).sqrt()
    column_roots = column_norms.where(column_norms > 0, math.nan).sqrt()
    return torch.outer(row_roots, column_roots)


def nearest_neighbours(
    matrix: Tensor, text: Tensor | None, texts: int, by_text: bool, *, k: int, pair: PairFunction | None = None
) -> PairRelation:
    """Adjacency matrix of each layer's graph of k nearest neighbours, as a `PairRelation`.

    Its `numbers` are the sums over samples of k / (number of samples in other texts).

    Args:
        matrix: dissimilarities, `layer n n`.
        text: `n`, the text of each sample; samples of one text are no neighbours. None if all samples are from different texts.
        texts: number of texts.
        by_text: whether to return the terms by text too.
        k: number of neighbours.
        pair: function that compares the graphs and cosines of two layers; None for the number of shared neighbours.
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
    numbers = {"chance_{}": chance.expand(layers)}
    relation = relation_of_matrices(graph.flatten(1), texts if by_text else None, numbers)
    if pair is None:
        return relation
    return replace(relation, pair=pair, matrices=torch.stack([graph, 1 - matrix.double()], 1))


def jaccard_index(layer: Tensor, others: Tensor) -> Tensor:
    """Sum over samples of the Jaccard index of the neighbours at one layer and at others (`layer`).

    Args:
        layer: graph of neighbours and cosines, `2 n n`.
        others: the same of the other layers, `layer 2 n n`.
    """
    graph = layer[0]
    shared = (graph * others[:, 0]).sum(2)
    neighbours = graph.sum(1) + others[:, 0].sum(2)
    return (shared / (neighbours - shared)).sum(1)


def cycles(layer: Tensor, others: Tensor) -> Tensor:
    """Number of samples that are a neighbour, at one layer, of one of their neighbours at others (`layer`).

    Samples at equal distance are neighbours with a probability, independently of each other.

    Args:
        layer: graph of neighbours and cosines, `2 n n`.
        others: the same of the other layers, `layer 2 n n`.
    """
    returns = others[:, 0] * layer[0].T
    return (1 - (1 - returns).prod(2)).sum(1)


def masked_hsic(layer: Tensor, others: Tensor) -> Tensor:
    """HSIC_1 of the cosines at one layer and at others, of pairs that are neighbours at both (`layer`), times n (n - 3).

    Args:
        layer: graph of neighbours and cosines, `2 n n`.
        others: the same of the other layers, `layer 2 n n`.
    """
    n = layer.shape[-1]
    mask = layer[0] * others[:, 0]
    x = mask * layer[1]
    y = mask * others[:, 1]
    # Neighbours are not mutual, so that these matrices are not symmetric.
    trace = (x * y.transpose(1, 2)).sum((1, 2))
    totals = x.sum((1, 2)) * y.sum((1, 2)) / ((n - 1) * (n - 2))
    paths = 2 / (n - 2) * (x.sum(1) * y.sum(2)).sum(1)
    return trace + totals - paths
