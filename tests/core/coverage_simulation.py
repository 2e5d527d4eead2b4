"""Simulated documents with dependent tokens: how often does an interval of the engine contain the true value?

All simulations run at once: they are the first axis of every sum. The sums are those of `Cosine` and of minibatch `CKA`, for
two sites, and go through the blocks, the jackknife and the t interval of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.stats import norm
from torch import Tensor

from tl_layersim.analyzers.cka import centred, gram_matrices
from tl_layersim.core.intervals import degrees_of_freedom, leave_one_out, quantiles_from_histogram, standard_error, t_interval
from tl_layersim.core.sums import DataBlock, Sums, SumTree

BINS = 400
WIDTH = 8
# Of the variance of a token, the part that its document shares, and the correlation of neighbours in the rest.
SHARED = 0.3
NEIGHBOURS = 0.6


def mean(sums: Sums) -> Tensor:
    """The mean cosine."""
    return sums["cosine"] / sums["tokens"]


def cka(sums: Sums) -> Tensor:
    """CKA of the two sites, a ratio of sums over minibatches."""
    return sums["xy"] / (sums["xx"] * sums["yy"]).sqrt()


def quantile(level: float) -> Callable[[Sums], Tensor]:
    """A quantile of the cosines over tokens, from their histogram."""
    return lambda sums: quantiles_from_histogram(sums["histogram"], -1.0, 1.0, (level,))[0]


STATISTICS: dict[str, Callable[[Sums], Tensor]] = {
    "mean": mean,
    "CKA": cka,
    "median": quantile(0.5),
    "quantile 0.05": quantile(0.05),
    "quantile 0.95": quantile(0.95),
}


def lengths_of(batches: int, documents: int, unequal: bool) -> list[list[int]]:
    """Numbers of tokens of the documents of each batch: all 40, or between 8 and 120, most of them short."""
    generator = torch.Generator().manual_seed(batches)
    drawn = 8 + 112 * torch.rand(batches, documents, generator=generator) ** 2
    return [[int(length) if unequal else 40 for length in row] for row in drawn]


def document(length: int, simulations: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Activations of the tokens of a document at two sites, each `simulation token dimension`."""
    shared, signal, noise = (torch.randn(simulations, n, WIDTH, generator=generator) for n in (2, length, length))
    for token in range(1, length):
        signal[:, token] = NEIGHBOURS * signal[:, token - 1] + math.sqrt(1 - NEIGHBOURS**2) * signal[:, token]
    x = math.sqrt(SHARED) * shared[:, :1] + math.sqrt(1 - SHARED) * signal
    y = 0.6 * x + 0.5 * shared[:, 1:] + 0.6 * noise + 0.3 * x.square()
    return x + 0.5, y


def batch_sums(documents: list[tuple[Tensor, Tensor]]) -> Sums:
    """The sums of one batch of documents, which is one minibatch of CKA."""
    x, y = (torch.cat(site, 1) for site in zip(*documents, strict=True))
    cosine = torch.cosine_similarity(x.double(), y.double(), dim=-1)
    bins = ((cosine + 1) / 2 * BINS).long().clamp(0, BINS - 1)
    histogram = torch.zeros(len(x), BINS, dtype=torch.int64).scatter_add_(1, bins, torch.ones_like(bins))
    a, b = (centred(gram_matrices(site), biased=False)[0] for site in (x, y))
    return Sums(
        {
            "tokens": torch.tensor(x.shape[1]),
            "cosine": cosine.sum(1),
            "square": cosine.square().sum(1),
            "histogram": histogram,
            "xy": (a * b).sum(1),
            "xx": a.square().sum(1),
            "yy": b.square().sum(1),
        }
    )


def coverage(lengths: list[list[int]], simulations: int, seed: int, level: float = 0.95) -> dict[str, dict[str, float]]:
    """For each statistic, the fraction of simulations whose interval contains the true value.

    The true value is the statistic of the sums of all simulations.

    Args:
        lengths: tokens of each document, by batch.
        simulations: their number.
        seed: of the random numbers.
        level: of the intervals.

    Returns:
        By statistic: `coverage` of the jackknife; `naive`, of an interval that takes tokens for independent (NaN for CKA, which
        has no such formula); `ratio`, the mean standard error over the standard deviation of the statistic; and `blocks`.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = SumTree(1)
    for batch in lengths:
        sums = batch_sums([document(length, simulations, generator) for length in batch])
        blocks = blocks.add(DataBlock(1, int(sums["tokens"]), {"sums": sums}))
    sums_of_blocks = [block.sums["sums"] for block in blocks.blocks()]
    total = sum(sums_of_blocks, Sums())
    pooled = Sums({name: values.double().sum(0, keepdim=True) for name, values in total.fields.items() if name != "tokens"})
    pooled = Sums({**pooled.fields, "tokens": total["tokens"] * simulations})
    without_block = list(leave_one_out(sums_of_blocks, Sums.__add__))
    out = {}
    for name, statistic in STATISTICS.items():
        value = statistic(total)
        truth = statistic(pooled)
        replicates = torch.stack([statistic(sums) for sums in without_block])
        error = standard_error(value, replicates)
        interval = t_interval(value, error, degrees_of_freedom(value, replicates), level)
        out[name] = {
            "coverage": _contained(interval.low, interval.high, truth),
            "naive": _contained(*_naive(name, total, level), truth),
            "ratio": float(error.mean() / value.std()),
            "blocks": len(sums_of_blocks),
        }
    return out


def _contained(low: Tensor, high: Tensor, truth: Tensor) -> float:
    return float(((low <= truth) & (truth <= high)).double().mean()) if not bool(low.isnan().any()) else math.nan


def _naive(name: str, sums: Sums, level: float) -> tuple[Tensor, Tensor]:
    """The ends of the interval that takes tokens for independent: of a mean, or between order statistics of a quantile."""
    z = float(norm.ppf(0.5 + level / 2))
    count = int(sums["tokens"])
    if name == "mean":
        middle = mean(sums)
        margin = z * ((sums["square"] / count - middle**2) / count).sqrt()
        return middle - margin, middle + margin
    if name == "CKA":
        return (torch.full_like(sums["xy"], math.nan),) * 2
    at = 0.5 if name == "median" else float(name.split()[1])
    margin = z * math.sqrt(at * (1 - at) / count)
    return quantile(max(at - margin, 0))(sums), quantile(min(at + margin, 1))(sums)
