"""Costs of decoding steps with early exit, and the choice of the blocks after which checks pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..analyzers.exit_curve import ExitCurveResult
from ..architectures.unembed import Unembed
from ..core.arguments import NonNegativeFloat, PositiveInt, typed
from ..core.errors import LayersimError
from ..sources.partial_forward import LocalSplitModel
from .exit_checks import ExitCheck, ExitLens, shortlist_ids
from .rules import EXIT_RULES, ExitRule
from .segments import Decoding
from .supported_models import open_for_early_exit, synthetic_inputs

# The fastest of fewer runs may be slow.
FEWEST_REPEATS = 3


@typed
@dataclass(frozen=True, kw_only=True)
class ExitCosts:
    """The costs of a block, of a check and of the head in a decoding step, in any unit of time.

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
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, on the cost of confidence measures. Counting by weights read is
        this package's.

    Examples:
        >>> import tl_layersim as lsim
        >>> costs = lsim.early_exit.ExitCosts.count(lsim.demo_model())
        >>> costs.check > costs.block
        True
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
    def count(
        model: Any,
        *,
        rule: str = "max-prob",
        shortlist: Any = None,
        batch: PositiveInt = 1,
    ) -> ExitCosts:
        """Costs as numbers of parameters read: proportional to time if reading weights is the bottleneck (small batches).

        Args:
            model: as in `EarlyExit`.
            rule: rule of the checks, see `EarlyExit`.
            shortlist: shortlist of the checks, see `EarlyExit`.
            batch: number of rows.
        """
        rule_class, split_model, _, ids = _opened(model, rule, shortlist)
        sizes = [sum(p.numel() for p in block.parameters()) for block in split_model.blocks]
        known = split_model.model.head
        paths = known.modules if known is not None else ()
        head = sum(p.numel() for path in paths for p in split_model.module.get_submodule(path).parameters())
        check = head if ids is None else len(ids) * (split_model.model.d_model or 0)
        return ExitCosts(
            block=sum(sizes) / len(sizes),
            check=float(check) if rule_class.reads_logits else 0.0,
            head=float(head),
            blocks=len(sizes),
            batch=batch,
            full_check=rule_class.reads_logits and ids is None,
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
            rule: rule of the checks, see `EarlyExit`.
            shortlist: shortlist of the checks, see `EarlyExit`.
            context: number of tokens before those that are timed.
            repeats: number of times that each part is timed; the fastest counts, since other work on the machine only adds.
            clock: returns the time in seconds. On a CPU that is shared with other programs, with one thread,
                `time.thread_time` leaves out their time.
        """
        rule_class, split_model, lens, ids = _opened(model, rule, shortlist)
        blocks = len(split_model.blocks)
        limit = (split_model.model.context or 1 << 20) - repeats - 2
        if blocks < 2 or repeats < FEWEST_REPEATS or limit < 1:
            raise LayersimError(
                f"`model` has {blocks} blocks and a context of {split_model.model.context}, and `repeats` is {repeats}; at "
                f"least 2 blocks, {FEWEST_REPEATS} repeats and a context of `repeats` + 3 are needed. Use "
                "ExitCosts.count(model)."
            )
        rule_at = rule_class(rule_class.unreachable, ids)
        check = ExitCheck(ExitLens(lens, blocks), rule_at)
        with split_model.evaluating(), torch.no_grad():
            prompt = synthetic_inputs(split_model, batch, min(context, limit))["input_ids"]
            times = _times(split_model, check, prompt, repeats, clock)
        return ExitCosts(**times, blocks=blocks, batch=batch, full_check=rule_at.gives_logits)

    def full(self) -> float:
        """The cost of a step of the full model."""
        return self.start + self.blocks * self.block + self.head

    def segment(self, below: int, block: int, exited: Mapping[int, float]) -> float:
        """The expected cost of the blocks between two checks, and of the check or the head after them.

        A part is run if any row needs it. Rows exit independently.

        Args:
            below: number of the block after which the lower check is made, -1 for none.
            block: number of the block after which the upper check is made, or of the last block.
            exited: for each block, the fraction of tokens that have exited at it or below.
        """
        some = 1 - exited[below] ** self.batch
        cost = some * (block - below) * self.block
        if block == self.blocks - 1:
            return cost + some * self.head
        exits = 0.0 if self.full_check else self.head * (1 - (1 - (exited[block] - exited[below])) ** self.batch)
        return cost + some * self.check + exits


def _opened(model: Any, rule: str, shortlist: Any) -> tuple[type[ExitRule], LocalSplitModel, Unembed, Tensor | None]:
    """The rule, the blocks of the model, its norm and head, and the ids of the shortlist."""
    rule_class = EXIT_RULES.named(rule)
    split_model, lens = open_for_early_exit(model)
    return rule_class, split_model, lens, shortlist_ids(shortlist, rule_class, split_model, lens)


def _times(
    split_model: LocalSplitModel, check: ExitCheck, prompt: Tensor, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The costs of a block, a check, the head and the rest of a decoding step, in seconds.

    Args:
        split_model: the model.
        check: the check that is timed; no token exits.
        prompt: `row column`, token ids.
        repeats: number of times that each part is timed. The minimum counts, because other work only adds to a time.
        clock: returns seconds.
    """
    blocks, low = len(split_model.blocks), max(1, len(split_model.blocks) // 4)
    unembed, index = check.lens.unembed, torch.arange(len(prompt))
    # Of the newest token of each row, `row d_model`: leaving and entering the last block of a step.
    newest: list[Tensor] = []
    check.restart(index.tolist())

    def run_head() -> None:
        unembed(newest[0]).argmax(-1).tolist()

    def run_check() -> None:
        check(newest[0], newest[1], index, low, False)[0].tolist()

    def step(ends: tuple[int, ...], part: Callable[[], None] | None = None) -> Callable[[], None]:
        """A function that runs a decoding step, with a part after the blocks of the first of `ends`."""

        def decide(layer: int, rows: list[int], x: Tensor, entering: Tensor) -> list[int]:
            newest[:] = x, entering
            if part is not None and layer == ends[0]:
                part()
            return rows

        state = Decoding(split_model, ends, prompt, None, prompt.shape[1] + repeats + 2, decide)

        def run() -> None:
            with state.hooked():
                state.run()
            state.append(prompt[:, 0])

        return run

    # A check and the head are timed in a step, where the weights of the blocks displace theirs from the processor's cache.
    calls = [step((blocks,)), step((low,)), step((low, blocks), run_check), step((blocks,), run_head), run_check, run_head]
    for call in calls[:4]:
        # The prompt itself.
        call()
    rounds = [[seconds_of(call, clock) for call in calls] for _ in range(repeats + 1)][1:]
    full, short, checked, unembedded, check_alone, head_alone = (min(column) for column in zip(*rounds, strict=True))
    block = max(0.0, (full - short) / (blocks - low))
    return {
        "block": block,
        "check": max(check_alone, checked - full),
        "head": max(head_alone, unembedded - full),
        "start": max(0.0, short - low * block),
    }


def seconds_of(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """The seconds that a call takes."""
    start = clock()
    call()
    return clock() - start


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


def plan_for(costs: ExitCosts, exited: list[float], at: tuple[int, ...] | None = None) -> ExitPlan:
    """Choose the blocks after which exit checks cost least, or plan for the blocks `at`.

    The expected cost is a sum over neighbouring checks, so dynamic programming over blocks finds the best of all subsets.

    Args:
        costs: costs of the parts of a step.
        exited: for each block, the fraction of tokens whose rule is met after it or after a block below. A token whose rule is
            met is assumed to meet it at all layers above, and exits at the next check.
        at: the numbers of the blocks; None for the cheapest.
    """
    # -1 is the input of block 0, where no token has exited.
    fractions, last = {-1: 0.0} | dict(enumerate(exited)), costs.blocks - 1
    # For each block, the lowest cost up to the check after it, and the blocks with checks so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {-1: (costs.start, ())}
    for block in (*(range(last) if at is None else at), last):
        # Given checks follow one another; else any block may be the one below.
        below = best if at is None else {max(best): best[max(best)]}
        best[block] = min(
            (cost + costs.segment(before, block, fractions), (*chosen, block)) for before, (cost, chosen) in below.items()
        )
    cost, path = best[last]
    shares = {block: fractions[block] - fractions[before] for before, block in zip((-1, *path), path[:-1], strict=False)}
    exits = shares | {last: 1.0 - sum(shares.values())}
    return ExitPlan(path[:-1], costs.full() / cost, exits, costs)


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


def evenly_spread(costs: ExitCosts) -> tuple[int, ...]:
    """Evenly spread blocks for checks: at most four, whose checks cost at most a sixth of the model, and at least one."""
    full = costs.blocks * costs.block + costs.head
    count = 4 if costs.check == 0 else int(full / 6 / costs.check)
    count = min(max(1, min(4, count)), costs.blocks - 1)
    # From numbers of blocks that have run to the number of the block after which a check is made.
    blocks = [round(costs.blocks * (i + 1) / (count + 1)) - 1 for i in range(count)]
    return tuple(sorted({min(costs.blocks - 2, max(0, block)) for block in blocks}))
