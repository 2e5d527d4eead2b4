"""Second moments of sites: cross-products, covariances and ridge regression, for `Procrustes`, `CCA` and `LinearPredictivity`.

The sums are uncentred float64. Activations of float32 lose the spread s about a mean m with an error of about 6e-8 m / s, and
the sums with an error of about 1e-16 (m / s)^2, which is smaller wherever float32 represents the spread at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor

from ..activations.row_pools import SAMPLES_OF_POOL, Draws, PoolKernel, Samples, pool_texts
from ..activations.view import Kernel, View, row_ends
from ..core import LayersimError, Sums, typed, warn
from ..core.arguments import Limit, PermutationCount, Seed
from ..core.wording import amount
from ..sources.model_description import ModelDescription
from ._permutation_null import is_one_model, null_fields
from ._samples import draw_grid, draw_permutations, pool_key, text_of, with_unit
from .analyzer import Run, SampleAnalyzer, compared, refuse_undefined
from .needs import Needs

EPS = torch.finfo(torch.float64).eps
# A spread below this multiple of the rounding error of its sums is none.
ROUNDING = 1e4 * EPS
# Principal directions whose variance is below this fraction of the largest one are left out: float32 does not resolve them.
SMALLEST_EIGENVALUE = 1e-12
# Below this number of held-out texts a warning is given: with 20 texts, the standard error of an accuracy of .7 is .10.
FEW_HELD_OUT_TEXTS = 20
# Samples of a pool whose texts are exchanged: 16 texts of tokens, or 256 texts of one sample.
EXCHANGED = 256


def cross_product_kernel(*views: View, rows: partial[Tensor], split: partial[Tensor] | None = None) -> dict[str, Tensor]:
    """Cross-products between the sites of one or two models, over one batch.

    Analyzers of one run that read the same samples of one model share the products of a batch.

    Args:
        *views: the view of one model, or the views of two models on the same tokens.
        rows: function that takes a view and returns its samples, `site sample width`.
        split: function that takes the text of each sample and returns whether it is held out. Training samples ("train.") and
            held-out samples ("test.") then have products of their own. None for products of all samples.

    Returns:
        See `cross_products`.
    """
    if split is not None:
        return _split_cross_products(views, rows, split)
    key = f"cross-products {sorted(rows.keywords.items())}"
    if len(views) == 1:
        memo = views[0].memo
        key_of_model = f"{key} of one model"
        if key_of_model not in memo:
            memo[key_of_model] = cross_products([rows(views[0]).double()])
        shared: dict[str, Tensor] = memo[key_of_model]
        return shared
    sides = [rows(view).double() for view in views]
    for view, side in zip(views, sides, strict=True):
        # A model that is compared with several others is multiplied with itself once.
        if key not in view.memo:
            view.memo[key] = side.mT @ side
    return cross_products(sides, with_itself=[view.memo[key] for view in views])


def _split_cross_products(views: Sequence[View], rows: partial[Tensor], split: partial[Tensor]) -> dict[str, Tensor]:
    text = text_of(views[0])
    if rows.keywords["level"] == "sequence":
        text = text[row_ends(views[0]).to(text.device)]
    test = split(text)
    sides = [rows(view).double() for view in views]
    out: dict[str, Tensor] = {}
    for name, chosen in (("train", ~test), ("test", test)):
        # A batch may have held-out rows only, or none.
        products = cross_products([side[:, chosen.to(side.device)] for side in sides])
        for field, value in products.items():
            out[f"{name}.{field}"] = value
    out["test.texts"] = torch.tensor(len(torch.unique(text[test])))
    return out


def draw_exchanged(samples: Samples, *, seed: int, unit: str, split: partial[Tensor] | None) -> Draws:
    """Draw samples for the permutation null from collected rows. Returns a dict of their indices (`text position`) by part.

    Whole texts are permuted at positions that all of them have. A single sample is a text of one position.

    Args:
        samples: the samples of a pool.
        seed: random seed of the draw.
        unit: what is exchanged, see `with_unit`.
        split: as for `cross_product_kernel`: training samples are exchanged with each other, and so are held-out samples.
    """
    test = torch.zeros_like(samples.row, dtype=torch.bool) if split is None else split(samples.origin)
    samples = with_unit(samples, unit)
    parts = {"": ~test} if split is None else {"train.": ~test, "test.": test}
    out = {}
    for name, chosen in parts.items():
        index = chosen.nonzero()[:, 0]
        grid = torch.arange(len(index))[:, None]
        if unit != "token":
            grid = draw_grid(samples.select(index), len(index) * SAMPLES_OF_POOL, seed, least_texts=1)
        out[name] = [index[grid]]
    return out


def exchanged_sums(
    sides: Sequence[Tensor],
    widths: Sequence[tuple[int, ...]],
    samples: Samples,
    draws: Draws,
    *,
    permutations: int,
    seed: int,
) -> dict[str, Tensor]:
    """Cross-products between sites over the samples drawn for the permutation null.

    Sites are multiplied in true order, and with the rows of the second site permuted.

    Args:
        sides: samples of one model or of two, `site sample width`.
        widths: widths of the sites.
        samples: rows and hashes of the samples.
        draws: indices of the drawn samples, `row position`, by part of the data.
        permutations: number of random pairings of rows.
        seed: random seed of the pairings.

    Returns:
        See `cross_products`; names begin with "null." and the name of the part.
    """
    out: dict[str, Tensor] = {}
    for name, [grid] in draws.items():
        if not grid.numel():
            continue
        order = draw_permutations(permutations, len(grid), pool_key(samples, seed))
        place = torch.arange(grid.numel()).view(grid.shape)
        drawn_sides = [side[:, grid.flatten().to(side.device)].double() for side in sides]
        products = cross_products(drawn_sides, place[order].flatten(1))
        for field, value in products.items():
            out[f"null.{name}{field}"] = value
    return out


def cross_products(
    sides: Sequence[Tensor], permutations: Tensor | None = None, with_itself: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Cross-products X'Y between the sites of one or two models, and sums of the samples.

    Args:
        sides: samples of each model, `site sample width`, float64.
        permutations: `permutation sample`, indices of the permuted samples; None without a null.
        with_itself: for each of two models, cross-products of each site with itself, if they are known, `site width width`.

    Returns:
        `samples`, their number; `x`, sums of the samples, `site width`; `cross`, `pair width width`, for the pairs of sites (0,
        0), (0, 1), ..., (1, 1), (1, 2), ... of one model (the other pairs are transposes), or for the first site of the first
        model and all sites of the second, then its second site, and so on; for two models also `y`, and `xx` and `yy`, the
        products in `with_itself`; with permutations also `null`, `permutation pair width width`, as `cross` with permuted
        samples of the second site.
    """
    x = sides[0]
    y = sides[-1].to(x.device)
    one_model = len(sides) == 1
    out = {"samples": torch.tensor(x.shape[1]), "x": x.sum(1), "cross": _products(x, y, one_model=one_model)}
    if not one_model:
        xx, yy = with_itself or [side.mT @ side for side in sides]
        out |= {"y": y.sum(1), "xx": xx, "yy": yy}
    if permutations is not None:
        null = [_products(x, y[:, order], one_model=one_model) for order in permutations.to(x.device)]
        out["null"] = torch.stack(null)
    return out


def _products(x: Tensor, y: Tensor, *, one_model: bool) -> Tensor:
    """Products x'y of pairs of sites (`pair width_x width_y`). Within one model, each unordered pair occurs once."""
    width = y.shape[-1]
    flat = rearrange(y, "site sample d -> sample (site d)").contiguous()
    # Within one model, a site is multiplied with itself and with later sites.
    counts = [len(y) - site * one_model for site in range(len(x))]
    out = x.new_empty(sum(counts), x.shape[-1], width)
    start = 0
    for x_samples, count in zip(x, counts, strict=True):
        product = x_samples.T @ flat[:, (len(y) - count) * width :]
        out[start : start + count] = rearrange(product, "d (site e) -> site d e", site=count)
        start += count
    return out


def warn_of_few_samples(measure: str, samples: int, width: int, unit: str) -> None:
    """Warn if a result is computed from fewer samples than dimensions.

    Args:
        measure: name of the analyzer.
        samples: number of samples.
        width: width of the widest site.
        unit: the word for samples, in the plural.
    """
    if samples < width:
        warn(
            f"{measure} rests on {samples:,} {unit} of {width:,} dimensions. With fewer samples than dimensions, the result "
            "depends on the number of samples. Pass more data, or compare sites on equally many samples."
        )


def warn_of_few_texts(measure: str, texts: int) -> None:
    """Warn if a measure is evaluated on fewer than `FEW_HELD_OUT_TEXTS` held-out texts.

    Args:
        measure: name of the analyzer.
        texts: number of held-out texts with samples.
    """
    if texts < FEW_HELD_OUT_TEXTS:
        warn(
            f"{measure} is evaluated on {amount(texts, 'held-out text')}, so its values vary by 0.1 or more between random "
            "samples of texts. Pass more texts, or a larger test_fraction=."
        )


def ridge_weights(covariance: Tensor, cross: Tensor, mean: Tensor, ridge: float) -> Tensor:
    """Coefficients of a ridge regression that standardises its predictors.

    The covariance of standardised dimensions has a mean eigenvalue of 1, and one dimension of large variance does not raise the
    penalty of the others.

    Args:
        covariance: `width width`, covariance of the predicting dimensions.
        cross: `... width target`, covariances of the predicting dimensions with the targets.
        mean: `width`, mean of the predicting dimensions.
        ridge: penalty on the squared weights of standardised dimensions.

    Returns:
        Weights for the dimensions before standardisation, of the shape of `cross`; 0 for dimensions without spread, such as
        padding.

    Raises:
        LayersimError: the penalty is within the rounding error of the sums.
    """
    variance = covariance.diagonal()
    power = variance + mean.square()
    has_spread = variance > ROUNDING * power
    least = 100 * EPS * (power / variance).where(has_spread, 0).max()
    if not ridge >= least:
        raise LayersimError(
            f"`ridge` is {ridge:g}, which is lost in rounding because the activations have a large mean; it must be at least "
            f"{float(2 * least):.1g}."
        )
    scale = variance.where(has_spread, torch.inf).rsqrt()
    penalised = covariance * scale * scale[:, None] + ridge * torch.eye(len(covariance), dtype=torch.float64)
    standardised_weights = torch.cholesky_solve(cross * scale[:, None], torch.linalg.cholesky(penalised))
    return standardised_weights * scale[:, None]


def least_squares_weights(covariance: Tensor, cross: Tensor, mean: Tensor, samples: int) -> Tensor:
    """Coefficients of a regression without a penalty, those of least norm on standardised dimensions.

    Principal directions of the standardised predictors whose variance is below `SMALLEST_EIGENVALUE` of the largest one, or
    within the rounding error of the sums, predict nothing.

    Args:
        covariance: `width width`, covariance of the predicting dimensions.
        cross: `... width target`, covariances of the predicting dimensions with the targets.
        mean: `width`, mean of the predicting dimensions.
        samples: number of samples, n, which span n - 1 directions about their mean.

    Returns:
        Weights for the dimensions before standardisation, of the shape of `cross`.
    """
    variance = covariance.diagonal()
    power = variance + mean.square()
    has_spread = variance > ROUNDING * power
    rounding_error = 100 * EPS * (power / variance).where(has_spread, 0).max()
    scale = variance.where(has_spread, torch.inf).rsqrt()
    eigenvalues, vectors = torch.linalg.eigh(covariance * scale * scale[:, None])
    defined = eigenvalues > torch.maximum(SMALLEST_EIGENVALUE * eigenvalues[-1], rounding_error)
    # Eigenvalues are ascending.
    defined[: max(len(defined) - (samples - 1), 0)] = False
    vectors = vectors[:, defined]
    standardised_weights: Tensor = vectors @ ((vectors.T @ (cross * scale[:, None])) / eigenvalues[defined][:, None])
    return standardised_weights * scale[:, None]


def ridge_probe(second: Tensor, total: Tensor, counts: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Fit a linear probe by ridge regression on one-hot labels: weights `width class` and offsets `class`.

    Args:
        second: `width width`, sum of x x' over training samples.
        total: `class width`, sum of x over the training samples of each class.
        counts: `class`, number of training samples.
        ridge: see `ridge_weights`.

    Raises:
        LayersimError: the penalty is within the rounding error of the sums.
    """
    # Whole numbers divide to float32.
    n = counts.sum().double()
    mean = total.sum(0) / n
    share = counts / n
    cross = (total / n - torch.outer(share, mean)).T
    weight = ridge_weights(second / n - torch.outer(mean, mean), cross, mean, ridge)
    # A class without training samples is never predicted.
    offset = (share - mean @ weight).masked_fill(counts == 0, -torch.inf)
    return weight, offset


def samples_differ(second: Tensor, mean: Tensor) -> bool:
    """Whether samples differ by more than rounding.

    Args:
        second: `width width`, mean of x x' over the samples.
        mean: `width`, mean of the samples.
    """
    power = second.diagonal().sum()
    return bool(power - mean @ mean > ROUNDING * power)


class Sites:
    """Means and variances of the sites of one model. Variances are divided by n.

    Args:
        products: cross-products of each site with itself, `site width width`.
        total: sums of the samples, `site width`.
        samples: number of samples, n.

    Attributes:
        mean: `site width`, mean of the samples.
        square: `site`, mean squared norm of the samples.
        variance: `site`, mean squared distance from the mean.
        defined: `site`, whether the samples differ by more than rounding.
    """

    def __init__(self, products: Tensor, total: Tensor, samples: int) -> None:
        self._products = products
        self._samples = samples
        self.mean = total / max(samples, 1)
        self.square = products.diagonal(dim1=1, dim2=2).sum(1) / samples
        self.variance = self.square - self.mean.square().sum(1)
        self.defined = self.variance > ROUNDING * self.square

    def covariance(self, site: int) -> Tensor:
        """Covariance of a site with itself (`width width`)."""
        return self._products[site] / self._samples - torch.outer(self.mean[site], self.mean[site])


class Covariances:
    """Covariances between the sites of one or two models, divided by n.

    Args:
        sums: sums that `cross_products` returned, added over all batches.
        prefix: prefix of the names of the sums, such as "null.".

    Attributes:
        samples: number of samples, n.
        two_models: whether the columns are sites of a second model.
        rows: the sites of the model, or of the first of two models.
        columns: the sites of the second model; within one model, `rows` again.
        permutations: number of random pairings of samples.
    """

    def __init__(self, sums: Sums, prefix: str = "") -> None:
        fields = {name.removeprefix(prefix): value for name, value in sums.fields.items() if name.startswith(prefix)}
        self.samples = int(fields["samples"])
        self.two_models = "yy" in fields
        self._sizes = (len(fields["x"]), len(fields["y" if self.two_models else "x"]))
        self._null = fields.get("null", ())
        self.permutations = len(self._null)
        self._cross = self._by_pair(fields["cross"])
        if self.two_models:
            self.rows = Sites(fields["xx"], fields["x"], self.samples)
            self.columns = Sites(fields["yy"], fields["y"], self.samples)
        else:
            products = torch.stack([self._product(site, site) for site in range(self._sizes[0])])
            self.rows = self.columns = Sites(products, fields["x"], self.samples)

    def permuted(self, number: int) -> Covariances:
        """Covariances after the samples of the second site are permuted. The covariance of a site with itself is unchanged.

        Args:
            number: index of the permutation.
        """
        permuted = copy(self)
        permuted._cross = self._by_pair(self._null[number])
        return permuted

    def transposed(self) -> Covariances:
        """The covariances with rows and columns exchanged."""
        transposed = copy(self)
        transposed.rows = self.columns
        transposed.columns = self.rows
        transposed._sizes = self._sizes[::-1]
        if self.two_models:
            transposed._cross = self._cross.permute(1, 0, 3, 2)
        return transposed

    def pairs(self, *, with_diagonal: bool = False) -> list[tuple[int, list[int]]]:
        """The pairs of sites to compare, grouped by the first site. Within one model, each pair occurs once.

        Args:
            with_diagonal: within one model, whether to include the pair of each site with itself.
        """
        rows, columns = self._sizes
        pairs = []
        for row in range(rows):
            first = 0
            if not self.two_models:
                first = row if with_diagonal else row + 1
            if first < columns:
                pairs.append((row, list(range(first, columns))))
        return pairs

    def between(self, row: int, columns: list[int]) -> Tensor:
        """Covariances of the site `row` with the sites `columns` (`column row_width column_width`)."""
        products = torch.stack([self._product(row, column) for column in columns])
        return products / self.samples - self.rows.mean[row][:, None] * self.columns.mean[columns][:, None]

    def _by_pair(self, cross: Tensor) -> Tensor:
        return cross.view(*self._sizes, *cross.shape[1:]) if self.two_models else cross

    def _product(self, row: int, column: int) -> Tensor:
        """Cross-products of two sites (`row_width column_width`). Within one model, each pair of sites is stored once."""
        if self.two_models:
            return self._cross[row, column]
        if row > column:
            return self._product(column, row).T
        # The rows before this one have as many pairs as there are sites, one less, ...
        return self._cross[row * self._sizes[0] - row * (row - 1) // 2 + column - row]


@typed
@dataclass(frozen=True, eq=False)
class CrossProductAnalyzer(SampleAnalyzer):
    """Base class of analyzers that sum the cross-products between sites. Subclasses compute a result from the sums.

    Args:
        permutations: see `Procrustes`, as for all options.
        unit: see `Procrustes`.
        seed: see `Procrustes`.
        max_memory_gb: see `Procrustes`.
    """

    # Seconds on one core that the decomposition of a pair of sites of width 576 takes; they grow as its third power.
    seconds_per_pair: ClassVar[float]
    # Groups of samples that are summed separately.
    groups: ClassVar[int] = 1

    permutations: PermutationCount = 0
    unit: Literal["text", "row", "token"] = "text"
    seed: Seed = 0
    max_memory_gb: Limit = 4.0

    @property
    def needs(self) -> Needs:
        return replace(super().needs, models="one_or_two", symmetric=True)

    @property
    def split(self) -> partial[Tensor] | None:
        """Function from the texts of samples to a mask of held-out samples; None if no texts are held out."""
        return None

    def sum_numbers(self, *models: ModelDescription) -> float:
        cross = 0
        with_itself = 0
        if len(models) == 1:
            [model] = models
            sites = len(model.layers)
            cross = sites * (sites + 1) // 2 * (model.widest or 0) ** 2
        else:
            for a, b in compared(models, self.needs.symmetric):
                a_width = a.widest or 0
                b_width = b.widest or 0
                cross += len(a.layers) * len(b.layers) * a_width * b_width
                with_itself += len(a.layers) * a_width**2 + len(b.layers) * b_width**2
        return self.groups * (with_itself + cross * (1 + self.permutations))

    def compute_seconds(self, model: ModelDescription) -> float:
        pairs = len(model.layers) * (len(model.layers) + 1) // 2
        return pairs * (1 + self.permutations) * self.seconds_per_pair * ((model.widest or 0) / 576) ** 3

    def pool_need(self, density: float) -> int:
        if not self.permutations:
            return 0
        return pool_texts(EXCHANGED, 1 if self.needs.whole_rows else density)

    def kernel(self, first: Sums) -> Kernel:
        return partial(cross_product_kernel, rows=self.read, split=self.split)

    def pool_kernel(self, first: Sums) -> PoolKernel | None:
        if not self.permutations:
            return None
        sums = partial(exchanged_sums, permutations=self.permutations, seed=self.seed)
        draw = partial(draw_exchanged, seed=self.seed, unit=self.unit, split=self.split)
        return PoolKernel(self.read, self.needs.whole_rows, EXCHANGED, draw, sums)

    def defined_pairs(self, run: Run, sides: Sequence[Tensor], count: int) -> Tensor:
        """Mask of the pairs of sites that have a value (`row column`). Warns of sites whose samples are all equal.

        Args:
            run: the finished run.
            sides: whether the samples of each row site differ, and those of each column site.
            count: number of samples.
        """
        reason = (
            f"all {count} {self.sample_word} are equal up to rounding, like [CLS] tokens before the first attention. If "
            'a large mean hides their spread, CKA(estimator="minibatch") measures it'
        )
        refuse_undefined(type(self).__name__, zip((run.layers, run.column_layers), sides, strict=True), reason)
        return sides[0][:, None] & sides[1]

    def null(
        self, run: Run, defined: Tensor, parts: Sequence[Covariances], values: Callable[[Sequence[Covariances], bool], Tensor]
    ) -> dict[str, Any]:
        """The fields of the result that describe the permutation null.

        Args:
            run: the finished run.
            defined: whether each pair of sites has a value, `row column`.
            parts: covariances of the samples that the null exchanges, by part of the data ("", "train" or "test").
            values: function that takes covariances and whether they are permuted, and returns the value of each pair.
        """
        null = []
        for number in range(parts[0].permutations):
            permuted_parts = [part.permuted(number) for part in parts]
            null.append(values(permuted_parts, True))
        observed = values(parts, False).where(defined, math.nan)
        return null_fields(observed, torch.stack(null), one_model=is_one_model(run.models), symmetric=self.needs.symmetric)
