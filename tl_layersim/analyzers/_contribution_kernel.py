"""Kernel of `Contribution`: sums over tokens of what each sublayer adds to the residual stream.

It is serialised by value and runs on servers too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from ..activations.view import View

SUBLAYER = re.compile(r"(.*\bblocks\.)(\d+)\.hook_(attn|cross_attn|mlp)_out")
# Sites inside a block at which a sublayer may read the stream. The MLP of a sequential block reads it after attention, and that
# of a parallel block at the block's input.
MIDDLE = {"mlp_out": ("hook_resid_mid_cross", "hook_resid_mid"), "cross_attn_out": ("hook_resid_mid",), "attn_out": ()}
CHUNK = 256


def sublayer_sites(names: Sequence[str]) -> tuple[str, ...]:
    """Selects the outputs of sublayers from `names`, block by block in the order of the forward pass.

    Args:
        names: names of sites, in any order. The stacks of an encoder-decoder keep the order in which they are named.
    """
    found = [match for name in names if (match := SUBLAYER.fullmatch(name))]
    stacks = list(dict.fromkeys(match[1] for match in found))
    return tuple(match[0] for match in sorted(found, key=lambda match: (stacks.index(match[1]), int(match[2]), match[3])))


def stack_and_block(sublayer: str) -> tuple[str, int]:
    """Splits the name of a sublayer's site into the prefix of its stack and the index of its block."""
    match = SUBLAYER.fullmatch(sublayer)
    assert match is not None
    return match[1], int(match[2])


def contribution_kernel(view: View) -> dict[str, Tensor]:
    """Sums over tokens of the relative norm and the cosines of each sublayer's output, and of their squares.

    Tokens are processed in chunks, so that intermediate tensors are small beside the activations.

    Args:
        view: activations of one batch at the residual stream and at the outputs of sublayers.
    """
    sublayers = sublayer_sites(view.sites)
    streams = _streams(view.sites, sublayers)
    device = view.activations.device

    def zeros(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=device)

    names = [f"{quantity}{part}" for quantity in ("ratio", "cosine", "final") for part in ("", "^2", " known")]
    out = {name: zeros(len(streams)) for name in names}
    for start in range(0, view.activations.shape[1], CHUNK):
        x = view.activations[:, start : start + CHUNK]
        for number, places in enumerate(streams):
            for quantity, values in _quantities(*(x[place].double() for place in places)).items():
                known = ~values.isnan()
                values = values.where(known, 0.0)
                out[quantity][number] += values.sum()
                out[f"{quantity}^2"][number] += values.square().sum()
                out[f"{quantity} known"][number] += known.sum()
    return {"count": torch.tensor(view.activations.shape[1])} | out


def _streams(sites: Sequence[str], sublayers: Sequence[str]) -> list[tuple[int, int, int]]:
    """For each sublayer, three indices: its output, the stream it is added to, and the final stream of its stack."""
    streams = []
    for name in sublayers:
        stack, block = stack_and_block(name)
        last = max(number for other, number in map(stack_and_block, sublayers) if other == stack)
        middle = [place for own in MIDDLE[name.rpartition("hook_")[2]] if (place := f"{stack}{block}.{own}") in sites]
        before = sites.index(middle[0]) if middle else _input(sites, stack, block)
        streams.append((sites.index(name), before, sites.index(f"{stack}{last}.hook_resid_post")))
    return streams


def _input(sites: Sequence[str], stack: str, block: int) -> int:
    """Index of the residual stream before a block, which is the block's input or the output of the block before it."""
    own = f"{stack}{block}.hook_resid_pre"
    return sites.index(own if own in sites else f"{stack}{block - 1}.hook_resid_post")


def _quantities(added: Tensor, stream: Tensor, final: Tensor) -> dict[str, Tensor]:
    """Relative norm and cosines of a sublayer's output, each `token`; NaN if not defined.

    Args:
        added: `token d_model`, output of the sublayer.
        stream: `token d_model`, residual stream to which the output is added.
        final: `token d_model`, output of the last block.
    """
    size, stream_size, final_size = (vector.norm(dim=-1) for vector in (added, stream, final))

    def divided(values: Tensor, divisor: Tensor) -> Tensor:
        return values / divisor.where(divisor > 0, torch.nan)

    return {
        "ratio": divided(size, stream_size),
        "cosine": divided((added * stream).sum(-1), size * stream_size).clamp(-1, 1),
        "final": divided((added * final).sum(-1), size * final_size).clamp(-1, 1),
    }
