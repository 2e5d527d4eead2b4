"""BlockLayout: which module's input or output holds each family of hook points in a transformer block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch


class ModuleTensor(NamedTuple):
    """The input or the output of a module of a block.

    Attributes:
        path: of the module, relative to the block; "" for the block.
        incoming: whether it is the module's input.
    """

    path: str
    incoming: bool


def into(path: str) -> ModuleTensor:
    """The input of a module of a block."""
    return ModuleTensor(path, True)


def out_of(path: str) -> ModuleTensor:
    """The output of a module of a block."""
    return ModuleTensor(path, False)


# A family of the block, or a tensor that belongs to no family, such as the input of BERT's layer norms.
Term = str | ModuleTensor
# A sum in a block: the total, and its terms. It holds to rounding in evaluation mode.
BlockSum = tuple[Term, tuple[Term, ...]]

SEQUENTIAL: tuple[BlockSum, ...] = (("resid_mid", ("resid_pre", "attn_out")), ("resid_post", ("resid_mid", "mlp_out")))
PARALLEL: tuple[BlockSum, ...] = (("resid_post", ("resid_pre", "attn_out", "mlp_out")),)
NO_MID = "attention and MLP run in parallel on one stream, so that there is no stream between them"
NORMS_AFTER = "its norms stand after attention and MLP, which read the stream itself (hook_resid_pre and hook_resid_mid)"
NO_FINAL = "the last block ends in a layer norm, so that no norm follows it"
# What layouts lack whose norms stand after the sublayers, inside the branch; and those whose norms stand on the stream.
SUBLAYER_NORM_LACKS = {"ln1": NORMS_AFTER, "ln2": NORMS_AFTER}
POST_NORM_LACKS = SUBLAYER_NORM_LACKS | {"ln_final": NO_FINAL}


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block.

    Attributes:
        classes: names of the classes of blocks with this layout.
        tensors: for each family, the tensor that holds it.
        fused: arrangement of heads in the output of a projection that queries, keys and values share: "qkv heads" for
            `(3, heads, d_head)`, "heads qkv" for `(heads, 3, d_head)`, "groups" for `(key-value heads, queries of the group
            + 2, d_head)`, "rows" for `(heads + 2 key-value heads, d_head)`; "" where each has a projection of its own.
        sums: identities of the residual stream.
        final: names of the final norm, looked for beside the list of blocks and above.
        lacks: the reason why the layout lacks a family.
        when: whether a block with this configuration has this layout.
        head_count: attribute of the configuration with the number of heads.
    """

    classes: tuple[str, ...]
    tensors: Mapping[str, ModuleTensor]
    fused: Literal["", "qkv heads", "heads qkv", "groups", "rows"] = ""
    sums: tuple[BlockSum, ...] = SEQUENTIAL
    final: tuple[str, ...] = ("norm",)
    lacks: Mapping[str, str] = field(default_factory=dict)
    when: Callable[[torch.nn.Module, Any], bool] = lambda block, config: True
    head_count: str = "num_attention_heads"


def attention_tensors(path: str, names: str, output: str) -> dict[str, ModuleTensor]:
    """Families of an attention module.

    Args:
        path: of the module.
        names: of its projections to queries, keys and values, or of the one for all, separated by spaces.
        output: name of its output projection.
    """
    projections = names.split() * (3 if len(names.split()) == 1 else 1)
    heads = {family: out_of(f"{path}.{name}") for family, name in zip("qkv", projections, strict=True)}
    return heads | {"z": into(f"{path}.{output}"), "attn_out": out_of(path)}


def mlp_tensors(path: str, output: str) -> dict[str, ModuleTensor]:
    """Families of an MLP, whose output projection has the name `output`."""
    return {"mlp_post": into(f"{path}.{output}"), "mlp_out": out_of(path)}


def norm_tensors(first: str, second: str) -> dict[str, ModuleTensor]:
    """The two norms of a sequential pre-norm block; the second reads the stream between attention and MLP."""
    return {"ln1": out_of(first), "resid_mid": into(second), "ln2": out_of(second)}


def parallel_norm_tensors(first: str, second: str) -> dict[str, ModuleTensor]:
    """The norms of a parallel block; attention and MLP may share one."""
    return {"ln1": out_of(first), "ln2": out_of(second)}


def post_norm_sums(mid: str, end: str) -> tuple[BlockSum, ...]:
    """The sums of a block whose norms stand on the stream, after the additions."""
    return ((into(mid), ("resid_pre", "attn_out")), (into(end), ("resid_mid", "mlp_out")))
