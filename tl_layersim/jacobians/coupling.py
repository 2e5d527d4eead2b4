"""Coupling of Jacobians: their singular vectors, each one in the others' basis, and how far from diagonal that is.

All of it travels to NDIF servers by value, as source, see `calls.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.block_call import BlockCall
from .products import Jacobian
from .singular_vectors import krylov, top_of

# Draws of the null: their mean is then as steady as what it stands beside.
DRAWS = 8


@dataclass(frozen=True)
class Connections:
    """Which Jacobians are related to each other: for each sample the same number, in the same blocks.

    Attributes:
        row: `sample`, which row of the batch each sample stands in.
        block: `connection`, index of the block of each.
        t_in: `sample connection`, the token that is varied.
        t_out: `sample connection`, the token whose change is measured; not before `t_in`.
    """

    row: Tensor
    block: tuple[int, ...]
    t_in: Tensor
    t_out: Tensor


@dataclass(frozen=True)
class Options:
    """How Jacobians are taken apart.

    Attributes:
        ks: numbers of singular vectors; the largest is computed, the others are nested in it.
        method: "dense", "krylov" or "finite-difference".
        diagonal: "signed" for A - diag A; "positive" for |A| - diag A, where negative entries of the diagonal count twice.
        memory_mb: megabytes for products with many directions at once, and for Jacobians that are kept.
        seed: of random vectors.
    """

    ks: tuple[int, ...]
    method: str
    diagonal: str
    memory_mb: float
    seed: int


@dataclass(frozen=True)
class Coupled:
    """What `couple` gives, all on the device of the activations.

    Attributes:
        off: `k sample connection connection`, m(A^{ab}) = |A - diag A|_F of Jacobian a in the basis of b; float64.
        norm: `k sample connection connection`, |A^{ab}|_F.
        null_off: the same as `off` of random orthonormal vectors in place of b's, in the mean over draws; 0 for a = b.
        null_share: as `null_off`, each draw divided by its own norm.
        defined: `k sample connection connection`, whether a is more than rounding and b has k singular vectors.
        singular_values: `sample connection k`.
        residual: `sample connection`, of `krylov`, see `jacobian.Top`.
        step_error: `sample connection`, of finite differences, see `Jacobian`.
        general: `connection`, whether whole rows had to run through the block.
        differs: `connection`, 1 where the block, called again, did not give what it gave, 2 where it has no skip connection.
        matrices: `sample connection connection k k`, A itself for the largest k; None unless asked for.
    """

    off: Tensor
    norm: Tensor
    null_off: Tensor
    null_share: Tensor
    defined: Tensor
    singular_values: Tensor
    residual: Tensor
    step_error: Tensor
    general: Tensor
    differs: Tensor
    matrices: Tensor | None


def pick_method(d_model: int, connections: int, k: int) -> str:
    """Which of the two exact methods is the faster one; both are measured in benchmarks/bench_coupling.py.

    Krylov takes 0.1 to 0.3 d_model products for its singular vectors and `(connections + DRAWS) * k` for the other bases,
    where dense takes d_model and a full decomposition.
    """
    return "krylov" if d_model >= 1024 and (connections + DRAWS) * k < 0.4 * d_model else "dense"


def couple(calls: tuple[BlockCall, ...], which: Connections, options: Options, matrices: bool = False) -> Coupled:
    """Each connection's Jacobian in the bases of all connections of its sample.

    Twice through the blocks: singular vectors first, then products of each Jacobian with everybody's right ones. Jacobians are
    kept in between where they fit into half of the memory.
    """
    samples, connections = which.t_in.shape
    d = calls[0].hidden.shape[-1]
    k = min(max(options.ks), d)
    device = calls[0].hidden.device
    wide = torch.float64 if calls[0].hidden.dtype == torch.float64 else torch.float32
    u = torch.zeros(samples, connections, d, k, dtype=wide, device=device)
    v, s = torch.zeros_like(u), torch.zeros(samples, connections, k, dtype=wide, device=device)
    residual = torch.zeros(samples, connections, dtype=torch.float64, device=device)
    step_error = torch.zeros_like(residual)
    general = torch.zeros(connections, dtype=torch.bool, device=device)
    differs = torch.zeros(connections, dtype=torch.int64, device=device)
    size = wide.itemsize * d * d
    keep = options.method != "krylov" and samples * connections * size <= options.memory_mb * 5e5
    kept: list[Tensor | None] = []
    pieces = pieces_of(which, max(1, int(options.memory_mb * 1e6 / (6 * size))))
    for row, sample, connection in pieces:
        with open_jacobian(calls, which, options, row, sample, connection) as jacobian:
            dense = None
            if options.method == "krylov":
                top = krylov(jacobian, k, options.seed)
            else:
                dense = jacobian.dense().to(wide)
                top = top_of(dense, k)
            u[sample, connection], v[sample, connection] = top.u.to(u), top.v.to(v)
            s[sample, connection], residual[sample, connection] = top.s.to(s), top.residual.to(residual)
            step_error[sample, connection] = jacobian.step_error.to(device)
            general[connection] |= jacobian.general
            differs[connection] |= jacobian.trouble
        kept.append(dense if keep else None)
    ks = [min(k, one) for one in options.ks]
    off = torch.zeros(len(ks), samples, connections, connections, dtype=torch.float64, device=device)
    norm, null_off, null_share = torch.zeros_like(off), torch.zeros_like(off), torch.zeros_like(off)
    shape = (samples, connections, connections, k, k)
    whole = torch.zeros(shape, dtype=wide, device=device) if matrices else None
    left, right = random_frames(connections, d, k, options.seed, u)
    for (row, sample, connection), dense in zip(pieces, kept, strict=True):
        # `sample d_model (connection k)`, and random frames more.
        bases = torch.cat([v[sample].transpose(1, 2).flatten(2), right.expand(len(sample), -1, -1)], -1)
        if dense is not None:
            images = (dense @ bases.to(dense.device)).to(bases.device)
        else:
            with open_jacobian(calls, which, options, row, sample, connection) as jacobian:
                images = jacobian.forward(bases.to(jacobian.row.device, jacobian.dtype)).to(bases)
        own = images[..., : connections * k].reshape(*images.shape[:-1], connections, k)
        a = torch.einsum("pndi,pdnj->pnij", u[sample], own)
        drawn = images[..., connections * k :].reshape(*images.shape[:-1], DRAWS, k)
        random = torch.einsum("rndi,pdrj->rpnij", left, drawn)
        for number, one in enumerate(ks):
            at = (number, sample, connection)
            off[at], norm[at] = off_diagonal(a[..., :one, :one], options.diagonal)
            parts = off_diagonal(random[..., :one, :one], options.diagonal)
            null_off[at], null_share[at] = parts[0].mean(0), share(*parts).mean(0)
        if whole is not None:
            whole[sample, connection] = a
    for null in (null_off, null_share):
        null.diagonal(dim1=-2, dim2=-1).zero_()
    floor = rounding_floor(s, step_error, d, calls[0].hidden.dtype if options.method == "finite-difference" else wide)
    there = s[..., 0] > floor
    defined = torch.stack([there[:, :, None] & (s[..., one - 1] > floor)[:, None] for one in ks])
    return Coupled(off, norm, null_off, null_share, defined, s, residual, step_error, general, differs, whole)


def open_jacobian(
    calls: tuple[BlockCall, ...], which: Connections, options: Options, row: Tensor, sample: Tensor, connection: Tensor
) -> Jacobian:
    """The Jacobians of connections of one block, on the device of what enters it."""
    call = calls[which.block[int(connection[0])]]
    here = call.hidden.device
    t_in, t_out = which.t_in[sample, connection].to(here), which.t_out[sample, connection].to(here)
    return Jacobian(call, row.to(here), t_in, t_out, options.memory_mb, options.method == "finite-difference")


def pieces_of(which: Connections, at_once: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Row, sample and connection of all Jacobians, block by block, as many in a piece as memory allows."""
    samples = len(which.row)
    device = which.row.device
    found = []
    for block in dict.fromkeys(which.block):
        mine = torch.tensor([n for n, other in enumerate(which.block) if other == block], device=device)
        sample = torch.arange(samples, device=device).repeat_interleave(len(mine))
        connection = mine.repeat(samples)
        for start in range(0, len(sample), at_once):
            part = sample[start : start + at_once]
            found.append((which.row[part], part, connection[start : start + at_once]))
    return found


def random_frames(connections: int, d: int, k: int, seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal vectors in random directions: on the left `draw connection d k`, on the right `1 d (draw k)`.

    In place of everybody's singular vectors they give A the law that it has where a Jacobian keeps its spectrum and takes
    random vectors. The same for all samples: what is measured must not depend on how samples fall into batches. A larger k
    adds vectors to those of a smaller one.
    """
    frames = []
    for number in range(DRAWS * (connections + 1)):
        generator = torch.Generator().manual_seed(seed + 7919 * number)
        # Sixteen rows and more at a time: torch draws the rest of a sixteen in another order.
        frames.append(torch.randn(-(-k // 16) * 16, d, generator=generator, dtype=torch.float64)[:k].T)
    found = torch.linalg.qr(torch.stack(frames))[0].to(like.device, like.dtype).unflatten(0, (DRAWS, connections + 1))
    return found[:, :connections], torch.cat(list(found[:, connections]), -1)[None]


def off_diagonal(a: Tensor, diagonal: str) -> tuple[Tensor, Tensor]:
    """What is off the diagonal of `... k k`, and all of it, as Frobenius norms in float64."""
    a = a.double()
    rest = (a.abs() if diagonal == "positive" else a) - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1))
    return rest.flatten(-2).norm(dim=-1), a.flatten(-2).norm(dim=-1)


def rounding_floor(s: Tensor, step_error: Tensor, d: int, dtype: torch.dtype) -> Tensor:
    """`sample connection`, below which singular values are what computing left: block and identity are subtracted.

    Singular vectors of such values are arbitrary, and so is what is said in their basis.
    """
    share = torch.maximum(step_error, torch.full_like(step_error, 8 * d**0.5 * torch.finfo(dtype).eps))
    return (share * (1.0 + s[..., 0].double())).to(s.dtype)


def share(off: Tensor, norm: Tensor) -> Tensor:
    """Off-diagonal over whole, 0 where there is nothing."""
    return off / norm.clamp(min=1e-300)
