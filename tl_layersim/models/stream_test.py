"""StreamTest: finds out in a forward pass whether modules pass on one residual stream."""

from __future__ import annotations

from torch import Tensor

from .model_description import same_stream


class StreamTest:
    """Tests in one forward pass whether each module takes what the module before it gives.

    Args:
        paths: of the modules, in order.

    Attributes:
        strangers: paths of the modules that do not, or that give a feature map of a convolution.

    Examples:
        >>> import torch
        >>> test = StreamTest(["blocks.0", "blocks.1"])
        >>> test.leave(0, torch.zeros(1, 4, 8))
        >>> test.enter(1, torch.ones(1, 4, 8))
        >>> test.strangers
        ['blocks.1']
    """

    def __init__(self, paths: list[str]) -> None:
        self.paths, self.strangers = paths, list[str]()
        self._last: Tensor | None = None

    def enter(self, number: int, entering: Tensor) -> None:
        """Compare the input of a module after the first with the output of the module before it.

        Args:
            number: of the module.
            entering: its input.
        """
        if self._last is None or not same_stream(entering.detach()[:1], self._last):
            self.strangers.append(self.paths[number])

    def leave(self, number: int, output: Tensor) -> None:
        """Keep the output of a module; that of the first begins a forward pass.

        Args:
            number: of the module.
            output: its output.
        """
        if number == 0:
            self.strangers = []
        if output.dim() > 3:
            self.strangers.append(self.paths[number])
        # A copy, because additions in place change the output; detached first, as checkpointing counts saved tensors.
        self._last = output.detach()[:1].clone()
