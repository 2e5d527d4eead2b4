"""Results: frozen tensors with named axes and provenance, and their tables, figures and files."""

from __future__ import annotations

import json
import math
import re
import tempfile
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from .arguments import FilePath, OpenFraction, typed
from .errors import LayersimError, without_secrets
from .file_format import REPORT_FILE, replacing
from .file_format import write as write_file
from .intervals import ConfidenceInterval, field_named, headline_intervals, headline_lines, headline_texts, interval_of
from .rendering import registered_renderer
from .report_tables import (
    BLOCK_AXES,
    NUMBERS,
    Correction,
    adjusted,
    distinct_test_mask,
    field_lines,
    field_table,
    headline_table,
    joined_tables,
    label_table,
    latex,
    markdown,
    numbers_of,
    plain_cell,
    plain_markdown,
    result_table,
)
from .result_declarations import (
    JOINT,
    NOT_MEASURED,
    Declaration,
    Provenance,
    axes,
    declarations,
    result_class,
    without_nan,
)
from .result_files import REPO_TYPE, SCHEME, load_kind, pack, pack_report
from .site_names import in_depth_order, site_in_words
from .wording import amount, brief, headed

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    import xarray

# Axes without labels whose entries are numbered from 1.
COUNTED_FROM_1 = ("step", "direction", "left", "right")
# Prefix of a field's name in `plot`, for the untrained models.
UNTRAINED = "untrained "
# What writes a file of another format. A file that `save` writes is read by `load` alone.
OTHER_FORMATS = {
    ".csv": "to_csv writes CSV",
    ".json": "to_json writes JSON",
    ".html": "to_html writes HTML",
    ".htm": "to_html writes HTML",
    ".md": "to_markdown returns Markdown",
    ".tex": "to_latex returns LaTeX",
    ".nc": "to_xarray() has a method to_netcdf",
    **dict.fromkeys((".parquet", ".xlsx", ".npy", ".npz", ".h5", ".hdf5"), "to_frame() returns a table with writers"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".bin"), "a name such as report.safetensors says so"),
}
# Members for authors of results, figures and tables. Completion in a notebook leaves them out.
FOR_AUTHORS = {
    *("baselines", "coordinates", "declared", "distance_name", "file_kind", "finding", "first_layer", "former_names"),
    *("in_depth_order", "measure", "measured_on", "of_untrained", "partners", "pictures"),
    *("sites_headline", "tensor_fields"),
    *("transposed", "values_name", "with_halves", "with_replicates", "with_twins"),
}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(ABC):
    """Base class of all results. Subclasses are frozen dataclasses whose tensor fields are declared with `axes(...)`.

    `numpy.asarray(result)` is `values`. Results are equal only if they are the same object; compare `values` instead.

    Attributes:
        layers: names of the residual layers, starting with the input of block 0.
        provenance: the model, data, options and versions of the run.
        values: the main tensor.
        replicates: the same result without each block of the data, for intervals; empty without `intervals=True`.
        block_tokens: number of counted positions in each block.
        untrained: the same result on models with fresh weights, one for each seed; empty without `baseline="untrained"`.

    Class attributes:
        - `values_name`: name of `values` in tables and figures.
        - `former_names`: present names of the fields, by their names in files of earlier versions.
        - `file_kind`: name of the class in files, which stays when your class is renamed; its module and name by default.
    """

    layers: tuple[str, ...]
    provenance: Provenance
    values: Tensor
    replicates: tuple[Any, ...] = ()
    block_tokens: tuple[int, ...] = ()
    untrained: tuple[Any, ...] = ()
    values_name: ClassVar[str] = "values"
    file_kind: ClassVar[str] = ""
    former_names: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name, axis_names in self.tensor_fields().items():
            sizes = tuple(len(self.coordinates(axis)) for axis in axis_names)
            tensor = getattr(self, name)
            if tensor is NOT_MEASURED:
                tensor = torch.full(sizes, math.nan, dtype=torch.float64)
            if tuple(tensor.shape) != sizes:
                raise LayersimError(
                    f"{type(self).__name__}.{name} has shape {tuple(tensor.shape)}; the labels of its axes "
                    f"{' x '.join(axis_names)} give shape {sizes}."
                )
            # Tensors in files are contiguous. Sums in another order differ in the last digit.
            object.__setattr__(self, name, tensor.contiguous())

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.values.shape))
        measured = self.measured_on("values") or f"{self.provenance.tokens} tokens"
        title = f"{type(self).__name__}({size}, {self.provenance.model}, {measured})"
        return headed(title, [f"  {line}" for line in headline_lines(self)])

    def _repr_html_(self) -> str:
        return registered_renderer().result_html(self)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in FOR_AUTHORS]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.values.numpy()
        if dtype is not None:
            return array.astype(dtype)
        return array.copy() if copy else array

    @classmethod
    def tensor_fields(cls) -> dict[str, tuple[str, ...]]:
        """Names and axes of the tensor fields."""
        return {name: declared.axes for name, declared in declarations(cls).items()}

    def declared(self, field: str = "values") -> Declaration:
        """The declaration of a field: label, unit, title, caption and bounds.

        Args:
            field: name of a tensor field, or the name of `values` in tables.

        Raises:
            LayersimError: the result has no such field.
        """
        return declarations(self)[field_named(self, field)]

    @property
    def pictures(self) -> tuple[Declaration, ...]:
        """The fields that a report shows as figures. These are the fields with a caption, or `values` if no field has one."""
        all_declared = declarations(self)
        names = [name for name, declared in all_declared.items() if declared.caption] or ["values"]
        pictures = []
        for name, declared in all_declared.items():
            if name not in names or not (len(declared.axes) in (1, 2) or declared.drawn):
                continue
            # A report shows no empty figures.
            if not bool(getattr(self, name).isnan().all()):
                pictures.append(declared)
        return tuple(pictures)

    def coordinates(self, axis: str) -> tuple[Any, ...]:
        """The labels along an axis; entries without labels are numbered.

        Args:
            axis: name of the axis, as in `axes(...)`.

        Raises:
            LayersimError: no field of the result has this axis.
        """
        if axis in ("row", "residual"):
            return self.layers
        if axis in BLOCK_AXES:
            return self.layers[1:]
        if axis == "column":
            return tuple(getattr(self, "column_layers", self.layers))
        axes_of_fields = self.tensor_fields()
        for field, axis_names in axes_of_fields.items():
            if axis not in axis_names:
                continue
            plural = f"{axis}es" if axis.endswith(("ch", "s")) else f"{axis}s"
            if hasattr(self, plural):
                return tuple(getattr(self, plural))
            size = getattr(self, field).shape[axis_names.index(axis)]
            first = 1 if axis in COUNTED_FROM_1 else 0
            return tuple(range(first, first + size))
        all_axes = dict.fromkeys(name for axis_names in axes_of_fields.values() for name in axis_names)
        raise LayersimError(f"`axis` is {brief(axis)}; {type(self).__name__} has the axes {', '.join(all_axes)}.")

    @typed
    def to_frame(self, field: str | None = None) -> pandas.DataFrame:
        """A tidy table with one line for each entry of a field.

        Layers are in column `layer`, or in `row_layer` and `column_layer` for a matrix. If the run was made with
        `intervals=True`, the ends of the 95 % interval of a column `x` are in `x_low` and `x_high`. If it was made with
        `baseline="untrained"`, the mean over untrained models is in `x_untrained`.

        Args:
            field: name of the only tensor field in the table; None for `values` and all measured fields over the same axes.

        Raises:
            LayersimError: the result has no such field.
        """
        all_declared = declarations(self)
        main = field_named(self, "values" if field is None else field)
        axes_of_table = all_declared[main].axes
        table = label_table({axis: self.coordinates(axis) for axis in axes_of_table})
        for name, declared in all_declared.items():
            has_axes_of_table = field is None and declared.axes == axes_of_table
            if name != main and (not has_axes_of_table or bool(getattr(self, name).isnan().all())):
                continue
            for column, numbers in numbers_of(self, name).items():
                if column == "se":
                    continue
                column_name = declared.name if column == "value" else f"{declared.name}_{column}"
                table[column_name] = numbers.numpy().reshape(-1)
        return table

    def to_xarray(self) -> xarray.Dataset:
        """An `xarray.Dataset` with one variable for each field that the run measured.

        Dimensions are the axes of the fields, such as `layer`, with their labels as coordinates; `layer_depth` is the relative
        depth of the sites along `layer`, 0 at the first residual layer and 1 at the last. Variables have the attributes
        `long_name`, `units` and `description`. The provenance is in the attributes of the dataset. After `intervals=True` the
        ends of the 95 % interval of `x` and its standard error are `x_low`, `x_high` and `x_se`; with `baseline="untrained"`
        the mean over untrained models is `x_untrained`.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.LogitLens())
            >>> table = report["logit_lens"].to_xarray()
            >>> table["cross_entropy"].dims, table["cross_entropy"].attrs["units"]
            (('layer',), 'nats')
            >>> table["accuracy"].sel(layer="blocks.7.hook_resid_post").item() == report["logit_lens"].accuracy[-1].item()
            True
        """
        return result_table(self)

    @typed
    def to_latex(self, field: str = "values") -> str:
        """A field as a LaTeX table, one line for each label of its first axis.

        Each number has ± half its 95 % interval if it has one.

        It uses the package booktabs.

        Args:
            field: name of a tensor field over one axis or two.

        Raises:
            LayersimError: the result has no such field, or the field is over other axes.
        """
        return latex(field_table(self, field), 1)

    @typed
    def to_markdown(self, field: str = "values") -> str:
        """A field as a Markdown table, with the same cells as `to_latex`.

        Args:
            field: name of a tensor field over one axis or two.
        """
        return markdown(field_table(self, field))

    @typed
    def plot(
        self, field: str | None = None, width: Literal["column", "text"] | None = None, title: str | None = None
    ) -> plotly.graph_objects.Figure:
        """Plotly figure of a field: a heat map over two axes, lines over one.

        `figure.write_image("figure.pdf")` writes it as PDF, SVG or PNG, with the extra `png` (kaleido).

        Args:
            field: name of a tensor field; "untrained x" for the mean of field x over untrained models. Default: the field of
                the first figure in a report.
            width: None for the screen; for papers "column" (3.25 inches) or "text" (6.75 inches), with letters of 8 to 9 points
                and without the line below the title, whose words belong in the caption.
            title: title of the figure; None for the field's title, "" for no title.

        Raises:
            LayersimError: the result has no such field, the run did not measure it, or it has more than two axes.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.LogitLens())
            >>> figure = report["logit_lens"].plot("accuracy", width="column", title="")
            >>> figure.layout.width  # 3.25 inches
            312
        """
        return registered_renderer().figure(self, field, width, title)

    def with_halves(self, first: Any, second: Any) -> Any:
        """The result with its split-half reliability, if its class has such a field.

        Args:
            first: the result on the odd blocks.
            second: the result on the even blocks.
        """
        return self

    def with_replicates(self, replicates: tuple[Any, ...], block_tokens: tuple[int, ...]) -> Result:
        """The result with its jackknife replicates, for intervals. Each replicate lacks one block of rows.

        Args:
            replicates: the result without each block; none if there is only one block.
            block_tokens: number of counted positions in each block.
        """
        return replace(self, replicates=replicates, block_tokens=block_tokens)

    def with_twins(self, twins: Sequence[Any]) -> Any:
        """A copy of the result that holds the results of untrained models as a baseline.

        `plot`, `to_frame` and `print` show both.

        Args:
            twins: the same result on models with fresh weights, one for each seed.
        """
        return replace(self, untrained=tuple(twins))

    def of_untrained(self, field: str) -> Tensor | None:
        """A field's values on all untrained models (`seed ...`). None without such models, or if shapes differ between models.

        Args:
            field: name of the attribute.
        """
        if not self.untrained:
            return None
        values_of_models = [getattr(untrained, field) for untrained in self.untrained]
        shape = getattr(self, field).shape
        if any(values.shape != shape for values in values_of_models):
            return None
        return torch.stack(values_of_models)

    @property
    def has_intervals(self) -> bool:
        """Whether the run had `intervals=True`."""
        return bool(self.block_tokens)

    @typed
    def interval(self, what: str | Callable[[Any], Any] = "values", level: OpenFraction = 0.95) -> ConfidenceInterval:
        """Standard error and confidence interval of a field, or of a function of the result.

        The data was measured in 16 to 32 contiguous blocks, and the result is computed again without each of them: a
        delete-one-block jackknife, with Student's t. Tokens of one text are dependent, and texts in one block are together, so
        the interval describes another sample of as many texts of the same kind. It is symmetric on a scale without bounds, such
        as the log-odds of a fraction or the logarithm of a positive number. A function that returns an entry of a field has the
        interval of the field; other numbers are taken to have no bounds.

        Args:
            what: name of a tensor field; or a function that takes the result and returns a number or a tensor, such as
                `lambda result: result.distance()`. Of counts it should return a fraction: without a block there are fewer.
            level: confidence level.

        Returns:
            `value`, `low`, `high` and the standard `error`, float64 tensors in the shape of the field. NaN if the value, or the
            value without one of the blocks, is not finite; and for a single block.

        Raises:
            LayersimError: the run kept no blocks, or the shape of the field differs from block to block; or the jackknife does
                not apply, as to p-values, maxima, counts, values of one prompt, and values of the first pass over the data.

        Source:
            Wolter 2007, Introduction to Variance Estimation, chapter 4.

        Examples:
            >>> import tl_layersim as lsim
            >>> data, analyzers = lsim.Data(lsim.demo_text()[:16], batch_size=1), [lsim.Cosine(center="none")]
            >>> report = lsim.analyze(lsim.demo_model(), data, analyzers, intervals=True)
            >>> value, low, high, error = report["cosine"].interval("values")
            >>> bool(low[0, -1] < value[0, -1] < high[0, -1])
            True
        """
        return interval_of(self, what, level)

    @property
    def in_depth_order(self) -> bool:
        """Whether the sites are layers in order of depth; False for heads."""
        return in_depth_order(self.layers) and in_depth_order(self.coordinates("column"))

    def headline(self) -> dict[str, float]:
        """The main numbers of the result, by description, as `print` shows them.

        By default these are `values` at the first and last layer or their mean, and all scalars.
        """
        all_declared = declarations(self)
        label = all_declared["values"].label
        sites = self.coordinates(all_declared["values"].axes[0]) if self.values.dim() == 1 else ()
        numbers: dict[str, Any] = {}
        if len(sites) > 1 and in_depth_order(sites):
            numbers[f"{label} at {site_in_words(sites[0])}"] = self.values[0]
            numbers[f"{label} at the last site"] = self.values[-1]
        elif self.values.dim():
            numbers[f"{label}, mean"] = self.values.nanmean()
        scalars = {declared.label: getattr(self, name) for name, declared in all_declared.items() if not declared.axes}
        return without_nan(numbers | scalars)

    def finding(self) -> str:
        """One sentence with the main numbers, for the top of a report. If it is empty, the report writes a default sentence."""
        return ""

    def baselines(self, field: str) -> dict[str, float]:
        """Values of the reference lines in a field's figure, by name. By default there are none."""
        return {}

    def measured_on(self, field: str) -> str:
        """Number and kind of a field's samples, such as "40 queries", for its figure.

        By default it is the number in the attribute `samples` if these are fewer than the run's tokens. If it is empty, the
        figure shows the run's tokens or rows.
        """
        samples = getattr(self, "samples", None)
        if isinstance(samples, int) and samples < self.provenance.tokens:
            return amount(samples, "sample")
        return ""

    def first_layer(self) -> str:
        """The first site in words, such as "embedding" or "blocks.1 input"."""
        first = self.layers[0]
        if first.endswith("blocks.0.hook_resid_pre"):
            return "embedding"
        path = first.removesuffix(".hook_resid_pre").removesuffix(".input")
        return first if path == first else f"{path} input"

    @typed
    def save(self, path: FilePath) -> Path:
        """Write the result to one safetensors file; `tl_layersim.load` reads it back exactly.

        Args:
            path: path of the file, such as "cka.safetensors".

        Raises:
            LayersimError: `path` ends as files of another format do.
        """
        refuse_other_format(path)
        header, tensors = pack(self)
        return write_file(path, "result", header, tensors)


@result_class
class LayerMatrix(Result):
    """One number for each pair of residual layers, of one or two models.

    Analyzers extend this class with further fields.

    Attributes:
        values: `row column`; `values[i, j]` compares `layers[i]` of the first model with `column_layers[j]` of the second.
        column_layers: residual layers of the second model; of the same model if there is only one.
    """

    values: Float64[Tensor, "row column"] = axes("row", "column", label="Value", title="Values between layers")
    column_layers: tuple[str, ...]

    def headline(self) -> dict[str, float]:
        label = self.declared().label
        if not self.in_depth_order or self.layers != self.column_layers or JOINT in self.provenance.model:
            return self.sites_headline(label) or super().headline()
        if len(self.layers) < 2:
            return super().headline()
        numbers = {
            f"{label}({self.first_layer()}, last)": self.values[0, -1],
            f"{label}(last but one, last)": self.values[-2, -1],
        }
        return without_nan(numbers)

    def sites_headline(self, measure: str) -> dict[str, float]:
        """Headline number of sites that have no order by depth: the mean over pairs of different sites. Empty for two models.

        Args:
            measure: name of the measure.
        """
        different = ~torch.eye(len(self.layers), dtype=torch.bool)
        if self.layers != self.column_layers or JOINT in self.provenance.model or not bool(different.any()):
            return {}
        return {f"{measure}, mean over pairs of different sites": float(self.values[different].nanmean())}


@result_class
class LayerCurve(Result):
    """One number for each residual layer, starting with the input of block 0. Analyzers extend this class with further fields.

    Attributes:
        values: `residual`.
    """

    values: Float64[Tensor, " residual"] = axes("residual", label="Value", title="Values at each layer")


def card(report: Any, repo: str, revision: str | None = None) -> str:
    """Card of a hub repository: models, data, headline numbers, and code that loads the file.

    Args:
        report: the report to upload.
        repo: "user/name".
        revision: branch; None for the main one.
    """
    from jinja2 import Environment

    text = (files(__package__) / "hub_card.md.j2").read_text(encoding="utf-8")
    first = next(iter(report.values())).provenance
    results = []
    for name, result in report.items():
        kind = type(result).__name__
        results.append({"name": name, "kind": kind, "headline": headline_texts(result), "run": result.provenance})
    intervals = any(result.has_intervals for result in report.values())
    address = f"{SCHEME}{repo}"
    if revision not in (None, "main"):
        address += f"@{revision}"
    # Every value of the card goes through `_as_plain_text`: names come from files.
    page = Environment(trim_blocks=True, lstrip_blocks=True, finalize=_as_plain_text)
    # Of a model that was loaded from a folder, the last part of its path.
    names = [name.rstrip("/\\").replace("\\", "/").split("/")[-1] for name in first.model.split(JOINT)]
    title = " and ".join(names)
    rendered = page.from_string(text).render(title=title, first=first, results=results, address=address, intervals=intervals)
    return without_secrets(rendered)


def _as_plain_text(value: Any) -> str:
    """Escape a value for Markdown, in one line."""
    text = str(value)
    if isinstance(value, dict):
        text = ", ".join(f"{name}={entry}" for name, entry in value.items() if entry is not None)
    return plain_markdown(text)


class Report(Mapping[str, Any]):
    """The results of one run, by name of the analyzer.

    Args:
        results: results by name.

    Examples:
        >>> report = Report({})
        >>> len(report)
        0
    """

    @typed
    def __init__(self, results: Mapping[str, Result]) -> None:
        for name in results:
            if not name or "/" in name:
                raise LayersimError(f"A result of the report is named {name!r}; a name must not be empty or contain a slash.")
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
        lines = []
        for name, result in self._results.items():
            lines += [f"  {name}: {line}" for line in headline_lines(result)]
        return headed(f"Report({', '.join(self._results)})", lines)

    def _repr_html_(self) -> str:
        return registered_renderer().report_html(self)

    @typed
    def save(self, path: FilePath) -> Path:
        """Write all results to one safetensors file, without pickle.

        Args:
            path: path of the file, such as "report.safetensors".

        Raises:
            LayersimError: `path` ends as files of another format do.
        """
        refuse_other_format(path)
        headers, tensors = pack_report(self)
        return write_file(path, "report", {"results": headers}, tensors)

    @staticmethod
    @typed
    def load(path: FilePath) -> Report:
        """Read a report that `save` wrote.

        Args:
            path: path of the file.
        """
        return load_kind(path, ("report",), Result, Report)  # type: ignore[no-any-return]  # of this kind

    def to_frame(self) -> pandas.DataFrame:
        """All numbers of all results in one tidy table, one line for each number.

        Columns `analyzer` (the key in the report) and `field`; one column for each axis that any field has, such as `layer`,
        `row_layer`, `column_layer`, `quantile` or `threshold`, which is NaN in lines of fields without this axis; and `value`.
        After `intervals=True` also the ends `low` and `high` of the 95 % interval and the standard error `se`, NaN if a field
        has none. Layers are ordered as in the model. Fields that the run did not measure are left out.

        `result.to_frame()` is the wide table of one result, with a column for each field over the axes of its `values`.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.LogitLens(), lsim.Cosine(center="none")])
            >>> table = report.to_frame()
            >>> losses = table.query("analyzer == 'logit_lens' and field == 'cross_entropy'")
            >>> len(losses), losses["value"].is_monotonic_decreasing
            (8, True)
        """
        tables = []
        for name, result in self.items():
            for field in result.tensor_fields():
                if not bool(getattr(result, field).isnan().all()):
                    tables.append(field_lines(name, result, field))
        return joined_tables(tables)

    def to_xarray(self) -> xarray.DataTree:
        """An `xarray.DataTree` with one node for each result: its table from `Result.to_xarray`.

        `tl_layersim.stack` makes one table of many reports.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.LogitLens(), lsim.CKA()])
            >>> float(report.to_xarray()["logit_lens"]["accuracy"].max()) > 0.3
            True
        """
        import xarray

        return xarray.DataTree.from_dict({name: result_table(result) for name, result in self.items()})

    @typed
    def p_values(self, method: Correction = "holm") -> pandas.DataFrame:
        """All p-values of the report in one table, corrected for the number of tests.

        These are the p-values of `permutations=`: the tensor fields whose names end in `p_value` or `p_values`. Columns
        `analyzer` and `field`; the labels of each axis as in `to_frame`; `p_value`, as it was measured; and `p_adjusted`. Each
        test is one line. For layers of one model, the diagonal is left out, and a symmetric measure counts each pair of layers
        once. A p-value that is NaN stays NaN and does not count.

        The smallest p-value of a run is 1 / (permutations + 1), so m tests need 20 m - 1 permutations for 0.05 after Holm.

        Args:
            method: "holm" bounds the probability of any false finding in the report (Holm 1979); "fdr_bh" the expected
                fraction of false findings among all (Benjamini and Hochberg 1995).

        Source:
            `statsmodels.stats.multitest.multipletests`; Holm 1979; Benjamini and Hochberg 1995.

        Examples:
            >>> import tl_layersim as lsim
            >>> analyzers = [lsim.CKA(minibatch=32, permutations=39), lsim.LogitLens()]
            >>> found = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], analyzers).p_values("fdr_bh")
            >>> list(found.columns)
            ['analyzer', 'field', 'row_layer', 'column_layer', 'p_value', 'p_adjusted']
            >>> len(found), bool((found["p_adjusted"] >= found["p_value"]).all())  # 36 pairs of layers, and the maximum
            (37, True)
        """
        tables = []
        for name, result in self.items():
            for field in result.tensor_fields():
                if not field.endswith(("p_value", "p_values")):
                    continue
                tested = distinct_test_mask(result, field)
                if bool(tested.any()):
                    tables.append(field_lines(name, result, field)[tested.numpy().reshape(-1)])
        table = joined_tables(tables).drop(columns=list(NUMBERS[1:]), errors="ignore").rename(columns={"value": "p_value"})
        p_values = torch.tensor(table["p_value"].to_numpy(dtype=float))
        [corrected] = adjusted([(p_values, False)], method)
        return table.assign(p_adjusted=corrected.numpy())

    @typed
    def plot(self, width: Literal["column", "text"] | None = None, title: str | None = None) -> plotly.graph_objects.Figure:
        """Plotly figure whose panels are the first figure of each result. Results without figures are left out.

        Args:
            width: see `Result.plot`. With "column" the panels are stacked vertically.
            title: title above all panels; None or "" for no title.

        Raises:
            LayersimError: no result of the report has a figure.
        """
        figures = [result.plot(width=width) for result in self.values() if result.pictures]
        if not figures:
            raise LayersimError(f"The report has no figures; its results are {', '.join(self) or 'none'}.")
        return registered_renderer().panels(figures, width, title or "")

    @typed
    def to_csv(self, path: FilePath) -> Path:
        """Write the table of `to_frame` as CSV, without index; undefined numbers are empty.

        A label that a spreadsheet would run as a formula, such as a site named =A1, begins with an apostrophe.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written; an older file at `path` is unchanged.
        """
        table = self.to_frame()
        labels = [str(name) for name in table.columns if table[name].dtype.kind not in "fi"]
        texts = {name: table[name].astype(object).map(plain_cell) for name in labels}
        text = table.assign(**texts).to_csv(index=False)
        with replacing(path) as file:
            file.write(text.encode())
        return Path(path)

    def to_latex(self) -> str:
        """The headline numbers as a LaTeX table. With `intervals=True`, each has ± half its 95 % interval.

        It uses the package booktabs. `result.to_latex(field)` is the table of a field.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.LogitLens())
            >>> report.to_latex().splitlines()[4].split(" & ")[:2]
            ['logit\\\\_lens', 'accuracy of the last layer']
        """
        return latex(headline_table(self), 2)

    def to_markdown(self) -> str:
        """The headline numbers as a Markdown table. With `intervals=True`, each has ± half its 95 % interval."""
        return markdown(headline_table(self))

    @typed
    def to_json(self, path: FilePath) -> Path:
        """Write the table of `to_frame`, the headline numbers and the provenance as strict JSON.

        Entries `schema` and `data` have pandas' layout "table", so that `pandas.read_json(path, orient="table",
        precise_float=True)` is the table again. Entries `headline`, `results` (classes) and `provenance` stand beside them.
        JSON has no NaN and no infinite numbers: they are null. `save` writes a file that `load` reads exactly.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written; an older file at `path` is unchanged.
        """
        from pandas.io.json import build_table_schema

        table = self.to_frame()
        document = {
            "schema": build_table_schema(table, index=False),
            "data": table.astype(object).to_dict("records"),
            "headline": self.headline(),
            "results": {name: type(result).__name__ for name, result in self.items()},
            "provenance": {name: asdict(result.provenance) for name, result in self.items()},
        }
        # NaN and infinite numbers become null.
        strict = json.loads(json.dumps(document), parse_constant=lambda constant: None)
        with replacing(path) as file:
            file.write(json.dumps(strict, allow_nan=False).encode())
        return Path(path)

    def headline(self) -> dict[str, float]:
        """The headline numbers of all results as a flat dict for wandb, tensorboard or MLflow.

        Keys are the name of the result, a slash and the description in lower-case letters, digits and _, such as
        "cka/cka_last_but_one_last". Sites that are findings are left out of them, so that curves over a training have one name.
        After `intervals=True` the ends of 95 % intervals are beside the numbers, under the same key with _low and _high.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.LogitLens())
            >>> sorted(report.headline())[0]
            'logit_lens/accuracy_after_block_4'
        """
        numbers: dict[str, float] = {}
        for name, result in self.items():
            intervals = headline_intervals(result)
            for text, value in result.headline().items():
                # A site that is a finding would give another name at every step of a training.
                short = _logger_name(re.sub(r" \(.*\)$", "", text.partition(", at ")[0]))
                descriptions = (short, _logger_name(text), *(f"{short}_{number}" for number in range(2, 1000)))
                keys = (f"{name}/{description}" for description in descriptions)
                key = next(key for key in keys if key not in numbers)
                numbers[key] = float(value)
                if text in intervals:
                    numbers[f"{key}_low"] = float(intervals[text].low)
                    numbers[f"{key}_high"] = float(intervals[text].high)
        return numbers

    @typed
    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        message: str = "Upload a tl_layersim report",
    ) -> str:
        """Upload the report to the Hugging Face hub. `tl_layersim.load("hf://user/name")` reads it there.

        The repository holds `report.safetensors` (all numbers), `report.html` (the page), `report.csv` (the table, which the
        hub shows and `datasets.load_dataset` reads) and a card with the provenance. Its type is dataset, because it holds
        numbers about a model and no weights. It is created if it does not exist; each upload is one commit.

        The provenance is uploaded as it is, with the path of a model that was loaded from a folder.

        Args:
            repo: "user/name", or "name" in the own account.
            private: whether a new repository is private. Default: as the account is set. True raises an error if the repository
                exists and is public.
            revision: branch to upload to, created if it does not exist. Default: the main branch.
            token: token with write access. Default: the token of `hf auth login` or of the variable HF_TOKEN. It is not written
                anywhere.
            message: text of the commit.

        Returns:
            The address of the repository's page.

        Raises:
            LayersimError: the report is empty, or `private` is True and the repository is public.
            OSError: an error of `huggingface_hub`: not logged in, no write access, or the hub cannot be reached.
        """
        from huggingface_hub import CommitOperationAdd, HfApi

        if not self:
            raise LayersimError("The report is empty; it must have one result or more to be uploaded.")
        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            url = api.create_repo(repo, repo_type=REPO_TYPE, private=private, exist_ok=True)
            repo_id = url.repo_id
            if private and not api.repo_info(repo_id, repo_type=REPO_TYPE).private:
                raise LayersimError(
                    f"`private` is True, but the repository {repo_id} exists and is public. Pass another name, or make the "
                    f"repository private at {url}/settings."
                )
            if revision is not None and revision != "main":
                api.create_branch(repo_id, repo_type=REPO_TYPE, branch=revision, exist_ok=True)
            self.save(Path(folder, REPORT_FILE))
            self.to_html(Path(folder, "report.html"))
            self.to_csv(Path(folder, "report.csv"))
            Path(folder, "README.md").write_text(card(self, repo_id, revision), encoding="utf-8")
            operations = [CommitOperationAdd(path.name, path) for path in sorted(Path(folder).iterdir())]
            api.create_commit(repo_id, operations, repo_type=REPO_TYPE, revision=revision, commit_message=message)
        return str(url)

    @typed
    def to_html(self, path: FilePath) -> Path:
        """Write one self-contained HTML page with a summary, all tables and all figures.

        The page opens from disk without a network. It has about 5 MB, most of which is plotly.js.

        Args:
            path: path of the page.
        """
        return registered_renderer().write_html(self, path)


@typed
def load(path: FilePath) -> Any:
    """Read a `Result` or a `Report` from a file or from the Hugging Face hub.

    Args:
        path: path of the file; or hf://user/name for the report that `push_to_hub` uploaded, hf://user/name/file.safetensors
            for another file of a repository of type dataset, hf://user/name@revision for a branch, tag or commit.

    Raises:
        FileNotFoundError: the file does not exist.
        LayersimError: the file is truncated, changed since it was written, of another program, or of a newer version.
        OSError: an error of `huggingface_hub`: the hub has no such file, or cannot be reached.
    """
    return load_kind(path, ("result", "report"), Result, Report)


def refuse_other_format(path: FilePath) -> None:
    """Raise an error if the path of a safetensors file ends as files of another format do.

    Args:
        path: path of the file.

    Raises:
        LayersimError: names the method that writes the other format, if there is one.
    """
    remedy = OTHER_FORMATS.get(Path(path).suffix.lower())
    if remedy is not None:
        raise LayersimError(f"`path` is {brief(path)}, but `save` writes a safetensors file; {remedy}.")


def _logger_name(text: str) -> str:
    """Convert a text to lower-case letters, digits and _, which all loggers accept.

    Examples:
        >>> _logger_name("COS(last but one, last)")
        'cos_last_but_one_last'
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


__all__ = ["LayerCurve", "LayerMatrix", "Provenance", "Report", "Result", "axes", "load"]
