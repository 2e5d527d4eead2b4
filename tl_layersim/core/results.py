"""Results: frozen tensors with named axes and their provenance, with tables, figures and files."""

from __future__ import annotations

import itertools
import os
from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float64
from torch import Tensor

from .argument_checks import named, typed
from .errors import LayersimError
from .field_types import refuse_other_types
from .result_kinds import below, class_of, kind_of
from .storage import by_first_name, reading
from .storage import read as read_file
from .storage import write as write_file
from .wording import brief

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
from .provenance import Provenance

# Axes whose labels are the blocks of the (first) model.
BLOCK_AXES = ("layer", "row_block", "column_block", "skipped", "affected")


@named
@dataclass(frozen=True)
class Picture:
    """A figure that a report shows for a result.

    Attributes:
        field: the tensor field that it shows.
        title: of the figure.
        meaning: a sentence that explains the figure and names its source.
    """

    field: str
    title: str
    meaning: str


@named
def axes(*names: str, default: Any = MISSING) -> Any:
    """Declare a dataclass field that holds a float64 tensor over the named axes.

    The axes `row` and `column` are the residual layers of the first and second model, `residual` those of the first model.
    The axes `layer`, `row_block`, `column_block`, `skipped` and `affected` are its blocks, one fewer than residual layers. Any
    other axis `x` takes its labels from the result's field `xs` (`batches` for `batch`).

    Args:
        *names: of the axes, in order.
        default: of the field; none by default.
    """
    return field(default=default, metadata={"axes": names}) if default is not MISSING else field(metadata={"axes": names})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(ABC):
    """Base class of all results. Subclasses are frozen dataclasses whose tensor fields are declared with `axes(...)`.

    `numpy.asarray(result)` is `values`. Results are equal only if they are the same object; compare `values` instead.

    Attributes:
        layers: names of the residual layers; the input of block 0 first.
        provenance: the model, data, options and versions of the run.
        values: the main tensor.

    Class attributes:
        - `values_name`: name of `values` in tables and figures.
        - `pictures`: figures that a report shows.
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
        quantiles = getattr(self, "quantiles", ())
        if not all(0 <= quantile <= 1 for quantile in quantiles):
            raise LayersimError(
                f"{type(self).__name__}.quantiles must lie between 0 and 1.",
                given=str(quantiles),
                expected="fractions, such as 0.5 for the median",
                do="quantiles=(0.05, 0.5, 0.95)",
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
        """The labels along an axis.

        Args:
            axis: its name, as in `axes(...)`.
        """
        if axis in ("row", "residual"):
            return self.layers
        if axis in BLOCK_AXES:
            return self.layers[1:]
        if axis == "column":
            return tuple(getattr(self, "column_layers", self.layers))
        return tuple(getattr(self, f"{axis}es" if axis.endswith(("ch", "s")) else f"{axis}s"))

    def to_frame(self, field: str = "values") -> pandas.DataFrame:
        """A tidy table with one line for each entry of a field; other fields over the same axes are further columns.

        Layers are in column `layer`, or in `row_layer` and `column_layer` for a matrix.

        Args:
            field: name of a tensor field.

        Raises:
            LayersimError: the result has no such field.
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
            if axis in (*labels, *BLOCK_AXES):
                # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
                name = labels.get(axis, axis)
                table[name] = pandas.Categorical(table[name], categories=list(self.coordinates(axis)), ordered=True)
        for name, names in self.tensor_fields().items():
            if names == axis_names:
                table[self.values_name if name == "values" else name] = getattr(self, name).numpy().reshape(-1)
        return table

    def plot(self, field: str = "values") -> plotly.graph_objects.Figure:
        """A plotly figure of a field: a heatmap over two layer axes, lines over one, labelled with layer names.

        Args:
            field: name of a tensor field.
        """
        from ..reporting.figures import figure

        return figure(self, self.values_name if field == "values" else field, self._axes_of(field))

    def headline(self) -> dict[str, float]:
        """The numbers that a summary table shows, by description."""
        return {}

    def baseline(self, field: str) -> tuple[str, float] | None:
        """Name and value of a reference line in the figure of a field; None for none."""
        return None

    def first_layer(self) -> str:
        """The first site in words: "embedding", the input of a later block or of a module, or the name of another site."""
        first = self.layers[0]
        if first.endswith("blocks.0.hook_resid_pre"):
            return "embedding"
        path = first.removesuffix(".hook_resid_pre").removesuffix(".input")
        return first if path == first else f"{path} input"

    @typed
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to one safetensors file; `tl_layersim.load` reads it back exactly.

        Args:
            path: of the file.
        """
        header, tensors = _pack(self)
        return write_file(path, "result", header, tensors)

    def _axes_of(self, field: str) -> tuple[str, ...]:
        axes_of = {self.values_name if name == "values" else name: names for name, names in self.tensor_fields().items()}
        if field == "values":
            field = self.values_name
        if field not in axes_of:
            raise LayersimError(
                f"{type(self).__name__} has no tensor field {field!r}.",
                given=field,
                expected=f"one of {', '.join(axes_of)}",
                do=f"result.to_frame({next(iter(axes_of))!r}) or result.plot({next(iter(axes_of))!r})",
            )
        return axes_of[field]


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerMatrix(Result):
    """A number for each pair of residual layers, of one model or of two.

    Analyzers extend this class with further fields.

    Attributes:
        values: `row column`; `values[i, j]` is of `layers[i]` of the first model and `column_layers[j]` of the second.
        column_layers: residual layers of the second model, or of the first again.
    """

    values: Float64[Tensor, "row column"] = axes("row", "column")
    column_layers: tuple[str, ...]


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerCurve(Result):
    """A number for each residual layer, the input of block 0 first. Analyzers extend this class with further fields.

    Attributes:
        values: `residual`.
    """

    values: Float64[Tensor, " residual"] = axes("residual")


@named
class Report(Mapping[str, Any]):
    """The results of one run, by name of the analyzer.

    Args:
        results: by name.

    Examples:
        >>> report = Report({})
        >>> len(report)
        0
    """

    def __init__(self, results: Mapping[str, Result]) -> None:
        if not isinstance(results, Mapping) or not all(isinstance(name, str) for name in results):
            raise LayersimError(
                "`results` must be a mapping from names to results.",
                given=f"results={brief(results)}",
                expected="a mapping",
                do="Report({'cka': result})",
            )
        self._results = dict(results)

    def __getitem__(self, name: str) -> Any:
        if name not in self._results:
            raise KeyError(f"The report has no result {name!r}; it has {', '.join(self._results) or 'none'}")
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

    @typed
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all results to one safetensors file, without pickle.

        Args:
            path: of the file.
        """
        headers, tensors = _pack_report(self)
        return write_file(path, "report", {"results": headers}, tensors)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a report that `save` wrote.

        Args:
            path: of the file.
        """
        return _load(path, ("report",))  # type: ignore[no-any-return]  # of this kind

    @typed
    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page with a summary table and every figure with its explanation.

        Args:
            path: of the page.
        """
        from ..reporting.html import write_html

        return write_html(self, path)


@typed
def load(path: str | os.PathLike[str]) -> Any:
    """Read a `Result` or a `Report` from the file that its `save` wrote.

    Args:
        path: of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        LayersimError: the file is truncated, changed since it was written, of another program, or of a newer version.
    """
    return _load(path, ("result", "report"))


@typed
def load_report(path: str | os.PathLike[str]) -> Report:
    """Read a report that `Report.save` wrote; errors as in `load`.

    Args:
        path: of the file.
    """
    return Report.load(path)


def _pack(result: Result) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "provenance"}
    reports = {name: _pack_report(value) for name, value in values.items() if isinstance(value, Report)}
    tensors: dict[str, Tensor] = {name: values[name] for name in result.tensor_fields()}
    plain = {name: value for name, value in values.items() if name not in tensors.keys() | reports.keys()}
    provenance = {f.name: getattr(result.provenance, f.name) for f in fields(Provenance)}
    header = {"class": kind_of(type(result)), "fields": plain, "provenance": provenance}
    tensors |= {f"{name}/{key}": tensor for name, (_, own) in reports.items() for key, tensor in own.items()}
    return header | ({"reports": {name: own for name, (own, _) in reports.items()}} if reports else {}), tensors


def _pack_report(report: Report) -> tuple[dict[str, Any], dict[str, Tensor]]:
    packed = {name: _pack(result) for name, result in report.items()}
    tensors = {f"{name}/{key}": tensor for name, (_, own) in packed.items() for key, tensor in own.items()}
    return {name: header for name, (header, _) in packed.items()}, tensors


def _load(path: str | os.PathLike[str], kinds: tuple[str, ...]) -> Any:
    header, tensors = read_file(path, kinds)
    with reading(path, f"a whole {header['kind']}", "copy the file again, or run the analysis again"):
        is_result = header["kind"] == "result"
        loaded = (_unpack_result if is_result else _unpack_report)(path, header if is_result else header["results"], tensors)
        # Malformed values that pass the type check fail here, while the error can still name the file.
        repr(loaded)
        return loaded


def _unpack_result(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Result:
    # Format 1 names the module and the class.
    kind = f"{header['module']}:{header['class']}" if "module" in header else str(header["class"])
    cls = class_of(kind, Result)
    if cls is None:
        # A class is never imported because a file names it.
        module, _, name = kind.rpartition(":")
        raise LayersimError(
            f"{path} holds a {name}, a kind of result that no imported module defines.",
            given=kind,
            expected=f"one of {', '.join(sorted({sub.__qualname__ for sub in below(Result)}))}",
            do=f"import {module} first, if you trust it, then load again",
        )
    plain = {name: _as_tuple(value) for name, value in header["fields"].items()}
    refuse_other_types(cls, plain)
    refuse_other_types(Provenance, header["provenance"])
    nested = by_first_name(header.get("reports", {}), tensors)
    reports = {name: _unpack_report(path, own, nested[name]) for name, own in header.get("reports", {}).items()}
    own = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] not in reports}
    arguments: dict[str, Any] = {**plain, **own, **reports, "provenance": Provenance(**header["provenance"])}
    result: Result = cls(**arguments)
    return result


def _unpack_report(path: str | os.PathLike[str], headers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Report:
    parts = by_first_name(headers, tensors)
    return Report({name: _unpack_result(path, own, parts[name]) for name, own in headers.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


__all__ = ["LayerCurve", "LayerMatrix", "Picture", "Provenance", "Report", "Result", "axes", "load", "load_report"]
