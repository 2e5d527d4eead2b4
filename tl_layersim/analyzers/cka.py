"""Linear centred kernel alignment (CKA) between residual layers of one model or of two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.errors import LayersimError, warn
from ..core.results import Picture, axes
from ..core.sums import Sums
from ..models.model_info import Model
from ..models.view import Kernel
from ._arccos_distance import arccos_distance
from ._exact_hsic import exact_hsic, exact_kernel, is_above_rounding
from ._hsic import centred, grams
from ._minibatch_analyzer import MinibatchAnalyzer, MinibatchMatrix
from ._minibatch_pairs import Matrix, Relate
from ._permutation_null import is_one_model, null_fields, null_pictures
from ._sample_vectors import samples
from .base import Exchange, Run, need_tokens

# A warning is issued below this fraction of effective samples; docs/traps.md has the measurements.
LEAST_EFFECTIVE_FRACTION = 0.2


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CKAResult(MinibatchMatrix):
    """CKA between residual layers, with the number of samples that it effectively rests on, and its permutation null.

    The fields of the null are those of `CalibratedMatrix`; they are NaN without `CKA(permutations=...)`.

    Attributes:
        values: `residual residual`, or `residual_a residual_b` between two models; float64. Unbiased estimates of unrelated
            layers scatter about 0 and may be slightly negative. NaN in the row and column of a layer whose samples are all
            equal; a `LayersimWarning` names such layers.
        effective_samples: `residual`, number of equally weighted samples that would carry as much information:
            (sum r)^2 / sum r^2, with r the squared distance of a sample from the mean of its minibatch. CKA weights samples by
            r. If a few tokens have massive activations, CKA describes these tokens; below a fifth of all samples a
            `LayersimWarning` is issued.
        column_effective_samples: `column`, the same for the second model, or for the first again.
        samples: number of tokens (or sequences).
        minibatches: number of minibatches; 1 for the exact estimator.
    """

    values: Float64[Tensor, "row column"] = axes("row", "column", within=(-1, 1))
    effective_samples: Float64[Tensor, " row"] = axes("residual", within=(1, math.inf), out_of="samples")
    column_effective_samples: Float64[Tensor, " column"] = axes("column", within=(1, math.inf), out_of="samples")

    pictures: ClassVar[tuple[Picture, ...]] = (
        Picture(
            "values",
            "Linear CKA between layers",
            "Similarity of the geometry of tokens at two layers, up to rotation and scale: 1 for equal, 0 for unrelated "
            "(Kornblith et al. 2019; unbiased HSIC of Song et al. 2012, minibatches of Nguyen et al. 2021).",
        ),
        Picture(
            "effective_samples",
            "Effective samples behind CKA",
            "Number of equally weighted tokens that would carry as much information. At a handful, CKA describes a few tokens "
            "with massive activations (Sun et al. 2024), which should be left out.",
        ),
        *null_pictures("CKA"),
    )

    distance_name: ClassVar[str] = "CKA distance (radians)"
    similarity_name: ClassVar[str] = "Linear CKA"

    def distance(self) -> float:
        r"""Distance between two models of equal depth, over the outputs of their blocks, or over other sites that were read.

        $$\sqrt{\sum_{l=1}^{L} \arccos(\mathrm{CKA}(H_l, H'_l))^2}$$

        CKA is clipped to [-1, 1] inside the arccos only. The distance is 0 for models that are equal up to rotation and scale
        at each layer. A pair of unrelated layers adds (pi / 2)^2 under the root, so unrelated models of L blocks are about
        pi / 2 sqrt(L) apart. NaN if the CKA of a pair is not defined: a sum without that pair would not be comparable.

        Raises:
            LayersimError: the models have different numbers of sites.

        Source:
            Brown et al. 2023, appendix C.2, equation 2.
        """
        return arccos_distance(self)

    def headline(self) -> dict[str, float]:
        return self.to_last_headline("CKA") | self.null_headline() | self._samples()

    def _samples(self) -> dict[str, float]:
        return {
            "samples in a minibatch": self.mean_minibatch,
            "smallest effective fraction of samples of any layer": float(
                self.effective_samples.nan_to_num(math.inf).min() / self.samples
            ),
        }


@typed
@dataclass(frozen=True)
class CKA(MinibatchAnalyzer):
    r"""Linear CKA between all pairs of layers, within a model or between two models.

    $$\mathrm{CKA}(X, Y) = \frac{\mathrm{HSIC}(X, Y)}{\sqrt{\mathrm{HSIC}(X, X)\,\mathrm{HSIC}(Y, Y)}}$$

    with the unbiased estimator, for $\tilde K = XX'$ and $\tilde L = YY'$ with zeroed diagonals and n >= 4 samples,

    $$\mathrm{HSIC}_1 = \frac{1}{n(n-3)} \Big[ \mathrm{tr}(\tilde K \tilde L) + \frac{1'\tilde K 1\; 1'\tilde L 1}{(n-1)(n-2)}
    - \frac{2}{n-2} 1'\tilde K \tilde L 1 \Big].$$

    Args:
        estimator: "minibatch" averages HSIC_1 over minibatches and divides the averages, which is not the mean of the ratios.
            The tokens of a forward batch are shuffled first, because neighbours in a text are not independent. "exact" takes
            HSIC_1 over all samples in one pass without a Gram matrix; it needs (layers d)^2 float64 numbers. "biased" takes
            HSIC_0 of minibatches, which is far from 0 for unrelated layers (0.5 for independent Gaussians with n = d); it is
            for comparison with published figures only.
        minibatch: n. A forward batch of fewer samples is one smaller minibatch, whose HSIC has weight n(n-3) in the average;
            remaining samples are dropped at random. The result's `mean_minibatch` is the mean n.
        level: "token" takes each token as a sample; "sequence" each row of tokens. Then n is at most `batch_size`, and the
            exact estimator is preferable.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS].
        seed: of the shuffle, which otherwise depends on the batch's own tokens alone. The order of batches and padding do not
            change a value. Another batch_size draws other minibatches.
        max_memory_gb: limit for "exact" and for the sums of the null; a larger requirement is refused before the run.
        permutations: number of random pairings of the samples of each minibatch, for the null: samples of the columns are
            permuted, in the same way at all layers. 0 for no null. The exact estimator has no minibatches and takes none.

    Source:
        Kornblith et al. 2019; Song et al. 2012; Nguyen et al. 2021; Brown et al. 2023,
        appendix C.1, whose printed S_ij lacks the square root. The null is that of `CalibratedMatrix`.

    Examples:
        The CKA of a layer with itself is 1.

        >>> import tl_layersim as lsim
        >>> cka = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.CKA(minibatch=64)])["cka"]
        >>> cka.values.shape, round(float(cka.values[4, 4]), 9)
        (torch.Size([9, 9]), 1.0)

        No random pairing of tokens is as similar as the embedding and the last layer are.

        >>> null = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.CKA(minibatch=64, permutations=99)])["cka"]
        >>> float(null.p_values[0, -1]), bool(0 < null.calibrated[0, -1] < null.values[0, -1])
        (0.01, True)
    """

    name: ClassVar[str] = "cka"

    estimator: Literal["minibatch", "exact", "biased"] = "minibatch"
    minibatch: int = 256
    level: Literal["token", "sequence"] = "token"
    pool: Literal["mean", "last", "first"] = "mean"
    seed: int = 0
    max_memory_gb: int | float = 4.0
    permutations: int = 0

    @property
    def matrix(self) -> Matrix:
        return gram_matrices

    @property
    def relate(self) -> Relate:
        return partial(centred_relations, biased=self.estimator == "biased")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.permutations and self.estimator == "exact":
            raise LayersimError(
                '`permutations` cannot be combined with estimator="exact": each permutation needs cross-products of its own.',
                given=f'CKA(estimator="exact", permutations={self.permutations})',
                expected='estimator="minibatch" or "biased", which permute samples within minibatches',
                do=f'CKA(estimator="minibatch", permutations={self.permutations})',
            )
        if self.minibatch < 4:
            raise LayersimError(
                "`minibatch` must be at least 4: the unbiased HSIC is not defined on fewer samples.",
                given=f"minibatch={self.minibatch}",
                expected="4 or more",
                do="CKA(minibatch=256)",
            )

    def check_sites(self, *models: Model) -> None:
        super().check_sites(*models)
        if self.estimator != "exact" or any(model.widest is None for model in models):
            return
        widths = [len(model.layers) * (model.widest or 0) for model in models]
        # More than two models are each compared with themselves too.
        pairs = list(combinations_with_replacement(widths, 2)) if len(models) > 2 else [(widths[0], widths[-1])]
        # The batch's cross-product, the running sum, and the new sum while the two are added.
        need = 3 * 8 * sum(row * column for row, column in pairs) / 1e9
        if not need <= self.max_memory_gb:
            products = f"{len(pairs)} pairs of models" if len(pairs) > 1 else f"{widths[0]} x {widths[-1]} cross-products"
            raise LayersimError(
                "The exact estimator needs more memory than `max_memory_gb`.",
                given=f"{products}: {need:.1f} GB",
                expected=f"at most max_memory_gb={self.max_memory_gb:g}",
                do=f'CKA(estimator="minibatch"), or CKA(estimator="exact", max_memory_gb={math.ceil(need)})',
            )

    def kernel(self, first: Sums) -> Kernel:
        if self.estimator == "exact":
            return partial(exact_kernel, rows=partial(samples, level=self.level, pool=self.pool))
        return super().kernel(first)

    def exchange(self) -> Exchange | None:
        return None if self.estimator == "exact" else super().exchange()

    def compute(self, sums: Sums, run: Run) -> CKAResult:
        unit = self.unit
        if self.estimator != "exact":
            self.need_minibatch(sums, run)
        need_tokens(int(sums["samples"]), 4, "CKA", unit)
        if self.estimator == "exact":
            cross, own_x, own_y, effective_x, effective_y = exact_hsic(sums)
            defined_x, defined_y = (is_above_rounding(sums, own, f"xy.r_{z}") for own, z in ((own_x, "x"), (own_y, "y")))
        else:
            cross, own_x, own_y = sums["xy"], sums["xx"], sums["yy"]
            effective_x, effective_y = (sums[f"r_{z}"].square() / sums[f"r_{z}^2"] for z in "xy")
            defined_x, defined_y = own_x > 0, own_y > 0
        self._undefined(defined_x, defined_y, run, f"{int(sums['samples'])} {unit}")
        effective_x, effective_y = effective_x.where(defined_x, math.nan), effective_y.where(defined_y, math.nan)
        _warn_of_few(effective_x, effective_y, run, int(sums["samples"]), self.level)
        scale = torch.outer(own_x.clamp(min=0).sqrt(), own_y.clamp(min=0).sqrt())
        values = (cross / scale).where(defined_x[:, None] & defined_y, math.nan)
        null = sums["null xy"] / scale if self.permutations else values.new_zeros(0, *values.shape)
        return CKAResult(
            values=values,
            effective_samples=effective_x,
            column_effective_samples=effective_y,
            samples=int(sums["samples"]),
            minibatches=int(sums["minibatches"]) if self.estimator != "exact" else 1,
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
            **null_fields(values, null, one_model=is_one_model(run.models)),
        )

    def _undefined(self, defined_x: Tensor, defined_y: Tensor, run: Run, count: str) -> None:
        """Warn of layers whose samples are all equal; refuse a run in which all layers are of this kind."""
        sides = ((run.layers, defined_x), (run.column_layers, defined_y))
        equal = list(
            dict.fromkeys(name for names, defined in sides for name, one in zip(names, defined, strict=True) if not one)
        )
        exact = self.estimator == "exact"
        if not bool(defined_x.any() and defined_y.any()):
            raise LayersimError(
                "CKA is not defined at any layer: the samples do not differ"
                + (", or the sums over all samples lose their differences to rounding." if exact else "."),
                given=f"{count}, all equal at {', '.join(equal[:4])}",
                expected="activations that differ from sample to sample",
                do='CKA(estimator="minibatch"), which centres each minibatch' if exact else "pass more varied data",
            )
        if equal:
            digits = "the mean is so much larger than the spread that the sums lose the spread to rounding, or "
            warn(
                f"CKA is not defined at {', '.join(equal[:4])}{' and others' if len(equal) > 4 else ''}, and NaN there: "
                + (digits if exact else "")
                + f"all of {count} are equal, as first tokens or [CLS] tokens are before the first attention."
                + (' CKA(estimator="minibatch") avoids this rounding.' if exact else "")
            )


def gram_matrices(x: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Gram matrices of the centred samples of a minibatch, `layer n n`.

    Args:
        x: `layer n d_model`.
        widths: of the layers; narrower ones are padded with zeros, which change no product.
    """
    return grams(x)


def centred_relations(gram: Tensor, *, biased: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Centred Gram matrices, and sums over samples of their squared distance from the mean and of its square.

    The product of two such matrices is n(n-3) HSIC_1, or (n-1)^2 HSIC_0. The factor stays: it weights a smaller minibatch by
    its number of pairs, and cancels among minibatches of one size.

    Args:
        gram: `layer n n`.
        biased: whether to centre for HSIC_0 instead of HSIC_1.
    """
    relation, r = centred(gram, biased)
    return relation, {"r_{}": r.sum(1), "r_{}^2": r.square().sum(1)}


def _warn_of_few(effective_x: Tensor, effective_y: Tensor, run: Run, count: int, level: str) -> None:
    """Warn of results that rest on few samples."""
    layers = [*zip(run.layers, effective_x, strict=True), *zip(run.column_layers, effective_y, strict=True)]
    few = dict.fromkeys(name for name, effective in layers if effective < LEAST_EFFECTIVE_FRACTION * count)
    if count < 100:
        warn(f"CKA rests on {count} samples here; with so few samples its values scatter by tenths. Pass more data.")
    if few and count >= 200:
        least = min(value for _, effective in layers if not math.isnan(value := float(effective)))
        skipped = int(run.provenance.options.get("skip_first") or 0)
        whole = level == "token" and run.provenance.options.get("positions", "all") == "all"
        remedy = f"leave them out with skip_first={max(2, 2 * skipped)}" if whole else "inspect these rows"
        warn(
            f"CKA is dominated by a few samples with massive activations at {len(few)} layers, {next(iter(few))} among them: "
            f"{least:.1f} effective samples of {count} ({least / count:.1%}). These are often the first tokens of a row: "
            f"{remedy}, and see result.effective_samples."
        )
