"""Kernel of `SkipEffect`: sums over tokens of the effects of skipped blocks.

It is serialised by value and runs on servers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..activations.block_call import BlockCall, again
from ..activations.norms import norms
from ..activations.view import View, row_ends
from ..jacobians.products import reproduces
from ..lens.statistics import head_input, read_positions


@dataclass(frozen=True)
class Skip:
    """Positions at which a block is skipped, and tokens at which the effects are measured.

    Attributes:
        skipped: `batch pos`, whether a block's output is replaced by its input.
        tokens: `sample`, indices of the view's tokens at which contributions are compared.
        read: `sample`, indices of the view's tokens at which output probabilities are compared; a subset of `tokens` for
            language models.
    """

    skipped: Tensor
    tokens: Tensor
    read: Tensor


def skip_effect_kernel(view: View, *, keep_first: int, splits: int, memory_mb: float) -> dict[str, Tensor]:
    """For each skipped block, sums over tokens of its effects, and sums over rows of the largest effects.

    Args:
        view: activations of one batch, with the calls of the blocks.
        keep_first: number of first positions of each row at which no block is skipped.
        splits: number of splits of each row. Blocks are skipped before a split, and effects are measured after it.
        memory_mb: limit for the logits, in MB.
    """
    calls = view.calls
    assert calls is not None
    skips = [("", [_everywhere(view, keep_first)]), ("later ", _earlier(view, keep_first, splits))]
    out = {"differs": _differs(view)}
    for name, parts in skips:
        effects = _Effects(view)
        for part in parts:
            for skipped in range(len(calls)):
                _measure(effects, part, skipped, memory_mb)
        out |= {f"{name}{key}": value for key, value in effects.sums().items()}
    return out


def _everywhere(view: View, keep_first: int) -> Skip:
    """Skip blocks at all positions but the first few, and measure effects at the counted tokens among them.

    A classifier's output is read at one position of a row, which may be one of the first few.
    """
    assert view.calls is not None
    shape = view.calls[0].hidden.shape[:2]
    skipped = (torch.arange(shape[1], device=view.position.device) >= keep_first).expand(shape)
    tokens = view.position >= keep_first
    read = tokens if read_positions(view) is None else torch.ones_like(tokens)
    return Skip(skipped, tokens.nonzero()[:, 0], _read(view, read))


def _earlier(view: View, keep_first: int, splits: int) -> list[Skip]:
    """Skip blocks before each of some evenly spaced positions of a row, and measure effects from there on."""
    assert view.calls is not None
    batch, pos = view.calls[0].hidden.shape[:2]
    ends = row_ends(view)
    length = view.position.new_zeros(batch).index_put((view.sequence[ends],), view.position[ends] + 1)
    place = torch.arange(pos, device=length.device)
    skips = []
    for number in range(1, splits + 1):
        # Rows in which no position would be skipped are not measured.
        split = length * number // (splits + 1)
        skipped = (place >= keep_first) & (place < split[:, None])
        tokens = (view.position >= split[view.sequence]) & (split[view.sequence] > keep_first)
        # A head that makes one vector of a row reads the skipped positions too: its change is no effect on later positions.
        alone = torch.zeros_like(tokens) if view.unembed is not None and view.unembed.pool is not None else tokens
        skips.append(Skip(skipped, tokens.nonzero()[:, 0], _read(view, alone)))
    return skips


def _read(view: View, tokens: Tensor) -> Tensor:
    """Indices of the tokens in the mask `tokens` at which the head reads."""
    index = read_positions(view)
    if index is not None:
        tokens = tokens & torch.zeros_like(tokens).index_fill(0, index.to(tokens.device), True)
    return tokens.nonzero()[:, 0]


class _Effects:
    """Running sums over tokens and rows of relative changes of contributions and changes of output probabilities.

    Args:
        view: activations of one batch, with the calls of the blocks.
    """

    def __init__(self, view: View) -> None:
        assert view.calls is not None
        self.view, self.calls = view, view.calls
        blocks, rows, device = len(self.calls), self.calls[0].hidden.shape[0], view.activations.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.total, self.count, self.peak = zeros(blocks, blocks), zeros(blocks, blocks), zeros(blocks, blocks, rows)
        self.measured = torch.zeros(blocks, blocks, rows, dtype=torch.bool, device=device)
        self.output_total, self.output_count, self.output_peak = zeros(blocks), zeros(blocks), zeros(blocks, rows)
        self.output_measured = torch.zeros(blocks, rows, dtype=torch.bool, device=device)

    def add(self, skipped: int, affected: int, change: Tensor, row: Tensor) -> None:
        """Add relative changes, `sample`, at tokens of the given rows; NaN if a contribution is zero."""
        known = ~change.isnan()
        change, row = change[known].double(), row[known]
        self.total[skipped, affected] += change.sum()
        self.count[skipped, affected] += len(change)
        self.peak[skipped, affected].scatter_reduce_(0, row, change, "amax")
        self.measured[skipped, affected, row] = True

    def add_output(self, skipped: int, change: Tensor, row: Tensor) -> None:
        """Add changes of the output probabilities, `sample`, at tokens of the given rows."""
        self.output_total[skipped] += change.double().sum()
        self.output_count[skipped] += len(change)
        self.output_peak[skipped].scatter_reduce_(0, row, change.double(), "amax")
        self.output_measured[skipped, row] = True

    def sums(self) -> dict[str, Tensor]:
        """All sums, by name."""
        return {
            "total": self.total,
            "count": self.count.long(),
            "peak": self.peak.sum(-1),
            "rows": self.measured.sum(-1),
            "output_total": self.output_total,
            "output_count": self.output_count.long(),
            "output_peak": self.output_peak.sum(-1),
            "output_rows": self.output_measured.sum(-1),
        }


def _measure(effects: _Effects, skip: Skip, skipped: int, memory_mb: float) -> None:
    """Skip one block, run all blocks after it, and add the effects to `effects`.

    Args:
        effects: the running sums.
        skip: the positions at which the block is skipped, and the tokens at which effects are measured.
        skipped: index of the block.
        memory_mb: limit for the logits, in MB.
    """
    view, calls = effects.view, effects.calls
    if not len(skip.tokens) and not len(skip.read):
        return
    x = view.activations[:, skip.tokens]
    row = view.sequence[skip.tokens].to(x.device)
    hidden = _without(calls[skipped], skip.skipped)
    for affected in range(skipped + 1, len(calls)):
        call = calls[affected]
        hidden = hidden.to(call.hidden.device)
        output = again(call, hidden)
        changed = _at(view, output, skip.tokens) - _at(view, hidden, skip.tokens)
        contribution = x[affected + 1] - x[affected]
        size = norms(contribution)
        # A block that adds nothing to a token has no relative change there.
        effects.add(skipped, affected, norms(contribution - changed) / size.where(size > 0, torch.nan), row)
        hidden = output
    if view.unembed is not None:
        for tokens, change in _output_changes(view, hidden, skip.read, memory_mb):
            effects.add_output(skipped, change, view.sequence[tokens].to(x.device))


def _without(call: BlockCall, skipped: Tensor) -> Tensor:
    """Output of a block that is skipped at some positions, `batch pos d_model`."""
    return torch.where(skipped.to(call.hidden.device)[..., None], call.hidden, call.output.to(call.hidden.device))


def _at(view: View, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Residuals at the tokens of the view, `batch pos d_model` to `sample d_model`, in the view's dtype."""
    row, place = (index[tokens].to(hidden.device) for index in (view.sequence, view.position))
    return hidden[row, place].to(view.activations)


def _output_changes(view: View, hidden: Tensor, tokens: Tensor, memory_mb: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields chunks of tokens, each with the norm of the change of the output probabilities at these tokens.

    Args:
        view: activations of one batch.
        hidden: `batch pos d_model`, the changed residuals after the last block.
        tokens: `sample`, indices of the view's tokens.
        memory_mb: limit for the logits, in MB.
    """
    assert view.unembed is not None
    if view.unembed.pool is None:
        last = torch.stack([view.activations[-1, tokens], _at(view, hidden, tokens)])
        needs_norm = True
    else:
        every = _at(view, hidden, torch.arange(len(view.position), device=view.position.device))
        rows, needs_norm = head_input(view, torch.stack([view.activations[-1], every]), True)
        # The rows of these tokens, each of which is the last of its row.
        last = rows[:, torch.isin(row_ends(view), tokens.to(view.sequence.device)).to(rows.device)]
    start, step = 0, 1
    while start < len(tokens):
        some = slice(start, start + step)
        before, after = (torch.softmax(view.unembed(x, needs_norm).to(last), -1) for x in last[:, some])
        # The probability of a single output is 1 whatever the output is.
        if before.shape[-1] == 1:
            return
        yield tokens[some], (after - before).norm(dim=-1)
        start += step
        # Logits and probabilities, of both runs, and their difference.
        step = max(1, int(memory_mb * 2**20 / (5 * before.shape[-1] * before.element_size())))


def _differs(view: View) -> Tensor:
    """Whether each block's replay differs from its output in the forward pass, `layer`. Block 0 is never replayed."""
    assert view.calls is not None
    every = torch.arange(len(view.position), device=view.position.device)
    differs = [False]
    for call in view.calls[1:]:
        replayed, own = (_at(view, hidden, every) for hidden in (again(call, call.hidden), call.output))
        differs.append(not reproduces(replayed, own, call.output.dtype))
    return torch.tensor(differs).long()
