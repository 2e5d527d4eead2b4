"""Differences of two results: intervals, p-values, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.intervals import aligned, bounded_field, has_margin, refuse_level, total_of
from ..core.jackknife import ConfidenceInterval
from ..core.label_table import label_table
from ..core.result_differences import Estimate, difference_estimate
from ..core.results import Result
from .relative_depth import SITE_AXES, at_depths, depths, sites_along

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

Correction: TypeAlias = Literal["holm", "fdr_bh"]
DEPTH_COLUMNS = {"row": "row_depth", "column": "column_depth", "row_block": "row_depth", "column_block": "column_depth"}


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
    def interval(self, what: str | Callable[[Any], Any] = "values", level: int | float = 0.95) -> ConfidenceInterval:
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
        refuse_level(level)
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
    def to_frame(self, field: str = "values", level: int | float = 0.95, adjust: Correction = "holm") -> pandas.DataFrame:
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
        refuse_level(level)
        found = self._estimate(field)
        table = label_table(self.labels(field))
        if self.relative_depth:
            names = [DEPTH_COLUMNS.get(axis, "depth" if axis in SITE_AXES else axis) for axis in self._axes(field)]
            table.columns = type(table.columns)(names)
        ends, p = found.interval(level), found.p_value()
        columns = {"first": found.first, "second": found.second, "difference": ends.value, "low": ends.low, "high": ends.high}
        columns |= {"p_value": p, "p_adjusted": adjusted(p, adjust)}
        for name, values in columns.items():
            table[name] = values.numpy().reshape(-1)
        return table

    @typed
    def plot(self, field: str = "values", level: int | float = 0.95) -> plotly.graph_objects.Figure:
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
                f"A figure of `{field}` would have {len(labels)} axes.",
                given=" x ".join(labels) or "a single number",
                expected="a field over one axis or two",
                do=f"difference.to_frame({field!r})",
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
        return "\n".join([f"Difference({type(self.second).__name__}, {models[1]} minus {models[0]}, {how})", *self.lines()])

    def lines(self) -> list[str]:
        """The headline numbers as text, each with half the width of its 95 % interval."""
        lines = []
        for name in self._headlines():
            found = self._headline(name)
            ends = found.interval(0.95)
            margin, p = float(ends.high - ends.low) / 2, float(found.p_value())
            certain = f" ± {margin:.2g}" + (f" (p = {p:.2g})" if not math.isnan(p) else "") if margin > 0 else ""
            lines.append(f"  {name}: {float(found.first):.4g} -> {float(found.second):.4g}, {float(ends.value):+.3g}{certain}")
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
                    f"{type(self.second).__name__}.{field} has other labels along {axis!r} in the two results.",
                    given=f"{shown_labels(first)}; {shown_labels(second)}",
                    expected="the same labels",
                    do="a function of the results that returns one number: difference.interval(lambda result: ...)",
                )
            own[axis] = first
        return own

    def _axes(self, field: str) -> tuple[str, ...]:
        return self.second.tensor_fields()[bounded_field(self.second, field)[0]]

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
            raise LayersimError(
                "The function of `interval` returns numbers of other shapes for the two results.",
                given=f"{shapes[0]} and {shapes[1]}",
                expected="one shape",
                do="a function that returns one number, such as lambda result: result.values.mean()",
            )
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
        lines = [f"ReportDifference({models[1]} minus {models[0]}, {'paired' if any_one.paired else 'unpaired'})"]
        return "\n".join(lines + [f"  {name}: {line.strip()}" for name, own in self.items() for line in own.lines()])

    def summary(self) -> pandas.DataFrame:
        """The tables of `Difference.summary` below one another, with the analyzer as first column.

        `p_adjusted` is corrected over all lines (Holm).
        """
        import pandas

        table = pandas.concat([own.summary().assign(analyzer=name) for name, own in self.items()], ignore_index=True)
        table["p_adjusted"] = adjusted(torch.tensor(table["p_value"].to_numpy(), dtype=torch.float64), "holm").numpy()
        return table[["analyzer", *(column for column in table.columns if column != "analyzer")]]


def adjusted(p: Tensor, adjust: Correction) -> Tensor:
    """p-values corrected for their number; NaN is no test, and the two halves of a symmetric matrix count once.

    Args:
        p: of any shape.
        adjust: name of the correction in statsmodels.

    Examples:
        >>> adjusted(torch.tensor([0.01, 0.04, float("nan")]).double(), "holm")
        tensor([0.0200, 0.0400,    nan], dtype=torch.float64)
    """
    from statsmodels.stats.multitest import multipletests

    symmetric = p.dim() == 2 and p.shape[0] == p.shape[1] and torch.allclose(p, p.T, rtol=1e-6, atol=0, equal_nan=True)
    once = torch.ones_like(p, dtype=torch.bool).triu() if symmetric else torch.ones_like(p, dtype=torch.bool)
    tested = once & ~p.isnan()
    out = torch.full_like(p, math.nan)
    if bool(tested.any()):
        out[tested] = torch.as_tensor(multipletests(p[tested].numpy(), method=adjust)[1], dtype=p.dtype)
    return out.where(once, out.T) if symmetric else out


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
