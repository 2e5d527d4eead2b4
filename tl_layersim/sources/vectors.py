"""`from_vectors`: a source of activations that were recorded elsewhere. The smallest source of this package."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..activations.view import Kernel, Reduced, SiteBuffer, View, tokens_alone
from ..core.arguments import is_path, typed
from ..core.arrays import RESERVED, Array, as_array, open_arrays
from ..core.errors import LayersimError
from ..core.tensor_digests import digest_of_tensor
from ..core.wording import amount, brief
from ..data.batches import Batch
from ..data.data import Data
from ..data.labels import whole_numbers
from ..data.padding_masks import as_mask
from ..data.texts import groups_as_list
from ..data.value_kinds import as_plain
from ..data.vector_rows import VECTORS, VectorRows
from .identity import StoredWeights
from .model_description import ModelDescription
from .out_of_memory import reduce_batch
from .sampled_vectors import SampledVectors
from .source import CanCountPositions

# Bytes of the vectors of all sites that are read at once, and of one site while its digest is computed.
BYTES_AT_ONCE = 1 << 26
# Largest number of rows that are read at once: as many as a minibatch of CKA has samples.
MOST_ROWS_READ = 256


class VectorSource(CanCountPositions):
    """A source of vectors that were recorded elsewhere, see `from_vectors`.

    Its rows are found by their index: the vectors of row i of the data are the i-th of each site.

    Attributes:
        arrays: the vectors of each site, `row width` or `row pos width`.
        mask: `row pos`, bool, the positions that have a vector; None if all have one.
        groups: the text that each row belongs to, as in `Data`; None if each row is a text.
        labels: `row` or `row pos`, integers; None without labels.
        index: labels of the rows in tables of pandas; None without tables.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        name: str = "vectors",
        *,
        mask: Tensor | None = None,
        groups: Any = None,
        labels: Tensor | None = None,
        index: Any = None,
    ) -> None:
        self.arrays = dict(arrays)
        self.mask = mask
        self.groups = groups
        self.labels = labels
        self.index = index
        widths = self.widths
        # Sites of one width may be a residual stream, which is taken in the order of the sites.
        is_stream = len(widths) > 1 and len(set(widths)) == 1
        self._model = ModelDescription(
            name=name,
            config_hash="",
            weights=StoredVectors(self.arrays),
            source=type(self).__name__,
            basis="vectors as they are",
            dtype=str(self.dtype),
            layers=tuple(self.arrays),
            d_model=None,
            widths=widths,
            vocabulary=None,
            context=None,
            tokenizer=None,
            main_input=VECTORS,
            stream="whole" if is_stream else "none",
        )

    @property
    def model(self) -> ModelDescription:
        return self._model

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(array.shape[-1] for array in self.arrays.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """`row`, or `row pos`, of all sites."""
        first = next(iter(self.arrays.values()))
        return first.shape[:-1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations: float64 if a site has it, else float32."""
        is_wide = any(array.dtype == torch.float64 for array in self.arrays.values())
        return torch.float64 if is_wide else torch.float32

    def opened(self) -> VectorSource:
        # Vectors may have changed in place since an earlier call, so that their digest is computed again.
        source = copy.copy(self)
        source._model = self._model.as_it_is_now()
        return source

    def count_positions(self, batch: Batch) -> int:
        # Every row of `VectorRows` has its positions already.
        return batch.tokens.shape[1]

    def as_data(self) -> Data:
        """The vectors as data: rows without tokens, in batches that fit into `BYTES_AT_ONCE`."""
        rows = self.shape[0]
        positions = self.shape[1] if len(self.shape) > 1 else 1
        bytes_of_row = positions * len(self.arrays) * max(self.widths) * self.dtype.itemsize
        batch_size = min(max(BYTES_AT_ONCE // bytes_of_row, 1), MOST_ROWS_READ)
        return Data(VectorRows(rows, positions, self.mask, self.labels), groups=self.groups, batch_size=batch_size)

    def collect(self, batch: Batch) -> View:
        tokens = tokens_alone(batch)
        _refuse_cut_rows(batch)
        buffer = self._vectors_of_rows(tokens) if len(self.shape) == 1 else self._vectors_of_positions(batch)
        self._refuse_not_finite(buffer.activations, tokens)
        fields: dict[str, Any] = {}
        for name, value in tokens.token_fields().items():
            fields[name] = value.to(buffer.activations.device)
        return View(buffer.activations, sites=buffer.sites, widths=buffer.widths, **fields)

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        return reduce_batch(batch, kernels, self.collect(batch))

    def _vectors_of_rows(self, tokens: View) -> SiteBuffer:
        """Read the vector of the row of each sample.

        Args:
            tokens: the samples.
        """
        assert tokens.row is not None
        rows: list[int] = tokens.row.tolist()
        if len(set(rows)) < len(rows):
            repeated = next(row for row, count in zip(*np.unique(rows, return_counts=True), strict=True) if count > 1)
            raise LayersimError(
                f"`data` has {rows.count(repeated)} counted positions in row {repeated}, and {self.model.name} have one vector "
                "for each row. Pass Data(..., positions='mean') or 'last', or vectors of shape row x pos x width."
            )
        self._refuse_missing(rows)
        buffer = SiteBuffer(self.sites, torch.arange(len(rows)), (len(rows), 1), pooled=False)
        for site, array in enumerate(self.arrays.values()):
            buffer.put(site, _rows_of(array, rows).to(self.dtype)[:, None])
        return buffer

    def _vectors_of_positions(self, batch: Batch) -> SiteBuffer:
        """Read the vectors of all positions of the rows of a batch."""
        rows = list(batch.source_rows)
        self._refuse_missing(rows)
        length = batch.tokens.shape[1]
        has_vector = torch.ones(len(rows), self.shape[1], dtype=torch.bool) if self.mask is None else self.mask[rows]
        has_vector = _at_length(has_vector, length)
        missing = (batch.counted & ~has_vector).nonzero()
        if len(missing):
            number, position = missing[0].tolist()
            raise LayersimError(
                f"`data` counts position {position} of row {rows[number]}, where {self.model.name} of {self.shape[1]} "
                "positions have no vector, or one that `mask` leaves out."
            )
        counted = batch.counted.reshape(-1).nonzero()[:, 0]
        buffer = SiteBuffer(self.sites, counted, (len(rows), length), batch.pooled)
        for site, array in enumerate(self.arrays.values()):
            buffer.put(site, _at_length(_rows_of(array, rows).to(self.dtype), length))
        return buffer

    def _refuse_missing(self, rows: Sequence[int]) -> None:
        """Raise an error if rows of the data have no vector."""
        if rows and max(rows) >= self.shape[0]:
            raise LayersimError(f"`data` has a row {max(rows)}, and {self.model.name} have {amount(self.shape[0], 'row')}.")

    def _refuse_not_finite(self, activations: Tensor, tokens: View) -> None:
        """Raise an error that names site and rows of vectors that are not finite.

        Args:
            activations: `site sample width`.
            tokens: the samples.
        """
        # A sum is finite only if all its terms are.
        if bool(activations.sum().isfinite()):
            return
        assert tokens.row is not None
        for site, vectors in zip(self.sites, activations, strict=True):
            not_finite = ~vectors.isfinite().all(-1)
            rows = torch.unique(tokens.row[not_finite.cpu()]).tolist()
            if rows:
                named = ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")
                raise LayersimError(
                    f"Activations are NaN or infinite at {site!r} of {self.model.name}, in {amount(len(rows), 'row')} of a "
                    f"batch: {named}. Leave these rows out of all sites."
                )


class StoredVectors(StoredWeights):
    """The vectors of all sites, whose checksum is computed when it is needed.

    Args:
        arrays: the vectors, by site.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    @cached_property
    def _checksum(self) -> str:
        digest = hashlib.sha256()
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            bytes_of_row = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
            rows_at_once = max(BYTES_AT_ONCE // bytes_of_row, 1)
            for start in range(0, array.shape[0], rows_at_once):
                stop = min(start + rows_at_once, array.shape[0])
                digest.update(digest_of_tensor(array.rows(start, stop)))
        return digest.hexdigest()[:12]

    def again(self) -> StoredVectors:
        return StoredVectors(self._arrays)


def _rows_of(array: Array, rows: Sequence[int]) -> Tensor:
    """Some rows of an array, in any order (`row ...`). Rows that follow each other are read at once."""
    parts = []
    for _, run in itertools.groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
        numbers = [row for _, row in run]
        parts.append(array.rows(numbers[0], numbers[-1] + 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _at_length(values: Tensor, length: int) -> Tensor:
    """Cut or zero-pad the second axis of a tensor `row pos ...`."""
    values = values[:, :length]
    missing = length - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], 1)


def _refuse_cut_rows(batch: Batch) -> None:
    """Raise an error if rows of a batch are not whole rows of the data, which vectors are found by."""
    for row, start in batch.origins:
        if row < 0 or start > 0:
            place = "joins several texts" if row < 0 else f"begins at position {start} of row {row}"
            raise LayersimError(
                f"`data` has a row that {place}, and vectors belong to whole rows of the data. Pass rows that are neither "
                "packed nor cut (a larger `seq_len`), without padding on the left."
            )


@typed
def from_vectors(
    vectors: Any, *, mask: Any = None, groups: Any = None, labels: Any = None, name: str | None = None
) -> VectorSource:
    """A source of vectors that you already have: activations, recordings, features of another program.

    `analyze`, `compare` and `compare_grid` take it in place of a model. If no model reads data beside it, leave `data` out: the
    vectors are the data. Sites are the names of the mapping, in its order. Every measure that needs neither logits nor the
    blocks of a model can be computed, with the same numbers as for a model whose modules return these vectors.

    Vectors may be larger than memory: a batch of rows is read at a time from memory maps and files.

    Args:
        vectors: a mapping from names of sites to arrays, `sample width`, or `row pos width` for rows of several positions, such
            as the tokens of a text. Arrays, memory maps (`numpy.load(path, mmap_mode="r")`), tensors and tables of pandas hold
            floats or integers. Sites have the same samples, and may have different widths. Or the path of a `.safetensors`
            file, a `.npz` file or a folder of `.npy` files, which are read without pickle; or what `lsim.vectors` returns or
            writes, whose texts are then the groups.
        mask: for `row pos width`: `row pos`, 1 for positions that count and 0 for others, for rows that end early.
        groups: the text that each row belongs to, one value for each row, see `Data`: samples of one person, document or run.
            Without it, each row is a text, independent of the others.
        labels: `row` or `row pos`, whole numbers, -100 for no label; for `NeuralCollapse(labels="data")` and
            `LinearProbe(labels="data")`.
        name: name of the vectors in results and figures; None for the name of the file, or "vectors".

    Returns:
        A source.

    Raises:
        LayersimError: an array holds no numbers, sites have different samples, tables have rows in another order, or a file
            cannot be read.

    Examples:
        >>> import numpy as np
        >>> import tl_layersim as lsim
        >>> x = np.random.default_rng(0).normal(size=(200, 16))
        >>> vectors = lsim.from_vectors({"layer 3": x, "layer 9": 2 * x[:, ::-1]})
        >>> cka = lsim.analyze(vectors, analyzers=lsim.CKA())["cka"]
        >>> cka.layers, bool((cka.values - 1).abs().max() < 1e-9)
        (('layer 3', 'layer 9'), True)
    """
    index = None
    if isinstance(vectors, Mapping):
        arrays = {}
        for site, values in vectors.items():
            if str(site) in arrays:
                raise LayersimError(f"`vectors` names two sites {str(site)!r}: a text, and {site!r} of another kind.")
            arrays[str(site)] = as_array(values, f"vectors[{site!r}]")
        index = _common_index(vectors)
        _refuse_other_index(groups, "groups", index)
        _refuse_other_index(labels, "labels", index)
    elif not is_path(vectors):
        raise LayersimError(
            f"`vectors` is {brief(vectors)}; it must be a mapping from names of sites to arrays, such as {{'layer 3': x}}, or "
            "the path of a file."
        )
    else:
        arrays = open_arrays(vectors, "vectors")
        name = name or Path(os.fspath(vectors)).name
        about = {}
        for key in list(arrays):
            if key.startswith(RESERVED):
                about[key] = arrays.pop(key)
        texts = about.get(f"{RESERVED}texts")
        if groups is None and texts is not None:
            groups = texts.rows(0, texts.shape[0])
    if isinstance(vectors, SampledVectors) and groups is None:
        groups = vectors.texts
    _refuse_other_shapes(arrays)
    shape = next(iter(arrays.values())).shape[:-1]
    groups = None if groups is None else list(_groups_of(groups, shape[0]))
    return VectorSource(
        arrays, name or "vectors", mask=_mask_of(mask, shape), groups=groups, labels=_labels_of(labels, shape), index=index
    )


def _refuse_other_shapes(arrays: Mapping[str, Array]) -> None:
    """Raise an error if sites have no vectors, or other samples than the first site."""
    if not arrays:
        raise LayersimError("`vectors` is empty; it must have one site or more.")
    first, *_ = arrays
    for site, array in arrays.items():
        shape = " x ".join(map(str, array.shape))
        if len(array.shape) not in (2, 3) or 0 in array.shape:
            raise LayersimError(
                f"`vectors[{site!r}]` has shape {shape or '()'}; it must be sample x width, or row x pos x width. Further axes "
                "are flattened by x.reshape(len(x), -1); x.reshape(n, channel, -1).transpose(0, 2, 1) makes places of "
                "feature maps samples."
            )
        if array.shape[:-1] != arrays[first].shape[:-1]:
            first_shape = " x ".join(map(str, arrays[first].shape))
            raise LayersimError(
                f"`vectors[{site!r}]` has shape {shape}, and `vectors[{first!r}]` has {first_shape}; all sites must have the "
                "same samples."
            )


def _common_index(vectors: Mapping[Any, Any]) -> Any:
    """The labels of the rows of all tables of pandas; None without tables.

    Raises:
        LayersimError: two tables have other labels, or the same in another order.
    """
    index = None
    first_site = None
    for site, values in vectors.items():
        if not hasattr(values, "columns") or not hasattr(values, "index"):
            continue
        if index is None:
            index = values.index
            first_site = site
        elif not index.equals(values.index):
            raise LayersimError(
                f"`vectors[{site!r}]` has another index than `vectors[{first_site!r}]`, so their rows do not match. Align them "
                "by table.loc[index], or call table.reset_index(drop=True)."
            )
    return index


def _refuse_other_index(column: Any, name: str, index: Any) -> None:
    """Raise an error if a column of pandas has another index than the tables of vectors."""
    if index is not None and hasattr(column, "index") and hasattr(column, "to_numpy") and not index.equals(column.index):
        raise LayersimError(
            f"`{name}` has another index than the tables in `vectors`, so their rows do not match. Pass "
            f"{name}=column.loc[index], or {name}=column.to_numpy() if the order is the same."
        )


def _mask_of(mask: Any, shape: tuple[int, ...]) -> Tensor | None:
    if mask is None:
        return None
    if len(shape) == 1:
        raise LayersimError(f"`mask` is {brief(mask)}; it must be None for vectors of shape sample x width.")
    values = as_mask(mask, "mask")
    if tuple(values.shape) != shape:
        raise LayersimError(f"`mask` has shape {tuple(values.shape)}; it must be row x pos, {shape}.")
    return values


def _groups_of(groups: Any, rows: int) -> Iterator[Hashable]:
    values = None if isinstance(groups, str) else groups_as_list(groups)
    if values is None or len(values) != rows:
        count = "" if values is None else f" with {amount(len(values), 'value')}"
        raise LayersimError(f"`groups` is {brief(groups)}{count}; it must have one value for each of {amount(rows, 'row')}.")
    return iter(values)


def _labels_of(labels: Any, shape: tuple[int, ...]) -> Tensor | None:
    if labels is None:
        return None
    values = whole_numbers(as_plain(labels))
    if tuple(values.shape) not in (shape, shape[:1]):
        expected = " or ".join(dict.fromkeys([str(shape[:1]), str(shape)]))
        raise LayersimError(f"`labels` has shape {tuple(values.shape)}; it must be {expected}, as `vectors` have samples.")
    return values
