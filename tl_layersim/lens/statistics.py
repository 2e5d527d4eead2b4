"""Statistics of the logit lens at every layer and token.

These are plain functions of torch, which are shipped with the kernels that call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..activations.view import View, padded_rows, row_ends, targets
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


def ids_at(view: View, tokens: int | Tensor, index: Tensor | None = None) -> Tensor:
    """The id of a given token at each token of a view, or at those in `index`.

    Args:
        view: the view of one batch.
        tokens: the id, or `row`, an id for each row of the data.
        index: indices of tokens; None for all.
    """
    if isinstance(tokens, Tensor):
        return targets(view, tokens, index)
    return torch.full_like(view.tokens if index is None else index, tokens)


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
    pooled_layers: list[Tensor] = []
    last = len(x) - 1
    # One layer at a time, because the rows of a layer are a copy of its tokens.
    for number, layer in enumerate(x):
        rows, attended = padded_rows(view, layer)
        # The last layer has the norm in every lens.
        pooled = unembed.pooled(rows, attended, normed or number == last)
        pooled_layers.append(pooled.to(layer))
    return torch.stack(pooled_layers), False


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
    ids: Tensor | None = None,
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
        ids: `token`, an id at each position whose rank and probability are read too; None for none.

    Returns:
        `best`, the id with the largest logit (the lowest id among equals), and `best_prob`; `target_log_prob`; `before`, the
        number of ids ranked above the target, at most `ranked`; `entropy` and `kl` = KL(last layer || this layer), in nats; for
        `ids`, `rank` = 1 + the number of strictly larger logits, and `rank_prob`. All are computed in float64 from the logits
        in the model's own dtype.

    Raises:
        LayersimError: the head has one output, or a target is not one of its ids.
    """
    key = f"{_memo_key(normed, heads)} target={key}"
    if key in view.memo and view.memo[key]["ranked"] >= ranked and ids is None:
        cached: dict[str, Tensor] = view.memo[key]["lens"]
        return cached
    # At least RANKED, so that the result serves later analyzers too.
    ranked = max(ranked, RANKED)
    assert view.unembed is not None
    x, needs_norm = head_input(view, view.activations[1:], normed)
    heads = None if heads is None else heads.fitting(view.unembed, x)
    layers, tokens = x.shape[:2]
    statistics: dict[str, Tensor] = {}
    real_names = ["best_prob", "target_log_prob", "entropy", "kl"]
    whole_names = ["best", "before"]
    if ids is not None:
        real_names.append("rank_prob")
        whole_names.append("rank")
    for name in real_names:
        statistics[name] = torch.zeros(layers, tokens, dtype=torch.float64, device=x.device)
    for name in whole_names:
        statistics[name] = torch.zeros(layers, tokens, dtype=torch.int64, device=x.device)
    # All layers of a few tokens in one product, so that the last layer's distribution is used while it is in the cache.
    to_logits = partial(logits_of_layers, view.unembed, needs_norm=needs_norm, normed=normed, heads=heads)
    for span, [z] in _chunks([(view.unembed, x, to_logits)], memory_mb):
        z = on_float64_device(z)
        ids_of_chunk = None if ids is None else ids[span].to(z.device)
        chunk = _read_chunk(z, target[span].to(z.device), ranked, ids_of_chunk)
        for name, values in chunk.items():
            statistics[name][:, span] = values.T.to(x.device)
    view.memo[key] = {"ranked": ranked, "lens": statistics}
    return statistics


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
    ids_of_tokens: list[Tensor] = []
    probabilities_of_tokens: list[Tensor] = []
    for token in range(x.shape[1]):
        logits = logits_of_layers(view.unembed, x[:, token : token + 1], needs_norm, normed)
        z = on_float64_device(logits)[0].double()
        first = best[:, token : token + 1].to(z.device)
        # The id of `best` comes first, also where others have the same logit.
        ids = z.scatter(1, first, torch.inf).topk(min(count, z.shape[-1]), -1).indices
        probabilities = torch.softmax(z, -1).gather(1, ids)
        ids_of_tokens.append(ids.to(x.device))
        probabilities_of_tokens.append(probabilities.to(x.device))
    return torch.stack(ids_of_tokens, 1), torch.stack(probabilities_of_tokens, 1)


def _read_chunk(z: Tensor, target: Tensor, ranked: int, ids: Tensor | None) -> dict[str, Tensor]:
    """Statistics of `read_lens` (each `token layer`) from one chunk of logits (`token layer vocabulary`)."""
    has_target = target != NO_LABEL
    target_id = target.where(has_target, 0)[:, None].expand(z.shape[:2])
    if bool(((target_id < 0) | (target_id >= z.shape[-1])).any()):
        ids = target[has_target]
        raise LayersimError(
            f"`labels` holds ids from {int(ids.min())} to {int(ids.max())}; the ids of the head are 0 to "
            f"{z.shape[-1] - 1}, and {NO_LABEL} means no label."
        )
    target_logit = z.gather(-1, target_id[..., None])[..., 0].double()
    logit_of_id: Tensor | None = None
    rank: Tensor | None = None
    if ids is not None:
        logit_of_id, rank = _logits_and_ranks(z, ids)
    group_maxima, sum_exp, mean_logit, mean_under_last = _moments(z)
    kl_is_infinite = torch.zeros_like(sum_exp, dtype=torch.bool)
    if not bool((mean_logit.isfinite() & mean_under_last.isfinite()).all()) and bool(z.isneginf().any()):
        # Ids with a logit of -inf: 0 times -inf is 0 in these sums, and the KL divergence is infinite where the last layer's
        # probability of such an id is above 0.
        is_likely_in_last = (torch.softmax(z[:, -1].float(), -1) > 0)[:, None]
        kl_is_infinite = (z.isneginf() & is_likely_in_last).any(-1)
        z = torch.where(z.isneginf(), z.amax(-1, keepdim=True) - 1000, z)
        group_maxima, sum_exp, mean_logit, mean_under_last = _moments(z)
    top_logit = group_maxima.amax(-1).double()
    log_sum_exp = sum_exp.log()
    # Sum p log p - sum p log q, with p the last layer's: exactly 0 at the last layer.
    log_prob_under_last = mean_under_last - log_sum_exp
    kl = log_prob_under_last[:, -1:] - log_prob_under_last
    of_ids: dict[str, Tensor] = {}
    if logit_of_id is not None and rank is not None:
        of_ids = {"rank": rank, "rank_prob": (logit_of_id.double() - top_logit - log_sum_exp).clamp(max=0).exp()}
    return of_ids | {
        "best": _top_id(z, group_maxima),
        "best_prob": 1 / sum_exp,
        # Rounding may give a probability above 1.
        "target_log_prob": (target_logit - top_logit - log_sum_exp).clamp(max=0),
        "before": _count_above(z, group_maxima, target_id, target_logit, ranked),
        "entropy": (log_sum_exp - mean_logit).clamp(min=0),
        "kl": kl.clamp(min=0).masked_fill(kl_is_infinite, torch.inf),
    }


def _moments(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum of each group of neighbouring logits (`token layer group`), and three moments over the vocabulary.

    The moments are of logits minus their maximum, `token layer`, float64: the sum of exponentials, the mean under softmax(z),
    and the mean under the last layer's distribution.

    Args:
        z: `token layer vocabulary`.
    """
    tokens, layers, vocabulary = z.shape
    # A row is one layer of one token.
    flat = z.flatten(0, 1)
    group_count = -(-vocabulary // GROUP_SIZE)
    group_maxima = torch.empty(len(flat), group_count, dtype=z.dtype, device=z.device)
    sum_exp = torch.empty(len(flat), dtype=torch.float64, device=z.device)
    mean_logit = torch.empty_like(sum_exp)
    mean_under_last = torch.empty_like(sum_exp)
    # Memory for some rows at a time, which is used again.
    size = max(1, min(block_size(z) // vocabulary, len(flat)))
    logit_memory = torch.empty(size, vocabulary, dtype=torch.float64, device=z.device)
    exp_memory = torch.empty_like(logit_memory)
    exp_of_last = torch.empty(tokens, vocabulary, dtype=torch.float64, device=z.device)
    for start in range(0, len(flat), size):
        rows = slice(start, start + size)
        block = flat[rows]
        top = _group_maxima(block, group_maxima[rows]).amax(-1, keepdim=True).double()
        logits = logit_memory[: len(block)]
        exp = exp_memory[: len(block)]
        # In float64 from here on: near 1, float32 holds 1 - p only to a few percent, too coarse for a threshold of 0.99999.
        logits.copy_(block).sub_(top).clamp_(min=LEAST[torch.float64])
        torch.exp(logits, out=exp)
        torch.sum(exp, -1, out=sum_exp[rows])
        # Tokens whose last layer is in this block.
        tokens_ending = slice(start // layers, (start + len(block)) // layers)
        exp_of_last[tokens_ending] = exp[layers - 1 - start % layers :: layers]
        torch.sum(logits.mul_(exp), -1, out=mean_logit[rows])
    # Some ids at a time, in memory that is used again.
    width = max(1, block_size(z) // layers)
    id_memory = torch.empty(layers, min(width, vocabulary), dtype=torch.float64, device=z.device)
    top = group_maxima.amax(-1).double()
    for token in range(tokens):
        rows = slice(token * layers, (token + 1) * layers)
        mean_under_last[rows] = -top[rows]
        sum_exp_of_last = sum_exp[rows][-1]
        for start in range(0, vocabulary, width):
            ids = slice(start, start + width)
            part = z[token, :, ids]
            logits = id_memory[:, : part.shape[1]].copy_(part)
            mean_under_last[rows] += torch.mv(logits, exp_of_last[token, ids]) / sum_exp_of_last
    mean_logit /= sum_exp
    shape = (tokens, layers)
    moments = (sum_exp.view(shape), mean_logit.view(shape), mean_under_last.view(shape))
    return group_maxima.view(tokens, layers, -1), *moments


def _group_maxima(z: Tensor, out: Tensor) -> Tensor:
    """Write the maxima of groups of logits into `out`.

    A group has GROUP_SIZE consecutive logits of a row; the last group may be smaller.
    """
    full_groups = z.shape[-1] // GROUP_SIZE
    end = full_groups * GROUP_SIZE
    if full_groups:
        by_group = z[:, :end].reshape(len(z), full_groups, GROUP_SIZE)
        torch.amax(by_group, -1, out=out[:, :full_groups])
    if end < z.shape[-1]:
        torch.amax(z[:, end:], -1, out=out[:, full_groups])
    return out


def _ids_in_groups(groups: Tensor, vocabulary: int) -> Tensor:
    """Vocabulary ids of the logits in each group (`... member`). Ids of the last group may exceed the vocabulary."""
    members = torch.arange(min(GROUP_SIZE, vocabulary), device=groups.device)
    return groups[..., None] * GROUP_SIZE + members


def _top_id(z: Tensor, group_maxima: Tensor) -> Tensor:
    """The id with the largest logit. Of equal logits it is the lowest id, because argmax takes the first."""
    vocabulary = z.shape[-1]
    ids = _ids_in_groups(group_maxima.argmax(-1), vocabulary).clamp_(max=vocabulary - 1)
    top_member = z.gather(-1, ids).argmax(-1, keepdim=True)
    return ids.gather(-1, top_member)[..., 0]


def _count_above(z: Tensor, group_maxima: Tensor, target_id: Tensor, target_logit: Tensor, ranked: int) -> Tensor:
    """Number of ids that rank above the target, at most `ranked`. Among equal logits the lower id ranks first."""
    vocabulary = z.shape[-1]
    # The target's logit is one of z, so that the comparison in its dtype is exact.
    target_logit = target_logit.to(z.dtype)[..., None]
    # `ranked` groups with a larger maximum already suffice. Of the others, the groups with ids above the target are read.
    is_counted = (group_maxima > target_logit).sum(-1) < ranked
    count = torch.full(is_counted.shape, ranked, device=z.device).masked_fill(is_counted, 0)
    groups_to_read = ((group_maxima >= target_logit) & is_counted[..., None]).nonzero()
    for group_indices in torch.split(groups_to_read, GROUPS_AT_ONCE):
        token, layer, group = group_indices.T
        ids = _ids_in_groups(group, vocabulary)
        is_lower_id = ids < target_id[token, layer, None]
        exists = ids < vocabulary
        logits = z[token[:, None], layer[:, None], ids.clamp_(max=vocabulary - 1)]
        logit_of_target = target_logit[token, layer]
        is_above = ((logits > logit_of_target) | ((logits == logit_of_target) & is_lower_id)) & exists
        count.index_put_((token, layer), is_above.sum(1), accumulate=True)
    return count.clamp(max=ranked)


def _logits_and_ranks(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logit of an id at each layer, and its rank: 1 + the number of strictly larger logits (both `token layer`).

    Args:
        z: `token layer vocabulary`.
        ids: `token`.

    Raises:
        LayersimError: an id is not one of the head's.
    """
    vocabulary = z.shape[-1]
    if len(ids) and int(ids.max()) >= vocabulary:
        raise LayersimError(
            f"The rank of the id {int(ids.max())} is asked for, but the ids of the model's head are 0 to {vocabulary - 1}."
        )
    flat = z.flatten(0, 1)
    logits = z.gather(-1, ids[:, None, None].expand(*z.shape[:2], 1)).flatten(0, 1)
    larger = torch.empty(len(flat), dtype=torch.int64, device=z.device)
    # Some rows at a time, because a comparison of all logits would take a quarter of their memory again.
    size = max(1, block_size(z) // vocabulary)
    for start in range(0, len(flat), size):
        rows = slice(start, start + size)
        larger[rows] = (flat[rows] > logits[rows]).sum(-1)
    return logits.view(z.shape[:2]), 1 + larger.view(z.shape[:2])


def bad_logits(lens: dict[str, Tensor]) -> Tensor:
    """Number of positions with non-finite logits (`layer`)."""
    return (~(lens["best_prob"].isfinite() & lens["entropy"].isfinite())).sum(1)


def _memo_key(normed: bool, heads: LayerHeads | None) -> str:
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
    for key, cached in view.memo.items():
        # A logit lens of any target has the predictions.
        if key.startswith(f"{_memo_key(normed, heads)} "):
            lens = cached["lens"]
            return first_final(lens["best"]), bad_logits(lens)
    assert view.unembed is not None
    x, needs_norm = head_input(view, view.activations[1:], normed)
    heads = None if heads is None else heads.fitting(view.unembed, x)
    layers, tokens = x.shape[:2]
    # Tokens whose prediction has been the final one at all layers so far.
    agreeing = torch.arange(tokens, device=x.device)
    saturation = torch.full((tokens,), layers - 1, device=x.device)
    bad = torch.zeros(layers, dtype=torch.int64, device=x.device)
    final_ids, bad[-1] = _top_ids(view, x[-1], needs_norm, memory_mb)
    for layer in range(layers - 2, -1, -1):
        ids, bad[layer] = _top_ids(view, x[layer, agreeing], normed and needs_norm, memory_mb, heads, layer)
        agreeing = agreeing[ids == final_ids[agreeing]]
        saturation[agreeing] = layer
    return saturation, bad


def first_final(best: Tensor) -> Tensor:
    """Index of the first block whose most likely id stays the same until the last block, for each token.

    Args:
        best: `layer token`, the most likely ids.
    """
    agrees = (best == best[-1]).long()
    # Number of layers that agree without a gap, from the last one down.
    agreeing_layers = agrees.flip(0).cumprod(0).sum(0)
    return len(best) - agreeing_layers


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
    sides: list[Side] = []
    for view in (first, second):
        assert view.unembed is not None
        x, needs_norm = head_input(view, view.activations[1:], True)
        to_logits = partial(logits_of_layers, view.unembed, needs_norm=needs_norm, normed=True)
        sides.append((view.unembed, x, to_logits))
    _, first_x, _ = sides[0]
    layers, tokens = first_x.shape[:2]
    device = on_float64_device(first_x).device
    best = torch.zeros(2, layers, tokens, dtype=torch.int64, device=device)
    kl = torch.zeros(layers, tokens, dtype=torch.float64, device=device)
    bad = torch.zeros(layers, dtype=torch.int64, device=device)
    for span, chunk in _chunks(sides, memory_mb):
        first_logits, second_logits = (on_float64_device(z.flatten(0, 1)).to(device) for z in chunk)
        for model, logits in enumerate((first_logits, second_logits)):
            top, ids = logits.max(-1)
            best[model, :, span] = ids.view(-1, layers).T
            bad += (~top.isfinite()).view(-1, layers).sum(0)
        kl[:, span] = kl_divergence(first_logits, second_logits).view(-1, layers).T
    return {"best": best, "kl": kl, "bad": bad}


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(softmax(p) || softmax(q)) of each row of logits, in nats, float64; exactly 0 for equal logits.

    Args:
        p: logits `row vocabulary`, in any dtype.
        q: logits of the same shape. An id of logit -inf, such as one that a model masks, makes the divergence infinite unless p
            excludes it too.
    """
    divergence = torch.empty(len(p), dtype=torch.float64, device=p.device)
    size = max(1, block_size(p) // p.shape[-1])
    for start in range(0, len(p), size):
        rows = slice(start, start + size)
        log_p = torch.log_softmax(p[rows].double(), -1)
        log_q = torch.log_softmax(q[rows].double(), -1)
        probability = log_p.exp()
        divergence[rows] = torch.where(probability > 0, probability * (log_p - log_q), 0).sum(-1)
    # Rounding may give a value below 0.
    return divergence.clamp_(min=0)


def _top_ids(
    view: View, x: Tensor, normed: bool, memory_mb: float, heads: LayerHeads | None = None, layer: int = 0
) -> tuple[Tensor, Tensor]:
    """Top-1 prediction for each row of x, and number of rows whose largest logit is not finite."""
    unembed = view.unembed
    assert unembed is not None

    def to_logits(rows: Tensor, spare: Tensor | None) -> Tensor:
        if heads is None:
            return unembed(rows, normed, spare)
        return heads.logits(unembed, rows, layer, normed)

    top_ids = torch.empty(len(x), dtype=torch.int64, device=x.device)
    bad = torch.tensor(0, device=x.device)
    for span, [z] in _chunks([(unembed, x, to_logits)], memory_mb):
        top, ids = z.max(-1)
        top_ids[span] = ids.to(x.device)
        bad += (~top.isfinite()).sum().to(x.device)
    return top_ids, bad


def _chunks(sides: Sequence[Side], memory_mb: float) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield pairs: a slice of the tokens, and a list with each model's logits at these tokens.

    The first chunk is one token, and its memory gives the size of the others.

    Args:
        sides: for each model its logit lens, the residuals `... token width`, and a function from residuals and spare memory to
            logits.
        memory_mb: memory for the logits of one chunk.
    """
    _, first_x, _ = sides[0]
    tokens = first_x.shape[-2]
    start = 0
    step = 1
    spares: list[Tensor | None] = [None] * len(sides)
    while start < tokens:
        span = slice(start, start + step)
        logits = [to_logits(x[..., span, :], spare=spare) for (_, x, to_logits), spare in zip(sides, spares, strict=True)]
        for z in logits:
            need_classes(z.shape[-1])
        yield span, logits
        if start == 0:
            memory_of_side = memory_mb / len(sides) * 2**20
            tokens_that_fit = min(int(memory_of_side / (z[0].numel() * z.element_size())) for z in logits)
            step = min(max(1, tokens_that_fit), max(tokens - 1, 1))
            for number, ((unembed, _, _), z) in enumerate(zip(sides, logits, strict=True)):
                # Only a plain linear layer can write into memory.
                if unembed.linear is not None:
                    rows = step * z[0].numel() // z.shape[-1]
                    spares[number] = z.new_empty(rows, z.shape[-1])
        start = span.stop
