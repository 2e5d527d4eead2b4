"""Products with Jacobians by single-token replay: the block runs only on the samples' tokens, one copy per direction.

This module is serialised by value and runs on NDIF servers too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..activations.block_call import FewTokens, plain_attention
from .replay import adds_input, lengthening

# Largest difference between the single-token replay and the block's output in the full sequence, relative to the norm of the
# block's update, plus a tolerance relative to the norm of the residual.
UPDATE_TOLERANCE, RESIDUAL_TOLERANCE = 1e-4, 2e-6
# Copies of a token in one replay: enough for large matrix products, few enough for the attention scores between them.
MOST_COPIES = 128


class TokenReplayMismatch(Exception):
    """Raised if single-token replay of a block fails, or differs from the block's output in the full sequence."""


class TokenProducts:
    """Products with Jacobians by single-token replay, with one copy of the token per direction.

    Args:
        few: the block as a function of these tokens.
        which: indices of the samples.
        given: `sample d_model`, the block's output in the full sequence at the tokens that are read.
        memory: bytes for one product.
    """

    def __init__(self, few: FewTokens, which: Tensor, given: Tensor, memory: float) -> None:
        self.few, self.which, self.given = few, which, given
        samples, d = few.x.shape
        # Rough memory of a copy: some tens of residuals, and the attention scores of d / 64 heads.
        floats = samples * len(few.at[0]) * (48 * d + d // 16 * (few.pos + MOST_COPIES))
        self.copies = max(1, min(MOST_COPIES, int(memory / (floats * few.x.dtype.itemsize))))
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def graph(self, n: int) -> tuple[Tensor, Tensor]:
        """`n` copies of the tokens and the block's output for them, with the autograd graph; cached by `n`.

        Raises:
            TokenReplayMismatch: the output of a copy differs from the block's output in the full sequence.
        """
        if n not in self.graphs:
            x = self.few.x[:, None].repeat(1, n, 1)
            with torch.enable_grad(), plain_attention():
                y = self._replay(x.requires_grad_())
            self._check(y.detach())
            self.graphs[n] = x, y
        return self.graphs[n]

    def _replay(self, x: Tensor) -> Tensor:
        try:
            return self.few.block(x.shape[1])(x)
        except torch.OutOfMemoryError:
            # The full sequence would need more memory still.
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise TokenReplayMismatch from error

    def _check(self, y: Tensor) -> None:
        expected = self.given[:, None]
        update = (expected - self.few.out[:, None]).norm(dim=-1)
        allowed = UPDATE_TOLERANCE * update + RESIDUAL_TOLERANCE * expected.norm(dim=-1)
        if y.shape[::2] != expected.shape[::2] or not bool(((y - expected).norm(dim=-1) <= allowed).all()):
            raise TokenReplayMismatch

    def lengthened_difference(self) -> Tensor:
        """Output for the scaled-up token doubled, minus the output for the scaled-up token, `sample d_model`.

        An unchanged copy of the token runs along and is checked.

        Raises:
            TokenReplayMismatch: the output of the unchanged copy differs from the block's output in the full sequence.
        """
        long = lengthening(self.few.x) * self.few.x
        with torch.no_grad(), plain_attention():
            y = self._replay(torch.stack([self.few.x, long, 2 * long], 1))
        self._check(y[:, :1])
        return y[:, 2] - y[:, 1]

    def value(self) -> Tensor:
        """The block's output at the tokens that are read, `sample d_model`."""
        return self.given

    def adds_input(self) -> bool:
        """Whether the block has a skip connection."""
        return adds_input(*self.graph(1))

    def transposed(self, u: Tensor) -> Tensor:
        """Products J'u with the block's Jacobian, skip connection included.

        Args:
            u: `sample d_model n`, n directions for each sample.
        """
        return self._in_chunks(u, self._transposed)

    def forward(self, v: Tensor) -> Tensor:
        """Products J v with the block's Jacobian, skip connection included.

        Args:
            v: `sample d_model n`, n directions for each sample.
        """
        return self._in_chunks(v, self._forward)

    def _in_chunks(self, directions: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a product to directions `sample d_model n` in equal chunks; the last chunk is padded with zeros."""
        m = directions.shape[-1]
        n = -(-m // -(-m // self.copies))
        chunks = [directions[..., start : start + n] for start in range(0, m, n)]
        images = [product(torch.nn.functional.pad(chunk, (0, n - chunk.shape[-1])).mT.contiguous()) for chunk in chunks]
        return torch.cat(images, 1)[:, :m].mT

    def _transposed(self, u: Tensor) -> Tensor:
        x, y = self.graph(u.shape[1])
        with plain_attention():
            [image] = torch.autograd.grad(y, x, u, retain_graph=True)
        return image

    def _forward(self, v: Tensor) -> Tensor:
        """J v by double backward: the derivative of J'u with respect to u, applied to v."""
        x, y = self.graph(v.shape[1])
        with torch.enable_grad(), plain_attention():
            u = torch.zeros_like(y, requires_grad=True)
            [back] = torch.autograd.grad(y, x, u, create_graph=True)
            [image] = torch.autograd.grad(back, u, v)
        return image
