"""Batches that are read and tokenised once, for runs with several passes over the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core.errors import LayersimError, in_words
from .batches import Batch, Batches

# Most memory that the batches of a run may take between its passes. Larger data is read again for each pass.
CACHE_BYTES = 256_000_000
# Memory of a row's origin, a tuple of Python numbers, beside its tensors.
ORIGIN_BYTES = 200


@dataclass
class _Store:
    """Batches kept in memory, their size in bytes, and whether they are all batches of the data."""

    batches: list[Batch] = field(default_factory=list)
    size: int = 0
    complete: bool = False

    def add(self, batch: Batch) -> None:
        """Keep one more batch; above `CACHE_BYTES` drop all."""
        self.size += _memory_of(batch)
        if self.fits:
            self.batches.append(batch)
        else:
            self.batches.clear()

    @property
    def fits(self) -> bool:
        """Whether all batches that were read so far are within `CACHE_BYTES`."""
        return self.size <= CACHE_BYTES


@dataclass(frozen=True)
class CachedBatches(Batches):
    """Batches that the first pass over the data keeps in memory, so that later passes neither read nor tokenise it again.

    Data of more than `CACHE_BYTES` is not kept, and every pass reads it.

    Examples:
        >>> from tl_layersim.demo import demo_model, demo_text
        >>> from tl_layersim.models.hooked import HookedSource
        >>> batches = CachedBatches(iter(demo_text()[:3]), HookedSource(demo_model()).model)
        >>> len(list(batches)), len(list(batches))
        (1, 1)
    """

    _store: _Store = field(default_factory=_Store, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, batches: Batches) -> CachedBatches:
        """Wrap batches in a cache, with the same data, model and options."""
        return cls(batches.data, batches.model, batches.options, batches.labelled, batches.count_positions, batches.pool_rows)

    @property
    def one_shot(self) -> bool:
        """Whether the data can be read only once: an iterator whose batches are not all in memory."""
        return super().one_shot and not self._store.complete

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._store.batches) if self._store.complete else self._read()

    def read_ahead(self, reader: str, do: str) -> None:
        """Read an iterator before the first pass over it.

        Args:
            reader: what needs several passes, for the refusal.
            do: what to do instead, for the refusal.

        Raises:
            LayersimError: its batches take more than `CACHE_BYTES`.
        """
        for _ in self:
            if not self._store.fits:
                raise LayersimError(
                    f"`data` can be read only once, and {reader} needs several passes over it.",
                    given=f"{type(self.data).__name__} of more than {in_words(CACHE_BYTES)} of token rows, too many to keep",
                    expected="data that can be iterated over again: a list, a tensor, a datasets.Dataset",
                    do=do,
                )

    def _read(self) -> Iterator[Batch]:
        store = self._store
        store.batches, store.size = [], 0
        for batch in super().__iter__():
            store.add(batch)
            yield batch
        store.complete = store.fits


def _memory_of(batch: Batch) -> int:
    tensors = (batch.tokens, batch.attention, batch.counted, batch.labels, *batch.inputs.values())
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    return held + ORIGIN_BYTES * len(batch.origins)
