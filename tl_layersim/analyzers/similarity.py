"""`Similarity`: a function of the user as a similarity of all pairs of sites, with intervals and a permutation null."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.row_pools import AnyKernel, Draws, Samples
from ..core import LayersimError, Sums, axes, result_class, typed
from ..core.result_declarations import NOT_MEASURED
from ..core.wording import brief
from ._pairwise import MinibatchAnalyzer, MinibatchMatrix
from ._permutation_null import EQUAL_WITHIN, is_one_model
from ._samples import draw_permutations, pool_key, with_unit
from .analyzer import Run
from .needs import Needs


@result_class
class SimilarityResult(MinibatchMatrix):
    """Values of a user's function for all pairs of sites, with its permutation null.

    The fields of the null are those of `CalibratedMatrix`; they are NaN without `Similarity(permutations=...)`. `calibrated`
    and `max_calibrated` are always NaN: calibration needs the largest possible value, and that of the function is not known.

    Attributes:
        values: `row column`, mean of the function over minibatches, weighted by their numbers of samples. NaN if the function
            returned NaN for a minibatch.
        samples: number of tokens (or sequences) in all minibatches.
        minibatches: number of minibatches.
        texts: number of different texts in a minibatch, averaged over minibatches.
    """

    measure: ClassVar[str] = "similarity"
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Similarity",
        title="Similarity of sites by a user's function",
        caption="Mean of the function over minibatches of samples. Its null distribution is that of randomly paired texts "
        "(permutation test of Fisher 1935).",
    )
    observed: Float64[Tensor, "row column"] = axes(
        "row", "column", label="Similarity of the rows that the null exchanges", default=NOT_MEASURED
    )
    null_mean: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Mean similarity of random pairings",
        title="{values} of randomly paired texts",
        caption="Mean of the function over random pairings of the texts of two sites (permutation test of Fisher 1935).",
        default=NOT_MEASURED,
    )
    null_threshold: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="95 % quantile of random pairings",
        title="{values}: threshold at 5 %",
        caption="The value that 5 % of random pairings of texts exceed (permutation test of Fisher 1935).",
        default=NOT_MEASURED,
    )

    def headline(self) -> dict[str, float]:
        headline = super().headline()
        headline.pop("calibrated maximum over pairs of layers", None)
        return headline


@typed
@dataclass(frozen=True, eq=False)
class Similarity(MinibatchAnalyzer):
    r"""A function of your own as a similarity of all pairs of sites, within a model or between two models.

    $$s(l, l') = \frac{\sum_b n_b \, f(X_b^l, X_b^{l'})}{\sum_b n_b}$$

    with minibatches b of $n_b$ samples, drawn as for `CKA`. A data set that fits in one minibatch gives $f$ of all samples.
    A function whose value depends on the number of samples, such as CCA, needs a `minibatch` that is large beside the width,
    and equally large ones for values that are compared.

    The function receives every sample of a minibatch, and tokens of one text depend on each other. A function of pairs of
    samples, such as a kernel, then sees pairs that are alike for that reason; level="sequence" has one sample a text. The null
    holds at either level, because it exchanges whole texts.

    Intervals leave out blocks of texts, and need several minibatches. Both orders of two sites are measured, so a function
    that is not symmetric gives a matrix that is not.

    Args:
        function: takes the samples of two sites, NumPy arrays `sample width` in float64 with the same samples in the same
            order, and returns a number: the larger, the more similar. Pass a distance as
            `lambda x, y: -distance(x, y)`. The arrays are copies, which it may change. It must return the same number for the
            same arrays.
        minibatch: number of samples in a minibatch, n; see `CKA`. The samples of one pool are in memory at a time.
        unit: the unit of independence: "text" for the texts of the data, "row" for rows, "token" for single samples. The null
            exchanges these units, and a minibatch has samples of four at least.
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token.
        seed: random seed of the draws and of the permutations.
        max_memory_gb: limit for the sums of the null.
        permutations: number of random pairings of texts for the null, see `CKA`; 0 for no null. Each calls the function once
            more for each pair of sites and each pool.

    The identity of a run holds a digest of the function's code, defaults and closure, and of the globals that it reads: a
    checkpoint or shard of a lambda continues only with equal code and values. A function that holds other objects than
    numbers, texts, arrays, tensors and functions, such as an object with `__call__`, cannot be compared with a later run: it
    is refused with a checkpoint, with shards and in `sweep(checkpoint=)`. Models on servers are refused, because their
    activations do not come here.

    Raises:
        LayersimError: the function returns something else than a number, or an infinite one.

    Source:
        The null is that of `CalibratedMatrix`; the mean over minibatches as for the ratios of Brown et al. 2023, appendix C.1.

    Examples:
        >>> import numpy as np
        >>> import tl_layersim as lsim
        >>> def alignment(x, y):
        ...     return np.corrcoef((x @ x.T).flatten(), (y @ y.T).flatten())[0, 1]
        >>> tokens = lsim.demo_text()[:16]
        >>> by_function = lsim.analyze(lsim.demo_model(), tokens, lsim.Similarity(alignment, level="sequence"))["similarity"]
        >>> by_function.values.shape, round(float(by_function.values[4, 4]), 9)
        (torch.Size([9, 9]), 1.0)
    """

    name: ClassVar[str] = "similarity"

    function: Callable[..., Any]

    @property
    def needs(self) -> Needs:
        # The function itself cannot be sent to a server.
        return replace(super().needs, in_process=True)

    def kernel(self, first: Sums) -> AnyKernel:
        options: dict[str, Any] = {"unit": self.unit, "permutations": self.permutations, "seed": self.seed}
        return self._pool_kernel(partial(function_sums, function=self.function, **options))

    def compute(self, sums: Sums, run: Run) -> SimilarityResult:
        self.need_rows("samples" in sums.fields, run)
        values = sums["xy"] / sums["samples"]
        null_scale = sums.fields.get("null samples", values)
        # Two sites then have one null, as their two values are one but for rounding.
        symmetric = is_one_model(run.models) and torch.allclose(
            values, values.T, rtol=EQUAL_WITHIN, atol=EQUAL_WITHIN, equal_nan=True
        )
        fields = self.similarities(sums, run, values, null_scale, symmetric=symmetric)
        if "calibrated" in fields:
            fields["calibrated"] = torch.full_like(values, math.nan)
            fields["max_calibrated"] = NOT_MEASURED.clone()
        return SimilarityResult(**fields)


def function_sums(
    sides: Sequence[Tensor],
    widths: Sequence[tuple[int, ...]],
    samples: Samples,
    draws: Draws,
    *,
    function: Callable[..., Any],
    unit: str,
    permutations: int,
    seed: int,
) -> dict[str, Tensor]:
    """Sum the values of a function over minibatches, times their numbers of samples.

    Args:
        sides: samples of one model or of two models, `site sample width`.
        widths: widths of the sites of each model.
        samples: rows and hashes of the samples.
        draws: output of `draw_pool`.
        function: see `Similarity`.
        unit: see `Similarity`.
        permutations: number of permutations of the null.
        seed: random seed of the permutations.

    Returns:
        `xy`, `row column`, `samples`, `minibatches` and `texts`, the number of different texts; for the samples whose texts are
        exchanged, `null xy`, `null permuted`, `permutation row column`, and `null samples`. Empty without a minibatch.
    """
    if not draws["minibatches"]:
        return {}
    rows = site_vectors(sides[0], widths[0])
    columns = rows if len(sides) == 1 else site_vectors(sides[1], widths[1])
    text = with_unit(samples, unit).text
    total = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    sample_count = 0
    text_count = 0
    for minibatch in draws["minibatches"]:
        total += len(minibatch) * values_of_pairs(function, rows, columns, minibatch, minibatch)
        sample_count += len(minibatch)
        text_count += len(torch.unique(text[minibatch]))
    sums = {
        "xy": total,
        "samples": torch.tensor(sample_count),
        "minibatches": torch.tensor(len(draws["minibatches"])),
        "texts": torch.tensor(text_count),
    }
    for grid in draws.get("grid", ()):
        true_order = grid.flatten()
        null = []
        for order in draw_permutations(permutations, len(grid), pool_key(samples, seed)):
            null.append(values_of_pairs(function, rows, columns, true_order, grid[order].flatten()))
        sums["null xy"] = len(true_order) * values_of_pairs(function, rows, columns, true_order, true_order)
        sums["null permuted"] = len(true_order) * torch.stack(null)
        sums["null samples"] = torch.tensor(len(true_order))
    return sums


def site_vectors(side: Tensor, widths: tuple[int, ...]) -> list[np.ndarray]:
    """The samples of each site, `sample width` in float64, without the padding of narrower sites.

    Args:
        side: `site sample width`.
        widths: widths of the sites; empty if all sites have one width.
    """
    vectors = []
    for site, width in zip(side, widths or [side.shape[-1]] * len(side), strict=True):
        vectors.append(site[:, :width].double().cpu().numpy())
    return vectors


def values_of_pairs(
    function: Callable[..., Any],
    rows: Sequence[np.ndarray],
    columns: Sequence[np.ndarray],
    row_samples: Tensor,
    column_samples: Tensor,
) -> Tensor:
    """Values of a function for all pairs of sites (`row column`, float64).

    Args:
        function: see `Similarity`.
        rows: samples of each row site, `sample width`.
        columns: samples of each column site.
        row_samples: indices of the samples to take of row sites.
        column_samples: indices of the samples to take of column sites.

    Raises:
        LayersimError: the function returns something else than a number, or an infinite one.
    """
    values = torch.empty(len(rows), len(columns), dtype=torch.float64)
    for row, row_vectors in enumerate(rows):
        for column, column_vectors in enumerate(columns):
            # An index array makes copies, which the function may change.
            value = function(row_vectors[row_samples.numpy()], column_vectors[column_samples.numpy()])
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise LayersimError(f"`function` returns {brief(value)}; it must return a number.") from None
            if math.isinf(number):
                raise LayersimError(f"`function` returns {number}; it must return a finite number, or NaN if undefined.")
            values[row, column] = number
    return values
