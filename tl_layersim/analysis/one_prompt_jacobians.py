"""Jacobians of blocks on one prompt: the matrices between its tokens, and their coupling across blocks and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..architectures.resolve import block_numbers
from ..core.argument_checks import typed
from ..core.bounds import PositiveFloat, Seed, TwoOrMore
from ..core.errors import LayersimError
from ..core.wording import brief
from ..jacobians.coupling import Connections, CouplingOptions, chunks_of, couple, jacobian_of, miscoupling, pick_method
from ..jacobians.supported_blocks import need_calls, refuse_failed_replay
from ..models.model_info import Model
from ..models.view import Kernel, View
from ..remote.open import open_source
from .one_prompt_arguments import connections_of, different, pair_of
from .one_prompt_jacobian_results import BlockJacobians, CouplingMatrices
from .prompt_run import PromptKernel, run_on_prompt

Along = Literal["depth", "self", "fixed-input", "fixed-output"]


@typed
def block_jacobians(
    model: Any,
    prompt: Any,
    *,
    layers: int | str | Sequence[int | str] | None = None,
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
        layers: blocks by number, negative from the end, or by the name of their output. Default: all.
        positions: "last", a token t for t_in = t_out = t, a pair (t_in, t_out), or a list of these; negative numbers from the
            end.
        method: "dense", or "finite-difference" for blocks that cannot be differentiated.
        memory_mb: megabytes for products with many directions at once.

    Raises:
        LayersimError: a block or token does not exist, or blocks cannot be differentiated.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), equation 8.

    Examples:
        >>> import tl_layersim as lsim
        >>> found = lsim.block_jacobians(lsim.demo_model(), "Once upon a time", layers=[0, -1], positions=[(0, 2), -1])
        >>> found.values.shape, found.pairs
        (torch.Size([2, 2, 128, 128]), ('0 > 2', '4 > 4'))
    """
    source = open_source(model)
    outputs = source.model.layers[1:]
    chosen = tuple(range(len(outputs))) if layers is None else block_numbers(layers, outputs, "layers")
    if isinstance(positions, np.ndarray | torch.Tensor):
        # An array of tokens, or of pairs of them.
        positions = [tuple(each) if isinstance(each, list) else each for each in np.atleast_1d(np.asarray(positions)).tolist()]
    requested = positions if isinstance(positions, list) else [positions]
    pairs: list[tuple[int, int]] = []

    def kernel(tokens: int) -> Kernel:
        pairs[:] = different([pair_of(one, tokens) for one in requested])
        return partial(jacobians_kernel, blocks=chosen, pairs=tuple(pairs), method=method, memory_mb=float(memory_mb))

    options = {"blocks": list(chosen), "positions": requested, "method": method}
    check = partial(_check_model, what="block_jacobians", differences=method == "finite-difference", k=None)
    needs = PromptKernel(make=kernel, options=options, check=check, calls=True, least=1)
    out, tokens, _, provenance = run_on_prompt(source, prompt, needs)
    layers_of = tuple(source.model.layers[1 + block] for block in chosen)
    refuse_failed_replay(out["differs"] & 1, out["differs"] & 2, out["step_error"], ("", *layers_of))
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
    layers: int | str | Sequence[int | str] | None = None,
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
        along: "depth" compares the chosen blocks at one token; "self" the effects of tokens on themselves (t > t);
            "fixed-input" the effects of one token on later tokens (token > t); "fixed-output" the effects of earlier tokens on
            one token (t > token).
        layers: blocks by number, negative from the end, or by the name of their output. Default: all for
            "depth", the middle block otherwise. Several blocks are compared across tokens as well.
        token: the fixed token; the last by default, the first for "fixed-input". Not for "self".
        positions: the other tokens; by default all possible tokens. Not for "depth".
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
        >>> found = lsim.coupling_matrices(lsim.demo_model(), "Once upon a time there was", along="fixed-output", k=4)
        >>> found.connections[:2], found.matrices.shape
        (('3: 0 > 6', '3: 1 > 6'), torch.Size([7, 7, 4, 4]))
    """
    for name, value, without in (("token", token, "self"), ("positions", positions, "depth")):
        if value is not None and along == without:
            raise LayersimError(f"`{name}` is {brief(value)}; it cannot be used with along={along!r}.")
    source = open_source(model)
    outputs = source.model.layers[1:]
    default = tuple(range(len(outputs))) if along == "depth" else ((len(outputs) - 1) // 2,)
    chosen = default if layers is None else block_numbers(layers, outputs, "layers")
    where: list[tuple[int, int, int]] = []

    def kernel(tokens: int) -> Kernel:
        where[:] = different(connections_of(along, chosen, token, positions, tokens))
        picked = pick_method(source.model.d_model or 0, len(where), k) if method == "auto" else method
        return partial(
            matrices_kernel,
            where=tuple(where),
            options=CouplingOptions((k,), picked, diagonal, float(memory_mb), seed),
        )

    options: dict[str, Any] = {
        "along": along,
        "blocks": list(chosen),
        "token": token,
        "positions": positions,
        "k": k,
        "method": method,
    }
    options |= {"diagonal": diagonal, "seed": seed}
    check = partial(_check_model, what="coupling_matrices", differences=method == "finite-difference", k=k)
    needs = PromptKernel(make=kernel, options=options, check=check, calls=True, least=1)
    out, tokens, _, provenance = run_on_prompt(source, prompt, needs)
    of_each = ("", *(source.model.layers[1 + block] for block, _, _ in where))
    refuse_failed_replay(out["differs"] & 1, out["differs"] & 2, out["step_error"], of_each)
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


def _check_model(model: Model, what: str, differences: bool, k: int | None) -> None:
    """Refuse a model whose blocks have no Jacobian, or one with fewer than k dimensions."""
    need_calls(model, what, differences)
    if k is not None and k > (model.d_model or k):
        raise LayersimError(f"`k` is {k}; it must be at most {model.d_model}, d_model of {model.name}.")


def jacobians_kernel(
    view: View, *, blocks: tuple[int, ...], pairs: tuple[tuple[int, int], ...], method: str, memory_mb: float
) -> dict[str, Tensor]:
    """Jacobians of blocks on one prompt, `block pair d_model d_model`.

    Args:
        view: of one row of tokens, with the calls of the blocks.
        blocks: numbers of the blocks.
        pairs: t_in and t_out of each pair.
        method: "dense" or "finite-difference".
        memory_mb: megabytes for products with many directions at once.
    """
    calls = view.calls
    assert calls is not None
    device, d = calls[0].hidden.device, view.activations.shape[-1]
    options = CouplingOptions((1,), method, "signed", memory_mb, 0)
    out = torch.zeros(len(blocks), len(pairs), d, d, dtype=view.activations.dtype, device=device)
    step_error, differs = torch.zeros(len(blocks), dtype=torch.float64), torch.zeros(len(blocks), dtype=torch.int64)
    for number, block in enumerate(blocks):
        which = connections([(block, *pair) for pair in pairs], device)
        for row, sample, connection in chunks_of(which, max(1, int(memory_mb * 1e6 / (24 * d * d)))):
            with jacobian_of(calls, which, options, row, sample, connection) as jacobian:
                out[number, connection] = jacobian.dense().to(out)
                step_error[number] = torch.maximum(step_error[number], jacobian.step_error.max())
                differs[number] |= jacobian.failures
    return {"jacobians": out, "step_error": step_error, "differs": differs}


def matrices_kernel(view: View, *, where: tuple[tuple[int, int, int], ...], options: CouplingOptions) -> dict[str, Tensor]:
    """Couplings of the connections of one prompt.

    Args:
        view: of one row of tokens, with the calls of the blocks.
        where: block, t_in and t_out of each connection.
        options: how the Jacobians are decomposed.
    """
    calls = view.calls
    assert calls is not None
    found = couple(calls, connections(list(where), calls[0].hidden.device), options, matrices=True)
    assert found.matrices is not None
    defined = found.defined[0, 0]
    return {
        "values": miscoupling(found.off[0, 0], found.norm[0, 0]).where(defined, torch.nan),
        "null": found.null_miscoupling[0, 0].where(defined, torch.nan),
        "matrices": found.matrices[0],
        "singular_values": found.singular_values[0],
        "residual": found.residual[0],
        "step_error": found.step_error[0],
        "differs": found.failures,
    }


def connections(where: list[tuple[int, int, int]], device: torch.device) -> Connections:
    """The `Connections` of one prompt.

    Args:
        where: block, t_in and t_out of each connection.
        device: of the activations.
    """
    ends = torch.tensor([[a, b] for _, a, b in where], device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    return Connections(row, tuple(block for block, _, _ in where), ends[None, :, 0], ends[None, :, 1])
