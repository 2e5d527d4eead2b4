"""Low-rank maps in the residual stream of a model that nnsight runs, here or on a server: put, learnt and judged there.

What runs beside the model is shipped, see `nnsight.py`: it refers to local names and to functions that need torch alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..models.block_call import first_tensor
from ..models.nnsight import NNsightSource
from ..models.softmax import cross_entropy, cross_entropy_slopes
from ..models.unembed import Unembed
from .client import JobTooLong, quiet
from .shipping import ShippedSource
from .source import SECONDS_PER_REQUEST, RemoteSource, there

# "down", `adapter direction d_model`, and "up", `adapter d_model direction`; of each the moments "mean" and "square" of Adam.
Parts = dict[str, Tensor]
# What one optimiser step, or one look, is made of: tokens, where something is asked, what the answer is, the rate.
Item = dict[str, Any]
Found = tuple[Tensor, int]
# Logits that are held at once.
LOGITS_AT_ONCE = 2**23
# Of AdamW, torch's own defaults.
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01
# Steps that one request takes at most.
MOST = 64


@dataclass(frozen=True)
class Patch:
    """Adapters as they travel to where a model is.

    Attributes:
        paths: of the blocks, one for each adapter.
        down: `adapter direction d_model`.
        up: `adapter d_model direction`.
    """

    paths: tuple[str, ...]
    down: Tensor
    up: Tensor

    def apply(self, model: Any) -> None:
        """Inside a trace: put them in."""
        for number, path in enumerate(self.paths):
            block = model
            for name in path.split("."):
                if not hasattr(block, name):
                    raise LayersimError(
                        "This model has not got the blocks that the adapters belong to.",
                        given=f"a {type(model).__name__} without {path}",
                        expected="the nnsight model that is traced, of the architecture that they were trained on",
                        do="apply them to the model that they were trained on",
                    )
                block = getattr(block, name)
            adapt(block, self.down[number], self.up[number])


def adapt(block: Any, down: Tensor, up: Tensor) -> Tensor:
    """Inside a trace: what leaves the block, with its adapter's share, which the model then goes on with."""
    output = block.output
    own = first_tensor(output)
    if own.shape[-1] != down.shape[-1]:
        raise LayersimError(
            "These adapters were trained on a model of another width.",
            given=f"a residual stream of width {own.shape[-1]}",
            expected=f"width {down.shape[-1]}",
            do="apply them to the model that they were trained on",
        )
    x = moved(own, down, up)
    block.output = (x, *output[1:]) if isinstance(output, tuple) else x
    return x


def moved(h: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """H + (h A') B', the product in the adapter's dtype."""
    with torch.autocast(device_type=h.device.type, enabled=False):
        share: Tensor = h.to(down.dtype) @ down.to(h.device).T @ up.to(h.device).T
        return h + share.to(h.dtype)


def loss_and_gradient(
    blocks: list[Any], unembed: Unembed, far: bool, at: list[int], item: Item, down: Tensor, up: Tensor, weights: list[float]
) -> tuple[Tensor, list[Tensor]]:
    """Inside a trace: the cross-entropy of every layer, summed over the answers, and what the aligned loss is pulled by.

    The logits of one chunk of one layer are held at a time: their derivative by the residual is taken at once, and one
    backward pass through the blocks takes all of these further.

    Args:
        blocks: of the model.
        unembed: its way to logits.
        far: whether the dtype of its weights is known only there.
        at: numbers of the blocks with an adapter.
        item: see `Descent.item`.
        down: `adapter direction d_model`.
        up: `adapter d_model direction`.
        weights: of the layers.

    Returns:
        `layer`, float64; and the derivatives of the aligned loss by `down` and `up`, none where neither wants any.
    """
    streams = []
    for number, block in enumerate(blocks):
        if number in at:
            streams.append(adapt(block, down[at.index(number)], up[at.index(number)]))
        else:
            streams.append(first_tensor(block.output))
    head = there(unembed, streams[-1]) if far else unembed
    sums, ends, slopes = [], [], []
    for x, weight in zip(streams, weights, strict=True):
        own = x.flatten(0, 1).index_select(0, item["index"].long().to(x.device))
        wanted = item["wanted"].long().to(x.device)
        with torch.autocast(device_type=x.device.type, enabled=False):
            loss, slope = judged(head, own.detach(), wanted, own.requires_grad)
        sums.append(loss.cpu())
        if slope is not None:
            ends.append(own)
            slopes.append(slope * (weight / len(wanted)))
    found = list(torch.autograd.grad(ends, [down, up], slopes)) if ends else []
    return torch.stack(sums), found


def judged(unembed: Unembed, x: Tensor, wanted: Tensor, sloped: bool) -> tuple[Tensor, Tensor | None]:
    """Summed cross-entropy of residuals `token d_model`, in float64, and where asked for its derivative by them."""
    with torch.no_grad():
        rows = max(1, LOGITS_AT_ONCE // unembed(x[:1]).shape[-1])
    total = torch.zeros((), dtype=torch.float64)
    slopes = []
    with torch.set_grad_enabled(sloped):
        for first in range(0, len(x), rows):
            some, right = x[first : first + rows].requires_grad_(sloped), wanted[first : first + rows]
            logits = unembed(some)
            right = right.to(logits.device)
            if not sloped:
                total = total + cross_entropy(logits, right).sum().cpu()
                continue
            logits = logits if logits.dtype == torch.float64 else logits.float()
            losses, by_logits = cross_entropy_slopes(logits, right, torch.ones_like(right, dtype=logits.dtype))
            total = total + losses.cpu().double().sum()
            slopes.append(torch.autograd.grad(logits, some, by_logits)[0])
    return total, torch.cat(slopes) if sloped else None


def stepped(state: Parts, slopes: list[Tensor], step: int, rate: float) -> Parts:
    """One step of AdamW, the `step`-th from 1; what it is given stays as it is.

    Source:
        Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2; torch's defaults.
    """
    after = {}
    for name, slope in zip(("down", "up"), slopes, strict=True):
        mean = BETAS[0] * state[f"{name} mean"] + (1 - BETAS[0]) * slope
        square = BETAS[1] * state[f"{name} square"] + (1 - BETAS[1]) * slope * slope
        root = (square / (1 - BETAS[1] ** step)).sqrt() + EPS
        after[name] = state[name] * (1 - rate * DECAY) - rate / (1 - BETAS[0] ** step) * mean / root
        after[f"{name} mean"], after[f"{name} square"] = mean, square
    return after


def visit(
    blocks: list[Any], unembed: Unembed, far: bool, at: list[int], item: Item, state: Parts, weights: list[float]
) -> tuple[Tensor, Parts]:
    """Inside a trace: losses by layer before the step, and the state after it; the same state where the item has no rate."""
    learning = item["rate"] is not None
    with torch.set_grad_enabled(learning):
        down, up = (state[name].detach().clone().requires_grad_(learning) for name in ("down", "up"))
        sums, slopes = loss_and_gradient(blocks, unembed, far, at, item, down, up, weights)
    with torch.no_grad():
        return sums, stepped(state, slopes, item["step"], item["rate"]) if learning else state


def _here(
    model: Any,
    blocks: list[Any],
    unembed: Unembed,
    at: list[int],
    item: Item,
    state: Parts,
    weights: list[float],
    where: dict[str, Any],
) -> tuple[Tensor, Parts]:
    """One trace of a model that runs here, or in the simulation of a server."""
    import nnsight

    with torch.set_grad_enabled(item["rate"] is not None), model.trace(item["tokens"].long(), **where, **item["options"]):
        found: tuple[Tensor, Parts] = nnsight.save(visit(blocks, unembed, False, at, item, state, weights))
    return found


def _session(
    model: Any,
    blocks: list[Any],
    unembed: Unembed,
    at: list[int],
    work: list[Item],
    state: Parts,
    weights: list[float],
    backend: Any,
) -> tuple[list[Tensor], Parts]:
    """One request: a session of one trace for each item, from which the state goes on to the next."""
    import nnsight

    found: Any = None
    with model.session(backend=backend):
        sums: list[Tensor] = []
        held = dict(state)
        for item in work:
            with model.trace(item["tokens"].long(), **item["options"]):
                loss, after = visit(blocks, unembed, True, at, item, held, weights)
                sums.append(loss)
                held.update(after)
        found = nnsight.save((sums, held))
    answer: tuple[list[Tensor], Parts] = found
    return answer


class RemoteDescent:
    """Adapters of one model, learnt and judged where it is.

    Args:
        source: how it is reached.
        at: numbers of the blocks with an adapter.
        weights: of the layers in the aligned loss.
    """

    def __init__(self, source: NNsightSource, at: list[int], weights: list[float]) -> None:
        self.source, self.at, self.weights = source, at, weights
        assert source._unembed is not None
        self._unembed = source._unembed
        self._keeps = "logits_to_keep" in inspect.signature(type(source.module).forward).parameters
        self._most, self._seconds = MOST, float("nan")
        self._frozen = ShippedSource()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context without dropout, in which no gradient reaches the weights; the model is left as it was found."""
        learning = [p for p in self.source.module.parameters() if p.requires_grad and not p.is_inference()]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(self.source.evaluating())
            try:
                for parameter in learning:
                    parameter.requires_grad_(False)
                yield
            finally:
                for parameter in learning:
                    parameter.requires_grad_(True)

    def item(
        self,
        tokens: Tensor,
        options: Mapping[str, Any],
        index: Tensor,
        wanted: Tensor,
        step: int = 0,
        rate: float | None = None,
    ) -> Item:
        """One step, or without a rate one look.

        Args:
            tokens: `batch pos`.
            options: what else the model is called with.
            index: which of the flattened `batch pos` positions are asked.
            wanted: the right answers there.
            step: of the optimiser, from 1.
            rate: its learning rate.
        """
        options = dict(options) | ({"logits_to_keep": 1} if self._keeps else {})
        ids = {"tokens": tokens, "index": index, "wanted": wanted}
        return {name: each.to(torch.int32) for name, each in ids.items()} | {"options": options, "step": step, "rate": rate}

    def run(
        self, count: int, item_of: Callable[[int], Item], state: Parts, start: int = 0, say: Callable[[str], None] = quiet
    ) -> Iterator[tuple[list[Found], Parts]]:
        """Items one after the other, as many in a request as its time allows; how they are grouped changes no bit.

        Args:
            count: how many there are.
            item_of: which they are.
            state: from where.
            start: how many of them were done before.
            say: is told what a server says.

        Yields:
            After each request, of each of its items the summed losses, `layer`, and over how many answers; and the state.
        """
        source = self.source
        if not isinstance(source, RemoteSource):
            for number in range(start, count):
                what = (item_of(number), state, self.weights, source.where)
                sums, state = _here(source.envoy, source.blocks, self._unembed, self.at, *what)
                yield [(sums, len(what[0]["wanted"]))], state
            return
        source.ndif.say = say
        try:
            while start < count:
                work = [item_of(number) for number in range(start, min(count, start + self._affordable(source)))]
                try:
                    losses, state = self._ask(source, work, state)
                except JobTooLong as error:
                    if len(work) == 1:
                        raise _too_long(work[0], source, error) from None
                    self._most = len(work) // 2
                    continue
                self._seconds = max(source.ndif.seconds, 1e-3) / len(work)
                start += len(work)
                yield [(sums, len(item["wanted"])) for sums, item in zip(losses, work, strict=True)], state
        finally:
            source.ndif.say = quiet

    def _ask(self, source: RemoteSource, work: list[Item], state: Parts) -> tuple[list[Tensor], Parts]:
        what = (self._unembed, self.at, work, state, self.weights)
        with self._frozen.in_place({"training": visit}):
            return source.ndif.request(lambda backend: _session(source.envoy, source.blocks, *what, backend))

    def _affordable(self, source: RemoteSource) -> int:
        if self._seconds != self._seconds:
            return 1
        limit = source.offer.job_limit
        seconds = SECONDS_PER_REQUEST if limit is None else min(SECONDS_PER_REQUEST, limit / 4)
        return max(1, min(self._most, int(seconds / self._seconds)))


def _too_long(item: Item, source: RemoteSource, error: Exception) -> LayersimError:
    rows, width = item["tokens"].shape
    return LayersimError(
        "One step of training takes longer than a job may.",
        given=f"{rows} rows of {width} tokens; {source.offer.server} says: {error}",
        expected="a step within the operator's limit",
        do=f"batch_size={max(1, rows // 2)}, or a smaller seq_len=",
    )
