"""Coupling of Jacobians: each Jacobian in the singular bases of the others.

This module is serialised by value and runs on NDIF servers too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..activations.block_call import BlockCall
from .jacobian_operator import Jacobian, computing_dtype

# Krylov: largest error of the singular vectors relative to the largest singular value.
TOLERANCE = 1e-4
# Krylov: number of additional vectors in a block.
OVERSAMPLING = 6
# Draws of random vectors behind the null: with eight, its mean scatters as little as a measured coupling.
DRAWS = 8


@dataclass(frozen=True)
class Top:
    """The top singular triplets of each sample's Jacobian.

    Attributes:
        u: `sample d_model k`, left singular vectors.
        s: `sample k`, singular values in descending order.
        v: `sample d_model k`, right singular vectors.
        residual: `sample`, the largest |J'u_i - s_i v_i| over i, divided by s_1; 0 for a full decomposition.
        products: number of products with J or J'.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    residual: Tensor
    products: int


def top_of(dense: Tensor, k: int) -> Top:
    """Top singular triplets by full SVD.

    Args:
        dense: `sample d_model d_model`, dense Jacobians.
        k: number of triplets.
    """
    u, s, vh = torch.linalg.svd(dense)
    exact = torch.zeros(len(dense), dtype=dense.dtype, device=dense.device)
    return Top(u[..., :k], s[..., :k], vh[..., :k, :].mT, exact, dense.shape[-1])


def krylov(jacobian: Jacobian, k: int, seed: int) -> Top:
    """Top singular triplets by block Golub-Kahan-Lanczos from random start vectors. Vectors are fully reorthogonalised.

    Iterates until the residual is at most `TOLERANCE`. Source: Golub, Luk and Overton 1981; randomised block Krylov in Musco
    and Musco 2015 (arXiv 1504.05477).

    Args:
        jacobian: products with J and J'.
        k: number of triplets.
        seed: seed of the start vectors.
    """
    samples = len(jacobian.row)
    d = jacobian.d_model
    width = min(k + OVERSAMPLING, d)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(samples, d, width, generator=generator, dtype=torch.float64)
    block = torch.linalg.qr(start.to(jacobian.row.device, jacobian.dtype))[0]
    # Blocks of the Krylov bases, of J times the right basis, and of J' times the left basis.
    left_blocks: list[Tensor] = []
    right_blocks: list[Tensor] = []
    images: list[Tensor] = []
    transposed_images: list[Tensor] = []
    products = 0
    while True:
        right_blocks.append(block)
        images.append(jacobian.forward(block))
        left_blocks.append(orthogonal_to(images[-1], left_blocks, generator))
        transposed_images.append(jacobian.transposed(left_blocks[-1]))
        products += 2 * block.shape[-1]
        left_basis = torch.cat(left_blocks, -1)
        right_basis = torch.cat(right_blocks, -1)
        x, s, yh = torch.linalg.svd(left_basis.mT @ torch.cat(images, -1))
        u = left_basis @ x[..., :k]
        v = right_basis @ yh[..., :k, :].mT
        difference = torch.cat(transposed_images, -1) @ x[..., :k] - v * s[..., None, :k]
        residual = difference.norm(dim=-2).amax(-1) / s[..., 0].clamp(min=1e-30)
        remaining_dimensions = d - right_basis.shape[-1]
        if remaining_dimensions == 0 or bool((residual <= TOLERANCE).all()):
            return Top(u, s[..., :k], v, residual, products)
        next_width = min(width, remaining_dimensions)
        block = orthogonal_to(transposed_images[-1][..., :next_width], right_blocks, generator)


def orthogonal_to(block: Tensor, basis: list[Tensor], generator: torch.Generator) -> Tensor:
    """Orthonormalise the columns of `block` against `basis`. Random directions replace linearly dependent columns.

    Args:
        block: `sample d_model n`.
        basis: orthonormal blocks.
        generator: generator of the random directions.
    """

    def without_basis(x: Tensor) -> Tensor:
        for basis_block in basis:
            x = x - basis_block @ (basis_block.mT @ x)
        return x

    # A column counts as dependent if less than this fraction of it remains, which is rounding error. Random ones lose little.
    remaining = 1e-4
    for _ in range(8):
        size = block.norm(dim=-2).clamp(min=1e-30)
        block, r = torch.linalg.qr(without_basis(block))
        dependent = r.diagonal(dim1=-2, dim2=-1).abs() <= remaining * size
        if not bool(dependent.any()):
            break
        drawn = torch.randn(block.shape, generator=generator, dtype=torch.float64).to(block)
        block = torch.where(dependent[..., None, :], drawn / drawn.norm(dim=-2, keepdim=True), block)
        remaining = 1e-2
    # Twice more: the remainder of a column that lost nearly all of its length is not orthogonal up to rounding.
    block = torch.linalg.qr(without_basis(block))[0]
    return torch.linalg.qr(without_basis(block))[0]  # type: ignore[no-any-return]  # torch does not say


@dataclass(frozen=True)
class Connections:
    """Block, input token and output token of each Jacobian to couple. All samples have the same blocks.

    Attributes:
        row: `sample`, the row of the batch that holds each sample.
        block: `connection`, index of the block.
        t_in: `sample connection`, the token that is varied.
        t_out: `sample connection`, the token whose change is measured; not before `t_in`.
    """

    row: Tensor
    block: tuple[int, ...]
    t_in: Tensor
    t_out: Tensor


# Row of the batch, index of the sample and index of the connection of each Jacobian that is computed together with others.
Chunk = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class CouplingOptions:
    """Options for decomposing and comparing Jacobians.

    Attributes:
        ks: numbers of singular vectors. The largest number is computed; smaller ones use the leading vectors.
        method: "dense", "krylov" or "finite-difference".
        diagonal: "signed" for A - diag A; "positive" for |A| - diag A, in which negative diagonal entries count twice.
        memory_mb: megabytes for products with many directions at once and for stored Jacobians.
        seed: seed of random vectors.
    """

    ks: tuple[int, ...]
    method: str
    diagonal: str
    memory_mb: float
    seed: int


@dataclass(frozen=True)
class Coupled:
    """Result of `couple`: coupling of Jacobians, coupling by chance (null), singular values, and checks.

    All tensors are on the device of the activations.

    Attributes:
        off: `k sample connection connection`, |A - diag A|_F of Jacobian a in the singular basis of b; float64.
        norm: `k sample connection connection`, |A^{ab}|_F.
        null_off: `off` with random orthonormal vectors in place of b's singular vectors, mean over draws; 0 for a = b.
        null_miscoupling: `null_off`, but each draw is divided by its own |A|_F.
        defined: `k sample connection connection`, whether a, and k singular values of b, exceed rounding error.
        singular_values: `sample connection k`.
        residual: `sample connection`, residual of `krylov`, see `Top`.
        step_error: `sample connection`, error of finite differences, see `Jacobian`.
        whole_rows: `connection`, whether the block was replayed on whole rows.
        failures: `connection`, failed checks of the replay as bits, see `Jacobian.failures`.
        alignment: `pair sample connection connection`, mean over the first k singular vectors of a of their squared projection
            onto the span of the first k of b: left vectors of both, right vectors of both, left of a on right of b. NaN if
            either has fewer than k singular values above rounding error.
        matrices: `sample connection connection k k`, A for the largest k; None unless requested.
        bases: `pair sample connection connection k k`, the products U_b' U_a, V_b' V_a and V_b' U_a; None unless requested.
        path: the linearised path of each sample; None unless requested.
    """

    off: Tensor
    norm: Tensor
    null_off: Tensor
    null_miscoupling: Tensor
    defined: Tensor
    singular_values: Tensor
    residual: Tensor
    step_error: Tensor
    whole_rows: Tensor
    failures: Tensor
    alignment: Tensor
    matrices: Tensor | None
    bases: Tensor | None
    path: LinearPath | None


class LinearPath:
    """Compares a token's residual stream through linearised blocks with the true residual stream.

    A block x + f(x) becomes x + J x, with the Jacobian J at the block's true input.

    Args:
        calls: the calls of all blocks.
        connections: samples and connections: all blocks in order, each at one token.
        u: `sample connection d_model k`, left singular vectors.
        v: `sample connection d_model k`, right singular vectors.

    Attributes:
        path_error: `sample connection`, |y - x| / |x| after each block, for the true x and y = (I + J^l) ... (I + J^1) x^0.
        update_error: `sample connection`, |J x - f(x)| / |f(x)| of each block alone.
        left_share: `sample connection k`, squared cosine of the block's input with each left singular vector.
        right_share: `sample connection k`, squared cosine of the block's input with each right singular vector.
    """

    def __init__(self, calls: tuple[BlockCall, ...], connections: Connections, u: Tensor, v: Tensor) -> None:
        self.calls = calls
        self.connections = connections
        self.u = u
        self.v = v
        self.y = torch.zeros_like(u[:, 0, :, 0])
        self.path_error = torch.zeros(u.shape[:2], dtype=torch.float64, device=u.device)
        self.update_error = torch.zeros_like(self.path_error)
        self.left_share = torch.zeros(*u.shape[:2], u.shape[-1], dtype=torch.float64, device=u.device)
        self.right_share = torch.zeros_like(self.left_share)

    def directions(self, row: Tensor, sample: Tensor, connection: Tensor) -> Tensor:
        """Input of a block on the linearised path and in the forward pass (`sample d_model 2`)."""
        x = self._residual_stream_at(row, sample, connection, "hidden")
        if int(connection[0]) == 0:
            self.y[sample] = x
        return torch.stack([self.y[sample], x], -1)

    def add(self, row: Tensor, sample: Tensor, connection: Tensor, products: Tensor) -> None:
        """Extend the path by a block. `products` (`sample d_model 2`) are its Jacobian times `directions`."""
        self.y[sample] += products[..., 0]
        before = self._residual_stream_at(row, sample, connection, "hidden").double()
        after = self._residual_stream_at(row, sample, connection, "output").double()
        update = after - before
        index = (sample, connection)
        self.path_error[index] = (self.y[sample] - after).norm(dim=-1) / after.norm(dim=-1)
        self.update_error[index] = (products[..., 1] - update).norm(dim=-1) / update.norm(dim=-1)
        direction = before / before.norm(dim=-1, keepdim=True)
        for share, basis in ((self.left_share, self.u), (self.right_share, self.v)):
            share[index] = torch.einsum("pdk,pd->pk", basis[index].double(), direction).square()

    def _residual_stream_at(self, row: Tensor, sample: Tensor, connection: Tensor, attribute: str) -> Tensor:
        """Residual at `t_in` before ("hidden") or after ("output") a block (`sample d_model`)."""
        call = self.calls[self.connections.block[int(connection[0])]]
        x: Tensor = getattr(call, attribute)
        t_in = self.connections.t_in[sample, connection].to(x.device)
        return x[row.to(x.device), t_in].to(self.y)


def pick_method(d_model: int, connections: int, k: int) -> str:
    """Choose the faster exact method, "dense" or "krylov", by the timings of benchmarks/bench_coupling.py.

    Krylov needs 0.1 to 0.3 d_model products for its singular vectors and `(connections + DRAWS) * k` for the other bases.
    Dense needs d_model products and a full singular value decomposition.

    Args:
        d_model: width of the residual stream.
        connections: number of Jacobians for each sample.
        k: largest number of singular vectors.
    """
    return "krylov" if d_model >= 1024 and (connections + DRAWS) * k < 0.4 * d_model else "dense"


def couple(
    calls: tuple[BlockCall, ...],
    connections: Connections,
    options: CouplingOptions,
    matrices: bool = False,
    path: bool = False,
) -> Coupled:
    """Express each Jacobian in the singular bases of all Jacobians of the same sample.

    A = U' J V with the k top singular vectors U, V of another connection's Jacobian (Aubry et al. 2025, equations 9 and 10).
    The blocks are replayed twice: first for singular vectors, then for products of each Jacobian with all right singular
    vectors. Jacobians are kept in between if they fit into half of the memory.

    Args:
        calls: the calls of all blocks of the model in one forward pass.
        connections: samples and connections.
        options: how the Jacobians are decomposed.
        matrices: whether to return A and the products of bases themselves.
        path: whether to return `LinearPath`. The connections must then be all blocks in order, each at one token.
    """
    k = min(max(options.ks), calls[0].hidden.shape[-1])
    (u, v, s), checks, chunks = _decompose(calls, connections, options, k)
    samples, count = connections.t_in.shape
    d = calls[0].hidden.shape[-1]
    device = calls[0].hidden.device
    ks = [min(k, requested_k) for requested_k in options.ks]
    off = torch.zeros(len(ks), samples, count, count, dtype=torch.float64, device=device)
    norm = torch.zeros_like(off)
    null_off = torch.zeros_like(off)
    null_miscoupling = torch.zeros_like(off)
    shape = (samples, count, count, k, k)
    all_matrices = torch.zeros(shape, dtype=u.dtype, device=device) if matrices else None
    all_bases = torch.zeros(3, *shape, dtype=u.dtype, device=device) if matrices else None
    alignment = torch.zeros(3, samples, count, count, dtype=torch.float64, device=device)
    linear_path = LinearPath(calls, connections, u, v) if path else None
    left_frames, right_frames = random_frames(count, d, k, options.seed, u)
    for (row, sample, connection), dense in chunks:
        # `sample d_model (connection k)`, followed by the random frames.
        bases = torch.cat([v[sample].transpose(1, 2).flatten(2), right_frames.expand(len(sample), -1, -1)], -1)
        directions = [bases]
        if linear_path is not None:
            # Residuals are multiplied apart from the bases: further columns would change the rounding of products.
            directions.append(linear_path.directions(row, sample, connection))
        if dense is not None:
            products = [(dense @ block.to(dense.device)).to(bases) for block in directions]
        else:
            with jacobian_of(calls, connections, options, row, sample, connection) as jacobian:
                products = [jacobian.forward(block.to(jacobian.row.device, jacobian.dtype)).to(bases) for block in directions]
        images = products[0]
        if linear_path is not None:
            linear_path.add(row, sample, connection, products[1])
        images_of_v = images[..., : count * k].reshape(*images.shape[:-1], count, k)
        a = torch.einsum("pndi,pdnj->pnij", u[sample], images_of_v)
        images_of_frames = images[..., count * k :].reshape(*images.shape[:-1], DRAWS, k)
        null_a = torch.einsum("rndi,pdrj->rpnij", left_frames, images_of_frames)
        for number, size in enumerate(ks):
            index = (number, sample, connection)
            off[index], norm[index] = off_diagonal(a[..., :size, :size], options.diagonal)
            drawn_off, drawn_norm = off_diagonal(null_a[..., :size, :size], options.diagonal)
            null_off[index] = drawn_off.mean(0)
            null_miscoupling[index] = miscoupling(drawn_off, drawn_norm).mean(0)
        basis_products = []
        for basis_of_b, basis_of_a in ((u, u), (v, v), (v, u)):
            basis_products.append(torch.einsum("pndi,pdj->pnij", basis_of_b[sample], basis_of_a[sample, connection]))
        stacked_products = torch.stack(basis_products)
        leading = stacked_products[..., : ks[0], : ks[0]]
        alignment[:, sample, connection] = leading.double().square().sum((-2, -1)) / ks[0]
        if all_matrices is not None and all_bases is not None:
            all_matrices[sample, connection] = a
            all_bases[:, sample, connection] = stacked_products
    # In its own basis a Jacobian is diagonal by definition, so its null is 0.
    for matrix in (null_off, null_miscoupling):
        matrix.diagonal(dim1=-2, dim2=-1).zero_()
    floor = rounding_floor(s, checks["step_error"], d, computing_dtype(calls[0]))
    nonzero = s[..., 0] > floor
    defined = torch.stack([nonzero[:, :, None] & (s[..., size - 1] > floor)[:, None] for size in ks])
    if linear_path is not None:
        above_floor = s > floor[..., None]
        linear_path.left_share = linear_path.left_share.where(above_floor, torch.nan)
        linear_path.right_share = linear_path.right_share.where(above_floor, torch.nan)
    return Coupled(
        off=off,
        norm=norm,
        null_off=null_off,
        null_miscoupling=null_miscoupling,
        defined=defined,
        singular_values=s,
        alignment=alignment.clamp(max=1).where(defined[0] & defined[0].mT, torch.nan),
        matrices=all_matrices,
        bases=all_bases,
        path=linear_path,
        **checks,
    )


def _decompose(
    calls: tuple[BlockCall, ...], connections: Connections, options: CouplingOptions, k: int
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor], list[tuple[Chunk, Tensor | None]]]:
    """The k top singular vectors of each connection's Jacobian.

    Returns:
        Left singular vectors `sample connection d_model k`, right ones, and singular values `sample connection k`; checks of
        the computation, see `Coupled`; and the Jacobians that are computed together, with the dense matrices if they are kept.
    """
    samples, count = connections.t_in.shape
    d = calls[0].hidden.shape[-1]
    device = calls[0].hidden.device
    dtype = torch.float64 if calls[0].hidden.dtype == torch.float64 else torch.float32
    u = torch.zeros(samples, count, d, k, dtype=dtype, device=device)
    v = torch.zeros_like(u)
    s = torch.zeros(samples, count, k, dtype=dtype, device=device)
    residual = torch.zeros(samples, count, dtype=torch.float64, device=device)
    step_error = torch.zeros_like(residual)
    whole_rows = torch.zeros(count, dtype=torch.bool, device=device)
    failures = torch.zeros(count, dtype=torch.int64, device=device)
    bytes_of_jacobian = dtype.itemsize * d * d
    # Dense Jacobians are kept for the second loop if all of them fit in half of memory_mb.
    keep_dense = options.method != "krylov" and samples * count * bytes_of_jacobian <= options.memory_mb * 5e5
    chunks: list[tuple[Chunk, Tensor | None]] = []
    for chunk in chunks_of(connections, max(1, int(options.memory_mb * 1e6 / (6 * bytes_of_jacobian)))):
        _, sample, connection = chunk
        with jacobian_of(calls, connections, options, *chunk) as jacobian:
            dense = None
            if options.method == "krylov":
                top = krylov(jacobian, k, options.seed)
            else:
                dense = jacobian.dense().to(dtype)
                top = top_of(dense, k)
            u[sample, connection] = top.u.to(u)
            v[sample, connection] = top.v.to(v)
            s[sample, connection] = top.s.to(s)
            residual[sample, connection] = top.residual.to(residual)
            step_error[sample, connection] = jacobian.step_error.to(device)
            whole_rows[connection] |= jacobian.whole_rows
            failures[connection] |= jacobian.failures
        chunks.append((chunk, dense if keep_dense else None))
    checks = {"residual": residual, "step_error": step_error, "whole_rows": whole_rows, "failures": failures}
    return (u, v, s), checks, chunks


def jacobian_of(
    calls: tuple[BlockCall, ...],
    connections: Connections,
    options: CouplingOptions,
    row: Tensor,
    sample: Tensor,
    connection: Tensor,
) -> Jacobian:
    """The Jacobians of some connections of one block, on the device of the block's input.

    Args:
        calls: the calls of all blocks.
        connections: samples and connections.
        options: how the Jacobians are decomposed.
        row: for each Jacobian, its row of the batch.
        sample: for each Jacobian, the index of its sample.
        connection: for each Jacobian, the index of its connection; all are in one block.
    """
    call = calls[connections.block[int(connection[0])]]
    device = call.hidden.device
    t_in = connections.t_in[sample, connection].to(device)
    t_out = connections.t_out[sample, connection].to(device)
    return Jacobian(call, row.to(device), t_in, t_out, options.memory_mb, options.method == "finite-difference")


def chunks_of(connections: Connections, at_once: int) -> list[Chunk]:
    """Split all Jacobians into chunks; the Jacobians of a chunk belong to one block.

    A chunk holds indices of rows, samples and connections.

    Args:
        connections: samples and connections.
        at_once: largest number of Jacobians in a chunk.
    """
    samples = len(connections.row)
    device = connections.row.device
    chunks = []
    for block in dict.fromkeys(connections.block):
        numbers = [number for number, block_index in enumerate(connections.block) if block_index == block]
        connections_of_block = torch.tensor(numbers, device=device)
        sample = torch.arange(samples, device=device).repeat_interleave(len(numbers))
        connection = connections_of_block.repeat(samples)
        for start in range(0, len(sample), at_once):
            chunk = slice(start, start + at_once)
            chunks.append((connections.row[sample[chunk]], sample[chunk], connection[chunk]))
    return chunks


def random_frames(connections: int, d: int, k: int, seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Random orthonormal vectors, for the coupling expected by chance (null).

    In these bases, A is distributed as for a Jacobian with the same spectrum and random singular vectors. All samples share the
    same frames, so a result does not depend on the batches. A larger k adds vectors to the frames of a smaller k.

    Args:
        connections: number of Jacobians for each sample.
        d: d_model.
        k: number of vectors in a frame.
        seed: seed of the draws.
        like: a tensor with the dtype and device of the result.

    Returns:
        Left frames `draw connection d k` and right frames `1 d (draw k)`.
    """
    frames = []
    for number in range(DRAWS * (connections + 1)):
        generator = torch.Generator().manual_seed(seed + 7919 * number)
        # Multiples of sixteen rows: torch draws the remainder of a sixteen in another order.
        frames.append(torch.randn(-(-k // 16) * 16, d, generator=generator, dtype=torch.float64)[:k].T)
    drawn = torch.linalg.qr(torch.stack(frames))[0].to(like.device, like.dtype).unflatten(0, (DRAWS, connections + 1))
    return drawn[:, :connections], torch.cat(list(drawn[:, connections]), -1)[None]


def off_diagonal(a: Tensor, diagonal: str) -> tuple[Tensor, Tensor]:
    """Frobenius norms |A - diag A|_F and |A|_F of matrices, float64.

    Args:
        a: `... k k`.
        diagonal: "signed", or "positive" to use |A| - diag A in the first norm.
    """
    a = a.double()
    entries = a.abs() if diagonal == "positive" else a
    off = entries - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1))
    return off.flatten(-2).norm(dim=-1), a.flatten(-2).norm(dim=-1)


def rounding_floor(s: Tensor, step_error: Tensor, d: int, dtype: torch.dtype) -> Tensor:
    """Rounding error of singular values (`sample connection`), from the subtraction of the skip connection.

    Singular vectors of smaller singular values are arbitrary, and so is a coupling in their basis.

    Args:
        s: `sample connection k`, singular values in descending order.
        step_error: `sample connection`, error of finite differences.
        d: d_model.
        dtype: dtype of the Jacobians' computation.
    """
    relative = torch.maximum(step_error, torch.full_like(step_error, 8 * d**0.5 * torch.finfo(dtype).eps))
    return (relative * (1.0 + s[..., 0].double())).to(s.dtype)


def miscoupling(off: Tensor, norm: Tensor) -> Tensor:
    """Normalised mis-coupling |A - diag A|_F / |A|_F; 0 if A is 0. Aubry et al. 2025, equation 14."""
    return off / norm.clamp(min=1e-300)
