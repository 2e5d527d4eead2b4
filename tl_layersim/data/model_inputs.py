"""What data readers need to know of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ModelInputs(Protocol):
    """The inputs that a model takes, and how texts become token ids; see the fields of `Model`."""

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
