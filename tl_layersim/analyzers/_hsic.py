"""Hilbert-Schmidt independence criterion (HSIC), the basis of CKA, from Gram matrices of samples.

Tokens of one text depend on each other, so pairs of one row add a covariance that is not there between texts. `without_rows`
leaves them out of all three terms of HSIC_1: it is then a U-statistic over distinct rows, without bias for any dependence
within rows. Plain functions of torch: they are serialised by value with the kernels that call them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of a Gram matrix that are one product; smaller products are slower by the FLOP.
GRAM_ROWS = 128


def grams(x: Tensor) -> Tensor:
    """Gram matrices of the centred samples, `layer n n`, in the dtype of the samples.

    The matrix of a layer is exactly 0 if its samples are equal up to rounding.

    Args:
        x: `layer n d_model`, n samples.
    """
    # Centring does not change HSIC. Without it, a large common vector would use up the digits of float32.
    mean = x.mean(1, keepdim=True)
    x = x - mean
    same = ~beyond_rounding(x, mean).any(1)
    if bool(same.any()):
        x = x.masked_fill(same[:, None, None], 0)
    samples = x.shape[1]
    gram = x.new_empty(len(x), samples, samples)
    # The lower triangle is copied: its products would be the largest cost of CKA.
    for start in range(0, samples, GRAM_ROWS):
        end = start + GRAM_ROWS
        gram[:, start:end, start:] = torch.bmm(x[:, start:end], x[:, start:].transpose(1, 2))
        gram[:, end:, start:end] = gram[:, start:end, end:].transpose(1, 2)
    return gram


def beyond_rounding(centred: Tensor, mean: Tensor) -> Tensor:
    """Whether centred samples differ from zero by more than the rounding error of the subtraction, `layer sample`.

    A difference within rounding error has no direction: its cosine, or its weight in CKA, would be arbitrary.

    Args:
        centred: `layer sample d_model`, samples minus their mean.
        mean: the mean, in a shape that broadcasts to `centred`.
    """
    allowed = 16 * torch.finfo(centred.dtype).eps
    # Norms decide almost all samples; the others are compared dimension by dimension.
    beyond: Tensor = centred.norm(dim=-1) > allowed * mean.norm(dim=-1)
    layers, samples = (~beyond).nonzero(as_tuple=True)
    if len(layers):
        mean = mean.expand_as(centred)[layers, samples]
        beyond[layers, samples] = (centred[layers, samples].abs() > allowed * mean.abs()).any(-1)
    return beyond


def centred(gram: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    """Centre Gram matrices for HSIC, in float64.

    The sum of the product of two U-centred Gram matrices is n(n-3) HSIC_1 (Szekely and Rizzo 2014).

    Args:
        gram: `layer n n`.
        biased: double centring, for HSIC_0; else U-centring with a zero diagonal, for HSIC_1.

    Returns:
        `layer (n n)`, the centred matrices, and `layer n`, the squared distance of each sample from the mean.
    """
    gram = gram.double()
    n = gram.shape[-1]
    r = gram.diagonal(dim1=1, dim2=2).clone()
    if biased:
        gram = gram - gram.mean(1, keepdim=True) - gram.mean(2, keepdim=True) + gram.mean((1, 2), keepdim=True)
    else:
        gram.diagonal(dim1=1, dim2=2).zero_()
        row = gram.sum(2) / (n - 2)
        gram -= row[:, :, None]
        gram -= row[:, None, :]
        gram += (row.sum(1) / (n - 1))[:, None, None]
        gram.diagonal(dim1=1, dim2=2).zero_()
    return gram.flatten(1), r


@dataclass(frozen=True)
class RowTerms:
    """The terms of HSIC without pairs of one row, for samples of several rows, float64.

    HSIC is a sum of products of the terms of two layers, each product times the sign of the term. The factors of METHODS are in
    the terms, times the number of pairs of samples of distinct rows, which weights a smaller minibatch by its pairs.

    Attributes:
        pairs: `layer n n`, the Gram matrix without pairs of one row; added.
        with_row: `layer n row`, its sums over the samples of each row; added.
        of_sample: `layer n`, its sums over all samples; subtracted.
        between: `layer row row`, its sums over the samples of two rows; added.
        of_row: `layer row`, the sums of `between` over rows; subtracted.
        total: `layer`, the sum of all; added.
    """

    pairs: Tensor
    with_row: Tensor
    of_sample: Tensor
    between: Tensor
    of_row: Tensor
    total: Tensor

    def flat(self) -> tuple[Tensor, Tensor]:
        """All terms of a layer in one row, `layer term`, and their signs, `term`."""
        parts = (self.pairs, self.with_row, self.of_sample, self.between, self.of_row, self.total[:, None])
        signs = (1.0, 1.0, -1.0, 1.0, -1.0, 1.0)
        ones = [part.new_full((part[0].numel(),), sign) for part, sign in zip(parts, signs, strict=True)]
        return torch.cat([part.flatten(1) for part in parts], 1), torch.cat(ones)

    def by_row(self, rows: int) -> tuple[Tensor, Tensor]:
        """The terms by pair of rows, `layer row row term`, and the signs of those of a row with itself, `term`.

        The samples must be `row position`, with as many positions in each row. Pairs of one row are left out of the first
        three terms, so that there is place for those of single rows.

        Args:
            rows: number of rows.
        """
        layers, each = len(self.pairs), self.pairs.shape[1] // rows
        pairs = self.pairs.view(layers, rows, each, rows, each).permute(0, 1, 3, 2, 4).flatten(3)
        with_row = self.with_row.view(layers, rows, each, rows).transpose(2, 3)
        terms = torch.cat([pairs, with_row, self.between[..., None]], -1)
        own = torch.arange(rows, device=terms.device)
        terms[:, own, own] = 0
        terms[:, own, own, 0] = (self.total / rows**0.5)[:, None]
        terms[:, own, own, each**2 : -1] = self.of_sample.view(layers, rows, each)
        terms[:, own, own, -1] = self.of_row
        signs = terms.new_ones(terms.shape[-1])
        signs[each**2 :] = -1
        return terms, signs


def without_rows(gram: Tensor, row: Tensor) -> tuple[RowTerms, Tensor]:
    r"""The terms of HSIC without pairs of one row, and the squared distance of each sample from the mean, `layer n`.

    With K and L of which pairs of one row are 0, G = `sample row` the membership of samples in rows, m = G'1, n = 1'm,
    R = G'KG and S = G'LG,

    $$\mathrm{HSIC}_{\mathrm{rows}} = \frac{1'(K \circ L)1}{q_2} + \frac{(1'R1)(1'S1) - 4\,(R1)'(S1) + 2\,\mathrm{tr}\,RS}{q_4}
    - 2\,\frac{(K1)'(L1) - 1'(KG \circ LG)1}{q_3}$$

    with the numbers q of pairs, quadruples and triples of samples of distinct rows. With one sample a row it is HSIC_1.

    Args:
        gram: `layer n n`, of centred samples.
        row: `n`, the row of each sample, from 0.
    """
    gram = gram.double()
    squares = gram.diagonal(dim1=1, dim2=2).clone()
    counts = torch.bincount(row.cpu()).double()
    row = row.to(gram.device)
    pairs = gram.masked_fill(row[:, None] == row, 0)
    member = torch.nn.functional.one_hot(row, len(counts)).double()
    with_row, of_sample = pairs @ member, pairs.sum(2)
    between = member.T @ with_row
    of_row = between.sum(2)
    powers = [float(counts.pow(power).sum()) for power in range(1, 5)]
    two, three, four = tuples_of_rows(*powers)
    quadruple, triple = (two / four) ** 0.5, (2 * two / three) ** 0.5
    terms = RowTerms(
        pairs,
        triple * with_row,
        triple * of_sample,
        2**0.5 * quadruple * between,
        2 * quadruple * of_row,
        quadruple * of_row.sum(1),
    )
    return terms, squares


def tuples_of_rows(n: float, squares: float, cubes: float, fourths: float) -> tuple[float, float, float]:
    """Numbers of ordered pairs, triples and quadruples of samples of distinct rows.

    Args:
        n: number of samples.
        squares: sum over rows of the squared number of samples.
        cubes: of the third power.
        fourths: of the fourth power.

    Examples:
        Four rows of one sample: 4 * 3, 4 * 3 * 2 and 4 * 3 * 2 * 1.

        >>> tuples_of_rows(4, 4, 4, 4)
        (12, 24, 24)
    """
    pairs = n**2 - squares
    triples = n**3 - 3 * n * squares + 2 * cubes
    quadruples = pairs**2 - 4 * (n**2 * squares - 2 * n * cubes + fourths) + 2 * (squares**2 - fourths)
    return pairs, triples, quadruples
