"""Effects of skipping one block on the contributions of later blocks and on the output probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.block_call import again
from ..activations.norms import norms
from ..activations.view import Kernel, View, row_ends
from ..core import LayersimError, Result, Sums, axes, result_class, typed, warn, without_nan
from ..core.arguments import NonNegativeInt, PositiveFloat
from ..core.intervals import with_margin
from ..core.wording import amount
from ..jacobians.jacobian_products import reproduces
from ..jacobians.supported_blocks import need_calls, refuse_failed_replay
from ..lens.statistics import head_input, read_positions
from ..sources.model_description import ModelDescription
from .analyzer import CSORDAS, Analyzer, Run, sites_where
from .needs import Needs


@result_class
class SkipEffectResult(Result):
    """Effects of skipping each block: means over tokens, and means over rows of the largest effect in a row. Float64.

    Attributes:
        values: `skipped affected`, mean over tokens of the relative change |c - c~| / |c| of the affected block's contribution
            c when the skipped block is left out. NaN unless the affected block is above the skipped one. Tokens with c = 0 have
            no relative change and are omitted; a `LayersimWarning` names the block.
        largest: `skipped affected`, the largest relative change in a row, averaged over rows.
        later: `skipped affected`, as `values`, but the block is skipped only before a split of the row, and the change is
            measured only after it. NaN for `splits=0`.
        later_largest: `skipped affected`, `largest` for the tokens of `later`.
        probability_change: `skipped`, mean over tokens of |p - p~|, the Euclidean norm of the change of the output
            probabilities, at most sqrt(2). NaN for a model without a known head, or with a head of one output.
        probability_change_largest: `skipped`, the largest such norm in a row, averaged over rows.
        later_probability_change: `skipped`, `probability_change` for the tokens of `later`. NaN for a head that reads the first
            position of a row, or several: it reads positions at which the block is skipped.
        later_probability_change_largest: `skipped`, `probability_change_largest` for the tokens of `later`.
    """

    values: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change",
        title="Effect of a skipped block on later blocks",
        caption="Relative change of each block's contribution to the residual stream when an earlier block is skipped, mean "
        "over tokens. A dark row is a block on which no later block depends "
        + CSORDAS.format("figure 3, with maxima instead of means"),
        within=(0, math.inf),
    )
    largest: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change (largest in a row)",
        title="Largest relative change in a row, when a block is skipped",
        within=(0, math.inf),
    )
    later: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change",
        title="Effect of a skipped block on later positions",
        caption="The same, but the block is skipped only in the first part of each row and the change is measured in the "
        "rest, which the block reaches through attention " + CSORDAS.format("figure 3"),
        within=(0, math.inf),
    )
    later_largest: Float64[Tensor, "layer layer"] = axes(
        "skipped",
        "affected",
        label="Relative change (largest in a row)",
        title="Largest relative change of later tokens in a row, when a block is skipped",
        within=(0, math.inf),
    )
    probability_change: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (norm)",
        title="Effect of a skipped block on the output probabilities",
        caption="Norm of the change of the output probabilities, mean over tokens " + CSORDAS.format("figure 3"),
        within=(0, math.sqrt(2)),
    )
    probability_change_largest: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (largest norm in a row)",
        title="Largest change of the predictions in a row, when a block is skipped",
        within=(0, math.sqrt(2)),
    )
    later_probability_change: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (norm)",
        title="Change of later predictions when a block is skipped",
        within=(0, math.sqrt(2)),
    )
    later_probability_change_largest: Float64[Tensor, " layer"] = axes(
        "skipped",
        label="Change of the probabilities (largest norm in a row)",
        title="Largest change of later predictions in a row, when a block is skipped",
        within=(0, math.sqrt(2)),
    )

    def headline(self) -> dict[str, float]:
        half = len(self.values) // 2
        return without_nan(
            {
                "relative change, mean over pairs": self.values.nanmean(),
                "relative change, first half skipped": self.values[:half].nanmean(),
                "relative change, second half skipped": self.values[half:].nanmean(),
                "relative change at later positions": self.later.nanmean(),
                "change of the probabilities, mean": self.probability_change.nanmean(),
            }
        )

    def finding(self) -> str:
        half = len(self.values) // 2
        if not half or bool(self.values.isnan().all()):
            return ""
        mean = with_margin(self, lambda result: result.values.nanmean())
        first = with_margin(self, lambda result: result.values[:half].nanmean())
        second = with_margin(self, lambda result: result.values[half:].nanmean())
        return (
            f"Skipping a block changes what later blocks add by a relative {mean} on average: {first} in the first half of "
            f"the blocks, {second} in the second."
        )


@typed
@dataclass(frozen=True, kw_only=True)
class SkipEffect(Analyzer):
    r"""Change of later blocks' contributions, and of the output probabilities, when one block is skipped.

    $$
    c^l_t = x^l_t - x^{l-1}_t, \qquad
    E_{sl} = \operatorname{mean}_t \frac{\lVert c^l_t - \tilde c^l_t \rVert}{\lVert c^l_t \rVert}, \qquad
    P_s = \operatorname{mean}_t \lVert p_t - \tilde p_t \rVert
    $$

    A skipped block s passes its input on unchanged; c~ and p~ are the contributions of the blocks l > s and the output
    probabilities that result. Blocks are run again on whole rows, with the arguments of their own calls. In a first variant
    the block is skipped at all positions. In a second variant the block is skipped at the positions before a split, and effects
    are measured at the positions from the split on, at which the block itself runs: these positions depend on the skipped
    computation through attention only. A row of n positions is split at floor(n i / (splits + 1)) for i = 1 to `splits`; the
    authors draw splits at random.

    Args:
        keep_first: number of first positions of each row at which no block is skipped and no effect is measured: 1 as in the
            authors' code, because many language models attend to the first token from everywhere; 0 for encoders.
        splits: number of splits of each row for `later`, each of which costs about half a forward pass for each block; 0 leaves
            `later` out.
        lens_memory_mb: megabytes for the logits and probabilities of one chunk of tokens.

    Source:
        Csordás, Manning and Potts 2025 (arXiv 2505.13898), section 3, figure 3. The figure shows maxima over positions
        and prompts.

    Examples:
        The first block of the demo model matters to every later block, the last but one to the last block alone.

        >>> import tl_layersim as lsim
        >>> data = lsim.Data(lsim.demo_text()[:2], seq_len=32)
        >>> effect = lsim.analyze(lsim.demo_model(), data, lsim.SkipEffect())["skip_effect"]
        >>> effect.values.shape, int(effect.values[0].isfinite().sum()), int(effect.values[-2].isfinite().sum())
        (torch.Size([8, 8]), 7, 1)
        >>> bool(effect.values[0].nanmean() > effect.values[4].nanmean())
        True
    """

    name: ClassVar[str] = "skip_effect"
    needs = Needs(sites="every_block", head="logits", calls=True, whole_rows=True)

    keep_first: NonNegativeInt = 1
    splits: NonNegativeInt = 1
    lens_memory_mb: PositiveFloat = 128

    def check(self, *models: ModelDescription) -> None:
        [model] = models
        need_calls(model, type(self).__name__, differences=True)

    def kernel(self, first: Sums) -> Kernel:
        return partial(skip_effect_kernel, keep_first=self.keep_first, splits=self.splits, memory_mb=float(self.lens_memory_mb))

    def compute(self, sums: Sums, run: Run) -> SkipEffectResult:
        blocks = len(run.layers) - 1
        # Blocks are not differentiated here: no skip connections and no step errors are measured.
        zeros = torch.zeros(blocks, dtype=torch.float64)
        refuse_failed_replay(sums["differs"], zeros, zeros, run.layers)
        pairs = torch.ones(blocks, blocks).triu(1).bool()
        # Without the last column, the output, unless a single block affects nothing else.
        measured = sums["count"][:, :-1] if blocks > 1 else sums["count"]
        if not bool(measured.any()):
            raise LayersimError(
                f"`keep_first` is {self.keep_first}; it must be smaller than the number of tokens in the longest row. "
                f"The data has {amount(run.provenance.tokens, 'token')} in {amount(run.provenance.sequences, 'row')}."
            )
        finite = (sums["total"] + sums["later total"]).isfinite().all(-1)
        not_finite = sites_where(run.layers[1:], ~finite)
        if not_finite:
            raise LayersimError(
                f"Activations are NaN or infinite when {not_finite} is skipped. Load the model in float32 or bfloat16."
            )
        counts = sums["count"][:, :-1]
        tokens = int(counts.amax())
        # The first pair with fewer tokens stands for all.
        for skipped, affected in ((counts < tokens) & pairs).nonzero()[:1].tolist():
            warn(
                "The relative change is not defined (division by zero) for tokens to which a block adds nothing. These tokens "
                f"are omitted: {run.layers[affected + 1]} at {tokens - int(counts[skipped, affected])} of {tokens} tokens."
            )
        # 0 / 0 is NaN, for pairs and variants that were not measured.
        mean = sums["total"] / sums["count"]
        later_mean = sums["later total"] / sums["later count"]
        peak = sums["peak"] / sums["rows"]
        later_peak = sums["later peak"] / sums["later rows"]
        return SkipEffectResult(
            values=mean[:, :-1],
            largest=peak[:, :-1],
            later=later_mean[:, :-1],
            later_largest=later_peak[:, :-1],
            probability_change=mean[:, -1],
            probability_change_largest=peak[:, -1],
            later_probability_change=later_mean[:, -1],
            later_probability_change_largest=later_peak[:, -1],
            layers=run.layers,
            provenance=run.provenance,
        )


@dataclass(frozen=True)
class Skip:
    """Positions at which a block is skipped, and tokens at which the effects are measured.

    Attributes:
        skipped: `batch pos`, whether a block's output is replaced by its input.
        tokens: `sample`, indices of the view's tokens at which contributions are compared.
        output_tokens: `sample`, indices of the view's tokens at which output probabilities are compared; a subset of `tokens`
            for language models.
    """

    skipped: Tensor
    tokens: Tensor
    output_tokens: Tensor


def skip_effect_kernel(view: View, *, keep_first: int, splits: int, memory_mb: float) -> dict[str, Tensor]:
    """Sums by skipped block: of its effects over all tokens, and of the largest effect of each row over all rows.

    Args:
        view: activations of one batch, with the calls of the blocks.
        keep_first: number of first positions of each row at which no block is skipped.
        splits: number of splits of each row. Blocks are skipped before a split, and effects are measured after it.
        memory_mb: limit for the logits, in MB.
    """
    skips = {"": [_everywhere(view, keep_first)], "later ": _earlier(view, keep_first, splits)}
    sums = {}
    for prefix, skips_of_kind in skips.items():
        for name, value in _sums(view, skips_of_kind, memory_mb).items():
            sums[f"{prefix}{name}"] = value
    return {"differs": _differs(view)} | sums


def _everywhere(view: View, keep_first: int) -> Skip:
    """`Skip` of blocks at all positions but the first few, with effects measured at the same positions.

    A classifier's output is read at one position of a row, which may be one of the first few.
    """
    shape = view.calls[0].hidden.shape[:2]
    skipped = (torch.arange(shape[1], device=view.position.device) >= keep_first).expand(shape)
    tokens = view.position >= keep_first
    output_tokens = tokens if read_positions(view) is None else torch.ones_like(tokens)
    return Skip(skipped, tokens.nonzero()[:, 0], _tokens_of_head(view, output_tokens))


def _earlier(view: View, keep_first: int, splits: int) -> list[Skip]:
    """One `Skip` for each split of the rows: blocks are skipped before the split, and effects are measured after it."""
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
        pools_row = view.unembed is not None and view.unembed.pool is not None
        output_tokens = torch.zeros_like(tokens) if pools_row else tokens
        skips.append(Skip(skipped, tokens.nonzero()[:, 0], _tokens_of_head(view, output_tokens)))
    return skips


def _tokens_of_head(view: View, tokens: Tensor) -> Tensor:
    """Indices of the tokens that are True in `tokens` and read by the model's head."""
    index = read_positions(view)
    if index is not None:
        tokens = tokens & torch.zeros_like(tokens).index_fill(0, index.to(tokens.device), True)
    return tokens.nonzero()[:, 0]


def _sums(view: View, skips: Sequence[Skip], memory_mb: float) -> dict[str, Tensor]:
    """Sums of effects over tokens, and of row maxima over rows (each `skipped affected`). The last column is the output."""
    blocks = len(view.calls)
    rows = view.calls[0].hidden.shape[0]
    device = view.activations.device
    total = torch.zeros(blocks, blocks + 1, dtype=torch.float64, device=device)
    count = torch.zeros(blocks, blocks + 1, dtype=torch.int64, device=device)
    peak = torch.zeros(blocks, blocks + 1, rows, dtype=torch.float64, device=device)
    measured = torch.zeros(blocks, blocks + 1, rows, dtype=torch.bool, device=device)
    for skip in skips:
        for skipped in range(blocks):
            for affected, change, row in _effects(view, skip, skipped, memory_mb):
                total[skipped, affected] += change.double().sum()
                count[skipped, affected] += len(change)
                peak[skipped, affected].scatter_reduce_(0, row, change.double(), "amax")
                measured[skipped, affected, row] = True
    return {"total": total, "count": count, "peak": peak.sum(-1), "rows": measured.sum(-1)}


def _effects(view: View, skip: Skip, skipped: int, memory_mb: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Skip one block and run all later blocks. Yields each later block's index, its change at each token, and the tokens' rows.

    The index of the output is -1.

    Args:
        view: activations of one batch, with the calls of the blocks.
        skip: the positions at which the block is skipped, and the tokens at which effects are measured.
        skipped: index of the block.
        memory_mb: limit for the logits, in MB.
    """
    calls = view.calls
    if not len(skip.tokens) and not len(skip.output_tokens):
        return
    x = view.activations[:, skip.tokens]
    row = view.sequence[skip.tokens].to(x.device)
    call = calls[skipped]
    is_skipped = skip.skipped.to(call.hidden.device)[..., None]
    hidden = torch.where(is_skipped, call.hidden, call.output.to(call.hidden.device))
    for affected in range(skipped + 1, len(calls)):
        call = calls[affected]
        hidden = hidden.to(call.hidden.device)
        output = again(call, hidden)
        changed = _at(view, output, skip.tokens) - _at(view, hidden, skip.tokens)
        contribution = x[affected + 1] - x[affected]
        size = norms(contribution)
        # A block that adds nothing to a token has no relative change there.
        change = norms(contribution - changed) / size.where(size > 0, torch.nan)
        has_change = ~change.isnan()
        yield affected, change[has_change], row[has_change]
        hidden = output
    if view.unembed is not None:
        for tokens, change in _output_changes(view, hidden, skip.output_tokens, memory_mb):
            yield -1, change, view.sequence[tokens].to(x.device)


def _at(view: View, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Select tokens from padded residuals: `batch pos d_model` to `sample d_model`, in the view's dtype."""
    row = view.sequence[tokens].to(hidden.device)
    position = view.position[tokens].to(hidden.device)
    return hidden[row, position].to(view.activations)


def _output_changes(view: View, hidden: Tensor, tokens: Tensor, memory_mb: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of tokens, with the norms of their changes in output probabilities.

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
        all_tokens = torch.arange(len(view.position), device=view.position.device)
        changed = _at(view, hidden, all_tokens)
        rows, needs_norm = head_input(view, torch.stack([view.activations[-1], changed]), True)
        # The rows of these tokens, each of which is the last of its row.
        is_read = torch.isin(row_ends(view), tokens.to(view.sequence.device))
        last = rows[:, is_read.to(rows.device)]
    start = 0
    # The first chunk, of one token, shows the number of outputs.
    step = 1
    while start < len(tokens):
        chunk = slice(start, start + step)
        before = torch.softmax(view.unembed(last[0, chunk], needs_norm).to(last), -1)
        after = torch.softmax(view.unembed(last[1, chunk], needs_norm).to(last), -1)
        # The probability of a single output is 1 whatever the output is.
        if before.shape[-1] == 1:
            return
        yield tokens[chunk], (after - before).norm(dim=-1)
        start += step
        # Logits and probabilities, of both runs, and their difference.
        step = max(1, int(memory_mb * 2**20 / (5 * before.shape[-1] * before.element_size())))


def _differs(view: View) -> Tensor:
    """Whether each block, run again on its input, gives another output than before (`layer`). Block 0 is never run again."""
    all_tokens = torch.arange(len(view.position), device=view.position.device)
    differs = [False]
    for call in view.calls[1:]:
        replayed = _at(view, again(call, call.hidden), all_tokens)
        output = _at(view, call.output, all_tokens)
        differs.append(not reproduces(replayed, output, call.output.dtype))
    return torch.tensor(differs).long()
