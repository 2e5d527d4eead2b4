"""Products with Jacobians by running the block on whole rows, with gradients or finite differences.

This module is serialised by value and runs on NDIF servers too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..activations.block_call import BlockCall, plain_attention, whole_block
from .replay import adds_input, lengthening, reproduces

# Step of finite differences relative to the residual's norm, for float32 and float64, and for half precision: rounding and
# curvature are both small at this step.
STEP, HALF_PRECISION_STEP = 1e-3, 3e-2
# Bytes of one product on a CPU, which is fastest where the product's working set is not much larger than its caches.
CPU_MEMORY = 3e8


class RowProducts:
    """Products with Jacobians by running the block on whole rows, with one sample per row.

    Every block allows this. `TokenProducts` does the same with less work if the block allows it.

    Args:
        call: the block with its own arguments.
        dtype: to compute in.
        row: `sample`, the row of the batch that holds each sample; no row twice.
        t_in: `sample`, the token that is varied.
        t_out: `sample`, the token whose change is measured.
        which: indices of the samples.
        memory: bytes for one product.
        differences: whether to use finite differences, which give only products with J.
    """

    def __init__(
        self,
        call: BlockCall,
        dtype: torch.dtype,
        row: Tensor,
        t_in: Tensor,
        t_out: Tensor,
        which: Tensor,
        memory: float,
        differences: bool,
    ) -> None:
        self.call, self.dtype, self.row, self.t_in, self.t_out, self.which = call, dtype, row, t_in, t_out, which
        self.differences, self.step_error = differences, torch.zeros(len(row), dtype=torch.float64)
        batch, pos, d = call.hidden.shape
        memory = min(memory, CPU_MEMORY) if call.hidden.device.type == "cpu" else memory
        self.most = max(1, int(memory / (batch * pos * (48 * d + d // 16 * pos) * dtype.itemsize)))
        self._begin()

    def _begin(self) -> None:
        """Run the block, and keep its autograd graph."""
        call, row, differences = self.call, self.row, self.differences
        block = whole_block(call, self.dtype, row, self.t_in, self.t_out)
        self.x = call.hidden[row, self.t_in].to(self.dtype)
        with torch.set_grad_enabled(not differences), plain_attention():
            self.x.requires_grad_(not differences)
            self.y = block(self.x)
        self.block = block
        self.batched = differences and self._can_be_batched()

    def _can_be_batched(self) -> bool:
        """Whether the block gives equal outputs for copies of its batch. Blocks with arguments of one row per head do not."""
        try:
            twice = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out, copies=2)(self.x.repeat(2, 1))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return False
        return reproduces(twice, self.y.repeat(2, 1), self.call.hidden.dtype)

    def lengthened_difference(self) -> Tensor:
        """Block output at 2cx minus block output at cx, with c the factor of `lengthening`, `sample d_model`."""
        x = self.x.detach()
        with torch.no_grad(), plain_attention():
            return self.block(2 * lengthening(x) * x) - self.block(lengthening(x) * x)

    def value(self) -> Tensor:
        """The block's output at each sample's token `t_out`, `sample d_model`."""
        return self.y.detach()

    def adds_input(self) -> bool:
        """Whether the block has a skip connection; False without gradients, because it is then unknown."""
        return not self.differences and adds_input(self.x, self.y)

    def transposed(self, u: Tensor) -> Tensor:
        """Products J'u of the block with its skip connection.

        Args:
            u: `sample d_model n`, n directions for each sample.
        """
        return self._in_chunks(u, self._transposed)

    def forward(self, v: Tensor) -> Tensor:
        """Products J v of the block with its skip connection.

        Args:
            v: `sample d_model n`, n directions for each sample.
        """
        return self._in_chunks(v, self._by_differences if self.differences else self._forward)

    def _in_chunks(self, directions: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        images = [product(chunk.permute(2, 0, 1).contiguous()) for chunk in torch.split(directions, self.most, -1)]
        return torch.cat(images).permute(1, 2, 0)

    def _transposed(self, u: Tensor) -> Tensor:
        with plain_attention():
            [image] = torch.autograd.grad(self.y, self.x, u, is_grads_batched=True, retain_graph=True)
        return image

    def _forward(self, v: Tensor) -> Tensor:
        with torch.enable_grad(), plain_attention():
            u = torch.zeros_like(self.y, requires_grad=True)
            [back] = torch.autograd.grad(self.y, self.x, u, create_graph=True)
            [image] = torch.autograd.grad(back, u, v, is_grads_batched=True)
        return image

    def _by_differences(self, v: Tensor) -> Tensor:
        """J v by central differences; the first direction is repeated with twice the step, for `step_error`."""
        length = self.x.norm(dim=-1)[None, :, None]
        relative = STEP if self.call.hidden.dtype in (torch.float32, torch.float64) else HALF_PRECISION_STEP
        size = relative * length / v.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        image: Tensor = self._difference(size * v) / size
        twice = self._difference(2 * size[:1] * v[:1]) / (2 * size[:1])
        branch = image[0] - v[0] * (self.t_in == self.t_out)[:, None]
        error = (image[0] - twice[0]).double().norm(dim=-1) / torch.maximum(
            branch.norm(dim=-1), 1e-4 * v[0].norm(dim=-1)
        ).double()
        self.step_error = torch.maximum(self.step_error, error.cpu())
        return image

    def _difference(self, step: Tensor) -> Tensor:
        """Central difference (block(x + step) - block(x - step)) / 2 for each of `n sample d_model` steps."""
        if not self.batched:
            return torch.stack([(self.block(self.x + one) - self.block(self.x - one)) / 2 for one in step])
        block = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out, copies=2 * len(step))
        x = torch.stack([self.x + step, self.x - step])
        ahead, behind = torch.unbind(block(x.reshape(-1, step.shape[-1])).reshape(x.shape))
        return (ahead - behind) / 2


class GraphProducts(RowProducts):
    """Products with Jacobians from the autograd graph of the forward pass, `BlockCall.graph`: the block is not replayed.

    Without `super()`, which a server cannot resolve in a class that is shipped by value.
    """

    def _begin(self) -> None:
        graph = self.call.graph
        assert graph is not None
        self.x = self.call.hidden
        with torch.enable_grad():
            # Plus zero, because an edit may replace the output by a constant, whose Jacobian is zero.
            self.y = graph[self.row, self.t_out] + 0 * self.x[self.row, self.t_out]

    def _transposed(self, u: Tensor) -> Tensor:
        return RowProducts._transposed(self, u)[:, self.row, self.t_in]

    def _forward(self, v: Tensor) -> Tensor:
        whole = v.new_zeros(len(v), *self.x.shape)
        whole[:, self.row, self.t_in] = v
        return RowProducts._forward(self, whole)
