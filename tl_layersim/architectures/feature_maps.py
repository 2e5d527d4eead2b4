"""Convolutional feature maps as positions: the axis of channels, and conversion to one vector per position.

This file is shipped to NDIF servers by value: it uses torch and the standard library alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from ..core.errors import LayersimError

# Files of torch whose modules work on `batch channel ...`.
CHANNEL_FILES = ("conv", "pooling", "batchnorm", "instancenorm", "padding", "pixelshuffle", "upsampling", "channelshuffle")
CHANNELS_FIRST = tuple(f"torch.nn.modules.{name}" for name in CHANNEL_FILES)
# Files whose modules leave the axis of channels where it is, and such modules that models define on their own.
KEEPING_FILES = (
    "torch.nn.modules.activation",
    "torch.nn.modules.dropout",
    "torch.nn.modules.normalization",
    "transformers.activations",
)
KEEPING_NAMES = ("DropPath", "StochasticDepth", "FrozenBatchNorm2d")


@dataclass(frozen=True)
class Channels:
    """Which axis of a hook point's tensor holds channels, as far as the modules around it show.

    Attributes:
        axis: 1 for `batch channel ...`, -1 for `batch ... channel`, if the module itself decides it; None if sizes must decide.
        first: channel counts of convolutions, which work on `batch channel ...`.
        last: widths of linear layers and norms, which work on `batch ... channel`.
        moved: whether one of the modules may move the axis, such as a permutation.
    """

    axis: int | None
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    moved: bool = False


def channels_at(module: torch.nn.Module, path: str) -> Channels | None:
    """The `Channels` of a module, from the modules in and around it; None if none of them is a convolution.

    An activation, a norm or a dropout has the axis of the module before it in a Sequential, or of the modules around it. Any
    other module may move the axis, so sizes must decide.

    Args:
        module: the model.
        path: path of the module.

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8, 2))
        >>> channels_at(net, "0"), channels_at(net, "1")
        (Channels(axis=1, first=(), last=(), moved=False), Channels(axis=1, first=(), last=(), moved=False))
    """
    if not has_convolution(module):
        return None
    own = module.get_submodule(path)
    axis = _axis_of(own)
    if axis is not None:
        return Channels(axis)
    first, last = _sizes(own)
    if first or last:
        return Channels(None, first, last, not last and _may_move(own)) if first else None
    parent, _, name = path.rpartition(".")
    around = module.get_submodule(parent)
    beside = list(takewhile(lambda other: other != name, around._modules)) if isinstance(around, torch.nn.Sequential) else []
    if _keeps(own):
        return channels_at(module, f"{parent}.{beside[-1]}".lstrip(".") if beside else parent)
    for before in reversed(beside):
        if any(sizes := _sizes(around.get_submodule(before), outputs=True)):
            return Channels(None, *sizes, moved=True)
    found = channels_at(module, parent)
    return found and replace(found, moved=not found.last)


def has_convolution(module: torch.nn.Module) -> bool:
    """Whether a model contains a convolution."""
    return any(isinstance(sub, torch.nn.modules.conv._ConvNd) for sub in module.modules())


def _keeps(module: torch.nn.Module) -> bool:
    """Whether a module, such as an activation, keeps the channel axis of its input."""
    if isinstance(module, torch.nn.MultiheadAttention):
        return False
    known = isinstance(module, torch.nn.Identity) or type(module).__name__.endswith(KEEPING_NAMES)
    return known or any(cls.__module__ in KEEPING_FILES for cls in type(module).__mro__)


def _may_move(module: torch.nn.Module) -> bool:
    """Whether a leaf module of a module may move the channel axis."""
    return any(_axis_of(sub) is None and not _keeps(sub) for sub in module.modules() if not sub._modules)


def _axis_of(module: torch.nn.Module) -> int | None:
    """The channel axis in the input and output of a torch layer; None for other modules."""
    if any(cls.__module__ in CHANNELS_FIRST for cls in type(module).__mro__) or isinstance(module, torch.nn.GroupNorm):
        return 1
    if type(module) is torch.nn.LayerNorm:
        return -1 if len(module.normalized_shape) == 1 else 1
    return -1 if isinstance(module, torch.nn.Linear | torch.nn.Embedding) else None


def _sizes(module: torch.nn.Module, outputs: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Channel counts of the convolutions and their norms in a module, and widths of its linear layers and layer norms.

    Args:
        module: any module.
        outputs: whether only the output size counts for a single convolution or linear layer.
    """
    first: set[int] = set()
    last: set[int] = set()
    for sub in module.modules():
        alone = outputs and sub is module
        if isinstance(sub, torch.nn.modules.conv._ConvNd):
            first |= {sub.out_channels} if alone else {sub.in_channels, sub.out_channels}
        elif isinstance(sub, torch.nn.modules.batchnorm._NormBase):
            first.add(sub.num_features)
        elif isinstance(sub, torch.nn.Linear):
            last |= {sub.out_features} if alone else {sub.in_features, sub.out_features}
        elif type(sub) is torch.nn.LayerNorm and len(sub.normalized_shape) == 1:
            last.add(sub.normalized_shape[0])
    return tuple(sorted(first)), tuple(sorted(last))


def channel_axis(shape: Sequence[int], channels: Channels | None, name: str, pos: int | None = None) -> int:
    """The channel axis of a tensor: 1 or -1.

    Args:
        shape: shape of the tensor, `batch ...`.
        channels: evidence from the modules; None for a tensor `batch pos ...`.
        name: name of the hook point, for the error message.
        pos: number of positions of a row, if tokens determine it.

    Raises:
        LayersimError: the modules do not determine the axis.
    """
    if channels is None or len(shape) < 3:
        return -1
    if channels.axis is not None:
        return channels.axis
    is_first, is_last = shape[1] in channels.first, shape[-1] in channels.last
    by_pos = pos is not None and shape[1] == pos and shape[-1] != pos
    if channels.moved:
        sized = [axis for axis in range(1, len(shape)) if shape[axis] in channels.first + channels.last]
        if sized in ([1], [len(shape) - 1]):
            return 1 if sized == [1] else -1
        if by_pos and not sized:
            return -1
    elif by_pos:
        return -1
    elif len(shape) == 3:
        # A map that a module flattens, such as the embeddings of patches, mostly has its channels last.
        is_last |= shape[-1] in channels.first
        if is_first != is_last or not is_first:
            return 1 if is_first else -1
    elif not channels.last or is_first != is_last:
        return 1 if is_first or not channels.last else -1
    raise LayersimError(
        f"The modules at {name} do not tell which axis of the activations, {' x '.join(map(str, shape))}, holds channels. "
        "Name the convolution, norm or linear layer that computes them."
    )


def to_positions(hidden: Tensor, channels: Channels | None, name: str = "", pos: int | None = None) -> Tensor:
    """Reshape a feature map to one vector per position, `batch pos channel`; other tensors are unchanged.

    Args:
        hidden: `batch channel ...` or `batch ... channel`, or other activations.
        channels: evidence from the modules; None if the tensor is not a feature map.
        name: name of the hook point, for the error message.
        pos: number of positions of a row, if tokens determine it.

    Examples:
        >>> to_positions(torch.zeros(2, 8, 5, 5), Channels(1)).shape
        torch.Size([2, 25, 8])
    """
    if channels is None or hidden.dim() < 3:
        return hidden
    if channels.axis is None and pos is not None and hidden.shape[1] == pos and hidden.dim() > 3:
        return hidden
    last = hidden.movedim(1, -1) if channel_axis(hidden.shape, channels, name, pos) == 1 else hidden
    return last.flatten(1, -2)


def positions_of(shape: Sequence[int], channels: Channels | None = None, name: str = "") -> int:
    """Number of positions in a shape: `batch pos ...`, a feature map, or `batch width` (one position)."""
    if channels is None or len(shape) < 3:
        return 1 if len(shape) == 2 else shape[1]
    places = shape[2:] if channel_axis(shape, channels, name) == 1 else shape[1:-1]
    return torch.Size(places).numel()
