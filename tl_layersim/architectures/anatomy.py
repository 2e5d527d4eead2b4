"""`Anatomy`: what lies where in a model, as plain fields that are made once when the model is opened.

`anatomy_of` and `choose_blocks` in `blocks.py` make it from the modules and the configuration. `WatchedAnatomy` is what a
forward pass shows beside them. Every fact there was verified by numbers in the pass that showed it, and keeps its gap. A fact
that did not verify is refused only when something asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..core.errors import LayersimError
from .layouts import NO_MID, BlockLayout, BlockSum, ModuleTensor, Term
from .unembed import Head

# Families whose sites are what sublayers add to the stream.
SUBLAYER_FAMILIES = ("attn_out", "mixer_out", "cross_attn_out", "mlp_out")


@dataclass(frozen=True)
class Sublayer:
    """A module inside a block whose output is added to the residual stream.

    Attributes:
        family: its family of sites, such as "attn_out"; "" if TransformerLens has no name for it.
        path: path of the module, relative to the block.
        multiplier: factor by which its output is multiplied before it is added, such as Granite's `residual_multiplier`.
        stream: the residual stream to which the output is added; None if no module reads or returns it.
    """

    family: str
    path: str
    multiplier: float
    stream: ModuleTensor | None

    @property
    def tensor(self) -> ModuleTensor:
        """What is added to the stream."""
        return ModuleTensor(self.path, False, self.multiplier)


@dataclass(frozen=True)
class BlockAnatomy:
    """What a watched forward pass shows of a block.

    Attributes:
        path: path of the block.
        runs: number of times that it runs in a forward pass.
        sublayers: the modules whose outputs are added to the stream, in the order in which they run.
        norms: where normalisation sits: "before" the sublayers, "after" them inside the branch, "both", on the stream itself
            ("stream", post-norm), or "none".
        parallel: whether all sublayers read the stream that enters the block.
        sums: the additions to the stream that were verified; empty if they were not.
        gap: largest error of these sums, relative to the largest of their terms; of the nearest sum if none was verified.
    """

    path: str
    runs: int
    sublayers: tuple[Sublayer, ...] = ()
    norms: Literal["before", "after", "both", "stream", "none"] = "none"
    parallel: bool = False
    sums: tuple[BlockSum, ...] = ()
    gap: float = float("inf")

    @property
    def layout(self) -> BlockLayout:
        """The families of hook points that the block has, and why it lacks others."""
        tensors: dict[str, ModuleTensor] = {}
        streams: dict[str, ModuleTensor | None] = {}
        for sublayer in self.sublayers:
            streams[sublayer.family] = sublayer.stream
            if sublayer.family:
                tensors[sublayer.family] = sublayer.tensor
        # Streams without a path are the input of the block itself.
        mlp_stream = streams.get("mlp_out")
        if mlp_stream is not None and mlp_stream.path:
            has_cross_attention = "cross_attn_out" in streams
            tensors["resid_mid_cross" if has_cross_attention else "resid_mid"] = mlp_stream
        cross_stream = streams.get("cross_attn_out")
        if cross_stream is not None and cross_stream.path:
            tensors["resid_mid"] = cross_stream
        lacks = dict.fromkeys(SUBLAYER_FAMILIES, "no such module adds to the residual stream of its blocks")
        if self.parallel:
            lacks["resid_mid"] = NO_MID
        nameless = [sublayer.path for sublayer in self.sublayers if not sublayer.family]
        if nameless:
            reason = f"several modules of {self.path} may be called so, {' and '.join(nameless)}; name them by their paths"
            lacks |= dict.fromkeys((*SUBLAYER_FAMILIES, "resid_mid"), reason)
        families = {tensor: family for family, tensor in tensors.items()}

        def family_of(term: Term) -> Term:
            return families.get(term, term) if isinstance(term, ModuleTensor) else term

        sums: list[BlockSum] = []
        for total, terms in self.sums:
            sums.append((family_of(total), tuple(family_of(term) for term in terms)))
        return BlockLayout((), tensors, sums=tuple(sums), final=(), lacks=lacks)


@dataclass(frozen=True)
class WatchedAnatomy:
    """What a watched forward pass shows of a model.

    Attributes:
        blocks: the blocks, in their order of running.
        shape: shape of the residual stream of the watched row, `batch pos width` in most models.
        embedding: path of the module whose output enters block 0; "" if it is no module's output.
        final_norm: path of the norm that reads the output of the last block; "" if there is none.
        tail: paths of the modules that run between the last block and the logits, in order.
        head: the map from the last residual to the logits; None if the model gives no logits, or no map was verified.
        head_gap: error of the head relative to the norm of the model's logits; infinite without a head.
    """

    blocks: tuple[BlockAnatomy, ...]
    shape: tuple[int, ...]
    embedding: str = ""
    final_norm: str = ""
    tail: tuple[str, ...] = ()
    head: Head | None = None
    head_gap: float = float("inf")

    @property
    def layouts(self) -> Mapping[str, BlockLayout]:
        """The layout of each block, by its path. If one block's sums were not verified, no block has families of sublayers."""
        unverified = [block for block in self.blocks if not block.sums]
        if not unverified:
            return {block.path: block.layout for block in self.blocks}
        block = unverified[0]
        reason = f"outputs of modules in {block.path} do not add up to its residual stream"
        if 1e-6 < block.gap < 1:
            reason += f", the nearest sum being {block.gap:.2g} of the norm away"
        layout = BlockLayout((), {}, sums=(), final=(), lacks=dict.fromkeys((*SUBLAYER_FAMILIES, "resid_mid"), reason))
        return {block.path: layout for block in self.blocks}


@dataclass(frozen=True)
class Stack:
    """The blocks of a model that share one residual stream.

    Attributes:
        name: "encoder" or "decoder"; "text" or "vision" for the towers of a CLIP; "stages.0", ...; "" if there is only one.
        root: path of the encoder, decoder or tower that holds the stack; else of the list of blocks.
        list_path: path of the list of its blocks; "" if it is not known.
        blocks: paths of its blocks, in their order.
    """

    name: str
    root: str
    list_path: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What lies where in a model, and which of its blocks are measured.

    A stage (as in Swin) has fewer positions and more channels than the stage before it, so each has its own residual stream.

    Attributes:
        model: name of the model's class, for messages.
        library: the library of the model; "torch" for any other model.
        kind: how the blocks lie in stacks: "encoder-decoder"; "towers", a vision and a text tower as in CLIP; "stages"; or "one
            stack", which may be unknown.
        stacks: the stacks, in the order of the model.
        embedding: the token embedding; None if the model has none or does not expose it.
        has_convolution: whether the model contains a convolution, so that activations may be feature maps.
        without_cache: keyword arguments of the forward that turn off the cache of keys and values; empty if it takes none.
        configs: for each block, the configuration of the nearest module around it; None if there is none.
        layouts: for each block, its layout in the table `LAYOUTS`; None if it is missing there.
        blocks: paths of the measured blocks, in their order; empty before they are chosen.
        named: whether the user named the measured blocks.
        post_norm: whether the measured blocks end in a layer norm, so that an output is not the input plus a branch.
        watched: what a forward pass has shown; None if it was not watched.
    """

    model: str
    library: Literal["transformer_lens", "transformers", "torch"]
    kind: Literal["encoder-decoder", "towers", "stages", "one stack"]
    stacks: tuple[Stack, ...]
    embedding: torch.nn.Module | None
    has_convolution: bool
    without_cache: dict[str, bool]
    configs: Mapping[str, Any]
    layouts: Mapping[str, BlockLayout | None]
    blocks: tuple[str, ...] = ()
    named: bool = False
    post_norm: bool = False
    watched: WatchedAnatomy | None = None

    @property
    def config(self) -> Any:
        """The configuration of the nearest module around the measured blocks, such as that of a tower; None without one."""
        return self.configs[self.blocks[0]]

    @property
    def known_stacks(self) -> dict[str, Stack]:
        """The stacks whose blocks are known, by name."""
        return {stack.name: stack for stack in self.stacks if stack.list_path}

    @property
    def every_block(self) -> tuple[str, ...]:
        """Paths of the blocks of every stack."""
        paths: list[str] = []
        for stack in self.stacks:
            paths += stack.blocks
        return tuple(paths)

    @property
    def stack(self) -> str:
        """Name of the only stack that contains measured blocks; "" if several do or none does."""
        return self.stack_of(self.blocks)

    @property
    def unknown_blocks(self) -> tuple[str, ...]:
        """Paths of the measured blocks whose layout is missing in the table `LAYOUTS`. TransformerLens describes its own."""
        if self.library == "transformer_lens":
            return ()
        return tuple(path for path in self.blocks if self.layouts[path] is None)

    def blocks_of(self, name: str = "") -> tuple[str, ...]:
        """Paths of the blocks of a stack, by default the decoder or the last stage; empty if they are unknown."""
        stacks = self.known_stacks
        if not name:
            name = "decoder" if self.kind == "encoder-decoder" else next(reversed(stacks), "")
        return stacks[name].blocks if name in stacks else ()

    def stacks_with(self, paths: Sequence[str]) -> list[str]:
        """Names of the stacks that contain at least one module of `paths`."""
        names: list[str] = []
        for stack in self.stacks:
            if any(f"{path}.".startswith(f"{stack.root}.") for path in paths):
                names.append(stack.name)
        return names

    def stack_of(self, paths: Sequence[str]) -> str:
        """Name of the only stack that contains modules of `paths`; "" if several do or none does."""
        names = self.stacks_with(paths)
        return names[0] if len(names) == 1 else ""

    def is_last_stack(self, paths: Sequence[str]) -> bool:
        """Whether the model's final norm and head read the output of these blocks."""
        name = self.stack_of(paths)
        return name == self.stacks[-1].name if self.kind == "stages" else name != "encoder"

    def numbers(self, paths: Sequence[str]) -> list[int] | None:
        """Indices of blocks in their stack from their paths; None if a path is not a known block."""
        blocks = self.blocks_of(self.stack_of(paths))
        if not set(paths) <= set(blocks):
            return None
        return [blocks.index(path) for path in paths]

    def in_both_stacks(self) -> LayersimError:
        """The error for blocks in two stacks."""
        last_list = next(reversed(self.known_stacks.values())).list_path if self.known_stacks else "decoder.block"
        return LayersimError(
            f"`layers` names blocks in both stacks of {self.model}; it must name blocks of one stack "
            f"({' or '.join(stack.name for stack in self.stacks)}), such as {last_list}.0."
        )
