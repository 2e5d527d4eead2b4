"""Frames: the state of forward passes that run inside one another in one thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Frame:
    """One running call of the model or of a stack inside it; the lowest frame stands for activations outside of any call."""

    def __init__(self, module: torch.nn.Module | None, level: int, parent: Frame | None) -> None:
        self.module, self.level, self.parent = module, level, parent
        # A call of the model inside a call of the same model is another forward pass; a stack inside it is not.
        self.inner = parent is not None and 0 <= parent.level < level
        self.nested: bool = parent is not None and parent.level >= 0 and (parent.nested if self.inner else True)
        self.tokens: Tensor | None = None
        self.attention: Any = None
        self.texts = 0
        self.cached = False
        # Whether tokens and mask belong to the decoder.
        self.decoder = False
        self.last: Tensor | None = None
        self.shape = (0, 0)
        self.keep = torch.empty(0, dtype=torch.int64)
        self.attended = torch.empty(0, dtype=torch.bool)
        self.superseded: int | None = None
        self.restart()

    def restart(self) -> None:
        """Forget the layers that were read."""
        self.buffer: Tensor | None = None
        self.next = 0
