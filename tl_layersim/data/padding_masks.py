"""Attention masks from padding ids, and detection of padding whose id is unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .labels import number_tensor
from .row import ModelInputs

# Rows after which an error is raised before the end of the data, and the share of them that must look padded.
EARLY_ROWS = 64
EARLY_SHARE = 0.75
# Share of the rows from which a warning is given. Of rows of 64 tokens or more of GPT-2's tokenizer, at most 0.3 % end or begin
# with a run of an id that is nowhere else in the row (WikiText, plays, Python), though 22 % of Python end in a run of spaces.
SHARE = 0.02


def mask_of(rows: Tensor, model: ModelInputs) -> Tensor | None:
    """Derive an attention mask (`row pos`) from padding ids at the start and the end of rows.

    The padding ids are those of the tokenizer and the configuration.

    Returns:
        The mask, or None if rows have no padding.

    Raises:
        LayersimError: a padding id may be a token at its position.
    """
    tokenizer = model.tokenizer
    pads = dict.fromkeys((getattr(tokenizer, "pad_token_id", None), *model.pads))
    starts = _start_ids(model)
    edges = starts | {getattr(tokenizer, "eos_token_id", None), *model.ends}
    mask = torch.ones_like(rows, dtype=torch.bool)
    named_pads = [pad for pad in pads if pad is not None]
    # Where no padding id is named, rows are often padded with EOS.
    for pad in named_pads or sorted(edge for edge in edges if edge is not None):
        is_pad = rows == pad if rows.shape[1] > 1 else torch.zeros_like(mask)
        if not bool(is_pad.any()):
            continue
        ends = is_pad.cumprod(1).bool() | is_pad.flip(1).cumprod(1).flip(1).bool()
        # A single BOS or EOS at an end may be a token, and so may two BOS at the start, and an unknown token elsewhere.
        run_at_end = 2 if pad in edges else 1
        run_at_start = 3 if pad in starts else run_at_end
        shared = pad in edges or pad == getattr(tokenizer, "unk_token_id", None)
        # At an end, or between tokens.
        unclear = ends[:, :run_at_start].all(1) | ends[:, -run_at_end:].all(1) if shared else (is_pad & ~ends).any(1)
        if bool(unclear.any()):
            if not named_pads:
                tokens = f"token {pad} twice or more at an end"
            elif shared:
                tokens = f"pad token {pad} at an end, where it may be another special token"
            else:
                tokens = f"pad token {pad} between tokens"
            raise _mask_missing(f"{int(unclear.sum())} of {len(rows)} rows have {tokens}", "mask", model, at_ends=shared)
        if not shared:
            mask &= ~ends
    return None if bool(mask.all()) else mask


class RunsAtEnds:
    """Counts rows that look padded: one id repeats at the start or end of the row and occurs nowhere else in it.

    Such an id is probably padding that neither the tokenizer nor the configuration names, as `pad_sequence` pads with 0. The
    counts do not depend on the order of the rows, nor on how they are divided into tables.

    Attributes:
        rows: number of rows.
        counts: number of such rows, by the end ("start" or "end") and the id.
        longest: longest of these runs.

    Examples:
        >>> from tl_layersim.demo import demo_model
        >>> from tl_layersim.sources.hooked_module import HookedSource
        >>> runs = RunsAtEnds()
        >>> runs.add(torch.tensor([[5, 6, 7, 8], [5, 6, 9, 9], [6, 9, 9, 9]]), HookedSource(demo_model()).model)
        >>> runs.counts
        Counter({('end', 9): 2})
    """

    def __init__(self) -> None:
        self.rows = 0
        self.counts: Counter[tuple[str, int]] = Counter()
        self.longest: Counter[tuple[str, int]] = Counter()

    def add(self, rows: Tensor, model: ModelInputs) -> None:
        """Add a table of token ids (`row pos`) to the counts.

        Raises:
            LayersimError: a share of at least `EARLY_SHARE` of at least `EARLY_ROWS` rows has such a run, and the table has
                several rows.
        """
        self.rows += len(rows)
        # `mask_of` decides about padding ids that are named.
        named_pads = {getattr(model.tokenizer, "pad_token_id", None), *model.pads}
        for end, table in (("start", rows), ("end", rows.flip(1))):
            # Two BOS may be those of the tokenizer and of the text.
            may_be_pair = _start_ids(model) if end == "start" else set()
            differs = table != table[:, :1]
            # The place of the first token that differs, 0 in a row of one token throughout.
            lengths = differs.to(torch.uint8).argmax(1)
            is_run = (lengths > 1) & (lengths == (~differs).sum(1))
            for pad, length in zip(table[is_run, 0].tolist(), lengths[is_run].tolist(), strict=True):
                if pad not in named_pads and (length > 2 or pad not in may_be_pair):
                    self.counts[end, pad] += 1
                    self.longest[end, pad] = max(self.longest[end, pad], length)
        # Rows that come one by one may come in any order, and are decided on at the end of the data.
        if len(rows) > 1 and self.rows >= EARLY_ROWS:
            self._refuse_padded_rows(model, EARLY_SHARE)

    def _refuse_padded_rows(self, model: ModelInputs, share: float) -> None:
        for (end, pad), count in self.counts.most_common(1):
            if count > max(1, share * self.rows):
                observation = f"{count} of {self.rows} rows have token {pad} twice or more at the {end}, and nowhere else"
                raise _mask_missing(observation, f"tokens != {pad}", model)

    def warning(self, model: ModelInputs) -> str:
        """The warning about rows that look padded; "" if there are too few.

        Raises:
            LayersimError: most rows have such a run.
        """
        self._refuse_padded_rows(model, 0.5)
        for (end, pad), count in self.counts.most_common(1):
            # One row of several may end in a doubled token.
            if self.rows > 1 and count >= SHARE * self.rows and (count > 1 or self.longest[end, pad] > 2):
                return (
                    f"{count} of {self.rows} rows without an attention mask have token {pad} twice or more at the {end} and "
                    f"nowhere else; these positions are counted. If token {pad} is padding, pass "
                    f"{_with_mask(f'tokens != {pad}', model)}."
                )
        return ""


def _start_ids(model: ModelInputs) -> set[Any]:
    """The ids that start a row, such as BOS."""
    return {getattr(model.tokenizer, "bos_token_id", None), *model.starts}


def _with_mask(mask: str, model: ModelInputs) -> str:
    """Python code that passes an attention mask, as text for messages."""
    return f"{{'{model.token_input}': tokens, '{model.mask_input}': {mask}}}, or probe.mask = {mask} in attach"


def _mask_missing(observation: str, mask: str, model: ModelInputs, at_ends: bool = True) -> LayersimError:
    if at_ends:
        missing = "`attention_mask` is missing, but rows of tokens start or end with padding: "
    else:
        missing = "`attention_mask` is missing, but rows of tokens contain padding ids between other tokens: "
    return LayersimError(
        f"{missing}{observation}. Pass {_with_mask(mask, model)}. To measure the padding too, pass a mask of ones."
    )


def masked_warning(pads: Sequence[int]) -> str:
    """The warning that a mask was derived from padding ids."""
    ids = " and ".join(map(str, sorted(set(pads))))
    return (
        f"Tokens came without an attention mask, so the padding (id {ids} at the ends of rows) was masked. To set the mask "
        "yourself, pass {'input_ids': tokens, 'attention_mask': mask}, or probe.mask = mask in attach."
    )


def as_mask(mask: Any, name: str = "attention_mask") -> Tensor:
    """Convert a mask of ones and zeros to bool. An additive mask (0 keeps, -inf drops) raises an error.

    Args:
        mask: the mask.
        name: the argument or the column that holds the mask, for the message.
    """
    values = number_tensor(mask, name)
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise LayersimError(
            f"`{name}` has values from {float(values.min()):g} to {float(values.max()):g}; it must be ones and "
            "zeros, where 0 hides a position."
        )
    return values.bool()
