"""What a generation or a reading with early exit gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.typed import named


@named
@dataclass(frozen=True, eq=False, repr=False)
class Generated:
    """What `EarlyExit.generate` gives.

    Attributes:
        tokens: for each row, its new token ids, `token`.
        texts: for each row, its new text; empty where there is no tokenizer.
        exits: for each row and new token, how many blocks had run when it was chosen, `token`.
        layers: how many blocks the model has.
        steps: how often every row got a token.
        block_calls: calls of blocks: how often a block's weights were read. The whole model makes `layers * steps`.
        block_tokens: tokens that ran through blocks, summed over blocks, prompts and padding included.
        full_block_tokens: the same of the whole model.
        passes: forward passes that were started, whole or in part.
        checks: how often a token was asked whether it is sure.
    """

    tokens: tuple[Tensor, ...]
    texts: tuple[str, ...]
    exits: tuple[Tensor, ...]
    layers: int
    steps: int
    block_calls: int
    block_tokens: int
    full_block_tokens: int
    passes: int
    checks: int

    @property
    def mean_exit(self) -> float:
        """Blocks that had run when a token was chosen, on average over tokens."""
        count = sum(len(row) for row in self.exits)
        return sum(int(row.sum()) for row in self.exits) / max(1, count)

    @property
    def share_of_blocks(self) -> float:
        """Calls of blocks over those of the whole model: what a machine saves that waits for weights."""
        return self.block_calls / max(1, self.layers * self.steps)

    @property
    def share_of_block_tokens(self) -> float:
        """Tokens run through blocks over those of the whole model: what a machine saves that waits for arithmetic."""
        return self.block_tokens / max(1, self.full_block_tokens)

    def __repr__(self) -> str:
        new = sum(len(row) for row in self.tokens)
        return (
            f"Generated: {len(self.tokens)} {'row' if len(self.tokens) == 1 else 'rows'}, {new} new tokens, exits after "
            f"{self.mean_exit:.2f} of {self.layers} blocks on average, {self.share_of_blocks:.0%} of the calls of blocks, "
            f"{self.checks} checks"
        )


@named
@dataclass(frozen=True, eq=False, repr=False)
class ExitLogits:
    """What `EarlyExit.logits` gives.

    Attributes:
        logits: `batch pos vocabulary`, or `batch classes` of a classifier; each from where it left. 0 at padding.
        exits: `batch pos` or `batch`, after how many blocks that was; 0 at padding.
        layers: how many blocks the model has.
        block_tokens: positions that ran through blocks, summed over blocks.
        full_block_tokens: the same of the whole model.
        checks: how often a position was asked.
    """

    logits: Tensor
    exits: Tensor
    layers: int
    block_tokens: int
    full_block_tokens: int
    checks: int

    @property
    def share_of_block_tokens(self) -> float:
        """Positions run through blocks over those of the whole model."""
        return self.block_tokens / max(1, self.full_block_tokens)

    def __repr__(self) -> str:
        return (
            f"ExitLogits: {tuple(self.logits.shape)}, exits after {float(self.exits[self.exits > 0].float().mean()):.2f} of "
            f"{self.layers} blocks on average, {self.share_of_block_tokens:.0%} of the work in blocks"
        )
