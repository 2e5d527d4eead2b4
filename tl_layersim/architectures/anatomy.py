"""`Anatomy`: what a watched forward pass shows of a model, as plain fields.

Every fact was verified by numbers in the pass that showed it, and keeps its gap. A fact that did not verify is refused only
when something asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
class Anatomy:
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
