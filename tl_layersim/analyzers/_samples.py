"""Helpers of analyzers: samples from activations, held-out rows, sums by row, and random draws of samples.

Plain functions of torch: they run inside the kernels that call them, also on a server.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..activations.row_pools import SAMPLES_OF_POOL, SAMPLES_OF_ROW, Samples
from ..activations.view import View, row_ends
from ..core import LayersimError, Sums
from ..core.integer_hash import mixed
from ..data.labels import NO_LABEL
from ..data.texts import LEAST_TEXTS
from ..lens.statistics import read_vectors

# Multiples of the golden ratio, as fractions of 2^32: they are evenly spread over 0 to 1, and have no period.
GOLDEN = 2654435769
# The same for seeds: sqrt(2).
SHIFT = 1779033703
# Rows of the data that can be counted.
COUNTED_ROWS = 2**19


def samples(view: View, *, level: str, pool: str) -> Tensor:
    """Vectors that an analyzer compares (`layer sample d_model`): one for each counted token, or one for each row.

    Args:
        view: activations of one batch.
        level: "token" or "sequence".
        pool: for "sequence": the "mean" of the row's counted tokens, its "last" or its "first" one; "flat" for all of them as
            one vector; "head" for the vector of a row that the model's head reads.

    Raises:
        LayersimError: `pool` is "flat", and rows have different numbers of counted tokens.
    """
    if level == "token":
        return view.activations
    if pool == "head":
        return read_vectors(view, view.activations)
    ends = row_ends(view)
    if pool == "last":
        return view.activations[:, ends]
    lengths = torch.diff(ends, prepend=ends.new_tensor([-1]))
    if pool == "first":
        return view.activations[:, ends - lengths + 1]
    if pool == "flat":
        least = int(lengths.min())
        most = int(lengths.max())
        if least < most:
            raise LayersimError(f"`pool` is 'flat', but rows have {least} to {most} tokens; all rows must have equally many.")
        return view.activations.reshape(len(view.activations), len(ends), -1)
    return torch.stack([rows.mean(1) for rows in torch.split(view.activations, lengths.tolist(), dim=1)], dim=1)


def check_classes(classes: Tensor, limit: float, remedy: str = "") -> None:
    """Raise an error if a class is negative, or not below a limit.

    Args:
        classes: `sample`, the labels that are classes.
        limit: a number above every class that is allowed.
        remedy: sentence that says how to raise the limit; "" if it cannot be raised.

    Raises:
        LayersimError: a class is not allowed.
    """
    if not len(classes):
        return
    least = int(classes.min())
    most = int(classes.max())
    if not 0 <= least <= most < limit:
        allowed = f"from 0 to {limit - 1}" if limit < math.inf else "0 or more"
        raise LayersimError(
            f"`labels` are classes from {least} to {most}; they must be {allowed}, or {NO_LABEL} for no class."
            + (f" {remedy}" if remedy and most >= limit else "")
        )


def check_finite(name: str, values: Tensor) -> None:
    """Raise an error if an argument has values that are NaN or infinite.

    Args:
        name: name of the argument.
        values: the argument.

    Raises:
        LayersimError: a value is not finite.
    """
    not_finite = int((~values.isfinite()).sum())
    if not_finite:
        raise LayersimError(f"`{name}` has {not_finite} values that are NaN or infinite; all values must be finite.")


def text_of(view: View) -> Tensor:
    """Identity of the text of each token: the index of its first row in the data (`token`). The source must know the rows."""
    text = view.row if view.text is None else view.text
    assert text is not None
    return text


def held_out(row: Tensor, fraction: float, seed: int, first_row: int | None = None) -> Tensor:
    """Whether each sample belongs to a held-out text. It depends on the index of the text's first row only.

    Args:
        row: `sample`, index in the data of the first row of the text; with `first_row`, of the row itself.
        fraction: fraction of the texts to hold out.
        seed: random seed of the choice.
        first_row: index of the first held-out row, which replaces `fraction`; None to use `fraction`.
    """
    if first_row is not None:
        return row >= first_row
    return (row * GOLDEN + seed * SHIFT) % 2**32 < round(fraction * 2**32)


def with_unit(samples: Samples, unit: str) -> Samples:
    """The samples with the texts that a measure takes as independent.

    Args:
        samples: the samples of a pool.
        unit: "text" for the texts of the data, "row" for rows, "token" for single samples.
    """
    if unit == "text":
        return samples
    text = samples.row if unit == "row" else torch.arange(len(samples.row))
    return replace(samples, text=text, neighbours=False)


def independent_parts(samples: Samples) -> list[Tensor]:
    """Indices of samples whose texts are independent of each other, as one part, or as two parts of every other text.

    Args:
        samples: the samples of a pool. Texts that follow each other may share a part of the data.
    """
    if not samples.neighbours:
        return [torch.arange(len(samples.text))]
    return [(samples.text % 2 == parity).nonzero()[:, 0] for parity in (0, 1)]


def draw_minibatches(samples: Samples, size: int, seed: int, least: int, by_text: bool) -> list[Tensor]:
    """Draw minibatches without replacement. Returns indices of samples.

    The draw depends on the rows of the pool and the seed, not on the number of the pool. Texts that are neighbours are never in
    one minibatch.

    Args:
        samples: the samples of a pool.
        size: samples in a minibatch. A smaller pool gives one smaller minibatch; a pool of fewer than `least` gives none.
        seed: random seed of the draw.
        least: smallest number of samples that the measure needs.
        by_text: whether pairs of samples from one text are left out. A minibatch then needs `LEAST_TEXTS` texts, and each
            sample needs `least` - 1 samples from other texts.

    Examples:
        >>> rows = torch.arange(4).repeat_interleave(3)
        >>> pool = Samples(rows, torch.arange(3).repeat(4), rows, rows)
        >>> [len(minibatch) for minibatch in draw_minibatches(pool, size=6, seed=0, least=4, by_text=False)]
        [6, 6]
    """
    minibatches = []
    for part in independent_parts(samples):
        drawn = _draw_of_part(samples.select(part), size, seed, least, by_text)
        minibatches += [part[index] for index in drawn]
    return minibatches


def _draw_of_part(samples: Samples, size: int, seed: int, least: int, by_text: bool) -> list[Tensor]:
    """The minibatches of samples whose texts are independent, see `draw_minibatches`."""
    key = mixed(samples.key + mixed(samples.rank * 1000003 + samples.row * 8191 + seed * 131071))
    order = key.argsort()
    order = order[samples.row[order].argsort(stable=True)]
    counts: Tensor = torch.unique_consecutive(samples.row[order], return_counts=True)[1]
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    chosen = _limit_per_text(samples, order[place < SAMPLES_OF_ROW], key)
    size = min(size, len(chosen))
    if size < least:
        return []
    chosen = chosen[mixed(key[chosen]).argsort()]
    minibatches = []
    for minibatch in torch.split(chosen[: len(chosen) // size * size], size):
        samples_of_text: Tensor = torch.unique(samples.text[minibatch], return_counts=True)[1]
        enough_texts = len(samples_of_text) >= LEAST_TEXTS and size - int(samples_of_text.max()) >= least - 1
        if not by_text or enough_texts:
            minibatches.append(minibatch)
    return minibatches


def _limit_per_text(samples: Samples, chosen: Tensor, key: Tensor) -> Tensor:
    """At most as many samples of each text as keep a pool within `SAMPLES_OF_POOL`, drawn at random from all its rows.

    Args:
        samples: the samples of a pool.
        chosen: indices of samples, at most `SAMPLES_OF_ROW` of each row.
        key: a random number for each sample.
    """
    texts = len(torch.unique(samples.text))
    if texts == len(torch.unique(samples.row)):
        return chosen
    order = chosen[mixed(key[chosen] + 1).argsort()]
    order = order[samples.text[order].argsort(stable=True)]
    counts: Tensor = torch.unique_consecutive(samples.text[order], return_counts=True)[1]
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return order[place < max(SAMPLES_OF_ROW, SAMPLES_OF_POOL // texts)]


def draw_grid(samples: Samples, size: int, seed: int, least: int = 1, least_texts: int = LEAST_TEXTS) -> Tensor:
    """Draw samples at the same positions of several texts. Returns indices (`text position`).

    A position is a place in one of the rows of a text: the same place in the same of its rows, for all texts. Of texts of
    unequal lengths those are taken that have most samples in common, half of the texts at least. The choice depends on the
    numbers of samples of the rows alone. Of texts that are neighbours every other is taken.

    Args:
        samples: the samples of a pool.
        size: largest number of samples.
        seed: random seed of the positions.
        least: smallest number of samples; fewer give an empty grid.
        least_texts: smallest number of texts; fewer give an empty grid.

    Examples:
        Rows of 3, 1, 3, 3 and 3 samples: four rows of three positions are most.

        >>> rows = torch.tensor([0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4])
        >>> pool = Samples(rows, torch.tensor([0, 1, 2, 0, 0, 1, 2, 0, 1, 2, 0, 1, 2]), rows, rows)
        >>> draw_grid(pool, size=12, seed=0).sort(1).values[1:3]
        tensor([[4, 5, 6],
                [7, 8, 9]])
    """
    part = independent_parts(samples)[0]
    samples = samples.select(part)
    if not len(part):
        return part.new_zeros(0, 0)
    starts, counts = _rows_of_texts(samples)
    # Texts with most samples first: `common` are the samples that the first texts have in common in each of their rows.
    order = counts.sum(1).argsort(descending=True, stable=True)
    common = counts[order].cummin(0).values
    texts = torch.arange(1, min(len(counts), size) + 1)
    most = SAMPLES_OF_ROW if counts.shape[1] == 1 else max(SAMPLES_OF_ROW, SAMPLES_OF_POOL // len(counts))
    widths = torch.minimum(common.sum(1)[: len(texts)], size // texts).clamp(max=most)
    area = (texts * widths)[(len(texts) - 1) // 2 :]
    # The most texts among equal areas.
    height = len(texts) - int(area.flip(0).argmax())
    width = int(widths[height - 1])
    if height < least_texts or (height - 1) * width < least - 1 or not width:
        return part.new_zeros(0, 0)
    chosen = order[:height].sort().values
    in_row = common[height - 1]
    row = torch.arange(len(in_row)).repeat_interleave(in_row)
    place = torch.arange(len(row)) - (in_row.cumsum(0) - in_row)[row]
    key = samples.key[starts[:, 0]].sum() + seed * 131071
    positions = mixed(torch.arange(len(row)) * 1000003 + key).argsort()[:width]
    return part[starts[chosen][:, row[positions]] + place[positions]]


def _rows_of_texts(samples: Samples) -> tuple[Tensor, Tensor]:
    """Index of the first sample of each row of each text, and number of its samples (both `text row`); 0 samples without a row.

    Rows are counted from the first row of the text that has a sample.

    Args:
        samples: the samples of a pool, ascending by text and row.
    """
    row, counts = torch.unique_consecutive(samples.row, return_counts=True)
    start = counts.cumsum(0) - counts
    text, of_text = torch.unique_consecutive(samples.text[start], return_inverse=True, return_counts=True)[1:]
    first_row = row[of_text.cumsum(0) - of_text]
    rows = row - first_row[text]
    shape = (len(first_row), int(rows.max()) + 1)
    starts = torch.zeros(shape, dtype=torch.int64)
    starts[text, rows] = start
    sizes = torch.zeros(shape, dtype=torch.int64)
    sizes[text, rows] = counts
    return starts, sizes


def draw_orders(count: int, rows: int, key: int) -> Tensor:
    """Random orders of the rows (`order row`). Cyclic shifts of each order give the permutations.

    Args:
        count: number of permutations that the orders must give.
        rows: number of rows.
        key: random seed, see `pool_key`.
    """
    generator = torch.Generator().manual_seed(key)
    # Each order has as many cyclic shifts as there are rows. The division rounds up.
    order_count = -(-count // rows)
    if not order_count:
        return torch.zeros(0, rows, dtype=torch.int64)
    return torch.stack([torch.randperm(rows, generator=generator) for _ in range(order_count)])


def draw_permutations(count: int, rows: int, key: int) -> Tensor:
    """Permutations of the rows (`permutation row`): cyclic shifts of random orders.

    Each permutation is uniformly distributed. Those of one order send a row to different places, and the similarities of
    all of them follow from one Fourier transform. The first permutations of a larger count are those of a smaller one.

    Args:
        count: number of permutations.
        rows: number of rows.
        key: random seed, see `pool_key`.

    Examples:
        >>> draw_permutations(3, 4, key=0)
        tensor([[0, 1, 3, 2],
                [1, 3, 2, 0],
                [3, 2, 0, 1]])
    """
    return cyclic_shifts(draw_orders(count, rows, key))[:count]


def cyclic_shifts(orders: Tensor) -> Tensor:
    """All cyclic shifts of each order (`order shift, item`), those of one order after each other.

    Args:
        orders: `order item`, orders of items.

    Examples:
        >>> cyclic_shifts(torch.tensor([[0, 2, 1]]))
        tensor([[0, 2, 1],
                [2, 1, 0],
                [1, 0, 2]])
    """
    items = torch.arange(orders.shape[1])
    return orders[:, (items[:, None] + items) % orders.shape[1]].flatten(0, 1)


def pool_key(samples: Samples, seed: int) -> int:
    """Random seed computed from the token ids of the samples' rows and the user's seed."""
    return int(mixed(samples.key.sum() + seed * 131071 + 1)) & 0x7FFFFFFFFFFFFFFF


def row_counts_kernel(view: View) -> dict[str, Tensor]:
    """Number of counted positions in each row of the data."""
    assert view.row is not None
    if len(view.row) and int(view.row.max()) >= COUNTED_ROWS:
        raise LayersimError(f"`per_prompt` is True; it must be False for data of more than {COUNTED_ROWS} rows.")
    return {"rows": torch.bincount(view.row, minlength=COUNTED_ROWS)}


def counted_rows(first: Sums) -> Tensor:
    """Indices of the rows with counted positions, ascending.

    Args:
        first: sums of `row_counts_kernel`; empty without values by row.
    """
    return first["rows"].nonzero()[:, 0] if first else torch.zeros(0, dtype=torch.int64)


def prompt_fields(name: str, sums: Sums, first: Sums) -> dict[str, Any]:
    """A dict of result fields for a quantity in each row of the data: means, token counts and row indices.

    The fields are empty if values by row were not measured.

    Args:
        name: name of the quantity.
        sums: sums of the main pass over the data.
        first: sums of `row_counts_kernel`; empty without values by row.
    """
    if not first:
        empty = torch.zeros(0, dtype=torch.float64)
        return {f"prompt_{name}": empty, "prompt_tokens": empty, "prompt_rows": ()}
    return {
        f"prompt_{name}": sums[f"prompt {name}"] / sums[f"prompt {name} known"],
        "prompt_tokens": sums["prompt tokens"],
        "prompt_rows": tuple(counted_rows(first).tolist()),
    }


def sums_by_row(values: Tensor, row: Tensor, rows: Tensor) -> Tensor:
    """Sum values by row of the data: `row ...`, float64.

    Args:
        values: `sample ...`.
        row: `sample`, index of the row of each sample.
        rows: indices of all rows, ascending.
    """
    index = torch.searchsorted(rows.to(row.device), row).to(values.device)
    zeros = torch.zeros(len(rows), *values.shape[1:], dtype=torch.float64, device=values.device)
    return zeros.index_add(0, index, values.double())


def defined_by_row(values: Tensor, rows: tuple[int, ...], analyzer: str) -> dict[str, float]:
    """A dict of the values that are not NaN, with keys such as "row 3".

    Args:
        values: `row`, the values.
        rows: indices of the rows; empty if values by row were not measured.
        analyzer: name of the analyzer, for the message.

    Raises:
        LayersimError: values by row were not measured.
    """
    if not rows:
        raise LayersimError(f"This result has no values by prompt; {analyzer}(per_prompt=True) measures them.")
    return {f"row {row}": value for row, value in zip(rows, values.tolist(), strict=True) if not math.isnan(value)}
