"""Pools: samples collected from several forward passes, for measures over pairs of samples.

The sums of a batch are computed for its leaves (groups of 1 to 16 texts) and its pools. Both hold whole texts. `BatchPlan` runs
all kernels on a batch whose rows need several forward passes.

Plain functions of torch and small classes: they are serialised by value with the kernels that they call, and run on servers
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.integer_hash import mixed
from ..core.sums import added
from .view import Kernel, Reduced, View, in_full_precision, select_sites, tokens_alone

if TYPE_CHECKING:
    from ..data.batches import Batch

# Smallest number of texts in a pool, and largest number of texts in a leaf.
TEXTS_OF_POOL = 16
# Largest number of samples of one row. On SmolLM2 and 126 tokens a row, all samples reduce the error of CKA by a tenth.
SAMPLES_OF_ROW = 64
# Largest number of samples that are kept of the texts of a pool if they have several rows, but for `SAMPLES_OF_ROW` of each.
SAMPLES_OF_POOL = 4096


@dataclass(frozen=True)
class Samples:
    """Samples of a batch or pool: the row and the text of each sample, and its index among the samples of the row.

    Attributes:
        row: `sample`, index of its row in the batch or pool, ascending.
        rank: `sample`, its index among the samples of its row.
        key: `sample`, a hash of the token ids of its row.
        origin: `sample`, identity of its text, the index of the text's first row in the data; -1 if unknown.
        text: `sample`, index of its text in the batch or pool, ascending; by default each row is a text.
        neighbours: whether texts that follow each other are not independent.
    """

    row: Tensor
    rank: Tensor
    key: Tensor
    origin: Tensor
    text: Tensor = None  # type: ignore[assignment]  # filled in
    neighbours: bool = False

    def __post_init__(self) -> None:
        if self.text is None:
            object.__setattr__(self, "text", self.row)

    def select(self, index: Tensor) -> Samples:
        """Select samples by index."""
        selected = {name: getattr(self, name)[index] for name in ("row", "rank", "key", "origin", "text")}
        return Samples(**selected, neighbours=self.neighbours)


Draws = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class PoolKernel:
    """Kernel that draws samples from a pool of texts, and returns sums over pairs of these samples.

    Attributes:
        read: function from a view to its samples, `site sample width`.
        whole_rows: whether `read` returns one sample for each row.
        size: samples that a pool needs.
        draw: function from the `Samples` of a pool to the indices of the drawn samples, by name.
        sums: function from the samples of each model, `site sample width`, the widths of its sites, the `Samples` and the draws
            to tensors that are added over pools.
        sites: for each model, indices of the sites to read; None for all.
    """

    read: Callable[[View], Tensor]
    whole_rows: bool
    size: int
    draw: Callable[[Samples], Draws]
    sums: Callable[..., dict[str, Tensor]]
    sites: tuple[tuple[int, ...], ...] | None = None

    def texts(self, density: float) -> int:
        """Number of texts in a pool: 16 times a power of two.

        Args:
            density: mean number of counted positions per text.
        """
        return pool_texts(self.size, 1 if self.whole_rows else density)

    def __call__(self, *views: View) -> dict[str, Tensor]:
        """Compute the sums of a single pool that holds all rows of the views, each of which is a text.

        Args:
            *views: views of the same tokens, one for each model.
        """
        rows = int(views[0].sequence[-1]) + 1 if len(views[0].sequence) else 1
        plan = plan_batch(views[0], (0, rows), rows, None, {"": self})
        [(_, out)] = plan.finish([([], {"": plan.kernels_of(0)[""](*views)})])
        return out[""]

    def samples_in(self, texts: int, density: float) -> int:
        """Approximate number of samples that are drawn from `texts` texts of one row.

        Args:
            texts: number of texts.
            density: mean number of counted positions per text.
        """
        return int(texts * (1 if self.whole_rows else min(density, SAMPLES_OF_ROW)))


AnyKernel = Kernel | PoolKernel


def pool_texts(size: int, density: float) -> int:
    """Number of texts that together hold enough samples for one pool. It is 16 times a power of two.

    Args:
        size: samples that the pool needs.
        density: mean number of samples per text.

    Examples:
        >>> pool_texts(256, 100.0), pool_texts(256, 10.0), pool_texts(256, 1)
        (16, 32, 256)
    """
    texts = TEXTS_OF_POOL
    samples_per_text = min(max(density, 1), SAMPLES_OF_ROW)
    while texts * samples_per_text < size:
        texts *= 2
    return texts


def samples_of(view: View, whole_rows: bool) -> Samples:
    """List the samples of a view: the row of each sample, and its index in the row.

    Args:
        view: a view with `tokens`, `sequence`, `row` and `group`.
        whole_rows: whether each row is one sample.
    """
    row = view.sequence.cpu()
    number, counts = torch.unique_consecutive(row, return_inverse=True, return_counts=True)[1:]
    starts = counts.cumsum(0) - counts
    rank = torch.arange(len(row)) - starts[number]
    hashes = torch.zeros(len(counts), dtype=torch.int64).index_add(0, number, mixed(view.tokens.cpu() * 8191 + rank))
    text = view.row if view.text is None else view.text
    origin = torch.full_like(row, -1) if text is None else text.cpu()
    if whole_rows:
        return Samples(row[starts], torch.zeros_like(starts), hashes, origin[starts])
    return Samples(row, rank, hashes[number], origin)


@dataclass(frozen=True)
class _Pool:
    """The samples drawn from one pool of texts.

    Attributes:
        leaf: index of the leaf that holds the pool's last text and gets its sums.
        index: indices of the drawn samples among the samples of the batch.
        samples: the drawn samples.
        draws: indices into the drawn samples, by name.
    """

    leaf: int
    index: Tensor
    samples: Samples
    draws: Draws


@dataclass(frozen=True)
class BatchPlan:
    """Plan of a batch's forward passes: which kernels each runs, and over which rows the outputs are summed.

    Outputs are summed by leaf, a group of consecutive texts.

    Attributes:
        starts: index of the first row of each forward pass, and of the row after the last.
        leaf: number of texts in a leaf, a power of two up to 16.
        texts: for each row, the index of its text, ascending.
        kernels: kernels by name.
        pools: pools of each `PoolKernel`, by name.
        bounds: for both values of `whole_rows`, the number of samples before each forward pass.
    """

    starts: tuple[int, ...]
    leaf: int
    texts: tuple[int, ...]
    kernels: Mapping[str, AnyKernel]
    pools: Mapping[str, list[_Pool]] = field(default_factory=dict)
    bounds: Mapping[bool, tuple[int, ...]] = field(default_factory=dict)

    @property
    def leaves(self) -> int:
        """Number of groups of texts (leaves) in the batch. The rows of a leaf are consecutive and summed together."""
        return self.texts[-1] // self.leaf + 1

    def kernels_of(self, number: int) -> dict[str, Kernel]:
        """The kernels of one forward pass.

        Args:
            number: index of the forward pass.
        """
        first, end = self.starts[number : number + 2]
        out: dict[str, Kernel] = {}
        for name, kernel in self.kernels.items():
            if not isinstance(kernel, PoolKernel):
                leaves = tuple(text // self.leaf for text in self.texts[first:end])
                out[name] = partial(by_leaf, kernel=kernel, leaves=leaves)
                continue
            low, high = self.bounds[kernel.whole_rows][number : number + 2]
            index = torch.cat([pool.index for pool in self.pools[name]])
            index = index[(index >= low) & (index < high)] - low
            out[name] = partial(drawn, read=kernel.read, sites=kernel.sites, index=index)
        return out

    def finish(self, passes: Iterable[Reduced]) -> list[Reduced]:
        """Sum the outputs of all forward passes, separately for each leaf (group of texts).

        Args:
            passes: output of `reduce` for each forward pass. Each is added before the next is taken.

        Returns:
            For each leaf the output of `reduce`; a single one without sums if activations are not finite.
        """
        counts: list[Any] = []
        # Sums of each leaf, by kernel and field.
        leaves: list[dict[str, dict[str, Tensor]]] = []
        for _ in range(self.leaves):
            leaves.append({name: {} for name in self.kernels})
        pool_outputs: dict[str, list[Mapping[str, Tensor]]] = {name: [] for name in self.pools}
        for pass_counts, outputs in passes:
            counts = [a + b for a, b in zip(counts, pass_counts, strict=True)] if counts else list(pass_counts)
            for name, output in outputs.items():
                if name in pool_outputs:
                    pool_outputs[name].append(output)
                    continue
                outputs_of_leaves: dict[int, dict[str, Tensor]] = {}
                for key, value in output.items():
                    leaf, _, field_name = key.partition("/")
                    outputs_of_leaves.setdefault(int(leaf), {})[field_name] = value
                for number, leaf_output in outputs_of_leaves.items():
                    leaves[number][name] = added(leaves[number][name], leaf_output, name)
        if any(bool(count.any()) for count in counts):
            return [(counts, {})]
        for name, kernel_outputs in pool_outputs.items():
            kernel = self.kernels[name]
            assert isinstance(kernel, PoolKernel)
            for pool, sums in zip(self.pools[name], self._pool_sums(name, kernel, kernel_outputs), strict=True):
                leaves[pool.leaf][name] = sums
        # Activations that are not finite are counted once, in the first leaf.
        zero = [torch.zeros_like(count) for count in counts]
        return [(counts if number == 0 else zero, leaf_sums) for number, leaf_sums in enumerate(leaves)]

    def _pool_sums(self, name: str, kernel: PoolKernel, outputs: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        models = sum(key.startswith("samples") for key in outputs[0])
        for i in range(models):
            dimensions = {output[f"samples {i}"].shape[-1] for output in outputs}
            if len(dimensions) > 1:
                raise LayersimError(
                    f"`pool` is 'flat', which needs equally many tokens in all rows; the flattened rows have {min(dimensions)} "
                    f"to {max(dimensions)} dimensions."
                )
        sides = []
        widths = []
        for i in range(models):
            sides.append(torch.cat([output[f"samples {i}"] for output in outputs], 1))
            widths.append(tuple(outputs[0][f"widths {i}"].tolist()))
        sums_of_pools = []
        start = 0
        for pool in self.pools[name]:
            end = start + len(pool.index)
            pool_sides = [side[:, start:end] for side in sides]
            pool_sums = partial(kernel.sums, pool_sides, widths, pool.samples, pool.draws)
            sums_of_pools.append(in_full_precision(pool_sides[0].device, pool_sums))
            start = end
        return sums_of_pools


def view_of_tokens(tokens: Tensor, sequence: Tensor, row: Tensor, text: Tensor | None = None) -> View:
    """A view of tokens for `plan_batch`, without activations. Positions are not known, and are those of `sequence`.

    Args:
        tokens: see `View`; all further arguments are the same.
        sequence: see `View`.
        row: see `View`.
        text: see `View`.
    """
    return View(torch.empty(0, len(tokens), 0), tokens, sequence, sequence, row=row, text=text)


def plan_batch(
    tokens: View,
    starts: tuple[int, ...],
    leaf: int,
    density: float | None,
    kernels: Mapping[str, AnyKernel],
    texts: tuple[int, ...] = (),
    neighbours: bool = False,
) -> BatchPlan:
    """Draw the samples of each pool in a batch, and return the `BatchPlan`.

    Args:
        tokens: view with `tokens`, `sequence`, `row` and `text` of all counted positions of the batch.
        starts: see `BatchPlan`.
        leaf: number of texts in a leaf.
        density: mean number of counted positions per text of the data; None to treat the batch as one pool.
        kernels: kernels by name.
        texts: for each row, the index of its text in the batch, ascending; empty if each row is a text.
        neighbours: whether texts that follow each other are not independent.
    """
    texts = texts or tuple(range(starts[-1]))
    pooled = {name: kernel for name, kernel in kernels.items() if isinstance(kernel, PoolKernel)}
    samples_by_kind: dict[bool, Samples] = {}
    bounds: dict[bool, tuple[int, ...]] = {}
    first_row = torch.tensor(starts)
    for whole_rows in {kernel.whole_rows for kernel in pooled.values()}:
        samples = samples_of(tokens, whole_rows)
        samples_by_kind[whole_rows] = replace(samples, text=torch.tensor(texts)[samples.row], neighbours=neighbours)
        bounds[whole_rows] = tuple(torch.searchsorted(samples.row.contiguous(), first_row).tolist())
    pools: dict[str, list[_Pool]] = {}
    text_count = texts[-1] + 1
    for name, kernel in pooled.items():
        samples = samples_by_kind[kernel.whole_rows]
        size = text_count if density is None else kernel.texts(density)
        pools[name] = []
        for first_text in range(0, text_count, size):
            end_text = min(first_text + size, text_count)
            inside = ((samples.text >= first_text) & (samples.text < end_text)).nonzero()[:, 0]
            if len(inside):
                at = (first_text, texts.index(first_text), (end_text - 1) // leaf)
                pools[name].append(_draw_pool(kernel, samples, inside, at))
    return BatchPlan(starts, leaf, texts, kernels, pools, bounds)


def _draw_pool(kernel: PoolKernel, samples: Samples, inside: Tensor, at: tuple[int, int, int]) -> _Pool:
    """Draw the samples of one pool.

    Args:
        kernel: kernel of the measure.
        samples: samples of the batch.
        inside: indices of the samples in the pool.
        at: index of the pool's first text in the batch, of the first row of this text, and of the leaf of its last text.
    """
    first_text, first_row, leaf = at
    pool_samples = samples.select(inside)
    # Rows are counted from the pool's first row, so that draws do not depend on the rows of a batch.
    pool_samples = replace(pool_samples, row=pool_samples.row - first_row, text=pool_samples.text - first_text)
    draws = kernel.draw(pool_samples)
    drawn_indices: list[Tensor] = []
    for indices_of_draws in draws.values():
        drawn_indices += [indices.flatten() for indices in indices_of_draws]
    chosen = torch.unique(torch.cat(drawn_indices)) if drawn_indices else inside[:0]
    # Only the chosen samples are read; the draws then count among these.
    place = torch.zeros(len(inside), dtype=torch.int64).index_copy(0, chosen, torch.arange(len(chosen)))
    draws_of_chosen = {}
    for name, indices_of_draws in draws.items():
        draws_of_chosen[name] = [place[indices] for indices in indices_of_draws]
    return _Pool(leaf, inside[chosen], pool_samples.select(chosen), draws_of_chosen)


def by_leaf(*views: View, kernel: Kernel, leaves: tuple[int, ...]) -> dict[str, Tensor]:
    """Run a kernel separately on each leaf (group of texts) of a forward pass.

    Names of outputs begin with the index of the leaf. Views with block calls are not divided, because a call replays all rows
    of a forward pass.

    Args:
        *views: views of the forward pass, one for each model.
        kernel: kernel of an analyzer.
        leaves: for each row, the index of its leaf.
    """
    whole = bool(views[0].calls)
    out: dict[str, Tensor] = {}
    start = 0
    while start < len(leaves):
        end = len(leaves) if whole else start + leaves.count(leaves[start])
        parts = [select_rows(view, start, end) for view in views]
        if len(parts[0].tokens):
            out |= {f"{leaves[end - 1]}/{name}": value for name, value in kernel(*parts).items()}
        start = end
    return out


def select_rows(view: View, start: int, stop: int) -> View:
    """The rows `start` to `stop - 1` of a view. Kernels that read the same rows share this view and its memo.

    Args:
        view: the view of one forward pass.
        start: index of the first row.
        stop: index of the row after the last.
    """
    inside = ((view.sequence >= start) & (view.sequence < stop)).nonzero()[:, 0]
    if len(inside) == len(view.sequence):
        return view
    key = f"rows {start} {stop}"
    if key not in view.memo:
        low, high = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
        token_fields: dict[str, Any] = {name: value[low:high] for name, value in view.token_fields().items()}
        view.memo[key] = replace(view, activations=view.activations[:, low:high], **token_fields, memo={})
    part: View = view.memo[key]
    return part


def drawn(
    *views: View, read: Callable[[View], Tensor], sites: tuple[tuple[int, ...], ...] | None, index: Tensor
) -> dict[str, Tensor]:
    """Read the activations of drawn samples, and the widths of the sites, in one forward pass.

    Keys end with the index of the model: "samples 0", "widths 0".

    Args:
        *views: views of the forward pass, one for each model.
        read: see `PoolKernel`.
        sites: see `PoolKernel`.
        index: indices of the drawn samples.
    """
    out: dict[str, Tensor] = {}
    for number, view in enumerate(views):
        view_of_sites = view if sites is None else select_sites(view, sites[number])
        x = read(view_of_sites)
        out[f"samples {number}"] = x[:, index.to(x.device)]
        out[f"widths {number}"] = torch.tensor(view_of_sites.widths, dtype=torch.int64)
    return out


def run_batch(
    run: Callable[[Batch, Mapping[str, Kernel]], Reduced], batch: Batch, kernels: Mapping[str, AnyKernel]
) -> list[Reduced]:
    """Run all forward passes of a batch, and return the sums of each leaf (group of texts).

    Args:
        run: function that runs one forward pass, and `reduce` on its views.
        batch: a batch of one or more forward passes.
        kernels: kernels by name.
    """
    plan = plan_batch(tokens_alone(batch), batch.starts, batch.leaf, batch.density, kernels, batch.units, batch.neighbours)
    # A generator: the activations of one forward pass are freed before the next runs.
    return plan.finish(
        run(part, plan.kernels_of(number)) for number, part in enumerate(batch.passes()) if bool(part.counted.any())
    )
