"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np


def own_jacobian(x: np.ndarray, layer: int, t_in: int, t_out: int) -> np.ndarray:
    """D f(X)_{t_out} / d x_{t_in} of the blocks in `own_blocks.py`, by hand."""
    from ..inputs.own_blocks import weights

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


def alignment(a: np.ndarray, b: np.ndarray) -> float:
    """Equation 12, |B'A|_F^2 / k: the mean squared length of the columns of A after their projection onto the span of B."""
    return float(np.mean([sum((a[:, i] @ b[:, j]) ** 2 for j in range(b.shape[1])) for i in range(a.shape[1])]))


def linear_path(path: np.ndarray, jacobians: list[np.ndarray]) -> tuple[list[float], list[float]]:
    """Equations 20 and 23: relative errors of prod (I + J) x^0 after each block, and of (I + J) x as an update."""
    y, errors, updates = path[0], [], []
    for before, after, jacobian in zip(path[:-1], path[1:], jacobians, strict=True):
        y = (np.eye(len(y)) + jacobian) @ y
        errors.append(np.linalg.norm(y - after) / np.linalg.norm(after))
        updates.append(np.linalg.norm(before + jacobian @ before - after) / np.linalg.norm(after - before))
    return errors, updates


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
    aligned, errors, shares = [], [], []
    for x in batches:
        last = x.shape[1] - 1
        js = [own_jacobian(x[layer], layer, last, last) for layer in range(blocks)]
        values.append([[miscoupling(coupling_matrix(a, b, k)) for b in js] for a in js])
        random = [[np.mean([miscoupling(left[j].T @ a @ right) for left, right in draws]) for j in range(blocks)] for a in js]
        null.append(np.where(np.eye(blocks), 0.0, random))
        spectra.append([np.linalg.svd(a)[1][:k] for a in js])
        lengths.append(last + 1)
        bases = [np.linalg.svd(a) for a in js]
        left, right = [u[:, :k] for u, _, _ in bases], [vt[:k].T for _, _, vt in bases]
        aligned.append(
            [[[alignment(a, b) for b in of_b] for a in of_a] for of_a, of_b in ((left,) * 2, (right,) * 2, (left, right))]
        )
        errors.append(linear_path(x[:, last], js))
        unit = x[:-1, last] / np.linalg.norm(x[:-1, last], axis=1, keepdims=True)
        shares.append([[(basis.T @ v) ** 2 for basis, v in zip(side, unit, strict=True)] for side in (left, right)])
    values, null, spectra = np.array(values), np.array(null), np.array(spectra)
    score = [np.mean([1 - v[i, j] for i in range(blocks) for j in range(blocks) if i != j]) for v in values]
    octaves = sorted({int(np.log2(n)) for n in lengths})
    by = [[s for s, n in zip(score, lengths, strict=True) if int(np.log2(n)) == octave] for octave in octaves]
    other = ~np.eye(blocks, dtype=bool)
    beside = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks))) == 1
    coupling = 1 - values.mean(0)
    return {
        "values": values.mean(0),
        "mean_coupling": np.array([coupling[other].mean(), coupling[beside].mean(), 1 - null.mean(0)[other].mean()]),
        "defined": np.ones((blocks, blocks)),
        "std": values.std(0),
        "coupling": coupling,
        "null": null.mean(0),
        "by_k": values.mean(0)[None],
        "null_by_k": null.mean(0)[None],
        "singular_values": spectra.mean(0),
        **dict(zip(("left_alignment", "right_alignment", "cross_alignment"), np.mean(aligned, 0), strict=True)),
        **dict(zip(("path_error", "update_error"), np.mean(errors, 0), strict=True)),
        **dict(zip(("left_share", "right_share"), np.mean(shares, 0), strict=True)),
        "by_length": np.array([np.mean(one) for one in by]),
        "length_count": np.array([float(len(one)) for one in by]),
        "residual": np.zeros(blocks),
        "step_error": np.zeros(blocks),
        # Values by prompt are an option.
        "prompt_coupling": np.zeros(0),
        "prompt_tokens": np.zeros(0),
        # These blocks take no cache of keys and values.
        "whole_rows": np.ones(blocks),
    }
