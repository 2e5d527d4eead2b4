"""Centred kernel alignment (CKA) between residual layers of one model or of two, with a linear or an RBF kernel.

CKA is built on the Hilbert-Schmidt independence criterion (HSIC), within minibatches or over all samples. Tokens of one text
depend on each other, so pairs of one text add a covariance that is not there between texts. `terms_between_texts` leaves them
out of all three terms of HSIC_1: it is then a U-statistic over distinct texts, without bias for any dependence within texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float64
from torch import Tensor

from ..activations.norms import beyond_rounding
from ..activations.row_pools import AnyKernel
from ..activations.view import Kernel, View, row_ends
from ..core import LayersimError, Sums, axes, result_class, typed, warn
from ..core.arguments import PositiveFloat
from ..sources.model_description import ModelDescription
from ._pairwise import (
    MatrixFunction,
    MinibatchMatrix,
    PairRelation,
    RelationFunction,
    SampleMatrixAnalyzer,
    angles,
    arccos_distance,
    doubly_centred,
    relation_of_matrices,
    squared_distances,
)
from .analyzer import Exchange, Run, compared, refuse_undefined
from .needs import Needs

# Rows of a Gram matrix that are one product; smaller products are slower by the FLOP.
GRAM_ROWS = 128
# Activations from which Gram matrices are computed in float64; those above its inverse are, too.
SMALLEST = 1e-9


@result_class
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
        texts: number of different texts in a minibatch, averaged over minibatches; all texts for the exact estimator.
    """

    measure: ClassVar[str] = "CKA"
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="CKA",
        title="CKA between layers",
        caption="Similarity of the geometry of tokens at two layers, up to rotation and scale: 1 for equal, 0 for independent "
        "layers (Kornblith et al. 2019; unbiased HSIC of Song et al. 2012 over different texts, minibatches of Nguyen et "
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

    @property
    def angle(self) -> Tensor:
        """`row column`, arccos of CKA in radians, clipped to [-1, 1]: the angle between centred Gram matrices.

        It is a metric with one sample of each text in a minibatch, and for the biased estimator. Leaving out pairs of one text
        makes it one only approximately.

        Source:
            Williams et al. 2021 (arXiv 2110.14739); Szekely and Rizzo 2014 for the inner product of the unbiased estimator.
        """
        return angles(self)

    def distance(self) -> float:
        r"""Distance between two models of equal depth, summed over pairs of layers at the same depth.

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
class CKA(SampleMatrixAnalyzer):
    r"""CKA between all pairs of layers, within a model or between two models: linear, or with an RBF kernel.

    $$\mathrm{CKA}(X, Y) = \frac{\mathrm{HSIC}(X, Y)}{\sqrt{\mathrm{HSIC}(X, X)\,\mathrm{HSIC}(Y, Y)}}$$

    HSIC is the unbiased HSIC_1 of Song et al. without pairs of tokens of one text, because these depend on each other
    (`tl_layersim.analyzers.cka.terms_between_texts` has the formula). With one sample a text it is HSIC_1. For K = XX' and
    L = YY' of n samples with zeroed diagonals,

    $$\mathrm{HSIC}_1 = \frac{1}{n(n-3)} \Big[ \mathrm{tr}(\tilde K \tilde L) + \frac{1'\tilde K 1\; 1'\tilde L 1}{(n-1)(n-2)}
    - \frac{2}{n-2} 1'\tilde K \tilde L 1 \Big].$$

    Args:
        estimator: "minibatch" averages over minibatches, see `average`. A minibatch is drawn from a pool of 16 texts, or of as
            many as have `minibatch` samples, with at most 64 tokens of a row; the pools do not depend on `batch_size`. "exact"
            takes HSIC over all samples without a Gram matrix; it reads the data twice, needs 2 (layers d)^2 float64 numbers,
            and runs all rows of a text in one forward pass.
            "biased" takes HSIC_0 of minibatches, which is far from 0 for independent layers (0.5 for Gaussians with n = d); it
            is for comparison with published figures only.
        minibatch: number of samples in a minibatch, n. A smaller pool is one smaller minibatch; remaining samples are dropped
            at random. Minibatches are weighted by their number of pairs.
        unit: the unit of independence. "text" leaves out pairs of tokens of one text, and needs 4 texts: rows that are cut from
            one text, or have one group in the data, are one text. "row" treats rows as independent, "token" all samples. The
            null exchanges the same units.
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS]; or
            "flat", all its tokens as one vector, for rows of equal length (Brown et al. 2023, footnote 6). The exact estimator
            has no "flat".
        seed: random seed of the draws. With one seed, the draws depend on the rows alone.
        deconfound: "input" regresses the embedding's Gram matrix out of each layer's, within each model, so that CKA no longer
            measures the similarity of the inputs (Cui et al. 2022). The embedding itself is then NaN. Not for the exact
            estimator, which has no Gram matrices.
        rbf_bandwidth: None for linear CKA. A number takes the kernel $\exp(-|x_i - x_j|^2 / 2\sigma^2)$ in place of the inner
            product, with the bandwidth $\sigma$ of each layer as this fraction of the median distance between two samples of
            the minibatch; Kornblith et al. report 0.2, 0.4 and 0.8. Not for the exact estimator, which has no Gram matrices; a
            minibatch as large as the data has all samples.
        average: what is averaged over minibatches: "hsic", whose averages are then divided; or "cka", the ratio of each
            minibatch, as in Brown et al. 2023, appendix C.1. The mean of ratios is biased, however many minibatches there are.
        max_memory_gb: limit for "exact" and for the sums of the null; a run that needs more raises an error before it starts.
        permutations: number of random pairings for the null: in each pool, whole texts of the columns are exchanged, position
            with position, in the same way at all layers. 0 for no null. Not for the exact estimator, which has no minibatches.

    Source:
        Kornblith et al. 2019 (arXiv 1905.00414), whose code for the RBF kernel counts the distance of each sample to itself in
        the median too; Song et al. 2012; Nguyen et al. 2021; Brown et al. 2023, appendix C.1, whose printed S_ij lacks the
        square root. `biased` is equation 3 of Jiang, Zhou and Zhu 2024. The null is that of `CalibratedMatrix`.

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

    estimator: Literal["minibatch", "exact", "biased"] = "minibatch"
    pool: Literal["mean", "last", "first", "flat"] = "mean"  # type: ignore[assignment]  # one choice more than the base
    deconfound: Literal["input"] | None = None
    average: Literal["hsic", "cka"] = "hsic"
    rbf_bandwidth: PositiveFloat | None = None

    @property
    def needs(self) -> Needs:
        return replace(
            super().needs,
            whole_texts=self.estimator == "exact" and self.unit == "text",
            one_pass='CKA(estimator="minibatch")',
            dominance=("samples", "variance"),
        )

    @property
    def formula(self) -> tuple[MatrixFunction, RelationFunction]:
        matrix = gram_matrices if self.rbf_bandwidth is None else partial(rbf_matrices, bandwidth=float(self.rbf_bandwidth))
        return matrix, partial(centred_relations, biased=self.estimator == "biased", ratios=self.average == "cka")

    def __post_init__(self) -> None:
        super().__post_init__()
        of_grams = [name for name in ("permutations", "deconfound") if getattr(self, name)]
        of_minibatches = list(of_grams)
        if self.rbf_bandwidth is not None:
            of_minibatches.append("rbf_bandwidth")
        if self.pool == "flat":
            of_minibatches.append("pool")
        if self.average == "cka":
            of_minibatches.append("average")
        if self.estimator == "exact" and of_minibatches:
            raise LayersimError(
                f'`{of_minibatches[0]}` is {getattr(self, of_minibatches[0])!r}; it needs estimator="minibatch" or '
                '"biased", because "exact" has neither minibatches nor Gram matrices.'
            )
        if self.average == "cka" and of_grams:
            raise LayersimError(f'`{of_grams[0]}` is {getattr(self, of_grams[0])!r}; it needs average="hsic".')

    def sum_numbers(self, *models: ModelDescription) -> float:
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
        return partial(exact_kernel, rows=self.read, means=means, unit=self.unit)

    def exchange(self) -> Exchange | None:
        return None if self.estimator == "exact" else super().exchange()

    def compute(self, sums: Sums, run: Run) -> CKAResult:
        exact = self.estimator == "exact"
        if exact:
            _, _, quadruples = tuples_of_texts(*sums["tuples"].tolist())
            self.need_rows(quadruples > 0, run)
            hsic_xy, hsic_xx, hsic_yy = exact_hsic(sums)
        else:
            self.need_rows("samples" in sums.fields, run)
            hsic_xy = sums["xy"]
            hsic_xx = sums["xx"]
            hsic_yy = sums["yy"]
        defined_x = hsic_xx > 0
        defined_y = hsic_yy > 0
        count = int(sums["samples"])
        reason = f"all {count} {self.sample_word} are equal, like [CLS] tokens before the first attention"
        if self.rbf_bandwidth is not None:
            reason = (
                f"half of the pairs of {self.sample_word} are equal, so that the median distance is 0, or `rbf_bandwidth` is "
                "too small for any two to be similar"
            )
        refuse_undefined("CKA", [(run.layers, defined_x), (run.column_layers, defined_y)], reason)
        if exact and self.unit == "text" and run.provenance.options.get("rows_as_texts"):
            warn(
                "CKA treats rows as independent that share a text with their neighbours, because the data is packed or has few "
                'texts, and the exact estimator compares neighbouring rows too. estimator="minibatch" does not.'
            )
        if count < 100:
            warn(
                f"CKA rests on {count} samples; with fewer than 100, values vary by 0.1 or more between random samples. "
                "Pass more data."
            )
        r = "xy.r" if exact else "r"
        values = sums["ratios"] / sums["minibatches"] if self.average == "cka" else hsic_xy / _scale(hsic_xx, hsic_yy)
        values = values.where(defined_x[:, None] & defined_y, math.nan)
        null_scale = _scale(sums["null xx"], sums["null yy"]) if "null xx" in sums.fields else values
        inputs = None
        if self.deconfound is not None:
            row_inputs = sums["x0"] / (sums["xx"] * sums["xx"][0]).sqrt()
            column_inputs = sums["y0"] / (sums["yy"] * sums["yy"][0]).sqrt()
            inputs = (row_inputs, column_inputs)
        biased = exact_biased_cka(sums) if exact else torch.full_like(values, math.nan)
        return CKAResult(
            biased=biased.where(~values.isnan(), math.nan),
            effective_samples=(sums[f"{r}_x"].square() / sums[f"{r}_x^2"]).where(defined_x, math.nan),
            column_effective_samples=(sums[f"{r}_y"].square() / sums[f"{r}_y^2"]).where(defined_y, math.nan),
            **self.similarities(sums, run, values, null_scale, inputs),
        )


def _scale(hsic_xx: Tensor, hsic_yy: Tensor) -> Tensor:
    """Denominator of CKA (`row column`): sqrt(HSIC(x, x) HSIC(y, y))."""
    return torch.outer(hsic_xx.clamp(min=0).sqrt(), hsic_yy.clamp(min=0).sqrt())


def centred_relations(
    gram: Tensor, text: Tensor | None, texts: int, by_text: bool, *, biased: bool, ratios: bool
) -> PairRelation:
    """Turn the Gram matrices of a minibatch into a `PairRelation` whose inner products give HSIC.

    Its `numbers` are the sums of r and r^2 over samples, with r a sample's squared distance from the mean.

    The product of two such relations is HSIC times the number of pairs of samples. The factor stays: it weights a smaller
    minibatch by its pairs, and cancels among minibatches of one size.

    Args:
        gram: `layer n n`.
        text: `n`, the text of each sample; pairs that share a text are left out. None if all samples are from different texts.
        texts: number of texts.
        by_text: whether to return the terms by text too.
        biased: whether to centre for HSIC_0, which treats all samples as independent.
        ratios: see `PairRelation`.
    """
    if biased or text is None:
        centred_gram, r = centred(gram, biased)
        relation = relation_of_matrices(centred_gram, texts if by_text else None)
    else:
        terms, r = terms_between_texts(gram, text)
        flat_terms, signs = terms.flat()
        terms_by_text, diagonal_signs = terms.by_text(texts) if by_text else (None, None)
        relation = PairRelation(flat_terms, signs, {}, terms_by_text, diagonal_signs)
    return replace(relation, numbers={"r_{}": r.sum(1), "r_{}^2": r.square().sum(1)}, ratios=ratios)


def gram_matrices(x: Tensor, widths: tuple[int, ...] = ()) -> Tensor:
    """Gram matrices of the centred samples (`layer n n`) in the dtype of the samples, or in float64 where it lacks the range.

    The matrix of a layer is exactly 0 if its samples are equal up to rounding.

    Args:
        x: `layer n d_model`, n samples.
        widths: widths of the layers; narrower layers are padded with zeros, which change no product.
    """
    # Centring does not change HSIC. Without it, a large common vector would use up the digits of float32.
    mean = x.mean(1, keepdim=True)
    x = x - mean
    equal_samples = ~beyond_rounding(x, mean).any(1)
    if bool(equal_samples.any()):
        x = x.masked_fill(equal_samples[:, None, None], 0)
    # Entries are squares: in float32 they overflow from norms of 2e19 on, and vanish below 1e-19.
    largest = x.abs().amax((1, 2))
    overflows = largest > 1 / SMALLEST
    vanishes = (largest < SMALLEST) & (largest > 0)
    if bool((overflows | vanishes).any()):
        x = x.double()
    samples = x.shape[1]
    gram = x.new_empty(len(x), samples, samples)
    # The lower triangle is copied: its products would be the largest cost of CKA.
    for start in range(0, samples, GRAM_ROWS):
        end = start + GRAM_ROWS
        gram[:, start:end, start:] = torch.bmm(x[:, start:end], x[:, start:].transpose(1, 2))
        gram[:, end:, start:end] = gram[:, start:end, end:].transpose(1, 2)
    return gram


def rbf_matrices(x: Tensor, widths: tuple[int, ...] = (), *, bandwidth: float) -> Tensor:
    """RBF kernels of the samples, centred in the space of the kernel (`layer n n`, in the dtype of the samples).

    The matrix of a layer is 0 if the median distance is.

    Args:
        x: `layer n d_model`, n samples.
        widths: widths of the layers; narrower layers are padded with zeros, which change no distance.
        bandwidth: bandwidth as a fraction of the median distance between two different samples.
    """
    squared = squared_distances(x)
    n = x.shape[1]
    first, second = torch.triu_indices(n, n, 1, device=x.device)
    distances = squared[:, first, second].sort(1).values.sqrt()
    pairs = distances.shape[1]
    median = (distances[:, (pairs - 1) // 2] + distances[:, pairs // 2]) / 2
    variance = (bandwidth * median).square()[:, None, None]
    kernel = torch.exp(-squared / (2 * variance)).where(variance > 0, 0)
    # Centring does not change HSIC, and makes the diagonal the squared distance of each sample from the mean.
    return doubly_centred(kernel).to(x.dtype)


def centred(gram: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    """Centre Gram matrices for HSIC, in float64.

    The sum of the product of two U-centred Gram matrices is n(n-3) HSIC_1 (Szekely and Rizzo 2014).

    Args:
        gram: `layer n n`.
        biased: whether to centre twice, for the biased HSIC_0; if not, U-centre with a zero diagonal, for the unbiased HSIC_1.

    Returns:
        `layer (n n)`, the centred matrices, and `layer n`, the squared distance of each sample from the mean.
    """
    gram = gram.double()
    n = gram.shape[-1]
    r = gram.diagonal(dim1=1, dim2=2).clone()
    if biased:
        gram = doubly_centred(gram)
    else:
        gram.diagonal(dim1=1, dim2=2).zero_()
        row = gram.sum(2) / (n - 2)
        gram -= row[:, :, None]
        gram -= row[:, None, :]
        gram += (row.sum(1) / (n - 1))[:, None, None]
        gram.diagonal(dim1=1, dim2=2).zero_()
    return gram.flatten(1), r


@dataclass(frozen=True)
class TextTerms:
    """Gram matrix and its sums for each layer, from which HSIC without pairs of one text is computed, float64.

    Each term is an entry of a Gram matrix or a sum of entries. HSIC is a sum of products of the terms of two layers, each
    product times the sign of the term. The factors of `terms_between_texts` are in the terms, times the number of pairs of
    samples of distinct texts, which weights a smaller minibatch by its pairs.

    Attributes:
        pairs: `layer n n`, the Gram matrix without pairs that share a text; added.
        with_text: `layer n text`, sums of `pairs` over the samples of each text; added.
        of_sample: `layer n`, sums of `pairs` over all samples; subtracted.
        between: `layer text text`, sums of `pairs` over the samples of two texts; added.
        of_text: `layer text`, the sums of `between` over texts; subtracted.
        total: `layer`, the sum of all entries; added.
    """

    pairs: Tensor
    with_text: Tensor
    of_sample: Tensor
    between: Tensor
    of_text: Tensor
    total: Tensor

    def flat(self) -> tuple[Tensor, Tensor]:
        """All terms of each layer as one vector (`layer term`) and the signs of the terms (`term`)."""
        parts = (self.pairs, self.with_text, self.of_sample, self.between, self.of_text, self.total[:, None])
        signs = (1.0, 1.0, -1.0, 1.0, -1.0, 1.0)
        term_signs = [part.new_full((part[0].numel(),), sign) for part, sign in zip(parts, signs, strict=True)]
        return torch.cat([part.flatten(1) for part in parts], 1), torch.cat(term_signs)

    def by_text(self, texts: int) -> tuple[Tensor, Tensor]:
        """All terms grouped by pair of texts (`layer text text term`).

        Also returns the signs of the terms that pair a text with itself, `term`.

        The samples must be `text position`, with as many positions in each text. Pairs of one text are left out of the first
        three terms, so that there is place for those of single texts.
        """
        layers = len(self.pairs)
        positions = self.pairs.shape[1] // texts
        pairs = self.pairs.view(layers, texts, positions, texts, positions).permute(0, 1, 3, 2, 4).flatten(3)
        with_text = self.with_text.view(layers, texts, positions, texts).transpose(2, 3)
        terms = torch.cat([pairs, with_text, self.between[..., None]], -1)
        text = torch.arange(texts, device=terms.device)
        terms[:, text, text] = 0
        # The product of two layers counts the total once for each text.
        terms[:, text, text, 0] = (self.total / texts**0.5)[:, None]
        terms[:, text, text, positions**2 : -1] = self.of_sample.view(layers, texts, positions)
        terms[:, text, text, -1] = self.of_text
        signs = terms.new_ones(terms.shape[-1])
        signs[positions**2 :] = -1
        return terms, signs


def terms_between_texts(gram: Tensor, text: Tensor) -> tuple[TextTerms, Tensor]:
    r"""Compute `TextTerms` from Gram matrices: the terms of HSIC without pairs of samples from the same text.

    Also returns the squared distance of each sample from the mean, `layer n`.

    With K and L of which pairs of one text are 0, G = `sample text` the membership of samples in texts, m = G'1, n = 1'm,
    R = G'KG and S = G'LG,

    $$\mathrm{HSIC}_{\mathrm{texts}} = \frac{1'(K \circ L)1}{q_2} + \frac{(1'R1)(1'S1) - 4\,(R1)'(S1) + 2\,\mathrm{tr}\,RS}{q_4}
    - 2\,\frac{(K1)'(L1) - 1'(KG \circ LG)1}{q_3}$$

    with the numbers q of pairs, quadruples and triples of samples of distinct texts. With one sample a text it is HSIC_1.

    Args:
        gram: Gram matrix of the centred samples, `layer n n`.
        text: `n`, the text of each sample, from 0.
    """
    gram = gram.double()
    squares = gram.diagonal(dim1=1, dim2=2).clone()
    counts = torch.bincount(text.cpu()).double()
    text = text.to(gram.device)
    pairs = gram.masked_fill(text[:, None] == text, 0)
    member = torch.nn.functional.one_hot(text, len(counts)).double()
    with_text = pairs @ member
    of_sample = pairs.sum(2)
    between = member.T @ with_text
    of_text = between.sum(2)
    powers = [float(counts.pow(power).sum()) for power in range(1, 5)]
    pair_count, triple_count, quadruple_count = tuples_of_texts(*powers)
    # Roots, because a term occurs in both factors of a product.
    quadruple_factor = (pair_count / quadruple_count) ** 0.5
    triple_factor = (2 * pair_count / triple_count) ** 0.5
    terms = TextTerms(
        pairs,
        triple_factor * with_text,
        triple_factor * of_sample,
        2**0.5 * quadruple_factor * between,
        2 * quadruple_factor * of_text,
        quadruple_factor * of_text.sum(1),
    )
    return terms, squares


def tuples_of_texts(n: float, squares: float, cubes: float, fourths: float) -> tuple[float, float, float]:
    """Count ordered pairs, triples and quadruples of samples from different texts.

    Args:
        n: number of samples.
        squares: sum over texts of (samples in the text)^2.
        cubes: sum over texts of (samples in the text)^3.
        fourths: sum over texts of (samples in the text)^4.

    Examples:
        Four texts of one sample: 4 * 3, 4 * 3 * 2 and 4 * 3 * 2 * 1.

        >>> tuples_of_texts(4, 4, 4, 4)
        (12, 24, 24)
    """
    pairs = n**2 - squares
    triples = n**3 - 3 * n * squares + 2 * cubes
    quadruples = pairs**2 - 4 * (n**2 * squares - 2 * n * cubes + fourths) + 2 * (squares**2 - fourths)
    return pairs, triples, quadruples


def means_kernel(*views: View, rows: partial[Tensor]) -> dict[str, Tensor]:
    """Sums of each model's samples, and their number.

    Args:
        *views: the view of one model, or the views of two models on the same tokens.
        rows: function that takes a view and returns its samples, `layer sample d_model`.
    """
    totals = []
    for view in views:
        totals.append(torch.stack([layer.sum(0, dtype=torch.float64) for layer in rows(view)]))
    return {"x": totals[0], "y": totals[-1], "count": torch.tensor(rows(views[0]).shape[1])}


def exact_kernel(*views: View, rows: partial[Tensor], means: tuple[Tensor, Tensor], unit: str) -> dict[str, Tensor]:
    """Cross-products of one batch for `exact_hsic`, float64.

    Args:
        *views: the view of one model, or the views of two models on the same tokens.
        rows: function that takes a view and returns its samples, `layer sample d_model`.
        means: mean of the samples of each model, `layer d_model`.
        unit: "text" or "row" to leave out pairs that share a text or a row, not only the pair of a sample with itself.

    Returns:
        Fields `xy.*` for all pairs of layers; with two views, also `xx.*` and `yy.*` for each layer with itself.
    """
    x = _centred(rows(views[0]), means[0])
    y = x if len(views) == 1 else _centred(rows(views[-1]).to(x.device), means[1])
    row = torch.arange(x.shape[1], device=x.device)
    of_token = views[0].sequence if unit == "row" or views[0].unit is None else views[0].unit
    if rows.keywords["level"] != "token":
        of_token = of_token[row_ends(views[0]).to(of_token.device)]
    if unit != "token":
        row = torch.unique_consecutive(of_token, return_inverse=True)[1].to(x.device)
    out = {f"xy.{name}": value for name, value in _products(x, y, row).items()}
    if len(views) == 2:
        for prefix, side in (("xx", x), ("yy", y)):
            products_of_layers = [_products(layer[None], layer[None], row) for layer in side]
            for name in products_of_layers[0]:
                out[f"{prefix}.{name}"] = torch.stack([products[name] for products in products_of_layers])
    samples_of_row = torch.bincount(row).double()
    out["samples"] = torch.tensor(x.shape[1])
    out["tuples"] = torch.stack([samples_of_row.pow(power).sum() for power in range(1, 5)])
    return out


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """Samples minus their mean in float64; 0 if the difference is only rounding."""
    offset = mean.to(x)[:, None]
    return (x.double() - mean.to(x.device)[:, None]) * beyond_rounding(x - offset, offset)[..., None]


def _products(x: Tensor, y: Tensor, row: Tensor) -> dict[str, Tensor]:
    """Cross-products of centred samples, and of the sums of samples in each row.

    Args:
        x: `layer sample d_model`.
        y: `layer sample d_model` of the same samples; layers and width may differ from `x`.
        row: `sample`, index of the row of each sample, ascending.

    Returns:
        For all pairs of layers `cross` = X'Y and `between` = S'T, where S and T are the sums over each row; `within`, the sum
        over rows of |X_a'Y_a|^2; `inner`, the sum over samples of (x_i s_a)(y_i t_a); `squares`, the sum over rows of |s_a|^2
        |t_a|^2. For each layer `row_x` and `row_y`, the sums of |s_a|^2; `r_x`, `r_x^2`, `r_y` and `r_y^2`, sums of the squared
        norms of samples and of their squares.
    """
    rows = int(row[-1]) + 1
    s = x.new_zeros(len(x), rows, x.shape[-1]).index_add(1, row, x)
    t = y.new_zeros(len(y), rows, y.shape[-1]).index_add(1, row, y)
    r_x = x.square().sum(-1)
    r_y = y.square().sum(-1)
    if rows == len(row):
        within = r_x @ r_y.T
    else:
        counts = torch.bincount(row).tolist()
        products_of_rows = []
        for x_of_row, y_of_row in zip(torch.split(x, counts, 1), torch.split(y, counts, 1), strict=True):
            x_gram = torch.bmm(x_of_row, x_of_row.mT).flatten(1)
            y_gram = torch.bmm(y_of_row, y_of_row.mT).flatten(1)
            products_of_rows.append(x_gram @ y_gram.T)
        within = torch.stack(products_of_rows).sum(0)
    row_x = s.square().sum(-1)
    row_y = t.square().sum(-1)
    return {
        "cross": _stacked(x).T @ _stacked(y),
        "between": _stacked(s).T @ _stacked(t),
        "within": within,
        "inner": (x * s[:, row]).sum(-1) @ (y * t[:, row]).sum(-1).T,
        "squares": row_x @ row_y.T,
        "row_x": row_x.sum(1),
        "row_y": row_y.sum(1),
        "r_x": r_x.sum(1),
        "r_x^2": r_x.square().sum(1),
        "r_y": r_y.sum(1),
        "r_y^2": r_y.square().sum(1),
    }


def _stacked(x: Tensor) -> Tensor:
    return rearrange(x, "layer sample d -> sample (layer d)")


def exact_hsic(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """HSIC of all samples, without pairs from the same text, computed from the summed output of `exact_kernel`.

    The samples sum to 0, so the terms of `terms_between_texts` become: pairs |X'Y|^2 - sum_a |X_a'Y_a|^2; quadruples
    sum |s_a|^2 sum |t_a|^2 - 6 sum |s_a|^2 |t_a|^2 + 2 |S'T|^2; and triples 2 sum_i (x_i s_a)(y_i t_a) - <X'Y, S'T>.

    Returns:
        HSIC of all pairs of layers, `row column`; of each row layer with itself, `row`; of each column layer with itself,
        `column`.
    """
    hsic_xy = _hsic_of(_products_named(sums, "xy."), sums)
    if "xx.cross" not in sums.fields:
        return hsic_xy, hsic_xy.diagonal(), hsic_xy.diagonal()
    return hsic_xy, _hsic_of_layers(sums, "xx."), _hsic_of_layers(sums, "yy.")


def _products_named(sums: Sums, prefix: str) -> dict[str, Tensor]:
    """The output of `_products` whose names in the sums have a prefix."""
    return {name.removeprefix(prefix): value for name, value in sums.fields.items() if name.startswith(prefix)}


def _hsic_of_layers(sums: Sums, prefix: str) -> Tensor:
    """HSIC of each layer with itself (`layer`)."""
    products = _products_named(sums, prefix)
    hsic = []
    for layer in range(len(products["cross"])):
        products_of_layer = {name: value[layer] for name, value in products.items()}
        hsic.append(_hsic_of(products_of_layer, sums)[0, 0])
    return torch.stack(hsic)


def exact_biased_cka(sums: Sums) -> Tensor:
    """CKA by the biased HSIC_0 over all samples (`row column`).

    It is |X'Y|^2 / (|X'X| |Y'Y|) for centred samples; NaN if not defined.

    Args:
        sums: summed output of `exact_kernel`.
    """
    a, b = sums["xy.within"].shape
    cross = rearrange(sums["xy.cross"], "(a d) (b e) -> a b (d e)", a=a, b=b).square().sum(-1)
    if "xx.cross" in sums.fields:
        x_square = sums["xx.cross"].square().sum((1, 2))
        y_square = sums["yy.cross"].square().sum((1, 2))
    else:
        x_square = cross.diagonal()
        y_square = cross.diagonal()
    return cross / torch.outer(x_square.sqrt(), y_square.sqrt())


def _hsic_of(products: dict[str, Tensor], sums: Sums) -> Tensor:
    """HSIC of all pairs of layers from the output of `_products`."""
    pairs, triples, quadruples = tuples_of_texts(*sums["tuples"].tolist())
    a, b = products["within"].shape
    cross = rearrange(products["cross"], "(a d) (b e) -> a b (d e)", a=a, b=b)
    between = rearrange(products["between"], "(a d) (b e) -> a b (d e)", a=a, b=b)
    pair_sum = cross.square().sum(-1) - products["within"]
    quadruple_sum = torch.outer(products["row_x"], products["row_y"])
    quadruple_sum = quadruple_sum - 6 * products["squares"] + 2 * between.square().sum(-1)
    triple_sum = 2 * products["inner"] - (cross * between).sum(-1)
    return pair_sum / pairs + quadruple_sum / quadruples - 2 * triple_sum / triples
