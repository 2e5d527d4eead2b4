"""Contribution of each sublayer to the residual stream: relative norm of its output, and its cosines with the stream."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, result_class, typed, warn, without_nan
from ..core.wording import brief
from ..jacobians.supported_blocks import refuse_post_norm
from ..sources.model_description import ModelDescription
from .analyzer import CSORDAS, Analyzer, Run, omitted_at
from .needs import Needs

SUBLAYER = re.compile(r"(.*\bblocks\.)(\d+)\.hook_(attn|cross_attn|mixer|mlp)_out")
# Sites inside a block at which a sublayer may read the stream. The MLP of a sequential block reads it after attention, and that
# of a parallel block at the block's input.
MIDDLE = {
    "mlp_out": ("hook_resid_mid_cross", "hook_resid_mid"),
    "cross_attn_out": ("hook_resid_mid",),
    "attn_out": (),
    "mixer_out": (),
}
CHUNK = 256


@result_class
class ContributionResult(Result):
    """Contribution of each sublayer to the residual stream, as means over tokens. Float64.

    Attributes:
        values: `sublayer`, the same as `relative_norm`: mean over tokens of |a| / |h|, for a sublayer's output a and the stream
            h that it is added to. Tokens with h = 0 have no relative norm, and tokens with a = 0 no cosine; they are omitted,
            and a `LayersimWarning` names the sublayer. NaN if no token is left.
        cosine: `sublayer`, mean over tokens of the cosine of a and h. Negative if the sublayer removes from the stream, 0 if it
            adds new directions, positive if it strengthens the stream.
        cosine_to_final: `sublayer`, mean over tokens of the cosine of a and the stream after the last block, without the final
            norm.
        sublayers: names of the outputs of attention and MLP, block by block.
    """

    relative_norm = ValuesAlias()
    values: Float64[Tensor, " sublayer"] = axes(
        "sublayer",
        label="Output norm / stream norm",
        title="Relative norm of sublayer outputs",
        caption="Norm of each sublayer's output, divided by the norm of the stream that it is added to, mean over tokens "
        + CSORDAS.format("figure 2 a"),
        within=(0, math.inf),
    )
    cosine: Float64[Tensor, " sublayer"] = axes(
        "sublayer",
        label="Cosine similarity",
        title="Cosine of sublayer outputs with the stream",
        caption="Negative where a sublayer removes from the stream to which its output is added, positive where it "
        "strengthens the stream; mean over tokens " + CSORDAS.format("figure 2 b"),
        within=(-1, 1),
    )
    cosine_to_final: Float64[Tensor, " sublayer"] = axes(
        "sublayer",
        label="Cosine similarity",
        title="Cosine of sublayer outputs with the final stream",
        caption="Direction of each sublayer's output relative to the stream after the last block, mean over tokens; the paper "
        "compares with the current stream only " + CSORDAS.format("section 3"),
        within=(-1, 1),
    )
    sublayers: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        # Their numbers of blocks are read below; a file may hold other names.
        for name in self.sublayers:
            if not SUBLAYER.fullmatch(name):
                raise LayersimError(f"`sublayers` has {brief(name)}; it must have outputs of attention and of MLP.")

    def headline(self) -> dict[str, float]:
        last_block = _last_blocks(self.sublayers)
        in_first_half = []
        for name in self.sublayers:
            stack, block = stack_and_block(name)
            in_first_half.append(block < (1 + last_block[stack]) / 2)
        first = torch.tensor(in_first_half)
        numbers = {}
        for quantity, field in (("relative norm", self.values), ("cosine with the stream", self.cosine)):
            for half, sublayers in (("first", first), ("second", ~first)):
                if bool(sublayers.any()):
                    numbers[f"{quantity}, {half} half of the blocks"] = field[sublayers].nanquantile(0.5)
        return without_nan(numbers)


@typed
@dataclass(frozen=True)
class Contribution(Analyzer):
    r"""Contribution of attention and MLP outputs to the residual stream: relative norm and cosines.

    For the output $a_t$ of the attention or the MLP of a block and the stream $h_t$ to which it is added:

    $$R = \operatorname{mean}_t \frac{\lVert a_t \rVert}{\lVert h_t \rVert}, \qquad
    C = \operatorname{mean}_t \frac{\langle a_t, h_t \rangle}{\lVert a_t \rVert \, \lVert h_t \rVert}, \qquad
    F = \operatorname{mean}_t \frac{\langle a_t, x^L_t \rangle}{\lVert a_t \rVert \, \lVert x^L_t \rVert}$$

    The MLP of a sequential block adds to the stream after attention; attention and MLP of a parallel block both add to the
    block's input. In a decoder that attends to an encoder, this attention is a sublayer between them. x^L is the output of the
    last block, before the final norm. The sublayers are read whatever `at` says, of the stack that it names.
    Post-norm models such as BERT raise an error: a layer norm follows each addition, so the outputs are not parts of the final
    stream. On the first row, the run checks that the outputs add up to the stream as the architecture implies. There are no
    options.

    Source:
        Csordás, Manning and Potts 2025 (arXiv 2505.13898), section 3, figure 2. The cosine with the final stream is not in the
        paper.

    Examples:
        >>> import tl_layersim as lsim
        >>> found = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.Contribution())["contribution"]
        >>> found.sublayers[:2], found.relative_norm.shape
        (('blocks.0.hook_attn_out', 'blocks.0.hook_mlp_out'), torch.Size([16]))
    """

    name: ClassVar[str] = "contribution"
    needs = Needs(
        families=("resid_post", "attn_out", "mlp_out"),
        optional_families=("resid_mid", "mixer_out", "cross_attn_out", "resid_mid_cross"),
    )

    def check(self, *models: ModelDescription) -> None:
        refuse_post_norm(models[0])

    def kernel(self, first: Sums) -> Kernel:
        return contribution_kernel

    def compute(self, sums: Sums, run: Run) -> ContributionResult:
        count = int(sums["count"])
        sublayers = sublayer_sites(run.layers)
        omitted = omitted_at(sublayers, count - sums["cosine known"], count)
        if omitted:
            warn(
                "The cosine is not defined for tokens at which a sublayer's output or the residual stream is zero. These "
                f"tokens are omitted: {omitted}. Relative norms omit tokens whose residual stream is zero."
            )
        return ContributionResult(
            values=sums["ratio"] / sums["ratio known"],
            cosine=sums["cosine"] / sums["cosine known"],
            cosine_to_final=sums["final"] / sums["final known"],
            sublayers=sublayers,
            layers=tuple(name for name in run.layers if name.endswith((".hook_resid_pre", ".hook_resid_post"))),
            provenance=run.provenance,
        )


def sublayer_sites(names: Sequence[str]) -> tuple[str, ...]:
    """Names of the sublayers' outputs, in the order of the forward pass.

    Args:
        names: names of sites, in any order. The stacks of an encoder-decoder keep the order in which they are named.
    """
    matches = []
    for name in names:
        match = SUBLAYER.fullmatch(name)
        if match is not None:
            matches.append(match)
    stacks = list(dict.fromkeys(match[1] for match in matches))
    matches.sort(key=lambda match: (stacks.index(match[1]), int(match[2]), match[3]))
    return tuple(match[0] for match in matches)


def stack_and_block(sublayer: str) -> tuple[str, int]:
    """Prefix of a sublayer's stack (encoder or decoder), and index of its block."""
    match = SUBLAYER.fullmatch(sublayer)
    assert match is not None
    return match[1], int(match[2])


def _last_blocks(sublayers: Sequence[str]) -> dict[str, int]:
    """Index of the last block of each stack that has a sublayer, by the stack's prefix."""
    last: dict[str, int] = {}
    for name in sublayers:
        stack, block = stack_and_block(name)
        last[stack] = max(block, last.get(stack, block))
    return last


def contribution_kernel(view: View) -> dict[str, Tensor]:
    """Sum the relative norms and cosines of each sublayer's output over tokens.

    Tokens are processed in chunks, so that intermediate tensors are small beside the activations.

    Args:
        view: activations of one batch at the residual stream and at the outputs of sublayers.
    """
    sublayers = sublayer_sites(view.sites)
    streams = _streams(view.sites, sublayers)
    zeros = torch.zeros(len(streams), dtype=torch.float64, device=view.activations.device)
    out = {"count": torch.tensor(view.activations.shape[1])}
    for quantity in ("ratio", "cosine", "final"):
        out[quantity] = zeros.clone()
        out[f"{quantity} known"] = zeros.clone()
    for start in range(0, view.activations.shape[1], CHUNK):
        x = view.activations[:, start : start + CHUNK]
        for number, (output, stream, final) in enumerate(streams):
            quantities = _quantities(x[output].double(), x[stream].double(), x[final].double())
            for quantity, values in quantities.items():
                defined = ~values.isnan()
                out[quantity][number] += values.where(defined, 0.0).sum()
                out[f"{quantity} known"][number] += defined.sum()
    return out


def _streams(sites: Sequence[str], sublayers: Sequence[str]) -> list[tuple[int, int, int]]:
    """Indices of three sites for each sublayer: its output, the residual stream before it, and the final stream."""
    last_block = _last_blocks(sublayers)
    streams = []
    for name in sublayers:
        stack, block = stack_and_block(name)
        # The stream in the middle of the block; or its input, which is also the output of the block before it.
        candidates = [f"{stack}{block}.{hook}" for hook in MIDDLE[name.rpartition("hook_")[2]]]
        candidates += [f"{stack}{block}.hook_resid_pre", f"{stack}{block - 1}.hook_resid_post"]
        before = next(site for site in candidates if site in sites)
        final = f"{stack}{last_block[stack]}.hook_resid_post"
        streams.append((sites.index(name), sites.index(before), sites.index(final)))
    return streams


def _quantities(added: Tensor, stream: Tensor, final: Tensor) -> dict[str, Tensor]:
    """Relative norm and cosines of a sublayer's output, each `token`; NaN if not defined.

    Args:
        added: `token d_model`, output of the sublayer.
        stream: `token d_model`, residual stream to which the output is added.
        final: `token d_model`, output of the last block.
    """
    size = added.norm(dim=-1)
    stream_size = stream.norm(dim=-1)
    final_size = final.norm(dim=-1)

    def divided(values: Tensor, divisor: Tensor) -> Tensor:
        return values / divisor.where(divisor > 0, torch.nan)

    return {
        "ratio": divided(size, stream_size),
        "cosine": divided((added * stream).sum(-1), size * stream_size).clamp(-1, 1),
        "final": divided((added * final).sum(-1), size * final_size).clamp(-1, 1),
    }
