"""What a step costs on this machine, timed through the code that generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .exit_check import ExitCheck
from .generation import Counts, Decoding
from .rules import exit_rule
from .supported_models import opened, synthetic

MORE = 8
FEWEST = 3


def timed_costs(
    model: Any,
    batch: int,
    rule: Any,
    shortlist: Any,
    context: int,
    repeats: int,
    layers: list[str] | None,
    unembed: list[str] | None,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """The fields of an `ExitCosts`, see its `measure`."""
    half, lens = opened(model, layers, unembed)
    blocks, low = len(half.blocks), max(1, len(half.blocks) // 4)
    # A round is at most nine tokens.
    repeats = min(repeats, ((half.model.context or 1 << 20) - 1) // (MORE + 1) - 3)
    if blocks < 2 or repeats < FEWEST:
        raise LayersimError(
            "There is too little to be timed.",
            given=f"{blocks} blocks, a context of {half.model.context}, and so {repeats} repeats",
            expected=f"two blocks or more, room for {FEWEST} rounds of {MORE + 1} tokens, and repeats={FEWEST} or more",
            do="ExitCosts.count(model)",
        )
    context = min(context, (half.model.context or 1 << 20) - (MORE + 1) * (repeats + 3))
    room = context + (MORE + 1) * (repeats + 3)
    ids = None if shortlist is None else torch.as_tensor(shortlist)
    kind = exit_rule(rule)
    judge = ExitCheck(kind(kind.unreachable, ids), lens, batch)
    with half.evaluating(), torch.no_grad():
        half.tuples()
        prompt = synthetic(half, batch, context)["input_ids"]
        new = prompt[:, 0]

        which, seen = torch.arange(batch, device=half.device), list[Tensor]()

        def steps(depths: tuple[int, ...], asks: bool = False, says: bool = False, halves: bool = False) -> Callable[[], float]:
            """Rounds of steps that end at these depths, with `halves` for every other row; the last one's seconds."""
            depth, number = blocks, 0
            ends = (low, blocks) if asks or halves or len(set(depths)) > 1 else depths[:1]

            def decide(layer: int, rows: list[int], x: Tensor, entering: Tensor) -> list[int]:
                if asks and layer == low:
                    judge(x, entering, which)[0].tolist()
                if says and layer == blocks:
                    lens(x).argmax(-1).tolist()
                # Rounds of every other row end with fewer.
                seen[:] = [x, entering] if len(x) == batch else seen
                return [row for row in rows if layer < depth and not (halves and number and (row + number) % 2)]

            state = Decoding(half, ends, prompt, None, room, Counts())
            with state.watched(decide) as run:
                run()

            def around() -> float:
                nonlocal depth, number
                with state.watched(decide) as run:
                    for each in depths:
                        depth, number = each, number + 1
                        state.append(new)
                        start = clock()
                        run()
                    return clock() - start

            return around

        whole, short, one, many, asked, said, half_of_them = fastest(
            [
                steps((blocks,)),
                steps((low,)),
                # One token that waits for the last, and some of them.
                steps((low, blocks)),
                steps((*(low,) * MORE, blocks)),
                # Beside other weights, which push those of the head out of a processor's memory.
                steps((blocks,), asks=True),
                steps((blocks,), says=True),
                # Each row goes on every other time, with the token that waits.
                steps((blocks,), halves=True),
            ],
            repeats,
        )
        x, entering = seen
        lens_all, lens_one, judge_all, judge_one = fastest(
            [
                lambda: seconds_of(lambda: lens(x).argmax(-1).tolist(), clock),
                lambda: seconds_of(lambda: lens(x[:1]).argmax(-1).tolist(), clock),
                lambda: seconds_of(lambda: judge(x, entering, which)[0].tolist(), clock),
                lambda: seconds_of(lambda: judge(x[:1], entering[:1], which[:1])[0].tolist(), clock),
            ],
            repeats,
        )
    upper, more = blocks - low, max(1, batch - 1)
    block = max(0.0, (whole - short) / upper)
    # By themselves, where they are fast, they cost at least this.
    head, check = max(lens_all, said - whole), max(judge_all, asked - whole)
    each = min(block / batch, max(0.0, (many - one) / (MORE - 1) / upper / batch))
    each_head = min(head / batch, max(0.0, (lens_all - lens_one) / more))
    each_check = min(check / batch, max(0.0, (judge_all - judge_one) / more))
    # As many tokens in the upper blocks as in a whole step, where there are several rows.
    again = max(0.0, half_of_them - whole if batch > 1 else one - whole - upper * each)
    start = max(0.0, short - low * block)
    return dict(  # noqa: C408
        block=max(0.0, block - batch * each),
        block_token=each,
        check=max(0.0, check - batch * each_check),
        check_token=each_check,
        head=max(0.0, head - batch * each_head),
        head_token=each_head,
        start=start,
        again=again,
        blocks=blocks,
        batch=batch,
        full_check=judge.rule.gives_logits,
    )


def fastest(rounds: list[Callable[[], float]], repeats: int) -> list[float]:
    """The shortest of each of some timings, taken in turn: what else the machine does only adds. The first is not counted."""
    found = [[one() for one in rounds] for _ in range(repeats + 1)][1:]
    return [min(times) for times in zip(*found, strict=True)]


def seconds_of(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """How long a call takes."""
    start = clock()
    call()
    return clock() - start
