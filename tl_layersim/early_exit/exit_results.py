"""Results of generation and of full-sequence forward passes with early exit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Generated:
    """The text that `EarlyExit.generate` wrote, the exit of each token, and the work that was done.

    Attributes:
        tokens: for each row, its new token ids, `token`.
        texts: for each row, its new text; empty if there is no tokenizer.
        exits: for each row and new token, the number of blocks that had run when the token was chosen, `token`.
        layers: number of blocks of the model.
        steps: number of decoding steps; each gives every unfinished row one token.
        block_calls: number of block calls, each of which reads the weights of a block. The full model makes `layers * steps`.
        block_tokens: tokens run through blocks, summed over blocks, prompts and padding included.
        full_block_tokens: the same for the full model.
        passes: forward passes started, complete or partial.
        checks: tokens evaluated at checks, summed over checks.
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
        """Mean over new tokens of the number of blocks that had run when the token was chosen."""
        count = sum(len(row) for row in self.exits)
        return sum(int(row.sum()) for row in self.exits) / max(1, count)

    @property
    def share_of_blocks(self) -> float:
        """Block calls relative to the full model's; also the relative time if reading weights is the bottleneck."""
        return self.block_calls / max(1, self.layers * self.steps)

    @property
    def share_of_block_tokens(self) -> float:
        """Tokens run through blocks relative to the full model's; also the relative time if arithmetic is the bottleneck."""
        return self.block_tokens / max(1, self.full_block_tokens)

    def __repr__(self) -> str:
        new = sum(len(row) for row in self.tokens)
        return (
            f"Generated: {len(self.tokens)} {'row' if len(self.tokens) == 1 else 'rows'}, {new} new tokens, exits after "
            f"{self.mean_exit:.2f} of {self.layers} blocks on average, {100 * self.share_of_blocks:.0f} % of the full model's "
            f"block calls, {self.checks} checks"
        )


@dataclass(frozen=True, eq=False, repr=False)
class ExitLogits:
    """The logits that `EarlyExit.logits` computed, the exit of each position, and the work that was done.

    Attributes:
        logits: `batch pos vocabulary`, or `batch classes` of a classifier; each of the layer at which it exited. 0 at padding.
        exits: `batch pos` or `batch`, the number of blocks that had run. 0 at padding.
        layers: number of blocks of the model.
        block_tokens: positions run through blocks, summed over blocks.
        full_block_tokens: the same for the full model.
        checks: positions evaluated at checks, summed over checks.
    """

    logits: Tensor
    exits: Tensor
    layers: int
    block_tokens: int
    full_block_tokens: int
    checks: int

    @property
    def share_of_block_tokens(self) -> float:
        """Positions run through blocks as a fraction of those of the full model."""
        return self.block_tokens / max(1, self.full_block_tokens)

    def __repr__(self) -> str:
        return (
            f"ExitLogits: {tuple(self.logits.shape)}, exits after {float(self.exits[self.exits > 0].float().mean()):.2f} of "
            f"{self.layers} blocks on average, {100 * self.share_of_block_tokens:.0f} % of the full model's tokens through "
            "blocks"
        )
