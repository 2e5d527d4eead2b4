"""Jacobians of blocks: products with them and the whole matrix, for many samples at once.

All of it travels to NDIF servers by value, as source, see `calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from ..models.block_call import BlockCall, FewTokens, Widened, whole_block

# A step of finite differences, as a share of the residual's norm: rounding and curvature are both small there. Models in
# float64 compute norms, rotations and softmax in float32.
STEP, COARSE_STEP = 1e-3, 3e-2
# Beyond this share of the residual's norm, what a block gives when it is called again is not what it gave.
ALIKE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Beyond these shares of what the block adds and of the residual, a token alone is not the token in its row.
NARROW_BRANCH, NARROW_WHOLE = 1e-4, 2e-6
# A block that adds to residuals so much longer, and twice that, gives two that differ as they do: its branch begins with a
# norm, or ends in one, and is the same for both.
LONGER = 1e4
# What a gradient passes unchanged on its way from what a block gives to what it was given.
IDENTITY = ("Alias", "Clone", "Index", "IndexPut", "Reshape", "ReshapeAlias", "ToCopy", "UnsafeView", "View")
# As many copies of a token at once: enough for large matrix products, few enough for the scores between them.
COPIES = 128
CPU_ROOM = 3e8


class NotAlone(Exception):
    """A block does not do to a token alone what it does to it in its row."""


class TokenProducts:
    """Products with the Jacobians of samples by their tokens alone, in copies, one for each direction.

    Args:
        few: the block as a function of these tokens.
        which: indices of the samples.
        given: `sample d_model`, what the block gives at the tokens that are read, when whole rows run through it.
        room: bytes for one product.
    """

    def __init__(self, few: FewTokens, which: Tensor, given: Tensor, room: float) -> None:
        self.few, self.which, self.given = few, which, given
        samples, d = few.x.shape
        # Roughly what a copy takes: some tens of residuals, and attention scores of some d / 64 heads.
        floats = samples * len(few.at[0]) * (48 * d + d // 16 * (few.pos + COPIES))
        self.most = max(1, min(COPIES, int(room / (floats * few.x.dtype.itemsize))))
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def graph(self, n: int) -> tuple[Tensor, Tensor]:
        """Copies of the tokens and what the block gives for them; kept, as all products with as many directions need it.

        Raises:
            NotAlone: for one of the copies that is not what it gives in the row.
        """
        if n not in self.graphs:
            x = self.few.x[:, None].repeat(1, n, 1)
            with torch.enable_grad(), plain_attention():
                y = self._run(x.requires_grad_())
            self._compare(y.detach())
            self.graphs[n] = x, y
        return self.graphs[n]

    def _run(self, x: Tensor) -> Tensor:
        try:
            return self.few.block(x.shape[1])(x)
        except torch.OutOfMemoryError:
            # Whole rows would take more still.
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise NotAlone from error

    def _compare(self, y: Tensor) -> None:
        whole = self.given[:, None]
        allowed = NARROW_BRANCH * (whole - self.few.out[:, None]).norm(dim=-1) + NARROW_WHOLE * whole.norm(dim=-1)
        if y.shape[::2] != whole.shape[::2] or not bool(((y - whole).norm(dim=-1) <= allowed).all()):
            raise NotAlone

    def longer(self) -> Tensor:
        """`sample d_model`, what the block gives for the token that is varied, `stretch` times as long, up to twice that.

        Beside them runs a copy that is as it was.

        Raises:
            NotAlone: for the other copy that is not what it gives in the row.
        """
        long = stretch(self.few.x) * self.few.x
        with torch.no_grad(), plain_attention():
            y = self._run(torch.stack([self.few.x, long, 2 * long], 1))
        self._compare(y[:, :1])
        return y[:, 2] - y[:, 1]

    def value(self) -> Tensor:
        return self.given

    def adds(self) -> bool:
        """Whether the block's own operations add what it is given to something."""
        return is_added(*self.graph(1))

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


class RowProducts:
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
        self.block = block
        self.together = differences and self._can_be_copied()

    def _can_be_copied(self) -> bool:
        """Whether the block does to copies of its batch what it does to the batch: not if an argument has rows for heads."""
        try:
            twice = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out, copies=2)(self.x.repeat(2, 1))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return False
        return alike(twice, self.y.repeat(2, 1), self.call.hidden.dtype)

    def longer(self) -> Tensor:
        x = self.x.detach()
        with torch.no_grad(), plain_attention():
            return self.block(2 * stretch(x) * x) - self.block(stretch(x) * x)

    def value(self) -> Tensor:
        return self.y.detach()

    def adds(self) -> bool:
        return not self.differences and is_added(self.x, self.y)

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
        share = STEP if self.call.hidden.dtype in (torch.float32, torch.float64) else COARSE_STEP
        size = share * length / v.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        found: Tensor = self._difference(size * v) / size
        twice = self._difference(2 * size[:1] * v[:1]) / (2 * size[:1])
        branch = found[0] - v[0] * (self.t_in == self.t_out)[:, None]
        off = (found[0] - twice[0]).double().norm(dim=-1) / torch.maximum(
            branch.norm(dim=-1), 1e-4 * v[0].norm(dim=-1)
        ).double()
        self.step_error = torch.maximum(self.step_error, off.cpu())
        return found

    def _difference(self, step: Tensor) -> Tensor:
        """(block(x + step) - block(x - step)) / 2."""
        if not self.together:
            return torch.stack([(self.block(self.x + one) - self.block(self.x - one)) / 2 for one in step])
        block = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out, copies=2 * len(step))
        x = torch.stack([self.x + step, self.x - step])
        ahead, behind = torch.unbind(block(x.reshape(-1, step.shape[-1])).reshape(x.shape))
        return (ahead - behind) / 2


class Jacobian:
    """The Jacobians of one block without its skip connection, one for each sample, as linear maps. A context.

    J_{t_in t_out} = d (block(X) - X)_{t_out} / d x_{t_in}, for each sample; 0 for t_in > t_out of a causal model.

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
        no_skip: whether what enters does not go through to the output, so that block minus input is no branch.
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
        self.parts: list[TokenProducts | RowProducts] = []
        self.general, self.differs, self.no_skip = False, False, False
        self.widened = Widened(call.block, self.dtype)

    def __enter__(self) -> Jacobian:
        self.widened.__enter__()
        try:
            self.parts = self._few() if self.narrow else []
            try:
                self._look()
            except NotAlone:
                self.parts = []
            if not self.parts:
                self.general, self.parts = True, self._whole()
                self.differs = self.no_skip = False
                self._look()
        except BaseException:
            self.widened.__exit__()
            raise
        return self

    def __exit__(self, *_error: Any) -> None:
        self.parts = []
        self.widened.__exit__()

    def _look(self) -> None:
        """Whether the block gives what it gave, and lets through what enters."""
        for part in self.parts:
            at = self.row[part.which], self.t_out[part.which]
            before = self.call.hidden[at].to(self.dtype)
            given = self.call.output.to(before.device)[at].to(self.dtype)
            own = (self.t_in == self.t_out)[part.which]
            length = stretch(before)
            through = (part.longer() - length * before).norm(dim=-1) < length[:, 0] / 2 * before.norm(dim=-1)
            # A branch without any norm grows with what it is given.
            if bool((~through & own).any()) and not part.adds():
                self.no_skip = True
            self.differs = self.differs or not alike(part.value(), given, self.call.hidden.dtype)

    def _few(self) -> list[TokenProducts | RowProducts]:
        """Samples by their tokens alone; none of them where the block cannot be called so."""
        same = self.t_in == self.t_out
        found: list[TokenProducts | RowProducts] = []
        for which in (same.nonzero()[:, 0], (~same).nonzero()[:, 0]):
            if not len(which):
                continue
            row, t_in, t_out = self.row[which], self.t_in[which], self.t_out[which]
            try:
                with plain_attention():
                    few = FewTokens(self.call, self.dtype, row, t_in, t_out)
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                # A block of another make, which cannot be called on a few tokens: whole rows always can.
                return []
            found.append(TokenProducts(few, which, few.whole[row, t_out], self.room))
        return found

    @property
    def trouble(self) -> int:
        """0 for none, 1 for `differs`, 2 for `no_skip`, 3 for both."""
        return int(self.differs) + 2 * int(self.no_skip)

    def _whole(self) -> list[TokenProducts | RowProducts]:
        """As few calls of the block on whole rows as there are samples in a row."""
        parts: list[TokenProducts | RowProducts] = []
        waiting = torch.arange(len(self.row), device=self.row.device)
        while len(waiting):
            rows = self.row[waiting]
            first = torch.stack([(rows == row).nonzero()[0, 0] for row in torch.unique(rows)])
            which = waiting[first]
            at = self.row[which], self.t_in[which], self.t_out[which]
            parts.append(RowProducts(self.call, self.dtype, *at, which, self.room, self.differences))
            kept = torch.ones(len(waiting), dtype=torch.bool, device=waiting.device)
            kept[first] = False
            waiting = waiting[kept]
        return parts

    @property
    def step_error(self) -> Tensor:
        """`sample`, of finite differences: how far a product is from that with twice the step, as a share; 0 otherwise."""
        found = torch.zeros(len(self.row), dtype=torch.float64)
        for part in self.parts:
            if isinstance(part, RowProducts):
                found[part.which.cpu()] = part.step_error
        return found

    def transposed(self, u: Tensor) -> Tensor:
        """J'u, `sample d_model n` for the same."""
        return self._product("transposed", u)

    def forward(self, v: Tensor) -> Tensor:
        """J v, `sample d_model n` for the same."""
        return self._product("forward", v)

    def _product(self, kind: str, directions: Tensor) -> Tensor:
        out = torch.empty_like(directions)
        try:
            for part in self.parts:
                out[part.which] = getattr(part, kind)(directions[part.which])
        except NotAlone:
            # One copy was as it should be, but not so many: a window or a table of positions is over.
            self.general, self.parts = True, self._whole()
            return self._product(kind, directions)
        return out - self.skip * directions

    def dense(self) -> Tensor:
        """J, `sample d_model d_model`: output by input."""
        eye = torch.eye(self.d_model, dtype=self.dtype, device=self.row.device).expand(len(self.row), -1, -1)
        return self.forward(eye) if self.differences else self.transposed(eye).mT


def stretch(x: Tensor) -> Tensor:
    """`sample 1`, by how much a residual is made longer: `LONGER`, or less where float16 ends."""
    most = torch.finfo(x.dtype).max / 4 / x.norm(dim=-1, keepdim=True).double().clamp(min=1e-30)
    found: Tensor = most.clamp(max=LONGER).to(x.dtype)
    return found


def is_added(x: Tensor, y: Tensor) -> bool:
    """Whether y is x plus something, by the operations that made it: a path of sums and of what only moves numbers."""
    waiting, seen = [y.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is x:
            return True
        name = node.name().removesuffix("0").removesuffix("Backward")
        following = [one for one, _ in node.next_functions]
        if name in IDENTITY or (name == "Add" and getattr(node, "_saved_alpha", 1) == 1):
            waiting += following
    return False


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
