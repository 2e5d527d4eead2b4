"""Seals of results: a request's ticket and a checksum, which a server returns with the result; and forms of small results.

A sealed result is the triple of ticket, checksum and value. The functions are shipped to servers by value: they need torch and
Python's library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.integer_hash import mixed

# Checksums are smaller than this number.
MODULUS = 2**61 - 1


def ticket_of(options: Mapping[str, Any]) -> str | None:
    """The ticket of the request that a trace sends; None if the trace runs in this process.

    Args:
        options: keyword arguments of the trace.
    """
    ticket: str | None = getattr(options.get("backend"), "ticket", None)
    return ticket


def sealed(value: Any, ticket: str | None) -> Any:
    """Add ticket and checksum to a result; without a ticket, return the result as it is.

    Args:
        value: nested dicts, lists and tuples of tensors, texts and numbers.
        ticket: ticket of the request.

    Examples:
        >>> sealed({"a": 1}, None)
        {'a': 1}
        >>> ticket, number, value = sealed({"a": 1}, "t")
        >>> ticket, number == seal_sum({"a": 1}), number == seal_sum({"a": 2})
        ('t', True, False)
    """
    if ticket is None:
        return value
    return ticket, seal_sum(value), value


def seal_sum(value: Any) -> int:
    """A number that depends on all names, dtypes, shapes and bits of a result.

    Args:
        value: see `sealed`.
    """
    parts: list[Any] = []
    if isinstance(value, dict):
        # Names have no order.
        for name in sorted(value):
            parts += [name, value[name]]
        start = 1
    elif isinstance(value, (list, tuple)):
        parts = list(value)
        start = 2
    elif isinstance(value, Tensor):
        return _checksum_of_tensor(value)
    else:
        text = f"{type(value).__name__} {value!r}"
        return _hash(torch.tensor(list(text.encode()), dtype=torch.int64))
    total = start + len(parts)
    for part in parts:
        total = (total * 1_000_003 + seal_sum(part)) % MODULUS
    return total


def _checksum_of_tensor(value: Tensor) -> int:
    flat = value.detach().cpu().contiguous().reshape(-1)
    kind = seal_sum(f"{value.dtype} {list(value.shape)}")
    # Eight bytes at a time, or one.
    bits = flat.view(torch.int64) if flat.element_size() == 8 else flat.view(torch.uint8).long()
    return (kind * 1_000_003 + _hash(bits)) % MODULUS


def _hash(values: Tensor) -> int:
    """Hash of integers that depends on their order."""
    positions = torch.arange(len(values))
    return int(mixed(mixed(values) + positions).sum()) % MODULUS


def is_shape(value: Any) -> bool:
    """Whether a result is the shape of a tensor, a list of up to eight sizes."""
    if not isinstance(value, list) or not 0 < len(value) <= 8:
        return False
    return all(type(size) is int and size >= 0 for size in value)


def are_two_norms(value: Any) -> bool:
    """Whether a result is a tensor of two floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) == (2,)


def are_tensors(value: Any) -> bool:
    """Whether a result is a dict of tensors."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(tensor, Tensor) for tensor in value.values())
