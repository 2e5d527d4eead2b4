"""Pictures of one prompt's blocks: their Jacobians between its tokens, and how these couple across blocks and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.errors import LayersimError
from ..core.results import Picture, Result, axes
from ..core.typed import typed
from ..jacobians.coupling import Connections, Options, couple, open_jacobian, pick_method, pieces_of, share
from ..jacobians.validation import need_calls, need_memory, refuse_trouble
from ..models.model_info import Model
from ..models.view import Kernel, View
from ..remote.open import open_source
from .positions import connections_of, different, numbers_of, pair_of
from .prompt_run import PromptKernel, run_on_prompt

if TYPE_CHECKING:
    import plotly.graph_objects

Along = Literal["depth", "self", "fixed-input", "fixed-output"]


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockJacobians(Result):
    """Jacobians of blocks without their skip connection, between tokens of one prompt. Tensors are float64.

    Attributes:
        values: `block pair output input`: d (block(X) - X)_{t_out} / d x_{t_in}; in a causal model 0 where t_in > t_out.
        singular_values: `block pair direction`, all of them, descending.
        step_error: `block`, of finite differences: the relative change of a product with twice the step; 0 of gradients.
        blocks: names of the chosen layers.
        pairs: `t_in > t_out` of each pair, positions in the prompt.
        tokens: the prompt's tokens as text.
    """

    values_name = "jacobian"
    values: Float64[Tensor, "block pair output input"] = axes("block", "pair", "output", "input")
    singular_values: Float64[Tensor, "block pair direction"] = axes("block", "pair", "direction")
    step_error: Float64[Tensor, " block"] = axes("block")
    blocks: tuple[str, ...]
    pairs: tuple[str, ...]
    tokens: tuple[str, ...]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of the coordinates of the residual."""
        return tuple(range(self.values.shape[2]))

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the coordinates of the residual."""
        return tuple(range(self.values.shape[3]))

    @property
    def directions(self) -> tuple[int, ...]:
        """Numbers of the singular values, from 1."""
        return tuple(range(1, self.singular_values.shape[2] + 1))

    def plot(self, field: str = "singular_values") -> plotly.graph_objects.Figure:
        """Singular values by number, a line for each block and pair, on a logarithmic axis."""
        from ..reporting.curves import spectra

        if field != "singular_values":
            return super().plot(field)
        labels = [f"{block}, {pair}" for block in self.blocks for pair in self.pairs]
        return spectra(self.singular_values.flatten(0, 1).numpy(), labels)

    def headline(self) -> dict[str, float]:
        return {"largest singular value": float(self.singular_values.max())}


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CouplingMatrices(Result):
    """Coupling of connections of one prompt: a connection is a block, a token that is varied and one that is read.

    Tensors are float64; the row's Jacobian stands in the singular vectors of the column's.

    Attributes:
        values: `connection other`, mis-coupling m~ of each matrix; NaN where the other has not k vectors beyond rounding.
        coupling: `connection other`, 1 - values.
        null: `connection other`, as `values` for random orthonormal vectors in place of the column's.
        matrices: `connection other left right`, A = U' J V themselves.
        singular_values: `connection left`.
        residual: `connection`, of krylov: |J'u - s v| / s_1.
        step_error: `connection`, of finite differences.
        connections: `block: t_in > t_out` of each.
        method: what was used.
        tokens: the prompt's tokens as text.
    """

    values_name = "miscoupling"
    values: Float64[Tensor, "connection other"] = axes("connection", "other")
    coupling: Float64[Tensor, "connection other"] = axes("connection", "other")
    null: Float64[Tensor, "connection other"] = axes("connection", "other")
    matrices: Float64[Tensor, "connection other left right"] = axes("connection", "other", "left", "right")
    singular_values: Float64[Tensor, "connection left"] = axes("connection", "left")
    residual: Float64[Tensor, " connection"] = axes("connection")
    step_error: Float64[Tensor, " connection"] = axes("connection")
    connections: tuple[str, ...]
    method: str
    tokens: tuple[str, ...]

    pictures = (
        Picture(
            "matrices",
            "Coupling matrices",
            "|A| of each pair, each divided by its largest entry: a diagonal where two Jacobians share their singular vectors "
            "(Aubry et al. 2025, figures 2 to 4).",
        ),
    )

    @property
    def others(self) -> tuple[str, ...]:
        """Labels of the columns."""
        return self.connections

    @property
    def lefts(self) -> tuple[int, ...]:
        """Numbers of the singular vectors, from 1."""
        return tuple(range(1, self.matrices.shape[2] + 1))

    @property
    def rights(self) -> tuple[int, ...]:
        """Numbers of the singular vectors, from 1."""
        return self.lefts

    def plot(self, field: str = "matrices") -> plotly.graph_objects.Figure:
        """All |A| in one picture, a tile for each pair."""
        from ..reporting.matrix import matrix_tiles

        if field != "matrices":
            return super().plot(field)
        return matrix_tiles(self.matrices.abs().numpy(), self.connections, "Coupling matrices")

    def headline(self) -> dict[str, float]:
        other = ~torch.eye(len(self.values), dtype=torch.bool)
        if not other.any():
            return {"largest singular value": float(self.singular_values.max())}
        return {
            "coupling, mean over different connections": float(self.coupling[other].nanmean()),
            "the same of random vectors": 1.0 - float(self.null[other].nanmean()),
        }


@typed
def block_jacobians(
    model: Any,
    prompt: Any,
    *,
    layers: list[int] | list[str] | None = None,
    positions: Any = "last",
    method: Literal["dense", "finite-difference"] = "dense",
    memory_mb: int | float = 1024,
    remote: bool | str = False,
    tokenizer: Any = None,
    prepend_bos: bool = True,
) -> BlockJacobians:
    """The Jacobians of blocks, without their skip connection, between tokens of one prompt.

    Computed in float32 whatever the weights are, float64 if the model is.

    Args:
        model: as in `analyze`.
        prompt: a text, or token ids `pos`.
        layers: numbers of blocks, negative ones from the end; or as in `analyze`, paths of all blocks. Default: all.
        positions: "last", a token t for t_in = t_out = t, a pair (t_in, t_out), or a list of these; negative ones from the end.
        method: "dense", or "finite-difference" where nothing can be differentiated.
        memory_mb: megabytes for products with many directions at once.
        remote: as in `analyze`. Whole Jacobians come back: 4 d_model^2 bytes each.
        tokenizer: as in `analyze`.
        prepend_bos: as in `analyze`.

    Raises:
        LayersimError: there is no such block or token, or blocks cannot be differentiated.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), equation 8.

    Example:
        >>> import tl_layersim as lsim
        >>> found = lsim.block_jacobians(lsim.demo_model(), "Once upon a time", layers=[0, -1], positions=[(0, 2), -1])
        >>> found.values.shape, found.pairs
        (torch.Size([2, 2, 128, 128]), ('0 > 2', '4 > 4'))
    """
    source = _open(model, layers, remote)
    chosen = numbers_of(layers, len(source.model.layers) - 1)
    asked = positions if isinstance(positions, list) else [positions]
    pairs: list[tuple[int, int]] = []

    def kernel(tokens: int) -> Kernel:
        pairs[:] = different([pair_of(one, tokens) for one in asked])
        return partial(jacobians_kernel, blocks=chosen, pairs=tuple(pairs), method=method, memory_mb=float(memory_mb))

    options = {"blocks": list(chosen), "positions": asked, "method": method}
    need_memory(memory_mb)
    check = partial(_check, what="block_jacobians", differences=method == "finite-difference", k=None)
    needs = PromptKernel(make=kernel, options=options, check=check, calls=True, least=1)
    out, tokens, _, provenance = run_on_prompt(source, prompt, needs, tokenizer, prepend_bos)
    layers_of = tuple(source.model.layers[1 + block] for block in chosen)
    refuse_trouble(out["differs"] & 1, out["differs"] & 2, out["step_error"], ("", *layers_of))
    values = out["jacobians"].double()
    return BlockJacobians(
        values=values,
        singular_values=torch.linalg.svdvals(values),
        step_error=out["step_error"].double(),
        blocks=layers_of,
        pairs=tuple(f"{a} > {b}" for a, b in pairs),
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
    layers: list[int] | list[str] | None = None,
    token: int | None = None,
    positions: list[int] | None = None,
    k: int = 10,
    method: Literal["auto", "dense", "krylov", "finite-difference"] = "auto",
    diagonal: Literal["signed", "positive"] = "signed",
    memory_mb: int | float = 1024,
    seed: int = 0,
    remote: bool | str = False,
    tokenizer: Any = None,
    prepend_bos: bool = True,
) -> CouplingMatrices:
    """How Jacobians of one prompt couple: across blocks at one token, or across tokens.

    Args:
        model: as in `analyze`.
        prompt: a text, or token ids `pos`.
        along: "depth" relates the chosen blocks at one token; "self" the tokens' effect on themselves (t > t); "fixed-input"
            one token's effect on later ones (token > t); "fixed-output" earlier tokens' effect on one (t > token).
        layers: numbers of blocks, negative ones from the end; or as in `analyze`, paths of all blocks. Default: all for
            "depth", the middle one otherwise. Several blocks are related across tokens as well.
        token: the one token; the last by default, the first for "fixed-input". Not for "self".
        positions: the tokens that vary; by default all that there can be. Not for "depth".
        k: how many singular vectors.
        method: as in `BlockCoupling`.
        diagonal: as in `BlockCoupling`.
        memory_mb: as in `BlockCoupling`.
        seed: as in `BlockCoupling`.
        remote: as in `analyze`.
        tokenizer: as in `analyze`.
        prepend_bos: as in `analyze`.

    Raises:
        LayersimError: there is no such block or token, or blocks cannot be differentiated.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), equations 9 to 14, figures 2 to 4.

    Example:
        >>> import tl_layersim as lsim
        >>> found = lsim.coupling_matrices(lsim.demo_model(), "Once upon a time there was", along="fixed-output", k=4)
        >>> found.connections[:2], found.matrices.shape
        (('3: 0 > 6', '3: 1 > 6'), torch.Size([7, 7, 4, 4]))
    """
    source = _open(model, layers, remote)
    blocks = len(source.model.layers) - 1
    chosen = numbers_of(layers, blocks) if along == "depth" or layers is not None else ((blocks - 1) // 2,)
    if (along == "self" and token is not None) or (along == "depth" and positions is not None):
        raise LayersimError(
            f"along={along!r} has no {'one token' if along == 'self' else 'tokens that vary'}.",
            given=f"token={token}, positions={positions}",
            expected="positions=[...]" if along == "self" else "token=...",
            do="leave the other out",
        )
    where: list[tuple[int, int, int]] = []

    def kernel(tokens: int) -> Kernel:
        where[:] = different(connections_of(along, chosen, token, positions, tokens))
        picked = pick_method(source.model.d_model or 0, len(where), k) if method == "auto" else method
        decided = Options((k,), picked, diagonal, float(memory_mb), seed)
        return partial(matrices_kernel, where=tuple(where), options=decided)

    options: dict[str, Any] = {
        "along": along,
        "blocks": list(chosen),
        "token": token,
        "positions": positions,
        "k": k,
        "method": method,
    }
    options |= {"diagonal": diagonal, "seed": seed}
    need_memory(memory_mb)
    check = partial(_check, what="coupling_matrices", differences=method == "finite-difference", k=k)
    needs = PromptKernel(make=kernel, options=options, check=check, calls=True, least=1)
    out, tokens, _, provenance = run_on_prompt(source, prompt, needs, tokenizer, prepend_bos)
    of_each = ("", *(source.model.layers[1 + block] for block, _, _ in where))
    refuse_trouble(out["differs"] & 1, out["differs"] & 2, out["step_error"], of_each)
    values, null = out["values"].double(), out["null"].double()
    return CouplingMatrices(
        values=values,
        coupling=1.0 - values,
        null=null,
        matrices=out["matrices"].double(),
        singular_values=out["singular_values"].double(),
        residual=out["residual"].double(),
        step_error=out["step_error"].double(),
        connections=tuple(f"{block}: {a} > {b}" for block, a, b in where),
        method=pick_method(source.model.d_model or 0, len(where), k) if method == "auto" else method,
        tokens=tokens,
        layers=source.model.layers,
        provenance=provenance,
    )


def _open(model: Any, layers: Sequence[Any] | None, remote: bool | str) -> Any:
    paths = [path for path in layers or [] if isinstance(path, str)]
    return open_source(model, layers=paths or None, remote=remote)


def _check(model: Model, what: str, differences: bool, k: int | None) -> None:
    need_calls(model, what, differences)
    if k is not None and not 2 <= k <= (model.d_model or k):
        raise LayersimError(
            "This is no number of singular vectors.",
            given=f"k={k} and {model.name} with d_model {model.d_model}",
            expected=f"k from 2 to {model.d_model or 'd_model'}",
            do="k=10",
        )


def jacobians_kernel(
    view: View, *, blocks: tuple[int, ...], pairs: tuple[tuple[int, int], ...], method: str, memory_mb: float
) -> dict[str, Tensor]:
    """`block pair d_model d_model`."""
    calls = view.calls
    assert calls is not None
    device, d = calls[0].hidden.device, view.residual.shape[-1]
    options = Options((1,), method, "signed", memory_mb, 0)
    out = torch.zeros(len(blocks), len(pairs), d, d, dtype=view.residual.dtype, device=device)
    step_error, differs = torch.zeros(len(blocks), dtype=torch.float64), torch.zeros(len(blocks), dtype=torch.int64)
    for number, block in enumerate(blocks):
        which = connections([(block, *pair) for pair in pairs], device)
        for row, sample, connection in pieces_of(which, max(1, int(memory_mb * 1e6 / (24 * d * d)))):
            with open_jacobian(calls, which, options, row, sample, connection) as jacobian:
                out[number, connection] = jacobian.dense().to(out)
                step_error[number] = torch.maximum(step_error[number], jacobian.step_error.max())
                differs[number] |= jacobian.trouble
    return {"jacobians": out, "step_error": step_error, "differs": differs}


def matrices_kernel(view: View, *, where: tuple[tuple[int, int, int], ...], options: Options) -> dict[str, Tensor]:
    """The couplings of one prompt's connections: block, t_in and t_out of each."""
    calls = view.calls
    assert calls is not None
    found = couple(calls, connections(list(where), calls[0].hidden.device), options, matrices=True)
    assert found.matrices is not None
    defined = found.defined[0, 0]
    return {
        "values": share(found.off[0, 0], found.norm[0, 0]).where(defined, torch.nan),
        "null": found.null_share[0, 0].where(defined, torch.nan),
        "matrices": found.matrices[0],
        "singular_values": found.singular_values[0],
        "residual": found.residual[0],
        "step_error": found.step_error[0],
        "differs": found.differs,
    }


def connections(where: list[tuple[int, int, int]], device: torch.device) -> Connections:
    """Connections of one prompt, from block, t_in and t_out of each."""
    ends = torch.tensor([[a, b] for _, a, b in where], device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    return Connections(row, tuple(block for block, _, _ in where), ends[None, :, 0], ends[None, :, 1])
