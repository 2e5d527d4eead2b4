"""Frames: the state of forward passes that run inside one another in one thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .site_buffer import SiteBuffer


class Frame:
    """One running call of the model or of a stack inside it; the lowest frame stands for activations outside of any call."""

    def __init__(self, module: torch.nn.Module | None, level: int, parent: Frame | None) -> None:
        self.module, self.level, self.parent = module, level, parent
        # A call of the model inside a call of the same model is another forward pass; a stack inside it is not.
        self.inner = parent is not None and 0 <= parent.level < level
        self.nested: bool = parent is not None and parent.level >= 0 and (parent.nested if self.inner else True)
        self.tokens: Tensor | None = None
        self.attention: Any = None
        self.cached = False
        # Whether tokens and mask belong to the decoder.
        self.decoder = False
        self.last: Tensor | None = None
        self.attended = torch.empty(0, dtype=torch.bool)
        # Tokens of the pass whose sites are being read.
        self.read: Tensor | None = None
        self.superseded: int | None = None
        # Sites that were read in this call, also those of a pass that is complete.
        self.read_here: set[int] = set()
        # Whether all sites were read in this call.
        self.complete = False
        self.restart()

    @property
    def outermost(self) -> Frame:
        """The call of the model that this frame is a part of."""
        frame = self
        while frame.inner and frame.parent is not None:
            frame = frame.parent
        return frame

    def restart(self) -> None:
        """Forget the sites that were read."""
        self.buffer: SiteBuffer | None = None
        self.seen: list[int] = []
