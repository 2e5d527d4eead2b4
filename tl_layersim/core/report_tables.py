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
    for axis, own in labels.items():
        if axis in SITE_AXES:
            # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
            name = COLUMNS.get(axis, axis)
            table[name] = pandas.Categorical(table[name], categories=list(own), ordered=True)
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
    found = pandas.concat(tables, ignore_index=True)
    labels = [name for name in found.columns if name not in ("analyzer", "field", *NUMBERS)]
    order = ["analyzer", "field", *SITE_COLUMNS, *(name for name in labels if name not in SITE_COLUMNS), *NUMBERS]
    found = found[[name for name in order if name in found.columns]]
    for name in labels:
        own = [list(table[name].cat.categories) for table in tables if name in table and hasattr(table[name], "cat")]
        if own:
            # Ordered as in the model: sorted as text, as in a pivot, block 10 would precede block 2.
            found[name] = pandas.Categorical(found[name], categories=merged_labels(own), ordered=True)
    return found


def field_lines(name: str, result: Any, field: str) -> pandas.DataFrame:
    """One field of a report as a table with a line for each entry. Columns: `analyzer`, `field`, labels and numbers.

    Args:
        name: name of the result.
        result: the result that has the field.
        field: name of the attribute.
    """
    own = declarations(result)[field]
    table = label_table({axis: result.coordinates(axis) for axis in own.axes})
    table.insert(0, "analyzer", name)
    table.insert(1, "field", own.name)
    return table.assign(**{column: numbers.numpy().reshape(-1) for column, numbers in numbers_of(result, field).items()})


def numbers_of(result: Any, field: str) -> dict[str, Tensor]:
    """The tensors of a field by column name: `value` and, if the run has them, `low`, `high`, `se` and `untrained`.

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

    lines = [(name, *line) for name, result in report.items() for line in headline_texts(result).items()]
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
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not _is_number(text) else text


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
    own = table.map(in_one_line).rename(columns=in_one_line)
    text: str = own.to_latex(index=False, escape=True, column_format="l" * labels + "r" * (table.shape[1] - labels))
    return text.replace("±", r"$\pm$").replace("²", r"\textsuperscript{2}")


def markdown(table: pandas.DataFrame) -> str:
    """A table of texts as Markdown; special characters are escaped."""
    escaped = table.map(plain_markdown).rename(columns=plain_markdown)
    text: str = escaped.to_markdown(index=False, disable_numparse=True)
    return text


Correction: TypeAlias = Literal["holm", "fdr_bh"]


def distinct_tests(result: Any, field: str) -> Tensor:
    """Mask of a field's p-values: True for those that count as separate tests. All False if the run had no permutations.

    For layers of one model, the diagonal is left out, and a symmetric measure counts each pair of layers once.

    Args:
        result: the result that has the field.
        field: name of the field.
    """
    p, axes = getattr(result, field), result.tensor_fields()[field]
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


def adjusted(each: Sequence[tuple[Tensor, bool]], method: Correction) -> list[Tensor]:
    """p-values of one or several fields, corrected together for multiple tests. NaN does not count as a test.

    Args:
        each: for each field, its p-values, and whether they form a symmetric matrix, whose two halves count once.
        method: "holm" (Holm 1979) or "fdr_bh" (Benjamini and Hochberg 1995).

    Examples:
        >>> adjusted([(torch.tensor([0.01, 0.04, float("nan")]).double(), False)], "holm")
        [tensor([0.0200, 0.0400,    nan], dtype=torch.float64)]
    """
    from scipy.stats import false_discovery_control

    tested = [(~p.isnan()).triu() if symmetric else ~p.isnan() for p, symmetric in each]
    known = torch.cat([p[own] for own, (p, _) in zip(tested, each, strict=True)])
    if method == "holm":
        # statsmodels would collect the garbage of the whole process at each call.
        ordered, order = known.sort()
        steps = ordered * torch.arange(len(known), 0, -1)
        found = torch.empty_like(known).scatter(0, order, steps.cummax(0).values.clamp(max=1)) if len(known) else known
    else:
        found = torch.as_tensor(false_discovery_control(known.numpy())) if len(known) else known
    parts = torch.split(found, [int(own.sum()) for own in tested])
    filled = [
        torch.full_like(p, math.nan).masked_scatter(own, part) for (p, _), own, part in zip(each, tested, parts, strict=True)
    ]
    return [own.triu() + own.triu(1).T if symmetric else own for own, (_, symmetric) in zip(filled, each, strict=True)]


def result_table(result: Any) -> xarray.Dataset:
    """An `xarray.Dataset` of the fields that the run measured. See `Result.to_xarray`."""
    import xarray

    variables: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    for field in result.tensor_fields():
        if bool(getattr(result, field).isnan().all()):
            continue
        own = result.declared(field)
        words = {"long_name": own.label, "units": own.unit, "description": own.title if own.title != own.label else ""}
        attributes = {key: text for key, text in words.items() if text}
        for part, numbers in numbers_of(result, field).items():
            name = own.name if part == "value" else f"{own.name}_{part}"
            variables[name] = (own.axes, numbers.numpy().copy(), attributes)
        labels |= {axis: list(result.coordinates(axis)) for axis in own.axes}
    depths = {f"{axis}_depth": (axis, along) for axis in labels if (along := _depths(result, axis))}
    return xarray.Dataset(variables, labels | depths, _provenance(result))


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
        names = dict.fromkeys(name for table in tables.values() for name in table.children)
        each = {
            name: {key: table[name].to_dataset() for key, table in tables.items() if name in table.children} for name in names
        }
        return xarray.DataTree.from_dict({name: _concatenated(own, dim, name) for name, own in each.items()})
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
    return table.to_dataset() if isinstance(table, xarray.DataTree) and not table.children else table


def _concatenated(tables: Mapping[Any, xarray.Dataset], dim: str, name: str) -> xarray.Dataset:
    """Concatenate the tables of one analyzer, one table for each run, along a new dimension."""
    import pandas
    import xarray

    each = list(tables.values())
    if any(dim in {*table.dims, *table.variables} for table in each):
        of = f" of {name!r}" if name else ""
        raise LayersimError(f"`dim` is {dim!r}; it must not be the name of a dimension or variable in the tables{of}.")
    if len(kinds := dict.fromkeys(table.attrs.get("result", "") for table in each)) > 1:
        raise LayersimError(f"`runs` holds {' and '.join(kinds)}; it must hold results of one analyzer.")
    _warn_of_other_options(each, name)
    labels: dict[Any, list[list[Any]]] = {}
    for table in each:
        for axis, index in table.indexes.items():
            labels.setdefault(axis, []).append(list(index))
    # Names of sites in the order of the model: xarray would sort them as text, with block 10 before block 2.
    orders = {
        axis: merged_labels(own)
        for axis, own in labels.items()
        if isinstance(own[0][0], str) and any(one != own[0] for one in own)
    }
    ordered = [table.reindex({axis: order for axis, order in orders.items() if axis in table.dims}) for table in each]
    return xarray.concat(
        ordered,
        pandas.Index(list(tables), name=dim),
        data_vars="all",
        coords="different",
        compat="equals",
        join="outer",
        combine_attrs="drop_conflicts",
    )


def _warn_of_other_options(tables: list[xarray.Dataset], name: str) -> None:
    options = [json.loads(table.attrs.get("options", "{}")) for table in tables]
    different = [
        f"{key} ({', '.join(dict.fromkeys(brief(own.get(key)) for own in options))})"
        for key in dict.fromkeys(key for own in options for key in own)
        if key != "batch_size" and any(own.get(key) != options[0].get(key) for own in options)
    ]
    if different:
        warn(f"The runs{f' of {name!r}' if name else ''} were measured with different options: {'; '.join(different)}.")


def _provenance(result: Any) -> dict[str, str | int | float]:
    """The provenance as texts and numbers, because xarray files hold nothing else. Options and versions become JSON."""
    held = {key: value for key, value in asdict(result.provenance).items() if value is not None}
    plain = {key: own if isinstance(own, str | int | float) else json.dumps(own, default=str) for key, own in held.items()}
    return {"result": type(result).__name__, **plain}


def _depths(result: Any, axis: str) -> list[float]:
    """Relative depth of each site along an axis, from 0 to 1. 0 is the model's first site, 1 its last. Empty without sites."""
    sites = result.coordinates("column") if axis == "column" else result.layers
    labels = result.coordinates(axis)
    if not in_depth_order(sites) or not all(label in sites for label in labels):
        return []
    return [sites.index(label) / max(len(sites) - 1, 1) for label in labels]
