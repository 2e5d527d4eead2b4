"""Properties of a model that the reading of data depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ModelInputs(Protocol):
    """The inputs that a model accepts, and its tokenizer; see the fields of `Model`."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def vocabulary(self) -> int | None: ...
    @property
    def context(self) -> int | None: ...
    @property
    def inputs(self) -> Mapping[str, int | None]: ...
    @property
    def pads(self) -> tuple[int, ...]: ...
    @property
    def ends(self) -> tuple[int, ...]: ...
