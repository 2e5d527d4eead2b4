"""Exit checks: which tokens exit at a layer, and their logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from ..architectures.unembed import LayerHeads, Unembed
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.labels import number_tensor
from ..sources.partial_forward import LocalSplitModel
from .rules import CheckedTokens, ExitRule

Shortlist: TypeAlias = Sequence[SupportsIndex] | Integer[Tensor, " token"] | np.ndarray


@dataclass(frozen=True, eq=False)
class ExitLens:
    """Logit lens of every layer, with the model's own head or separate heads.

    Attributes:
        unembed: the model's own final norm and head.
        blocks: number of blocks of the model.
        heads: heads of the layers below the last; None for the model's own head at every layer.
        normed: whether `heads` read the output of the final norm.
    """

    unembed: Unembed
    blocks: int
    heads: LayerHeads | None = None
    normed: bool = True

    def norms(self, layer: int) -> bool:
        """Whether the final norm is applied before a layer's head."""
        return self.heads is None or self.normed or layer == self.blocks

    def __call__(self, x: Tensor, layer: int, needs_norm: bool = True) -> Tensor:
        """Logits of the residuals after a block (`token vocabulary`).

        Args:
            x: `token d_model`, residuals that leave the block, or what a head that reads rows pools of them.
            layer: number of the block, counted from 1.
            needs_norm: whether the final norm is still to be applied where the head reads its output.
        """
        if self.heads is None:
            return self.unembed(x, needs_norm)
        if layer == self.blocks:
            logits = self.unembed(x, needs_norm)
        else:
            logits = self.heads.logits(self.unembed, x, layer - 1, needs_norm and self.normed)
        # Logits of all layers have one dtype.
        dtype = torch.promote_types(self.heads.weight.dtype, self.unembed.dtype or logits.dtype)
        return logits.to(dtype)

    def rows(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of a layer's head for the given token ids: weight (`candidate d_model`) and bias (`candidate`)."""
        if self.heads is not None:
            return self.heads.rows(layer - 1, ids)
        linear = self.unembed.linear
        assert linear is not None
        ids = ids.to(linear.weight.device)
        weight = linear.weight.detach()[ids]
        bias = None if linear.bias is None else linear.bias.detach()[ids]
        return weight, bias


class ExitCheck:
    """Decides after each block which tokens exit, and returns their logits.

    Args:
        lens: the predictions of each layer.
        rule: an exit rule; or `row`, the number of blocks after which the tokens of each row exit.

    Attributes:
        checked: tokens evaluated so far, summed over layers.
    """

    def __init__(self, lens: ExitLens, rule: ExitRule | Tensor) -> None:
        self.lens = lens
        self.rule = rule
        self.checked = 0
        self._shortlist_rows = functools.cache(lens.rows)

    def restart(self, rows: list[int]) -> None:
        """Reset the exit rule's state for new tokens."""
        if isinstance(self.rule, Tensor):
            self._exit_layers = self.rule[rows]
        else:
            self._rule_state = self.rule.new_state(len(rows))

    def __call__(
        self,
        leaving: Tensor,
        entering: Tensor,
        index: Tensor,
        layer: int,
        last: bool,
        head_input: tuple[Tensor, bool] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Decide which tokens exit at a layer.

        Args:
            leaving: `token d_model`, the residual that left the last block.
            entering: `token d_model`, the residual that entered it.
            index: `token`, the position of each token among those of `restart`.
            layer: number of blocks that have run.
            last: whether no block runs after these, so that all tokens exit.
            head_input: input of the head, `token width`, and whether the final norm is still to be applied; None for `leaving`.

        Returns:
            `token`, bool; and logits `token vocabulary` of the tokens that exit, None if there is none.
        """
        x, needs_norm = head_input or (leaving, True)
        if last:
            return leaving.new_ones(len(leaving), dtype=torch.bool), self.lens(x, layer, needs_norm)
        self.checked += len(leaving)
        logits = None
        if isinstance(self.rule, Tensor):
            exits = self._exit_layers[index.cpu()] == layer
        else:
            rule_logits = self._logits_of_rule(self.rule, layer, x, needs_norm)
            exits = self.rule.exits(CheckedTokens(rule_logits, entering, leaving, index), self._rule_state)
            # Logits over a shortlist are no logits of the model.
            if self.rule.gives_logits:
                logits = rule_logits
        exits = exits.to(leaving.device)
        if not bool(exits.any()):
            return exits, None
        exit_logits = self.lens(x[exits], layer, needs_norm) if logits is None else logits[exits]
        return exits, exit_logits

    def _logits_of_rule(self, rule: ExitRule, layer: int, x: Tensor, needs_norm: bool) -> Tensor:
        """Logits for an exit rule, over its shortlist or the whole vocabulary. Empty if the rule reads none."""
        if not rule.reads_logits:
            return x.new_zeros(len(x), 0)
        if rule.shortlist is None:
            return self.lens(x, layer, needs_norm)
        lens = self.lens
        # The model's own head is the same at every layer.
        head_layer = lens.blocks if lens.heads is None else layer
        weight, bias = self._shortlist_rows(head_layer, rule.shortlist)
        features = lens.unembed.features(x, needs_norm and lens.norms(layer)).to(weight.dtype)
        return lens.unembed.finish(torch.nn.functional.linear(features, weight, bias))


def shortlist_ids(
    shortlist: Shortlist | None, rule: type[ExitRule], split_model: LocalSplitModel, unembed: Unembed
) -> Tensor | None:
    """Check a shortlist and return its token ids as a tensor. None if `shortlist` is None.

    Raises:
        LayersimError: these are not distinct token ids, or the rule or the head cannot use a shortlist.
    """
    if shortlist is None:
        return None
    if not rule.reads_logits or unembed.linear is None or len(unembed.parts) > 1:
        raise LayersimError(
            "`shortlist` needs a rule that reads logits, and a head that is one linear layer; the rule is "
            f"{rule.name!r}, and the head is {split_model.source.model.head}."
        )
    ids = number_tensor(shortlist, "shortlist", "distinct token ids")
    vocabulary = unembed.linear.out_features
    distinct = ids.dtype != torch.bool and len(set(ids.tolist())) == len(ids) >= 2
    if not distinct or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise LayersimError(
            f"`shortlist` is {brief(shortlist)}; it must be two or more distinct token ids from 0 to {vocabulary - 1}."
        )
    return ids
