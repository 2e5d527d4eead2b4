"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import itertools

import numpy as np

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
# A head for views that no model made: a layer norm without weights, and an unembedding `vocabulary d_model`.
WORDS = 300
HEAD = np.random.default_rng(7).normal(size=(WORDS, 8))


def layer_norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def tokens_of(count: int) -> np.ndarray:
    """The tokens of a batch that says nothing of its tokens."""
    return np.arange(count) % 12


def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


def oracle_cosine(batches: list[np.ndarray], center: str = "dataset") -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    layers, tokens, _ = x.shape
    mean = np.array([sum(x[layer]) / tokens for layer in range(layers)])
    c = x - mean[:, None] if center == "dataset" else x
    cos = np.array([[[cosine_of(c[a, t], c[b, t]) for t in range(tokens)] for b in range(layers)] for a in range(layers)])
    ratio = [
        [np.linalg.norm(x[a, t]) / np.linalg.norm(x[a + 1, t] - x[a, t]) for t in range(tokens)] for a in range(layers - 1)
    ]
    rises = [all(cos[a, -1, t] < cos[a + 1, -1, t] for a in range(layers - 1)) for t in range(tokens)]
    return {
        "values": np.array([[sum(cos[a, b]) / tokens for b in range(layers)] for a in range(layers)]),
        "std": np.array([[np.std(cos[a, b]) for b in range(layers)] for a in range(layers)]),
        # The diagonal is 1 by definition, however it rounds.
        "below_zero": np.array([[sum(cos[a, b] < 0) / tokens for b in range(layers)] for a in range(layers)]),
        "to_last": np.array([[np.quantile(cos[a, -1], q, method="inverted_cdf") for a in range(layers)] for q in LEVELS]),
        "adjacent": np.array(
            [[np.quantile(cos[a, a + 1], q, method="inverted_cdf") for a in range(layers - 1)] for q in LEVELS]
        ),
        "norm_ratio": np.array([sum(row) / tokens for row in ratio]),
        "monotone_share": np.array(sum(rises) / tokens),
        "mean": mean if center == "dataset" else np.zeros((layers, 0)),
    }


def hsic_1(k: np.ndarray, m: np.ndarray) -> float:
    """Song et al. 2012, equation 5, term by term."""
    n = len(k)
    k, m = k.copy(), m.copy()
    for i in range(n):
        k[i, i] = m[i, i] = 0.0
    one = np.ones(n)
    first = np.trace(k @ m)
    second = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    third = 2 / (n - 2) * (one @ k @ m @ one)
    return (first + second - third) / (n * (n - 3))


def hsic_0(k: np.ndarray, m: np.ndarray) -> float:
    """The classical biased estimator tr(K H M H) / (n - 1)^2."""
    n = len(k)
    h = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(k @ h @ m @ h)) / (n - 1) ** 2


def oracle_cka(
    batches: list[np.ndarray], others: list[np.ndarray] | None = None, biased: bool = False, exact: bool = False
) -> dict[str, np.ndarray]:
    """Each batch is one minibatch; exact takes all of them together as one."""
    others = batches if others is None else others
    if exact:
        batches, others = [np.concatenate(batches, axis=1)], [np.concatenate(others, axis=1)]
    hsic = hsic_0 if biased else hsic_1

    def mean_hsic(xs: list[np.ndarray], ys: list[np.ndarray]) -> float:
        """The mean over minibatches; where they differ in size, each weighs as many pairs of samples as it has."""
        weight = [(len(x) - 1) ** 2 if biased else len(x) * (len(x) - 3) for x in xs]
        return sum(w * hsic(x @ x.T, y @ y.T) for w, x, y in zip(weight, xs, ys, strict=True)) / sum(weight)

    rows, columns = len(batches[0]), len(others[0])
    values = np.zeros((rows, columns))
    for a in range(rows):
        for b in range(columns):
            x, y = [batch[a] for batch in batches], [batch[b] for batch in others]
            values[a, b] = mean_hsic(x, y) / np.sqrt(mean_hsic(x, x) * mean_hsic(y, y))

    def effective(parts: list[np.ndarray], layer: int) -> float:
        r = [np.sum((token - part[layer].mean(0)) ** 2) for part in parts for token in part[layer]]
        return sum(r) ** 2 / sum(one**2 for one in r)

    return {
        "values": values,
        "effective_samples": np.array([effective(batches, a) for a in range(rows)]),
        "column_effective_samples": np.array([effective(others, b) for b in range(columns)]),
    }


def arccos_distance(values: np.ndarray) -> float:
    """Brown et al. 2023, equation 2, over the outputs of blocks."""
    return float(np.sqrt(sum(np.arccos(np.clip(values[i, i], -1, 1)) ** 2 for i in range(1, len(values)))))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def say(x: np.ndarray, last: bool, norm: bool, head: np.ndarray) -> np.ndarray:
    """Logits of one token at one layer; the last layer always has the norm."""
    return head @ (layer_norm(x) if norm or last else x)


def next_of(batches: list[np.ndarray]) -> list[int | None]:
    """The right answers: each batch is one row of tokens, whose last has none."""
    out: list[int | None] = []
    for batch in batches:
        out += [int(t) for t in tokens_of(batch.shape[1])[1:]] + [None]
    return out


def lens_by_token(
    batches: list[np.ndarray], targets: list[int | None], norm: bool = True, head: np.ndarray = HEAD
) -> list[list[dict[str, float]]]:
    """`token layer`: everything that a layer says at a token, from its logits, one by one."""
    x = np.concatenate(batches, axis=1)
    table = []
    for t in range(x.shape[1]):
        logits = [say(x[layer, t], layer == len(x) - 1, norm, head) for layer in range(1, len(x))]
        p_last = softmax(logits[-1])
        row = []
        for z in logits:
            p = softmax(z)
            said = int(np.argmax(z))
            one = {
                "said": said,
                "top": p[said],
                "entropy": -sum(q * np.log(q) for q in p if q > 0),
                "kl": sum(a * (np.log(a) - np.log(b)) for a, b in zip(p_last, p, strict=True) if a > 0),
            }
            y = targets[t]
            if y is not None:
                # Sorted by logit downwards, and by id among equals.
                order = sorted(range(len(z)), key=lambda v, z=z: (-z[v], v))
                one |= {"p": p[y], "place": order.index(y)}
            row.append(one)
        table.append(row)
    return table


def oracle_logit_lens(
    batches: list[np.ndarray],
    targets: list[int | None] | None = None,
    norm: bool = True,
    ks: tuple[int, ...] = (1, 5),
    head: np.ndarray = HEAD,
) -> dict[str, np.ndarray]:
    table = lens_by_token(batches, targets or next_of(batches), norm, head)
    known = [row for row in table if "p" in row[0]]
    layers = range(len(table[0]))

    def mean(of, rows) -> np.ndarray:
        return np.array([sum(of(row[layer], row) for row in rows) / len(rows) for layer in layers])

    cross_entropy = mean(lambda one, row: -np.log(one["p"]), known)
    rises = [all(a["p"] < b["p"] for a, b in itertools.pairwise(row)) for row in known]
    return {
        "values": cross_entropy,
        "perplexity": np.exp(cross_entropy),
        "accuracy": mean(lambda one, row: one["place"] == 0, known),
        "top_k_accuracy": np.array([mean(lambda one, row, k=k: one["place"] < k, known) for k in ks]),
        "target_probability": mean(lambda one, row: one["p"], known),
        "agreement": mean(lambda one, row: one["said"] == row[-1]["said"], table),
        "kl_to_final": mean(lambda one, row: one["kl"], table),
        "entropy": mean(lambda one, row: one["entropy"], table),
        "monotone_share": np.array(sum(rises) / len(rises)),
    }


def oracle_saturation(
    batches: list[np.ndarray], norm: bool = True, center: bool = False, head: np.ndarray = HEAD
) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    mean = x.mean(1, keepdims=True) if center else 0 * x[:, :1]
    table = lens_by_token(batches, [None] * x.shape[1], norm, head)
    blocks = len(table[0])
    events: list[list[float]] = [[] for _ in range(blocks)]
    for t, row in enumerate(table):
        smallest = min(layer for layer in range(blocks) if all(row[m]["said"] == row[-1]["said"] for m in range(layer, blocks)))
        here, last = x[smallest + 1, t] - mean[smallest + 1, 0], x[-1, t] - mean[-1, 0]
        events[smallest].append(cosine_of(here, last))
    counts = np.array([len(one) for one in events], dtype=float)
    cosine = np.array([np.mean(one) if one else np.nan for one in events])
    early = [layer for layer in range(blocks - 1) if events[layer]]
    correlation = np.nan
    if len(early) > 2:
        a, b = counts[early] - counts[early].mean(), cosine[early] - cosine[early].mean()
        correlation = (a @ b) / np.sqrt((a @ a) * (b @ b)) if a @ a > 0 and b @ b > 0 else np.nan
    return {
        "values": counts,
        "cumulative": np.array([counts[: i + 1].sum() for i in range(blocks)]) / counts.sum(),
        "early_share": np.array(counts[:-1].sum() / counts.sum()),
        "cosine_to_last": cosine,
        "correlation": np.array(correlation),
    }


def oracle_exit_curve(
    batches: list[np.ndarray],
    targets: list[int | None] | None = None,
    thresholds: tuple[float, ...] | None = None,
    norm: bool = True,
    head: np.ndarray = HEAD,
) -> dict[str, np.ndarray]:
    thresholds = thresholds or (*(i / 20 for i in range(20)), 0.97, 0.98, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99999, 1.0)
    table = lens_by_token(batches, targets or next_of(batches), norm, head)
    blocks = len(table[0])
    out: dict[str, list] = {"values": [], "accuracy": [], "agreement": [], "perplexity": [], "speedup": []}
    for threshold in thresholds:
        layers = [next((i for i, one in enumerate(row) if one["top"] > threshold), blocks - 1) for row in table]
        emitted = [row[layer] for row, layer in zip(table, layers, strict=True)]
        right = [one for one in emitted if "p" in one]
        out["values"].append([layers.count(i) for i in range(blocks)])
        out["accuracy"].append(np.mean([one["place"] == 0 for one in right]))
        out["agreement"].append(np.mean([one["said"] == row[-1]["said"] for one, row in zip(emitted, table, strict=True)]))
        out["perplexity"].append(np.exp(np.mean([-np.log(one["p"]) for one in right])))
        out["speedup"].append(blocks * len(table) / sum(layer + 1 for layer in layers))
    return {name: np.array(value, dtype=float) for name, value in out.items()}


def line_shape_score(path: np.ndarray) -> float:
    """Aubry et al. 2025, equations 15 and 16: the path made of unit steps, and how far it comes."""
    tilde = path[0].copy()
    for before, after in itertools.pairwise(path):
        tilde = tilde + (after - before) / np.sqrt(((after - before) ** 2).sum())
    return (len(path) - 1) / np.sqrt(((tilde - path[0]) ** 2).sum())


def oracle_trajectory(batches: list[np.ndarray], window: int = 0) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    paths = [x[:, t] for t in range(x.shape[1])]
    norm = np.array([[np.sqrt((v**2).sum()) for v in path] for path in paths])
    update = np.array([[np.sqrt(((b - a) ** 2).sum()) for a, b in itertools.pairwise(path)] for path in paths])
    alpha = np.log(norm[:, 1:] / norm[:, :-1])
    numbers = {
        "lss": np.array([line_shape_score(path) for path in paths]),
        "expodistance": np.array([np.var(a) / np.mean(a) ** 2 for a in alpha]),
        "equidistance": np.array([np.std(u) / np.mean(u) for u in update]),
    }

    def quantiles(values: np.ndarray) -> np.ndarray:
        return np.array([np.quantile(values, q, axis=0, method="inverted_cdf") for q in LEVELS])

    windows = [[line_shape_score(path[i : i + window + 1]) for i in range(len(x) - window)] if window else [] for path in paths]
    out = {
        "values": norm.mean(0),
        "norm_std": norm.std(0),
        "norm_quantiles": quantiles(norm),
        "update_norm": update.mean(0),
        "update_norm_std": update.std(0),
        "update_norm_quantiles": quantiles(update),
        "growth": alpha.mean(0),
        "windowed_lss": np.array(windows).mean(0),
        "windowed_lss_std": np.array(windows).std(0),
    }
    for name, values in numbers.items():
        out |= {f"{name}_mean": values.mean(), f"{name}_std": values.std(), f"{name}_quantiles": quantiles(values)}
    return {name: np.asarray(value) for name, value in out.items()}


def oracle_neural_collapse(
    batches: list[np.ndarray], labels: list[int | None] | None = None, classes: int = 10
) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    labels = labels or next_of(batches)
    counted = {c: labels.count(c) for c in labels if c is not None}
    chosen = sorted(counted, key=lambda c: (-counted[c], c))[:classes]
    nc1, within, between = [], [], []
    for layer in x:
        groups = [np.array([layer[t] for t in range(len(labels)) if labels[t] == c]) for c in chosen]
        everything = np.concatenate(groups)
        means = [group.mean(0) for group in groups]
        s_w = sum(np.outer(h - m, h - m) for group, m in zip(groups, means, strict=True) for h in group) / len(everything)
        s_b = sum(np.outer(m - everything.mean(0), m - everything.mean(0)) for m in means) / len(chosen)
        nc1.append(np.trace(s_w @ np.linalg.pinv(s_b, rcond=1e-12)) / len(chosen))
        within.append(np.trace(s_w))
        between.append(np.trace(s_b))
    return {
        "values": np.array(nc1),
        "within": np.array(within),
        "between": np.array(between),
        "samples": np.array([counted[c] for c in chosen], dtype=float),
    }


def own_jacobian(x: np.ndarray, layer: int, t_in: int, t_out: int) -> np.ndarray:
    """D f(X)_{t_out} / d x_{t_in} of the blocks in `own_blocks.py`, by hand."""
    from .own_blocks import weights

    w0, w1, w2 = (w.numpy() for w in weights(layer, x.shape[-1]))
    mean = sum(x[: t_out + 1]) / (t_out + 1)
    slope = 1 - np.tanh(w1 @ x[t_out] + w0 @ mean) ** 2
    inner = w0 / (t_out + 1) + (w1 if t_in == t_out else 0)
    return w2 @ (slope[:, None] * inner)


def coupling_matrix(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """Aubry et al. 2025, equation 10: a in the top singular vectors of b."""
    u, _, vt = np.linalg.svd(b)
    return np.array([[u[:, i] @ a @ vt[j] for j in range(k)] for i in range(k)])


def miscoupling(a: np.ndarray, normalize: bool = True) -> float:
    """Equations 13 and 14."""
    off = sum(a[i, j] ** 2 for i in range(len(a)) for j in range(len(a)) if i != j)
    return float(np.sqrt(off) / (np.linalg.norm(a) if normalize else 1.0))


def random_frames(blocks: int, d: int, k: int, seed: int = 0, draws: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    """The package's own draws: what is checked against an oracle is what it does with them."""
    import torch

    frames = []
    for number in range(draws * (blocks + 1)):
        generator = torch.Generator().manual_seed(seed + 7919 * number)
        frames.append(np.linalg.qr(torch.randn(-(-k // 16) * 16, d, generator=generator, dtype=torch.float64).numpy()[:k].T)[0])
    each = [frames[n : n + blocks + 1] for n in range(0, len(frames), blocks + 1)]
    return [(np.array(one[:blocks]), one[blocks]) for one in each]


def oracle_block_coupling(batches: list[np.ndarray], k: int = 10) -> dict[str, np.ndarray]:
    """Each batch is one prompt."""
    blocks, d = len(batches[0]) - 1, batches[0].shape[-1]
    k = min(k, d)
    draws = random_frames(blocks, d, k)
    values, null, spectra, lengths = [], [], [], []
    for x in batches:
        last = x.shape[1] - 1
        js = [own_jacobian(x[layer], layer, last, last) for layer in range(blocks)]
        values.append([[miscoupling(coupling_matrix(a, b, k)) for b in js] for a in js])
        random = [[np.mean([miscoupling(left[j].T @ a @ right) for left, right in draws]) for j in range(blocks)] for a in js]
        null.append(np.where(np.eye(blocks), 0.0, random))
        spectra.append([np.linalg.svd(a)[1][:k] for a in js])
        lengths.append(last + 1)
    values, null, spectra = np.array(values), np.array(null), np.array(spectra)
    score = [np.mean([1 - v[i, j] for i in range(blocks) for j in range(blocks) if i != j]) for v in values]
    octaves = sorted({int(np.log2(n)) for n in lengths})
    by = [[s for s, n in zip(score, lengths, strict=True) if int(np.log2(n)) == octave] for octave in octaves]
    return {
        "values": values.mean(0),
        "defined": np.ones((blocks, blocks)),
        "std": values.std(0),
        "coupling": 1 - values.mean(0),
        "null": null.mean(0),
        "by_k": values.mean(0)[None],
        "null_by_k": null.mean(0)[None],
        "singular_values": spectra.mean(0),
        "singular_values_std": spectra.std(0),
        "by_length": np.array([np.mean(one) for one in by]),
        "by_length_std": np.array([np.std(one) for one in by]),
        "length_count": np.array([float(len(one)) for one in by]),
        "residual": np.zeros(blocks),
        "step_error": np.zeros(blocks),
        # These blocks take no cache of keys and values.
        "whole_rows": np.ones(blocks),
    }
