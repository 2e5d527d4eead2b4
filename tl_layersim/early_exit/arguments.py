"""Validation of the arguments of `EarlyExit`: layers of checks, shortlists, curves, tokens and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..analyzers.exit_curve import ExitCurveResult
from ..architectures.resolve import block_numbers
from ..architectures.unembed import Unembed
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.missing_mask import as_mask
from ..models.exit_heads import ExitHeads
from ..models.split_model import LocalSplitModel
from .full_model_check import classified_positions
from .full_sequence import Rows
from .rules import exit_rules
from .rules.base import ExitRule
from .supported_models import reads_pixels


def check_layers(at: int | str | Sequence[int | str] | None, lowest: int, names: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers of the blocks after which `at` asks for a check, ascending; None if `at` is None.

    Args:
        at: see `EarlyExit`.
        lowest: number of the lowest block after which a check is made.
        names: of the outputs of all blocks.

    Raises:
        LayersimError: `at` names a block below `lowest`, the last block, no block, or one twice.
    """
    if at is None:
        return None
    last = len(names) - 1
    if at == "all":
        return tuple(range(lowest, last))
    layers = [at] if isinstance(at, int | str) else list(at)
    blocks = tuple(sorted(block_numbers(layers, names, "at"))) if layers else ()
    if blocks and not lowest <= blocks[0] <= blocks[-1] < last:
        raise LayersimError(f"`at` is {brief(at)}; a check can be made after blocks {lowest} to {last - 1}.")
    return blocks


def shortlist_ids(shortlist: Any, rule: type[ExitRule], split_model: LocalSplitModel, unembed: Unembed) -> Tensor:
    """The token ids of a shortlist.

    Raises:
        LayersimError: these are not distinct token ids, or the rule or the head cannot use a shortlist.
    """
    if not rule.reads_logits or unembed.linear is None or len(unembed.parts) > 1:
        raise LayersimError(
            f"`shortlist` cannot be used with rule={rule.name!r} and the head {split_model.source.model.head}: it needs a rule "
            "that reads logits, and a head that is one linear layer."
        )
    try:
        ids = torch.as_tensor(shortlist).detach().cpu()
    except (RuntimeError, TypeError, ValueError):
        ids = torch.zeros(0)
    vocabulary = unembed.linear.out_features
    valid = (
        ids.dim() == 1 and not ids.is_floating_point() and ids.dtype != torch.bool and len(set(ids.tolist())) == len(ids) >= 2
    )
    if not valid or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise LayersimError(
            f"`shortlist` is {brief(shortlist)}; it must be two or more distinct token ids from 0 to {vocabulary - 1}."
        )
    return ids


def check_curve(curve: ExitCurveResult, rule: type[ExitRule], heads: ExitHeads | None) -> None:
    """Check that an exit curve measures the exits of a rule, and was measured with the heads of the layers.

    Raises:
        LayersimError: it measures other rules, or was measured with other heads.
    """
    if not rule.has_exit_curve:
        measured = [name for name, other in exit_rules().items() if other.has_exit_curve]
        raise LayersimError(
            f"`curve` cannot be used with rule={rule.name!r}: an exit curve measures the exits of "
            f"{' or '.join(map(repr, measured))}."
        )
    measured_with, own = curve.provenance.options.get("heads"), None if heads is None else str(heads)
    if measured_with != own:
        raise LayersimError(
            f"`curve` was measured with {measured_with or 'the head of the model'}, and `heads` is {own}; they must be "
            "the same."
        )


def sequence_rows(
    tokens: Tensor, attention_mask: Tensor | None, split_model: LocalSplitModel, reads: str, causal: bool
) -> Rows:
    """The inputs of a full-sequence forward pass.

    Args:
        tokens: `batch pos` ids, or images `batch channel height width`.
        attention_mask: `batch pos`, None where no position is masked.
        split_model: the model.
        reads: the positions at which the model's head gives logits, see `Head`.
        causal: whether positions do not depend on later ones.

    Raises:
        LayersimError: the model does not take these inputs.
    """
    pixels, mask = reads_pixels(split_model), None if attention_mask is None else as_mask(attention_mask)
    if pixels and mask is not None:
        raise LayersimError("`attention_mask` cannot be given for a model of images.")
    if tokens.is_floating_point() != pixels or not tokens.numel():
        takes = "images `batch channel height width`" if pixels else "token ids `batch pos`"
        raise LayersimError(f"`tokens` is {brief(tokens)}; {split_model.model.name} takes one or more {takes}.")
    context = split_model.model.context
    if not pixels and context and tokens.shape[1] > context and (mask is None or int(mask.sum(1).max()) > context):
        raise LayersimError(f"`tokens` has {tokens.shape[1]} positions; the context of {split_model.model.name} has {context}.")
    if mask is not None and not bool(mask.any(1).all()):
        raise LayersimError("`attention_mask` has a row without a token.")
    tokens = tokens.to(split_model.device)
    attended = None if mask is None else mask.to(split_model.device)
    inputs = {"pixel_values" if pixels else "input_ids": tokens}
    if attended is not None:
        inputs["attention_mask"] = attended.long()
    if reads == "every":
        positions = torch.ones_like(tokens, dtype=torch.bool) if attended is None else attended
    else:
        positions = classified_positions(split_model, reads, inputs, attended)
    return Rows(inputs, positions, causal, attended if reads == "rows" else None)
