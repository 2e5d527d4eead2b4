"""`block_jacobians` and `coupling_matrices`: Jacobians of blocks on one prompt, and their coupling across blocks and tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View
from ..architectures.site_selection import block_numbers
from ..core.arguments import Layer, PositiveFloat, Seed, TwoOrMore, typed
from ..core.errors import LayersimError
from ..core.result_declarations import result_class
from ..core.results import Result, axes
from ..core.wording import brief
from ..jacobians.coupling import Connections, CouplingOptions, chunks_of, couple, jacobian_of, miscoupling, pick_method
from ..jacobians.supported_blocks import need_calls, refuse_failed_replay
from ..remote.open_model import open_source
from .prompt_forward import run_on_prompt


@result_class
class BlockJacobians(Result):
    """Jacobians of blocks without their skip connection, between tokens of one prompt. All tensors are float64.

    Attributes:
        values: `block pair output input`: d (block(X) - X)_{t_out} / d x_{t_in}; in a causal model 0 if t_in > t_out.
        singular_values: `block pair direction`, all singular values in descending order.
        step_error: `block`, error of finite differences: relative change of a product when the step is doubled; 0 with
            gradients.
        blocks: names of the chosen layers.
        pairs: "t_in > t_out" for each pair of positions in the prompt.
        tokens: the prompt's tokens as text.
    """

    values_name = "jacobian"
    values: Float64[Tensor, "block pair output input"] = axes("block", "pair", "output", "input")
    singular_values: Float64[Tensor, "block pair direction"] = axes(
        "block",
        "pair",
        "direction",
        label="Singular value",
        title="Singular values of the Jacobians",
        caption="Of each block and pair of tokens, in descending order.",
        within=(0, math.inf),
        drawn="lines",
    )
    step_error: Float64[Tensor, " block"] = axes(
        "block", label="Error of a replayed block", unit="relative", title="Error of replayed blocks", within=(0, math.inf)
    )
    blocks: tuple[str, ...]
    pairs: tuple[str, ...]
    tokens: tuple[str, ...]

    def headline(self) -> dict[str, float]:
        return {"largest singular value": float(self.singular_values.max())}


@result_class
class CouplingMatrices(Result):
    """Coupling of Jacobians on one prompt: whether one Jacobian's singular vectors diagonalise another Jacobian.

    A connection is a block with an input token and an output token. Tensors are float64. Entry (a, b) expresses the Jacobian of
    connection a in the singular basis of connection b.

    Attributes:
        values: `connection other`, mis-coupling m~ of each matrix; NaN if the other connection has fewer than k singular values
            above rounding.
        coupling: `connection other`, 1 - values.
        null: `connection other`, `values` with random orthonormal vectors in place of the other connection's singular vectors.
        matrices: `connection other left right`, the matrices A = U' J V.
        bases: `side connection other left right`, products of the singular vectors of two connections: of `other` on the axis
            `left`, of `connection` on the axis `right`. "left" is U'U and "right" is V'V, the identity up to signs if both
            have the same singular vectors; "cross" is V'U, of right vectors of `other` with left ones of `connection`.
        singular_values: `connection left`, the k largest singular values.
        residual: `connection`, error of the singular vectors of "krylov", |J'u - s v| / s_1; 0 for the other methods.
        step_error: `connection`, error of finite differences, see `BlockJacobians`.
        connections: "block: t_in > t_out" for each connection.
        method: "dense", "krylov" or "finite-difference".
        tokens: the prompt's tokens as text.
    """

    # Labels of the `side` axis.
    sides: ClassVar[tuple[str, ...]] = ("left", "right", "cross")
    values_name = "miscoupling"
    values: Float64[Tensor, "connection other"] = axes(
        "connection", "other", label="Mis-coupling", title="Mis-coupling of blocks", within=(0, 1)
    )
    coupling: Float64[Tensor, "connection other"] = axes(
        "connection",
        "other",
        label="Coupling",
        title="Coupling of Jacobians on one prompt",
        caption="1 if the Jacobian of a connection is diagonal in the singular vectors of another connection "
        "(Aubry et al. 2025, figures 2 to 4).",
        within=(0, 1),
    )
    null: Float64[Tensor, "connection other"] = axes(
        "connection", "other", label="Mis-coupling of random vectors", within=(0, 1)
    )
    matrices: Float64[Tensor, "connection other left right"] = axes("connection", "other", "left", "right")
    bases: Float64[Tensor, "side connection other left right"] = axes(
        "side", "connection", "other", "left", "right", label="Cosine", within=(-1, 1)
    )
    singular_values: Float64[Tensor, "connection left"] = axes(
        "connection", "left", label="Singular value", title="Singular values of the Jacobians", within=(0, math.inf)
    )
    residual: Float64[Tensor, " connection"] = axes(
        "connection",
        label="Error of the singular vectors",
        unit="relative",
        title="Error of the singular vectors of each block",
        within=(0, math.inf),
    )
    step_error: Float64[Tensor, " connection"] = axes(
        "connection", label="Error of a replayed block", unit="relative", title="Error of replayed blocks", within=(0, math.inf)
    )
    connections: tuple[str, ...]
    method: str
    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for connection in self.connections:
            # Figures read block and tokens; a file may hold other labels.
            numbers = re.fullmatch(r"(\d{1,9}): (\d{1,9}) > (\d{1,9})", connection)
            if numbers is None or max(int(numbers[2]), int(numbers[3])) >= len(self.tokens):
                raise LayersimError(
                    f"`connections` has {brief(connection)}; it must be such as 3: 0 > 1, of {len(self.tokens)} tokens."
                )

    @property
    def others(self) -> tuple[str, ...]:
        """Labels of the `other` axis: the same connections as on the `connection` axis."""
        return self.connections

    def headline(self) -> dict[str, float]:
        differs = ~torch.eye(len(self.values), dtype=torch.bool)
        if not differs.any():
            return {"largest singular value": float(self.singular_values.max())}
        return {
            "coupling, mean over different connections": float(self.coupling[differs].nanmean()),
            "coupling of random vectors": 1.0 - float(self.null[differs].nanmean()),
        }


Along = Literal["depth", "self", "fixed-input", "fixed-output"]


@typed
def block_jacobians(
    model: Any,
    prompt: Any,
    *,
    layers: Layer | Sequence[Layer] | None = None,
    positions: Any = "last",
    method: Literal["dense", "finite-difference"] = "dense",
    memory_mb: PositiveFloat = 1024,
) -> BlockJacobians:
    r"""Compute the Jacobians of blocks, without their skip connection, between tokens of one prompt.

    $$J_{t_{in} t_{out}} = \frac{\partial (\mathrm{block}(X) - X)_{t_{out}}}{\partial x_{t_{in}}}$$

    Computed in float64 for a model in float64, else in float32.

    Args:
        model: as in `analyze`. A server returns whole Jacobians of 4 d_model^2 bytes each.
        prompt: a `Data`, or a text or token ids `pos`.
        layers: indices of blocks, negative from the end, or names of their outputs. Default: all.
        positions: "last", a token t for t_in = t_out = t, a pair (t_in, t_out), or a list of these; negative indices count from
            the end.
        method: "dense", or "finite-difference" for blocks that cannot be differentiated.
        memory_mb: megabytes for products with many directions at once.

    Raises:
        LayersimError: a block or token does not exist, or blocks cannot be differentiated.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), equation 8.

    Examples:
        >>> import tl_layersim as lsim
        >>> found = lsim.prompts.block_jacobians(lsim.demo_model(), "Once upon a time", layers=[0, -1], positions=[(0, 2), -1])
        >>> found.values.shape, found.pairs
        (torch.Size([2, 2, 128, 128]), ('0 > 2', '4 > 4'))
    """
    source = open_source(model)
    outputs = source.model.layers[1:]
    blocks = tuple(range(len(outputs))) if layers is None else block_numbers(layers, outputs, "layers")
    if isinstance(positions, np.ndarray | torch.Tensor):
        # An array of tokens, or of pairs of them.
        items = np.atleast_1d(np.asarray(positions)).tolist()
        positions = [tuple(item) if isinstance(item, list) else item for item in items]
    if not isinstance(positions, list):
        positions = [positions]
    if not positions:
        raise LayersimError("`positions` is []; it must hold at least one token or pair of tokens.")
    # Known once the prompt has been tokenised.
    pairs: list[tuple[int, int]] = []

    def kernel(tokens: int) -> Kernel:
        pairs[:] = [pair_of(position, tokens) for position in positions]
        _refuse_repeats(pairs)
        return partial(jacobians_kernel, blocks=blocks, pairs=tuple(pairs), method=method, memory_mb=float(memory_mb))

    options = {"blocks": list(blocks), "positions": positions, "method": method}
    check = partial(need_calls, what="block_jacobians", differences=method == "finite-difference")
    output, tokens, _, provenance = run_on_prompt(source, prompt, kernel, options, check=check, calls=True, least=1)
    names_of_blocks = tuple(source.model.layers[1 + block] for block in blocks)
    # Each block's failures as bits, see `Jacobian.failures`.
    refuse_failed_replay(output["differs"] & 1, output["differs"] & 2, output["step_error"], ("", *names_of_blocks))
    values = output["jacobians"].double()
    return BlockJacobians(
        values=values,
        singular_values=torch.linalg.svdvals(values),
        step_error=output["step_error"].double(),
        blocks=names_of_blocks,
        pairs=tuple(f"{t_in} > {t_out}" for t_in, t_out in pairs),
        tokens=tokens,
        layers=source.model.layers,
        provenance=provenance,
    )


@typed
def coupling_matrices(
    model: Any,
    prompt: Any,
    *,
    along: Along = "depth",
    layers: Layer | Sequence[Layer] | None = None,
    token: int | None = None,
    positions: list[int] | None = None,
    k: TwoOrMore = 10,
    method: Literal["auto", "dense", "krylov", "finite-difference"] = "auto",
    diagonal: Literal["signed", "positive"] = "signed",
    memory_mb: PositiveFloat = 1024,
    seed: Seed = 0,
) -> CouplingMatrices:
    r"""Compute the coupling of Jacobians on one prompt, across blocks at one token or across tokens.

    $$A = U^\top J V, \qquad \tilde m(A) = \frac{\lVert A - \operatorname{diag} A \rVert_F}{\lVert A \rVert_F}$$

    J is the Jacobian of one connection, U and V are the k top singular vectors of another connection's Jacobian.

    Args:
        model: as in `analyze`.
        prompt: a `Data`, or a text or token ids `pos`.
        along: the connections to compare. "depth": the chosen blocks at one token. "self": the effects of tokens on themselves
            (t > t). "fixed-input": the effects of one token on later tokens (token > t). "fixed-output": the effects of earlier
            tokens on one token (t > token).
        layers: indices of blocks, negative from the end, or names of their outputs. Default: all for "depth", else the middle
            block. Several blocks are also compared across tokens.
        token: the fixed token. Default: the last, or the first for "fixed-input". Not for "self".
        positions: the other tokens. Default: all possible tokens. Not for "depth".
        k: number of singular vectors.
        method: as in `BlockCoupling`.
        diagonal: as in `BlockCoupling`.
        memory_mb: as in `BlockCoupling`.
        seed: as in `BlockCoupling`.

    Raises:
        LayersimError: a block or token does not exist, or blocks cannot be differentiated.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), equations 9 to 14, figures 2 to 4.

    Examples:
        >>> import tl_layersim as lsim
        >>> found = lsim.prompts.coupling_matrices(lsim.demo_model(), "Once upon a time there was", along="fixed-output", k=4)
        >>> found.connections[:2], found.matrices.shape
        (('3: 0 > 6', '3: 1 > 6'), torch.Size([7, 7, 4, 4]))
    """
    if token is not None and along == "self":
        raise LayersimError(f"`token` is {brief(token)}; it cannot be used with along={along!r}.")
    if positions is not None and along == "depth":
        raise LayersimError(f"`positions` is {brief(positions)}; it cannot be used with along={along!r}.")
    source = open_source(model)
    outputs = source.model.layers[1:]
    if layers is not None:
        blocks = block_numbers(layers, outputs, "layers")
    elif along == "depth":
        blocks = tuple(range(len(outputs)))
    else:
        middle = (len(outputs) - 1) // 2
        blocks = (middle,)
    # Block, t_in and t_out of each connection, known once the prompt has been tokenised.
    places: list[tuple[int, int, int]] = []

    def method_of_run() -> str:
        return pick_method(source.model.d_model or 0, len(places), k) if method == "auto" else method

    def kernel(tokens: int) -> Kernel:
        places[:] = connections_of(along, blocks, token, positions, tokens)
        _refuse_repeats(places)
        coupling = CouplingOptions((k,), method_of_run(), diagonal, float(memory_mb), seed)
        return partial(matrices_kernel, places=tuple(places), options=coupling)

    options: dict[str, Any] = {
        "along": along,
        "blocks": list(blocks),
        "token": token,
        "positions": positions,
        "k": k,
        "method": method,
        "diagonal": diagonal,
        "seed": seed,
    }
    check = partial(need_calls, what="coupling_matrices", differences=method == "finite-difference", k=k)
    output, tokens, _, provenance = run_on_prompt(source, prompt, kernel, options, check=check, calls=True, least=1)
    names_of_blocks = tuple(source.model.layers[1 + block] for block, _, _ in places)
    # Each connection's failures as bits, see `Jacobian.failures`.
    refuse_failed_replay(output["differs"] & 1, output["differs"] & 2, output["step_error"], ("", *names_of_blocks))
    values = output["values"].double()
    return CouplingMatrices(
        values=values,
        coupling=1.0 - values,
        null=output["null"].double(),
        matrices=output["matrices"].double(),
        bases=output["bases"].double(),
        singular_values=output["singular_values"].double(),
        residual=output["residual"].double(),
        step_error=output["step_error"].double(),
        connections=tuple(f"{block}: {t_in} > {t_out}" for block, t_in, t_out in places),
        method=method_of_run(),
        tokens=tokens,
        layers=source.model.layers,
        provenance=provenance,
    )


def pair_of(position: Any, tokens: int) -> tuple[int, int]:
    """Convert a position ("last", a token or a pair of tokens) to t_in and t_out, counted from 0."""
    pair = position
    if position == "last":
        pair = (-1, -1)
    elif isinstance(position, int):
        pair = (position, position)
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(type(token) is int for token in pair):
        raise LayersimError(
            f"`positions` contains {brief(position)}; it must be 'last', or hold indices of tokens or pairs (t_in, t_out)."
        )
    return token_of(pair[0], tokens), token_of(pair[1], tokens)


def token_of(position: int, tokens: int) -> int:
    """The index of a token, counted from 0. Negative positions count from the end."""
    if not -tokens <= position < tokens:
        raise LayersimError(
            f"A token position is {position}; it must be from 0 to {tokens - 1}, or from -1 to {-tokens} to count from the end."
        )
    return position % tokens


def _refuse_repeats(places: Sequence[tuple[int, ...]]) -> None:
    """Raise an error if a pair or connection occurs twice. Each tuple ends in t_in and t_out."""
    if len(set(places)) == len(places):
        return
    pair = next(place[-2:] for place in places if places.count(place) > 1)
    raise LayersimError(f"`positions` selects (t_in, t_out) = {pair} more than once; it must select each pair once.")


def connections_of(
    along: str, blocks: tuple[int, ...], token: int | None, positions: list[int] | None, tokens: int
) -> list[tuple[int, int, int]]:
    """A list of tuples (block, t_in, t_out), one for each Jacobian to compare."""
    if token is None:
        token = 0 if along == "fixed-input" else -1
    fixed = token_of(token, tokens)
    if along == "depth":
        return [(block, fixed, fixed) for block in blocks]
    # The tokens that the fixed token affects, or that affect it, are those from `first` to `end - 1`.
    first = fixed if along == "fixed-input" else 0
    end = fixed + 1 if along == "fixed-output" else tokens
    moving = list(range(first, end)) if positions is None else [token_of(position, tokens) for position in positions]
    if not moving or not all(first <= t < end for t in moving):
        raise LayersimError(
            f"`positions` is {brief(positions)}; it must hold tokens from {first} to {end - 1} for along={along!r}, because "
            "tokens have no effect on earlier tokens. For other pairs, use `block_jacobians`."
        )
    if along == "self":
        pairs = [(t, t) for t in moving]
    elif along == "fixed-input":
        pairs = [(fixed, t) for t in moving]
    else:
        pairs = [(t, fixed) for t in moving]
    return [(block, t_in, t_out) for block in blocks for t_in, t_out in pairs]


def jacobians_kernel(
    view: View, *, blocks: tuple[int, ...], pairs: tuple[tuple[int, int], ...], method: str, memory_mb: float
) -> dict[str, Tensor]:
    """A dict with the Jacobians of blocks on one prompt (`block pair d_model d_model`) and their errors.

    Args:
        view: view of one row of tokens, with the calls of the blocks.
        blocks: indices of the blocks.
        pairs: t_in and t_out of each pair.
        method: "dense" or "finite-difference".
        memory_mb: megabytes for products with many directions at once.
    """
    calls = view.calls
    device = calls[0].hidden.device
    d = view.activations.shape[-1]
    options = CouplingOptions((1,), method, "signed", memory_mb, 0)
    jacobians = torch.zeros(len(blocks) * len(pairs), d, d, dtype=view.activations.dtype, device=device)
    step_error = torch.zeros(len(blocks), dtype=torch.float64)
    differs = torch.zeros(len(blocks), dtype=torch.int64)
    all_connections = connections([(block, *pair) for block in blocks for pair in pairs], device)
    for row, sample, connection in chunks_of(all_connections, max(1, int(memory_mb * 1e6 / (24 * d * d)))):
        # The connections of a chunk are of one block.
        number = int(connection[0]) // len(pairs)
        with jacobian_of(calls, all_connections, options, row, sample, connection) as jacobian:
            jacobians[connection] = jacobian.dense().to(jacobians)
            step_error[number] = torch.maximum(step_error[number], jacobian.step_error.max())
            differs[number] |= jacobian.failures
    return {"jacobians": jacobians.view(len(blocks), len(pairs), d, d), "step_error": step_error, "differs": differs}


def matrices_kernel(view: View, *, places: tuple[tuple[int, int, int], ...], options: CouplingOptions) -> dict[str, Tensor]:
    """A dict with the mis-coupling and the matrix U' J V of each pair of Jacobians.

    Args:
        view: view of one row of tokens, with the calls of the blocks.
        places: block, t_in and t_out of each connection.
        options: how the Jacobians are decomposed.
    """
    calls = view.calls
    coupling = couple(calls, connections(list(places), calls[0].hidden.device), options, matrices=True)
    assert coupling.matrices is not None
    assert coupling.bases is not None
    defined = coupling.defined[0, 0]
    return {
        "values": miscoupling(coupling.off[0, 0], coupling.norm[0, 0]).where(defined, torch.nan),
        "null": coupling.null_miscoupling[0, 0].where(defined, torch.nan),
        "matrices": coupling.matrices[0],
        "bases": coupling.bases[:, 0],
        "singular_values": coupling.singular_values[0],
        "residual": coupling.residual[0],
        "step_error": coupling.step_error[0],
        "differs": coupling.failures,
    }


def connections(places: list[tuple[int, int, int]], device: torch.device) -> Connections:
    """Build the `Connections` of one prompt from tuples (block, t_in, t_out).

    Args:
        places: block, t_in and t_out of each connection.
        device: device of the activations.
    """
    row = torch.zeros(1, dtype=torch.int64, device=device)
    blocks = tuple(block for block, _, _ in places)
    ends = torch.tensor([[t_in, t_out] for _, t_in, t_out in places], device=device)
    return Connections(row, blocks, ends[None, :, 0], ends[None, :, 1])
