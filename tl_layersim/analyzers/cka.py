"""Linear centred kernel alignment (CKA) between residual layers of one model or of two."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.row_pools import AnyKernel
from ..activations.view import Kernel
from ..core import LayersimError, Sums, axes, typed, warn
from ..sources.model import Model
from ._hsic import (
    centred,
    exact_biased_cka,
    exact_hsic,
    exact_kernel,
    gram_matrices,
    means_kernel,
    tuples_of_rows,
    without_rows,
)
from ._pairwise import Matrix, MinibatchAnalyzer, MinibatchMatrix, PairRelation, Relate, arccos_distance, relation_of_pairs
from .analyzer import Exchange, Run, Weight, compared, need_tokens, refuse_undefined


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CKAResult(MinibatchMatrix):
    """CKA between residual layers, with its effective number of samples and its permutation null.

    The fields of the null are those of `CalibratedMatrix`; they are NaN without `CKA(permutations=...)`.

    Attributes:
        values: `residual residual`, or `residual_a residual_b` between two models; float64. Unbiased estimates of unrelated
            layers scatter about 0 and may be slightly negative. NaN in the row and column of a layer whose samples are all
            equal; a `LayersimWarning` names such layers.
        biased: `residual residual`, CKA over all samples by the biased HSIC_0, which is far from 0 for independent layers if
            there are few samples; for comparison with published values. NaN unless the estimator is "exact".
        effective_samples: `residual`, number of equally weighted samples that would carry as much information:
            (sum r)^2 / sum r^2, with r the squared distance of a sample from the mean of its minibatch. CKA weights samples by
            r. If a few tokens have massive activations, CKA describes these tokens.
        column_effective_samples: `column`, the same for the second model; within one model, `effective_samples` again.
        samples: number of tokens (or sequences) in all minibatches.
        minibatches: number of minibatches; 1 for the exact estimator.
        rows: number of different rows in a minibatch, averaged over minibatches.
    """

    file_kind: ClassVar[str] = "cka"
    measure: ClassVar[str] = "CKA"
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Linear CKA",
        title="Linear CKA between layers",
        caption="Similarity of the geometry of tokens at two layers, up to rotation and scale: 1 for equal, 0 for independent "
        "layers (Kornblith et al. 2019; unbiased HSIC of Song et al. 2012 over different rows, minibatches of Nguyen et "
        "al. 2021).",
        within=(-1, 1),
    )
    biased: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Linear CKA (biased)",
        title="Linear CKA over all samples, by the biased HSIC",
        within=(0, 1),
    )
    effective_samples: Float64[Tensor, " row"] = axes(
        "residual",
        label="Effective samples",
        title="Effective samples behind CKA",
        caption="Number of equally weighted tokens that would carry as much information. At a handful, CKA describes a few "
        "tokens with massive activations (Sun et al. 2024), which should be left out.",
        within=(1, math.inf),
        out_of="samples",
    )
    column_effective_samples: Float64[Tensor, " column"] = axes(
        "column",
        label="Effective samples",
        title="Effective samples of each layer of the other side",
        within=(1, math.inf),
        out_of="samples",
    )

    distance_name: ClassVar[str] = "CKA distance (radians)"

    def distance(self) -> float:
        r"""Distance between two models of equal depth, over the outputs of their blocks or over the other sites that were read.

        $$\sqrt{\sum_{l=1}^{L} \arccos(\mathrm{CKA}(H_l, H'_l))^2}$$

        CKA is clipped to [-1, 1] inside the arccos only. The distance is 0 for models that are equal up to rotation and scale
        at each layer. A pair of independent layers adds (pi / 2)^2 under the root. Layers of two models are not independent
        even if neither is trained, because both read the same tokens. NaN if the CKA of a pair is not defined: a sum without
        that pair would not be comparable.

        Raises:
            LayersimError: the models have different numbers of sites.

        Source:
            Brown et al. 2023, appendix C.2, equation 2.
        """
        return arccos_distance(self)

    def headline(self) -> dict[str, float]:
        fraction = float(self.effective_samples.nan_to_num(math.inf).min() / self.samples)
        return super().headline() | {"smallest effective fraction of samples": fraction}


@typed
@dataclass(frozen=True)
class CKA(MinibatchAnalyzer):
    r"""Linear CKA between all pairs of layers, within a model or between two models.

    $$\mathrm{CKA}(X, Y) = \frac{\mathrm{HSIC}(X, Y)}{\sqrt{\mathrm{HSIC}(X, X)\,\mathrm{HSIC}(Y, Y)}}$$

    HSIC is the unbiased HSIC_1 of Song et al. without pairs of tokens of one row, because these depend on each other
    (`_hsic.without_rows` has the formula). With one sample a row it is HSIC_1. For K = XX' and L = YY' of n samples with zeroed
    diagonals,

    $$\mathrm{HSIC}_1 = \frac{1}{n(n-3)} \Big[ \mathrm{tr}(\tilde K \tilde L) + \frac{1'\tilde K 1\; 1'\tilde L 1}{(n-1)(n-2)}
    - \frac{2}{n-2} 1'\tilde K \tilde L 1 \Big].$$

    Args:
        estimator: "minibatch" averages over minibatches, see `average`. A minibatch is drawn from a pool of 16 rows, or of as
            many as have `minibatch` samples, with at most 64 tokens of a row; the pools do not depend on `batch_size`. "exact"
            takes HSIC over all samples without a Gram matrix; it reads the data twice and needs 2 (layers d)^2 float64 numbers.
            "biased" takes HSIC_0 of minibatches, which is far from 0 for independent layers (0.5 for Gaussians with n = d); it
            is for comparison with published figures only.
        minibatch: number of samples in a minibatch, n. A smaller pool is one smaller minibatch; remaining samples are dropped
            at random. Minibatches are weighted by their number of pairs.
        unit: the unit of independence: "row" leaves out pairs of tokens of one row, and needs 4 rows; "token" treats all
            samples as independent, for example if each row has one token. The null exchanges the same units.
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS]; or
            "flat", all its tokens as one vector, for rows of equal length (Brown et al. 2023, footnote 6). The exact estimator
            has no "flat".
        seed: random seed of the draws. With one seed, the draws depend on the rows alone.
        deconfound: "input" regresses the embedding's Gram matrix out of each layer's, within each model, so that CKA no longer
            measures the similarity of the inputs (Cui et al. 2022). The embedding itself is then NaN. Not for the exact
            estimator, which has no Gram matrices.
        average: what is averaged over minibatches: "hsic", whose averages are then divided; or "cka", the ratio of each
            minibatch, as in Brown et al. 2023, appendix C.1. The mean of ratios is biased, however many minibatches there are.
        max_memory_gb: limit for "exact" and for the sums of the null; a run that needs more raises an error before it starts.
        permutations: number of random pairings for the null: in each pool, whole rows of the columns are exchanged, position
            with position, in the same way at all layers. 0 for no null. Not for the exact estimator, which has no minibatches.

    Source:
        Kornblith et al. 2019; Song et al. 2012; Nguyen et al. 2021; Brown et al. 2023, appendix C.1, whose printed S_ij lacks
        the square root. `biased` is equation 3 of Jiang, Zhou and Zhu 2024. The null is that of `CalibratedMatrix`.

    Examples:
        The CKA of a layer with itself is 1.

        >>> import tl_layersim as lsim
        >>> cka = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.CKA(minibatch=64)])["cka"]
        >>> cka.values.shape, round(float(cka.values[4, 4]), 9)
        (torch.Size([9, 9]), 1.0)

        No exchange of rows is as similar as the embedding and the last layer are.

        >>> null = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:32], [lsim.CKA(permutations=99)])["cka"]
        >>> float(null.p_values[0, -1]), bool(0 < null.calibrated[0, -1] < null.observed[0, -1])
        (0.01, True)
    """

    name: ClassVar[str] = "cka"
    weighs: ClassVar[tuple[Weight, ...]] = ("samples", "variance")

    one_pass: ClassVar[str] = 'CKA(estimator="minibatch")'

    estimator: Literal["minibatch", "exact", "biased"] = "minibatch"
    pool: Literal["mean", "last", "first", "flat"] = "mean"  # type: ignore[assignment]  # one choice more than the base
    deconfound: Literal["input"] | None = None
    average: Literal["hsic", "cka"] = "hsic"

    @property
    def formula(self) -> tuple[Matrix, Relate]:
        return gram_matrices, partial(centred_relations, biased=self.estimator == "biased", ratios=self.average == "cka")

    def __post_init__(self) -> None:
        super().__post_init__()
        of_grams = [name for name in ("permutations", "deconfound") if getattr(self, name)]
        of_minibatches = of_grams + [
            name for name, value in (("pool", "flat"), ("average", "cka")) if getattr(self, name) == value
        ]
        if self.estimator == "exact" and of_minibatches:
            raise LayersimError(
                f'`{of_minibatches[0]}` is {getattr(self, of_minibatches[0])!r}; it needs estimator="minibatch" or '
                '"biased", because "exact" has neither minibatches nor Gram matrices.'
            )
        if self.average == "cka" and of_grams:
            raise LayersimError(f'`{of_grams[0]}` is {getattr(self, of_grams[0])!r}; it needs average="hsic".')

    def sum_numbers(self, *models: Model) -> float:
        if self.estimator != "exact":
            return super().sum_numbers(*models)
        size = {id(model): len(model.layers) * (model.widest or 0) for model in models}
        return 2 * sum(size[id(a)] * size[id(b)] for a, b in compared(models))

    def pool_need(self, density: float) -> int:
        return 0 if self.estimator == "exact" else super().pool_need(density)

    def first_kernel(self) -> Kernel | None:
        return partial(means_kernel, rows=self.read) if self.estimator == "exact" else None

    def kernel(self, first: Sums) -> AnyKernel:
        if self.estimator != "exact":
            return super().kernel(first)
        means = (first["x"] / first["count"], first["y"] / first["count"])
        return partial(exact_kernel, rows=self.read, means=means, by_row=self.unit == "row")

    def exchange(self) -> Exchange | None:
        return None if self.estimator == "exact" else super().exchange()

    def compute(self, sums: Sums, run: Run) -> CKAResult:
        exact = self.estimator == "exact"
        if exact:
            need_tokens(int(sums["samples"]), 4, "CKA", self.samples_in_words)
        self.need_rows(tuples_of_rows(*sums["tuples"].tolist())[2] > 0 if exact else "samples" in sums.fields, run)
        cross, own_x, own_y = exact_hsic(sums) if exact else (sums["xy"], sums["xx"], sums["yy"])
        defined_x, defined_y = own_x > 0, own_y > 0
        count = int(sums["samples"])
        given = f"{count} {self.samples_in_words}"
        why = f"all of {given} are equal, as first tokens or [CLS] tokens are before the first attention"
        refuse_undefined("CKA", [(run.layers, defined_x), (run.column_layers, defined_y)], why)
        if count < 100:
            warn(f"CKA rests on {count} samples here; with so few samples its values scatter by tenths. Pass more data.")
        r = "xy.r" if exact else "r"
        values = sums["ratios"] / sums["minibatches"] if self.average == "cka" else cross / _scale(own_x, own_y)
        values = values.where(defined_x[:, None] & defined_y, math.nan)
        null_scale = _scale(sums["null xx"], sums["null yy"]) if "null xx" in sums.fields else values
        inputs = None
        if self.deconfound is not None:
            x0, y0 = (sums[f"{z}0"] / (sums[2 * z] * sums[2 * z][0]).sqrt() for z in "xy")
            inputs = x0, y0
        biased = exact_biased_cka(sums) if exact else torch.full_like(values, math.nan)
        return CKAResult(
            biased=biased.where(~values.isnan(), math.nan),
            effective_samples=(sums[f"{r}_x"].square() / sums[f"{r}_x^2"]).where(defined_x, math.nan),
            column_effective_samples=(sums[f"{r}_y"].square() / sums[f"{r}_y^2"]).where(defined_y, math.nan),
            **self.similarities(sums, run, values, null_scale, inputs),
        )


def _scale(own_x: Tensor, own_y: Tensor) -> Tensor:
    """Square roots of the products of two HSICs, `row column`."""
    return torch.outer(own_x.clamp(min=0).sqrt(), own_y.clamp(min=0).sqrt())


def centred_relations(gram: Tensor, row: Tensor | None, rows: int, by_row: bool, *, biased: bool, ratios: bool) -> PairRelation:
    """Centre Gram matrices for HSIC, and sum over samples their squared distance from the mean and its square.

    The product of two such relations is HSIC times the number of pairs of samples. The factor stays: it weights a smaller
    minibatch by its pairs, and cancels among minibatches of one size.

    Args:
        gram: `layer n n`.
        row: `n`, the row of each sample; pairs that share a row are left out. None if all samples are from different rows.
        rows: number of rows.
        by_row: whether to return the terms by row too.
        biased: whether to centre for HSIC_0, which treats all samples as independent.
        ratios: see `PairRelation`.
    """
    if biased or row is None:
        relation, r = centred(gram, biased)
        found = relation_of_pairs(relation, rows if by_row else None)
    else:
        terms, r = without_rows(gram, row)
        found = PairRelation(*terms.flat(), {}, *(terms.by_row(rows) if by_row else (None, None)))
    return replace(found, numbers={"r_{}": r.sum(1), "r_{}^2": r.square().sum(1)}, ratios=ratios)
