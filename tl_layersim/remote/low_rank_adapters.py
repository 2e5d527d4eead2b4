"""Low-rank adapters in the residual stream of an nnsight model, and their training steps.

nnsight ships the source of functions that run beside the model; they use local names and torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activations.block_call import first_tensor
from ..architectures.unembed import Unembed
from ..core.cross_entropy import cross_entropy, cross_entropy_slopes
from ..sources.nnsight import remote_lens
from ..sources.result_seals import sealed
from .failures import UnsafeAnswer

# Adapters "down", `adapter direction d_model`, and "up", `adapter d_model direction`; and Adam's moments "mean" and "square" of
# each.
Parts = dict[str, Tensor]
# Inputs of a step or an evaluation: tokens, positions with a target, targets, step number, learning rate; and the attended
# positions for heads that pool.
Item = dict[str, Any]
# Losses `layer`, summed over targets, and the number of targets.
LossSums = tuple[Tensor, int]
# Maximum number of logits in memory.
LOGITS_AT_ONCE = 2**23
# AdamW with torch's defaults.
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
ADAM_DECAY = 0.01


@dataclass(frozen=True)
class Patch:
    """Trained adapters of some blocks, for use inside a trace.

    Attributes:
        paths: module paths of the blocks, one for each adapter.
        down: the matrices A, `adapter direction d_model`.
        up: the matrices B, `adapter d_model direction`.
    """

    paths: tuple[str, ...]
    down: Tensor
    up: Tensor

    def apply(self, model: Any) -> None:
        """Apply the adapters inside a trace."""
        for number, path in enumerate(self.paths):
            block = model
            for name in path.split("."):
                block = getattr(block, name)
            adapt(block, self.down[number], self.up[number])


def adapt(block: Any, down: Tensor, up: Tensor) -> Tensor:
    """Replace the output h of a block with h + (h A') B' inside a trace; return the new output."""
    output = block.output
    h = first_tensor(output)
    # The product has the dtype of the adapter.
    with torch.autocast(device_type=h.device.type, enabled=False):
        change: Tensor = h.to(down.dtype) @ down.to(h.device).T @ up.to(h.device).T
        x = h + change.to(h.dtype)
    block.output = (x, *output[1:]) if isinstance(output, tuple) else x
    return x


def loss_and_gradient(
    blocks: list[Any],
    unembed: Unembed,
    is_remote: bool,
    at: list[int],
    item: Item,
    down: Tensor,
    up: Tensor,
    weights: list[float],
) -> tuple[Tensor, list[Tensor]]:
    """Cross-entropies of all layers, and the gradients of their weighted sum, inside a trace.

    The weighted sum is the aligned loss.

    Only one chunk of logits of one layer is held at a time. Its gradient with respect to the residual is computed at once, and
    a single backward pass through the blocks starts from all these gradients.

    Args:
        blocks: blocks of the model.
        unembed: final norm and head.
        is_remote: whether only the server knows the dtype of the weights.
        at: indices of the blocks with an adapter.
        item: see `Item`.
        down: the matrices A, `adapter direction d_model`.
        up: the matrices B, `adapter d_model direction`.
        weights: weights of the layers in the aligned loss.

    Returns:
        Losses `layer`, float64, summed over targets; and the gradients of the aligned loss for `down` and `up`, empty if
        neither requires a gradient.
    """
    streams = []
    for number, block in enumerate(blocks):
        if number in at:
            streams.append(adapt(block, down[at.index(number)], up[at.index(number)]))
        else:
            streams.append(first_tensor(block.output))
    head = remote_lens(unembed, streams[-1]) if is_remote else unembed
    sums = []
    # The residuals with a gradient, and the gradient of the aligned loss at each.
    ends = []
    slopes = []
    for x, weight in zip(streams, weights, strict=True):
        residual = read_at(head, x, item)
        targets = item["targets"].long().to(x.device)
        with torch.autocast(device_type=x.device.type, enabled=False):
            loss, slope = summed_cross_entropy(head, residual.detach(), targets, residual.requires_grad)
        sums.append(loss.cpu())
        if slope is not None:
            ends.append(residual)
            slopes.append(slope * (weight / len(targets)))
    gradients = list(torch.autograd.grad(ends, [down, up], slopes)) if ends else []
    return torch.stack(sums), gradients


def read_at(unembed: Unembed, x: Tensor, item: Item) -> Tensor:
    """Residuals of a layer at the positions with a target (`token d_model`).

    If the head pools positions, the result is the vectors after its final norm and its pooling.

    Args:
        unembed: final norm and head.
        x: `batch pos d_model`.
        item: see `Item`.
    """
    index = item["index"].long().to(x.device)
    if unembed.pool is None:
        return x.flatten(0, 1).index_select(0, index)
    rows = index // x.shape[1]
    return unembed.pooled(x.index_select(0, rows), item["attended"].bool().to(x.device)[rows])


def summed_cross_entropy(unembed: Unembed, x: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Sum over residuals of the cross-entropy between their logits and the targets, float64.

    If `with_gradient`, also the gradient at each residual, else None.
    """
    # Pooled vectors are normalised already.
    needs_norm = unembed.pool is None
    with torch.no_grad():
        rows = max(1, LOGITS_AT_ONCE // unembed(x[:1], needs_norm).shape[-1])
    total = torch.zeros((), dtype=torch.float64)
    slopes = []
    with torch.set_grad_enabled(with_gradient):
        for first in range(0, len(x), rows):
            chunk = x[first : first + rows].requires_grad_(with_gradient)
            logits = unembed(chunk, needs_norm)
            chunk_targets = targets[first : first + rows].to(logits.device)
            if not with_gradient:
                total = total + cross_entropy(logits, chunk_targets).sum().cpu()
                continue
            logits = logits if logits.dtype == torch.float64 else logits.float()
            weights = torch.ones_like(chunk_targets, dtype=logits.dtype)
            losses, logit_slopes = cross_entropy_slopes(logits, chunk_targets, weights)
            total = total + losses.cpu().double().sum()
            slopes.append(torch.autograd.grad(logits, chunk, logit_slopes)[0])
    return total, torch.cat(slopes) if with_gradient else None


def adamw_step(state: Parts, slopes: list[Tensor], step: int, rate: float) -> Parts:
    """Make one step of AdamW; `step` counts from 1.

    Source:
        Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2; torch's defaults.
    """
    after = {}
    for name, slope in zip(("down", "up"), slopes, strict=True):
        mean = ADAM_BETAS[0] * state[f"{name} mean"] + (1 - ADAM_BETAS[0]) * slope
        square = ADAM_BETAS[1] * state[f"{name} square"] + (1 - ADAM_BETAS[1]) * slope * slope
        root = (square / (1 - ADAM_BETAS[1] ** step)).sqrt() + ADAM_EPS
        after[name] = state[name] * (1 - rate * ADAM_DECAY) - rate / (1 - ADAM_BETAS[0] ** step) * mean / root
        after[f"{name} mean"] = mean
        after[f"{name} square"] = square
    return after


def step_or_evaluate(
    blocks: list[Any], unembed: Unembed, is_remote: bool, at: list[int], item: Item, state: Parts, weights: list[float]
) -> tuple[Tensor, Parts]:
    """Compute the losses of all layers; with a learning rate, also make an AdamW step.

    Returns the losses before the step, and the adapters' state after the step. Runs inside a trace.
    """
    learning = item["rate"] is not None
    with torch.set_grad_enabled(learning):
        down = state["down"].detach().clone().requires_grad_(learning)
        up = state["up"].detach().clone().requires_grad_(learning)
        sums, slopes = loss_and_gradient(blocks, unembed, is_remote, at, item, down, up, weights)
    if not learning:
        return sums, state
    with torch.no_grad():
        return sums, adamw_step(state, slopes, item["step"], item["rate"])


def run_here(
    model: Any,
    blocks: list[Any],
    unembed: Unembed,
    at: list[int],
    item: Item,
    state: Parts,
    weights: list[float],
    where: dict[str, Any],
) -> tuple[Tensor, Parts]:
    """Run one step or evaluation in this process, or in nnsight's simulation of a server."""
    import nnsight

    with torch.set_grad_enabled(item["rate"] is not None), model.trace(item["tokens"].long(), **where, **item["options"]):
        found: tuple[Tensor, Parts] = nnsight.save(step_or_evaluate(blocks, unembed, False, at, item, state, weights))
    return found


def run_on_server(
    model: Any,
    blocks: list[Any],
    unembed: Unembed,
    at: list[int],
    work: list[Item],
    state: Parts,
    weights: list[float],
    backend: Any,
) -> tuple[list[Tensor], Parts]:
    """Run several steps or evaluations in one request.

    The request is a session with a trace for each step; a trace passes its state to the next.
    """
    import nnsight

    ticket = backend.ticket
    found: Any = None
    with model.session(backend=backend):
        sums: list[Tensor] = []
        current = dict(state)
        for item in work:
            with model.trace(item["tokens"].long(), **item["options"]):
                loss, after = step_or_evaluate(blocks, unembed, True, at, item, current, weights)
                sums.append(loss)
                current.update(after)
        # A result is taken by this name.
        found = nnsight.save(sealed((sums, current), ticket))
    answer: tuple[list[Tensor], Parts] = found
    return answer


def form_of_steps(value: Any, steps: int, layers: int, state: Parts) -> None:
    """Check the form of the result of `run_on_server`.

    Args:
        value: the result.
        steps: number of steps or evaluations.
        layers: number of layers with a loss.
        state: adapters and moments before the steps.

    Raises:
        UnsafeAnswer: names what has another form.
    """
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not isinstance(value[0], list):
        raise UnsafeAnswer("must hold losses and adapters; it has another form")
    losses, after = value
    has_form = len(losses) == steps
    for loss in losses:
        is_float = isinstance(loss, Tensor) and loss.is_floating_point()
        has_form = has_form and is_float and tuple(loss.shape) == (layers,)
    if not has_form:
        raise UnsafeAnswer(f"must hold {layers} losses for each of {steps} steps; they have another form")
    if not isinstance(after, dict) or after.keys() != state.keys():
        raise UnsafeAnswer(f"must hold {', '.join(state)} of the adapters; it has other names")
    for name, part in state.items():
        returned = after[name]
        if not isinstance(returned, Tensor) or returned.shape != part.shape or returned.dtype != part.dtype:
            raise UnsafeAnswer(f"must hold '{name}' of the adapters as {part.dtype} of shape {tuple(part.shape)}")
