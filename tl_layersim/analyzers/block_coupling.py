"""Block coupling: alignment of two blocks' Jacobians by their top singular vectors, averaged over prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View, row_ends
from ..core import LayersimError, Result, Sums, axes, result_class, typed, warn
from ..core.arguments import PositiveFloat, Seed
from ..core.wording import brief
from ..data.batches import Batch
from ..jacobians.coupling import Connections, CouplingOptions, couple, miscoupling, pick_method
from ..jacobians.supported_blocks import need_calls, refuse_failed_replay
from ..sources.model_description import ModelDescription
from ._samples import counted_rows, defined_by_row, prompt_fields, row_counts_kernel, sums_by_row
from .analyzer import AUBRY, Analyzer, Run, sites_where
from .needs import Needs

PairField = Literal[
    "coupling",
    "values",
    "null",
    "null_coupling",
    "std",
    "defined",
    "left_alignment",
    "right_alignment",
    "cross_alignment",
]
# Number of ranges of prompt lengths: 1, 2 to 3, 4 to 7, ...
OCTAVES = 21
# Fields whose means are over the prompts on which they are defined.
ALIGNMENTS = ("left_alignment", "right_alignment", "cross_alignment")
LINEAR = ("path_error", "update_error", "left_share", "right_share")


@result_class
class BlockCouplingResult(Result):
    """Coupling of all pairs of blocks, and the singular values of each block. Block l is the row, l' the column. Float64.

    Attributes:
        values: `layer layer`, mean over prompts of the mis-coupling m~(A^{ll'}) of the Jacobian of l in the basis of l'; m
            with `normalize=False`. Not symmetric. The diagonal is 0 up to rounding.
        defined: `layer layer`, fraction of prompts on which the Jacobian of l is above rounding error and the Jacobian of l'
            has k singular values above it. Means are over these prompts; NaN without any.
        std: `layer layer`, standard deviation of the mis-coupling over prompts (divided by N).
        coupling: `layer layer`, 1 - values; -values with `normalize=False`.
        null: `layer layer`, `values` with random orthonormal vectors in place of the singular vectors of l', mean over eight
            draws: the mis-coupling of unrelated blocks, about sqrt(1 - 1/k).
        by_k: `k layer layer`, `values` for each k; `values` itself is for the first k.
        null_by_k: `k layer layer`, `null` for each k.
        singular_values: `layer direction`, singular values of the Jacobian without skip connection, descending, mean over
            prompts.
        left_alignment: `layer layer`, alignment of the first k left singular vectors of l and l', |U_{l'}' U_l|_F^2 / k: the
            mean squared cosine of the principal angles between their spans. 1 for one span, k / d_model for random vectors.
        right_alignment: `layer layer`, the same of the right singular vectors, |V_{l'}' V_l|_F^2 / k.
        cross_alignment: `layer layer`, the same of what block l writes and block l' reads, |V_{l'}' U_l|_F^2 / k. On the
            diagonal U and V of one block, which span the same directions if J = U S U'.
        path_error: `layer`, error of the linearised path, |y^l - x^l| / |x^l| with y^l = (I + J^l) ... (I + J^1) x^0.
        update_error: `layer`, error of one linearised block, |J^l x^{l-1} - f^l| / |f^l|, for the block's update f^l. 1 if J^l
            maps its input to 0.
        left_share: `layer direction`, squared cosine of the block's input x^{l-1} with each left singular vector of J^l; 1 /
            d_model for random vectors.
        right_share: `layer direction`, the same with each right singular vector.
        by_length: `length`, mean coupling over pairs of different blocks, by length of the prompt.
        length_count: `length`, number of prompts.
        mean_coupling: `pair_kind`, mean coupling over three kinds of pairs: all different blocks; neighbouring blocks, in both
            directions; and all different blocks with random vectors in place of the singular vectors of l'.
        residual: `layer`, error of the singular vectors, |J'u - s v| / s_1, mean over prompts; 0 for "dense".
        step_error: `layer`, error of finite differences: relative change of a product when the step is doubled, mean over
            prompts.
        whole_rows: `layer`, fraction of batches in which the block was replayed on whole rows, which is slower and equally
            exact.
        prompt_coupling: `prompt_row`, mean coupling over pairs of different blocks on each row of the data; NaN if no pair is
            defined on the row. Empty with `per_prompt=False`.
        prompt_tokens: `prompt_row`, number of counted tokens of each row.
        prompt_rows: indices of the rows in the data.
        ks: the values of k: how many singular vectors are compared.
        lengths: ranges of prompt lengths in tokens.
        method: "dense", "krylov" or "finite-difference".
        normalize: whether `values` are m~ or m.
        prompts: number of tokens at which blocks were linearised: one for each prompt, or several with `tokens`.
    """

    # Labels of the `pair_kind` axis.
    pair_kinds: ClassVar[tuple[str, ...]] = ("all pairs", "neighbours", "random vectors")
    values_name: ClassVar[str] = "miscoupling"
    values: Float64[Tensor, "layer layer"] = axes(
        "row_block", "column_block", label="Mis-coupling", title="Mis-coupling of blocks", within=(0, math.inf)
    )
    defined: Float64[Tensor, "layer layer"] = axes(
        "row_block",
        "column_block",
        label="Prompts with a coupling",
        unit="fraction",
        title="Prompts with a coupling, by pair of blocks",
        within=(0, 1),
    )
    std: Float64[Tensor, "layer layer"] = axes(
        "row_block",
        "column_block",
        label="Standard deviation of the mis-coupling",
        title="Spread of the mis-coupling over prompts",
        within=(0, math.inf),
    )
    coupling: Float64[Tensor, "layer layer"] = axes(
        "row_block",
        "column_block",
        label="Coupling",
        title="Coupling of blocks",
        caption="1 - m~ of the Jacobian of the row's block in the singular basis of the column's block: 1 for equal singular "
        "vectors. Unrelated blocks are not at 0, see `null` " + AUBRY.format("equations 10 and 14, figure 1"),
        within=(-math.inf, 1),
    )
    null: Float64[Tensor, "layer layer"] = axes(
        "row_block",
        "column_block",
        label="Mis-coupling of random vectors",
        title="Mis-coupling of random vectors in place of a block's",
        within=(0, math.inf),
    )
    by_k: Float64[Tensor, "k layer layer"] = axes("k", "row_block", "column_block", label="Mis-coupling", within=(0, math.inf))
    null_by_k: Float64[Tensor, "k layer layer"] = axes(
        "k", "row_block", "column_block", label="Mis-coupling of random vectors", within=(0, math.inf)
    )
    singular_values: Float64[Tensor, "layer direction"] = axes(
        "layer",
        "direction",
        label="Singular value",
        title="Singular values of the blocks' Jacobians",
        caption="Gain of each block's update along its top directions, by depth " + AUBRY.format("section 3.1"),
        within=(0, math.inf),
    )
    left_alignment: Float64[Tensor, "layer layer"] = axes(
        "row_block", "column_block", label="Alignment", title="Alignment of left singular vectors", within=(0, 1)
    )
    right_alignment: Float64[Tensor, "layer layer"] = axes(
        "row_block", "column_block", label="Alignment", title="Alignment of right singular vectors", within=(0, 1)
    )
    cross_alignment: Float64[Tensor, "layer layer"] = axes(
        "row_block",
        "column_block",
        label="Alignment",
        title="Alignment of left singular vectors of the row's block with right ones of the column's",
        within=(0, 1),
    )
    path_error: Float64[Tensor, " layer"] = axes(
        "layer", label="Error of the path", unit="relative", title="Error of the linearised path", within=(0, math.inf)
    )
    update_error: Float64[Tensor, " layer"] = axes(
        "layer", label="Error of the update", unit="relative", title="Error of each linearised block", within=(0, math.inf)
    )
    left_share: Float64[Tensor, "layer direction"] = axes(
        "layer",
        "direction",
        label="Squared cosine",
        title="Alignment of a block's input with its left singular vectors",
        within=(0, 1),
    )
    right_share: Float64[Tensor, "layer direction"] = axes(
        "layer",
        "direction",
        label="Squared cosine",
        title="Alignment of a block's input with its right singular vectors",
        within=(0, 1),
    )
    by_length: Float64[Tensor, " length"] = axes(
        "length",
        label="Coupling",
        title="Coupling by prompt length",
        caption="Mean over pairs of different blocks, for prompts of each length " + AUBRY.format("figure 10"),
        within=(-math.inf, 1),
    )
    length_count: Float64[Tensor, " length"] = axes(
        "length", label="Prompts", title="Prompts of each length", within=(0, math.inf), by_chance=(0, 1), out_of="length_count"
    )
    mean_coupling: Float64[Tensor, " pair_kind"] = axes(
        "pair_kind", label="Coupling", title="Mean coupling over pairs of blocks"
    )
    residual: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Error of the singular vectors",
        unit="relative",
        title="Error of the singular vectors of each block",
        within=(0, math.inf),
    )
    step_error: Float64[Tensor, " layer"] = axes(
        "layer", label="Error of a replayed block", unit="relative", title="Error of replayed blocks", within=(0, math.inf)
    )
    whole_rows: Float64[Tensor, " layer"] = axes(
        "layer", label="Batches", unit="fraction", title="Batches whose block was replayed on whole rows", within=(0, 1)
    )
    prompt_coupling: Float64[Tensor, " prompt_row"] = axes(
        "prompt_row", label="Coupling", title="Coupling on each row of the data", within=None
    )
    prompt_tokens: Float64[Tensor, " prompt_row"] = axes(
        "prompt_row", label="Tokens", title="Tokens of each row of the data", within=None
    )
    prompt_rows: tuple[int, ...] = ()
    ks: tuple[int, ...]
    lengths: tuple[str, ...]
    method: str
    normalize: bool = True
    prompts: int = 0

    @property
    def null_coupling(self) -> Tensor:
        """Coupling expected for random vectors (`layer layer`). It is 1 - `null`, or -`null` with `normalize=False`."""
        return float(self.normalize) - self.null

    def measured_on(self, field: str) -> str:
        counts = ", ".join(f"{int(n)}" for n in self.length_count)
        return f"{counts} prompts of these lengths" if field == "by_length" else ""

    @typed
    def mean(self, field: PairField = "coupling", k: int | None = None, *, diagonal: bool = False) -> float:
        """Mean of one matrix of this result, over pairs of different blocks. NaN entries are left out; NaN if no pair is left.

        Args:
            field: name of the matrix.
            k: number of singular vectors, for `coupling`, `values`, `null` and `null_coupling`. Default: the first k.
            diagonal: whether to include each block's coupling with itself, which is 1 in every model, as the paper's mean does
                (section 5.4). Deep models then appear less coupled than shallow ones.

        Raises:
            LayersimError: this k was not measured, or the matrix does not depend on k.
        """
        matrix: Tensor = getattr(self, field)
        if k is not None:
            by_k = field in ("coupling", "values", "null", "null_coupling")
            if k not in self.ks or not by_k:
                allowed = " or ".join(map(str, self.ks)) if by_k else "None"
                raise LayersimError(f"`k` is {k}; for {field!r} of this result, it must be {allowed}.")
            matrices = self.null_by_k if "null" in field else self.by_k
            matrix = matrices[self.ks.index(k)]
            if "coupling" in field:
                matrix = float(self.normalize) - matrix
        chosen = torch.full(matrix.shape, diagonal) | ~torch.eye(len(matrix), dtype=torch.bool)
        return float(matrix[chosen].nanmean())

    def by_prompt(self) -> dict[str, float]:
        """A dict of the mean coupling in each row of the data, with keys such as "row 3". `relate` takes this dict.

        Rows without a defined coupling are left out.

        Raises:
            LayersimError: the run had `per_prompt=False`.
        """
        return defined_by_row(self.prompt_coupling, self.prompt_rows, "BlockCoupling")

    def neighbours(self) -> float:
        """Mean coupling of neighbouring blocks, in both directions."""
        return float(self.mean_coupling[self.pair_kinds.index("neighbours")])

    def headline(self) -> dict[str, float]:
        if len(self.values) < 2:
            return {"largest singular value": float(self.singular_values[:, 0].max())}
        quantity = f"{'coupling' if self.normalize else '-m'}, k = {self.ks[0]}"
        return {
            f"{quantity}, mean over pairs": self.mean(),
            "coupling of random vectors": self.mean("null_coupling"),
            "coupling of neighbours": self.neighbours(),
        }


@typed
@dataclass(frozen=True, kw_only=True)
class BlockCoupling(Analyzer):
    r"""Coupling of all pairs of blocks: alignment of the top singular vectors of their Jacobians, averaged over prompts.

    $$
    J^l = \frac{\partial (f^l(X))_t}{\partial x^{l-1}_t} = U_l S_l V_l^\top, \qquad
    A^{ll'} = U_{l',k}^\top J^l V_{l',k}, \qquad
    \tilde m(A) = \frac{\lVert A - \operatorname{diag} A \rVert_F}{\lVert A \rVert_F}
    $$

    f is the block without its skip connection and without the final norm, and t is the prompt's last token. Each row of the
    data is a prompt. Packed rows raise an error. A text longer than `seq_len` is several prompts of equal weight. Tokens that
    `max_tokens` and `skip_first` omit do not belong to a prompt. Jacobians are computed in float64 for a model in float64,
    else in float32.

    Args:
        k: number of singular vectors, at least 2; or several such numbers, all computed in one pass.
        tokens: counted tokens of each prompt at which blocks are linearised: "last", or indices, negative ones from the end.
        normalize: whether to report m~ instead of m.
        method: "dense" computes whole Jacobians; "krylov" computes products with Jacobians only; "auto" takes the faster of
            the two by d_model, number of blocks and k. "finite-difference" needs no gradients, and so runs in a server's
            sandbox; `step_error` is its error.
        diagonal: "signed" for A - diag A as in the paper; "positive" for |A| - diag A, which counts negative diagonal entries
            as mis-coupling, as the authors' code does by taking absolute values.
        memory_mb: megabytes for products with many directions at once, and for kept Jacobians.
        seed: random seed of the null's vectors and of the start of "krylov".
        per_prompt: whether to give the mean coupling on each row of the data too. A first pass without the model then counts
            the rows.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), equations 8 to 14; `left_alignment` and `right_alignment`, equation 12, up to
        rotations within the spans; `path_error` and `update_error`, equations 20 and 23; `left_share`, section 6.1 and appendix
        A.5. The null is not in the paper; a coupling is meaningful only relative to it.

    Examples:
        A block has no mis-coupling with itself, and neighbouring blocks have less than random vectors.

        >>> import tl_layersim as lsim
        >>> report = lsim.analyze(lsim.demo_model(), lsim.Data(lsim.demo_text()[:2], seq_len=16), lsim.BlockCoupling())
        >>> coupling = report["block_coupling"]
        >>> bool(coupling.values.diagonal().max() < 1e-4), coupling.mean("values") < coupling.mean("null")
        (True, True)
    """

    name: ClassVar[str] = "block_coupling"
    needs = Needs(sites="stream", calls=True, whole_rows=True, single_texts=True, first_pass="data")

    k: int | tuple[int, ...] = 10
    tokens: Literal["last"] | tuple[int, ...] = "last"
    normalize: bool = True
    method: Literal["auto", "dense", "krylov", "finite-difference"] = "auto"
    diagonal: Literal["signed", "positive"] = "signed"
    memory_mb: PositiveFloat = 1024
    seed: Seed = 0
    per_prompt: bool = False

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 2 or len(set(self.ks)) < len(self.ks):
            raise LayersimError(f"`k` is {brief(self.k)}; it must be one or more different numbers, each at least 2.")
        if not self.tokens or len(set(self.token_indices)) < len(self.token_indices):
            raise LayersimError(f"`tokens` is {brief(self.tokens)}; it must be 'last', or one or more different indices.")

    @property
    def ks(self) -> tuple[int, ...]:
        """The option `k` as a tuple."""
        return (self.k,) if isinstance(self.k, int) else self.k

    @property
    def token_indices(self) -> tuple[int, ...]:
        """The option `tokens` as a tuple of indices."""
        return (-1,) if self.tokens == "last" else tuple(self.tokens)

    def check(self, *models: ModelDescription) -> None:
        [model] = models
        need_calls(model, "BlockCoupling", self.method == "finite-difference", max(self.ks))

    def check_batch(self, batch: Batch, model: ModelDescription) -> None:
        # Token i needs i + 1 tokens, token -i needs i.
        needed = max(index + 1 if index >= 0 else -index for index in self.token_indices)
        lengths = batch.counted.sum(1)
        short = int((lengths < needed).sum())
        if short and needed > 1:
            raise LayersimError(
                f"`tokens` is {brief(self.tokens)}, which needs at least {needed} counted tokens in each row; "
                f"{short} of {len(lengths)} rows of a batch have fewer."
            )

    def first_kernel(self) -> Kernel | None:
        return row_counts_kernel if self.per_prompt else None

    def kernel(self, first: Sums) -> Kernel:
        return partial(
            block_coupling_kernel,
            options=CouplingOptions(self.ks, self.method, self.diagonal, float(self.memory_mb), self.seed),
            positions=self.token_indices,
            normalize=self.normalize,
            rows=counted_rows(first) if self.per_prompt else None,
        )

    def compute(self, sums: Sums, run: Run) -> BlockCouplingResult:
        samples = int(sums["samples"])
        refuse_failed_replay(sums["differs"], sums["no_skip"], sums["step_error"] / samples, run.layers)
        count = sums["count"].double()
        # The coupling of a block with itself is defined if it has k singular vectors above rounding error.
        undefined = sites_where(run.layers[1:], sums["count"][0].diagonal() == 0)
        if undefined:
            warn(
                f"Coupling is not defined for {undefined}, and NaN there: on every prompt, the Jacobian has fewer than "
                f"{self.ks[0]} singular values above rounding error."
            )
        by_k = sums["total"] / count
        null = sums["null"] / count
        square = sums["square"] / count[0]
        lengths = sums["length_count"].nonzero()[:, 0]
        length_count = sums["length_count"][lengths].double()
        d_model = int(sums["width"]) // samples
        ks = tuple(min(k, d_model) for k in self.ks)
        coupling = float(self.normalize) - by_k[0]
        by_chance = float(self.normalize) - null[0]
        different = ~torch.eye(len(coupling), dtype=torch.bool)
        neighbours = torch.cat([coupling.diagonal(1), coupling.diagonal(-1)])
        mean_coupling = torch.stack([coupling[different].nanmean(), neighbours.nanmean(), by_chance[different].nanmean()])
        means: dict[str, Any] = {name: sums[name] / sums[f"{name} count"] for name in (*ALIGNMENTS, *LINEAR)}
        return BlockCouplingResult(
            values=by_k[0],
            defined=count[0] / samples,
            std=(square - by_k[0].square()).clamp(min=0).sqrt(),
            coupling=coupling,
            null=null[0],
            by_k=by_k,
            null_by_k=null,
            singular_values=sums["spectrum"] / samples,
            by_length=sums["length_total"][lengths] / length_count,
            length_count=length_count,
            mean_coupling=mean_coupling,
            **means,
            residual=sums["residual"] / samples,
            step_error=sums["step_error"] / samples,
            whole_rows=sums["general"].double() / int(sums["batches"]),
            **prompt_fields("coupling", sums, run.first),
            ks=ks,
            lengths=tuple("1" if i == 0 else f"{2**i} to {2 ** (i + 1) - 1}" for i in lengths.tolist()),
            method=pick_method(d_model, len(run.layers) - 1, max(ks)) if self.method == "auto" else self.method,
            normalize=self.normalize,
            prompts=samples,
            layers=run.layers,
            provenance=run.provenance,
        )


def block_coupling_kernel(
    view: View, *, options: CouplingOptions, positions: tuple[int, ...], normalize: bool, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Sum the coupling of every pair of blocks over the prompts of a batch.

    Args:
        view: activations of one batch, with the calls of the blocks.
        options: as in `BlockCoupling`, with the method "auto" too.
        positions: indices of the tokens of each prompt.
        normalize: whether to sum m~ instead of m.
        rows: indices of all rows of the data, to sum by row; None not to sum by row.
    """
    calls = view.calls
    blocks = len(calls)
    d_model = view.activations.shape[-1]
    ends = row_ends(view)
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    tokens = []
    for position in positions:
        tokens.append(ends + 1 + position if position < 0 else starts + position)
    index = torch.cat(tokens).to(calls[0].hidden.device)
    row = view.sequence[index]
    # Each block's Jacobian at the same token, from input to output.
    token = view.position[index][:, None].expand(-1, blocks)
    connections = Connections(row, tuple(range(blocks)), token, token)
    if options.method == "auto":
        options = replace(options, method=pick_method(d_model, blocks, min(max(options.ks), d_model)))
    coupled = couple(calls, connections, options, path=True)
    assert coupled.path is not None
    defined = coupled.defined
    if normalize:
        values = miscoupling(coupled.off, coupled.norm)
        null = coupled.null_miscoupling
    else:
        values = coupled.off
        null = coupled.null_off
    weight = defined.double()
    values = values * weight
    null = null * weight
    pairs = ~torch.eye(blocks, dtype=torch.bool, device=values.device) & defined[0]
    # Mean coupling of each prompt; a single block has no pairs.
    score = (float(normalize) - values[0]).where(pairs, 0.0).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)
    length = (view.position[ends] + 1).repeat(len(positions)).to(values.device)
    octave = length.double().log2().floor().long().clamp(0, OCTAVES - 1)
    by_length = partial(sums_by_row, row=octave, rows=torch.arange(OCTAVES))
    with_pairs = pairs.any(-1).any(-1).double()
    means = dict(zip(ALIGNMENTS, coupled.alignment, strict=True))
    for name in LINEAR:
        means[name] = getattr(coupled.path, name)
    out = {
        "samples": torch.tensor(len(row)),
        "batches": torch.tensor(1),
        "width": torch.tensor(len(row) * d_model),
        "count": defined.sum(1),
        "total": values.sum(1),
        "square": values[0].square().sum(0),
        "null": null.sum(1),
        "spectrum": coupled.singular_values.double().sum(0),
        "residual": coupled.residual.sum(0),
        "step_error": coupled.step_error.sum(0),
        "general": coupled.whole_rows.long(),
        "differs": coupled.failures & 1,
        "no_skip": coupled.failures & 2,
        "length_count": by_length(with_pairs).long(),
        "length_total": by_length(score * with_pairs),
    }
    for name, quantity in means.items():
        finite = quantity.isfinite()
        out[name] = quantity.where(finite, 0).sum(0)
        out[f"{name} count"] = finite.sum(0)
    if rows is not None:
        assert view.row is not None
        row_in_data = view.row[index.to(view.row.device)]
        out["prompt coupling"] = sums_by_row(score * with_pairs, row_in_data, rows)
        out["prompt coupling known"] = sums_by_row(with_pairs, row_in_data, rows)
        out["prompt tokens"] = sums_by_row(torch.ones(len(view.row)), view.row, rows)
    return out
