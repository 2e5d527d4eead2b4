"""Tables of reports: all numbers in one tidy table, written as CSV or JSON; headline numbers with short names."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LayersimError
from .fields import declarations
from .findings import depth_key, in_depth_order, site_in_words
from .intervals import field_named, headline_intervals, headline_texts, margin_text
from .storage import replacing

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

# Axes whose labels are the blocks of the (first) model.
BLOCK_AXES = ("layer", "row_block", "column_block", "skipped", "affected")
# Names of columns, for axes whose labels are sites.
COLUMNS = {
    "residual": "layer",
    "row": "row_layer",
    "column": "column_layer",
    "row_block": "row_layer",
    "column_block": "column_layer",
}


def label_table(labels: Mapping[str, tuple[Any, ...]]) -> pandas.DataFrame:
    """A table of labels: one line for each entry of a tensor in memory order, one column for each axis.

    Args:
        labels: for each axis, its labels in order.
    """
    import pandas

    table = pandas.DataFrame(
        list(itertools.product(*labels.values())),
        columns=[COLUMNS.get(axis, axis) for axis in labels],
        index=None if labels else [0],
    )
    for axis, own in labels.items():
        if axis in (*COLUMNS, *BLOCK_AXES):
            # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
            name = COLUMNS.get(axis, axis)
            table[name] = pandas.Categorical(table[name], categories=list(own), ordered=True)
    return table


# Columns of labels that come first, and the columns of numbers.
SITE_COLUMNS = ("layer", "row_layer", "column_layer")
NUMBERS = ("value", "low", "high", "se", "untrained")


def tidy_table(report: Mapping[str, Any]) -> pandas.DataFrame:
    """All numbers of all results, one line for each; see `Report.to_frame`."""
    return joined_tables([table for name, result in report.items() for table in _tables_of(name, result)], NUMBERS)


def joined_tables(tables: Sequence[pandas.DataFrame], numbers: Sequence[str]) -> pandas.DataFrame:
    """Concatenate the tables of fields. Columns: names, then labels with site labels first, then numbers.

    Args:
        tables: tables with the columns `field`, perhaps `analyzer`, labels and numbers.
        numbers: names of the columns of numbers; every table has the first.
    """
    import pandas

    if not tables:
        return pandas.DataFrame({name: [] for name in ("analyzer", "field", numbers[0])})
    found = pandas.concat(tables, ignore_index=True)
    names = [name for name in ("analyzer", "field") if name in found.columns]
    labels = [name for name in found.columns if name not in (*names, *numbers)]
    first = [name for name in SITE_COLUMNS if name in labels]
    order = [*names, *first, *(name for name in labels if name not in first)]
    found = found[[*order, *(name for name in numbers if name in found.columns)]]
    for name in labels:
        own = [list(table[name].cat.categories) for table in tables if name in table and hasattr(table[name], "cat")]
        if own:
            # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
            found[name] = pandas.Categorical(found[name], categories=merged_labels(own), ordered=True)
    return found


def _tables_of(name: str, result: Any) -> list[pandas.DataFrame]:
    """One table for each field of a result, with the same number columns."""
    tables = []
    for field, own in declarations(result).items():
        if bool(getattr(result, field).isnan().all()):
            continue
        table = label_table({axis: result.coordinates(axis) for axis in own.axes})
        table.insert(0, "analyzer", name)
        table.insert(1, "field", own.name)
        for column, numbers in numbers_of(result, field).items():
            table[column] = numbers.numpy().reshape(-1)
        tables.append(table)
    return tables


def numbers_of(result: Any, field: str) -> dict[str, Tensor]:
    """The number columns of a field (`NUMBERS`): its values and, if the run has them, its intervals and untrained baseline.

    Args:
        result: the result that has the field.
        field: name of the attribute.
    """
    found = {"value": getattr(result, field)}
    if result.has_intervals and declarations(result)[field].within is not None:
        ends = result.interval(field)
        found |= {"low": ends.low, "high": ends.high, "se": ends.error}
    if (twins := result.of_untrained(field)) is not None:
        found["untrained"] = twins.mean(0)
    return found


def merged_labels(lists: list[list[Any]]) -> list[Any]:
    """Merge lists of labels into one list that keeps the order of each.

    Args:
        lists: lists of labels, in order.

    Examples:
        >>> merged_labels([["block 0", "block 1"], ["block 0", "block 1", "block 10"]])
        ['block 0', 'block 1', 'block 10']
    """
    merged: list[Any] = []
    for labels in sorted(lists, key=len, reverse=True):
        place = 0
        for label in labels:
            if label in merged:
                place = merged.index(label) + 1
            else:
                merged.insert(place, label)
                place += 1
    if all(depth_key(label) is not None for label in merged) and all(map(in_depth_order, lists)):
        # Of sites that no run has together, the number of the block says the order.
        merged.sort(key=depth_key)
    return merged


def write_csv(report: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the tidy table as CSV atomically.

    Raises:
        OSError: the file cannot be written.
    """
    text = tidy_table(report).to_csv(index=False)
    with replacing(path) as file:
        file.write(text.encode())
    return Path(path)


def write_json(report: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the tidy table, the headline numbers and the provenance as JSON atomically.

    Raises:
        OSError: the file cannot be written.
    """
    from pandas.io.json import build_table_schema

    table = tidy_table(report)
    about = {
        "schema": build_table_schema(table, index=False),
        "data": table.astype(object).to_dict("records"),
        "headline": headline_numbers(report),
        "results": {name: type(result).__name__ for name, result in report.items()},
        "provenance": {name: asdict(result.provenance) for name, result in report.items()},
    }
    text = json.dumps(_strict(about), allow_nan=False)
    with replacing(path) as file:
        file.write(text.encode())
    return Path(path)


def _strict(value: Any) -> Any:
    """Replace NaN and infinite numbers, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {str(key): _strict(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(own) for own in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def headline_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """The headline numbers of all results, with keys "result/short_name"; see `Report.headline`."""
    numbers: dict[str, float] = {}
    for name, result in report.items():
        intervals = headline_intervals(result)
        for text, value in result.headline().items():
            # A site that is a finding would give another name at every step of a training.
            short = _logger_name(re.sub(r" \(.*\)$", "", text.partition(", at ")[0]))
            keys = (f"{name}/{own}" for own in (short, _logger_name(text), *(f"{short}_{n}" for n in range(2, 1000))))
            key = next(key for key in keys if key not in numbers)
            numbers[key] = float(value)
            if text in intervals:
                numbers |= {f"{key}_low": float(intervals[text].low), f"{key}_high": float(intervals[text].high)}
    return numbers


def headline_table(report: Mapping[str, Any]) -> pandas.DataFrame:
    """The headline numbers of all results as a table of texts, with ± half the interval; see `Report.to_latex`."""
    import pandas

    lines = [(name, *line) for name, result in report.items() for line in headline_texts(result).items()]
    return pandas.DataFrame(lines, columns=["analyzer", "measure", "value"])


def field_table(result: Any, field: str) -> pandas.DataFrame:
    """A field as a table of texts, with ± half the interval and one line per label of the first axis; see `Result.to_latex`.

    Args:
        result: the result that has the field.
        field: name of a field over one or two axes.

    Raises:
        LayersimError: the field has no axis, or more than two.
    """
    import pandas

    own, held = result.declared(field), field_named(result, field)
    if len(own.axes) not in (1, 2):
        raise LayersimError(f"`field` is {field!r}, which has {len(own.axes)} axes; a table shows one or two.")
    numbers = numbers_of(result, held)
    values = numbers["value"]
    margins = (numbers["high"] - numbers["low"]) / 2 if "low" in numbers else values.new_full(values.shape, math.nan)
    labels, *others = ([site_in_words(str(label)) for label in result.coordinates(axis)] for axis in own.axes)
    columns = others[0] if others else [own.words]
    each = (part.reshape(len(labels), len(columns)).tolist() for part in (values, margins))
    return pandas.DataFrame(
        [[label, *map(margin_text, row, ends)] for label, row, ends in zip(labels, *each, strict=True)],
        columns=[COLUMNS.get(own.axes[0], own.axes[0]).replace("_", " "), *columns],
    )


def latex(table: pandas.DataFrame, labels: int) -> str:
    """A table of texts as LaTeX with the lines of the package booktabs, escaped.

    Args:
        table: a table of texts.
        labels: number of leading columns that hold labels.
    """
    text: str = table.to_latex(index=False, escape=True, column_format="l" * labels + "r" * (table.shape[1] - labels))
    return text.replace("±", r"$\pm$").replace("²", r"\textsuperscript{2}")


def markdown(table: pandas.DataFrame) -> str:
    """A table of texts as Markdown, escaped."""
    marks = re.compile(r"([|*_<\\`])")
    escaped = table.map(lambda text: marks.sub(r"\\\1", text)).rename(columns=lambda text: marks.sub(r"\\\1", text))
    text: str = escaped.to_markdown(index=False, disable_numparse=True)
    return text


def _logger_name(text: str) -> str:
    """Convert a description to lower-case letters, digits and _, which all loggers accept.

    Examples:
        >>> _logger_name("COS(last but one, last)")
        'cos_last_but_one_last'
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
