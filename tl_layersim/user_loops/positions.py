"""Counted positions of one forward pass under `attach`, from the model's attention mask, `probe.mask` and `positions=`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..architectures.transformer_lens import right_padding
from ..core.errors import LayersimError
from ..data.data import Notes
from ..data.padding import mask_of, masked_warning
from ..data.positions import Positions
from ..sources.hooked import HookedSource
from .recorder import Call


@dataclass(frozen=True)
class ForwardPassPositions:
    """Chooses the positions of each forward pass that are counted.

    Attributes:
        rule: the rule of the run for positions.
        source: the model. If there is no mask, tokens with its padding id raise an error.
        whole_rows: whether an analyzer takes rows as samples, so that forward passes of a single position raise an error.
        notes: the notes, which count the rows without a mask.
    """

    rule: Positions
    source: HookedSource
    whole_rows: bool
    notes: Notes = field(default_factory=Notes)

    def choose(self, call: Call, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Masks of the counted and of the attended positions of a forward pass, each `batch pos`.

        Args:
            call: the forward pass.
            mask: the mask `probe.mask`.

        Raises:
            LayersimError: the positions are not known, or the rule does not apply to this forward pass.
        """
        known, pos, attention = self._known(call, mask), call.shape[1], call.attention
        attended = attention[:, -pos:].bool().cpu() if _has_mask_shape(attention, call) else known.cpu()
        return self._selected(call, known), attended

    def _selected(self, call: Call, known: Tensor) -> Tensor:
        """Mask of the positions that the rule selects, among the positions of the given mask."""
        if self.rule.rule == "all":
            return known
        if continues(call) and self.rule.rule != "last":
            raise LayersimError(
                f"`positions={self.rule.record()}` refers to whole rows, but this forward pass continues rows from a cache. "
                "Use positions='all' or 'last', or attach the probe to model(tokens) on the finished rows."
            )
        tokens = call.tokens
        if tokens is None:
            self.rule.refuse_without_tokens()
        ids = torch.zeros(call.shape, dtype=torch.int64) if tokens is None else tokens.cpu().expand(call.shape)
        rows = zip(ids, known.cpu(), strict=True)
        return torch.stack([self.rule.select(row, counted) for row, counted in rows]).to(known.device)

    def _known(self, call: Call, mask: Tensor | None) -> Tensor:
        """Mask from `probe.mask` or from the model's attention mask, `batch pos`."""
        batch, pos = call.shape
        if mask is not None and tuple(mask.shape) != call.shape and not (pos == 1 and mask.shape[0] == batch):
            raise LayersimError(
                f"`probe.mask` has shape {tuple(mask.shape)}; the tokens of this forward pass have shape {call.shape}."
            )
        if pos == 1 and self.whole_rows:
            raise LayersimError(
                "The attached analyzer needs whole rows, but this forward pass has a single position, as in cached generation. "
                'Call model(tokens) on the finished rows, or use CKA(level="token").'
            )
        if mask is not None and tuple(mask.shape) == call.shape:
            return mask
        return torch.ones(call.shape, dtype=torch.bool) if pos == 1 else self._attended(call)

    def _attended(self, call: Call) -> Tensor:
        """Positions of the model's attention mask; all positions if the model was called without a mask."""
        attention = call.attention
        if attention is None:
            if call.tokens is not None and tuple(call.tokens.shape) == call.shape:
                pad = right_padding(self.source.module)
                tokens = call.tokens.cpu()
                if pad is not None and bool((tokens[:, -1] == pad).any()):
                    padding = (tokens == pad).flip(1).cumprod(1).flip(1).bool()
                    self.notes.masked += int(padding.any(1).sum())
                    self.notes.once(masked_warning([pad]))
                    return ~padding
                # A decoder's own start token is often the padding token too.
                started = call.start is not None and bool((call.tokens[:, 0] == call.start).all())
                self._refuse_padding(call.tokens[:, 1:] if started else call.tokens, call.start is not None)
            return torch.ones(call.shape, dtype=torch.bool)
        if not _has_mask_shape(attention, call):
            raise LayersimError(
                f"`attention_mask` has shape {tuple(getattr(attention, 'shape', ()))}; the probe finds padding only in a "
                f"mask of shape {call.shape}. Set `probe.mask` before the forward pass."
            )
        attended: Tensor = attention[:, -call.shape[1] :].bool()
        return attended

    def _refuse_padding(self, tokens: Tensor, decoder: bool) -> None:
        """Raise an error if rows start or end with padding that no mask excludes, so that the model attended to it."""
        self.notes.runs.add(tokens.cpu(), self.source.model)
        if mask_of(tokens.cpu(), self.source.model) is not None:
            raise LayersimError(
                "`attention_mask` is missing, but rows of tokens start or end with padding. Pass "
                f"`{'decoder_' if decoder else ''}attention_mask` to the model, or set `probe.mask`."
            )


def _has_mask_shape(attention: Any, call: Call) -> bool:
    """Whether an attention mask has one value for each position of a forward pass."""
    if not isinstance(attention, Tensor) or attention.dim() != 2 or attention.shape[0] != call.shape[0]:
        return False
    # With a cache the attention mask also covers earlier positions.
    return attention.shape[1] == call.shape[1] or (call.cached and attention.shape[1] > call.shape[1])


def continues(call: Call) -> bool:
    """Whether a forward pass continues rows whose earlier positions are in a cache.

    Args:
        call: the forward pass.
    """
    if isinstance(call.attention, Tensor) and call.attention.dim() == 2:
        # The first pass of a generation may be given an empty cache.
        return call.cached and call.attention.shape[1] > call.shape[1]
    return call.cached and call.shape[1] == 1
