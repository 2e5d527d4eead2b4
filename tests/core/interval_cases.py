"""Statistics for which intervals are hard, simulated by block: rare fractions, values near a bound, few blocks, drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tl_layersim.core.intervals import UNBOUNDED, Uncertainty, neighbour_correlation, t_interval

BLOCKS = 16
TEXTS = 256
TOKENS = 40


class Coverage(NamedTuple):
    """Share of simulations: covered, covered by an interval that is symmetric about the value, and warned of drift."""

    now: float
    symmetric: float
    warned: float


def fractions(rate: float, simulations: int, texts: int = TEXTS) -> Tensor:
    """Events in each text of 40 tokens, `simulation text`: each text has a rate of its own."""
    rates = torch.distributions.Beta(20 * rate, 20 * (1 - rate)).sample((simulations, texts)).double()
    return torch.distributions.Binomial(TOKENS, rates).sample()


def drifting(rho: float, simulations: int, texts: int) -> Tensor:
    """Numbers of mean 0 by text that follow an AR(1), `simulation text`."""
    x = torch.randn(simulations, texts, dtype=torch.float64)
    for number in range(1, texts):
        x[:, number] = rho * x[:, number - 1] + math.sqrt(1 - rho**2) * x[:, number]
    return x


def covered(
    numerator: Tensor, denominator: Tensor, truth: float, within: tuple[float, float] = UNBOUNDED, events: bool = False
) -> Coverage:
    """The coverage of 95 % intervals of a ratio of sums over texts, `simulation text`; `events` for fractions."""
    a, b = (x.expand(numerator.shape).unflatten(1, (BLOCKS, -1)).sum(2).T for x in (numerator, denominator))
    value = a.sum(0) / b.sum(0)
    replicates = (a.sum(0) - a) / (b.sum(0) - b)
    error, degrees, skewness = Uncertainty.of(value, replicates)
    every = torch.full_like(value, BLOCKS - 1)
    now = t_interval(value, error, degrees, 0.95, within, skewness=skewness)
    if events:
        rows = float(numerator.shape[1])
        none = value == 0
        wilson = t_interval(value[none], error[none], degrees[none], 0.95, within, (rows, rows))
        now = now._replace(high=now.high.masked_scatter(none, wilson.high))
    plain = t_interval(value, error, every, 0.95)
    shares = [float(((interval.low <= truth) & (truth <= interval.high)).double().mean()) for interval in (now, plain)]
    return Coverage(*shares, float((neighbour_correlation(replicates) > 0.4).double().mean()))


def _fraction(rate: float, texts: int = TEXTS) -> Callable[[int], Coverage]:
    tokens = torch.tensor(float(TOKENS), dtype=torch.float64)
    return lambda simulations: covered(fractions(rate, simulations, texts), tokens, rate, (0, 1), events=True)


def _gain(first: float, second: float) -> Callable[[int], Coverage]:
    def simulate(simulations: int) -> Coverage:
        tokens = torch.tensor(float(TOKENS), dtype=torch.float64)
        gain = fractions(second, simulations) - fractions(first, simulations)
        return covered(gain, tokens, second - first)

    return simulate


def _near_one(simulations: int) -> Coverage:
    distance = torch.randn(simulations, TEXTS, dtype=torch.float64).mul(1.2).sub(5).exp()
    return covered(1 - distance, torch.ones_like(distance), 1 - math.exp(-5 + 1.2**2 / 2), (-1, 1))


def _normal(texts: int) -> Callable[[int], Coverage]:
    def simulate(simulations: int) -> Coverage:
        x = torch.randn(simulations, texts, dtype=torch.float64)
        return covered(x, torch.ones_like(x), 0.0)

    return simulate


def _log_normal(texts: int) -> Callable[[int], Coverage]:
    def simulate(simulations: int) -> Coverage:
        x = torch.randn(simulations, texts, dtype=torch.float64).exp()
        return covered(x, torch.ones_like(x), math.exp(0.5), (0, math.inf))

    return simulate


def _held_out(simulations: int) -> Coverage:
    x = 0.5 + 0.2 * torch.randn(simulations, TEXTS, dtype=torch.float64)
    # Three of ten rows are held out, in six blocks.
    held = (torch.arange(TEXTS) // (TEXTS // BLOCKS) < 6).double()
    return covered(x * held, held.expand_as(x), 0.5)


def _lengths(texts: int, simulations: int) -> Tensor:
    """Numbers of tokens, `simulation text`, of which the largest are 20 times the median."""
    return (torch.randn(simulations, texts, dtype=torch.float64) + 3).exp().round().clamp(2, 400)


def _rate_by_length(texts: int) -> Callable[[int], Coverage]:
    """Fractions whose rate in a text of n tokens is n / (n + 40)."""

    def simulate(simulations: int) -> Coverage:
        many = _lengths(2000, 1000)
        length = _lengths(texts, simulations)
        rate = length / (length + 40)
        rates = torch.distributions.Beta(20 * rate, 20 * (1 - rate)).sample()
        events = torch.distributions.Binomial(length, rates).sample()
        truth = float((many.square() / (many + 40)).sum() / many.sum())
        return covered(events, length, truth, (0, 1))

    return simulate


def _rare_losses(share: float, texts: int) -> Callable[[int], Coverage]:
    """Losses of 10 in a share of the texts, and of .5 in the others."""

    def simulate(simulations: int) -> Coverage:
        drawn = torch.rand(simulations, texts) < share
        losses = torch.where(drawn, 10.0, 0.5 + 0.1 * torch.randn(simulations, texts)).double()
        return covered(losses, torch.ones_like(losses), 0.5 + 9.5 * share, (0, math.inf))

    return simulate


def _drift(rho: float, texts: int) -> Callable[[int], Coverage]:
    return lambda simulations: covered(drifting(rho, simulations, texts), torch.ones(texts, dtype=torch.float64), 0.0)


CASES: dict[str, Callable[[int], Coverage]] = {
    "fraction of .3": _fraction(0.3),
    "fraction of .02": _fraction(0.02),
    "fraction of .005": _fraction(0.005),
    "fraction of .001": _fraction(0.001),
    "fraction of .005, 64 texts": _fraction(0.005, 64),
    "fraction of .001, 64 texts": _fraction(0.001, 64),
    "similarity near 1, heavy tails": _near_one,
    "mean of skewed numbers": _log_normal(TEXTS),
    "normal numbers, 16 texts": _normal(16),
    "normal numbers, 32 texts": _normal(32),
    "normal numbers, 64 texts": _normal(64),
    "log-normal numbers, 16 texts": _log_normal(16),
    "log-normal numbers, 32 texts": _log_normal(32),
    "log-normal numbers, 64 texts": _log_normal(64),
    "held-out statistic, 6 of 16 blocks have held-out rows": _held_out,
    "difference of .35 and .3": _gain(0.3, 0.35),
    "difference of .03 and .02": _gain(0.02, 0.03),
    "rate by length, 16 texts": _rate_by_length(16),
    "rate by length, 32 texts": _rate_by_length(32),
    "rate by length, 64 texts": _rate_by_length(64),
    "losses of 10 in 5 % of texts, 64 texts": _rare_losses(0.05, 64),
    "losses of 10 in 5 % of texts, 16 texts": _rare_losses(0.05, 16),
    "losses of 10 in 5 % of texts, 32 texts": _rare_losses(0.05, 32),
    "drift of .8 between texts, 64 texts": _drift(0.8, 64),
    "drift of .95 between texts, 64 texts": _drift(0.95, 64),
    "drift of .8 between texts, 512 texts": _drift(0.8, 512),
    "drift of .95 between texts, 512 texts": _drift(0.95, 512),
}


def coverage_of(name: str, simulations: int, seed: int = 0) -> Coverage:
    """The coverage in a case, by name."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CASES[name](simulations)
