"""Products of a block's Jacobian with vectors, on single tokens or on whole rows.

This module is serialised by value and runs on NDIF servers too, so it uses only torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..activations.block_call import BlockCall, FewTokens, plain_attention, whole_block
from ..activations.norms import norms

# Largest relative difference between a block's output and its replay, by dtype of the model. Models in float64 compute
# norms, rotations and softmax in float32.
REPLAY_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Factor by which the skip-connection check lengthens a residual. The branch of a pre-norm block is the same for residuals of
# this length and of twice this length, so the two outputs differ exactly as the residuals do.
LENGTHENING = 1e4
# Autograd nodes of views, copies and changes in place, which pass a gradient or parts of it on unchanged.
VIEWS = ("Alias", "AsStrided", "Index", "IndexPut", "Reshape", "ReshapeAlias", "Select", "Slice", "UnsafeView", "View")
IDENTITY_NODES = (*VIEWS, "Clone", "CopyBackwards", "CopySlices", "ToCopy")


def lengthening(x: Tensor) -> Tensor:
    """Scale factor of each residual, for the check that a block has a skip connection.

    It is `LENGTHENING`, or less if the dtype would overflow.

    Args:
        x: `sample d_model`, residuals.

    Returns:
        `sample 1`.
    """
    largest = torch.finfo(x.dtype).max / 4 / norms(x)[..., None].clamp(min=1e-30)
    factor: Tensor = largest.clamp(max=LENGTHENING).to(x.dtype)
    return factor


def adds_input(x: Tensor, y: Tensor) -> bool:
    """Whether the autograd graph of y adds x, or entries of x, to another term.

    The sums, reshapes and copies in the graph show it.

    Args:
        x: a leaf of the autograd graph.
        y: a tensor computed from x.
    """
    gradient = _backpropagate_sums(y.grad_fn, torch.ones_like(y), x)
    if gradient is None:
        return False
    # Every entry of y adds exactly one entry of x, with factor 1.
    return int((gradient == 1).sum()) == int(gradient.count_nonzero()) == y.numel()


def _backpropagate_sums(node: Any, gradient: Tensor, x: Tensor) -> Tensor | None:
    """Backpropagate `gradient` to x through sums and `IDENTITY_NODES` only; None if no such path exists."""
    if node is None:
        return None
    if getattr(node, "variable", None) is x:
        return gradient
    name = node.name().removeprefix("torch::autograd::").removesuffix("0").removesuffix("Backward")
    if name not in IDENTITY_NODES and (name != "Add" or getattr(node, "_saved_alpha", 1) != 1):
        return None
    output = node(gradient)
    input_gradients = (output,) if isinstance(output, Tensor) else output
    total: Tensor | None = None
    # The node of a change in place gives a gradient of its constants too.
    for (next_node, _), input_gradient in zip(node.next_functions, input_gradients, strict=False):
        if input_gradient is None:
            continue
        term = _backpropagate_sums(next_node, input_gradient, x)
        if term is not None:
            total = term if total is None else total + term
    return total


def reproduces(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two residuals are equal in every sample, up to the rounding of a dtype.

    Args:
        a: `sample d_model`, output of the replayed block.
        b: `sample d_model`, output in the model's forward pass.
        dtype: dtype of the model's activations.
    """
    allowed = REPLAY_TOLERANCE.get(dtype, 8 * torch.finfo(dtype).eps)
    return bool((norms(a - b) <= allowed * norms(b)).all())


def is_remote(call: BlockCall) -> bool:
    """Whether the weights of a block are in another process."""
    module = getattr(call.block, "_module", call.block)
    if not isinstance(module, torch.nn.Module) or any(hasattr(part, "_hf_hook") for part in module.modules()):
        # Weights that accelerate has offloaded are loaded into this process.
        return False
    first = next(module.parameters(), None)
    return first is not None and first.is_meta


# Largest difference between the single-token replay and the block's output in the full sequence, relative to the norm of the
# block's update, plus a tolerance relative to the norm of the residual.
UPDATE_TOLERANCE = 1e-4
RESIDUAL_TOLERANCE = 2e-6
# Copies of a token in one replay: enough for large matrix products, few enough for the attention scores between them.
MOST_COPIES = 128


class TokenReplayMismatch(Exception):
    """Raised if a block's replay on single tokens fails or gives another output."""


class TokenProducts:
    """Products of Jacobians with vectors, by running the block again on single tokens. Each vector has a copy of the token.

    Args:
        few_tokens: the block as a function of these tokens.
        sample: indices of the samples.
        value: `sample d_model`, the block's output in the full sequence at the tokens that are read.
        memory: bytes for one product.
    """

    def __init__(self, few_tokens: FewTokens, sample: Tensor, value: Tensor, memory: float) -> None:
        self.few_tokens = few_tokens
        self.sample = sample
        self.value = value
        samples, d = few_tokens.x.shape
        # Rough memory of a copy: some tens of residuals, and the attention scores of d / 64 heads.
        floats = samples * few_tokens.positions.shape[1] * (48 * d + d // 16 * (few_tokens.pos + MOST_COPIES))
        self.copies = max(1, min(MOST_COPIES, int(memory / (floats * few_tokens.x.dtype.itemsize))))
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def graph(self, n: int) -> tuple[Tensor, Tensor]:
        """Block input with `n` copies of each token, and block output with its autograd graph.

        Both are cached by `n`.

        Raises:
            TokenReplayMismatch: the output of a copy differs from the block's output in the full sequence.
        """
        if n not in self.graphs:
            x = self.few_tokens.x[:, None].repeat(1, n, 1)
            with torch.enable_grad(), plain_attention():
                y = self._replay(x.requires_grad_())
            self._check(y.detach())
            self.graphs[n] = (x, y)
        return self.graphs[n]

    def _replay(self, x: Tensor) -> Tensor:
        try:
            return self.few_tokens.block(x.shape[1])(x)
        except torch.OutOfMemoryError:
            # The full sequence would need more memory still.
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise TokenReplayMismatch from error

    def _check(self, y: Tensor) -> None:
        expected = self.value[:, None]
        update = (expected - self.few_tokens.x_out[:, None]).norm(dim=-1)
        allowed = UPDATE_TOLERANCE * update + RESIDUAL_TOLERANCE * expected.norm(dim=-1)
        if y.shape[::2] != expected.shape[::2] or not bool(((y - expected).norm(dim=-1) <= allowed).all()):
            raise TokenReplayMismatch

    def lengthened_difference(self) -> Tensor:
        """Change f(2cx) - f(cx) of the output of block f (`sample d_model`); x is its input, c is `lengthening(x)`.

        A pre-norm block with a skip connection gives about cx.

        An unchanged copy of the token runs along and is checked.

        Raises:
            TokenReplayMismatch: the output of the unchanged copy differs from the block's output in the full sequence.
        """
        lengthened = lengthening(self.few_tokens.x) * self.few_tokens.x
        with torch.no_grad(), plain_attention():
            y = self._replay(torch.stack([self.few_tokens.x, lengthened, 2 * lengthened], 1))
        self._check(y[:, :1])
        return y[:, 2] - y[:, 1]

    def adds_input(self) -> bool:
        """Whether the block has a skip connection."""
        return adds_input(*self.graph(1))

    def in_chunks(self, directions: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `product` to `directions` (`sample d_model n`) in chunks of equal size.

        The last chunk is padded with zeros.
        """
        total = directions.shape[-1]
        # Both divisions round up. Equal sizes need one graph.
        chunks = -(-total // self.copies)
        size = -(-total // chunks)
        images = []
        for start in range(0, total, size):
            chunk = directions[..., start : start + size]
            padded = torch.nn.functional.pad(chunk, (0, size - chunk.shape[-1]))
            images.append(product(padded.mT.contiguous()))
        return torch.cat(images, 1)[:, :total].mT

    def transposed(self, u: Tensor) -> Tensor:
        """Products J'u with the block's Jacobian, skip connection included; `sample n d_model`."""
        x, y = self.graph(u.shape[1])
        with plain_attention():
            [image] = torch.autograd.grad(y, x, u, retain_graph=True)
        return image

    def forward(self, v: Tensor) -> Tensor:
        """Products J v by double backward. They are the derivative of J'u with respect to u, applied to v."""
        x, y = self.graph(v.shape[1])
        with torch.enable_grad(), plain_attention():
            u = torch.zeros_like(y, requires_grad=True)
            [back] = torch.autograd.grad(y, x, u, create_graph=True)
            [image] = torch.autograd.grad(back, u, v)
        return image


# Step of finite differences relative to the residual's norm, for float32 and float64, and for half precision: rounding and
# curvature are both small at this step.
STEP = 1e-3
HALF_PRECISION_STEP = 3e-2
# Bytes of one product on a CPU, which is fastest where the product's working set is not much larger than its caches.
CPU_MEMORY = 3e8


class RowProducts:
    """Products of Jacobians with vectors, by running the block again on whole rows, one sample per row.

    Every block allows this. `TokenProducts` does the same with less work if the block allows it.

    Args:
        call: the block with its own arguments.
        dtype: to compute in.
        row: `sample`, the row of the batch that holds each sample; no row twice.
        t_in: `sample`, the token that is varied.
        t_out: `sample`, the token whose change is measured.
        sample: indices of the samples.
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
        sample: Tensor,
        memory: float,
        differences: bool,
    ) -> None:
        self.call = call
        self.dtype = dtype
        self.row = row
        self.t_in = t_in
        self.t_out = t_out
        self.sample = sample
        self.differences = differences
        self.step_error = torch.zeros(len(row), dtype=torch.float64)
        batch, pos, d = call.hidden.shape
        memory = min(memory, CPU_MEMORY) if call.hidden.device.type == "cpu" else memory
        # As in `TokenProducts`: some tens of residuals, and the attention scores of d / 64 heads.
        floats = batch * pos * (48 * d + d // 16 * pos)
        self.directions_at_once = max(1, int(memory / (floats * dtype.itemsize)))
        self._begin()
        self.value = self.y.detach()

    def _begin(self) -> None:
        """Run the block, and keep its autograd graph."""
        self.block = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out)
        self.x = self.call.hidden[self.row, self.t_in].to(self.dtype)
        with torch.set_grad_enabled(not self.differences), plain_attention():
            self.x.requires_grad_(not self.differences)
            self.y = self.block(self.x)
        self.batched = self.differences and self._can_be_batched()

    def _can_be_batched(self) -> bool:
        """Whether the block gives equal outputs for copies of its batch. It does not if an argument has a row per head."""
        try:
            block = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out, copies=2)
            twice = block(self.x.repeat(2, 1))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return False
        return reproduces(twice, self.y.repeat(2, 1), self.call.hidden.dtype)

    def lengthened_difference(self) -> Tensor:
        """Change f(2cx) - f(cx) of the output of block f (`sample d_model`); x is its input, c is `lengthening(x)`."""
        x = self.x.detach()
        with torch.no_grad(), plain_attention():
            return self.block(2 * lengthening(x) * x) - self.block(lengthening(x) * x)

    def adds_input(self) -> bool:
        """Whether the block has a skip connection. False for finite differences, which do not show it."""
        return not self.differences and adds_input(self.x, self.y)

    def in_chunks(self, directions: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `product` to `directions` (`sample d_model n`) in chunks."""
        chunks = torch.split(directions, self.directions_at_once, -1)
        images = [product(chunk.permute(2, 0, 1).contiguous()) for chunk in chunks]
        return torch.cat(images).permute(1, 2, 0)

    def transposed(self, u: Tensor) -> Tensor:
        """Products J'u with the block's Jacobian, skip connection included; `n sample d_model`."""
        with plain_attention():
            [image] = torch.autograd.grad(self.y, self.x, u, is_grads_batched=True, retain_graph=True)
        return image

    def forward(self, v: Tensor) -> Tensor:
        """Products J v, skip connection included; `n sample d_model`."""
        if self.differences:
            return self._by_differences(v)
        with torch.enable_grad(), plain_attention():
            u = torch.zeros_like(self.y, requires_grad=True)
            [back] = torch.autograd.grad(self.y, self.x, u, create_graph=True)
            [image] = torch.autograd.grad(back, u, v, is_grads_batched=True)
        return image

    def _by_differences(self, v: Tensor) -> Tensor:
        """J v by central differences. The first direction is repeated with twice the step, for `step_error`."""
        length = self.x.norm(dim=-1)[None, :, None]
        relative = STEP if self.call.hidden.dtype in (torch.float32, torch.float64) else HALF_PRECISION_STEP
        size = relative * length / v.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        image: Tensor = self._difference(size * v) / size
        twice = self._difference(2 * size[:1] * v[:1]) / (2 * size[:1])
        branch = image[0] - v[0] * (self.t_in == self.t_out)[:, None]
        change = (image[0] - twice[0]).double().norm(dim=-1)
        # A branch that is nearly zero would make any rounding a large relative error.
        scale = torch.maximum(branch.norm(dim=-1), 1e-4 * v[0].norm(dim=-1)).double()
        error = change / scale
        self.step_error = torch.maximum(self.step_error, error.cpu())
        return image

    def _difference(self, step: Tensor) -> Tensor:
        """Central differences (f(x + step) - f(x - step)) / 2 of the block f (`n sample d_model`)."""
        if not self.batched:
            differences = []
            for direction_step in step:
                ahead = self.block(self.x + direction_step)
                behind = self.block(self.x - direction_step)
                differences.append((ahead - behind) / 2)
            return torch.stack(differences)
        block = whole_block(self.call, self.dtype, self.row, self.t_in, self.t_out, copies=2 * len(step))
        x = torch.stack([self.x + step, self.x - step])
        ahead, behind = torch.unbind(block(x.reshape(-1, step.shape[-1])).reshape(x.shape))
        return (ahead - behind) / 2


class GraphProducts(RowProducts):
    """Products of Jacobians with vectors, from the autograd graph of the forward pass.

    The block is not replayed, see `BlockCall.graph`.

    Without `super()`, which a server cannot resolve in a class that is shipped by value.
    """

    def _begin(self) -> None:
        graph = self.call.graph
        assert graph is not None
        self.x = self.call.hidden
        with torch.enable_grad():
            # Zero is added, because an edit may replace the output by a constant, whose Jacobian is zero.
            self.y = graph[self.row, self.t_out] + 0 * self.x[self.row, self.t_out]

    def transposed(self, u: Tensor) -> Tensor:
        return RowProducts.transposed(self, u)[:, self.row, self.t_in]

    def forward(self, v: Tensor) -> Tensor:
        v_of_batch = v.new_zeros(len(v), *self.x.shape)
        v_of_batch[:, self.row, self.t_in] = v
        return RowProducts.forward(self, v_of_batch)
