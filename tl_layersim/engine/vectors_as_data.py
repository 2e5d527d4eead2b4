"""Vectors as the data of a call, and beside the data of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import amount, brief
from ..data.data import Data
from ..data.vector_rows import VectorRows
from ..sources.open_local import OpenedModel
from ..sources.source import Source
from ..sources.vectors import VectorSource
from .run import rows_in_data


def data_of_call(data: Any, opened: Sequence[OpenedModel]) -> Data:
    """Convert the argument `data` of a call; without it, the vectors among the models are the data.

    Args:
        data: the argument.
        opened: the models of the call.

    Raises:
        LayersimError: a model needs data, or vectors do not have the samples of each other or of the data.
    """
    sources = [model.model for model in opened if isinstance(model.model, VectorSource)]
    if data is None:
        for model in opened:
            if not isinstance(model.model, VectorSource):
                raise LayersimError(
                    f"`data` is None; it must be the data that `{model.argument}` reads, {brief(model.model)}. Only calls with "
                    "vectors alone take no data."
                )
        return Data.of(_data_of_vectors(sources))
    data_of_models = Data.of(data)
    for source in sources:
        _refuse_other_data(source, data_of_models)
    return data_of_models


def readers(sources: Sequence[Source]) -> Sequence[Source]:
    """The sources whose properties decide how data is read: all but vectors, which are found by the index of a row."""
    models = [source for source in sources if not isinstance(source, VectorSource)]
    return models or sources


def _data_of_vectors(sources: Sequence[VectorSource]) -> Data:
    """The data of one source of vectors, or of several with the same samples."""
    first = sources[0]
    for source in sources[1:]:
        if source.shape != first.shape:
            shapes = " and ".join(" x ".join(map(str, each.shape)) for each in (first, source))
            raise LayersimError(
                f"The vectors have {shapes} samples (rows, or rows x positions); vectors that are compared must have the same, "
                "which are paired by index."
            )
        if None not in (first.index, source.index) and not first.index.equals(source.index):
            raise LayersimError("The tables of pandas have different indices, so their rows do not match. Align them first.")
    batch_size = min(source.as_data().batch_size for source in sources)
    data = first.as_data()
    rows = data.source
    assert isinstance(rows, VectorRows)
    rows = replace(rows, mask=_shared(sources, "mask"), labels=_shared(sources, "labels"))
    return replace(data, source=rows, groups=_shared(sources, "groups"), batch_size=batch_size)


def _shared(sources: Sequence[VectorSource], name: str) -> Any:
    """An option of `from_vectors` that sources share: that of those which have it.

    Raises:
        LayersimError: two sources have different ones.
    """
    options = [getattr(source, name) for source in sources]
    values = [value for value in options if value is not None]
    for value in values[1:]:
        first = values[0]
        are_equal = torch.equal(value, first) if isinstance(value, Tensor) else value == first
        if not are_equal:
            raise LayersimError(f"`{name}` differs between the vectors that are compared; give it to one of them, or the same.")
    return values[0] if values else None


def _refuse_other_data(source: VectorSource, data: Data) -> None:
    """Raise an error if the data beside vectors does not have one row for each of theirs.

    Args:
        source: the vectors.
        data: the data of the call.
    """
    for name in ("groups", "labels"):
        # A function that calls `analyze` passes on the data of the vectors.
        if getattr(source, name) is not None and not isinstance(data.source, VectorRows):
            remedy = "Data(..., groups=...)" if name == "groups" else "labels in the data"
            raise LayersimError(f"`{name}` of from_vectors has no effect beside `data`. Pass {remedy} instead.")
    rows = rows_in_data(data)
    if rows != source.shape[0]:
        given = "an unknown number of rows" if rows is None else amount(rows, "row")
        raise LayersimError(
            f"`data` has {given}, and {source.model.name} have {source.shape[0]}; each row of the data must have its vectors, "
            "in the same order. Pass a list, a tensor or a data set of these rows, without `pack`."
        )
