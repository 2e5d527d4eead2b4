"""Jacobians of blocks: products with them, the whole matrix, and their top singular vectors, for many samples at once.

All of it travels to NDIF servers by value, as source, see `calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from .calls import BlockCall, FewTokens, Widened, whole_block

# A step of finite differences, as a share of the residual's norm: rounding and curvature are both small there.
STEP = {torch.float64: 1e-5, torch.float32: 1e-3}
COARSE_STEP = 3e-2
# Beyond this share of the residual's norm, what a block gives when it is called again is not what it gave.
ALIKE = {torch.float64: 1e-6, torch.float32: 1e-3}
# As many copies of a token at once: enough for large matrix products, few enough for the scores between them.
COPIES = 128
CPU_ROOM = 3e8
# Krylov: how far from singular vectors they may be, as a share of the largest singular value, and how many more are kept.
TOLERANCE, SPARE = 1e-4, 6


class Narrow:
    """Products with the Jacobians of samples by their tokens alone, in copies, one for each direction.

    Args:
        few: the block as a function of these tokens.
        which: indices of the samples.
        room: bytes for one product.
    """

    def __init__(self, few: FewTokens, which: Tensor, room: float) -> None:
        self.few, self.which = few, which
        samples, d = few.x.shape
        # Roughly what a copy takes: some tens of residuals, and attention scores of some d / 64 heads.
        floats = samples * len(few.at[0]) * (48 * d + d // 16 * (few.pos + COPIES))
        self.most = max(1, min(COPIES, int(room / (floats * few.x.dtype.itemsize))))
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def graph(self, n: int) -> tuple[Tensor, Tensor]:
        """Copies of the tokens and what the block gives for them; kept, as all products with as many directions need it."""
        if n not in self.graphs:
            with torch.enable_grad(), plain_attention():
                x = self.few.x[:, None].repeat(1, n, 1).requires_grad_()
                self.graphs[n] = x, self.few.block(n)(x)
        return self.graphs[n]

    def value(self) -> Tensor:
        """`sample d_model`, what the block gives at the tokens that are read."""
        return self.graph(1)[1][:, 0].detach()

    def transposed(self, u: Tensor) -> Tensor:
        return self._in_chunks(u, self._transposed)

    def forward(self, v: Tensor) -> Tensor:
        return self._in_chunks(v, self._forward)

    def _in_chunks(self, directions: Tensor, one: Callable[[Tensor], Tensor]) -> Tensor:
        """Of `sample d_model m`, equal parts of them at a time: the last one is filled up with zeros."""
        m = directions.shape[-1]
        n = -(-m // -(-m // self.most))
        parts = [directions[..., start : start + n] for start in range(0, m, n)]
        found = [one(torch.nn.functional.pad(part, (0, n - part.shape[-1])).mT.contiguous()) for part in parts]
        return torch.cat(found, 1)[:, :m].mT

    def _transposed(self, u: Tensor) -> Tensor:
        x, y = self.graph(u.shape[1])
        with plain_attention():
            [found] = torch.autograd.grad(y, x, u, retain_graph=True)
        return found

    def _forward(self, v: Tensor) -> Tensor:
        """The derivative of J'u by u, which every block has whose J'u can be differentiated."""
        x, y = self.graph(v.shape[1])
        with torch.enable_grad(), plain_attention():
            u = torch.zeros_like(y, requires_grad=True)
            [back] = torch.autograd.grad(y, x, u, create_graph=True)
            [found] = torch.autograd.grad(back, u, v)
        return found


class Wide:
    """The same by whole rows: one sample of a row at a time, which every block allows.

    Args:
        call: the block with its own arguments.
        dtype: to compute in.
        row: `sample`, none twice.
        t_in: `sample`.
        t_out: `sample`.
        which: indices of the samples.
        room: bytes for one product.
        differences: by finite differences; only products with J then.
    """

    def __init__(
        self,
        call: BlockCall,
        dtype: torch.dtype,
        row: Tensor,
        t_in: Tensor,
        t_out: Tensor,
        which: Tensor,
        room: float,
        differences: bool,
    ) -> None:
        self.call, self.dtype, self.row, self.t_in, self.t_out, self.which = call, dtype, row, t_in, t_out, which
        self.differences, self.step_error = differences, torch.zeros(len(row), dtype=torch.float64)
        batch, pos, d = call.hidden.shape
        # A CPU is fastest where what one product writes is not far from its caches.
        room = min(room, CPU_ROOM) if call.hidden.device.type == "cpu" else room
        self.most = max(1, int(room / (batch * pos * (48 * d + d // 16 * pos) * dtype.itemsize)))
        block = whole_block(call, dtype, row, t_in, t_out)
        self.x = call.hidden[row, t_in].to(dtype)
        with torch.set_grad_enabled(not differences), plain_attention():
            self.x.requires_grad_(not differences)
            self.y = block(self.x)

    def value(self) -> Tensor:
        return self.y.detach()

    def transposed(self, u: Tensor) -> Tensor:
        return self._in_chunks(u, self._transposed)

    def forward(self, v: Tensor) -> Tensor:
        return self._in_chunks(v, self._stepped if self.differences else self._forward)

    def _in_chunks(self, directions: Tensor, one: Callable[[Tensor], Tensor]) -> Tensor:
        found = [one(part.permute(2, 0, 1).contiguous()) for part in torch.split(directions, self.most, -1)]
        return torch.cat(found).permute(1, 2, 0)

    def _transposed(self, u: Tensor) -> Tensor:
        with plain_attention():
            [found] = torch.autograd.grad(self.y, self.x, u, is_grads_batched=True, retain_graph=True)
        return found

    def _forward(self, v: Tensor) -> Tensor:
        with torch.enable_grad(), plain_attention():
            u = torch.zeros_like(self.y, requires_grad=True)
            [back] = torch.autograd.grad(self.y, self.x, u, create_graph=True)
            [found] = torch.autograd.grad(back, u, v, is_grads_batched=True)
        return found

    def _stepped(self, v: Tensor) -> Tensor:
        """Central differences, `n sample d_model` at once; the first of them once more with twice the step."""
        length = self.x.norm(dim=-1)[None, :, None]
        size = STEP.get(self.call.hidden.dtype, COARSE_STEP) * length / v.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        found: Tensor = self._difference(size * v) / size
        twice = self._difference(2 * size[:1] * v[:1]) / (2 * size[:1])
        branch = found[0] - v[0] * (self.t_in == self.t_out)[:, None]
        off = (found[0] - twice[0]).double().norm(dim=-1) / branch.double().norm(dim=-1).clamp(min=1e-30)
        self.step_error = torch.maximum(self.step_error, off.cpu())
        return found

    def _difference(self, step: Tensor) -> Tensor:
        """(block(x + step) - block(x - step)) / 2."""
        block = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out, copies=2 * len(step))
        x = torch.stack([self.x + step, self.x - step])
        ahead, behind = torch.unbind(block(x.reshape(-1, step.shape[-1])).reshape(x.shape))
        return (ahead - behind) / 2


class Jacobian:
    """The Jacobians of one block without its skip connection, one for each sample, as linear maps. A context.

    J_{t_in t_out} = d (block(X) - X)_{t_out} / d x_{t_in}, for samples with t_in <= t_out.

    Args:
        call: the block with its own arguments.
        row: `sample`, which row of the batch each sample stands in.
        t_in: `sample`, the token that is varied.
        t_out: `sample`, the token whose change is measured.
        memory_mb: megabytes that products with many directions may take at once.
        differences: by finite differences of the block's values, where nothing can be differentiated.
        narrow: whether the block may be called on the samples' tokens alone; tests and benchmarks say no.

    Attributes:
        dtype: of all that is computed: float64 if the model is, float32 otherwise; the model's own where its weights are
            elsewhere.
        general: whether whole rows run through the block, because it has no form for a few tokens.
        differs: whether the block, called again, did not give what it gave.
    """

    def __init__(
        self,
        call: BlockCall,
        row: Tensor,
        t_in: Tensor,
        t_out: Tensor,
        memory_mb: float,
        differences: bool = False,
        narrow: bool = True,
    ) -> None:
        own = call.hidden.dtype
        self.dtype = own if own == torch.float64 or is_elsewhere(call) else torch.float32
        self.call, self.row, self.t_in, self.t_out = call, row, t_in, t_out
        self.room, self.differences, self.narrow = memory_mb * 1e6, differences, narrow and not differences
        self.d_model = call.hidden.shape[-1]
        self.skip = (t_in == t_out).to(self.dtype)[:, None, None]
        self.parts: list[Narrow | Wide] = []
        self.general, self.differs = False, False
        self.widened = Widened(call.block, self.dtype)

    def __enter__(self) -> Jacobian:
        self.widened.__enter__()
        try:
            self.parts = self._few() if self.narrow else []
            self.general = not self.parts
            self.parts = self.parts or self._whole()
            for part in self.parts:
                given = self.call.output[self.row[part.which], self.t_out[part.which]].to(self.dtype)
                self.differs = self.differs or not alike(part.value(), given, self.call.hidden.dtype)
        except BaseException:
            self.widened.__exit__()
            raise
        return self

    def __exit__(self, *_error: Any) -> None:
        self.parts = []
        self.widened.__exit__()

    def _few(self) -> list[Narrow | Wide]:
        """Samples by their tokens alone; none of them where the block cannot be called so."""
        same = self.t_in == self.t_out
        found: list[Narrow | Wide] = []
        for which in (same.nonzero()[:, 0], (~same).nonzero()[:, 0]):
            if not len(which):
                continue
            try:
                with plain_attention():
                    few = FewTokens(self.call, self.dtype, self.row[which], self.t_in[which], self.t_out[which])
                part = Narrow(few, which, self.room)
                near = part.value()
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                # A block of another make, which cannot be called on a few tokens: whole rows always can.
                return []
            if not alike(near, few.whole[self.row[which], self.t_out[which]], self.dtype):
                return []
            found.append(part)
        return found

    def _whole(self) -> list[Narrow | Wide]:
        """As few calls of the block on whole rows as there are samples in a row."""
        parts: list[Narrow | Wide] = []
        waiting = torch.arange(len(self.row), device=self.row.device)
        while len(waiting):
            rows = self.row[waiting]
            first = torch.stack([(rows == row).nonzero()[0, 0] for row in torch.unique(rows)])
            which = waiting[first]
            at = self.row[which], self.t_in[which], self.t_out[which]
            parts.append(Wide(self.call, self.dtype, *at, which, self.room, self.differences))
            kept = torch.ones(len(waiting), dtype=torch.bool, device=waiting.device)
            kept[first] = False
            waiting = waiting[kept]
        return parts

    @property
    def step_error(self) -> Tensor:
        """`sample`, of finite differences: how far a product is from that with twice the step, as a share; 0 otherwise."""
        found = torch.zeros(len(self.row), dtype=torch.float64)
        for part in self.parts:
            if isinstance(part, Wide):
                found[part.which.cpu()] = part.step_error
        return found

    def transposed(self, u: Tensor) -> Tensor:
        """J'u, `sample d_model n` for the same."""
        out = torch.empty_like(u)
        for part in self.parts:
            out[part.which] = part.transposed(u[part.which])
        return out - self.skip * u

    def forward(self, v: Tensor) -> Tensor:
        """J v, `sample d_model n` for the same."""
        out = torch.empty_like(v)
        for part in self.parts:
            out[part.which] = part.forward(v[part.which])
        return out - self.skip * v

    def dense(self) -> Tensor:
        """J, `sample d_model d_model`: output by input."""
        eye = torch.eye(self.d_model, dtype=self.dtype, device=self.row.device).expand(len(self.row), -1, -1)
        return self.forward(eye) if self.differences else self.transposed(eye).mT


def plain_attention() -> Any:
    """A context in which attention is made of products and a softmax, which can be differentiated twice and in batches."""
    return attention.sdpa_kernel([attention.SDPBackend.MATH])


def alike(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two residuals of each sample are the same to what computing in a dtype explains."""
    allowed = ALIKE.get(dtype, 8 * torch.finfo(dtype).eps)
    return bool(((a - b).norm(dim=-1) <= allowed * b.norm(dim=-1)).all())


def is_elsewhere(call: BlockCall) -> bool:
    """Whether the block's weights are in another process, where they cannot be widened."""
    module = getattr(call.block, "_module", call.block)
    first = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    return first is not None and first.is_meta


@dataclass(frozen=True)
class Top:
    """The top singular triplets of each sample's Jacobian.

    Attributes:
        u: `sample d_model k`, left.
        s: `sample k`, descending.
        v: `sample d_model k`, right.
        residual: `sample`, the largest |J'u_i - s_i v_i| over i, as a share of s_1; 0 of a full decomposition.
        products: how many products with J or J' they took.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    residual: Tensor
    products: int


def top_of(dense: Tensor, k: int) -> Top:
    """By the full decomposition of `sample d_model d_model`."""
    u, s, vh = torch.linalg.svd(dense)
    exact = torch.zeros(len(dense), dtype=dense.dtype, device=dense.device)
    return Top(u[..., :k], s[..., :k], vh[..., :k, :].mT, exact, dense.shape[-1])


def krylov(jacobian: Jacobian, k: int, seed: int) -> Top:
    """By block Golub-Kahan-Lanczos with full reorthogonalisation, from a random block, until residuals are small.

    Golub, Luk and Overton 1981; randomised block Krylov in Musco and Musco 2015 (arXiv 1504.05477).
    """
    samples, d = len(jacobian.row), jacobian.d_model
    width = min(k + SPARE, d)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(samples, d, width, generator=generator, dtype=torch.float64)
    block = torch.linalg.qr(start.to(jacobian.row.device, jacobian.dtype))[0]
    left, right, images, back = [list[Tensor]() for _ in range(4)]
    products = 0
    while True:
        right.append(block)
        images.append(jacobian.forward(block))
        left.append(orthogonal_to(images[-1], left))
        back.append(jacobian.transposed(left[-1]))
        products += 2 * block.shape[-1]
        u_all, v_all = torch.cat(left, -1), torch.cat(right, -1)
        image, back_all = torch.cat(images, -1), torch.cat(back, -1)
        x, s, yh = torch.linalg.svd(u_all.mT @ image)
        u, v = u_all @ x[..., :k], v_all @ yh[..., :k, :].mT
        off = (back_all @ x[..., :k] - v * s[..., None, :k]).norm(dim=-2).amax(-1) / s[..., 0].clamp(min=1e-30)
        left_room = d - v_all.shape[-1]
        if left_room == 0 or bool((off <= TOLERANCE).all()):
            return Top(u, s[..., :k], v, off, products)
        block = orthogonal_to(back[-1][..., : min(width, left_room)], right)


def orthogonal_to(block: Tensor, basis: list[Tensor]) -> Tensor:
    """An orthonormal basis of what the block adds to others, completed at random order of rounding where it adds nothing."""
    for _ in range(3):
        for known in basis:
            block = block - known @ (known.mT @ block)
        block = torch.linalg.qr(block)[0]
    return block
