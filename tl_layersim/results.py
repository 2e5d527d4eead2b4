"""Results: frozen tensors with named axes and a record of where they come from; tables, plots and files of them."""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from .errors import LayersimError
from .storage import read as read_file
from .storage import write as write_file
from .typed import typed

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


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


@dataclass(frozen=True)
class Picture:
    """One plot that a result offers: the field it draws, a title, and what it means, with its source."""

    field: str
    title: str
    meaning: str


def axes(*names: str, default: Any = MISSING) -> Any:
    """A dataclass field that holds a float64 tensor over the named axes.

    `row` and `column` are the residual layers of the first and second model, `residual` those of the first, `layer` its
    blocks (without what enters block 0), as do `row_block` and `column_block`. Any other axis `x` takes its labels from the
    result's own field `xs` (`batches` for `batch`).
    """
    return field(default=default, metadata={"axes": names}) if default is not MISSING else field(metadata={"axes": names})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(ABC):
    """What an analyzer returns. Subclasses are frozen dataclasses whose tensor fields are declared with `axes(...)`.

    `numpy.asarray(result)` is `values`. Equality is identity; compare `values`.

    Class attributes:
        values_name: what `values` is called in tables and plots.
        pictures: what a report draws.
    """

    layers: tuple[str, ...]
    provenance: Provenance
    values: Tensor
    values_name: ClassVar[str] = "values"
    pictures: ClassVar[tuple[Picture, ...]] = ()

    def __post_init__(self) -> None:
        for name, axis_names in self.tensor_fields().items():
            sizes = tuple(len(self.coordinates(axis)) for axis in axis_names)
            if tuple(getattr(self, name).shape) != sizes:
                raise LayersimError(
                    f"{type(self).__name__}.{name} does not fit its axes.",
                    given=f"shape {tuple(getattr(self, name).shape)}",
                    expected=f"{sizes}: {' x '.join(axis_names)}",
                    do="return one number for each label; residual and row have one more label than layer",
                )

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.values.shape))
        lines = [f"{type(self).__name__}({size}, {self.provenance.model}, {self.provenance.tokens} tokens)"]
        return "\n".join(lines + [f"  {key} = {value:.4g}" for key, value in self.headline().items()])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.values.numpy()
        return array.astype(dtype) if dtype is not None else (array.copy() if copy else array)

    @classmethod
    def tensor_fields(cls) -> dict[str, tuple[str, ...]]:
        """Name and axes of each tensor field."""
        return {f.name: f.metadata["axes"] for f in fields(cls) if "axes" in f.metadata}

    def coordinates(self, axis: str) -> tuple[Any, ...]:
        """The labels along an axis."""
        if axis in ("row", "residual"):
            return self.layers
        if axis in ("layer", "row_block", "column_block"):
            return self.layers[1:]
        if axis == "column":
            return tuple(getattr(self, "column_layers", self.layers))
        return tuple(getattr(self, f"{axis}es" if axis.endswith(("ch", "s")) else f"{axis}s"))

    def to_frame(self, field: str = "values") -> pandas.DataFrame:
        """A tidy table: one line per entry of `field`, with every other field over the same axes as a further column.

        Layers are columns `layer`, or `row_layer` and `column_layer` for a matrix.

        Raises:
            LayersimError: there is no such field.
        """
        import pandas

        axis_names = self._axes_of(field)
        labels = {"residual": "layer", "row": "row_layer", "column": "column_layer"}
        labels |= {"row_block": "row_layer", "column_block": "column_layer"}
        table = pandas.DataFrame(
            list(itertools.product(*(self.coordinates(axis) for axis in axis_names))),
            columns=[labels.get(axis, axis) for axis in axis_names],
            index=None if axis_names else [0],
        )
        for axis in axis_names:
            if axis in (*labels, "layer"):
                # In the order of the model: sorted as text, block 10 would come before block 2, in a pivot for one.
                name = labels.get(axis, axis)
                table[name] = pandas.Categorical(table[name], categories=list(self.coordinates(axis)), ordered=True)
        for name, names in self.tensor_fields().items():
            if names == axis_names:
                table[self.values_name if name == "values" else name] = getattr(self, name).numpy().reshape(-1)
        return table

    def plot(self, field: str = "values") -> plotly.graph_objects.Figure:
        """A plotly figure of a field: a heatmap over two layer axes, lines over one; axes carry layer names."""
        from .plotting import figure

        return figure(self, self.values_name if field == "values" else field, self._axes_of(field))

    def headline(self) -> dict[str, float]:
        """The few numbers that a summary table shows."""
        return {}

    def first_layer(self) -> str:
        """What the first residual layer is, in words; a stitched model begins above its seam."""
        return (
            "embedding" if self.layers[0].startswith("blocks.0.") else self.layers[0].removesuffix(".hook_resid_pre") + " input"
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to one safetensors file; `tl_layersim.load` reads it back exactly."""
        header, tensors = _pack(self)
        return write_file(path, "result", header, tensors)

    def _axes_of(self, field: str) -> tuple[str, ...]:
        known = {self.values_name if name == "values" else name: names for name, names in self.tensor_fields().items()}
        if field == "values":
            field = self.values_name
        if field not in known:
            raise LayersimError(
                f"{type(self).__name__} has no tensor field {field!r}.",
                given=field,
                expected=f"one of {', '.join(known)}",
                do=f"result.to_frame({next(iter(known))!r}) or result.plot({next(iter(known))!r})",
            )
        return known[field]


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerMatrix(Result):
    """One number for each pair of residual layers.

    `values[i, j]` belongs to `layers[i]` of the (first) model and `column_layers[j]` of the second, or of the same one.
    An analyzer that has more to say extends this class with further fields.
    """

    values: Float64[Tensor, "row column"] = axes("row", "column")
    column_layers: tuple[str, ...]


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerCurve(Result):
    """One number for each residual layer, what enters block 0 first. An analyzer may extend it with further fields."""

    values: Float64[Tensor, " residual"] = axes("residual")


class Report(Mapping[str, Any]):
    """The results of one run, by analyzer name.

    >>> report = Report({})
    >>> len(report)
    0
    """

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._results = dict(results)

    def __getitem__(self, name: str) -> Any:
        if name not in self._results:
            raise KeyError(f"no result {name!r} in this report; it has {', '.join(self._results) or 'none'}")
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        lines = [f"Report({', '.join(self._results)})"]
        for name, result in self._results.items():
            lines += [f"  {name}: {key} = {value:.4g}" for key, value in result.headline().items()]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all results to one safetensors file, without pickle."""
        header: dict[str, Any] = {"results": {}}
        tensors: dict[str, Tensor] = {}
        for name, result in self._results.items():
            header["results"][name], own = _pack(result)
            tensors |= {f"{name}/{field_name}": tensor for field_name, tensor in own.items()}
        return write_file(path, "report", header, tensors)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a report written by `save`."""
        header, tensors = read_file(path, ("report",))
        return _unpack_report(header, tensors)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page with a table, every plot, and what each of them means."""
        from .report import write_html

        return write_html(self, path)


def load(path: str | os.PathLike[str]) -> Any:
    """Read what `save` wrote: a `Result` or a `Report`, whichever the file holds.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: it is truncated, not one of ours, or of a newer version.
    """
    header, tensors = read_file(path, ("result", "report"))
    return _unpack(header, tensors) if header["kind"] == "result" else _unpack_report(header, tensors)


def load_report(path: str | os.PathLike[str]) -> Report:
    """Read a report that `Report.save` wrote; errors as in `load`."""
    return Report.load(path)


def _pack(result: Result) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {name: getattr(result, name) for name in result.tensor_fields()}
    plain = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in tensors and f.name != "provenance"}
    provenance = {f.name: getattr(result.provenance, f.name) for f in fields(Provenance)}
    return {
        "class": type(result).__qualname__,
        "module": type(result).__module__,
        "fields": plain,
        "provenance": provenance,
    }, tensors


def _unpack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Result:
    classes = {(cls.__module__, cls.__qualname__): cls for cls in _concrete(Result)}
    key = (header["module"], header["class"])
    if key not in classes:
        # A class is never imported by a name that stands in a file.
        raise LayersimError(
            f"The file holds a {header['class']}, a kind of result that nothing imported so far defines.",
            given=".".join(key),
            expected=f"one of {', '.join(sorted(name for _, name in classes))}",
            do=f"import {header['module']} first, if you trust it, then load again",
        )
    plain = {name: _as_tuple(value) for name, value in header["fields"].items()}
    arguments: dict[str, Any] = {**plain, **tensors, "provenance": Provenance(**header["provenance"])}
    return classes[key](**arguments)


def _unpack_report(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Report:
    return Report(
        {
            name: _unpack(own, {key.split("/", 1)[1]: t for key, t in tensors.items() if key.split("/", 1)[0] == name})
            for name, own in header["results"].items()
        }
    )


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _concrete(cls: type[Result]) -> Iterator[type[Result]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _concrete(sub)


def quantiles_from_histogram(histogram: Tensor, low: float, high: float, quantiles: tuple[float, ...]) -> Tensor:
    """Quantiles of values that were counted in equal bins between `low` and `high`.

    Linear within a bin, so the error is below one bin width.

    Args:
        histogram: counts, `... bin`.
        low: left edge of the first bin.
        high: right edge of the last bin.
        quantiles: each between 0 and 1.

    Returns:
        `quantile ...`, float64; NaN where a histogram is empty.

    >>> quantiles_from_histogram(torch.tensor([[1, 1, 1, 1]]), 0.0, 4.0, (0.5,))
    tensor([[2.]], dtype=torch.float64)
    """
    bins = histogram.shape[-1]
    counts = histogram.to(torch.float64)
    cumulative = counts.cumsum(-1)
    total = cumulative[..., -1:]
    out = []
    for quantile in quantiles:
        target = quantile * total
        # The first bin whose cumulative count reaches the target and that holds something.
        index = ((cumulative < target) | (cumulative == 0)).sum(-1, keepdim=True).clamp(max=bins - 1)
        before = cumulative.gather(-1, index) - counts.gather(-1, index)
        share = (target - before) / counts.gather(-1, index)
        out.append((low + (index + share) * ((high - low) / bins)).squeeze(-1).masked_fill(total.squeeze(-1) == 0, math.nan))
    return torch.stack(out)


__all__ = ["LayerCurve", "LayerMatrix", "Picture", "Provenance", "Report", "Result", "axes", "load", "load_report"]
