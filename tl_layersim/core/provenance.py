"""Provenance: the record of the model, data, options and versions that a result was computed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import without_secrets
from .typed import typed

if TYPE_CHECKING:
    pass


@typed
@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What was measured on what. Two models are written as "first | second".

    Attributes:
        model: name or path of the model as it was loaded.
        config_hash: first 12 hex digits of the SHA-256 of the model's configuration.
        weights_hash: the same of a sample of each of its parameters; empty where the weights are not in this process.
        source: the class that ran it, such as `HookedTransformer` or `TransformersModel (remote='local')`.
        basis: what the residual stream is written in (raw weights, folded norms, ...). No final norm is ever applied.
        dtype: of the activations before they were widened.
        data: SHA-256 of the tokens and their attention mask, row by row.
        tokens: how many positions were counted.
        sequences: how many rows of tokens the model read.
        batches: how many forward passes.
        seed: of whatever was drawn at random, None where nothing was.
        options: those of the analyzer, and of the data (`seq_len`, `pack`, `skip_first`, `batch_size`, ...).
        versions: of the packages that matter.
        seconds: wall time of the whole run.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", without_secrets(self.model))
