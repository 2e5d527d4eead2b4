"""Digests of tensors, at the speed of the memory that holds them."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .integer_hash import mixed

# Words of 8 bytes whose products with multipliers are added to one number. Intermediate products of `ROWS_ON_CPU` rows for each
# thread stay in the cache of a processor; a GPU takes more rows at a time.
WORDS = 1024
ROWS_ON_CPU = 32
ROWS_ON_GPU = 8192
# Step between states of SplitMix64: 2^64 divided by the golden ratio, as a signed integer, which torch has.
GOLDEN_STEP = 0x9E3779B97F4A7C15 - 2**64
# Bytes of a tensor up to which the sums are computed by NumPy, on one thread: a call of torch takes as long as NumPy's sum.
LARGEST_OF_NUMPY = 8 * WORDS * ROWS_ON_CPU


def digest_of_tensor(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's dtype, shape and bytes.

    Each row of `WORDS` words is multiplied with constants and added modulo 2^64, the lower and the upper half of each word
    with constants of their own: the multilinear hashing of Carter and Wegman (1979), "Universal classes of hash functions".
    Two tensors that differ have the same sum with a probability of at most 2^-32. SHA-256 joins the sums of all rows. The
    digest guards against mistakes, not attackers.

    Args:
        tensor: a tensor of any dtype, on any device.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # A tensor of one element counts as contiguous with any stride.
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    if flat.device.type == "cpu" and len(flat) <= LARGEST_OF_NUMPY:
        digest.update(_sums_by_numpy(flat.numpy()))
        return digest.digest()
    row_bytes = 8 * WORDS
    rows_at_once = ROWS_ON_GPU if flat.is_cuda else ROWS_ON_CPU * torch.get_num_threads()
    end_of_whole_rows = len(flat) - len(flat) % row_bytes
    sums = []
    for start in range(0, end_of_whole_rows, rows_at_once * row_bytes):
        stop = min(start + rows_at_once * row_bytes, end_of_whole_rows)
        sums.append(_sums_of_rows(flat[start:stop]))
    if end_of_whole_rows < len(flat):
        last_row = flat.new_zeros(row_bytes)
        last_row[: len(flat) - end_of_whole_rows] = flat[end_of_whole_rows:]
        sums.append(_sums_of_rows(last_row))
    if sums:
        digest.update(torch.cat(sums).cpu().numpy().astype("<i8").tobytes())
    return digest.digest()


def _sums_by_numpy(flat: npt.NDArray[np.uint8]) -> bytes:
    """The sums of all rows of a small tensor, as `_sums_of_rows` computes them. The last row may be shorter.

    Args:
        flat: the bytes of the tensor.
    """
    if len(flat) % 8:
        flat = np.concatenate([flat, np.zeros(-len(flat) % 8, dtype=np.uint8)])
    words = flat.view(np.int64)
    lower, upper = _multipliers_as_arrays()
    end_of_whole_rows = len(words) - len(words) % WORDS
    sums = b""
    for rows in (words[:end_of_whole_rows].reshape(-1, WORDS), words[end_of_whole_rows:].reshape(1, -1)):
        if rows.size:
            width = rows.shape[1]
            sums_of_rows = rows @ lower[:width] + (rows >> 32) @ upper[:width]
            sums += sums_of_rows.astype("<i8").tobytes()
    return sums


@cache
def _multipliers_as_arrays() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    lower, upper = _multipliers()
    return lower.numpy(), upper.numpy()


def _sums_of_rows(flat: Tensor) -> Tensor:
    """A weighted sum (int64) of each row of `WORDS` 64-bit words in a tensor of bytes."""
    if flat.storage_offset() % 8:
        # Words begin at multiples of their size.
        flat = flat.clone()
    words = flat.view(torch.int64).view(-1, WORDS)
    lower, upper = (constants.to(words.device) for constants in _multipliers())
    products = (words * lower).add_((words >> 32).mul_(upper))
    return products.sum(-1)


@cache
def _multipliers() -> tuple[Tensor, Tensor]:
    """Two tensors of `WORDS` pseudo-random odd 64-bit numbers: the numbers of SplitMix64 with seed 0, with the last bit set."""
    states = torch.arange(1, 2 * WORDS + 1) * GOLDEN_STEP
    lower, upper = (mixed(states) | 1).view(2, WORDS)
    return lower, upper
