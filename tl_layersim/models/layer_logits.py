"""What each layer would say: the logits of every layer, reduced in chunks to a few numbers a token, never held.

Plain functions of torch: they travel with the kernels that call them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.labels import NO_LABEL
from .softmax import LEAST, block_size, on_float64_device
from .unembed import Unembed
from .view import View, row_ends

GROUP = 256  # logits whose maximum is taken first: the top few are then found among a few groups
RANKED = 10


def read_positions(view: View) -> Tensor | None:
    """Indices of the tokens that the head classifies; None for all of them."""
    if view.unembed is None or view.unembed.reads == "every":
        return None
    if view.unembed.reads == "first":
        return (view.position == 0).nonzero()[:, 0]
    return row_ends(view)


def lens_residual(view: View) -> Tensor:
    """`layer token d_model`: what leaves each block, at the positions that the head classifies."""
    index = read_positions(view)
    return view.residual[1:] if index is None else view.residual[1:, index]


def read_lens(view: View, target: Tensor, normed: bool, memory_mb: float, ranked: int, key: str) -> dict[str, Tensor]:
    """What every layer says at every token, each `layer token`.

    Analyzers of one run share it: the first to ask computes it.

    Args:
        view: with the model's unembedding.
        target: `token`, the right answer at each position that the head classifies, NO_LABEL where there is none.
        normed: whether the final norm is applied at every layer; at the last it always is.
        memory_mb: for the logits of one chunk of tokens.
        ranked: how many places of the order from the top are told apart.
        key: names the target among what is remembered.

    Returns:
        `best`, the id with the largest logit (the lowest id among equals), and `best_prob`; `target_log_prob`; `before`,
        how many ids come before the target, at most `ranked`; `entropy` and `kl` = KL(last layer || this layer), in nats. All
        are those of float64 arithmetic on the logits that the model computes in its own dtype.
    """
    key = f"lens normed={normed} target={key}"
    if key in view.memo and view.memo[key]["ranked"] >= ranked:
        found: dict[str, Tensor] = view.memo[key]["lens"]
        return found
    ranked = max(ranked, RANKED)
    assert view.unembed is not None
    x = lens_residual(view)
    layers, tokens = x.shape[:2]
    names = ("best_prob", "target_log_prob", "entropy", "kl")
    out = {name: torch.zeros(layers, tokens, dtype=torch.float64, device=x.device) for name in names}
    out |= {name: torch.zeros(layers, tokens, dtype=torch.int64, device=x.device) for name in ("best", "before")}
    start, step, spare = 0, 1, None
    while start < tokens:
        span = slice(start, start + step)
        # All layers of a few tokens in one product: the last layer's distribution then serves the others while it is near.
        some = x[:, span].transpose(0, 1)
        if not normed:
            # The last layer always speaks as the model does.
            some = torch.cat([some[:, :-1], view.unembed.normed(some[:, -1:]).to(some)], 1)
        z = view.unembed(some, normed, spare)
        z_here = on_float64_device(z)
        for name, value in _read_chunk(z_here, target[span].to(z_here.device), ranked).items():
            out[name][:, span] = value.T.to(x.device)
        start += step
        step, spare = _room(view.unembed, z, memory_mb, tokens - start) if spare is None else (step, spare)
    view.memo[key] = {"ranked": ranked, "lens": out}
    return out


def _read_chunk(z: Tensor, target: Tensor, ranked: int) -> dict[str, Tensor]:
    """`read_lens` of some tokens' logits `token layer vocabulary`, each `token layer`."""
    known = target != NO_LABEL
    wanted = target.where(known, 0)[:, None].expand(z.shape[:2])
    if bool(((wanted < 0) | (wanted >= z.shape[-1])).any()):
        raise LayersimError(
            "There are labels that the head cannot say.",
            given=f"labels from {int(target[known].min())} to {int(target[known].max())}",
            expected=f"0 to {z.shape[-1] - 1}, and {NO_LABEL} where there is none",
            do="labels of the model's own vocabulary or classes",
        )
    said = z.gather(-1, wanted[..., None])[..., 0].double()
    groups, total, expected, cross = _moments(z)
    excludes = torch.zeros_like(total, dtype=torch.bool)
    if not bool((expected.isfinite() & cross.isfinite()).all()) and bool(z.isneginf().any()):
        # Ids that cannot be said, with a logit of -inf: 0 times that is 0 here, and a layer is infinitely far from a last one
        # that says what it cannot.
        excludes = (z.isneginf() & (torch.softmax(z[:, -1].float(), -1) > 0)[:, None]).any(-1)
        z = torch.where(z.isneginf(), z.amax(-1, keepdim=True) - 1000, z)
        groups, total, expected, cross = _moments(z)
    top, log_total = groups.amax(-1).double(), total.log()
    return {
        "best": top_id(z, groups),
        "best_prob": 1 / total,
        # Rounding may carry a sure choice past 1.
        "target_log_prob": (said - top - log_total).clamp(max=0),
        "before": _before(z, groups, wanted, said, ranked),
        "entropy": (log_total - expected).clamp(min=0),
        # Sum p log p - sum p log q, with p the last layer's: exactly 0 at the last layer.
        "kl": ((cross[:, -1:] - log_total[:, -1:]) - (cross - log_total)).clamp(min=0).masked_fill(excludes, torch.inf),
    }


def _moments(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maxima of groups of logits `token layer group`, as they are; and `token layer` in float64, of logits less the largest of
    their row: the sum of exponentials, and the mean under softmax(z) and under the last layer's distribution.

    Args:
        z: `token layer vocabulary`.
    """
    tokens, layers, vocabulary = z.shape
    flat = z.flatten(0, 1)
    groups = torch.empty(len(flat), -(-vocabulary // GROUP), dtype=z.dtype, device=z.device)
    total, expected, cross = (torch.empty(len(flat), dtype=torch.float64, device=z.device) for _ in range(3))
    size = max(1, min(block_size(z) // vocabulary, len(flat)))
    below, weights = (torch.empty(size, vocabulary, dtype=torch.float64, device=z.device) for _ in range(2))
    final = torch.empty(tokens, vocabulary, dtype=torch.float64, device=z.device)
    for start in range(0, len(flat), size):
        rows = slice(start, start + size)
        block = flat[rows]
        top = _group_maxima(block, groups[rows]).amax(-1, keepdim=True).double()
        away, e = below[: len(block)], weights[: len(block)]
        # In float64 from here on: near 1, float32 holds 1 - p to a few percent only, and thresholds of 0.99999 are asked.
        torch.exp(away.copy_(block).sub_(top).clamp_(min=LEAST[torch.float64]), out=e)
        torch.sum(e, -1, out=total[rows])
        ends = slice(start // layers, (start + len(block)) // layers)
        final[ends] = e[layers - 1 - start % layers :: layers]
        torch.sum(away.mul_(e), -1, out=expected[rows])
    # Some ids at a time, into memory that is used again.
    width = max(1, block_size(z) // layers)
    wide = torch.empty(layers, min(width, vocabulary), dtype=torch.float64, device=z.device)
    top = groups.amax(-1).double()
    for token in range(tokens):
        rows = slice(token * layers, (token + 1) * layers)
        cross[rows] = -top[rows]
        for start in range(0, vocabulary, width):
            part = z[token, :, start : start + width]
            cross[rows] += torch.mv(wide[:, : part.shape[1]].copy_(part), final[token, start : start + width]) / total[rows][-1]
    expected /= total
    total, expected, cross = (values.view(tokens, layers) for values in (total, expected, cross))
    return groups.view(tokens, layers, -1), total, expected, cross


def _group_maxima(z: Tensor, out: Tensor) -> Tensor:
    """Largest of each GROUP neighbours in the rows of z, the last group perhaps smaller, into `out`."""
    whole = z.shape[-1] // GROUP
    if whole:
        torch.amax(z[:, : whole * GROUP].reshape(len(z), whole, GROUP), -1, out=out[:, :whole])
    if whole * GROUP < z.shape[-1]:
        torch.amax(z[:, whole * GROUP :], -1, out=out[:, whole])
    return out


def _members(groups: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids of the members of groups `... group`, and whether they exist; both `... (group member)`."""
    ids = (groups[..., None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten(-2)
    return ids.clamp(max=vocabulary - 1), ids < vocabulary


def top_id(z: Tensor, groups: Tensor) -> Tensor:
    """The id with the largest logit, the lowest of equals: argmax takes the first group, then the first member."""
    ids, exist = _members(groups.argmax(-1)[..., None], z.shape[-1])
    values = z.gather(-1, ids).masked_fill(~exist, -torch.inf)
    return ids.gather(-1, values.argmax(-1, keepdim=True))[..., 0]


def _before(z: Tensor, groups: Tensor, wanted: Tensor, said: Tensor, ranked: int) -> Tensor:
    """How many ids come before the wanted one, at most `ranked`. Among equals the lower id comes first."""
    before = torch.full(said.shape, ranked, device=z.device)
    # Whatever comes before stands in a group whose maximum is at least what was said; that many larger groups are enough.
    near = (groups > said[..., None]).sum(-1) < ranked
    z, at = z.flatten(0, 1), near.flatten().nonzero()[:, 0]
    groups, wanted, said = groups[near], wanted[near], said[near]
    many = min(ranked, groups.shape[-1])
    ids, exist = _members(groups.topk(many, -1).indices, z.shape[-1])
    values = z[at[:, None], ids].to(said.dtype)
    ahead = (values > said[:, None]) | ((values == said[:, None]) & (ids < wanted[:, None]))
    count = (ahead & exist).sum(-1)
    # More groups than were looked into: there are ties, and the whole row is counted.
    for i in ((groups >= said[:, None]).sum(-1) > many).nonzero()[:, 0].tolist():
        row = z[at[i]].to(said.dtype)
        count[i] = (row > said[i]).sum() + (row[: int(wanted[i])] == said[i]).sum()
    before[near] = count.clamp(max=ranked)
    return before


def bad_logits(lens: dict[str, Tensor]) -> Tensor:
    """`layer`, at how many positions logits were not finite."""
    return (~(lens["best_prob"].isfinite() & lens["entropy"].isfinite())).sum(1)


def saturation_layers(view: View, normed: bool, memory_mb: float) -> tuple[Tensor, Tensor]:
    """`token`: index of the block from which on the layer's first choice is the last layer's. Without the full lens.

    From the last layer down only those tokens are asked that have agreed so far. Beside it `layer`, at how many positions the
    logits that were seen are not finite.
    """
    for key, known in view.memo.items():
        if key.startswith(f"lens normed={normed} "):
            best: Tensor = known["lens"]["best"]
            agree = (best == best[-1]).long()
            return len(best) - agree.flip(0).cumprod(0).sum(0), bad_logits(known["lens"])
    assert view.unembed is not None
    x = lens_residual(view)
    layers, tokens = x.shape[:2]
    alive = torch.arange(tokens, device=x.device)
    layer_of = torch.full((tokens,), layers - 1, device=x.device)
    bad = torch.zeros(layers, dtype=torch.int64, device=x.device)
    final, bad[-1] = _choices(view, x[-1], True, memory_mb)
    for layer in range(layers - 2, -1, -1):
        said, bad[layer] = _choices(view, x[layer, alive], normed, memory_mb)
        alive = alive[said == final[alive]]
        layer_of[alive] = layer
    return layer_of, bad


def _choices(view: View, x: Tensor, normed: bool, memory_mb: float) -> tuple[Tensor, Tensor]:
    """The first choice at each row of x, `token d_model`; and at how many rows the largest logit is not finite."""
    assert view.unembed is not None
    out, bad = torch.empty(len(x), dtype=torch.int64, device=x.device), torch.tensor(0, device=x.device)
    start, step, spare = 0, 1, None
    while start < len(x):
        z = view.unembed(x[start : start + step], normed, spare)
        groups = torch.empty(len(z), -(-z.shape[-1] // GROUP), dtype=z.dtype, device=z.device)
        out[start : start + step] = top_id(z, _group_maxima(z, groups)).to(x.device)
        bad += (~groups.amax(-1).isfinite()).sum().to(x.device)
        start += step
        step, spare = _room(view.unembed, z, memory_mb, len(x) - start) if spare is None else (step, spare)
    return out, bad


def _room(unembed: Unembed, z: Tensor, memory_mb: float, left: int) -> tuple[int, Tensor | None]:
    """How many tokens go through at once, and memory for their logits; from the logits of a first one, z."""
    step = min(max(1, int(memory_mb * 2**20 / (z[0].numel() * z.element_size()))), max(left, 1))
    rows = step * z[0].numel() // z.shape[-1]
    return step, z.new_empty(rows, z.shape[-1]) if unembed.linear is not None else None
