"""HookPoint: a named place in a model at which activations are read, and the part of a tensor that belongs to it.

`at_point` is shipped to NDIF servers by value, as source: it uses torch and the standard library alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..core.errors import LayersimError
from .feature_maps import Channels

# Index of one axis: a number, or a slice with start, stop and step.
Index = int | slice


@dataclass(frozen=True)
class Part:
    """Part of the last axis of a tensor, such as the queries in the output of a fused projection, or one head.

    Attributes:
        shape: into which the last axis is split, such as `(3, heads, d_head)`.
        index: one entry for each of the first axes of `shape`, which selects the part.

    Examples:
        >>> import torch
        >>> fused = torch.arange(12.0).view(1, 1, 12)  # batch pos (q k v, head, d_head)
        >>> at_point(fused, Part((3, 2, 2), (1,)))  # the keys of both heads
        tensor([[[4., 5., 6., 7.]]])
        >>> at_point(fused, Part((3, 2, 2), (1, 1)))  # the keys of head 1
        tensor([[[6., 7.]]])
    """

    shape: tuple[int, ...]
    index: tuple[Index, ...]


@dataclass(frozen=True)
class HookPoint:
    """A named place in a model at which activations are read.

    Attributes:
        name: TransformerLens's name of the place, such as `blocks.3.hook_attn_out` or `blocks.3.attn.hook_z[5]`, or the module
            path where TransformerLens has no name.
        module: path of the module that is hooked.
        incoming: whether the module's input is read; else its output.
        part: the part of the tensor that belongs to the place; None for all of it.
        channels: which axis holds channels, where the tensor may be a feature map of convolutions; None for any other.
    """

    name: str
    module: str
    incoming: bool = False
    part: Part | None = None
    channels: Channels | None = None


def residual_points(names: Sequence[str], blocks: Sequence[str]) -> tuple[HookPoint, ...]:
    """The residual layers: the input of the first block, and every block's output.

    Args:
        names: of the residual layers.
        blocks: module paths of the blocks.
    """
    first = HookPoint(names[0], blocks[0], incoming=True)
    return (first, *(HookPoint(name, path) for name, path in zip(names[1:], blocks, strict=True)))


def at_point(hidden: Tensor, part: Part | None, shape: tuple[int, int] | None = None, name: str = "") -> Tensor:
    """The activations of a hook point, `batch pos width`, from the tensor of its module.

    Args:
        hidden: `batch pos ...`, the input or output of the module; heads may have an axis of their own. Batch and positions may
            be one axis; `batch width` of a module that runs on one vector for each row becomes `batch 1 width`.
        part: as in `HookPoint`.
        shape: `batch pos` of the forward pass, to be checked; None to check nothing.
        name: of the hook point, for the refusal.

    Raises:
        LayersimError: the tensor has other axes.
    """
    if hidden.dim() == 2 and (shape is None or shape[0] * shape[1] == hidden.shape[0]):
        hidden = hidden[:, None] if shape is None else hidden.reshape(*shape, -1)
    if hidden.dim() < 3 or (shape is not None and tuple(hidden.shape[:2]) != tuple(shape)):
        raise LayersimError(
            f"The activations at {name or 'this site'} are not batch x pos x width: their shape is "
            f"{' x '.join(map(str, hidden.shape))}"
            + (f", for {shape[0]} x {shape[1]} positions." if shape is not None else ".")
            + " For sites of images with numbers of positions of their own: positions='mean'."
        )
    if hidden.dim() > 3:
        hidden = hidden.flatten(2)
    if part is None:
        return hidden
    return hidden.reshape(*hidden.shape[:2], *part.shape)[(slice(None), slice(None), *part.index)].flatten(2)
