"""Labelled tables (xarray) of results and reports, and of several runs along a new dimension."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .arguments import typed
from .errors import LayersimError, warn
from .findings import in_depth_order
from .report_tables import merged_labels, numbers_of
from .wording import brief

if TYPE_CHECKING:
    import xarray


def result_table(result: Any) -> xarray.Dataset:
    """The measured fields of a result; see `Result.to_xarray`."""
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


def report_table(report: Mapping[str, Any]) -> xarray.DataTree:
    """The results of a report by name; see `Report.to_xarray`."""
    import xarray

    return xarray.DataTree.from_dict({name: result_table(result) for name, result in report.items()})


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
            f"`runs` holds {kinds or 'no runs'}; it must hold reports, or results of one analyzer, or tables of either."
        )
    return _concatenated(tables, dim, "")


def _table_of(run: Any) -> Any:
    """The table of a report or result. A table stays as it is, but a tree of one node becomes a dataset."""
    import xarray

    table = run.to_xarray() if hasattr(run, "to_xarray") else run
    return table.to_dataset() if isinstance(table, xarray.DataTree) and not table.children else table


def _concatenated(tables: Mapping[Any, xarray.Dataset], dim: str, name: str) -> xarray.Dataset:
    """The tables of one analyzer along a new dimension."""
    import pandas
    import xarray

    each = list(tables.values())
    if any(dim in {*table.dims, *table.variables} for table in each):
        raise LayersimError(f"`dim` is {dim!r}, a name that the tables{f' of {name!r}' if name else ''} use already.")
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
    """Warn if the runs were measured with different options."""
    options = [json.loads(table.attrs.get("options", "{}")) for table in tables]
    different = [
        f"{key} ({', '.join(dict.fromkeys(brief(own.get(key)) for own in options))})"
        for key in dict.fromkeys(key for own in options for key in own)
        if key != "batch_size" and any(own.get(key) != options[0].get(key) for own in options)
    ]
    if different:
        warn(f"The runs{f' of {name!r}' if name else ''} were measured with different options: {'; '.join(different)}.")


def _provenance(result: Any) -> dict[str, str | int | float]:
    """The provenance as texts and numbers, because xarray files hold nothing else; options and versions become JSON."""
    held = {key: value for key, value in asdict(result.provenance).items() if value is not None}
    plain = {key: own if isinstance(own, str | int | float) else json.dumps(own, default=str) for key, own in held.items()}
    return {"result": type(result).__name__, **plain}


def _depths(result: Any, axis: str) -> list[float]:
    """The relative depth of each site along an axis: 0 at the model's first site, 1 at its last; empty without sites."""
    sites = result.coordinates("column") if axis == "column" else result.layers
    labels = result.coordinates(axis)
    if not in_depth_order(sites) or not all(label in sites for label in labels):
        return []
    return [sites.index(label) / max(len(sites) - 1, 1) for label in labels]
