"""Representational similarity analysis (RSA) between residual layers of one model or of two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.errors import LayersimError, warn
from ..core.results import Picture, axes
from ..core.sums import Sums
from ._dissimilarities import average_ranks, dissimilarities
from ._minibatch_analyzer import MinibatchAnalyzer, MinibatchMatrix
from ._minibatch_pairs import Matrix, Relate
from ._permutation_null import is_one_model, null_fields, null_pictures
from .base import Run


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RSAResult(MinibatchMatrix):
    """Representational similarity between residual layers, with its permutation null.

    The fields of the null are those of `CalibratedMatrix`; they are NaN without `RSA(permutations=...)`.

    Attributes:
        values: `residual residual`, or `residual_a residual_b` between two models: correlation of the dissimilarities of two
            layers. NaN in the row and column of a layer whose dissimilarities are all equal; a `LayersimWarning` names it.
        samples: number of tokens (or sequences).
        minibatches: number of minibatches.
    """

    values: Float64[Tensor, "row column"] = axes("row", "column", within=(-1, 1))

    pictures: ClassVar[tuple[Picture, ...]] = (
        Picture(
            "values",
            "Representational similarity between layers",
            "Correlation of the dissimilarities between tokens at two layers: 1 where the same tokens are near and far, 0 for "
            "unrelated layers (Kriegeskorte, Mur and Bandettini 2008).",
        ),
        *null_pictures("RSA"),
    )

    similarity_name: ClassVar[str] = "RSA correlation"

    def headline(self) -> dict[str, float]:
        return self.to_last_headline("RSA") | self.null_headline() | {"samples in a minibatch": self.mean_minibatch}


@typed
@dataclass(frozen=True)
class RSA(MinibatchAnalyzer):
    r"""Representational similarity analysis: correlation of the dissimilarities between samples, for all pairs of layers.

    $$\mathrm{RSA}(l, l') = \mathrm{corr}_{i < j}\big(d(x_i^l, x_j^l),\; d(x_i^{l'}, x_j^{l'})\big)$$

    The correlation is taken within minibatches of n samples, over their n(n-1)/2 pairs, and averaged with the number of pairs
    as weight. The samples of a forward batch are shuffled first, as for `CKA`. A minibatch in which all dissimilarities of a
    layer are equal is left out of the averages of that layer with all others.

    Args:
        dissimilarity: d. "correlation" is 1 minus the Pearson correlation of two vectors over their dimensions, "cosine" 1
            minus their cosine, "euclidean" their distance. Dissimilarities are rounded to float32, so that equal samples tie.
        compare: "spearman" correlates the ranks of dissimilarities, where equal ones share the mean of their ranks; "pearson"
            correlates the dissimilarities.
        minibatch: n. A forward batch of fewer samples is one smaller minibatch; remaining samples are dropped at random.
        level: "token" takes each token as a sample; "sequence" each row of tokens.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token.
        seed: of the shuffle and of the permutations.
        max_memory_gb: limit for the sums of the null.
        permutations: number of random pairings of the samples of each minibatch, for the null; 0 for no null.

    Source:
        Kriegeskorte, Mur and Bandettini 2008, doi:10.3389/neuro.06.004.2008. The null is that of `CalibratedMatrix`.

    Examples:
        The RSA of a layer with itself is 1.

        >>> import tl_layersim as lsim
        >>> rsa = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.RSA(minibatch=64)])["rsa"]
        >>> rsa.values.shape, round(float(rsa.values[4, 4]), 9)
        (torch.Size([9, 9]), 1.0)
    """

    name: ClassVar[str] = "rsa"

    dissimilarity: Literal["correlation", "cosine", "euclidean"] = "correlation"
    compare: Literal["spearman", "pearson"] = "spearman"
    minibatch: int = 256
    level: Literal["token", "sequence"] = "token"
    pool: Literal["mean", "last", "first"] = "mean"
    seed: int = 0
    max_memory_gb: int | float = 4.0
    permutations: int = 0

    @property
    def matrix(self) -> Matrix:
        return partial(dissimilarities, kind=self.dissimilarity)

    @property
    def relate(self) -> Relate:
        return partial(centred_dissimilarities, ranked=self.compare == "spearman")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minibatch < self.least:
            raise LayersimError(
                f"`minibatch` must be at least {self.least}: fewer samples have too few pairs to correlate.",
                given=f"minibatch={self.minibatch}",
                expected=f"{self.least} or more",
                do="RSA(minibatch=256)",
            )

    def compute(self, sums: Sums, run: Run) -> RSAResult:
        self.need_minibatch(sums, run)
        own_x, own_y = sums["xx"], sums["yy"]
        self._undefined(own_x > 0, own_y > 0, run)
        # Pairs of samples of the minibatches in which both layers have unequal dissimilarities. 0 / 0 is NaN.
        scale = sums["norms"]
        values = (sums["xy"] / scale).clamp(-1, 1)
        null = sums["null xy"] / scale if self.permutations else values.new_zeros(0, *values.shape)
        return RSAResult(
            values=values,
            samples=int(sums["samples"]),
            minibatches=int(sums["minibatches"]),
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
            **null_fields(values, null, one_model=is_one_model(run.models)),
        )

    def _undefined(self, defined_x: Tensor, defined_y: Tensor, run: Run) -> None:
        """Warn of layers whose dissimilarities are all equal; refuse a run in which all layers are of this kind."""
        sides = ((run.layers, defined_x), (run.column_layers, defined_y))
        equal = list(
            dict.fromkeys(name for names, defined in sides for name, one in zip(names, defined, strict=True) if not one)
        )
        if not bool(defined_x.any() and defined_y.any()):
            raise LayersimError(
                f"RSA is not defined at any layer: all {self.unit} are equally dissimilar.",
                given=f"equal dissimilarities at {', '.join(equal[:4])}",
                expected="activations that differ from sample to sample",
                do="pass more varied data",
            )
        if equal:
            warn(
                f"RSA is not defined at {', '.join(equal[:4])}{' and others' if len(equal) > 4 else ''}, and NaN there: all "
                f"{self.unit} of a minibatch are equally dissimilar, as first tokens are before the first attention."
            )


def centred_dissimilarities(matrix: Tensor, *, ranked: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Dissimilarities of all pairs of samples, centred and scaled to a sum of squares equal to the number of pairs.

    The product of two layers is the number of pairs times the correlation. A layer of equal dissimilarities is 0.

    Args:
        matrix: `layer n n`.
        ranked: whether to replace dissimilarities by their ranks.
    """
    layers, n = matrix.shape[:2]
    first, second = torch.triu_indices(n, n, 1, device=matrix.device)
    pairs = matrix[:, first, second]
    # The mean of equal float32 numbers, or of equal ranks, is exact in float64: pairs that do not vary become 0.
    pairs = average_ranks(pairs) if ranked else pairs.double()
    pairs = pairs - pairs.mean(1, keepdim=True)
    # Each pair is in the matrix twice.
    pairs = torch.nn.functional.normalize(pairs, dim=1) * math.sqrt(len(first) / 2)
    relation = pairs.new_zeros(layers, n, n)
    relation[:, first, second] = pairs
    relation[:, second, first] = pairs
    return relation.flatten(1), {}
