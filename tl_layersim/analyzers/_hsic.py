"""Hilbert-Schmidt independence criterion (HSIC), which CKA is built on: within minibatches, or over all samples.

Tokens of one text depend on each other, so pairs of one row add a covariance that is not there between texts. `without_rows`
leaves them out of all three terms of HSIC_1: it is then a U-statistic over distinct rows, without bias for any dependence
within rows. Plain functions of torch: they are serialised by value with the kernels that call them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from ..activations.norms import beyond_rounding
from ..activations.view import View
from ..core.sums import Sums

# Rows of a Gram matrix that are one product; smaller products are slower by the FLOP.
GRAM_ROWS = 128


def gram_matrices(x: Tensor, widths: tuple[int, ...] = ()) -> Tensor:
    """Gram matrices of the centred samples, `layer n n`, in the dtype of the samples.

    The matrix of a layer is exactly 0 if its samples are equal up to rounding.

    Args:
        x: `layer n d_model`, n samples.
        widths: widths of the layers; narrower layers are padded with zeros, which change no product.
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
    """Terms of HSIC without the pairs of samples that share a row. Float64.

    HSIC is a sum of products of the terms of two layers, each product times the sign of the term. The factors of `without_rows`
    are in the terms, times the number of pairs of samples of distinct rows, which weights a smaller minibatch by its pairs.

    Attributes:
        pairs: `layer n n`, the Gram matrix without pairs that share a row; added.
        with_row: `layer n row`, sums of `pairs` over the samples of each row; added.
        of_sample: `layer n`, sums of `pairs` over all samples; subtracted.
        between: `layer row row`, sums of `pairs` over the samples of two rows; added.
        of_row: `layer row`, the sums of `between` over rows; subtracted.
        total: `layer`, the sum of all entries; added.
    """

    pairs: Tensor
    with_row: Tensor
    of_sample: Tensor
    between: Tensor
    of_row: Tensor
    total: Tensor

    def flat(self) -> tuple[Tensor, Tensor]:
        """All terms of each layer as one vector, `layer term`, and their signs, `term`."""
        parts = (self.pairs, self.with_row, self.of_sample, self.between, self.of_row, self.total[:, None])
        signs = (1.0, 1.0, -1.0, 1.0, -1.0, 1.0)
        ones = [part.new_full((part[0].numel(),), sign) for part, sign in zip(parts, signs, strict=True)]
        return torch.cat([part.flatten(1) for part in parts], 1), torch.cat(ones)

    def by_row(self, rows: int) -> tuple[Tensor, Tensor]:
        """The terms by pair of rows, `layer row row term`, and the signs for a row with itself, `term`.

        The samples must be `row position`, with as many positions in each row. Pairs of one row are left out of the first
        three terms, so that there is place for those of single rows.
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
    r"""Terms of HSIC without pairs that share a row, and each sample's squared distance from the mean, `layer n`.

    With K and L of which pairs of one row are 0, G = `sample row` the membership of samples in rows, m = G'1, n = 1'm,
    R = G'KG and S = G'LG,

    $$\mathrm{HSIC}_{\mathrm{rows}} = \frac{1'(K \circ L)1}{q_2} + \frac{(1'R1)(1'S1) - 4\,(R1)'(S1) + 2\,\mathrm{tr}\,RS}{q_4}
    - 2\,\frac{(K1)'(L1) - 1'(KG \circ LG)1}{q_3}$$

    with the numbers q of pairs, quadruples and triples of samples of distinct rows. With one sample a row it is HSIC_1.

    Args:
        gram: Gram matrix of the centred samples, `layer n n`.
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
    """Numbers of ordered pairs, triples and quadruples of samples that all come from different rows.

    Args:
        n: number of samples.
        squares: sum over rows of (samples in the row)^2.
        cubes: sum over rows of (samples in the row)^3.
        fourths: sum over rows of (samples in the row)^4.

    Examples:
        Four rows of one sample: 4 * 3, 4 * 3 * 2 and 4 * 3 * 2 * 1.

        >>> tuples_of_rows(4, 4, 4, 4)
        (12, 24, 24)
    """
    pairs = n**2 - squares
    triples = n**3 - 3 * n * squares + 2 * cubes
    quadruples = pairs**2 - 4 * (n**2 * squares - 2 * n * cubes + fourths) + 2 * (squares**2 - fourths)
    return pairs, triples, quadruples


def means_kernel(*views: View, rows: partial[Tensor]) -> dict[str, Tensor]:
    """Sum of the samples of each model, and their number.

    Args:
        *views: the view of one model, or the views of two models on the same tokens.
        rows: function that takes a view and returns its samples, `layer sample d_model`.
    """
    totals = [torch.stack([layer.sum(0, dtype=torch.float64) for layer in rows(view)]) for view in views]
    return {"x": totals[0], "y": totals[-1], "count": torch.tensor(rows(views[0]).shape[1])}


def exact_kernel(*views: View, rows: partial[Tensor], means: tuple[Tensor, Tensor], by_row: bool) -> dict[str, Tensor]:
    """Cross-products of one batch in float64; `exact_hsic` computes HSIC over all samples from their sums.

    Args:
        *views: the view of one model, or the views of two models on the same tokens.
        rows: function that takes a view and returns its samples, `layer sample d_model`.
        means: mean of the samples of each model, `layer d_model`.
        by_row: whether pairs that share a row are left out, not only the pair of a sample with itself.

    Returns:
        Fields `xy.*` for all pairs of layers; with two views, also `xx.*` and `yy.*` for each layer with itself.
    """
    x = _centred(rows(views[0]), means[0])
    y = x if len(views) == 1 else _centred(rows(views[-1]).to(x.device), means[1])
    row = torch.arange(x.shape[1], device=x.device)
    if by_row and rows.keywords["level"] == "token":
        row = torch.unique_consecutive(views[0].sequence, return_inverse=True)[1].to(x.device)
    out = {f"xy.{name}": value for name, value in _products(x, y, row).items()}
    if len(views) == 2:
        for own, z in (("xx", x), ("yy", y)):
            per_layer = [_products(layer[None], layer[None], row) for layer in z]
            out |= {f"{own}.{name}": torch.stack([m[name] for m in per_layer]) for name in per_layer[0]}
    members = torch.bincount(row).double()
    return out | {"samples": torch.tensor(x.shape[1]), "tuples": torch.stack([members.pow(k).sum() for k in range(1, 5)])}


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """Samples minus their mean in float64; 0 if the difference is only rounding."""
    offset = mean.to(x)[:, None]
    return (x.double() - mean.to(x.device)[:, None]) * beyond_rounding(x - offset, offset)[..., None]


def _products(x: Tensor, y: Tensor, row: Tensor) -> dict[str, Tensor]:
    """Products of centred samples, and products of their sums over each row.

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
    s, t = (z.new_zeros(len(z), rows, z.shape[-1]).index_add(1, row, z) for z in (x, y))
    r_x, r_y = x.square().sum(-1), y.square().sum(-1)
    if rows == len(row):
        within = r_x @ r_y.T
    else:
        counts = torch.bincount(row).tolist()
        grams = zip(*((torch.bmm(part, part.mT).flatten(1) for part in torch.split(z, counts, 1)) for z in (x, y)), strict=True)
        within = torch.stack([a @ b.T for a, b in grams]).sum(0)
    row_x, row_y = s.square().sum(-1), t.square().sum(-1)
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
    """HSIC over all samples without pairs that share a row, from the summed output of `exact_kernel`.

    The samples sum to 0, so the terms of `without_rows` become: pairs |X'Y|^2 - sum_a |X_a'Y_a|^2; quadruples
    sum |s_a|^2 sum |t_a|^2 - 6 sum |s_a|^2 |t_a|^2 + 2 |S'T|^2; and triples 2 sum_i (x_i s_a)(y_i t_a) - <X'Y, S'T>.

    Returns:
        HSIC of all pairs of layers, `row column`; of each row layer with itself, `row`; of each column layer with itself,
        `column`.
    """
    cross = _hsic_of({name.removeprefix("xy."): value for name, value in sums.fields.items() if name.startswith("xy.")}, sums)
    if "xx.cross" not in sums.fields:
        return cross, cross.diagonal(), cross.diagonal()
    own = []
    for which in ("xx", "yy"):
        fields = {name.removeprefix(f"{which}."): v for name, v in sums.fields.items() if name.startswith(f"{which}.")}
        layers = range(len(fields["cross"]))
        own.append(torch.stack([_hsic_of({name: v[layer] for name, v in fields.items()}, sums)[0, 0] for layer in layers]))
    return cross, own[0], own[1]


def exact_biased_cka(sums: Sums) -> Tensor:
    """CKA by the biased HSIC_0 over all samples, |X'Y|^2 / (|X'X| |Y'Y|) of centred samples, `row column`; NaN if undefined.

    Args:
        sums: summed output of `exact_kernel`.
    """
    a, b = sums["xy.within"].shape
    cross = rearrange(sums["xy.cross"], "(a d) (b e) -> a b (d e)", a=a, b=b).square().sum(-1)
    own = (
        [sums[f"{z}.cross"].square().sum((1, 2)) for z in ("xx", "yy")] if "xx.cross" in sums.fields else [cross.diagonal()] * 2
    )
    return cross / torch.outer(own[0].sqrt(), own[1].sqrt())


def _hsic_of(m: dict[str, Tensor], sums: Sums) -> Tensor:
    pairs, triples, quadruples = tuples_of_rows(*sums["tuples"].tolist())
    a, b = m["within"].shape
    cross, between = (rearrange(m[name], "(a d) (b e) -> a b (d e)", a=a, b=b) for name in ("cross", "between"))
    two = cross.square().sum(-1) - m["within"]
    four = torch.outer(m["row_x"], m["row_y"]) - 6 * m["squares"] + 2 * between.square().sum(-1)
    three = 2 * m["inner"] - (cross * between).sum(-1)
    return two / pairs + four / quadruples - 2 * three / triples
