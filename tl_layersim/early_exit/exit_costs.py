"""Measured costs of early exit, and the blocks after which exit checks save time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..analyzers.exit_curve import ExitCurveResult
from ..core.arguments import NonNegativeFloat, PositiveInt, ThreeOrMore, typed
from ..core.errors import LayersimError
from ..sources.partial_forward import LocalSplitModel
from .exit_decisions import ExitCheck, ExitLens, Shortlist, shortlist_ids
from .rules import EXIT_RULES, ExitRule
from .segments import Decoding
from .supported_models import open_for_early_exit, synthetic_inputs


@typed
@dataclass(frozen=True, kw_only=True)
class ExitCosts:
    """The costs of a block, an exit check and the head in a decoding step.

    A step gives each row of a batch one token. All costs are those of the whole batch.

    Attributes:
        block: one block.
        check: one check of an exit rule.
        head: one full unembedding.
        blocks: number of blocks of the model.
        start: the rest of a step: embedding, masks, choosing tokens.
        batch: number of rows.
        full_check: whether a check computes a full unembedding, which tokens that exit there do not pay again.

    Source:
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, on the cost of confidence measures.

    Examples:
        >>> import tl_layersim as lsim
        >>> costs = lsim.early_exit.ExitCosts.measure(lsim.demo_model(), repeats=3)
        >>> costs.blocks, costs.check > 0
        (8, True)
    """

    block: NonNegativeFloat
    check: NonNegativeFloat
    head: NonNegativeFloat
    blocks: PositiveInt
    start: NonNegativeFloat = 0.0
    batch: PositiveInt = 1
    full_check: bool = True

    @staticmethod
    @typed
    def measure(
        model: Any,
        *,
        batch: PositiveInt = 1,
        rule: str = "max-prob",
        shortlist: Shortlist | None = None,
        context: PositiveInt = 64,
        repeats: ThreeOrMore = 15,
    ) -> ExitCosts:
        """Measure the costs in seconds, by timing decoding steps on this machine.

        Args:
            model: a Hugging Face language model, or what `open_model` returns.
            batch: number of rows.
            rule: rule of the checks, see `EarlyExit`.
            shortlist: shortlist of the checks, see `EarlyExit`.
            context: number of tokens before those that are timed.
            repeats: number of times that each part is timed; the fastest counts, since other work on the machine only adds.

        Raises:
            LayersimError: early exit does not support the model, or the model is too small to be timed.
        """
        rule_class = EXIT_RULES.named(rule)
        split_model, unembed = open_for_early_exit(model)
        ids = shortlist_ids(shortlist, rule_class, split_model, unembed)
        blocks = len(split_model.blocks)
        longest = split_model.model.context or 1 << 20
        # Each timed step takes a token, and so do two steps before them.
        limit = longest - repeats - 2
        if blocks < 2:
            raise LayersimError(f"`model` has {blocks} block; it must have at least 2.")
        if limit < 1:
            raise LayersimError(
                f"`repeats` is {repeats}; it must be at most {longest - 3} with a context of {longest} tokens, because each "
                "repeat takes a token."
            )
        never_exits = rule_class(rule_class.unreachable, ids)
        check = TimedCheck(ExitLens(unembed, blocks), never_exits)
        with split_model.evaluating(), torch.no_grad():
            prompt = synthetic_inputs(split_model, batch, min(context, limit))["input_ids"]
            times = _measured_costs(split_model, check, prompt, repeats)
        return ExitCosts(**times, blocks=blocks, batch=batch, full_check=never_exits.gives_logits)

    def full(self) -> float:
        """The cost of a decoding step of the full model."""
        return self.start + self.blocks * self.block + self.head

    def segment(self, below: int, block: int, exited: Mapping[int, float]) -> float:
        """Expected cost of the blocks between two exit checks, plus the cost of the upper check.

        The last block is followed by the head in place of a check. A part is run if any row needs it. Rows exit independently.

        Args:
            below: number of the block after which the lower check is made, -1 for none.
            block: number of the block after which the upper check is made, or of the last block.
            exited: for each block, the fraction of tokens that have exited at it or below.
        """
        # Probability that at least one row of the batch has not exited below.
        some_row_runs = 1 - exited[below] ** self.batch
        cost = some_row_runs * (block - below) * self.block
        if block == self.blocks - 1:
            return cost + some_row_runs * self.head
        cost_of_exits = 0.0
        if not self.full_check:
            exits_here = exited[block] - exited[below]
            cost_of_exits = self.head * (1 - (1 - exits_here) ** self.batch)
        return cost + some_row_runs * self.check + cost_of_exits


class TimedCheck(ExitCheck):
    """An exit check that measures its own time, and the time of the head.

    Args:
        lens: as in `ExitCheck`.
        rule: as in `ExitCheck`.

    Attributes:
        seconds: of the last step, the seconds of the check (False) and of the head (True).
    """

    def __init__(self, lens: ExitLens, rule: ExitRule) -> None:
        super().__init__(lens, rule)
        self.seconds = dict[bool, float]()

    def __call__(
        self,
        leaving: Tensor,
        entering: Tensor,
        index: Tensor,
        layer: int,
        last: bool,
        head_input: tuple[Tensor, bool] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        # Wait until the GPU has run the blocks.
        float(leaving[0, 0])
        start = time.perf_counter()
        exits, logits = super().__call__(leaving, entering, index, layer, last, head_input)
        # A copy to the CPU waits until the GPU has run the check.
        output = exits if logits is None else logits.argmax(-1)
        output.tolist()
        self.seconds[last] = time.perf_counter() - start
        return exits, logits


def _measured_costs(split_model: LocalSplitModel, check: TimedCheck, prompt: Tensor, repeats: int) -> dict[str, float]:
    """Dict of the costs of a decoding step in seconds: `block`, `check`, `head` and `start`.

    Args:
        split_model: the model.
        check: the check that is timed; no token exits.
        prompt: `row column`, token ids.
        repeats: number of times that each part is timed. The minimum counts, because other work only adds to a time.
    """
    blocks = len(split_model.blocks)
    low = max(1, blocks // 4)
    room = prompt.shape[1] + repeats + 2
    # The difference of a short and a full model is the cost of blocks alone.
    short_decoding = Decoding(split_model, (low,), check, prompt, None, room)
    full_decoding = Decoding(split_model, (low, blocks), check, prompt, None, room)
    rounds = list[tuple[float, ...]]()
    for _ in range(repeats + 2):
        seconds_without_checks = list[float]()
        for decoding in (short_decoding, full_decoding):
            check.seconds.clear()
            with decoding.hooked():
                start = time.perf_counter()
                decoding.run()
                seconds_without_checks.append(time.perf_counter() - start - sum(check.seconds.values()))
            decoding.append(prompt[:, 0])
        rounds.append((*seconds_without_checks, check.seconds[False], check.seconds[True]))
    # Without the prompt and the first step.
    short_seconds, full_seconds, check_seconds, head_seconds = map(min, zip(*rounds[2:], strict=True))
    block_seconds = max(0.0, (full_seconds - short_seconds) / (blocks - low))
    start_seconds = max(0.0, short_seconds - low * block_seconds)
    return {"block": block_seconds, "check": check_seconds, "head": head_seconds, "start": start_seconds}


@dataclass(frozen=True)
class ExitPlan:
    """The blocks after which exit checks are made, and the expected speed-up.

    Attributes:
        at: the numbers of these blocks.
        speedup: cost of a step of the full model over the expected cost of a step.
        exits: fraction of tokens that are expected to exit after each block of `at`, and after the last block, by its number.
    """

    at: tuple[int, ...]
    speedup: float
    exits: dict[int, float]

    def __str__(self) -> str:
        exits = ", ".join(f"{100 * fraction:.0f} % after block {layer}" for layer, fraction in self.exits.items())
        return f"checks after blocks {self.at}: {self.speedup:.2f} times as fast is expected; exits {exits}"


def plan_for(costs: ExitCosts, exited: list[float], at: tuple[int, ...] | None = None) -> ExitPlan:
    """Choose the blocks for exit checks that minimise the expected cost of a decoding step, unless `at` gives the blocks.

    The expected cost is a sum over neighbouring checks, so dynamic programming over blocks finds the best of all subsets.

    Args:
        costs: costs of the parts of a step.
        exited: for each block, the fraction of tokens whose rule is met after it or after a block below. A token whose rule is
            met is assumed to meet it at all layers above, and exits at the next check.
        at: indices of the blocks that checks follow, ascending; None for the cheapest.
    """
    # -1 is the input of block 0, where no token has exited.
    fractions = {-1: 0.0} | dict(enumerate(exited))
    last = costs.blocks - 1
    candidates = range(last) if at is None else at
    # For each block, the lowest cost up to the check after it, and the blocks with checks so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {-1: (costs.start, ())}
    for block in (*candidates, last):
        # If `at` is given, only the previous check can be the one below.
        blocks_below = list(best) if at is None else [max(best)]
        plans = []
        for below in blocks_below:
            cost_below, checks_below = best[below]
            plans.append((cost_below + costs.segment(below, block, fractions), (*checks_below, block)))
        best[block] = min(plans)
    cost, path = best[last]
    checks = path[:-1]
    exits = {}
    below = -1
    for block in checks:
        exits[block] = fractions[block] - fractions[below]
        below = block
    exits[last] = 1.0 - sum(exits.values())
    return ExitPlan(checks, costs.full() / cost, exits)


def exited_fractions(curve: ExitCurveResult, threshold: float, blocks: int) -> list[float]:
    """Fraction of positions that exit at or below each block, read from an exit curve.

    The last block, which no check follows, has 0.

    Raises:
        LayersimError: the curve is of another model, or was not measured at this threshold.
    """
    if curve.exits.shape[-1] != blocks:
        raise LayersimError(f"`curve` was measured on a model of {curve.exits.shape[-1]} blocks; this model has {blocks}.")
    counts = curve.at(threshold).exits
    fractions = (counts.cumsum(0) / counts.sum()).tolist()
    return [*fractions[:-1], 0.0]


def evenly_spread(blocks: int, check: float) -> tuple[int, ...]:
    """One to four evenly spread blocks for exit checks. Two or more checks cost at most a sixth of the model.

    Args:
        blocks: number of blocks of the model.
        check: cost of a check as a fraction of that of the model.
    """
    affordable = int(1 / 6 / check) if check else 4
    count = min(max(1, min(4, affordable)), blocks - 1)
    # A check after i blocks follows block i - 1.
    spread = [round(blocks * (i + 1) / (count + 1)) - 1 for i in range(count)]
    return tuple(sorted({min(blocks - 2, max(0, block)) for block in spread}))
