"""Costs of decoding steps with early exit, and the choice of the blocks after which checks pay."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..analyzers.exit_curve import ExitCurveResult
from ..core.arguments import NonNegativeFloat, PositiveInt, typed
from ..core.errors import LayersimError, warn
from .arguments import shortlist_ids
from .measured_costs import timed_costs
from .rules import exit_rule
from .supported_models import open_for_early_exit


@typed
@dataclass(frozen=True, kw_only=True)
class ExitCosts:
    """The costs of the parts of a decoding step, in any unit of time; a step gives each row one token.

    A block that runs n tokens at once costs `block + n * block_token`: reading its weights, and the arithmetic of each token.
    The same holds for checks and for the head.

    Attributes:
        block: one block.
        block_token: each token in it.
        check: one confidence check.
        check_token: each token in it.
        head: one full unembedding.
        head_token: each token in it.
        start: the rest of a step: embedding, masks, choosing tokens.
        again: a further forward pass in a step, where some rows stop or tokens are pending.
        blocks: number of blocks of the model.
        batch: number of rows.
        full_check: whether a check computes a full unembedding, which tokens that exit there do not pay again.

    Source:
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, on the cost of confidence measures. Counting by weights read is
        this package's.

    Examples:
        >>> import tl_layersim as lsim
        >>> costs = lsim.ExitCosts.count(lsim.demo_model())
        >>> costs.check > costs.block
        True
    """

    block: NonNegativeFloat
    check: NonNegativeFloat
    head: NonNegativeFloat
    blocks: PositiveInt
    block_token: NonNegativeFloat = 0.0
    check_token: NonNegativeFloat = 0.0
    head_token: NonNegativeFloat = 0.0
    start: NonNegativeFloat = 0.0
    again: NonNegativeFloat = 0.0
    batch: PositiveInt = 1
    full_check: bool = True

    @staticmethod
    @typed
    def count(
        model: Any,
        *,
        rule: str = "max-prob",
        shortlist: Any = None,
        batch: PositiveInt = 1,
    ) -> ExitCosts:
        """Costs as numbers of parameters read: proportional to time where reading weights is the bottleneck (small batches).

        Args:
            model: as in `EarlyExit`.
            rule: of the checks, see `EarlyExit`.
            shortlist: of the checks, see `EarlyExit`.
            batch: number of rows.
        """
        rule_class = exit_rule(rule)
        split_model, lens = open_for_early_exit(model)
        ids = None if shortlist is None else shortlist_ids(shortlist, rule_class, split_model, lens)
        sizes = [sum(p.numel() for p in block.parameters()) for block in split_model.blocks]
        known = split_model.model.head
        paths = known.modules if known is not None else ()
        head = sum(p.numel() for path in paths for p in split_model.module.get_submodule(path).parameters())
        if not rule_class.reads_logits:
            check = 0.0
        elif ids is not None:
            check = float(len(ids) * (split_model.model.d_model or 0))
        else:
            check = float(head)
        return ExitCosts(
            block=sum(sizes) / len(sizes),
            check=check,
            head=float(head),
            blocks=len(sizes),
            batch=batch,
            full_check=rule_class.reads_logits and shortlist is None,
        )

    @staticmethod
    @typed
    def measure(
        model: Any,
        *,
        batch: PositiveInt = 1,
        rule: str = "max-prob",
        shortlist: Any = None,
        context: int = 64,
        repeats: int = 15,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ExitCosts:
        """Costs in seconds on this machine, measured through the code that generates.

        Args:
            model: a Hugging Face language model, or what `open_model` returns.
            batch: number of rows.
            rule: of the checks, see `EarlyExit`.
            shortlist: of the checks, see `EarlyExit`.
            context: number of tokens before those that are timed.
            repeats: number of times that each part is timed; the fastest counts, since other work on the machine only adds.
            clock: returns the time in seconds. On a CPU that is shared with other programs, with one thread,
                `time.thread_time` leaves out their time.
        """
        rule_class = exit_rule(rule)
        split_model, lens = open_for_early_exit(model)
        ids = None if shortlist is None else shortlist_ids(shortlist, rule_class, split_model, lens)
        timed_rule = rule_class(rule_class.unreachable, ids)
        return ExitCosts(**timed_costs(split_model, lens, timed_rule, batch, context, repeats, clock))

    def full(self) -> float:
        """The cost of a step of the full model."""
        n = self.batch
        return self.start + self.blocks * (self.block + n * self.block_token) + self.head + n * self.head_token

    def segment(self, blocks: int, exited: float) -> float:
        """The cost of `blocks` consecutive blocks, where the fraction `exited` of tokens has exited below them.

        Weights are read when any row runs through; every token runs through in the end, with a later one.
        """
        return blocks * (self.block * (1 - exited**self.batch) + self.block_token * self.batch)

    def checked(self, exited: float, exited_after: float) -> float:
        """The cost of a check: the check itself, the unembedding of the tokens that exit, and the extra pass that may follow.

        Args:
            exited: fraction of tokens that exited before the check.
            exited_after: fraction of tokens that have exited after it.
        """
        n = self.batch
        cost = self.check * (1 - exited**n) + self.check_token * n * (1 - exited)
        if not self.full_check:
            exits = exited_after - exited
            cost += self.head * (1 - (1 - exits) ** n) + self.head_token * n * exits
        # A further pass where some row continues, unless all rows do and have no pending tokens.
        return cost + self.again * max(0.0, (1 - exited_after**n) - (1 - exited_after) ** (2 * n))

    def last_unembed(self, exited: float) -> float:
        """The cost of the unembedding after the last block, where the fraction `exited` of tokens has exited below."""
        return self.head * (1 - exited**self.batch) + self.head_token * self.batch * (1 - exited)

    def step(self, at: tuple[int, ...], exited: dict[int, float]) -> float:
        """The expected cost of a step with checks.

        Args:
            at: numbers of the blocks after which a check is made, ascending.
            exited: for each of them, the fraction of tokens that have exited at it or below.
        """
        cost, before, fraction = self.start, -1, 0.0
        for layer in at:
            cost += self.segment(layer - before, fraction) + self.checked(fraction, exited[layer])
            before, fraction = layer, exited[layer]
        return cost + self.segment(self.blocks - 1 - before, fraction) + self.last_unembed(fraction)


@dataclass(frozen=True)
class ExitPlan:
    """The blocks after which checks are made, and the speed-up that is expected of them.

    Attributes:
        at: the numbers of these blocks.
        speedup: cost of a step of the full model over the expected cost of a step.
        exits: fraction of tokens that are expected to exit after each block of `at`, and after the last block, by its number.
        costs: the costs of the parts of a step.
    """

    at: tuple[int, ...]
    speedup: float
    exits: dict[int, float]
    costs: ExitCosts

    def __str__(self) -> str:
        exits = ", ".join(f"{100 * fraction:.0f} % after block {layer}" for layer, fraction in self.exits.items())
        return f"checks after blocks {self.at}: {self.speedup:.2f} times as fast is expected; exits {exits}"


def plan_for(costs: ExitCosts, exited: list[float], lowest: int = 0, at: tuple[int, ...] | None = None) -> ExitPlan:
    """The cheapest set of blocks for checks, or the plan for given blocks.

    The expected cost is a sum over neighbouring checks, so dynamic programming over blocks finds the best of all subsets.

    Args:
        costs: of the parts of a step.
        exited: for each block, the fraction of tokens whose rule is met after it or after a block below. A token whose rule is
            met is assumed to meet it at all layers above, and exits at the next check.
        lowest: number of the lowest block after which a check is made.
        at: the numbers of the blocks; None for the cheapest.
    """
    # -1 is the input of block 0, where no token has exited.
    fractions = {-1: 0.0} | dict(enumerate(exited))
    if at is None:
        best: dict[int, tuple[float, tuple[int, ...]]] = {-1: (costs.start, ())}
        for layer in range(lowest, costs.blocks - 1):
            best[layer] = min(
                (
                    cost + costs.segment(layer - below, fractions[below]) + costs.checked(fractions[below], fractions[layer]),
                    (*chosen, layer),
                )
                for below, (cost, chosen) in best.items()
            )
        _, at = min(
            (
                cost + costs.segment(costs.blocks - 1 - layer, fractions[layer]) + costs.last_unembed(fractions[layer]),
                chosen,
            )
            for layer, (cost, chosen) in best.items()
        )
    exits, before = {}, 0.0
    for layer in at:
        exits[layer], before = fractions[layer] - before, fractions[layer]
    exits[costs.blocks - 1] = 1.0 - before
    return ExitPlan(at, costs.full() / costs.step(at, fractions), exits, costs)


def exited_fractions(curve: ExitCurveResult, threshold: float, blocks: int) -> list[float]:
    """For each block, the fraction of positions that an `ExitCurve` measured to exit after it or below.

    Raises:
        LayersimError: the curve is of another model, or was not measured at this threshold.
    """
    if curve.exits.shape[-1] != blocks:
        raise LayersimError(f"`curve` was measured on a model of {curve.exits.shape[-1]} blocks; this model has {blocks}.")
    counts = curve.at(threshold).exits
    fractions = (counts.cumsum(0) / counts.sum()).tolist()
    return [*fractions[:-1], 0.0]


def evenly_spread(costs: ExitCosts, lowest: int) -> tuple[int, ...]:
    """Evenly spread blocks for checks: at most four, whose checks cost at most a sixth of the model, and at least one."""
    span = costs.blocks - 1 - lowest
    if span <= 0:
        return ()
    full = costs.blocks * costs.block + costs.head
    count = 4 if costs.check == 0 else int(full / 6 / costs.check)
    count = max(1, min(4, count, span))
    # From numbers of blocks that have run to the number of the block after which a check is made.
    blocks = [round(costs.blocks * (i + 1) / (count + 1)) - 1 for i in range(count)]
    return tuple(sorted({min(costs.blocks - 2, max(lowest, block)) for block in blocks}))


def warn_if_slower(plan: ExitPlan) -> None:
    """Warn if checks are expected to cost more time than they save."""
    if plan.speedup < 1 and plan.at:
        warn(
            f"Checks after blocks {plan.at} are expected to make this model slower ({plan.speedup:.2f} times as fast): a check "
            "costs an unembedding. Pass curve= without at= to have the blocks chosen."
        )
