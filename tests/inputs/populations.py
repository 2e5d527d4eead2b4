"""Texts with known population values: sites whose covariances are written down, and what the package says of samples of them.

A row is a text: its tokens share an effect of the text and follow an AR(1). All simulations run at once, as sites of one view:
the first half are the x of each simulation, the others its y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from scipy.signal import lfilter
from torch import Tensor

import tl_layersim as lsim
from tl_layersim import CKA
from tl_layersim.activations import View
from tl_layersim.analyzers import Analyzer
from tl_layersim.analyzers._permutation_null import CalibratedMatrix
from tl_layersim.core import Result, Sums
from tl_layersim.core.sums import MOST_BLOCKS, POOL, DataBlock, with_pools
from tl_layersim.engine.report_assembly import jackknife_blocks, replicated

from ..models.token_bank import opened
from .views import sites_run

WIDTH = 8
# Rows of one pool.
POOL_ROWS = 16


def texts(lengths: Sequence[int], sites: int, rho: float, effect: float, generator: torch.Generator) -> list[Tensor]:
    """For each text `site token width` of variance 1: `effect` of it is shared by the text, the rest an AR(1) with `rho`."""
    rows = []
    for length in lengths:
        own = torch.randn(sites, length, WIDTH, generator=generator)
        # The first token has variance 1 as it is; each other is rho of the token before and an innovation.
        own[:, 1:] *= math.sqrt(1 - rho**2)
        own = torch.from_numpy(lfilter([1.0], [1.0, -rho], own.numpy(), axis=1)).float()
        shared = torch.randn(sites, 1, WIDTH, generator=generator)
        rows.append(math.sqrt(1 - effect) * own + math.sqrt(effect) * shared)
    return rows


def mixtures(width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """The matrices A and B of x = A s and y = B s, in which later dimensions of s have less weight."""
    fixed = torch.Generator().manual_seed(7)
    a, b = torch.randn(2, width, width, generator=fixed) * torch.linspace(1, 0.2, width)
    return a, b


def population_cka(shared: float) -> float:
    """CKA of x = A(sqrt(c) s + sqrt(1 - c) u) and y = B(sqrt(c) s + sqrt(1 - c) v): Cov(x, y) = c AB'."""
    a, b = (m.double() for m in mixtures())
    return float((shared * a @ b.T).square().sum() / ((a @ a.T).norm() * (b @ b.T).norm()))


def pools(
    lengths: Sequence[int], simulations: int, rho: float, effect: float, shared: float, seed: int
) -> list[tuple[View, int]]:
    """Views of 16 texts each, and the number of their tokens."""
    generator = torch.Generator().manual_seed(seed)
    a, b = mixtures()
    found = []
    for start in range(0, len(lengths), POOL_ROWS):
        own = lengths[start : start + POOL_ROWS]
        s, u, v = (torch.cat(texts(own, simulations, rho, effect, generator), 1) for _ in range(3))
        x = (math.sqrt(shared) * s + math.sqrt(1 - shared) * u) @ a.T
        y = (math.sqrt(shared) * s + math.sqrt(1 - shared) * v) @ b.T
        row = torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own))
        position = torch.cat([torch.arange(length) for length in own])
        # Token ids on which draws depend.
        ids = torch.randint(1000, (len(row),), generator=generator)
        found.append((View(torch.cat([x, y]), ids, row, position, row=row + start), len(row)))
    return found


def measured(analyzer: Analyzer, views: list[tuple[View, int]], intervals: bool = False) -> Result:
    """The result of an analyzer over pools of texts."""
    first = Sums()
    if (kernel := analyzer.first_kernel()) is not None:
        for view, _ in views:
            first = first + Sums.of(kernel(view))
    kernels = {"k": analyzer.kernel(first)}
    if (pool := analyzer.pool_kernel(first)) is not None:
        kernels[POOL + "k"] = pool
    each = [DataBlock(1, tokens, {name: Sums.of(kernel(view)) for name, kernel in kernels.items()}) for view, tokens in views]
    while len(each) > MOST_BLOCKS:
        each = [sum(each[i + 1 : i + 2], start=each[i]) if i + 1 < len(each) else each[i] for i in range(0, len(each), 2)]
    total = each[0]
    for block in each[1:]:
        total = total + block
    names = tuple(f"site {number}" for number in range(len(views[0][0].activations)))
    run = sites_run(names, first=first)
    result = analyzer.compute(with_pools(total.sums, "k"), run)
    return replicated(result, analyzer, run, "k", jackknife_blocks(each, "k")) if intervals else result


def of_pairs(matrix: Tensor) -> Tensor:
    """The entries of each simulation's x and y in a matrix over all sites."""
    half = len(matrix) // 2
    return matrix[:half, half:].diagonal()


def lengths_of(count: int, seed: int = 0) -> list[int]:
    """Lengths of texts, 8 to 120 tokens."""
    return torch.randint(8, 121, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cka_coverage(count: int, simulations: int, rho: float, effect: float, seed: int) -> tuple[float, Tensor]:
    """Share of 95 % intervals of CKA that contain the population value, and the estimates less that value.

    Args:
        count: number of texts.
        simulations: that share one view.
        rho: of the AR(1) of tokens.
        effect: share of the variance that a text has in common.
        seed: of the data.
    """
    shared = 0.6
    found = measured(CKA(), pools(lengths_of(count, seed), simulations, rho, effect, shared, seed), True)
    interval = found.interval("values")
    value, low, high = (of_pairs(one) for one in interval[:3])
    truth = population_cka(shared)
    return float(((low <= truth) & (truth <= high)).double().mean()), value - truth


def rejections(
    analyzer: Analyzer, count: int, simulations: int, rho: float, effect: float, shared: float, seed: int
) -> tuple[float, float]:
    """Share of simulations with p at most .05, and the mean calibrated value; `shared` 0 for independent sites."""
    found = measured(analyzer, pools(lengths_of(count, seed), simulations, rho, effect, shared, seed))
    assert isinstance(found, CalibratedMatrix)
    return float((of_pairs(found.p_values) <= 0.05).double().mean()), float(of_pairs(found.calibrated).mean())


How = Literal["groups", "cut", "rows"]


def documents(
    analyzer: Analyzer,
    count: int,
    rows: int,
    length: int,
    simulations: int,
    shared: float,
    seed: int,
    how: How,
    intervals: bool,
) -> Result:
    """The result of an analyzer on documents of several rows, which share 20 % of the variance and whose rows share 5 %.

    Args:
        analyzer: the measure.
        count: number of documents.
        rows: rows of each document.
        length: tokens of a row.
        simulations: that share one run.
        shared: share of the variance that x and y have in common.
        seed: of the data.
        how: "groups" for rows with their document as group, "cut" for documents that the package cuts into rows, "rows" for
            rows alone, as if they were independent.
        intervals: whether to measure intervals.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b = mixtures()
    s, u, v = (latent_of_documents(count, rows, length, (simulations, WIDTH), generator) for _ in range(3))
    x = (math.sqrt(shared) * s + math.sqrt(1 - shared) * u) @ a.T
    y = (math.sqrt(shared) * s + math.sqrt(1 - shared) * v) @ b.T
    data = data_of_documents(count, rows, length, how)
    return lsim.analyze(opened(torch.cat([x, y], 1)), data, [analyzer], intervals=intervals)[analyzer.name]


def latent_of_documents(count: int, rows: int, length: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of variance 1, `token ...`: a document shares 20 % of it, and a row 5 %."""
    shapes = (count, rows, length), (count, rows, 1), (count, 1, 1)
    own, row, document = (torch.randn(*each, *shape, generator=generator) for each in shapes)
    return (0.75**0.5 * own + 0.05**0.5 * row + 0.2**0.5 * document).flatten(0, 2)


def data_of_documents(count: int, rows: int, length: int, how: How, labels: bool = False) -> lsim.Data:
    """The rows of documents, whose token ids count through a bank.

    Args:
        count: number of documents.
        rows: rows of each document.
        length: tokens of a row.
        how: see `documents`.
        labels: whether the data has labels: 0 and 1 in turn.
    """
    shape = (count, rows * length) if how == "cut" else (count * rows, length)
    ids = torch.arange(count * rows * length).view(shape)
    columns = {"input_ids": ids} | ({"labels": ids % 2} if labels else {})
    groups = [number // rows for number in range(count * rows)] if how == "groups" else None
    return lsim.Data(columns, seq_len=length if how == "cut" else None, groups=groups)


def document_coverage(count: int, rows: int, length: int, simulations: int, seed: int, how: How) -> dict[str, float]:
    """Share of 95 % intervals of accuracy and of cross-entropy that contain the true value.

    The margin of the right of two classes is normal with mean 1.2 and variance 4, of which a document shares 20 %. Each
    simulation is a layer.

    Args:
        count: number of documents.
        rows: rows of each document.
        length: tokens of a row.
        simulations: that share one run.
        seed: of the data.
        how: see `documents`.
    """
    generator = torch.Generator().manual_seed(seed)
    margin = 1.2 + 2 * latent_of_documents(count, rows, length, (simulations + 1,), generator)
    # The right class is 0 and 1 in turn.
    sign = (2 * (torch.arange(len(margin)) % 2) - 1)[:, None]
    bank = torch.stack([torch.zeros_like(margin), sign * margin], -1)
    data = data_of_documents(count, rows, length, how, labels=True)
    result = lsim.analyze(opened(bank), data, lsim.LogitLens(labels="data"), intervals=True)["logit_lens"]
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weight = (-grid.square() / 2).exp()
    margins = 1.2 + 2 * grid
    truth = {
        "accuracy": float((weight * (margins > 0)).sum() / weight.sum()),
        "cross_entropy": float((weight * torch.nn.functional.softplus(-margins)).sum() / weight.sum()),
    }
    covered = {}
    for name, value in truth.items():
        _, low, high, _ = result.interval(name)
        covered[name] = float(((low <= value) & (value <= high)).double().mean())
    return covered


def lengths_of_documents(kind: str, seed: int) -> list[list[int]]:
    """Numbers of tokens of the rows of each document.

    Args:
        kind: "1 row", "2 rows", "4 rows" or "16 rows" for documents of equal lengths; "1 to 6 rows" for rows of 2 to 33 tokens;
            "5 to 80 tokens" for documents that are cut into rows of 10 tokens.
        seed: of the lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "5 to 80 tokens":
        tokens = torch.randint(5, 81, (24,), generator=generator).tolist()
        return [[10] * (length // 10) + [length % 10] * (length % 10 > 0) for length in tokens]
    if kind == "1 to 6 rows":
        rows = torch.randint(1, 7, (24,), generator=generator).tolist()
        return [torch.randint(2, 34, (count,), generator=generator).tolist() for count in rows]
    rows_of_document = int(kind.split()[0])
    documents_of_kind = {1: 32, 2: 24, 4: 16, 16: 16}[rows_of_document]
    length = 5 if rows_of_document == 16 else 10
    return [[length] * rows_of_document] * documents_of_kind


def latent_of_wandering_documents(lengths: Sequence[int], simulations: int, generator: torch.Generator) -> Tensor:
    """Numbers of mean 0 that wander through each document, `token simulation dimension`.

    They are an AR(1) at .9 that runs on from row to row, times a number of the document whose fourth moment is 3 times that of
    a normal distribution: a chi-squared distribution with 5 degrees of freedom is below it, as in Student's t.

    Args:
        lengths: number of tokens of each document.
        simulations: number of simulations.
        generator: of the numbers.
    """
    longest = max(lengths)
    wandering = torch.randn(longest, len(lengths), simulations, WIDTH, generator=generator)
    for token in range(1, longest):
        wandering[token] = 0.9 * wandering[token - 1] + math.sqrt(1 - 0.9**2) * wandering[token]
    normals = torch.randn(5, len(lengths), simulations, 1, generator=generator)
    wandering = wandering * normals.square().mean(0).rsqrt()
    return torch.cat([wandering[:length, number] for number, length in enumerate(lengths)])


def wandering_documents(
    analyzers: Sequence[Analyzer],
    kind: str,
    simulations: int,
    shared: float,
    seed: int,
    how: How,
    intervals: bool = False,
) -> lsim.Report:
    """The results of analyzers on documents whose tokens wander, see `latent_of_wandering_documents`.

    Each place of each row has a mean of its own in x and in y, which is the same in all documents: a null that exchanged
    positions would take it for similarity.

    Args:
        analyzers: the measures.
        kind: see `lengths_of_documents`.
        simulations: that share one run.
        shared: share of the variance that x and y have in common.
        seed: of the data.
        how: see `documents`.
        intervals: whether to measure intervals.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = lengths_of_documents(kind, seed)
    lengths = [sum(row) for row in rows]
    s, u, v = (latent_of_wandering_documents(lengths, simulations, generator) for _ in range(3))
    a, b = mixtures()
    longest = max(length for document in rows for length in document)
    places = [row * longest + torch.arange(length) for document in rows for row, length in enumerate(document)]
    place = torch.cat(places)
    means_x, means_y = torch.randn(2, int(place.max()) + 1, 1, WIDTH, generator=generator)
    x = (math.sqrt(shared) * s + math.sqrt(1 - shared) * u) @ a.T + means_x[place]
    y = (math.sqrt(shared) * s + math.sqrt(1 - shared) * v) @ b.T + means_y[place]
    return lsim.analyze(opened(torch.cat([x, y], 1)), data_of_rows(rows, how), analyzers, intervals=intervals)


def data_of_rows(rows: Sequence[Sequence[int]], how: How) -> lsim.Data:
    """The rows of documents of any lengths, whose token ids count through a bank.

    Args:
        rows: see `lengths_of_documents`; for "cut" all rows of a document but its last have the length of the first row.
        how: see `documents`.
    """
    ids = torch.arange(sum(sum(document) for document in rows))
    if how == "cut":
        whole = list(ids.split([sum(document) for document in rows]))
        return lsim.Data(whole, seq_len=max(document[0] for document in rows), batch_size=64)
    groups = [number for number, document in enumerate(rows) for _ in document]
    cut = list(ids.split([length for document in rows for length in document]))
    return lsim.Data(cut, groups=groups if how == "groups" else None, batch_size=64)
