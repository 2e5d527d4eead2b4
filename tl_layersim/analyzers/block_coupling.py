"""Block coupling: do the blocks' Jacobians share their top singular vectors? Over prompts, for all pairs of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..core.results import Picture, Result, axes
from ..core.sums import Sums
from ..core.typed import typed
from ..data.batches import Batch
from ..jacobians.coupling import DRAWS, Connections, CouplingOptions, couple, miscoupling, pick_method
from ..jacobians.validation import need_calls, need_memory, refuse_failed_replay
from ..models.model_info import Model
from ..models.view import Kernel, View, row_ends
from .base import Analyzer, Run, need_tokens

if TYPE_CHECKING:
    import plotly.graph_objects

# Prompt lengths are gathered by octaves: 1, 2 to 3, 4 to 7, ...
OCTAVES = 21
SOURCE = "(Aubry et al. 2025, {})."


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockCouplingResult(Result):
    """What `BlockCoupling` measures. Tensors are float64; l is the row, l' the column of a matrix.

    Attributes:
        values: `layer layer`, mean over prompts of the mis-coupling m~(A^{ll'}) of the Jacobian of l in the basis of l'; m
            itself with `normalize=False`. Not symmetric. The diagonal is 0 but for rounding.
        defined: `layer layer`, share of prompts in which the row's Jacobian is more than rounding and the column's has k
            singular vectors that are; means are over these, NaN where there are none.
        std: `layer layer`, its standard deviation over prompts (divided by N).
        coupling: `layer layer`, 1 - values; -values with `normalize=False`.
        null: `layer layer`, the same as `values` for random orthonormal vectors in place of those of l', in the mean over
            eight draws: what is there without any coupling, about sqrt(1 - 1/k).
        by_k: `k layer layer`, as `values`, for each k; `values` is that of the first.
        null_by_k: `k layer layer`, as `null`.
        singular_values: `layer direction`, mean over prompts, descending; of the Jacobian without skip connection.
        singular_values_std: `layer direction`.
        by_length: `length`, mean coupling over pairs of different blocks, of prompts of so many tokens.
        by_length_std: `length`, over prompts.
        length_count: `length`, how many prompts.
        residual: `layer`, how far singular vectors are from that, |J'u - s v| / s_1 in the mean over prompts: 0 of dense.
        step_error: `layer`, of finite differences: the relative change of a product with twice the step, in the mean.
        whole_rows: `layer`, share of batches in which whole rows had to run through the block: slower, not less exact.
        ks: numbers of singular vectors.
        lengths: how many tokens the prompts had, by octaves.
        method: "dense", "krylov" or "finite-difference": what was used.
        normalize: whether values are m~, or m.
        prompts: how many tokens blocks were linearised at: one of each prompt, or each of `positions`.
    """

    values_name: ClassVar[str] = "miscoupling"
    values: Float64[Tensor, "layer layer"] = axes("row_block", "column_block")
    defined: Float64[Tensor, "layer layer"] = axes("row_block", "column_block")
    std: Float64[Tensor, "layer layer"] = axes("row_block", "column_block")
    coupling: Float64[Tensor, "layer layer"] = axes("row_block", "column_block")
    null: Float64[Tensor, "layer layer"] = axes("row_block", "column_block")
    by_k: Float64[Tensor, "k layer layer"] = axes("k", "row_block", "column_block")
    null_by_k: Float64[Tensor, "k layer layer"] = axes("k", "row_block", "column_block")
    singular_values: Float64[Tensor, "layer direction"] = axes("layer", "direction")
    singular_values_std: Float64[Tensor, "layer direction"] = axes("layer", "direction")
    by_length: Float64[Tensor, " length"] = axes("length")
    by_length_std: Float64[Tensor, " length"] = axes("length")
    length_count: Float64[Tensor, " length"] = axes("length")
    residual: Float64[Tensor, " layer"] = axes("layer")
    step_error: Float64[Tensor, " layer"] = axes("layer")
    whole_rows: Float64[Tensor, " layer"] = axes("layer")
    ks: tuple[int, ...]
    lengths: tuple[str, ...]
    method: str
    normalize: bool = True
    prompts: int = 0

    pictures: ClassVar[tuple[Picture, ...]] = (
        Picture(
            "coupling",
            "Coupling of blocks",
            "How diagonal the Jacobian of the row's block is in the singular vectors of the column's: 1 where they share them. "
            "Unrelated blocks are not at 0, see `null` " + SOURCE.format("equations 10 and 14, figure 1"),
        ),
        Picture(
            "singular_values",
            "Singular values of the blocks' Jacobians",
            "How strongly each block moves a token along its top directions, by depth " + SOURCE.format("section 3.1"),
        ),
        Picture(
            "by_length",
            "Coupling by prompt length",
            "Mean over pairs of different blocks, for prompts of each length " + SOURCE.format("figure 10"),
        ),
    )

    @property
    def directions(self) -> tuple[int, ...]:
        """Numbers of the singular values, from 1."""
        return tuple(range(1, self.singular_values.shape[1] + 1))

    @property
    def null_coupling(self) -> Tensor:
        """`layer layer`, the coupling of random vectors: 1 - null, or -null with `normalize=False`."""
        return float(self.normalize) - self.null

    def plot(self, field: str = "coupling") -> plotly.graph_objects.Figure:
        """A figure of a field, coupling if none is named."""
        return super().plot(field)

    def mean(
        self, field: Literal["coupling", "values", "null", "null_coupling", "std", "defined"] = "coupling", k: int | None = None
    ) -> float:
        """The mean of a matrix over pairs of different blocks, those left out that are not defined; NaN where there are none.

        The paper's mean takes the diagonal in, which is 1 in every model: (L - 1) / L of this one, plus 1 / L.

        Args:
            field: which matrix.
            k: of which k, for coupling, values and null; the first by default.

        Raises:
            LayersimError: this k was not measured, or not of this matrix.
        """
        matrix: Tensor = getattr(self, field)
        if k is not None:
            if k not in self.ks or field in ("std", "defined"):
                raise LayersimError(
                    f"There is no {field} of this k.",
                    given=f"k={k}",
                    expected=f"one of {', '.join(map(str, self.ks))}, for coupling, values and null",
                    do=f"BlockCoupling(k=({', '.join(map(str, (*self.ks, k)))}))",
                )
            matrix = (self.null_by_k if "null" in field else self.by_k)[self.ks.index(k)]
            matrix = float(self.normalize) - matrix if "coupling" in field else matrix
        other = ~torch.eye(len(matrix), dtype=torch.bool)
        return float(matrix[other].nanmean())

    def neighbours(self) -> float:
        """Mean coupling of blocks that follow one another, in both directions."""
        return float(torch.cat([self.coupling.diagonal(1), self.coupling.diagonal(-1)]).nanmean())

    def headline(self) -> dict[str, float]:
        if len(self.values) < 2:
            return {"largest singular value": float(self.singular_values[:, 0].max())}
        what = f"{'coupling' if self.normalize else '-m'}, k = {self.ks[0]}"
        return {
            f"{what}, mean over pairs of different blocks": self.mean(),
            "the same of random vectors": self.mean("null_coupling"),
            "the same of neighbouring blocks": self.neighbours(),
            "prompts": float(self.prompts),
        }


@typed
@dataclass(frozen=True, kw_only=True)
class BlockCoupling(Analyzer):
    r"""Coupling of the top singular vectors of the blocks' Jacobians, over prompts, for all pairs of blocks.

    $$
    J^l = \frac{\partial (f^l(X))_t}{\partial x^{l-1}_t} = U_l S_l V_l^\top, \qquad
    A^{ll'} = U_{l',k}^\top J^l V_{l',k}, \qquad
    \tilde m(A) = \frac{\lVert A - \operatorname{diag} A \rVert_F}{\lVert A \rVert_F}
    $$

    f is the block without its skip connection and without the final norm, t the prompt's last token. Each row of the data is a
    prompt: packed rows are refused, and a text that is longer than `seq_len` is several, all of which count the same. What
    `max_tokens` and `skip_first` leave out is no token of it. Jacobians are computed in float32 whatever
    the weights are, float64 if the model is.

    Args:
        k: how many singular vectors, two or more, or several such numbers, nested in one another: all come from one pass.
        positions: of each prompt "last", or tokens by their index, negative ones from its end.
        normalize: m~, or m.
        method: "dense" computes each Jacobian whole; "krylov" its top singular vectors and what else is needed by products;
            "auto" takes the faster of the two by d_model, number of blocks and k. "finite-difference" needs no gradients, and
            so runs in a server's sandbox; `step_error` says how exact it is.
        diagonal: "signed" for A - diag A as in the paper; "positive" for |A| - diag A, where a negative entry of the diagonal
            speaks against coupling, as taking absolute values in the authors' code does.
        memory_mb: megabytes for products with many directions at once, and for Jacobians that are kept.
        seed: of the null's random vectors, and of krylov's start.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), equations 8 to 14. The null is not in the paper; without it a number says little.

    Example:
        >>> import tl_layersim as lsim
        >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:2], lsim.BlockCoupling(), seq_len=16)
        >>> coupling = report["block_coupling"]
        >>> bool(coupling.mean("values") < coupling.mean("null"))
        True
    """

    name: ClassVar[str] = "block_coupling"
    needs_stream: ClassVar[bool] = True
    needs_calls: ClassVar[bool] = True
    prompts: ClassVar[bool] = True

    k: int | tuple[int, ...] = 10
    positions: Literal["last"] | tuple[int, ...] = "last"
    normalize: bool = True
    method: Literal["auto", "dense", "krylov", "finite-difference"] = "auto"
    diagonal: Literal["signed", "positive"] = "signed"
    memory_mb: int | float = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for given, least in ((self.ks, 2), (self.tokens, None)):
            if not given or len(set(given)) < len(given) or (least is not None and min(given) < least):
                name = "k" if least else "positions"
                raise LayersimError(
                    f"{name} is no choice of numbers.",
                    given=f"{name}={getattr(self, name)}",
                    expected="one or more different whole numbers"
                    + (", each 2 or more: a matrix of one is diagonal" if least else ""),
                    do="k=10" if least else "positions='last'",
                )
        need_memory(self.memory_mb)

    @property
    def ks(self) -> tuple[int, ...]:
        """All k."""
        return (self.k,) if isinstance(self.k, int) else self.k

    @property
    def tokens(self) -> tuple[int, ...]:
        """All positions."""
        return (-1,) if self.positions == "last" else tuple(self.positions)

    @property
    def whole_rows(self) -> bool:
        return True

    def check(self, *models: Model) -> None:
        [model] = models
        need_calls(model, f"{type(self).__name__}", self.method == "finite-difference")
        if model.d_model is not None and max(self.ks) > model.d_model:
            raise LayersimError(
                "There are no more singular vectors than d_model.",
                given=f"k={max(self.ks)} and {model.name} with d_model {model.d_model}",
                expected=f"k of at most {model.d_model}",
                do=f"k={min(10, model.d_model)}",
            )

    def cost(self, model: Model) -> str:
        d_model, blocks = model.d_model or 0, len(model.layers) - 1
        if self.method == "finite-difference":
            return f"BlockCoupling: each prompt runs {2 * d_model:,} times through every block, by finite differences."
        # Small models take a second.
        if d_model < 1024:
            return ""
        picked = pick_method(d_model, blocks, max(self.ks)) if self.method == "auto" else self.method
        # Products with J and J' of a token cost two and one forward passes of it.
        products = 1.2 * d_model if picked == "dense" else 0.4 * d_model + 2.0 * (blocks + DRAWS) * max(self.ks)
        more = f", and {blocks} decompositions of {d_model} x {d_model}" if picked == "dense" else ""
        return f"BlockCoupling, {picked}: each prompt costs about a forward pass of {round(products, -2):,.0f} tokens{more}."

    def check_batch(self, batch: Batch, model: Model) -> None:
        needed = max(p + 1 if p >= 0 else -p for p in self.tokens)
        lengths = batch.counted.sum(1)
        short = int((lengths < needed).sum())
        if short and needed > 1:
            raise LayersimError(
                "A prompt is shorter than the positions that are asked for.",
                given=f"{short} of {len(lengths)} rows of a batch, the shortest with {int(lengths.min())} counted tokens",
                expected=f"at least {needed} tokens for positions={self.positions}",
                do="leave out short prompts, or positions='last'",
            )

    def kernel(self, first: Sums) -> Kernel:
        return partial(
            block_coupling_kernel,
            ks=self.ks,
            positions=self.tokens,
            normalize=self.normalize,
            method=self.method,
            diagonal=self.diagonal,
            memory_mb=float(self.memory_mb),
            seed=self.seed,
        )

    def compute(self, sums: Sums, run: Run) -> BlockCouplingResult:
        samples = int(sums["samples"])
        need_tokens(samples, 1, "BlockCoupling", "prompts")
        refuse_failed_replay(sums["differs"], sums["no_skip"], sums["step_error"] / samples, run.layers)
        count = sums["count"].double()
        # In the basis of itself every block is diagonal, if it has as many singular vectors.
        where = [name for name, n in zip(run.layers[1:], sums["count"][0].diagonal(), strict=True) if not n]
        if where:
            warn(
                f"Coupling is not defined with {', '.join(where[:4])}{' and other blocks' if len(where) > 4 else ''}, and NaN "
                f"there: on no prompt does what the block adds depend on the token in {self.ks[0]} directions."
            )
        by_k, null = (sums[name] / count for name in ("total", "null"))
        square = sums["square"] / count[0]
        spectrum = sums["spectrum"] / samples
        lengths = sums["length_count"].nonzero()[:, 0]
        many = sums["length_count"][lengths].double()
        by_length = sums["length_total"][lengths] / many
        d_model = int(sums["width"]) // samples
        ks = tuple(min(k, d_model) for k in self.ks)
        return BlockCouplingResult(
            values=by_k[0],
            defined=count[0] / samples,
            std=(square - by_k[0].square()).clamp(min=0).sqrt(),
            coupling=float(self.normalize) - by_k[0],
            null=null[0],
            by_k=by_k,
            null_by_k=null,
            singular_values=spectrum,
            singular_values_std=(sums["spectrum_square"] / samples - spectrum.square()).clamp(min=0).sqrt(),
            by_length=by_length,
            by_length_std=(sums["length_square"][lengths] / many - by_length.square()).clamp(min=0).sqrt(),
            length_count=many,
            residual=sums["residual"] / samples,
            step_error=sums["step_error"] / samples,
            whole_rows=sums["general"].double() / int(sums["batches"]),
            ks=ks,
            lengths=tuple("1" if i == 0 else f"{2**i} to {2 ** (i + 1) - 1}" for i in lengths.tolist()),
            method=pick_method(d_model, len(run.layers) - 1, max(ks)) if self.method == "auto" else self.method,
            normalize=self.normalize,
            prompts=samples,
            layers=run.layers,
            provenance=run.provenance,
        )


def block_coupling_kernel(
    view: View,
    *,
    ks: tuple[int, ...],
    positions: tuple[int, ...],
    normalize: bool,
    method: str,
    diagonal: str,
    memory_mb: float,
    seed: int,
) -> dict[str, Tensor]:
    """Sums over prompts, of all pairs of blocks."""
    calls = view.calls
    assert calls is not None
    blocks, d_model = len(calls), view.residual.shape[-1]
    ends = row_ends(view)
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    at = torch.cat([ends + 1 + p if p < 0 else starts + p for p in positions]).to(calls[0].hidden.device)
    row, token = view.sequence[at], view.position[at]
    where = token[:, None].expand(-1, blocks)
    chosen = pick_method(d_model, blocks, min(max(ks), d_model)) if method == "auto" else method
    options = CouplingOptions(ks, chosen, diagonal, memory_mb, seed)
    found = couple(calls, Connections(row, tuple(range(blocks)), where, where), options)
    defined = found.defined
    kept = defined.double()
    values, random = (miscoupling(found.off, found.norm), found.null_miscoupling) if normalize else (found.off, found.null_off)
    values, random = values * kept, random * kept
    other = ~torch.eye(blocks, dtype=torch.bool, device=values.device) & defined[0]
    # Of each prompt; a single block has no pairs.
    score = (float(normalize) - values[0]).where(other, 0.0).sum((1, 2)) / other.sum((1, 2)).clamp(min=1)
    length = (view.position[ends] + 1).repeat(len(positions)).to(values.device)
    octave = length.double().log2().floor().long().clamp(0, OCTAVES - 1)

    def by_length(weights: Tensor) -> Tensor:
        return torch.zeros(OCTAVES, dtype=torch.float64, device=weights.device).index_add(0, octave, weights)

    with_pairs = other.any(-1).any(-1).double()
    spectrum = found.singular_values.double()
    return {
        "samples": torch.tensor(len(row)),
        "batches": torch.tensor(1),
        "width": torch.tensor(len(row) * d_model),
        "count": defined.sum(1),
        "total": values.sum(1),
        "square": values[0].square().sum(0),
        "null": random.sum(1),
        "spectrum": spectrum.sum(0),
        "spectrum_square": spectrum.square().sum(0),
        "residual": found.residual.sum(0),
        "step_error": found.step_error.sum(0),
        "general": found.whole_rows.long(),
        "differs": found.failures & 1,
        "no_skip": found.failures & 2,
        "length_count": by_length(with_pairs).long(),
        "length_total": by_length(score * with_pairs),
        "length_square": by_length(score.square() * with_pairs),
    }
