"""Rows of a Ray data set in the order of the data, which can be read several times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


def is_ray_dataset(data: Any) -> bool:
    """Whether data is a data set of Ray, without importing Ray."""
    return any(f"{cls.__module__}.{cls.__name__}".startswith("ray.data.") for cls in type(data).__mro__) and hasattr(
        data, "iter_rows"
    )


@dataclass(frozen=True)
class OrderedRows:
    """The rows of a Ray data set, read in the order of the data each time they are iterated over.

    Attributes:
        dataset: a `ray.data.Dataset`.
    """

    dataset: Any

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        with _order_preserved(self.dataset):
            yield from self.dataset.iter_rows()


@contextmanager
def _order_preserved(dataset: Any) -> Iterator[None]:
    """A context in which Ray hands on blocks in the order of the data, not as they become ready."""
    options = dataset.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield
    finally:
        options.preserve_order = before
