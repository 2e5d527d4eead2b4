"""Procrustes: similarity of sites up to rotation, or up to the order of dimensions, with angles that are metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core import Sums, axes, result_class, typed
from ..core.result_declarations import NOT_MEASURED
from ._moments import Covariances, CrossProductAnalyzer, warn_of_few_samples
from ._pairwise import arccos_distance
from ._permutation_null import CalibratedMatrix
from .analyzer import Run
from .needs import Needs


@result_class
class ProcrustesResult(CalibratedMatrix):
    """Procrustes similarities between sites, with angles and distances.

    Float64; NaN at sites whose samples are all equal.

    Attributes:
        values: `row column`, similarity: the nuclear norm of X'Y, for centred X and Y of Frobenius norm 1. 1 if one site is a
            rotation of the other, up to translation and scale; 0 if all dimensions are uncorrelated.
        angle: `row column`, arccos of the similarity, in radians. It satisfies the triangle inequality.
        euclidean: `row column`, root mean squared distance between the centred samples of two sites after the best rotation,
            without scaling: $\\min_Q \\lVert X - YQ' \\rVert_F / \\sqrt{n}$. A metric too, in units of the activations.
        samples: number of tokens (or sequences).
    """

    measure: ClassVar[str] = "Procrustes"
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Procrustes similarity",
        title="Procrustes similarity of sites",
        caption="Similarity of the samples at two sites after the best rotation: 1 for equal shapes, 0 for uncorrelated "
        "dimensions (Williams et al. 2021). It is above 0 for unrelated sites too, by about sqrt(d / n) at width d with n "
        "samples.",
        within=(0, 1),
    )
    angle: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Procrustes angle",
        unit="radians",
        title="Procrustes angle between sites",
        caption="Angular distance arccos(similarity), which is a metric (Williams et al. 2021, Generalized Shape Metrics).",
        within=(0, math.pi / 2),
    )
    euclidean: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Procrustes distance",
        title="Procrustes distance between sites, without scaling",
        caption="Root mean squared distance between samples at two sites after the best rotation (Williams et al. 2021).",
        default=NOT_MEASURED,
        within=(0, math.inf),
    )
    samples: int

    distance_name: ClassVar[str] = "Procrustes distance (radians)"

    def distance(self) -> float:
        r"""Distance between two models of equal depth, summed over pairs of layers at the same depth.

        $$\sqrt{\sum_{l=1}^{L} \theta(H_l, H'_l)^2}$$

        with the angle of each pair of equal layers. It is a metric between models.

        Raises:
            LayersimError: the models have different numbers of sites.

        Source:
            Williams et al. 2021 for the angle; summed over layers as in Brown et al. 2023, appendix C.2, equation 2.
        """
        return arccos_distance(self)


@result_class
class PermutationProcrustesResult(ProcrustesResult):
    """Similarities of sites up to the order of their dimensions: the fields of a `ProcrustesResult`.

    Attributes:
        values: `row column`, similarity: the largest trace of X'Y over orders of the columns of Y, for centred X and Y of
            Frobenius norm 1. 1 if the dimensions of one site are those of the other in another order, up to translation and
            scale.
        angle: `row column`, arccos of the similarity, in radians. It satisfies the triangle inequality.
    """

    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Procrustes similarity by permutation",
        title="Similarity of sites up to the order of dimensions",
        caption="Similarity of the samples at two sites after the best matching of their dimensions (Williams et al. 2021).",
        within=(-1, 1),
    )
    angle: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Procrustes angle by permutation",
        unit="radians",
        title="Angle between sites, up to the order of dimensions",
        caption="Angular distance arccos(similarity), which is a metric (Williams et al. 2021, Generalized Shape Metrics).",
        within=(0, math.pi),
    )


@typed
@dataclass(frozen=True, eq=False)
class Procrustes(CrossProductAnalyzer):
    r"""Procrustes similarity between all pairs of sites, within a model or between two models.

    $$s(X, Y) = \max_{Q'Q = I} \mathrm{tr}(Q' X'Y) = \lVert X'Y \rVert_*, \qquad
    \min_Q \lVert X - YQ' \\rVert_F^2 = 2 - 2 s, \qquad \theta(X, Y) = \arccos s$$

    for X and Y with centred columns and Frobenius norm 1. Widths may differ: the narrower site is padded with zeros, which does
    not change the nuclear norm. The measure is invariant to rotation, translation and isotropic scale of either site, and not
    to other linear maps. The angle is a metric. `euclidean` in the result is the distance of X and Y that are centred, but not
    scaled.

    With alignment="permutation", Q is a permutation of the dimensions, found by linear assignment on X'Y: neurons are matched
    one to one, and the measure is not invariant to rotation.

    Cross-products are summed in one pass, so that the value is that of all samples, whatever the batches are. Independent sites
    of width d have a similarity of about 0.85 sqrt(d / n) at n samples, so values of different widths or numbers of samples
    are not comparable; `permutations` measures this baseline.

    Args:
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS].
        permutations: number of random pairings for the null distribution of each value and of the maximum over pairs. In pools
            of 16 texts (256 texts if each has one sample), whole texts are exchanged, position with position, in the same way
            for all pairs of sites. Each pairing has its own cross-products, so memory and time grow by this factor: select a
            few sites with `at=`.
        unit: the unit that the null exchanges: "text" for whole texts, with all rows that are cut from them or have their
            group; "row" for rows, "token" for single samples.
        seed: random seed of the pairings.
        max_memory_gb: limit for the sums; a run that needs more raises an error before it starts. One model of L sites of width
            d needs 24 L (L + 1) / 2 d^2 bytes.
        alignment: "rotation" for the best orthogonal map, reflections included; "permutation" for the best order of dimensions.

    Source:
        Schoenemann 1966; Williams, Kunz, Kornblith and Linderman 2021 (arXiv 2110.14739), for both groups of maps, and for
        the metrics with and without scaling.

    Examples:
        The similarity of a site with itself is 1.

        >>> import tl_layersim as lsim
        >>> found = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Procrustes()])["procrustes"]
        >>> found.values.shape, float(found.values[4, 4]), float(found.angle[4, 4])
        (torch.Size([9, 9]), 1.0, 0.0)
    """

    name: ClassVar[str] = "procrustes"
    seconds_per_pair: ClassVar[float] = 0.07

    alignment: Literal["rotation", "permutation"] = "rotation"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, dominance=("samples", "variance"))

    def compute(self, sums: Sums, run: Run) -> ProcrustesResult:
        count = int(sums["samples"])
        products = Covariances(sums)
        defined = self.defined_pairs(run, (products.rows.defined, products.columns.defined), count)
        warn_of_few_samples("Procrustes", count, sums["x"].shape[-1], self.sample_word)
        traces = self._traces(products, with_diagonal=False)
        values = _similarities(traces, products, with_diagonal=False).where(defined, math.nan)
        squared = products.rows.variance[:, None] + products.columns.variance - 2 * traces
        if not products.two_models:
            squared.fill_diagonal_(0)
        null: dict[str, Any] = {}
        if "null.samples" in sums.fields:
            exchanged = Covariances(sums, "null.")
            # Permuting the samples of a site changes its covariances with others, not its variance.
            null = self.null(
                run,
                defined,
                [exchanged],
                lambda parts, permuted: _similarities(
                    self._traces(parts[0], with_diagonal=permuted), exchanged, with_diagonal=permuted
                ),
            )
        kind = ProcrustesResult if self.alignment == "rotation" else PermutationProcrustesResult
        return kind(
            values=values,
            angle=values.arccos(),
            # The difference of equal numbers may be negative by rounding.
            euclidean=squared.clamp(min=0).sqrt().where(defined, math.nan),
            samples=count,
            **null,
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
        )

    def _traces(self, products: Covariances, *, with_diagonal: bool) -> Tensor:
        """Largest trace of the cross-covariance of each pair of sites, over the maps of `alignment` (`row column`).

        Args:
            products: covariances between the sites.
            with_diagonal: whether a site of one model is also compared with itself; else 0.
        """
        traces = torch.zeros(len(products.rows.variance), len(products.columns.variance), dtype=torch.float64)
        for row, columns in products.pairs(with_diagonal=with_diagonal):
            covariances = products.between(row, columns)
            if self.alignment == "rotation":
                traces[row, columns] = torch.linalg.svdvals(covariances).sum(-1)
            else:
                traces[row, columns] = torch.stack([matched_trace(covariance) for covariance in covariances])
            if not products.two_models:
                traces[columns, row] = traces[row, columns]
        return traces


def matched_trace(covariance: Tensor) -> Tensor:
    """Largest sum of entries of which no two share a row or a column, as many as the smaller side has (a scalar).

    Args:
        covariance: `row_width column_width`.

    Examples:
        >>> matched_trace(torch.tensor([[1.0, 5.0], [2.0, 1.0]]))
        tensor(7.)
    """
    # scipy is imported here, because servers run kernels without it.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(covariance.numpy(), maximize=True)
    return covariance[rows, columns].sum()


def _similarities(traces: Tensor, with_itself: Covariances, *, with_diagonal: bool) -> Tensor:
    """Procrustes similarities (`row column`): traces of aligned cross-covariances, divided by roots of variances.

    Args:
        traces: traces between the sites.
        with_itself: covariance of each site with itself.
        with_diagonal: whether a site of one model is also compared with itself.
    """
    row_scale = with_itself.rows.variance.clamp(min=0).sqrt()
    column_scale = with_itself.columns.variance.clamp(min=0).sqrt()
    # Rounding can yield similarities above 1.
    values = (traces / torch.outer(row_scale, column_scale)).clamp(max=1)
    if not with_itself.two_models and not with_diagonal:
        values.fill_diagonal_(1)
    return values
