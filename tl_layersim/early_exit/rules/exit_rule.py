"""Base class of exit rules, the tokens at a check, and the registry of rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...core.errors import LayersimError
from ...core.registry import Registry

# Tensors by name, each with one entry per token.
RuleState = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class CheckedTokens:
    """The tokens at one exit check.

    Attributes:
        logits: `token vocabulary`, the model's own final norm and head applied to `leaving`; `token candidate` over the ids of
            a shortlist; `token 0` for a rule that does not read logits.
        entering: `token d_model`, the residual that entered the block.
        leaving: `token d_model`, the residual that left the block.
        index: `token`, the position of each token in the rule's state.
    """

    logits: Tensor
    entering: Tensor
    leaving: Tensor
    index: Tensor


@dataclass(frozen=True, eq=False)
class ExitRule(ABC):
    """Base class of exit rules. A rule decides at each check which tokens exit.

    A new subclass goes into a new file of this folder. It is then available as
    `EarlyExit(model, rule=name)`; no other file changes. An instance holds settings only.

    A rule that compares layers keeps what it needs in the state, which the caller creates with `new_state` when tokens enter
    the first block and passes to every check of these tokens.

    A decision about a token depends on this token alone. A higher threshold never makes a token exit at an earlier check.

    Args:
        threshold: the value that a token's statistic must exceed, from `lowest` to `unreachable`.
        shortlist: token ids over which logits are computed, None for the whole vocabulary.

    Class attributes:
        - `name`: value of `rule=` in `EarlyExit` and `ExitCosts`.
        - `reads_logits`: whether the rule reads logits, so that each check costs an unembedding.
        - `lowest`: lowest possible threshold.
        - `unreachable`: lowest threshold at which no token ever exits.

    Raises:
        LayersimError: the threshold is out of range.
    """

    name: ClassVar[str]
    reads_logits: ClassVar[bool] = True
    lowest: ClassVar[float] = 0.0
    unreachable: ClassVar[float] = 1.0

    threshold: float
    shortlist: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.lowest <= self.threshold <= self.unreachable:
            raise LayersimError(
                f"`threshold` of rule={self.name!r} is {self.threshold:g}; it must be between {self.lowest:g} and "
                f"{self.unreachable:g}."
            )

    @property
    def never(self) -> bool:
        """Whether no token can exit at this threshold."""
        return self.threshold >= self.unreachable

    @property
    def gives_logits(self) -> bool:
        """Whether an exit check computes logits over the whole vocabulary."""
        return self.reads_logits and self.shortlist is None

    def new_state(self, count: int) -> RuleState:
        """The rule's initial state for new tokens.

        Args:
            count: number of tokens.
        """
        return {}

    @abstractmethod
    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        """Mask of the tokens that exit at this check.

        Args:
            tokens: the tokens at the check.
            state: the state that `new_state` returned; updated in place.

        Returns:
            `token`, bool, on any device.
        """


EXIT_RULES = Registry(__package__, ExitRule, "rule")
