"""Direct logit attribution: what the embedding, each attention and each MLP add to the logit of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View, targets
from ..architectures.unembed import rounding
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, result_class, typed
from ..core.site_names import site_in_words
from ..data.batches import Batch
from ..data.labels import NO_LABEL, warn_of_unused
from ..data.positions import PositionRule
from ..jacobians.supported_blocks import refuse_post_norm
from ..lens.linear_tail import linear_tail
from ..lens.single_tokens import as_tokens, has_rows, refuse_rows, token_ids
from ..lens.statistics import ids_at
from ..sources.model_description import ModelDescription
from .analyzer import Analyzer, Run, need_head, need_tokens
from .contribution import stack_and_block, sublayer_sites
from .needs import Needs

# Name of the term that holds the biases of the final norm and of the head.
BIAS = "bias"
# Positions for which directions are held at once.
MOST_POSITIONS = 256
# Logits that are held at once, for as many positions as they allow.
MOST_LOGITS = 2**24
# A block in which the sublayers miss the update at more than this fraction of the positions is one term.
MOST_MISSING = 0.1


@result_class
class LogitAttributionResult(Result):
    """Direct attribution of a token's logit to the embedding and the sublayers, as means over positions. Float64, in logits.

    Attributes:
        values: `term`, the same as `attribution`: what each term adds to the logit. The terms add up to `logit`, to the
            rounding of the model's dtype.
        by_block: `layer`, what each block adds: its attention and its MLP together.
        logit: mean logit of the token, or mean difference of two logits with `against`.
        terms: the names of the terms: the input of the first block (the embedding), the outputs of attention and MLP block by
            block, and "bias" for the biases of the final norm and of the head. A block whose sublayers are not known, or do not
            add up to its update, is one term with the name of its output.
        positions: number of positions.
    """

    attribution = ValuesAlias()
    values: Float64[Tensor, " term"] = axes(
        "term",
        label="Attribution",
        unit="logits",
        title="Direct attribution of the logit",
        caption="What the embedding, each attention, each MLP and the biases add to the logit, with the final norm's scale "
        "held at its value; mean over positions (Elhage et al. 2021; Wang et al. 2023, section 3.1).",
        drawn="bars",
    )
    by_block: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Attribution",
        unit="logits",
        title="Direct attribution of the logit to blocks",
        caption="What each block adds to the logit, mean over positions (Elhage et al. 2021).",
        scale="free",
    )
    logit: Float64[Tensor, ""] = axes(label="Logit", title="Logit of the token")
    terms: tuple[str, ...]
    positions: int

    def headline(self) -> dict[str, float]:
        numbers = {"logit": float(self.logit)}
        largest = self.values[:-1].abs().argsort(descending=True, stable=True)[:3]
        for place in largest.tolist():
            numbers[f"attribution to {site_in_words(self.terms[place])}"] = float(self.values[place])
        return numbers


@typed
@dataclass(frozen=True, eq=False)
class LogitAttribution(Analyzer):
    r"""Direct logit attribution: what each block, each attention and each MLP adds to the logit of a token.

    The stream after the last block is a sum of the embedding and of the outputs of all sublayers, $x = \sum_c x_c$. With the
    scale $\sigma$ of the final norm held at the value that it has for the whole stream, norm and head are linear, so that

    $$\mathrm{logit}_v = \sum_c \frac{\langle u_v \odot w, \, x_c - \bar x_c \rangle}{\sigma(x)} +
    \langle u_v, b_{\mathrm{norm}} \rangle + b_v$$

    with the row $u_v$ of the head, weight and bias of the norm, and without the mean $\bar x_c$ for an RMS norm. The terms add
    up to the logit. What a term adds is what it writes itself: a block that later blocks read may matter more
    (`SkipEffect`). Norms and heads are linearised as they are, and compared with their outputs; a model that caps its logits,
    classifies rows or has another function than a norm and a linear layer behind its last block raises an error. So do
    post-norm models. For one prompt, pass `Data(prompt, positions="last")`.

    Args:
        target: the token whose logit is attributed: the text of one token such as " Paris", its id, or a list of these with one
            for each row of the data. None for the next token; positions without one are left out.
        against: a token whose logit is subtracted, in the same forms; None for none.

    Source:
        Elhage et al. 2021 (A Mathematical Framework for Transformer Circuits); Wang et al. 2023 (arXiv 2211.00593), section
        3.1; `ActivationCache.logit_attrs` of TransformerLens, which leaves out the biases.

    Examples:
        >>> import tl_layersim as lsim
        >>> data = lsim.Data("Once upon a time there was a little", positions="last")
        >>> analyzer = lsim.LogitAttribution(" girl", against=" boy")
        >>> found = lsim.analyze(lsim.demo_model(), data, analyzer)["logit_attribution"]
        >>> found.terms[:3]
        ('blocks.0.hook_resid_pre', 'blocks.0.hook_attn_out', 'blocks.0.hook_mlp_out')
        >>> bool((found.values.sum() - found.logit).abs() < 1e-4)
        True
    """

    name: ClassVar[str] = "logit_attribution"

    target: Any = None
    against: Any = None

    @property
    def needs(self) -> Needs:
        return Needs(
            families=("resid_post",),
            optional_families=("attn_out", "mlp_out", "mixer_out", "cross_attn_out"),
            head="logits",
            single_texts=has_rows(self.target) or has_rows(self.against),
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", as_tokens(self.target, "target"))
        object.__setattr__(self, "against", as_tokens(self.against, "against"))

    def settled(self, model: ModelDescription, positions: PositionRule | None) -> Analyzer:
        return replace(self, target=token_ids(self.target, model, "target"), against=token_ids(self.against, model, "against"))

    def check(self, *models: ModelDescription) -> None:
        model = models[0]
        need_head(model, type(self).__name__)
        refuse_post_norm(model)
        head = model.head
        assert head is not None
        reason = ""
        if head.soft_cap is not None:
            reason = f"caps its logits at {head.soft_cap:g}"
        elif head.reads != "every":
            reason = "classifies whole rows"
        elif model.calls == "values":
            reason = "runs in a sandbox of a server, which has no gradients"
        if reason:
            raise LayersimError(
                f"LogitAttribution needs a final norm and a linear head, but {model.name} {reason}. LogitLens accepts it."
            )

    def check_batch(self, batch: Batch, model: ModelDescription) -> None:
        for tokens, argument in ((self.target, "target"), (self.against, "against")):
            if isinstance(tokens, Tensor):
                refuse_rows(tokens, batch, argument)

    def kernel(self, first: Sums) -> Kernel:
        return partial(attribution_kernel, target=self.target, against=self.against)

    def compute(self, sums: Sums, run: Run) -> LogitAttributionResult:
        count = int(sums["count"])
        need_tokens(count, 1, type(self).__name__, "positions with a next token")
        for tokens, argument in ((self.target, "target"), (self.against, "against")):
            if isinstance(tokens, Tensor):
                warn_of_unused(tokens, run.provenance, argument)
        if int(sums["bent"]):
            raise LayersimError(
                f"LogitAttribution needs a final norm and a linear head, but {run.head} of {run.models[0].name} is not linear "
                f"at {int(sums['bent'])} of {count} positions, even with the norm's scale held. LogitLens accepts it."
            )
        streams = stream_sites(run.layers)
        sublayers = sublayer_sites(run.layers)
        is_apart = (sums["apart"].double() / count > MOST_MISSING).tolist()
        terms = [streams[0]]
        values = [sums["embedding"]]
        for block, numbers in enumerate(_sublayers_by_block(streams, sublayers)):
            if is_apart[block]:
                terms.append(streams[1 + block])
                values.append(sums["blocks"][block])
                continue
            for number in numbers:
                terms.append(sublayers[number])
                values.append(sums["sublayers"][number])
        terms.append(BIAS)
        values.append(sums["bias"])
        return LogitAttributionResult(
            values=torch.stack(values) / count,
            by_block=sums["blocks"] / count,
            logit=sums["logit"] / count,
            terms=tuple(terms),
            positions=count,
            layers=streams,
            provenance=run.provenance,
        )


def stream_sites(names: Sequence[str]) -> tuple[str, ...]:
    """Names of the residual stream before the first and after each block, in the order of the forward pass."""
    return tuple(name for name in names if name.endswith((".hook_resid_pre", ".hook_resid_post")))


def _sublayers_by_block(streams: Sequence[str], sublayers: Sequence[str]) -> list[list[int]]:
    """Indices of each block's sublayers, in the order of the forward pass.

    Args:
        streams: names of the stream before the first and after each block.
        sublayers: names of the outputs of sublayers.
    """
    by_block: list[list[int]] = [[] for _ in streams[1:]]
    for number, name in enumerate(sublayers):
        stack, block = stack_and_block(name)
        by_block[streams.index(f"{stack}{block}.hook_resid_post") - 1].append(number)
    return by_block


def attribution_kernel(view: View, *, target: int | Tensor | None, against: int | Tensor | None) -> dict[str, Tensor]:
    """Sum what the embedding, the sublayers, the blocks and the biases add to a logit, over positions.

    Args:
        view: activations of one batch at the residual stream and at the outputs of sublayers.
        target: id of the token, or `row`, an id for each row of the data; None for the next token.
        against: id of the token whose logit is subtracted, in the same forms; None for none.

    Returns:
        Sums of attributions: "embedding", "sublayers" (`sublayer`), "blocks" (`layer`), "bias" and "logit"; and numbers of
        positions: "count", all; "bent", at which norm and head are not linear; "apart", `layer`, at which the sublayers of a
        block do not add up to its update.
    """
    assert view.unembed is not None
    x = view.activations
    names_of_streams = stream_sites(view.sites)
    streams = [view.sites.index(name) for name in names_of_streams]
    sublayers = sublayer_sites(view.sites)
    outputs = [view.sites.index(name) for name in sublayers]
    by_block = _sublayers_by_block(names_of_streams, sublayers)
    ids = (targets(view, "next_token") if target is None else ids_at(view, target)).to(x.device)
    other_ids = None if against is None else ids_at(view, against).to(x.device)
    places = (ids != NO_LABEL).nonzero()[:, 0]
    out = {
        "count": torch.tensor(len(places)),
        "sublayers": torch.zeros(len(sublayers), dtype=torch.float64, device=x.device),
        "blocks": torch.zeros(len(by_block), dtype=torch.float64, device=x.device),
        "apart": torch.zeros(len(by_block), dtype=torch.int64, device=x.device),
        "bent": torch.tensor(0, device=x.device),
    }
    for name in ("embedding", "bias", "logit"):
        out[name] = torch.tensor(0.0, dtype=torch.float64, device=x.device)
    allowed = rounding(view.unembed.norm_dtype or view.unembed.dtype or torch.float32)
    # One position shows the size of the vocabulary.
    start = 0
    step = 1
    while start < len(places):
        place = places[start : start + step]
        final = x[streams[-1], place]
        if start == 0:
            vocabulary = view.unembed(final).shape[-1]
        ids_against = None if other_ids is None else other_ids[place]
        tail = linear_tail(view.unembed, final, ids[place], ids_against)
        before = x[streams[0], place].double()
        out["embedding"] += (before * tail.direction).sum()
        out["bias"] += tail.bias.sum()
        out["logit"] += tail.logit.sum()
        out["bent"] += tail.bent.sum()
        for block, numbers in enumerate(by_block):
            after = x[streams[1 + block], place].double()
            missing = after - before
            out["blocks"][block] += (missing * tail.direction).sum()
            for number in numbers:
                added = x[outputs[number], place].double()
                out["sublayers"][number] += (added * tail.direction).sum()
                missing = missing - added
            size = torch.maximum(before.norm(dim=-1), after.norm(dim=-1))
            out["apart"][block] += (missing.norm(dim=-1) > allowed * size).sum()
            before = after
        start += step
        step = max(1, min(MOST_POSITIONS, MOST_LOGITS // vocabulary))
    return out
