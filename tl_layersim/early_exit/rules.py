"""When a layer is sure enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import LayersimError, as_fraction
from ..models.softmax import confidence, on_float64_device
from ..models.unembed import Unembed

RuleName = Literal["max-prob", "margin", "patience", "cosine"]


@dataclass(frozen=True)
class Rule:
    """What is asked at a check, and what is enough.

    Attributes:
        name: see `EarlyExit`.
        threshold: see `EarlyExit`.
        shortlist: ids over which is asked, None for the whole vocabulary.
    """

    name: RuleName
    threshold: float
    shortlist: Tensor | None = None

    def __post_init__(self) -> None:
        whole = self.name == "patience"
        if whole and (self.threshold < 1 or self.threshold != int(self.threshold)):
            raise LayersimError(
                "`threshold` of rule='patience' must be a whole number of checks, 1 or more.",
                given=f"threshold={self.threshold:g}",
                expected="a whole number, 1 or more",
                do="threshold=2: the same first choice twice in a row",
            )
        low = -1 if self.name == "cosine" else 0
        if not whole and not low <= self.threshold <= 1:
            raise LayersimError(
                f"`threshold` of rule={self.name!r} must be between {low} and 1.",
                given=f"threshold={self.threshold:g}",
                expected=f"{low} to 1; at 1 every token runs through all layers",
                do=as_fraction("threshold", self.threshold) or "threshold=0.9",
            )

    @property
    def never(self) -> bool:
        """Whether nothing can be sure: a probability or a cosine above 1."""
        return self.name != "patience" and self.threshold >= 1

    @property
    def unembeds(self) -> bool:
        """Whether a check makes logits of the whole vocabulary, which then are the token's own."""
        return self.name != "cosine" and self.shortlist is None


class ConfidenceCheck:
    """Asks a rule for many tokens side by side.

    Args:
        rule: what is asked.
        unembed: the lens.
        count: how many tokens there are; each is asked at one layer after the other.
    """

    def __init__(self, rule: Rule, unembed: Unembed, count: int) -> None:
        self.rule, self.unembed = rule, unembed
        self.choice: list[Tensor] = []
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self.fresh(count)

    def fresh(self, count: int) -> None:
        """Begin with other tokens."""
        if self.rule.name == "patience":
            self.choice = [torch.full((count,), -1), torch.zeros(count, dtype=torch.int64)]

    def __call__(self, x: Tensor, entering: Tensor, which: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which tokens are sure at a layer.

        Args:
            x: `token d_model`, what leaves the block.
            entering: `token d_model`, what entered it.
            which: `token`, their numbers.

        Returns:
            `token`, and their logits `token vocabulary` where the check made all of them.
        """
        if self.rule.name == "cosine":
            a, b = (on_float64_device(z).double() for z in (x, entering))
            return (torch.cosine_similarity(a, b, dim=-1) > self.rule.threshold).to(x.device), None
        logits = self.unembed(x) if self.rule.shortlist is None else self.short(x)
        return self.sure(logits, which), logits if self.rule.unembeds else None

    def sure(self, logits: Tensor, which: Tensor) -> Tensor:
        """`token`: whether the rule is met by these logits."""
        if self.rule.name == "patience":
            last, count = self.choice
            best, which = logits.argmax(-1).cpu(), which.cpu()
            streak = torch.where(best == last[which], count[which] + 1, 1)
            last[which], count[which] = best, streak
            return (streak >= self.rule.threshold).to(logits.device)
        # In float64: float32 rounds 1 - p where thresholds near 1 are, and the threshold itself.
        return (confidence(logits, self.rule.name == "margin") > self.rule.threshold).to(logits.device)

    def short(self, x: Tensor) -> Tensor:
        """Logits `token candidate` of the shortlist: the final norm, and a product with these rows of the head alone."""
        linear = self.unembed.linear
        assert linear is not None
        assert self.rule.shortlist is not None
        if self._rows is None:
            ids = self.rule.shortlist.to(linear.weight.device)
            self._rows = (linear.weight.detach()[ids], None if linear.bias is None else linear.bias.detach()[ids])
        weight, bias = self._rows
        return self.unembed.finish(torch.nn.functional.linear(self.unembed.normed(x).to(weight.dtype), weight, bias))
