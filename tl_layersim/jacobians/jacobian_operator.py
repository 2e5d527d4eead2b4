"""Jacobians of one block without its skip connection, as linear maps.

This module is serialised by value and runs on NDIF servers too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations.block_call import BlockCall, FewTokens, Widened, plain_attention
from .jacobian_products import (
    GraphProducts,
    RowProducts,
    TokenProducts,
    TokenReplayMismatch,
    is_remote,
    lengthening,
    reproduces,
)


def computing_dtype(call: BlockCall) -> torch.dtype:
    """The dtype in which the Jacobians of a block are computed.

    Returns:
        float64 if the model is, otherwise float32; the model's own dtype if its weights are in another process, or if the block
        is differentiated in the forward pass.
    """
    model_dtype = call.hidden.dtype
    if model_dtype == torch.float64 or call.graph is not None or is_remote(call):
        return model_dtype
    return torch.float32


class Jacobian:
    """The Jacobian of one block without its skip connection, for each sample.

    J_{t_in t_out} = d (block(X) - X)_{t_out} / d x_{t_in}, for each sample; 0 for t_in > t_out of a causal model. Use it as a
    context manager: on entry the block is replayed and its output compared with the forward pass.

    Args:
        call: the block with its own arguments.
        row: `sample`, the row of the batch that holds each sample.
        t_in: `sample`, the token that is varied.
        t_out: `sample`, the token whose change is measured.
        memory_mb: megabytes for products with many directions at once.
        differences: whether to take finite differences of the block's output, for blocks that cannot be differentiated.
        single_tokens: whether the block may be replayed on single tokens; tests and benchmarks set this to False.

    Attributes:
        dtype: dtype of all computations, see `computing_dtype`.
        whole_rows: whether the block is replayed on whole rows, because it cannot be replayed on single tokens.
        differs: whether the replayed block's output differs from its output in the forward pass.
        no_skip: whether the block has no skip connection, so that output minus input is not a residual branch.
    """

    def __init__(
        self,
        call: BlockCall,
        row: Tensor,
        t_in: Tensor,
        t_out: Tensor,
        memory_mb: float,
        differences: bool = False,
        single_tokens: bool = True,
    ) -> None:
        self.dtype = computing_dtype(call)
        self.call = call
        self.row = row
        self.t_in = t_in
        self.t_out = t_out
        self.memory = memory_mb * 1e6
        self.differences = differences
        self.single_tokens = single_tokens and not differences and call.graph is None
        self.d_model = call.hidden.shape[-1]
        self.skip = (t_in == t_out).to(self.dtype)[:, None, None]
        self.parts: list[TokenProducts | RowProducts] = []
        self.whole_rows = False
        self.differs = False
        self.no_skip = False
        self.widened = Widened(call.block, self.dtype)

    def __enter__(self) -> Jacobian:
        self.widened.__enter__()
        try:
            self.parts = self._token_products() if self.single_tokens else []
            try:
                self._check_replay()
            except TokenReplayMismatch:
                self.parts = []
            if not self.parts:
                self.whole_rows = True
                self.parts = self._row_products()
                self.differs = self.no_skip = False
                self._check_replay()
        except BaseException:
            self.widened.__exit__()
            raise
        return self

    def __exit__(self, *_error: Any) -> None:
        self.parts = []
        self.widened.__exit__()

    def _check_replay(self) -> None:
        """Compare the replayed output with the forward pass (`differs`), and look for a skip connection (`no_skip`)."""
        for part in self.parts:
            # Another token's residual is not added to an output, so only t_in = t_out shows a skip connection.
            same_token = (self.t_in == self.t_out)[part.sample]
            if self.call.graph is not None:
                if not self.no_skip:
                    self.no_skip = bool(same_token.any()) and not part.adds_input()
                continue
            index = (self.row[part.sample], self.t_out[part.sample])
            before = self.call.hidden[index].to(self.dtype)
            after = self.call.output.to(before.device)[index].to(self.dtype)
            length = lengthening(before)
            deviation = (part.lengthened_difference() - length * before).norm(dim=-1)
            skips = deviation < length[:, 0] / 2 * before.norm(dim=-1)
            # A branch without any norm grows with its input, so the graph decides.
            if bool((~skips & same_token).any()) and not part.adds_input():
                self.no_skip = True
            if not self.differs:
                self.differs = not reproduces(part.value, after, self.call.hidden.dtype)

    def _token_products(self) -> list[TokenProducts | RowProducts]:
        """`TokenProducts` of all samples; empty if the block cannot be replayed on single tokens."""
        same_token = self.t_in == self.t_out
        parts: list[TokenProducts | RowProducts] = []
        for sample in (same_token.nonzero()[:, 0], (~same_token).nonzero()[:, 0]):
            if not len(sample):
                continue
            row = self.row[sample]
            t_in = self.t_in[sample]
            t_out = self.t_out[sample]
            try:
                with plain_attention():
                    few_tokens = FewTokens(self.call, self.dtype, row, t_in, t_out)
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                # The block has another call signature or structure. Whole rows always work.
                return []
            parts.append(TokenProducts(few_tokens, sample, few_tokens.output[row, t_out], self.memory))
        return parts

    @property
    def failures(self) -> int:
        """Failed checks of the replay as bits: 1 for `differs`, 2 for `no_skip`."""
        return int(self.differs) + 2 * int(self.no_skip)

    def _row_products(self) -> list[TokenProducts | RowProducts]:
        """Split the samples into groups with at most one sample per row; return `RowProducts` of each group."""
        parts: list[TokenProducts | RowProducts] = []
        waiting = torch.arange(len(self.row), device=self.row.device)
        while len(waiting):
            rows = self.row[waiting]
            first_of_rows = torch.stack([(rows == row).nonzero()[0, 0] for row in torch.unique(rows)])
            sample = waiting[first_of_rows]
            tokens = (self.row[sample], self.t_in[sample], self.t_out[sample])
            products = RowProducts if self.call.graph is None else GraphProducts
            parts.append(products(self.call, self.dtype, *tokens, sample, self.memory, self.differences))
            still_waiting = torch.ones(len(waiting), dtype=torch.bool, device=waiting.device)
            still_waiting[first_of_rows] = False
            waiting = waiting[still_waiting]
        return parts

    @property
    def step_error(self) -> Tensor:
        """Error of finite differences: relative change of a product if the step is doubled (`sample`).

        0 if gradients are used.
        """
        error = torch.zeros(len(self.row), dtype=torch.float64)
        for part in self.parts:
            if isinstance(part, RowProducts):
                error[part.sample.cpu()] = part.step_error
        return error

    def transposed(self, u: Tensor) -> Tensor:
        """Products J'u with the transposed Jacobian.

        Args:
            u: `sample d_model n`, n directions for each sample.

        Returns:
            `sample d_model n`.
        """
        return self._product("transposed", u)

    def forward(self, v: Tensor) -> Tensor:
        """Products J v.

        Args:
            v: `sample d_model n`, n directions for each sample.

        Returns:
            `sample d_model n`.
        """
        return self._product("forward", v)

    def _product(self, kind: str, directions: Tensor) -> Tensor:
        out = torch.empty_like(directions)
        try:
            for part in self.parts:
                out[part.sample] = part.in_chunks(directions[part.sample], getattr(part, kind))
        except TokenReplayMismatch:
            # Many copies can exceed an attention window or a table of positions that one copy does not.
            self.whole_rows = True
            self.parts = self._row_products()
            return self._product(kind, directions)
        return out - self.skip * directions

    def dense(self) -> Tensor:
        """The dense matrix J (`sample d_model d_model`): output by input."""
        eye = torch.eye(self.d_model, dtype=self.dtype, device=self.row.device).expand(len(self.row), -1, -1)
        return self.forward(eye) if self.differences else self.transposed(eye).mT
