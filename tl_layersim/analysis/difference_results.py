"""Differences of two results: intervals, p-values, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.argument_checks import typed
from ..core.bounds import OpenFraction
from ..core.errors import LayersimError
from ..core.intervals import aligned, bounded_field, bounds_of, has_margin, total_of
from ..core.jackknife import ConfidenceInterval
from ..core.label_table import label_table
from ..core.p_values import Correction, adjusted, adjusted_table, counted_once, p_value_lines
from ..core.result_differences import Estimate, difference_estimate
from ..core.results import Result
from ..core.wording import amount, equation, headed, p_value_text
from .relative_depth import SITE_AXES, at_depths, depths, sites_along

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

DEPTH_COLUMNS = {"row": "row_depth", "column": "column_depth", "row_block": "row_depth", "column_block": "column_depth"}


class PrintedLine(NamedTuple):
    """A headline number of two results as it is printed.

    Attributes:
        text: the number in both, and the difference with its margin.
        p: of the difference; NaN if it has no margin.
    """

    text: str
    p: float


@dataclass(frozen=True, eq=False, repr=False)
class Difference:
    """The difference of two results of one class, the second minus the first. `difference` makes it.

    Attributes:
        first: the result that is subtracted.
        second: the result that it is subtracted from.
        paired: whether both were measured on the same data in the same blocks. The jackknife is then one of the differences
            without each block, and what the data have in common cancels.
        relative_depth: whether fields are compared at relative depths instead of sites of one name.
    """

    first: Result
    second: Result
    paired: bool
    relative_depth: bool = False

    @typed
    def interval(self, what: str | Callable[[Any], Any] = "values", level: OpenFraction = 0.95) -> ConfidenceInterval:
        """Standard error and confidence interval of the difference of a field, or of any number, second minus first.

        Args:
            what: name of a tensor field; or a function that takes a result and returns a number or a tensor, such as
                `lambda result: result.distance()`. A function receives the results as they were measured, at relative depths
                too.
            level: of confidence.

        Returns:
            `value` (the difference), `low`, `high` and the standard `error`, float64 tensors of one shape.

        Raises:
            LayersimError: the results have no such field, or the field has other labels in one of them.
        """
        return self._estimate(what).interval(level)

    @typed
    def p_value(self, what: str | Callable[[Any], Any] = "values") -> Tensor:
        """Two-sided p-values of Student's t test that the difference is 0, float64, not corrected for their number.

        Where no block changes the difference, as on the diagonal of a similarity, there is no test: NaN.

        Args:
            what: as in `interval`.
        """
        return self._estimate(what).p_value()

    @typed
    def to_frame(self, field: str = "values", level: OpenFraction = 0.95, adjust: Correction = "holm") -> pandas.DataFrame:
        """A tidy table with one line for each entry of a field.

        Columns of sites as in `Result.to_frame` (`depth`, or `row_depth` and `column_depth`, for relative depths), then
        `first`, `second`, `difference`, the ends `low` and `high` of its interval, `p_value`, and `p_adjusted`, which is
        corrected for the number of tests in the table. The two halves of a symmetric matrix count once.

        Args:
            field: name of a tensor field.
            level: of the intervals.
            adjust: "holm" bounds the probability of any false finding in the table (Holm 1979); "fdr_bh" the expected
                fraction of false findings among all (Benjamini and Hochberg 1995).

        Raises:
            LayersimError: as `interval`.
        """
        found = self._estimate(field)
        table = label_table(self._columns(field))
        ends, p = found.interval(level), found.p_value()
        columns = {"first": found.first, "second": found.second, "difference": ends.value, "low": ends.low, "high": ends.high}
        columns |= {"p_value": p, "p_adjusted": adjusted(p, adjust)}
        for name, values in columns.items():
            table[name] = values.numpy().reshape(-1)
        return table

    @typed
    def p_values(self, method: Correction = "holm") -> pandas.DataFrame:
        """The p-values of all fields in one table, adjusted for the number of tests in the whole table.

        Columns `field`, the labels of each axis as in `to_frame`, `p_value` and `p_adjusted`. Each test is one line: the two
        halves of a symmetric matrix count once. A p-value that is NaN stays NaN and does not count. Fields without any
        p-value, and those with other labels in the two results, are left out.

        Args:
            method: as `adjust` of `to_frame`.

        Examples:
            >>> import tl_layersim as lsim
            >>> data = lsim.Data(lsim.demo_text()[:16], batch_size=1)
            >>> models = [lsim.demo_model(aligned=own) for own in (False, True)]
            >>> runs = [lsim.analyze(model, data, lsim.LogitLens(), intervals=True) for model in models]
            >>> found = lsim.difference(*runs)["logit_lens"].p_values()
            >>> bool((found.query("field == 'accuracy'")["p_adjusted"] < 0.05).any())
            True
        """
        return adjusted_table(self.p_value_tables(), method)

    def p_value_tables(self, analyzer: str = "") -> list[pandas.DataFrame]:
        """The p-values of each field as a table, not adjusted.

        Args:
            analyzer: name of the results; no such column without it.
        """
        tables = []
        for name, within in bounds_of(self.second).items():
            if within is not None and self._has_same_labels(name):
                p = self._estimate(name).p_value()
                if not bool(p.isnan().all()):
                    shown = self.second.values_name if name == "values" else name
                    tables.append(p_value_lines(shown, self._columns(name), p, counted_once(p), analyzer))
        return tables

    @typed
    def plot(self, field: str = "values", level: OpenFraction = 0.95) -> plotly.graph_objects.Figure:
        """A plotly figure of the difference: curves with their intervals as bands, or a heatmap.

        A dot in a cell of a heatmap says that the interval of this cell excludes 0. Dots are not corrected for the number
        of cells; `to_frame` has corrected p-values.

        Args:
            field: name of a tensor field over one axis or two.
            level: of the intervals.

        Raises:
            LayersimError: as `interval`; or the field has other axes.
        """
        from ..reporting.differences import difference_figure
        from ..reporting.style import model_name

        labels = self.labels(field)
        if len(labels) not in (1, 2):
            raise LayersimError(
                f"`field` is {field!r}, which has {len(labels)} axes; a figure shows one or two. Use to_frame({field!r})."
            )
        own = bounded_field(self.second, field)[0]
        models = [model_name(result.provenance.model) for result in (self.first, self.second)]
        names = (models[0], models[1]) if models[0] != models[1] else ("first run", "second run")
        return difference_figure(self.second, own, labels, self.interval(field, level), level, self.relative_depth, names)

    def summary(self) -> pandas.DataFrame:
        """A table of the headline numbers that both results have.

        Columns `quantity`, `first`, `second`, `difference`, the ends `low` and `high` of its 95 % interval, `p_value` and
        `p_adjusted` (Holm, over the lines of the table).
        """
        import pandas

        columns = ("quantity", "first", "second", "difference", "low", "high", "p_value", "p_adjusted")
        rows = [_summary_line(name, self._headline(name)) for name in self._headlines()]
        p = adjusted(torch.tensor([row[-1] for row in rows], dtype=torch.float64), "holm")
        return pandas.DataFrame([(*row, float(own)) for row, own in zip(rows, p, strict=True)], columns=list(columns))

    def __repr__(self) -> str:
        blocks = [len(result.block_tokens) for result in (self.first, self.second)]
        how = f"paired over {blocks[0]} blocks" if self.paired else f"unpaired, {blocks[0]} and {blocks[1]} blocks"
        models = [result.provenance.model for result in (self.first, self.second)]
        return _printed(f"Difference({type(self.second).__name__}, {models[1]} minus {models[0]}, {how})", self.lines())

    def lines(self) -> list[PrintedLine]:
        """The headline numbers as text, each with half of its 95 % interval, and their p-values."""
        lines = []
        for name in self._headlines():
            found = self._headline(name)
            ends = found.interval(0.95)
            margin = float(ends.high - ends.low) / 2
            certain, p = (f" ± {margin:.2g}", float(found.p_value())) if margin > 0 else ("", math.nan)
            text = f"{name}: {float(found.first):.4g} -> {float(found.second):.4g}, {float(ends.value):+.3g}{certain}"
            lines.append(PrintedLine(text, p))
        return lines

    def labels(self, field: str) -> dict[str, tuple[Any, ...]]:
        """Labels along each axis of a field: names of sites, or their relative depths.

        Args:
            field: name of a tensor field.

        Raises:
            LayersimError: the results have no such field, or the field has other labels in one of them.
        """
        own = {}
        for axis in self._axes(field):
            first, second = self.first.coordinates(axis), self.second.coordinates(axis)
            if self.relative_depth and axis in SITE_AXES:
                own[axis] = depths(self._grid(axis), axis)
                continue
            if first != second:
                raise LayersimError(
                    f"`{field}` has other labels along {axis!r} in the two results: {shown_labels(first)}; "
                    f"{shown_labels(second)}. Compare one number of each, with difference.interval(lambda result: ...)."
                )
            own[axis] = first
        return own

    def _axes(self, field: str) -> tuple[str, ...]:
        return self.second.tensor_fields()[bounded_field(self.second, field)[0]]

    def _columns(self, field: str) -> dict[str, tuple[Any, ...]]:
        """Labels by name of the column: of sites, or of relative depths."""
        labels = self.labels(field)
        if not self.relative_depth:
            return labels
        return {DEPTH_COLUMNS.get(axis, "depth" if axis in SITE_AXES else axis): own for axis, own in labels.items()}

    def _has_same_labels(self, field: str) -> bool:
        both = (self.first, self.second)
        axes = [axis for axis in self._axes(field) if not (self.relative_depth and axis in SITE_AXES)]
        return all(len({result.coordinates(axis) for result in both}) == 1 for axis in axes)

    def _grid(self, axis: str) -> int:
        return min(len(sites_along(self.first, axis)), len(sites_along(self.second, axis)))

    def _estimate(self, what: str | Callable[[Any], Any]) -> Estimate:
        if not isinstance(what, str):
            return self._same_shapes(what)
        field, within = bounded_field(self.second, what)
        self.labels(what)
        read = partial(self._read, field=field)
        return difference_estimate(self.first, self.second, read, self.paired, within, total_of(self.second, field))

    def _read(self, result: Result, field: str) -> Tensor:
        """A field of a result or of a replicate, at relative depths where they are asked for."""
        is_first = result is self.first or any(result is one for one in self.first.replicates)
        values = aligned(result, self.first if is_first else self.second, field)
        if self.relative_depth:
            for dim, axis in enumerate(result.tensor_fields()[field]):
                if axis in SITE_AXES:
                    values = at_depths(values, dim, len(sites_along(result, axis)), self._grid(axis), axis)
        return values

    def _same_shapes(self, function: Callable[[Any], Any]) -> Estimate:
        shapes = [tuple(torch.as_tensor(function(result)).shape) for result in (self.first, self.second)]
        if shapes[0] != shapes[1]:
            raise LayersimError(f"`what` returns shapes {shapes[0]} and {shapes[1]} for the two results; they must be equal.")
        return difference_estimate(self.first, self.second, function, self.paired)

    def _headlines(self) -> list[str]:
        second = self.second.headline()
        return [name for name in self.first.headline() if name in second and has_margin(name)]

    def _headline(self, name: str) -> Estimate:
        return self._same_shapes(lambda result: result.headline().get(name, math.nan))


class ReportDifference(Mapping[str, Difference]):
    """The differences of the results of two reports, by name of the analyzer. `difference` makes it.

    Args:
        differences: by name.
    """

    def __init__(self, differences: Mapping[str, Difference]) -> None:
        self._differences = dict(differences)

    def __getitem__(self, name: str) -> Difference:
        return self._differences[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._differences)

    def __len__(self) -> int:
        return len(self._differences)

    def __repr__(self) -> str:
        any_one = next(iter(self.values()))
        models = [result.provenance.model for result in (any_one.first, any_one.second)]
        title = f"ReportDifference({models[1]} minus {models[0]}, {'paired' if any_one.paired else 'unpaired'})"
        return _printed(title, [PrintedLine(f"{name}: {text}", p) for name, own in self.items() for text, p in own.lines()])

    @typed
    def p_values(self, method: Correction = "holm") -> pandas.DataFrame:
        """The p-values of all fields of all results in one table, adjusted for the number of tests in the whole report.

        As `Difference.p_values`, with the analyzer as first column.

        Args:
            method: "holm" bounds the probability of any false finding in the report (Holm 1979); "fdr_bh" the expected
                fraction of false findings among all (Benjamini and Hochberg 1995).

        Examples:
            >>> import tl_layersim as lsim
            >>> data = lsim.Data(lsim.demo_text()[:16], batch_size=1)
            >>> models = [lsim.demo_model(aligned=own) for own in (False, True)]
            >>> runs = [lsim.analyze(model, data, lsim.LogitLens(), intervals=True) for model in models]
            >>> found = lsim.difference(*runs).p_values("fdr_bh")
            >>> list(found.columns[:3]), list(found.columns[-2:])
            (['analyzer', 'field', 'layer'], ['p_value', 'p_adjusted'])
        """
        tables = [table for name, own in self.items() for table in own.p_value_tables(name)]
        return adjusted_table(tables, method)

    def summary(self) -> pandas.DataFrame:
        """The tables of `Difference.summary` below one another, with the analyzer as first column.

        `p_adjusted` is corrected over all lines (Holm).
        """
        import pandas

        table = pandas.concat([own.summary().assign(analyzer=name) for name, own in self.items()], ignore_index=True)
        table["p_adjusted"] = adjusted(torch.tensor(table["p_value"].to_numpy(), dtype=torch.float64), "holm").numpy()
        return table[["analyzer", *(column for column in table.columns if column != "analyzer")]]


def _printed(title: str, lines: Sequence[PrintedLine]) -> str:
    """Lines below their title, with p-values adjusted after Holm over the lines."""
    each = adjusted(torch.tensor([line.p for line in lines], dtype=torch.float64), "holm").tolist()
    texts = [
        f"  {line.text}" + ("" if math.isnan(p) else f" ({equation('p', p_value_text(p))})")
        for line, p in zip(lines, each, strict=True)
    ]
    count = sum(not math.isnan(p) for p in each)
    return headed(title, texts, *([f"p adjusted for {amount(count, 'test')} (Holm)"] if count else []))


def _summary_line(name: str, found: Estimate) -> tuple[str, float, float, float, float, float, float]:
    ends = found.interval(0.95)
    numbers = (found.first, found.second, ends.value, ends.low, ends.high, found.p_value())
    first, second, value, low, high, p = (float(number) for number in numbers)
    return name, first, second, value, low, high, p


def shown_labels(names: tuple[Any, ...]) -> str:
    """Labels in a message: all of a few, else their number, the first and the last.

    Args:
        names: the labels.
    """
    if len(names) < 4:
        return ", ".join(map(str, names)) or "none"
    return f"{len(names)} from {names[0]} to {names[-1]}"
