"""Exit rules, one class for each value of `rule`.

A new subclass of `ExitRule` goes into this file, or into a new module of this folder. No other file changes.

Examples:
    >>> sorted(EXIT_RULES.all())
    ['cosine', 'margin', 'max-prob', 'patience']
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core.cross_entropy import confidence, on_float64_device
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

    A new subclass goes into this `__init__.py`, or into a new module of this folder. It is then available as
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


EXIT_RULES = Registry(__name__, ExitRule, "rule")


class CosineRule(ExitRule):
    """A token exits when the residuals before and after the block have a cosine above the threshold.

    The rule does not read logits, so only tokens that exit are unembedded.

    Source:
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, "hidden-state saturation".

    Examples:
        >>> import torch
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.1], [0.0, 1.0]])
        >>> CosineRule(0.9).exits(CheckedTokens(torch.zeros(2, 0), x, y, torch.arange(2)), {})
        tensor([ True, False])
    """

    name = "cosine"
    reads_logits = False
    lowest = -1.0

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        leaving = on_float64_device(tokens.leaving).double()
        entering = on_float64_device(tokens.entering).double()
        return torch.cosine_similarity(leaving, entering, dim=-1) > self.threshold


class MarginRule(ExitRule):
    r"""A token exits when its two largest probabilities differ by more than the threshold.

    Probabilities are computed in float64, because float32 rounds $1 - p$ and thresholds near 1.

    Source:
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, "softmax response".

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0]])  # probabilities 0.95 and 0.05, 0.88 and 0.12
        >>> MarginRule(0.8).exits(CheckedTokens(logits, logits, logits, torch.arange(2)), {})
        tensor([ True, False])
    """

    name = "margin"

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        return confidence(tokens.logits, margin=True) > self.threshold


class MaxProbRule(ExitRule):
    r"""A token exits when its largest probability exceeds the threshold.

    Probabilities are computed in float64, because float32 rounds $1 - p$ and thresholds near 1.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3.

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 0.0], [1.0, 0.0]])  # largest probabilities 0.95 and 0.73
        >>> MaxProbRule(0.9).exits(CheckedTokens(logits, logits, logits, torch.arange(2)), {})
        tensor([ True, False])
    """

    name = "max-prob"

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        return confidence(tokens.logits) > self.threshold


class PatienceRule(ExitRule):
    """A token exits when its prediction is the same at `threshold` checks in a row.

    Source:
        Zhou et al. 2020 (arXiv 2006.04152).

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 0.0]])
        >>> rule = PatienceRule(2)
        >>> state = rule.new_state(1)
        >>> [bool(rule.exits(CheckedTokens(logits, logits, logits, torch.arange(1)), state)) for _ in range(2)]
        [False, True]
    """

    name = "patience"
    lowest = 1
    # More checks than any model has layers.
    unreachable = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold % 1:
            raise LayersimError(f"`threshold` of rule={self.name!r} is {self.threshold:g}; it must be a whole number.")

    def new_state(self, count: int) -> RuleState:
        return {"prediction": torch.full((count,), -1), "streak": torch.zeros(count, dtype=torch.int64)}

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        prediction = tokens.logits.argmax(-1).cpu()
        index = tokens.index.cpu()
        streak = torch.where(prediction == state["prediction"][index], state["streak"][index] + 1, 1)
        state["prediction"][index] = prediction
        state["streak"][index] = streak
        return streak >= self.threshold
