"""Linear predictivity: R2 of linear regressions that predict one site's activations from another's, held-out or in-sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core import LayersimError, Sums, axes, result_class, typed
from ..core.arguments import FractionBelowOne, NonNegativeFloat
from ..core.wording import amount
from ._moments import (
    Covariances,
    CrossProductAnalyzer,
    least_squares_weights,
    ridge_weights,
    warn_of_few_samples,
    warn_of_few_texts,
)
from ._permutation_null import CalibratedMatrix
from ._samples import held_out
from .analyzer import Run
from .needs import Needs


@result_class
class LinearPredictivityResult(CalibratedMatrix):
    """R2 of linear predictions between sites, on held-out rows or in-sample. All tensors are float64.

    Attributes:
        values: `row column`, R2 of the column site predicted from the row site: 1 if perfect, 0 if no better than the mean of
            the held-out samples, below 0 if worse. NaN if all samples of a site are equal.
        reverse: `row column`, R2 of the row site predicted from the column site; within one model, `values` transposed.
        samples: number of tokens (or sequences) that the regressions are fitted on.
        held_out_samples: number of held-out tokens (or sequences), which are predicted; 0 if R2 is in-sample, of the samples
            that the regressions are fitted on.
    """

    measure: ClassVar[str] = "R2"
    partners: ClassVar[Mapping[str, str]] = {"values": "reverse", "reverse": "values"}
    values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="R2 of the column site from the row site",
        title="Linear predictivity of the column site from the row site",
        caption="Fraction of the variance that a linear regression from the row site explains, on held-out rows (Yamins et al. "
        "2014) or, without any, on the rows of the fit (Kornblith et al. 2019, table 1).",
        within=(-math.inf, 1),
    )
    reverse: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="R2 of the row site from the column site",
        title="Linear predictivity of the row site from the column site",
        caption="Fraction of the variance that a linear regression in the other direction explains, on held-out rows (Yamins "
        "et al. 2014) or, without any, on the rows of the fit (Kornblith et al. 2019, table 1).",
        within=(-math.inf, 1),
    )
    samples: int
    held_out_samples: int

    def headline(self) -> dict[str, float]:
        kind = "held-out R2" if self.held_out_samples else "in-sample R2"
        return {name.replace(self.measure, kind): number for name, number in super().headline().items()}

    def transposed(self) -> LinearPredictivityResult:
        """The same result with rows and columns exchanged.

        Raises:
            LayersimError: the result has a null, which holds for predictions from rows to columns only.
        """
        if self.permutations:
            raise LayersimError(
                "A LinearPredictivityResult with a null cannot be transposed: its null holds for predicting column sites "
                "from row sites, not the reverse. Compare the models in the other order."
            )
        return super().transposed()  # type: ignore[no-any-return]  # of this class


@typed
@dataclass(frozen=True, eq=False)
class LinearPredictivity(CrossProductAnalyzer):
    r"""R2 of linear regressions that predict one site's activations from another's, in both directions.

    $$R^2 = 1 - \frac{\sum_i \lVert y_i - \bar y - \hat W'(x_i - \bar x) \rVert^2}{\sum_i \lVert y_i - \bar y_{\mathrm{held}}
    \rVert^2}, \qquad \hat W = (\Sigma_X + \mathrm{ridge} \, \mathrm{diag} \, \Sigma_X)^{-1} \Sigma_{XY}$$

    with covariances and means of the training samples, sums over held-out samples, and the mean $\bar y_{\mathrm{held}}$ of the
    held-out samples. This is ridge regression on dimensions of x that are scaled to a standard deviation of 1; the intercept is
    not penalised. Squared errors and variances are added over the dimensions of y before they are divided: a dimension of y
    counts by its variance.

    Whole texts are held out, with all rows that are cut from them or have their group: rows of one text are not independent.
    The number of a text's first row decides alone, so the choice does not depend on batches. Held-out R2 follows exactly from
    the cross-products of the held-out samples, in one pass and without keeping activations.

    With `test_fraction=0` all samples are fitted, and R2 is of the same samples; with `ridge=0` the fit is of least squares.
    With both, and an orthonormal basis $Q_X$ of the columns of the centred X, the R2 of Y predicted from X, in `values`, and of
    X from Y, in `reverse`, are

    $$R^2_{\mathrm{LR}}(Y, X) = \frac{\lVert Q_X' Y \rVert_F^2}{\lVert Y \rVert_F^2}, \qquad
    R^2_{\mathrm{LR}}(X, Y) = \frac{\lVert Q_Y' X \rVert_F^2}{\lVert X \rVert_F^2}$$

    in the notation of Kornblith et al., whose first argument is predicted. In-sample, n unrelated samples of d dimensions have
    an R2 of about d / n, and of 1 at n <= d; `permutations` measures this baseline.

    The measure is invariant to translation of both sites, to the scale of each dimension of the predicting site, and to
    rotation and scale of the predicted site. At a ridge near 0 it is invariant to invertible linear maps of the predicting
    site.

    Args:
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS].
        permutations: number of random pairings of texts for the null distribution of `values`, see `Procrustes`. Training texts
            are paired with each other, and so are held-out texts. Each pairing has its own cross-products, so memory and time
            grow by this factor: select a few sites with `at=`.
        unit: see `Procrustes`.
        seed: random seed of the choice of held-out texts and of the random pairings.
        max_memory_gb: limit for the sums; a run that needs more raises an error before it starts. One model of L sites of width
            d needs 48 L (L + 1) / 2 d^2 bytes.
        ridge: strength of the penalty relative to the variance of each dimension of the predicting site; 0 for least squares
            without a penalty, where principal directions of a variance below 1e-12 of the largest one predict nothing.
        test_fraction: fraction of the texts that are held out, spread evenly over the data; 0 for R2 in-sample.

    Source:
        Yamins et al. 2014 and Schrimpf et al. 2018 for linear predictivity of neural responses. Kornblith et al. 2019 (arXiv
        1905.00414), table 1, for linear regression as a similarity of representations: that is `reverse`
        with `ridge=0, test_fraction=0`.

    Examples:
        >>> import tl_layersim as lsim
        >>> found = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:40], [lsim.LinearPredictivity()])["linear_predictivity"]
        >>> found.values.shape, bool(found.values[7, 8] > found.values[0, 8])
        (torch.Size([9, 9]), True)

        The R2 of Kornblith et al. is that of the samples of the fit.

        >>> in_sample = lsim.LinearPredictivity(ridge=0, test_fraction=0)
        >>> fitted = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:40], in_sample)["linear_predictivity"]
        >>> fitted.held_out_samples, bool(fitted.values[0, 8] > found.values[0, 8])
        (0, True)
    """

    name: ClassVar[str] = "linear_predictivity"
    seconds_per_pair: ClassVar[float] = 0.1
    # Training and held-out samples.
    groups: ClassVar[int] = 2

    ridge: NonNegativeFloat = 0.01
    test_fraction: FractionBelowOne = 0.2

    @property
    def needs(self) -> Needs:
        # Whole texts of the data are held out.
        return replace(super().needs, symmetric=False, single_texts=True, dominance=("samples",))

    @property
    def split(self) -> partial[Tensor] | None:
        if not self.test_fraction:
            return None
        return partial(held_out, fraction=float(self.test_fraction), seed=self.seed)

    def compute(self, sums: Sums, run: Run) -> LinearPredictivityResult:
        in_sample = self.split is None
        train_name = "" if in_sample else "train."
        test_name = "" if in_sample else "test."
        train = Covariances(sums, train_name)
        test = Covariances(sums, test_name)
        held_out_samples = 0 if in_sample else test.samples
        count = train.samples + held_out_samples
        if in_sample and train.samples < 2:
            raise LayersimError(f"LinearPredictivity needs two {self.sample_word}; the data has {train.samples}.")
        if train.samples < 2 or test.samples < 2:
            raise LayersimError(
                f"LinearPredictivity needs two training and two held-out {self.sample_word}; the data has {train.samples} "
                f"training and {test.samples} held-out {self.sample_word}. It has {amount(run.provenance.texts, 'text')}, "
                "whose rows stay together."
            )
        warn_of_few_samples("LinearPredictivity", train.samples, train.rows.mean.shape[-1], self.sample_word)
        if not in_sample:
            warn_of_few_texts("LinearPredictivity", int(sums["test.texts"]))
        defined_rows = train.rows.defined & test.rows.defined
        defined_columns = train.columns.defined & test.columns.defined
        defined = self.defined_pairs(run, (defined_rows, defined_columns), count)
        values = self._r2(train, test, defined_rows).where(defined, math.nan)
        reverse = values.T
        if train.two_models:
            reverse = self._r2(train.transposed(), test.transposed(), defined_columns).T.where(defined, math.nan)
        null: dict[str, Any] = {}
        if {f"null.{train_name}samples", f"null.{test_name}samples"} <= sums.fields.keys():
            parts = [Covariances(sums, f"null.{train_name}"), Covariances(sums, f"null.{test_name}")]
            null = self.null(run, defined, parts, lambda pair, _: self._r2(pair[0], pair[1], defined_rows))
        return LinearPredictivityResult(
            values=values,
            reverse=reverse,
            samples=train.samples,
            held_out_samples=held_out_samples,
            **null,
            layers=run.layers,
            column_layers=run.column_layers,
            provenance=run.provenance,
        )

    def _r2(self, train: Covariances, test: Covariances, defined: Tensor) -> Tensor:
        """R2 of each column site, predicted from each row site (`row column`).

        Args:
            train: covariances of the training samples.
            test: covariances of the held-out samples; in-sample, those of the training samples.
            defined: whether each row site's samples differ, so that it can predict.
        """
        out = torch.full((len(train.rows.mean), len(train.columns.mean)), math.nan, dtype=torch.float64)
        columns = list(range(out.shape[1]))
        total = test.columns.variance
        shift_y = test.columns.mean - train.columns.mean
        for row in defined.nonzero()[:, 0].tolist():
            cross = train.between(row, columns)
            weight = self._weights(train, row, cross)
            explained = 2 * (weight * test.between(row, columns)).sum((1, 2))
            predicted = (weight * (test.rows.covariance(row) @ weight)).sum((1, 2))
            # The regression predicts the training mean at the training mean.
            shift = shift_y - (test.rows.mean[row] - train.rows.mean[row]) @ weight
            out[row] = 1 - (total - explained + predicted + shift.square().sum(1)) / total
        return out

    def _weights(self, train: Covariances, row: int, cross: Tensor) -> Tensor:
        """Coefficients that predict the column sites from one row site, in the shape of `cross` (`column width target`)."""
        covariance = train.rows.covariance(row)
        mean = train.rows.mean[row]
        if self.ridge:
            return ridge_weights(covariance, cross, mean, float(self.ridge))
        return least_squares_weights(covariance, cross, mean, train.samples)
