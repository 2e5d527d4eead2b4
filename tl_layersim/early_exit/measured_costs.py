"""Measurement of the costs of decoding steps on this machine, through the code that generates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..architectures.unembed import Unembed
from ..core.errors import LayersimError
from ..split import LocalSplitModel
from .checks import ExitCheck, ExitLens
from .decoding import Decoding
from .rules.exit_rule import ExitRule
from .supported_models import synthetic_inputs

Clock = Callable[[], float]
# Tokens that are pending, in the round that times many of them.
MORE = 8
FEWEST_REPEATS = 3


@dataclass(frozen=True)
class _StepTimes:
    """Times, in seconds, of decoding steps of a batch and of parts of a step.

    Attributes:
        full: a step through all blocks, without checks and without unembedding.
        short: a step that ends after the lowest quarter of the blocks.
        pending: a step through all blocks with one pending token in each row.
        pending_many: the same with `MORE` of them.
        checked: a step through all blocks with a check after the lowest quarter.
        unembedded: a step through all blocks with the unembedding of its tokens.
        alternating: a step in which every other row runs through all blocks, with its pending token.
        unembed: one unembedding of the batch.
        unembed_one: one unembedding of one token.
        check: one check of the batch.
        check_one: one check of one token.
    """

    full: float
    short: float
    pending: float
    pending_many: float
    checked: float
    unembedded: float
    alternating: float
    unembed: float
    unembed_one: float
    check: float
    check_one: float


def timed_costs(
    split_model: LocalSplitModel, unembed: Unembed, rule: ExitRule, batch: int, context: int, repeats: int, clock: Clock
) -> dict[str, Any]:
    """The fields of an `ExitCosts`, in seconds; arguments as those of `ExitCosts.measure`.

    Raises:
        LayersimError: the model has too few blocks or too short a context.
    """
    blocks, low = len(split_model.blocks), max(1, len(split_model.blocks) // 4)
    limit = split_model.model.context or 1 << 20
    # A round is at most nine tokens.
    repeats = min(repeats, (limit - 1) // (MORE + 1) - 3)
    if blocks < 2 or repeats < FEWEST_REPEATS:
        raise LayersimError(
            f"`model` has {blocks} blocks, and `repeats` is {repeats} in its context of {split_model.model.context}; at least "
            f"two blocks and {FEWEST_REPEATS} repeats of {MORE + 1} tokens are needed. Use ExitCosts.count(model)."
        )
    context = min(context, limit - (MORE + 1) * (repeats + 3))
    with split_model.evaluating(), torch.no_grad():
        split_model.tuples()
        prompt = synthetic_inputs(split_model, batch, context)["input_ids"]
        timer = _Timer(split_model, unembed, ExitCheck(rule, ExitLens(unembed, blocks), batch), prompt, low, clock)
        times = timer.times(repeats)
    return _costs(times, blocks, low, batch) | {"full_check": rule.gives_logits}


class _Timer:
    """Times rounds of decoding steps of a synthetic batch.

    Args:
        split_model: the model.
        unembed: its final norm and head.
        check: the check that is timed.
        prompt: `row column`, token ids.
        low: number of blocks of a short step.
        clock: returns seconds.
    """

    def __init__(
        self, split_model: LocalSplitModel, unembed: Unembed, check: ExitCheck, prompt: Tensor, low: int, clock: Clock
    ) -> None:
        self.split_model, self.unembed, self.check, self.prompt = split_model, unembed, check, prompt
        self.low, self.clock = low, clock
        self.index = torch.arange(len(prompt), device=split_model.device)
        # Of the newest token of each row, `row d_model`: leaving and entering the last block that a step ran.
        self.leaving, self.entering = torch.empty(0), torch.empty(0)

    def times(self, repeats: int) -> _StepTimes:
        """The fastest of several repeats of each measurement, taken in turn."""
        room = self.prompt.shape[1] + (MORE + 1) * (repeats + 3)
        blocks, low = len(self.split_model.blocks), self.low
        steps = fastest(
            [
                self.steps(room, (blocks,)),
                self.steps(room, (low,)),
                self.steps(room, (low, blocks)),
                self.steps(room, (*(low,) * MORE, blocks)),
                # In a step: the weights of the blocks displace those of the head from the processor's cache.
                self.steps(room, (blocks,), checked=True),
                self.steps(room, (blocks,), unembedded=True),
                self.steps(room, (blocks,), alternating=True),
            ],
            repeats,
        )
        x, entering, index = self.leaving, self.entering, self.index
        parts = fastest(
            [
                lambda: seconds_of(lambda: self.unembed(x).argmax(-1).tolist(), self.clock),
                lambda: seconds_of(lambda: self.unembed(x[:1]).argmax(-1).tolist(), self.clock),
                lambda: seconds_of(lambda: self.check(x, entering, index, low)[0].tolist(), self.clock),
                lambda: seconds_of(lambda: self.check(x[:1], entering[:1], index[:1], low)[0].tolist(), self.clock),
            ],
            repeats,
        )
        return _StepTimes(*steps, *parts)

    def steps(
        self, room: int, depths: tuple[int, ...], checked: bool = False, unembedded: bool = False, alternating: bool = False
    ) -> Callable[[], float]:
        """A function that runs a round of decoding steps and returns the seconds of the last one.

        Args:
            room: number of columns that all rounds need.
            depths: number of blocks that each step of the round runs through.
            checked: whether a check is evaluated after `low` blocks.
            unembedded: whether tokens are unembedded after the last block.
            alternating: whether every other row stops after `low` blocks, in turn.
        """
        blocks, low, new = len(self.split_model.blocks), self.low, self.prompt[:, 0]
        depth, number = blocks, 0
        ends = (low, blocks) if checked or alternating or len(set(depths)) > 1 else depths[:1]

        def decide(layer: int, rows: list[int], x: Tensor, entering: Tensor) -> list[int]:
            if checked and layer == low:
                self.check(x, entering, self.index, low)[0].tolist()
            if unembedded and layer == blocks:
                self.unembed(x).argmax(-1).tolist()
            # An alternating round ends with fewer rows.
            if len(x) == len(self.prompt):
                self.leaving, self.entering = x, entering
            return [row for row in rows if layer < depth and not (alternating and number and (row + number) % 2)]

        state = Decoding(self.split_model, ends, self.prompt, None, room)
        with state.watched(decide) as run:
            run()

        def round_of_steps() -> float:
            nonlocal depth, number
            with state.watched(decide) as run:
                for step_depth in depths:
                    depth, number = step_depth, number + 1
                    state.append(new)
                    start = self.clock()
                    run()
                return self.clock() - start

        return round_of_steps


def _costs(times: _StepTimes, blocks: int, low: int, batch: int) -> dict[str, Any]:
    """The fields of `ExitCosts`, from the measured times of steps."""
    upper, more = blocks - low, max(1, batch - 1)
    block = max(0.0, (times.full - times.short) / upper)
    # Alone, with warm caches, an unembedding and a check take at least this long.
    head, check = max(times.unembed, times.unembedded - times.full), max(times.check, times.checked - times.full)
    block_token = min(block / batch, max(0.0, (times.pending_many - times.pending) / (MORE - 1) / upper / batch))
    head_token = min(head / batch, max(0.0, (times.unembed - times.unembed_one) / more))
    check_token = min(check / batch, max(0.0, (times.check - times.check_one) / more))
    # With several rows, an alternating step runs as many tokens through the upper blocks as a full step.
    again = max(0.0, times.alternating - times.full if batch > 1 else times.pending - times.full - upper * block_token)
    return {
        "block": max(0.0, block - batch * block_token),
        "block_token": block_token,
        "check": max(0.0, check - batch * check_token),
        "check_token": check_token,
        "head": max(0.0, head - batch * head_token),
        "head_token": head_token,
        "start": max(0.0, times.short - low * block),
        "again": again,
        "blocks": blocks,
        "batch": batch,
    }


def fastest(rounds: list[Callable[[], float]], repeats: int) -> list[float]:
    """The shortest time of each of several measurements, taken in turn; the first repeat is a warm-up.

    The minimum is taken because other work on the machine only adds to a time.
    """
    times = [[measurement() for measurement in rounds] for _ in range(repeats + 1)][1:]
    return [min(column) for column in zip(*times, strict=True)]


def seconds_of(call: Callable[[], Any], clock: Clock) -> float:
    """The seconds that a call takes."""
    start = clock()
    call()
    return clock() - start
