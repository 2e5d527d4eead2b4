"""The limit of memory for the sums of an analyzer, `max_memory_gb`."""

from __future__ import annotations

from ..core.errors import LayersimError


def need_memory(sums: str, need: float, limit: float, instead: str = "") -> None:
    """Raise an error if sums need more memory than the limit.

    A plain function: kernels that call it are serialised by value and also run on a server.

    Args:
        sums: what needs the memory, in the plural, for the message.
        need: in GB.
        limit: `max_memory_gb`.
        instead: what needs less, as a sentence.

    Raises:
        LayersimError: the sums need more.
    """
    if not need <= limit:
        raise LayersimError(f"{sums} take {need:.3g} GB; `max_memory_gb` is {limit:g}. {instead}".rstrip())
