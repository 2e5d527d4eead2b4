"""Hook points and sites: the places where activations are read, and the sums on the residual stream.

A new family is one entry in `SITE_NAMES` and in the layouts that have it. `at_point` and `to_positions` are shipped to NDIF
servers by value, as source: they use torch and the standard library alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .module_paths import modules_by_path

# Families of sites in the order in which a block computes them, with their names in TransformerLens.
SITE_NAMES: Mapping[str, str] = {
    "resid_pre": "hook_resid_pre",
    "ln1": "ln1.hook_normalized",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "attn_out": "hook_attn_out",
    "mixer_out": "hook_mixer_out",
    "resid_mid": "hook_resid_mid",
    "cross_attn_out": "hook_cross_attn_out",
    "resid_mid_cross": "hook_resid_mid_cross",
    "ln2": "ln2.hook_normalized",
    "mlp_post": "mlp.hook_post",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
    "ln_final": "ln_final.hook_normalized",
}
# Families whose sites are divided into heads.
HEAD_FAMILIES = ("q", "k", "v", "z")

# Index of one axis: a number, or a slice with start, stop and step.
Index = int | slice


@dataclass(frozen=True)
class Channels:
    """Evidence from nearby modules about the channel axis of a hook point's activations.

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


@dataclass(frozen=True)
class Part:
    """Part of the last axis of a tensor, such as one attention head.

    Attributes:
        shape: shape of the split last axis, such as `(3, heads, d_head)`.
        index: one index or slice for each leading axis of `shape`.

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
        name: TransformerLens's name, such as `blocks.3.hook_attn_out` or `blocks.3.attn.hook_z[5]`, or the module path if
            TransformerLens has no name.
        module: path of the module that is hooked.
        incoming: True to read the module's input, False for its output.
        part: the part of the tensor that is read; None for all of it.
        channels: evidence on the channel axis if the tensor may be a feature map; None for any other tensor.
        multiplier: factor of the activations, if the model multiplies them outside of any module before it adds them to the
            residual stream.
        run: which of the module's runs in a forward pass is read, from 0; None for a module that runs once.
    """

    name: str
    module: str
    incoming: bool = False
    part: Part | None = None
    channels: Channels | None = None
    multiplier: float = 1.0
    run: int | None = None


def read_in_next_run(points: Sequence[HookPoint], points_of_module: Sequence[int], runs: Counter[int]) -> list[int]:
    """Count a run of a module in a forward pass, and return the indices of its points that are read in this run.

    Args:
        points: all points.
        points_of_module: indices of the points at the module.
        runs: number of runs so far of each module, by the first of these indices; changed in place.
    """
    module_key = points_of_module[0]
    run = runs[module_key]
    runs[module_key] += 1
    return [number for number in points_of_module if points[number].run in (None, run)]


def distinct_points(points: Iterable[HookPoint]) -> tuple[HookPoint, ...]:
    """The hook points in their order, each name once."""
    return tuple({point.name: point for point in points}.values())


def residual_points(names: Sequence[str], blocks: Sequence[str]) -> tuple[HookPoint, ...]:
    """Hook points of the first block's input and of every block's output.

    Args:
        names: names of the residual layers.
        blocks: module paths of the blocks.
    """
    points = [HookPoint(names[0], blocks[0], incoming=True)]
    for name, path in zip(names[1:], blocks, strict=True):
        points.append(HookPoint(name, path))
    return tuple(points)


def multiplied(hidden: Tensor, multiplier: float) -> Tensor:
    """Activations times the factor of their hook point, see `HookPoint`."""
    return hidden if multiplier == 1.0 else hidden * multiplier


def at_point(
    hidden: Tensor, part: Part | None, shape: tuple[int, int] | None = None, name: str = "", remedy: str = ""
) -> Tensor:
    """The activations (`batch pos width`) of a hook point, from its module's input or output.

    Args:
        hidden: `batch pos ...`, the input or output of the module; heads may have an axis of their own. Batch and positions may
            be one axis; `batch width` of a module that runs on one vector for each row becomes `batch 1 width`.
        part: see `HookPoint`.
        shape: expected `batch pos`; None for no check.
        name: name of the hook point, for the error message.
        remedy: what to do about other axes, for the error message.

    Raises:
        LayersimError: the tensor has other axes.
    """
    if hidden.dim() == 2 and shape is None:
        hidden = hidden[:, None]
    elif hidden.dim() == 2 and shape is not None and shape[0] * shape[1] == hidden.shape[0]:
        hidden = hidden.reshape(*shape, -1)
    if hidden.dim() < 3 or (shape is not None and tuple(hidden.shape[:2]) != tuple(shape)):
        raise LayersimError(
            f"The activations at {name or 'this site'} are not batch x pos x width: their shape is "
            f"{' x '.join(map(str, hidden.shape))}"
            + (f", but batch x pos must be {shape[0]} x {shape[1]}." if shape is not None else ".")
            + remedy
        )
    if hidden.dim() > 3:
        hidden = hidden.flatten(2)
    if part is None:
        return hidden
    split = hidden.reshape(*hidden.shape[:2], *part.shape)
    return split[(slice(None), slice(None), *part.index)].flatten(2)


def site_name(family: str, block: int, prefix: str = "") -> str:
    """TransformerLens's name of a site.

    Args:
        family: family of the site.
        block: number of its block; not used for the final norm.
        prefix: prefix of its stack in a model of several stacks, such as `encoder.`.

    Examples:
        >>> site_name("mlp_out", 3), site_name("ln_final", 0, "decoder.")
        ('blocks.3.hook_mlp_out', 'decoder.ln_final.hook_normalized')
    """
    if family == "ln_final":
        return f"{prefix}{SITE_NAMES[family]}"
    return f"{prefix}blocks.{block}.{SITE_NAMES[family]}"


@dataclass(frozen=True)
class Site:
    """A hook point that belongs to a family, such as "attn_out".

    Attributes:
        point: its hook point.
        family: its family.
        block: index of its block; None for the final norm and for modules that are not blocks.
        heads: the part of each head; empty if the site has no heads.
        first: whether it is the input of a stack's first block, with which the family `resid_post` begins.
    """

    point: HookPoint
    family: str
    block: int | None = None
    heads: tuple[Part, ...] = ()
    first: bool = False

    @property
    def stack(self) -> str:
        """Prefix of the stack, such as `encoder.`; "" in a model with one stack."""
        return self.point.name.removesuffix(site_name(self.family, self.block or 0))

    def head(self, number: int) -> HookPoint:
        """The hook point of one attention head."""
        return HookPoint(f"{self.point.name}[{number}]", self.point.module, self.point.incoming, self.heads[number])


@dataclass(frozen=True)
class StreamSum:
    """An addition to the residual stream: one site is the sum of others, such as resid_post = resid_mid + mlp_out.

    It holds up to rounding, in evaluation mode.

    Attributes:
        total: hook point of the total, such as `blocks.3.hook_resid_post`.
        terms: hook points of the terms, such as `blocks.3.hook_resid_mid` and `blocks.3.hook_mlp_out`.
    """

    total: HookPoint
    terms: tuple[HookPoint, ...]


@dataclass(frozen=True)
class SiteMap:
    """The sites of a model.

    Attributes:
        model: name of the model's class, for messages.
        sites: the sites, in the order of computation.
        lacks: for each family that the model lacks, the reason.
        sums: the stream sums.
        by_name: returns the hook point of a name that is not in `sites`; None if there is none.
        other_names: the names that `by_name` knows, in the order of the model.
    """

    model: str
    sites: tuple[Site, ...]
    lacks: Mapping[str, str]
    sums: tuple[StreamSum, ...]
    by_name: Callable[[str], HookPoint | None]
    other_names: tuple[str, ...] = field(default=(), repr=False)

    def of_families(self, families: Iterable[str]) -> list[Site]:
        """The sites of some families, in the order of the forward pass.

        Args:
            families: families in all stacks, such as "attn_out", or in one, such as "encoder.attn_out".
        """
        chosen = set(families)

        def is_chosen(site: Site) -> bool:
            # The family `resid_post` begins with the input of the first block.
            site_families = (site.family, "resid_post") if site.first else (site.family,)
            return any(name in chosen or f"{site.stack}{name}" in chosen for name in site_families)

        return [site for site in self.sites if is_chosen(site)]

    def is_family(self, name: str) -> bool:
        """Whether a name is a family, such as "attn_out" or "encoder.attn_out"."""
        stack, dot, family = name.rpartition(".")
        return family in SITE_NAMES and (not dot or any(site.stack == f"{stack}." for site in self.sites))

    def families(self) -> list[str]:
        """Families of hook points that the model has, such as attn_out."""
        present = {site.family for site in self.sites}
        return [family for family in SITE_NAMES if family in present]


def fused_parts(kind: str, family: str, heads: int, key_heads: int) -> tuple[Part, tuple[Part, ...]]:
    """The part of a fused projection that holds queries, keys or values.

    Returns the part of all heads together, and the part of each head.

    Args:
        kind: see `BlockLayout.fused`.
        family: "q", "k" or "v".
        heads: number of heads.
        key_heads: number of key-value heads.

    Examples:
        >>> whole, each = fused_parts("rows", "k", 4, 2)
        >>> whole, each[1]
        (Part(shape=(8, -1), index=(slice(4, 6, None),)), Part(shape=(8, -1), index=(5,)))
    """
    number = "qkv".index(family)
    count = heads if family == "q" else key_heads
    shape: tuple[int, ...]
    all_heads: tuple[Index, ...]
    by_head: list[tuple[Index, ...]]
    if kind == "qkv heads":
        shape = (3, heads, -1)
        all_heads = (number,)
        by_head = [(number, head) for head in range(count)]
    elif kind == "heads qkv":
        shape = (heads, 3, -1)
        all_heads = (slice(None), number)
        by_head = [(head, number) for head in range(count)]
    elif kind == "groups" and family == "q":
        # A group has its queries first, then one key and one value.
        size = heads // key_heads
        shape = (key_heads, size + 2, -1)
        all_heads = (slice(None), slice(0, size))
        by_head = [(head // size, head % size) for head in range(count)]
    elif kind == "groups":
        size = heads // key_heads
        shape = (key_heads, size + 2, -1)
        place = size + number - 1
        all_heads = (slice(None), place)
        by_head = [(head, place) for head in range(count)]
    else:
        start = (0, heads, heads + key_heads)[number]
        shape = (heads + 2 * key_heads, -1)
        all_heads = (slice(start, start + count),)
        by_head = [(start + head,) for head in range(count)]
    return Part(shape, all_heads), tuple(Part(shape, index) for index in by_head)


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


def channels_at(module: torch.nn.Module, path: str) -> Channels | None:
    """Evidence about the channel axis of a module's activations; None if no convolution is nearby.

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
    submodule = module.get_submodule(path)
    axis = _channel_axis_of(submodule)
    if axis is not None:
        return Channels(axis)
    first, last = _channel_counts(submodule)
    if first or last:
        return Channels(None, first, last, not last and _may_move_channel_axis(submodule)) if first else None
    parent_path, _, name = path.rpartition(".")
    parent = module.get_submodule(parent_path)
    # Names of the modules that run before this one in a Sequential.
    earlier_names: list[str] = []
    if isinstance(parent, torch.nn.Sequential):
        earlier_names = list(takewhile(lambda sibling: sibling != name, parent._modules))
    if _keeps_channel_axis(submodule):
        if earlier_names:
            return channels_at(module, f"{parent_path}.{earlier_names[-1]}".lstrip("."))
        return channels_at(module, parent_path)
    for earlier_name in reversed(earlier_names):
        first, last = _channel_counts(parent.get_submodule(earlier_name), outputs=True)
        if first or last:
            return Channels(None, first, last, moved=True)
    channels = channels_at(module, parent_path)
    if channels is None:
        return None
    return replace(channels, moved=not channels.last)


def has_convolution(module: torch.nn.Module) -> bool:
    """Whether a model contains a convolution."""
    return any(isinstance(sub, torch.nn.modules.conv._ConvNd) for sub in modules_by_path(module).values())


def _keeps_channel_axis(module: torch.nn.Module) -> bool:
    """Whether a module keeps the channel axis of its input, like an activation function."""
    if isinstance(module, torch.nn.MultiheadAttention):
        return False
    if isinstance(module, torch.nn.Identity) or type(module).__name__.endswith(KEEPING_NAMES):
        return True
    return any(cls.__module__ in KEEPING_FILES for cls in type(module).__mro__)


def _may_move_channel_axis(module: torch.nn.Module) -> bool:
    """Whether a module contains a leaf module that may move the channel axis."""
    leaves = [submodule for submodule in module.modules() if not submodule._modules]
    return any(_channel_axis_of(leaf) is None and not _keeps_channel_axis(leaf) for leaf in leaves)


def _channel_axis_of(module: torch.nn.Module) -> int | None:
    """The channel axis that a module decides itself: 1 or -1; None if it decides none."""
    if any(cls.__module__ in CHANNELS_FIRST for cls in type(module).__mro__) or isinstance(module, torch.nn.GroupNorm):
        return 1
    if type(module) is torch.nn.LayerNorm:
        return -1 if len(module.normalized_shape) == 1 else 1
    return -1 if isinstance(module, torch.nn.Linear | torch.nn.Embedding) else None


def _channel_counts(module: torch.nn.Module, outputs: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Channel counts of convolutions in a module, and widths of its linear layers and norms.

    Args:
        module: any module.
        outputs: whether only the output size counts for a single convolution or linear layer.
    """
    first: set[int] = set()
    last: set[int] = set()
    for submodule in module.modules():
        counts_input = not (outputs and submodule is module)
        if isinstance(submodule, torch.nn.modules.conv._ConvNd):
            first.add(submodule.out_channels)
            if counts_input:
                first.add(submodule.in_channels)
        elif isinstance(submodule, torch.nn.modules.batchnorm._NormBase):
            first.add(submodule.num_features)
        elif isinstance(submodule, torch.nn.Linear):
            last.add(submodule.out_features)
            if counts_input:
                last.add(submodule.in_features)
        elif type(submodule) is torch.nn.LayerNorm and len(submodule.normalized_shape) == 1:
            last.add(submodule.normalized_shape[0])
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
    is_first = shape[1] in channels.first
    is_last = shape[-1] in channels.last
    # Axis 1 is that of positions, so that the channels are last.
    is_by_pos = pos is not None and shape[1] == pos and shape[-1] != pos
    if channels.moved:
        # Axes whose size is that of channels.
        possible_axes = [axis for axis in range(1, len(shape)) if shape[axis] in channels.first + channels.last]
        if possible_axes == [1]:
            return 1
        if possible_axes == [len(shape) - 1]:
            return -1
        if is_by_pos and not possible_axes:
            return -1
    elif is_by_pos:
        return -1
    elif len(shape) == 3:
        # A map that a module flattens, such as the embeddings of patches, mostly has its channels last.
        is_last |= shape[-1] in channels.first
        if is_first != is_last or not is_first:
            return 1 if is_first else -1
    elif not channels.last or is_first != is_last:
        return 1 if is_first or not channels.last else -1
    raise LayersimError(
        f"The channel axis of the activations at {name}, {' x '.join(map(str, shape))}, is unknown. "
        "Name the convolution, norm or linear layer that computes the activations."
    )


def to_positions(hidden: Tensor, channels: Channels | None, name: str = "", pos: int | None = None) -> Tensor:
    """Reshape a feature map to (`batch pos channel`); other tensors are unchanged.

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
    channels_last = hidden.movedim(1, -1) if channel_axis(hidden.shape, channels, name, pos) == 1 else hidden
    return channels_last.flatten(1, -2)


def positions_of(shape: Sequence[int], channels: Channels | None = None, name: str = "") -> int:
    """Number of positions in a tensor of a given shape; 1 for (`batch width`)."""
    if len(shape) == 2:
        return 1
    return to_positions(torch.empty(*shape, device="meta"), channels, name).shape[1]
