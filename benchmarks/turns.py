"""Times of several runs that take turns, each round in another order, and the FLOPs of their matrix products.

Every round runs each of them once, so that drift of the machine cancels in ratios of the same round. Processor time is taken
beside wall time, because other work on the machine does not count in it; on one thread it is also no matter of scheduling.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
# By name and clock, the seconds of each round.
Times = dict[str, dict[str, list[float]]]


def take_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int, after: Callable[[int, str], Any] = lambda _round, _name: None
) -> Times:
    """Seconds of each run in each round; `after` is called after every run. The caller has run each of them before."""
    times: Times = {name: {clock: [] for clock in CLOCKS} for name in runs}
    order = random.Random(0)
    for number in range(repeats):
        for name in order.sample(list(runs), len(runs)):
            gc.collect()
            start = {clock: read() for clock, read in CLOCKS.items()}
            runs[name]()
            for clock, read in CLOCKS.items():
                times[name][clock].append(read() - start[clock])
            after(number, name)
    return times


def ratios(times: Times, name: str, other: str, clock: str) -> list[float]:
    """Times of one run over those of another in the same round."""
    return [a / b for a, b in zip(times[name][clock], times[other][clock], strict=True)]


def spread(values: list[float], digits: int = 2) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of attention, of both its products at every pair of positions, masked or not, as torch counts it elsewhere."""
    batch, heads, positions, width = query
    return 2 * batch * heads * positions * key[-2] * (width + value[-1])


def product_flops(run: Callable[[], Any]) -> int:
    """FLOPs of the matrix products and of attention in a run: a number that does not depend on the machine.

    All else that a run does is not in it, and a product in float64 counts as one in float32.
    """
    # torch has a formula for attention on a GPU, and none for the operator of a CPU.
    missing = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    with FlopCounterMode(display=False, custom_mapping=missing) as counter:
        run()
    return counter.get_total_flops()
