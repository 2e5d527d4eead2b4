"""Tables of results, reports and several runs: pandas, xarray, LaTeX, Markdown."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from .arguments import typed
from .errors import LayersimError, printable, warn
from .intervals import field_named, headline_texts, margin_text
from .result_declarations import JOINT, declarations
from .site_names import depth_key, in_depth_order, site_in_words
from .wording import brief

if TYPE_CHECKING:
    import pandas
    import xarray

# Axes whose labels are the blocks of the (first) model.
BLOCK_AXES = ("layer", "row_block", "column_block", "skipped", "affected")
# Axes whose labels are the sites of a model, in order of depth.
SITE_AXES = ("row", "column", "residual", *BLOCK_AXES)
# All axes whose labels are sites, also those that are not in order of depth.
LAYER_AXES = (*SITE_AXES, "sublayer", "site", "centre", "vision_layer", "text_layer")
# Names of columns, for axes whose labels are sites.
COLUMNS = {
    "residual": "layer",
    "row": "row_layer",
    "column": "column_layer",
    "row_block": "row_layer",
    "column_block": "column_layer",
}


def label_table(labels: Mapping[str, tuple[Any, ...]]) -> pandas.DataFrame:
    """Labels of a tensor's entries: one line for each entry, one column for each axis.

    Args:
        labels: for each axis, its labels in order.
    """
    import pandas

    table = pandas.DataFrame(
        list(itertools.product(*labels.values())),
        columns=[COLUMNS.get(axis, axis) for axis in labels],
        index=None if labels else [0],
    )
    for axis, labels_of_axis in labels.items():
        if axis in SITE_AXES:
            # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
            name = COLUMNS.get(axis, axis)
            table[name] = pandas.Categorical(table[name], categories=list(labels_of_axis), ordered=True)
    return table


# Label columns that come first, and number columns.
SITE_COLUMNS = ("layer", "row_layer", "column_layer")
NUMBERS = ("value", "low", "high", "se", "untrained")


def joined_tables(tables: Sequence[pandas.DataFrame]) -> pandas.DataFrame:
    """Concatenate tables of single fields, made by `field_lines`.

    Columns are names, then labels with site labels first, then numbers.
    """
    import pandas

    if not tables:
        return pandas.DataFrame({name: [] for name in ("analyzer", "field", "value")})
    joined = pandas.concat(tables, ignore_index=True)
    labels = [name for name in joined.columns if name not in ("analyzer", "field", *NUMBERS)]
    labels_without_sites = [name for name in labels if name not in SITE_COLUMNS]
    order = ["analyzer", "field", *SITE_COLUMNS, *labels_without_sites, *NUMBERS]
    joined = joined[[name for name in order if name in joined.columns]]
    for name in labels:
        columns = [table[name] for table in tables if name in table]
        categories = [list(column.cat.categories) for column in columns if hasattr(column, "cat")]
        if categories:
            # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
            joined[name] = pandas.Categorical(joined[name], categories=merged_labels(categories), ordered=True)
    return joined


def field_lines(name: str, result: Any, field: str) -> pandas.DataFrame:
    """One field of a report as a table with a line for each entry. Columns: `analyzer`, `field`, labels and numbers.

    Args:
        name: name of the result.
        result: the result that has the field.
        field: name of the attribute.
    """
    declared = declarations(result)[field]
    table = label_table({axis: result.coordinates(axis) for axis in declared.axes})
    table.insert(0, "analyzer", name)
    table.insert(1, "field", declared.name)
    columns = {column: numbers.numpy().reshape(-1) for column, numbers in numbers_of(result, field).items()}
    return table.assign(**columns)


def numbers_of(result: Any, field: str) -> dict[str, Tensor]:
    """The tensors of a field by column name: `value` and, if the run has them, `low`, `high`, `se` and `untrained`.

    Args:
        result: the result that has the field.
        field: name of the attribute.
    """
    numbers = {"value": getattr(result, field)}
    if result.has_intervals and declarations(result)[field].within is not None:
        interval = result.interval(field)
        numbers |= {"low": interval.low, "high": interval.high, "se": interval.error}
    untrained = result.of_untrained(field)
    if untrained is not None:
        numbers["untrained"] = untrained.mean(0)
    return numbers


def merged_labels(lists: list[list[Any]]) -> list[Any]:
    """Merge lists of labels; the order within each list stays.

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
        # Sites that no run has together are ordered by the number of their block.
        merged.sort(key=depth_key)
    return merged


def headline_table(report: Mapping[str, Any]) -> pandas.DataFrame:
    """Table of the headline numbers of all results, as texts with ± half the interval. See `Report.to_latex`."""
    import pandas

    lines = []
    for name, result in report.items():
        for measure, value in headline_texts(result).items():
            lines.append((name, measure, value))
    return pandas.DataFrame(lines, columns=["analyzer", "measure", "value"])


def field_table(result: Any, field: str) -> pandas.DataFrame:
    """A field as a table of texts, with ± half the interval. One line per label of the first axis; see `Result.to_latex`.

    Args:
        result: the result that has the field.
        field: name of a field over one or two axes.

    Raises:
        LayersimError: the field has no axis, or more than two.
    """
    import pandas

    declared = result.declared(field)
    if len(declared.axes) not in (1, 2):
        raise LayersimError(f"`field` is {field!r}, which has {len(declared.axes)} axes; a table shows one or two.")
    numbers = numbers_of(result, field_named(result, field))
    values = numbers["value"]
    margins = (numbers["high"] - numbers["low"]) / 2 if "low" in numbers else values.new_full(values.shape, math.nan)
    row_axis = declared.axes[0]
    rows = [site_in_words(str(label)) for label in result.coordinates(row_axis)]
    columns = [declared.words]
    if len(declared.axes) == 2:
        columns = [site_in_words(str(label)) for label in result.coordinates(declared.axes[1])]
    values_of_rows = values.reshape(len(rows), len(columns)).tolist()
    margins_of_rows = margins.reshape(len(rows), len(columns)).tolist()
    lines = []
    for row, row_values, row_margins in zip(rows, values_of_rows, margins_of_rows, strict=True):
        lines.append([row, *map(margin_text, row_values, row_margins)])
    return pandas.DataFrame(lines, columns=[COLUMNS.get(row_axis, row_axis).replace("_", " "), *columns])


def in_one_line(text: str) -> str:
    """A text from outside in one line: white space becomes a blank, and control characters are written as escapes."""
    return printable(" ".join(text.split()))


def plain_markdown(text: str) -> str:
    """A text in one line with the special characters of Markdown escaped, so that it makes no link, tag or cell.

    Examples:
        >>> print(plain_markdown("# [a](javascript:b) <script> layer_1 | 2"))
        \\# \\[a\\](javascript:b) \\<script\\> layer\\_1 \\| 2
    """
    return re.sub(r"([\\`*_\[\]<>|#!&~$])", r"\\\1", in_one_line(text))


def plain_cell(value: Any) -> Any:
    """A value of a CSV file. A text is one line, and one that a spreadsheet would run as a formula begins with an apostrophe.

    Examples:
        >>> plain_cell("=HYPERLINK(1)"), plain_cell("blocks.0"), plain_cell("-1.5"), plain_cell(2)
        ("'=HYPERLINK(1)", 'blocks.0', '-1.5', 2)
    """
    if not isinstance(value, str):
        return value
    text = in_one_line(value)
    is_formula = text.startswith(("=", "+", "-", "@")) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def latex(table: pandas.DataFrame, labels: int) -> str:
    """A table of texts as LaTeX in the style of booktabs; special characters are escaped.

    Args:
        table: a table of texts.
        labels: number of leading columns that hold labels.
    """
    table = table.map(in_one_line).rename(columns=in_one_line)
    alignment = "l" * labels + "r" * (table.shape[1] - labels)
    text: str = table.to_latex(index=False, escape=True, column_format=alignment)
    return text.replace("±", r"$\pm$").replace("²", r"\textsuperscript{2}")


def markdown(table: pandas.DataFrame) -> str:
    """A table of texts as Markdown; special characters are escaped."""
    escaped = table.map(plain_markdown).rename(columns=plain_markdown)
    text: str = escaped.to_markdown(index=False, disable_numparse=True)
    return text


Correction: TypeAlias = Literal["holm", "fdr_bh"]


def distinct_test_mask(result: Any, field: str) -> Tensor:
    """Mask of a field's p-values: True for those that count as separate tests. All False if the run had no permutations.

    For layers of one model, the diagonal is left out, and a symmetric measure counts each pair of layers once.

    Args:
        result: the result that has the field.
        field: name of the field.
    """
    p = getattr(result, field)
    axes = result.tensor_fields()[field]
    tested = torch.full_like(p, fill_value=not bool(p.isnan().all()), dtype=torch.bool)
    if axes == ("row", "column") and JOINT not in result.provenance.model and result.layers == result.coordinates("column"):
        # p-values of few permutations have few values: they may look symmetric where the measure is not.
        if is_symmetric(result.values):
            return tested.triu(1)
        return tested & ~torch.eye(len(p), dtype=torch.bool)
    return tested


def is_symmetric(values: Tensor) -> bool:
    """Whether a tensor (`row column ...`) is symmetric, up to rounding."""
    square = values.dim() > 1 and values.shape[0] == values.shape[1]
    # A sum over a transposed matrix adds in another order. Its rounding error scales with the largest value.
    largest = float(values.nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
    return square and torch.allclose(values, values.transpose(0, 1), rtol=1e-6, atol=1e-9 * largest, equal_nan=True)


def adjusted(fields: Sequence[tuple[Tensor, bool]], method: Correction) -> list[Tensor]:
    """p-values of one or several fields, corrected together for multiple tests. NaN does not count as a test.

    Args:
        fields: for each field, its p-values, and whether they form a symmetric matrix, whose two halves count once.
        method: "holm" (Holm 1979) or "fdr_bh" (Benjamini and Hochberg 1995).

    Examples:
        >>> adjusted([(torch.tensor([0.01, 0.04, float("nan")]).double(), False)], "holm")
        [tensor([0.0200, 0.0400,    nan], dtype=torch.float64)]
    """
    from scipy.stats import false_discovery_control

    # Masks of the p-values that count as tests.
    tested = [(~p.isnan()).triu() if symmetric else ~p.isnan() for p, symmetric in fields]
    p_values = torch.cat([p[mask] for mask, (p, _) in zip(tested, fields, strict=True)])
    corrected = p_values
    if len(p_values) and method == "holm":
        # statsmodels would collect the garbage of the whole process at each call.
        ascending, order = p_values.sort()
        steps = ascending * torch.arange(len(p_values), 0, -1)
        corrected = torch.empty_like(p_values).scatter(0, order, steps.cummax(0).values.clamp(max=1))
    elif len(p_values):
        corrected = torch.as_tensor(false_discovery_control(p_values.numpy()))
    results = []
    corrected_of_fields = torch.split(corrected, [int(mask.sum()) for mask in tested])
    for (p, symmetric), mask, corrected_of_field in zip(fields, tested, corrected_of_fields, strict=True):
        values = torch.full_like(p, math.nan).masked_scatter(mask, corrected_of_field)
        results.append(values.triu() + values.triu(1).T if symmetric else values)
    return results


def result_table(result: Any) -> xarray.Dataset:
    """An `xarray.Dataset` of the fields that the run measured. See `Result.to_xarray`."""
    import xarray

    variables: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    for field in result.tensor_fields():
        if bool(getattr(result, field).isnan().all()):
            continue
        declared = result.declared(field)
        words = {
            "long_name": declared.label,
            "units": declared.unit,
            "description": declared.title if declared.title != declared.label else "",
        }
        attributes = {key: text for key, text in words.items() if text}
        for column, numbers in numbers_of(result, field).items():
            name = declared.name if column == "value" else f"{declared.name}_{column}"
            variables[name] = (declared.axes, numbers.numpy().copy(), attributes)
        labels |= {axis: list(result.coordinates(axis)) for axis in declared.axes}
    depths = {}
    for axis in labels:
        depths_of_sites = _relative_depths(result, axis)
        if depths_of_sites:
            depths[f"{axis}_depth"] = (axis, depths_of_sites)
    return xarray.Dataset(variables, labels | depths, _provenance_attributes(result))


@typed
def stack(runs: Mapping[Any, Any], dim: str = "run") -> Any:
    """Combine several runs, such as checkpoints, model sizes or seeds, in one labelled table.

    If the sites of the runs differ, a run has NaN at the sites that it lacks. Sites keep the order of the model. The coordinate
    `x_depth` of an axis of sites `x`, such as `layer_depth`, is the relative depth: 0 at the first residual layer of a run, 1
    at the last. It is over `dim` too if runs have different sites. Attributes that differ between runs are dropped.

    Args:
        runs: reports, or results of one analyzer, or their tables, by training step, size or name.
        dim: name of the new dimension, such as "step", whose labels are the keys of `runs`, in order.

    Returns:
        An `xarray.DataTree` with a node for each analyzer if `runs` are reports; an `xarray.Dataset` if they are results.

    Raises:
        LayersimError: `runs` holds something else, or the tables have a dimension or a variable `dim`.

    Warns:
        LayersimWarning: the runs were measured with different options, such as another `k`.

    Examples:
        >>> import tl_layersim as lsim
        >>> models = {0: lsim.demo_model(), 1000: lsim.demo_model(aligned=True)}
        >>> reports = {step: lsim.analyze(model, lsim.demo_text()[:4], lsim.LogitLens()) for step, model in models.items()}
        >>> accuracy = lsim.stack(reports, "step")["logit_lens"]["accuracy"]
        >>> accuracy.dims, accuracy.sizes["step"]
        (('step', 'layer'), 2)
        >>> gain = accuracy.sel(step=1000) - accuracy.sel(step=0)
        >>> bool(gain.sel(layer="blocks.0.hook_resid_post") > 0)
        True
    """
    import xarray

    tables = {key.item() if hasattr(key, "item") else key: _table_of(run) for key, run in runs.items()}
    if tables and all(isinstance(table, xarray.DataTree) for table in tables.values()):
        tables_of_analyzers: dict[str, dict[Any, Any]] = {}
        for key, tree in tables.items():
            for name in tree.children:
                tables_of_analyzers.setdefault(name, {})[key] = tree[name].to_dataset()
        stacked = {name: _concatenated(by_run, dim, name) for name, by_run in tables_of_analyzers.items()}
        return xarray.DataTree.from_dict(stacked)
    if not tables or not all(isinstance(table, xarray.Dataset) for table in tables.values()):
        kinds = ", ".join(sorted({type(run).__name__ for run in runs.values()}))
        raise LayersimError(
            f"`runs` holds {kinds or 'no runs'}; it must hold reports, results of one analyzer, or their tables."
        )
    return _concatenated(tables, dim, "")


def _table_of(run: Any) -> Any:
    """Convert a report or result to a table. A tree without children becomes a dataset; other tables stay as they are."""
    import xarray

    table = run.to_xarray() if hasattr(run, "to_xarray") else run
    if isinstance(table, xarray.DataTree) and not table.children:
        return table.to_dataset()
    return table


def _concatenated(tables: Mapping[Any, xarray.Dataset], dim: str, name: str) -> xarray.Dataset:
    """Concatenate the tables of one analyzer, one table for each run, along a new dimension."""
    import pandas
    import xarray

    if any(dim in {*table.dims, *table.variables} for table in tables.values()):
        of_analyzer = f" of {name!r}" if name else ""
        raise LayersimError(f"`dim` is {dim!r}; it must not be the name of a dimension or variable in the tables{of_analyzer}.")
    kinds = dict.fromkeys(table.attrs.get("result", "") for table in tables.values())
    if len(kinds) > 1:
        raise LayersimError(f"`runs` holds {' and '.join(kinds)}; it must hold results of one analyzer.")
    _warn_of_other_options(list(tables.values()), name)
    labels_of_axes: dict[Any, list[list[Any]]] = {}
    for table in tables.values():
        for axis, index in table.indexes.items():
            labels_of_axes.setdefault(axis, []).append(list(index))
    # Names of sites in the order of the model: xarray would sort them as text, with block 10 before block 2.
    orders = {}
    for axis, labels_of_runs in labels_of_axes.items():
        first = labels_of_runs[0]
        if isinstance(first[0], str) and any(labels != first for labels in labels_of_runs):
            orders[axis] = merged_labels(labels_of_runs)
    reindexed = []
    for table in tables.values():
        reindexed.append(table.reindex({axis: order for axis, order in orders.items() if axis in table.dims}))
    return xarray.concat(
        reindexed,
        pandas.Index(list(tables), name=dim),
        data_vars="all",
        coords="different",
        compat="equals",
        join="outer",
        combine_attrs="drop_conflicts",
    )


def _warn_of_other_options(tables: list[xarray.Dataset], name: str) -> None:
    options_of_runs = [json.loads(table.attrs.get("options", "{}")) for table in tables]
    different = []
    for key in dict.fromkeys(key for options in options_of_runs for key in options):
        values = [options.get(key) for options in options_of_runs]
        if key != "batch_size" and any(value != values[0] for value in values):
            different.append(f"{key} ({', '.join(dict.fromkeys(map(brief, values)))})")
    if different:
        of_analyzer = f" of {name!r}" if name else ""
        warn(f"The runs{of_analyzer} were measured with different options: {'; '.join(different)}.")


def _provenance_attributes(result: Any) -> dict[str, str | int | float]:
    """The provenance as texts and numbers, because xarray files hold nothing else. Options and versions become JSON."""
    attributes: dict[str, str | int | float] = {"result": type(result).__name__}
    for key, value in asdict(result.provenance).items():
        if value is not None:
            attributes[key] = value if isinstance(value, str | int | float) else json.dumps(value, default=str)
    return attributes


def _relative_depths(result: Any, axis: str) -> list[float]:
    """Relative depth of each site along an axis, from 0 to 1. 0 is the model's first site, 1 its last. Empty without sites."""
    sites = result.coordinates("column") if axis == "column" else result.layers
    labels = result.coordinates(axis)
    if not in_depth_order(sites) or not all(label in sites for label in labels):
        return []
    return [sites.index(label) / max(len(sites) - 1, 1) for label in labels]
