"""What a token costs, and which layers are worth asking."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import LayersimError, warn
from ..core.typed import named, typed
from ..core.wording import brief
from .rules import RuleName
from .supported_models import opened
from .timing import timed_costs


@typed
@dataclass(frozen=True, kw_only=True)
class ExitCosts:
    """What one step of a generation is made of, in any unit of time; a step is one token in each row.

    A block that is given n tokens at once costs `block + n * block_token`: reading its weights, and then each token. So do
    checks and the head.

    Attributes:
        block: one block.
        block_token: each token in it.
        check: one confidence check.
        check_token: each token in it.
        head: one full unembedding.
        head_token: each token in it.
        start: what a step costs besides: embedding, masks, choosing tokens.
        again: a further forward pass of a step, for rows that stop, or for tokens that wait.
        blocks: how many the model has.
        batch: rows.
        full_check: whether a check is a full unembedding, which is then not paid again by those that exit there.

    Source:
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, say what measures of confidence cost. The account by weights
        read is this package's.

    Example:
        >>> import tl_layersim as lsim
        >>> costs = lsim.ExitCosts.count(lsim.demo_model())
        >>> costs.check > costs.block
        True
    """

    block: int | float
    check: int | float
    head: int | float
    blocks: int
    block_token: int | float = 0.0
    check_token: int | float = 0.0
    head_token: int | float = 0.0
    start: int | float = 0.0
    again: int | float = 0.0
    batch: int = 1
    full_check: bool = True

    @staticmethod
    @typed
    def count(
        model: Any,
        *,
        rule: RuleName = "max-prob",
        shortlist: Any = None,
        batch: int = 1,
        layers: list[str] | None = None,
        unembed: list[str] | None = None,
    ) -> ExitCosts:
        """Parameters read: what a step costs where weights come from memory, as in generation at small batches.

        Args:
            model: a Hugging Face model.
            rule: of the checks, see `EarlyExit`.
            shortlist: of the checks, see `EarlyExit`.
            batch: rows.
            layers: see `EarlyExit`.
            unembed: see `EarlyExit`.
        """
        _check(batch, shortlist)
        half, _ = opened(model, layers, unembed)
        sizes = [sum(p.numel() for p in block.parameters()) for block in half.blocks]
        known = half.model.head
        paths = known.parts if known is not None else ()
        head = sum(p.numel() for path in paths for p in half.module.get_submodule(path).parameters())
        if rule == "cosine":
            check = 0.0
        elif shortlist is not None:
            check = float(len(shortlist) * (half.model.d_model or 0))
        else:
            check = float(head)
        return ExitCosts(
            block=sum(sizes) / len(sizes),
            check=check,
            head=float(head),
            blocks=len(sizes),
            batch=batch,
            full_check=rule != "cosine" and shortlist is None,
        )

    @staticmethod
    @typed
    def measure(
        model: Any,
        *,
        batch: int = 1,
        rule: RuleName = "max-prob",
        shortlist: Any = None,
        context: int = 64,
        repeats: int = 15,
        layers: list[str] | None = None,
        unembed: list[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ExitCosts:
        """Seconds on this machine, timed through the code that generates.

        Args:
            model: a Hugging Face language model.
            batch: rows.
            rule: of the checks, see `EarlyExit`.
            shortlist: of the checks, see `EarlyExit`.
            context: how many tokens stand before those that are timed.
            repeats: how often each part is timed; the fastest counts, since what else a machine does only adds.
            layers: see `EarlyExit`.
            unembed: see `EarlyExit`.
            clock: what says the time. On a CPU that others use too, with one thread, `time.thread_time` leaves out what they
                take.
        """
        _check(batch, shortlist)

        return ExitCosts(**timed_costs(model, batch, rule, shortlist, context, repeats, layers, unembed, clock))

    def full(self) -> float:
        """A step of the whole model."""
        n = self.batch
        return self.start + self.blocks * (self.block + n * self.block_token) + self.head + n * self.head_token

    def stretch(self, blocks: int, gone: float) -> float:
        """Some blocks in a row, where that share of tokens has exited below.

        Weights are read when any row comes; every token runs through in the end, with those that come later.
        """
        return blocks * (self.block * (1 - gone**self.batch) + self.block_token * self.batch)

    def asked(self, gone: float, then: float) -> float:
        """A check, and what follows from it.

        Args:
            gone: share of tokens that exited before it.
            then: share that has exited after it.
        """
        n = self.batch
        cost = self.check * (1 - gone**n) + self.check_token * n * (1 - gone)
        if not self.full_check:
            exits = then - gone
            cost += self.head * (1 - (1 - exits) ** n) + self.head_token * n * exits
        # Another pass, if some row goes on, unless all do and nothing waits for them there.
        return cost + self.again * max(0.0, (1 - then**n) - (1 - then) ** (2 * n))

    def last(self, gone: float) -> float:
        """The unembedding of those that come to the end."""
        return self.head * (1 - gone**self.batch) + self.head_token * self.batch * (1 - gone)

    def step(self, at: tuple[int, ...], gone: dict[int, float]) -> float:
        """An expected step with checks.

        Args:
            at: layers of the checks, ascending.
            gone: for each of them, the share of tokens that are sure at it or below.
        """
        cost, before, share = self.start, 0, 0.0
        for layer in at:
            cost += self.stretch(layer - before, share) + self.asked(share, gone[layer])
            before, share = layer, gone[layer]
        return cost + self.stretch(self.blocks - before, share) + self.last(share)


@named
@dataclass(frozen=True)
class ExitPlan:
    """Which layers are asked, and what is promised.

    Attributes:
        at: the layers: counts of blocks that have run.
        speedup: a step of the whole model over an expected step, by these costs.
        exits: share of tokens that are expected to leave at each of `at`, and after the last block.
        costs: what was counted with.
    """

    at: tuple[int, ...]
    speedup: float
    exits: dict[int, float]
    costs: ExitCosts

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.0%} after block {layer}" for layer, share in self.exits.items())
        return f"checks at {self.at}: {self.speedup:.2f} times as fast is expected; exits {shares}"


def plan_for(costs: ExitCosts, gone: list[float], min_layer: int = 1, at: tuple[int, ...] | None = None) -> ExitPlan:
    """The cheapest layers to ask at, or what given ones cost.

    The expected cost is a sum over neighbouring checks, so that a dynamic programme over layers finds the best of all subsets.

    Args:
        costs: of a step.
        gone: for each block, the share of tokens that are sure after it or after one below. A token that is sure is taken to
            stay sure: it then leaves at the first check above.
        min_layer: no check below.
        at: the layers, where they are given.
    """
    shares = {0: 0.0} | dict(enumerate(gone, 1))
    if at is None:
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (costs.start, ())}
        for layer in range(max(1, min_layer), costs.blocks):
            best[layer] = min(
                (
                    cost + costs.stretch(layer - below, shares[below]) + costs.asked(shares[below], shares[layer]),
                    (*chosen, layer),
                )
                for below, (cost, chosen) in best.items()
            )
        _, at = min(
            (cost + costs.stretch(costs.blocks - layer, shares[layer]) + costs.last(shares[layer]), chosen)
            for layer, (cost, chosen) in best.items()
        )
    exits, before = {}, 0.0
    for layer in at:
        exits[layer], before = shares[layer] - before, shares[layer]
    exits[costs.blocks] = 1.0 - before
    return ExitPlan(at, costs.full() / costs.step(at, shares), exits, costs)


def shares_of(curve: Any, threshold: float, blocks: int) -> list[float]:
    """For each block, the share of positions that an `ExitCurve` saw to be sure after it or below.

    Raises:
        LayersimError: the curve is of another model, or was not measured at this threshold.
    """
    exits = getattr(curve, "exits", None)
    if not isinstance(exits, torch.Tensor) or exits.shape[-1] != blocks:
        shape = f" of {exits.shape[-1]} layers" if isinstance(exits, torch.Tensor) else ""
        raise LayersimError(
            "This is no exit curve of this model.",
            given=f"{type(curve).__name__}{shape}",
            expected=f"the result of ExitCurve on this model, of {blocks} layers",
            do='curve=analyze(model, data, [ExitCurve()])["exit_curve"]',
        )
    counts = curve.at(threshold).exits
    shares = (counts.cumsum(0) / counts.sum()).tolist()
    return [*shares[:-1], 0.0]


def spread(costs: ExitCosts, min_layer: int) -> tuple[int, ...]:
    """Layers to ask at where nothing is known: evenly spread, few enough to cost at most a sixth of the model, at most four."""
    span = costs.blocks - max(1, min_layer)
    if span <= 0:
        return ()
    full = costs.blocks * costs.block + costs.head
    count = 4 if costs.check == 0 else int(full / 6 / costs.check)
    count = max(1, min(4, count, span))
    first = max(1, min_layer)
    return tuple(sorted({min(costs.blocks - 1, max(first, round(costs.blocks * (i + 1) / (count + 1)))) for i in range(count)}))


def warn_if_slower(plan: ExitPlan) -> None:
    """Say so where asking is expected to cost more than it saves."""
    if plan.speedup < 1 and plan.at:
        warn(
            f"Checks at {plan.at} are expected to make this model slower ({plan.speedup:.2f} times as fast): a check is an "
            "unembedding. Leave at= out, with curve=, to have layers chosen."
        )


def _check(batch: int, shortlist: Any) -> None:
    """Refuse rows and candidates that cannot be counted."""
    if batch < 1:
        raise LayersimError("`batch` must be at least 1.", given=f"batch={batch}", expected="a number of rows", do="batch=1")
    if shortlist is not None and (isinstance(shortlist, str) or not hasattr(shortlist, "__len__") or not len(shortlist)):
        raise LayersimError(
            "`shortlist` is no list of token ids.",
            given=f"shortlist={brief(shortlist)}",
            expected="token ids",
            do="frequent_tokens(model, texts, 1000)",
        )
