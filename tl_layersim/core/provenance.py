"""Provenance: the record of the model, data, options and versions that a result was computed with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .argument_checks import typed
from .errors import without_secrets

# Fields that describe a model; those of several models are joined.
OF_MODELS = ("model", "config_hash", "weights_hash", "changes", "source", "basis", "dtype")
JOINT = " | "


@typed
@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The model, data, options and versions that a result was computed with. Several models are written as "first | second".

    Attributes:
        model: name or path of the model as it was loaded.
        config_hash: first 12 hex digits of the SHA-256 of the model's configuration.
        weights_hash: checksum of all bytes of the model's parameters and buffers, and of the classes and settings of its
            modules, 12 hex digits; empty if the weights are in another process, or divided over processes.
        changes: hooks that others registered on the model's modules, forward methods that were replaced, and edits of nnsight:
            where, the function's name, and a digest of code and captured values; empty if there are none.
        source: class of the model, such as `HookedTransformer` or `TransformersModel (remote='local')`.
        basis: basis of the residual stream (raw weights, folded norms, ...). The final norm is never applied.
        dtype: of the model's activations.
        data: SHA-256 of the tokens and their attention mask, row by row.
        tokens: number of counted positions.
        sequences: number of rows of tokens.
        batches: number of forward passes.
        seed: of random draws, None without any.
        options: of the analyzer and of the data (`seq_len`, `pack`, `skip_first`, `batch_size`, ...).
        versions: of the packages that the numbers depend on.
        seconds: wall time of the whole run.
        warnings: that were given when the result was computed.
    """

    model: str
    config_hash: str
    weights_hash: str
    source: str
    basis: str
    dtype: str
    data: str
    tokens: int
    sequences: int
    batches: int
    seed: int | None
    options: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    warnings: tuple[str, ...] = ()
    changes: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", without_secrets(self.model))

    def swapped(self) -> Provenance:
        """The record of the same run with its two models in the other order."""
        parts = {name: getattr(self, name).split(JOINT) for name in OF_MODELS}
        swapped: dict[str, Any] = {name: JOINT.join(own[len(own) // 2 :] + own[: len(own) // 2]) for name, own in parts.items()}
        return replace(self, **swapped)
