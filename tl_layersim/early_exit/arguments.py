"""Validation of the arguments of `EarlyExit`: layers of checks, shortlists, curves, tokens and masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..models.exit_heads import ExitHeads
from ..models.split_model import LocalSplitModel
from ..models.unembed import Unembed
from .full_model_check import classified_positions
from .full_sequence import Rows
from .rules import exit_rules
from .rules.base import ExitRule
from .supported_models import reads_pixels


def check_layers(at: Any, min_layer: int, blocks: int) -> tuple[int, ...] | None:
    """The layers of checks that `at` names; None where it is None.

    Raises:
        LayersimError: `at` names other layers than `min_layer` to `blocks - 1`, or in another order.
    """
    if at is None:
        return None
    if isinstance(at, str):
        if at != "all":
            raise LayersimError(
                '`at` must be layer numbers or "all".', given=f"at={at!r}", expected='numbers, or "all"', do='at="all"'
            )
        return tuple(range(max(1, min_layer), blocks))
    layers = tuple(at)
    if list(layers) != sorted(set(layers)) or (layers and not max(1, min_layer) <= layers[0] <= layers[-1] < blocks):
        raise LayersimError(
            f"`at` must be ascending layer numbers from {max(1, min_layer)} to {blocks - 1}.",
            given=f"at={layers}, min_layer={min_layer}",
            expected=f"numbers of blocks that have run, ascending, {max(1, min_layer)} to {blocks - 1}",
            do=f"at=({blocks // 2},)",
        )
    return layers


def shortlist_ids(shortlist: Any, rule: type[ExitRule], split_model: LocalSplitModel, unembed: Unembed) -> Tensor:
    """The token ids of a shortlist.

    Raises:
        LayersimError: these are not distinct token ids, or the rule or the head cannot use a shortlist.
    """
    try:
        ids = torch.as_tensor(shortlist).detach().cpu()
    except (RuntimeError, TypeError, ValueError):
        ids = torch.zeros(0)
    vocabulary = 0 if unembed.linear is None else unembed.linear.out_features
    valid = (
        ids.dim() == 1 and not ids.is_floating_point() and ids.dtype != torch.bool and len(set(ids.tolist())) == len(ids) >= 2
    )
    if not valid or (vocabulary and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary):
        raise LayersimError(
            "`shortlist` must be two or more distinct token ids.",
            given=f"{ids.dtype} of shape {tuple(ids.shape)}",
            expected=f"two or more different token ids from 0 to {vocabulary - 1}",
            do="frequent_tokens(model, texts, 1000)",
        )
    if not rule.reads_logits or unembed.linear is None or len(unembed.parts) > 1:
        raise LayersimError(
            "`shortlist` cannot be used with this rule or this head.",
            given=f"rule={rule.name!r}, a head {split_model.source.model.head}",
            expected="a rule that reads logits, and a head that is one plain linear layer",
            do="leave shortlist= out",
        )
    return ids


def check_curve_rule(rule: type[ExitRule]) -> None:
    """Refuse an exit curve for a rule whose exits it does not measure.

    Raises:
        LayersimError: with the rules that exit curves measure.
    """
    if not rule.has_exit_curve:
        measured = [name for name, other in exit_rules().items() if other.has_exit_curve]
        raise LayersimError(
            f"`curve` cannot be used with rule={rule.name!r}: an exit curve does not measure the exits of this rule.",
            given=f"curve= with rule={rule.name!r}",
            expected=f"rule={' or '.join(map(repr, measured))}, or no curve",
            do="at=(...)",
        )


def check_curve_heads(curve: Any, heads: ExitHeads | None) -> None:
    """Refuse an exit curve that was measured with other heads than those of the layers.

    Raises:
        LayersimError: names both.
    """
    provenance = getattr(curve, "provenance", None)
    measured = None if provenance is None else provenance.options.get("heads")
    own = None if heads is None else str(heads)
    if measured != own:
        raise LayersimError(
            "`curve` was measured with other heads.",
            given=f"a curve of {measured or 'the head of the model'}, and heads={own}",
            expected="the curve of the heads with which the layers are read",
            do="curve=analyze(model, data, [ExitCurve(norm=heads.norm, heads=heads)])['exit_curve']"
            if heads is not None
            else "heads=, those of the curve",
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
    pixels, mask = reads_pixels(split_model), attention_mask
    call = "early.logits(images)" if pixels else "early.logits(encoded.input_ids, encoded.attention_mask)"
    if pixels and mask is not None:
        raise LayersimError(
            "`attention_mask` cannot be given for an image model.",
            given=f"a mask of shape {tuple(mask.shape)}",
            expected="images alone",
            do=call,
        )
    if tokens.is_floating_point() != pixels:
        raise LayersimError(
            "`tokens` must be pixel values: this model reads images."
            if pixels
            else "`tokens` must be token ids: this model reads tokens.",
            given=f"{tokens.dtype} of shape {tuple(tokens.shape)}",
            expected="images `batch channel height width`" if pixels else "token ids `batch pos`",
            do=call,
        )
    if not tokens.numel():
        raise LayersimError("`tokens` is empty.", given=f"shape {tuple(tokens.shape)}", expected="one row or more", do=call)
    context = split_model.model.context
    if not pixels and context and tokens.shape[1] > context and (mask is None or int(mask.bool().sum(1).max()) > context):
        raise LayersimError(
            "`tokens` exceed the model's context.",
            given=f"{tokens.shape[1]} tokens",
            expected=f"at most {context}, the context of {split_model.model.name}",
            do=f"tokens[:, :{context}]",
        )
    if mask is not None and not bool(mask.bool().any(1).all()):
        raise LayersimError(
            "`attention_mask` has a row without a token.",
            given=f"{int(mask.bool().any(-1).logical_not().sum())} empty rows",
            expected="a token in each row",
            do=call,
        )
    tokens = tokens.to(split_model.device)
    attended = None if mask is None else mask.to(split_model.device).bool()
    inputs = {"pixel_values" if pixels else "input_ids": tokens}
    if attended is not None:
        inputs["attention_mask"] = attended.long()
    if reads == "every":
        positions = torch.ones_like(tokens, dtype=torch.bool) if attended is None else attended
    else:
        positions = classified_positions(split_model, reads, inputs, attended)
    return Rows(inputs, positions, causal, attended if reads == "rows" else None)
