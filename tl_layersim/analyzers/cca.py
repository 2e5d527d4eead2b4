"""Canonical correlation analysis (CCA) between sites: mean CCA, SVCCA and projection-weighted CCA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core import Sums, axes, result_class, typed, warn
from ..core.arguments import Fraction
from ._moments import SMALLEST_EIGENVALUE, Covariances, CrossProductAnalyzer, Sites
from ._pairwise import angles, arccos_distance
from ._permutation_null import CalibratedMatrix
from .analyzer import Run

# Below this number of samples for each dimension, a warning states what unrelated sites would read.
FEW_SAMPLES_PER_DIMENSION = 10


class WhitenedSite(NamedTuple):
    """A site after whitening: its principal directions, scaled to variance 1.

    Attributes:
        whiten: `width dimension`, maps centred samples to uncorrelated dimensions of variance 1.
        spread: `width dimension`, covariance of the site's dimensions with the whitened dimensions.
        directions: number of leading principal directions that SVCCA compares.
    """

    whiten: Tensor
    spread: Tensor
    directions: int


@result_class
class CCAResult(CalibratedMatrix):
    """Summaries of the canonical correlations between sites. Float64; NaN if all samples of a site are equal.

    Attributes:
        values: `row column`, mean canonical correlation. There are as many correlations as the smaller of both sites has
            dimensions.
        squared: `row column`, mean squared canonical correlation (R2_CCA of Kornblith et al. 2019).
        svcca: `row column`, mean canonical correlation of the leading principal directions of both sites.
        pwcca: `row column`, projection-weighted CCA: mean of the correlations, weighted by how much of the row site each
            canonical direction accounts for. Not symmetric.
        column_pwcca: `row column`, projection-weighted CCA with weights by the column site.
        dimensions: `residual`, number of principal directions with a variance above rounding, which CCA compares.
        column_dimensions: `column`, the same for the sites of the second model; within one model, `dimensions` again.
        directions: `residual`, number of leading principal directions that SVCCA compares.
        column_directions: `column`, the same for the sites of the second model; within one model, `directions` again.
        samples: number of tokens (or sequences).
    """

    measure: ClassVar[str] = "CCA"
    partners: ClassVar[Mapping[str, str]] = {"pwcca": "column_pwcca", "column_pwcca": "pwcca"}
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Mean canonical correlation",
        title="Mean canonical correlation of sites",
        caption="Mean correlation of the best matching linear functions of two sites: 1 if each site is a linear function of "
        "the other. Directions of small variance count as much as others (Raghu et al. 2017).",
        within=(0, 1),
    )
    squared: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Mean squared canonical correlation",
        title="Mean squared canonical correlation of sites",
        within=(0, 1),
    )
    svcca: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="SVCCA",
        title="SVCCA of sites",
        caption="Mean canonical correlation of the leading principal directions of both sites (Raghu et al. 2017).",
        within=(0, 1),
    )
    pwcca: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Projection-weighted CCA",
        title="Projection-weighted CCA of sites",
        caption="Canonical correlations weighted by how much of the row site they account for (Morcos et al. 2018).",
        within=(0, 1),
    )
    column_pwcca: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Projection-weighted CCA (weights by the column site)",
        title="Projection-weighted CCA, weighted by the column site",
        within=(0, 1),
    )
    dimensions: Float64[Tensor, " row"] = axes("residual", label="Dimensions", title="Dimensions of each layer", within=None)
    column_dimensions: Float64[Tensor, " column"] = axes(
        "column", label="Dimensions", title="Dimensions of each layer of the other side", within=None
    )
    directions: Float64[Tensor, " row"] = axes(
        "residual", label="Principal directions", title="Principal directions of each layer", within=None
    )
    column_directions: Float64[Tensor, " column"] = axes(
        "column", label="Principal directions", title="Principal directions of each layer of the other side", within=None
    )
    samples: int

    distance_name: ClassVar[str] = "CCA distance (radians)"

    @property
    def angle(self) -> Tensor:
        """`row column`, arccos of the mean canonical correlation, in radians.

        It is a metric between sites of equally many dimensions.

        Source:
            Williams et al. 2021 (arXiv 2110.14739).
        """
        return angles(self)

    def distance(self) -> float:
        r"""Distance between two models of equal depth, summed over pairs of layers at the same depth.

        $$\sqrt{\sum_{l=1}^{L} \arccos(\bar\rho(H_l, H'_l))^2}$$

        with the mean canonical correlation of each pair of equal layers. The angle of sites with equally many dimensions is
        the Procrustes angle of the whitened sites, which is a metric.

        Raises:
            LayersimError: the models have different numbers of sites.

        Source:
            Williams et al. 2021, for the angle; summed over layers as in Brown et al. 2023, appendix C.2, equation 2.
        """
        return arccos_distance(self)


@typed
@dataclass(frozen=True, eq=False)
class CCA(CrossProductAnalyzer):
    r"""Canonical correlations between all pairs of sites, within a model or between two models: mean CCA, SVCCA and PWCCA.

    $$\rho_i = \sigma_i(\Sigma_X^{-1/2} \Sigma_{XY} \Sigma_Y^{-1/2}), \qquad \bar\rho = \frac{1}{r} \sum_{i=1}^{r} \rho_i, \quad
    \bar\rho_{\mathrm{PW}} = \frac{\sum_i \alpha_i \rho_i}{\sum_i \alpha_i}, \quad
    \alpha_i = \sum_j |\langle h_i, x_j \rangle|$$

    with the covariances over all samples, the singular values $\sigma_i$, the smaller number r of dimensions of the two sites,
    the canonical variates $h_i$ of X and the columns $x_j$ of X. SVCCA is $\bar\rho$ of the leading principal directions of
    both sites. Mean CCA is invariant to all invertible linear maps of either site. SVCCA is invariant to rotation
    and isotropic scale only, PWCCA to isotropic scale of the site that gives the weights and to linear maps of the other.

    Covariances are exact sums in float64 over all samples. Principal directions whose variance is below 1e-12 of the largest
    one, or below the rounding error of the sums, have no defined inverse and are left out; `dimensions` counts the others.
    Unrelated sites of d dimensions have a mean squared correlation of about d / n at n samples, and of 1 at n <= d: a warning
    is issued below ten samples for each dimension, and `permutations` measures this baseline.

    Args:
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS].
        permutations: number of random pairings of texts for the null distribution of mean CCA, see `Procrustes`. Each pairing
            has its own cross-products, so memory and time grow by this factor: select a few sites with `at=`.
        unit: see `Procrustes`.
        seed: random seed of the pairings.
        max_memory_gb: limit for the sums; a run that needs more raises an error before it starts. One model of L sites of width
            d needs 24 L (L + 1) / 2 d^2 bytes.
        variance: fraction of a site's variance that the principal directions of SVCCA explain together.

    Source:
        Hotelling 1936; Raghu et al. 2017 (arXiv 1706.05806) for SVCCA; Morcos, Raghu and Bengio 2018 (arXiv 1806.05759)
        for PWCCA, whose code weights by the site with fewer dimensions; here by the row site in `pwcca` and by
        the column site in `column_pwcca`.

    Examples:
        >>> import tl_layersim as lsim
        >>> cca = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:40], [lsim.CCA()])["cca"]
        >>> cca.values.shape, float(cca.values[4, 4]), bool(cca.svcca[0, 8] < 1)
        (torch.Size([9, 9]), 1.0, True)
    """

    name: ClassVar[str] = "cca"
    seconds_per_pair: ClassVar[float] = 0.2

    variance: Fraction = 0.99

    def compute(self, sums: Sums, run: Run) -> CCAResult:
        count = int(sums["samples"])
        products = Covariances(sums)
        defined = (products.rows.defined, products.columns.defined)
        defined_pairs = self.defined_pairs(run, defined, count)
        rows, columns = self._whitened_sites(products)
        largest = max(site.whiten.shape[1] for site in (*rows, *columns))
        # Few samples for each dimension make values of unrelated sites large.
        if count - 1 < FEW_SAMPLES_PER_DIMENSION * largest:
            share = min(largest / (count - 1), 1)
            trivial = " Every value is 1 by construction." if share == 1 else ""
            warn(
                f"CCA rests on {count} {self.sample_word} of up to {largest} dimensions: unrelated sites would have a "
                f"mean squared correlation of about {share:.2f}.{trivial} Pass more data, or measure this "
                "baseline with permutations=200 at a few sites."
            )
        fields: dict[str, Any] = {}
        for name, values in _summaries(products, rows, columns).items():
            fields[name] = values.where(defined_pairs, math.nan)
        null: dict[str, Any] = {}
        if "null.samples" in sums.fields:
            exchanged = Covariances(sums, "null.")
            sites = self._whitened_sites(exchanged)
            null = self.null(run, defined_pairs, [exchanged], lambda parts, _: _means(parts[0], *sites))
        return CCAResult(
            **fields,
            **null,
            dimensions=_dimension_counts([site.whiten.shape[1] for site in rows], defined[0]),
            column_dimensions=_dimension_counts([site.whiten.shape[1] for site in columns], defined[1]),
            directions=_dimension_counts([site.directions for site in rows], defined[0]),
            column_directions=_dimension_counts([site.directions for site in columns], defined[1]),
            samples=count,
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
        )

    def _whitened_sites(self, products: Covariances) -> tuple[list[WhitenedSite], list[WhitenedSite]]:
        rows = [self._whitened(products.rows, site, products.samples) for site in range(len(products.rows.mean))]
        if not products.two_models:
            return rows, rows
        columns = [self._whitened(products.columns, site, products.samples) for site in range(len(products.columns.mean))]
        return rows, columns

    def _whitened(self, sites: Sites, site: int, count: int) -> WhitenedSite:
        """Whiten a site; the direction of largest variance comes first."""
        eigenvalues, vectors = torch.linalg.eigh(sites.covariance(site))
        eigenvalues = eigenvalues.flip(0)
        vectors = vectors.flip(1)
        rounding_error = 100 * torch.finfo(torch.float64).eps * float(sites.square[site])
        floor = max(SMALLEST_EIGENVALUE * float(eigenvalues[0]), rounding_error)
        # n samples span n - 1 dimensions about their mean.
        dimensions = min(int((eigenvalues > floor).sum()), count - 1) if sites.defined[site] else 0
        eigenvalues = eigenvalues[:dimensions]
        vectors = vectors[:, :dimensions]
        explained = eigenvalues.cumsum(0) / eigenvalues.sum()
        # As many directions as are needed for the fraction; a rounding error below it is none.
        directions = min(int((explained < self.variance - 1e-12).sum()) + 1, dimensions)
        return WhitenedSite(vectors / eigenvalues.sqrt(), vectors * eigenvalues.sqrt(), directions)


def _dimension_counts(numbers: list[int], defined: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).where(defined, math.nan)


def _whitened_covariances(
    products: Covariances, rows: list[WhitenedSite], columns: list[WhitenedSite], *, with_diagonal: bool
) -> dict[tuple[int, int], Tensor]:
    """A dict of the cross-covariance of each pair of whitened sites. Sites without dimensions are left out."""
    whitened = {}
    for row, partners in products.pairs(with_diagonal=with_diagonal):
        for column, covariance in zip(partners, products.between(row, partners), strict=True):
            if rows[row].directions and columns[column].directions:
                whitened[row, column] = rows[row].whiten.T @ covariance @ columns[column].whiten
    return whitened


def _summaries(products: Covariances, rows: list[WhitenedSite], columns: list[WhitenedSite]) -> dict[str, Tensor]:
    """A dict of mean CCA, SVCCA and PWCCA, each `row column`. Within one model, a site has 1 with itself."""
    out = {}
    for name in ("values", "squared", "svcca", "pwcca", "column_pwcca"):
        out[name] = torch.eye(len(rows), len(columns), dtype=torch.float64)
    for (row, column), matrix in _whitened_covariances(products, rows, columns, with_diagonal=False).items():
        u, rho, vh = torch.linalg.svd(matrix, full_matrices=False)
        # Rounding can yield correlations above 1.
        rho = rho.clamp(max=1)
        leading = torch.linalg.svdvals(matrix[: rows[row].directions, : columns[column].directions]).clamp(max=1)
        row_weights = (rows[row].spread @ u).abs().sum(0)
        column_weights = (columns[column].spread @ vh.T).abs().sum(0)
        entries = [(row, column, row_weights, column_weights)]
        if not products.two_models:
            # Within one model, the same pair of sites in the other order.
            entries.append((column, row, column_weights, row_weights))
        for a, b, a_weights, b_weights in entries:
            out["values"][a, b] = rho.mean()
            out["squared"][a, b] = rho.square().mean()
            out["svcca"][a, b] = leading.mean()
            out["pwcca"][a, b] = a_weights @ rho / a_weights.sum()
            out["column_pwcca"][a, b] = b_weights @ rho / b_weights.sum()
    return out


def _means(products: Covariances, rows: list[WhitenedSite], columns: list[WhitenedSite]) -> Tensor:
    """Mean canonical correlation of all pairs (`row column`)."""
    out = torch.full((len(rows), len(columns)), math.nan, dtype=torch.float64)
    for (row, column), matrix in _whitened_covariances(products, rows, columns, with_diagonal=True).items():
        out[row, column] = torch.linalg.svdvals(matrix).clamp(max=1).mean()
        if not products.two_models:
            out[column, row] = out[row, column]
    return out
