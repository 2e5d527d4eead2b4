"""The results of a sweep: a report for each of many models or checkpoints, as one table and in one file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.intervals import headline_margins
from ..core.result_files import pack_report
from ..core.results import Report
from ..core.storage import write
from ..core.wording import brief
from .sweep_curves import field_axes, field_number, relative_depth, site_axes

if TYPE_CHECKING:
    import pandas


class Sweep(Mapping[int | float | str, Report]):
    """The reports of one analysis of many models, by training step, model size or name, in the order of the models.

    Args:
        reports: by key. Keys are all numbers, or all names.

    Examples:
        >>> import tl_layersim as lsim
        >>> models = {"first": lsim.demo_model(), "again": lsim.demo_model}
        >>> found = lsim.sweep(models, lsim.demo_text()[:2], lsim.Trajectory())
        >>> list(found), found["again"]["trajectory"].lss.mean == found["first"]["trajectory"].lss.mean
        (['first', 'again'], tensor(True))
        >>> list(found.to_frame("trajectory", "growth").columns)
        ['key', 'layer', 'relative_depth', 'value']
    """

    def __init__(self, reports: Mapping[int | float | str, Report]) -> None:
        keys = sweep_keys(reports, "reports")
        self._reports = dict(zip(keys, reports.values(), strict=True))

    def __getitem__(self, key: int | float | str) -> Report:
        if key not in self._reports:
            raise KeyError(f"The sweep has no model {key!r}; it has {', '.join(map(repr, self._reports)) or 'none'}")
        return self._reports[key]

    def __iter__(self) -> Iterator[int | float | str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)

    def __repr__(self) -> str:
        keys = [str(key) for key in self]
        shown = keys if len(keys) <= 8 else [*keys[:4], "...", *keys[-2:]]
        return f"Sweep({len(keys)} models: {', '.join(shown)}; {', '.join(self.analyzers)})"

    @property
    def analyzers(self) -> tuple[str, ...]:
        """Names of the analyzers that every report has."""
        each = list(self._reports.values())
        return tuple(name for name in (each[0] if each else ()) if all(name in report for report in each))

    @typed
    def results(self, analyzer: str) -> dict[int | float | str, Any]:
        """The results of one analyzer by key.

        Args:
            analyzer: its name.

        Raises:
            LayersimError: no such analyzer was measured on every model.
        """
        if analyzer not in self.analyzers:
            raise LayersimError(
                f"`analyzer` is {analyzer!r}; it must be one of {', '.join(map(repr, self.analyzers)) or 'none'}, the "
                "analyzers of the sweep."
            )
        return {key: report[analyzer] for key, report in self._reports.items()}

    @typed
    def to_frame(self, analyzer: str, field: str = "values") -> pandas.DataFrame:
        """A tidy table of a field of all models, with a line for each of its entries.

        Columns are `key`, the axes of the field such as `layer`, `relative_depth`, and `value`; after `intervals=True` also
        `value_low` and `value_high`, the ends of the 95 % interval. `relative_depth` is 0 at the first site of a model and 1 at
        the last, so that models of different depths can be compared. A matrix of layers has `row_depth` and
        `column_depth`.

        Args:
            analyzer: its name.
            field: name of a tensor field of its result.

        Raises:
            LayersimError: no such analyzer was measured on every model, or its result has no such field.
        """
        import pandas

        tables = [_model_table(key, result, field) for key, result in self.results(analyzer).items()]
        table = pandas.concat(tables, ignore_index=True)
        for column in tables[0].columns[1:]:
            if isinstance(tables[0][column].dtype, pandas.CategoricalDtype):
                # Blocks in their order, of models of different depths too.
                order = list(dict.fromkeys(label for one in tables for label in one[column].cat.categories))
                table[column] = pandas.Categorical(table[column], categories=order, ordered=True)
        return table

    @typed
    def numbers(
        self,
        analyzer: str,
        field: str | Callable[[Any], Any] = "values",
        *,
        layer: int | str | None = None,
        select: Mapping[str, Any] | None = None,
    ) -> pandas.Series[float]:
        """One number for each model, such as its cross-entropy, for `relate` and own figures.

        Args:
            analyzer: its name.
            field: name of a tensor field; or a headline, in its words; or a function that takes a result and returns a number.
            layer: the layer at which the field is taken, by its name or its number. None takes the mean over layers without
                undefined values, for `BlockCoupling` the mean over pairs of different blocks.
            select: labels of further axes of the field by axis, such as `{"quantile": 0.95}`. By default the median of
                quantiles, the last layer of the columns of a matrix of layers, and the first k.

        Returns:
            A pandas Series by key, whose name is the quantity in words.

        Raises:
            LayersimError: no such analyzer was measured on every model; its result has no such field or layer; or the field has
                an axis of which no label is selected.
        """
        import pandas

        results = self.results(analyzer)
        found = [field_number(result, field, layer, select or {}) for result in results.values()]
        first = next(iter(results.values()))
        name = ", ".join(filter(None, (quantity_of(first, field), found[0].words)))
        values = [float(one.values) for one in found]
        return pandas.Series(values, index=pandas.Index(list(results), name="key"), name=name)

    def headlines(self) -> pandas.DataFrame:
        """A table of the headline numbers of all analyzers, with a line for each model.

        After `intervals=True` the column `x ±` holds half the width of the 95 % interval of `x`.
        """
        import pandas

        lines = []
        for report in self._reports.values():
            line = {}
            for name, result in report.items():
                margins = headline_margins(result)
                for text, value in result.headline().items():
                    line[f"{name}: {text}"] = value
                    line |= {f"{name}: {text} ±": margins[text]} if text in margins else {}
            lines.append(line)
        return pandas.DataFrame(lines, index=pandas.Index(list(self._reports), name="key"))

    @typed
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all reports to one safetensors file, without pickle; `tl_layersim.load` reads it back exactly.

        Args:
            path: of the file.
        """
        packed = [pack_report(report) for report in self._reports.values()]
        tensors: dict[str, torch.Tensor] = {
            f"{number}/{name}": tensor for number, (_, own) in enumerate(packed) for name, tensor in own.items()
        }
        return write(path, "sweep", {"keys": list(self._reports), "reports": [header for header, _ in packed]}, tensors)


class SweepError(LayersimError):
    """A model of a sweep could not be measured.

    Attributes:
        sweep: the reports of the models before it.
    """

    sweep: Sweep


def sweep_keys(models: Mapping[Any, Any], argument: str) -> list[int | float | str]:
    """The keys of models: training steps, sizes or names.

    Args:
        models: a mapping.
        argument: its name, for messages.

    Raises:
        LayersimError: the keys are neither all numbers nor all names, or two are the same.
    """
    # A key of NumPy or torch is the same number.
    keys = [key.item() if hasattr(key, "item") else key for key in models]
    numbers = [isinstance(key, int | float) and not isinstance(key, bool) and math.isfinite(key) for key in keys]
    names = [isinstance(key, str) and bool(key.strip()) for key in keys]
    if not (all(numbers) or all(names)) or len(set(keys)) < len(keys):
        raise LayersimError(
            f"The keys of `{argument}` are {brief(keys)}; they must be different finite numbers, or different names."
        )
    return keys


def quantity_of(result: Any, field: str | Callable[[Any], Any]) -> str:
    """A field in words with its unit, for tables and figures; a headline as it is."""
    if not isinstance(field, str):
        name = getattr(field, "__name__", "<lambda>")
        return "Value" if name == "<lambda>" else name.replace("_", " ").capitalize()
    if field in result.headline():
        return field[:1].upper() + field[1:]
    words: str = result.declared(field).words
    return words


def _model_table(key: int | float | str, result: Any, field: str) -> pandas.DataFrame:
    """The table of one model."""
    table: pandas.DataFrame = result.to_frame(field)
    own = result.values_name if field == "values" else field
    axes, sites = field_axes(result, field), site_axes(result, field)
    # The columns of a table begin with the axes of the field.
    columns = list(table.columns[: len(axes)])
    found = table[columns].copy()
    found.insert(0, "key", key)
    for axis, column in zip(axes, columns, strict=True):
        if axis in sites:
            name = "relative_depth" if len(sites) == 1 else f"{column.removesuffix('_layer')}_depth"
            found[name] = [relative_depth(result, site) for site in table[column]]
    found["value"] = table[own]
    for end in ("low", "high"):
        if f"{own}_{end}" in table:
            found[f"value_{end}"] = table[f"{own}_{end}"]
    return found
