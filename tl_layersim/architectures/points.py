"""Hook points and sites: named places where activations are read, their families, and the sums on the residual stream.

A new family is one entry in `SITE_NAMES` and in the layouts that have it. `at_point` is shipped to NDIF servers by value, as
source: it uses torch and the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..core.errors import LayersimError
from .feature_maps import Channels

# Families of sites in the order in which a block computes them, with their names in TransformerLens.
SITE_NAMES: Mapping[str, str] = {
    "resid_pre": "hook_resid_pre",
    "ln1": "ln1.hook_normalized",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "attn_out": "hook_attn_out",
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
class Part:
    """Part of the last axis of a tensor, such as the queries in the output of a fused projection, or one head.

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
    """

    name: str
    module: str
    incoming: bool = False
    part: Part | None = None
    channels: Channels | None = None


def residual_points(names: Sequence[str], blocks: Sequence[str]) -> tuple[HookPoint, ...]:
    """The hook points of the residual layers: the first block's input and every block's output.

    Args:
        names: names of the residual layers.
        blocks: module paths of the blocks.
    """
    first = HookPoint(names[0], blocks[0], incoming=True)
    return (first, *(HookPoint(name, path) for name, path in zip(names[1:], blocks, strict=True)))


def at_point(
    hidden: Tensor, part: Part | None, shape: tuple[int, int] | None = None, name: str = "", remedy: str = ""
) -> Tensor:
    """The activations of a hook point, `batch pos width`, from its module's input or output.

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
    if hidden.dim() == 2 and (shape is None or shape[0] * shape[1] == hidden.shape[0]):
        hidden = hidden[:, None] if shape is None else hidden.reshape(*shape, -1)
    if hidden.dim() < 3 or (shape is not None and tuple(hidden.shape[:2]) != tuple(shape)):
        raise LayersimError(
            f"The activations at {name or 'this site'} are not batch x pos x width: their shape is "
            f"{' x '.join(map(str, hidden.shape))}"
            + (f", for {shape[0]} x {shape[1]} positions." if shape is not None else ".")
            + remedy
        )
    if hidden.dim() > 3:
        hidden = hidden.flatten(2)
    if part is None:
        return hidden
    return hidden.reshape(*hidden.shape[:2], *part.shape)[(slice(None), slice(None), *part.index)].flatten(2)


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
    return f"{prefix}{SITE_NAMES[family]}" if family == "ln_final" else f"{prefix}blocks.{block}.{SITE_NAMES[family]}"


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
        """Prefix of its stack, such as `encoder.`; "" in a model with one stack."""
        return self.point.name.removesuffix(site_name(self.family, self.block or 0))

    def head(self, number: int) -> HookPoint:
        """The hook point of one head."""
        return HookPoint(f"{self.point.name}[{number}]", self.point.module, self.point.incoming, self.heads[number])


@dataclass(frozen=True)
class StreamSum:
    """A sum on the residual stream: the total equals the sum of the terms up to rounding, in evaluation mode.

    Attributes:
        total: name of the total, such as `blocks.3.hook_resid_post`.
        terms: names of the terms, such as `blocks.3.hook_resid_mid` and `blocks.3.hook_mlp_out`.
        block: index of the block.
    """

    total: HookPoint
    terms: tuple[HookPoint, ...]
    block: int


@dataclass(frozen=True)
class SiteMap:
    """The sites of a model.

    Attributes:
        model: name of the model's class, for messages.
        sites: the sites, in the order of computation.
        lacks: for each family that the model lacks, the reason.
        sums: identities of the residual stream.
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
        """The sites of some families, such as all attention outputs, in the order of the forward pass.

        Args:
            families: families in all stacks, such as "attn_out", or in one, such as "encoder.attn_out".
        """
        chosen = set(families)

        def is_chosen(site: Site) -> bool:
            own = (site.family, "resid_post") if site.first else (site.family,)
            return any(name in chosen or f"{site.stack}{name}" in chosen for name in own)

        return [site for site in self.sites if is_chosen(site)]

    def is_family(self, name: str) -> bool:
        """Whether a name is a family, such as "attn_out" or "encoder.attn_out"."""
        stack, dot, family = name.rpartition(".")
        return family in SITE_NAMES and (not dot or any(site.stack == f"{stack}." for site in self.sites))

    def families(self) -> list[str]:
        """The families that the model has."""
        have = {site.family for site in self.sites}
        return [family for family in SITE_NAMES if family in have]


def separate_heads(count: int) -> tuple[Part, ...]:
    """The part of each head in a tensor whose last axis is `(heads d_head)`."""
    return tuple(Part((count, -1), (head,)) for head in range(count))


def fused_parts(kind: str, family: str, heads: int, key_heads: int) -> tuple[Part, tuple[Part, ...]]:
    """The parts of queries, keys or values in a fused projection's output: of all heads, and of each head.

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
    whole: tuple[Index, ...]
    each: list[tuple[Index, ...]]
    if kind == "qkv heads":
        shape, whole, each = (3, heads, -1), (number,), [(number, head) for head in range(count)]
    elif kind == "heads qkv":
        shape, whole, each = (heads, 3, -1), (slice(None), number), [(head, number) for head in range(count)]
    elif kind == "groups":
        size = heads // key_heads
        shape = (key_heads, size + 2, -1)
        place: Index = slice(0, size) if family == "q" else size + number - 1
        whole = (slice(None), place)
        each = [(head // size, head % size) if family == "q" else (head, size + number - 1) for head in range(count)]
    else:
        start = (0, heads, heads + key_heads)[number]
        shape, whole = (heads + 2 * key_heads, -1), (slice(start, start + count),)
        each = [(start + head,) for head in range(count)]
    return Part(shape, whole), tuple(Part(shape, index) for index in each)
