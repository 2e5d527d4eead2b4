"""Statistics of the logit lens at every layer and token.

These are plain functions of torch, which are shipped with the kernels that call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..activations.view import View, padded_rows, row_ends
from ..architectures.unembed import LayerHeads, Unembed, layer_logits
from ..core.cross_entropy import LEAST, block_size, need_classes, on_float64_device
from ..core.errors import LayersimError
from ..data.labels import NO_LABEL

# Neighbouring logits whose maximum is taken first, so that few rows are searched for ids above the target.
GROUP_SIZE = 256
RANKED = 10
# Groups whose logits are compared with the target's at once.
GROUPS_AT_ONCE = 2**14
# A model's logit lens, its residuals, and a function from residuals and spare memory to logits.
Side = tuple[Unembed, Tensor, Callable[..., Tensor]]


def read_positions(view: View) -> Tensor | None:
    """Indices of the tokens that the model's head reads; None for all tokens. A row classifier reads one token of each row."""
    if view.unembed is None or view.unembed.reads == "every":
        return None
    if view.unembed.reads == "first":
        return (view.position == 0).nonzero()[:, 0]
    return row_ends(view)


def read_vectors(view: View, x: Tensor) -> Tensor:
    """Residuals before the final norm, at the positions that the head reads (`layer sample width`).

    If the head reads rows, a sample is the pooled vector of a row.
    """
    if view.unembed is not None and view.unembed.pool is not None:
        return torch.stack([view.unembed.pool(*padded_rows(view, layer)) for layer in x])
    index = read_positions(view)
    return x if index is None else x[:, index]


def head_input(view: View, x: Tensor, normed: bool) -> tuple[Tensor, bool]:
    """Vectors from which the head computes logits (`layer sample width`), and whether they still need the final norm.

    Args:
        view: the view of one batch.
        x: `layer token d_model`, outputs of blocks.
        normed: whether the final norm is applied below the last layer too. It matters for heads that read rows.
    """
    unembed = view.unembed
    if unembed is None or unembed.pool is None:
        return read_vectors(view, x), True
    # One layer at a time, because the rows of a layer are a copy of its tokens.
    last = len(x) - 1
    return torch.stack([unembed.pooled(*padded_rows(view, one), normed or i == last).to(one) for i, one in enumerate(x)]), False


def logits_of_layers(
    unembed: Unembed, x: Tensor, needs_norm: bool, normed: bool, heads: LayerHeads | None = None, spare: Tensor | None = None
) -> Tensor:
    """Logits of all layers (`sample layer vocabulary`), computed from the vectors that `head_input` returns.

    The last layer always has its final norm.

    Args:
        unembed: the model's logit lens.
        x: `layer sample width`, outputs of all blocks.
        needs_norm: whether the final norm must still be applied.
        normed: whether the final norm is applied below the last layer too.
        heads: heads of the layers below the last; None for the model's own.
        spare: memory `(sample layer) vocabulary` for the logits; None to allocate it.
    """
    x = x.transpose(0, 1)
    if needs_norm and not normed:
        x = torch.cat([x[:, :-1], unembed.normed(x[:, -1:]).to(x)], 1)
    return layer_logits(unembed, x, normed and needs_norm, heads, spare)


def read_lens(
    view: View,
    target: Tensor,
    normed: bool,
    memory_mb: float,
    ranked: int,
    key: str,
    heads: LayerHeads | None = None,
) -> dict[str, Tensor]:
    """Statistics of the logit lens at every layer and token (each `layer token`).

    The result is kept in `view.memo` for all analyzers of a run.

    Args:
        view: a view with the model's logit lens.
        target: `token`, the target at each position or row that the head reads, NO_LABEL if there is none.
        normed: whether the final norm is applied at every layer; the last layer always has it.
        memory_mb: memory for the logits of one chunk of tokens.
        ranked: largest rank that is computed.
        key: key of the target in `view.memo`.
        heads: heads of the layers below the last; None for the model's own at every layer.

    Returns:
        `best`, the id with the largest logit (the lowest id among equals), and `best_prob`; `target_log_prob`; `before`, the
        number of ids ranked above the target, at most `ranked`; `entropy` and `kl` = KL(last layer || this layer), in nats. All
        are computed in float64 from the logits in the model's own dtype.

    Raises:
        LayersimError: the head has one output, or a target is not one of its ids.
    """
    key = f"{_key_of(normed, heads)} target={key}"
    if key in view.memo and view.memo[key]["ranked"] >= ranked:
        known: dict[str, Tensor] = view.memo[key]["lens"]
        return known
    ranked = max(ranked, RANKED)
    assert view.unembed is not None
    x, needs_norm = head_input(view, view.activations[1:], normed)
    heads = None if heads is None else heads.fitting(view.unembed, x)
    layers, tokens = x.shape[:2]
    names = ("best_prob", "target_log_prob", "entropy", "kl")
    out = {name: torch.zeros(layers, tokens, dtype=torch.float64, device=x.device) for name in names}
    out |= {name: torch.zeros(layers, tokens, dtype=torch.int64, device=x.device) for name in ("best", "before")}
    # All layers of a few tokens in one product, so that the last layer's distribution is used while it is in the cache.
    read = partial(logits_of_layers, view.unembed, needs_norm=needs_norm, normed=normed, heads=heads)
    for span, [z] in _chunks([(view.unembed, x, read)], memory_mb):
        z_here = on_float64_device(z)
        for name, value in _read_chunk(z_here, target[span].to(z_here.device), ranked).items():
            out[name][:, span] = value.T.to(x.device)
    view.memo[key] = {"ranked": ranked, "lens": out}
    return out


def likeliest(view: View, normed: bool, best: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely ids at every layer and token, and their probabilities (both `layer token rank`).

    Logits of one token at all layers are held at once.

    Args:
        view: a view with the model's logit lens.
        normed: see `read_lens`.
        best: `layer token`, the most likely id, the lowest among equals; as `read_lens` returns it.
        count: number of ids, at most the vocabulary size.
    """
    assert view.unembed is not None
    x, needs_norm = head_input(view, view.activations[1:], normed)
    found = []
    for token in range(x.shape[1]):
        z = on_float64_device(logits_of_layers(view.unembed, x[:, token : token + 1], needs_norm, normed))[0].double()
        first = best[:, token : token + 1].to(z.device)
        # The id of `best` comes first, also where others have the same logit.
        ids = z.scatter(1, first, torch.inf).topk(min(count, z.shape[-1]), -1).indices
        found.append((ids.to(x.device), torch.softmax(z, -1).gather(1, ids).to(x.device)))
    ids, probabilities = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
    return ids, probabilities


def _read_chunk(z: Tensor, target: Tensor, ranked: int) -> dict[str, Tensor]:
    """Statistics of `read_lens` (each `token layer`) from one chunk of logits (`token layer vocabulary`)."""
    known = target != NO_LABEL
    target_id = target.where(known, 0)[:, None].expand(z.shape[:2])
    if bool(((target_id < 0) | (target_id >= z.shape[-1])).any()):
        raise LayersimError(
            f"`labels` holds ids from {int(target[known].min())} to {int(target[known].max())}; the ids of the head are 0 to "
            f"{z.shape[-1] - 1}, and {NO_LABEL} means no label."
        )
    target_logit = z.gather(-1, target_id[..., None])[..., 0].double()
    groups, total, expected, cross = _moments(z)
    excludes = torch.zeros_like(total, dtype=torch.bool)
    if not bool((expected.isfinite() & cross.isfinite()).all()) and bool(z.isneginf().any()):
        # Ids with a logit of -inf: 0 times -inf is 0 in these sums, and the KL divergence is infinite where the last layer's
        # probability of such an id is above 0.
        excludes = (z.isneginf() & (torch.softmax(z[:, -1].float(), -1) > 0)[:, None]).any(-1)
        z = torch.where(z.isneginf(), z.amax(-1, keepdim=True) - 1000, z)
        groups, total, expected, cross = _moments(z)
    top, log_total = groups.amax(-1).double(), total.log()
    return {
        "best": _top_id(z, groups),
        "best_prob": 1 / total,
        # Rounding may give a probability above 1.
        "target_log_prob": (target_logit - top - log_total).clamp(max=0),
        "before": _count_above(z, groups, target_id, target_logit, ranked),
        "entropy": (log_total - expected).clamp(min=0),
        # Sum p log p - sum p log q, with p the last layer's: exactly 0 at the last layer.
        "kl": ((cross[:, -1:] - log_total[:, -1:]) - (cross - log_total)).clamp(min=0).masked_fill(excludes, torch.inf),
    }


def _moments(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum of each group of neighbouring logits (`token layer group`), and three moments over the vocabulary.

    The moments are of logits minus their maximum, `token layer`, float64: the sum of exponentials, the mean under softmax(z),
    and the mean under the last layer's distribution.

    Args:
        z: `token layer vocabulary`.
    """
    tokens, layers, vocabulary = z.shape
    flat = z.flatten(0, 1)
    groups = torch.empty(len(flat), -(-vocabulary // GROUP_SIZE), dtype=z.dtype, device=z.device)
    total, expected, cross = (torch.empty(len(flat), dtype=torch.float64, device=z.device) for _ in range(3))
    size = max(1, min(block_size(z) // vocabulary, len(flat)))
    below, weights = (torch.empty(size, vocabulary, dtype=torch.float64, device=z.device) for _ in range(2))
    final = torch.empty(tokens, vocabulary, dtype=torch.float64, device=z.device)
    for start in range(0, len(flat), size):
        rows = slice(start, start + size)
        block = flat[rows]
        top = _group_maxima(block, groups[rows]).amax(-1, keepdim=True).double()
        away, e = below[: len(block)], weights[: len(block)]
        # In float64 from here on: near 1, float32 holds 1 - p only to a few percent, too coarse for a threshold of 0.99999.
        torch.exp(away.copy_(block).sub_(top).clamp_(min=LEAST[torch.float64]), out=e)
        torch.sum(e, -1, out=total[rows])
        ends = slice(start // layers, (start + len(block)) // layers)
        final[ends] = e[layers - 1 - start % layers :: layers]
        torch.sum(away.mul_(e), -1, out=expected[rows])
    # Some ids at a time, in memory that is used again.
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
    """Write the maxima of groups of logits into `out`.

    A group has GROUP_SIZE consecutive logits of a row; the last group may be smaller.
    """
    whole = z.shape[-1] // GROUP_SIZE
    if whole:
        torch.amax(z[:, : whole * GROUP_SIZE].reshape(len(z), whole, GROUP_SIZE), -1, out=out[:, :whole])
    if whole * GROUP_SIZE < z.shape[-1]:
        torch.amax(z[:, whole * GROUP_SIZE :], -1, out=out[:, whole])
    return out


def _ids_in_groups(groups: Tensor, vocabulary: int) -> Tensor:
    """Vocabulary ids of the logits in each group (`... member`). Ids of the last group may exceed the vocabulary."""
    return groups[..., None] * GROUP_SIZE + torch.arange(min(GROUP_SIZE, vocabulary), device=groups.device)


def _top_id(z: Tensor, groups: Tensor) -> Tensor:
    """The id with the largest logit. Of equal logits it is the lowest id, because argmax takes the first."""
    ids = _ids_in_groups(groups.argmax(-1), z.shape[-1]).clamp_(max=z.shape[-1] - 1)
    return ids.gather(-1, z.gather(-1, ids).argmax(-1, keepdim=True))[..., 0]


def _count_above(z: Tensor, groups: Tensor, target_id: Tensor, target_logit: Tensor, ranked: int) -> Tensor:
    """Number of ids that rank above the target, at most `ranked`. Among equal logits the lower id ranks first."""
    # The target's logit is one of z, so that the comparison in its dtype is exact.
    logit, vocabulary = target_logit.to(z.dtype)[..., None], z.shape[-1]
    # `ranked` groups with a larger maximum already suffice. Of the others, the groups with ids above the target are read.
    near = (groups > logit).sum(-1) < ranked
    before = torch.full(near.shape, ranked, device=z.device).masked_fill(near, 0)
    for some in torch.split(((groups >= logit) & near[..., None]).nonzero(), GROUPS_AT_ONCE):
        token, layer, group = some.T
        ids = _ids_in_groups(group, vocabulary)
        lower, exists = ids < target_id[token, layer, None], ids < vocabulary
        values, own = z[token[:, None], layer[:, None], ids.clamp_(max=vocabulary - 1)], logit[token, layer]
        ahead = ((values > own) | ((values == own) & lower)) & exists
        before.index_put_((token, layer), ahead.sum(1), accumulate=True)
    return before.clamp(max=ranked)


def bad_logits(lens: dict[str, Tensor]) -> Tensor:
    """Number of positions with non-finite logits (`layer`)."""
    return (~(lens["best_prob"].isfinite() & lens["entropy"].isfinite())).sum(1)


def _key_of(normed: bool, heads: LayerHeads | None) -> str:
    """Start of the key of a logit lens in the cache `view.memo`: its norm and heads."""
    return f"lens normed={normed} heads={heads.digest if heads else ''}"


def saturation_layers(view: View, normed: bool, memory_mb: float, heads: LayerHeads | None = None) -> tuple[Tensor, Tensor]:
    """Index of the first block whose top-1 prediction stays the same until the last layer (`token`).

    Layers are read from the last one down, and only at tokens that have agreed so far.

    Returns:
        The saturation layers, and `layer`, the number of positions whose computed logits are not finite.

    Raises:
        LayersimError: the head has one output.
    """
    for key, known in view.memo.items():
        if key.startswith(f"{_key_of(normed, heads)} "):
            return first_final(known["lens"]["best"]), bad_logits(known["lens"])
    assert view.unembed is not None
    x, needs_norm = head_input(view, view.activations[1:], normed)
    heads = None if heads is None else heads.fitting(view.unembed, x)
    layers, tokens = x.shape[:2]
    alive = torch.arange(tokens, device=x.device)
    layer_of = torch.full((tokens,), layers - 1, device=x.device)
    bad = torch.zeros(layers, dtype=torch.int64, device=x.device)
    final, bad[-1] = _top_ids(view, x[-1], needs_norm, memory_mb)
    for layer in range(layers - 2, -1, -1):
        best_id, bad[layer] = _top_ids(view, x[layer, alive], normed and needs_norm, memory_mb, heads, layer)
        alive = alive[best_id == final[alive]]
        layer_of[alive] = layer
    return layer_of, bad


def first_final(best: Tensor) -> Tensor:
    """Index of the first block whose most likely id stays the same until the last block, for each token.

    Args:
        best: `layer token`, the most likely ids.
    """
    agree = (best == best[-1]).long()
    return len(best) - agree.flip(0).cumprod(0).sum(0)


def compare_lenses(first: View, second: View, memory_mb: float) -> dict[str, Tensor]:
    """Compare the logit lenses of two models at every layer and token. Each lens has the norm and the head of its own model.

    Args:
        first: a view with the first model's logit lens.
        second: a view of the same tokens, with the second model's logit lens.
        memory_mb: memory for the logits of one chunk of tokens.

    Returns:
        `best`, `model layer token`, the ids with the largest logit (the lowest id among equals); `kl`, `layer token`,
        KL(first || second) in nats, computed in float64 from the logits in the dtype of each model; and `bad`, `layer`, the
        number of positions at which logits of either model are not finite.

    Raises:
        LayersimError: the head has one output.
    """
    sides = []
    for view in (first, second):
        assert view.unembed is not None
        x, needs_norm = head_input(view, view.activations[1:], True)
        sides.append((view.unembed, x, partial(logits_of_layers, view.unembed, needs_norm=needs_norm, normed=True)))
    layers, tokens = sides[0][1].shape[:2]
    device = on_float64_device(sides[0][1]).device
    best = torch.zeros(2, layers, tokens, dtype=torch.int64, device=device)
    kl = torch.zeros(layers, tokens, dtype=torch.float64, device=device)
    bad = torch.zeros(layers, dtype=torch.int64, device=device)
    for span, both in _chunks(sides, memory_mb):
        logits = [on_float64_device(z.flatten(0, 1)).to(device) for z in both]
        for number, z in enumerate(logits):
            top, ids = z.max(-1)
            best[number, :, span] = ids.view(-1, layers).T
            bad += (~top.isfinite()).view(-1, layers).sum(0)
        kl[:, span] = kl_divergence(*logits).view(-1, layers).T
    return {"best": best, "kl": kl, "bad": bad}


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(softmax(p) || softmax(q)) of each row of logits, in nats, float64; exactly 0 for equal logits.

    Args:
        p: logits `row vocabulary`, in any dtype.
        q: logits of the same shape. An id of logit -inf, such as one that a model masks, makes the divergence infinite unless p
            excludes it too.
    """
    out = torch.empty(len(p), dtype=torch.float64, device=p.device)
    size = max(1, block_size(p) // p.shape[-1])
    for start in range(0, len(p), size):
        rows = slice(start, start + size)
        log_p, log_q = (torch.log_softmax(z[rows].double(), -1) for z in (p, q))
        chance = log_p.exp()
        out[rows] = torch.where(chance > 0, chance * (log_p - log_q), 0).sum(-1)
    return out.clamp_(min=0)


def _top_ids(
    view: View, x: Tensor, normed: bool, memory_mb: float, heads: LayerHeads | None = None, layer: int = 0
) -> tuple[Tensor, Tensor]:
    """Top-1 prediction for each row of x, and number of rows whose largest logit is not finite."""
    unembed = view.unembed
    assert unembed is not None

    def read(some: Tensor, spare: Tensor | None) -> Tensor:
        return unembed(some, normed, spare) if heads is None else heads.logits(unembed, some, layer, normed)

    out, bad = torch.empty(len(x), dtype=torch.int64, device=x.device), torch.tensor(0, device=x.device)
    for span, [z] in _chunks([(unembed, x, read)], memory_mb):
        top, ids = z.max(-1)
        out[span] = ids.to(x.device)
        bad += (~top.isfinite()).sum().to(x.device)
    return out, bad


def _chunks(sides: Sequence[Side], memory_mb: float) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield pairs: a slice of the tokens, and a list with each model's logits at these tokens.

    The first chunk is one token, and its memory gives the size of the others.

    Args:
        sides: for each model its logit lens, the residuals `... token width`, and a function from residuals and spare memory to
            logits.
        memory_mb: memory for the logits of one chunk.
    """
    start, step, tokens = 0, 1, sides[0][1].shape[-2]
    spares: list[Tensor | None] = [None] * len(sides)
    while start < tokens:
        span = slice(start, start + step)
        each = [read(x[..., span, :], spare=spare) for (_, x, read), spare in zip(sides, spares, strict=True)]
        for z in each:
            need_classes(z.shape[-1])
        yield span, each
        if start == 0:
            fits = [int(memory_mb / len(sides) * 2**20 / (z[0].numel() * z.element_size())) for z in each]
            step = min(max(1, min(fits)), max(tokens - 1, 1))
            for number, ((unembed, _, _), z) in enumerate(zip(sides, each, strict=True)):
                rows = step * z[0].numel() // z.shape[-1]
                spares[number] = z.new_empty(rows, z.shape[-1]) if unembed.linear is not None else None
        start = span.stop
