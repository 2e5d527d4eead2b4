"""`tl-layersim show`: what a saved report or result holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import LayersimError
from ..core.results import Report, Result
from . import options as o
from .inputs import names_of
from .output import print_headlines, print_run
from .tables import print_table

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="File that `report`, or save() in Python, wrote.")]
TableOption = Annotated[
    list[str] | None,
    o.option(
        o.OUTPUT, "MEASURE.FIELD", "Print all numbers of a field instead, with its intervals. May be repeated.", "--table"
    ),
]
PageOption = Annotated[Path | None, o.option(o.OUTPUT, "FILE", "Write the report as an HTML page.", "--html")]


def show_file(file: FileArgument, table: TableOption = None, html: PageOption = None) -> None:
    """Print numbers, fields and provenance of a saved report."""
    from .. import load

    reports = _reports(load(file))
    if html is not None and len(reports) > 1:
        raise LayersimError(
            "`--html` cannot write a sweep, which has a report for each model.",
            given=f"{file}, with {len(reports)} reports",
            expected="a file of a report or a result",
            do="lsim.plot_sweep in Python",
        )
    for key, report in reports.items():
        if key:
            typer.echo(f"{key}:")
        for name in names_of(list(table or [])):
            _print_field(report, name)
        if not table:
            _print_report(report)
        if html is not None:
            typer.echo(f"Report:  {Path(report.to_html(html)).resolve()}")


def _reports(loaded: Any) -> dict[str, Report]:
    """What a file holds as reports: by key of a sweep, else one, without a key."""
    if isinstance(loaded, Result):
        return {"": Report({_measure_name(loaded): loaded})}
    return {"": loaded} if isinstance(loaded, Report) else {str(key): report for key, report in loaded.items()}


def _measure_name(result: Result) -> str:
    return type(result).__name__.removesuffix("Result").lower() or "result"


def _print_report(report: Report) -> None:
    """Print the headline numbers, the fields and the provenance of a report."""
    results = list(report.values())
    if not results:
        typer.echo("The report is empty.")
        return
    print_run(results[0])
    print_headlines(report)
    typer.echo()
    rows = [(f"{name}.{field}", size) for name, result in report.items() for field, size in _fields(result).items()]
    print_table(("field", "axes"), rows, "Fields, which --table prints")
    typer.echo()
    print_table(("provenance", "value"), _provenance_rows(report), "Provenance")


def _fields(result: Result) -> dict[str, str]:
    """The tensor fields of a result, by their names in tables, with their axes and sizes."""
    return {
        result.values_name if name == "values" else name: " x ".join(
            f"{axis} ({len(result.coordinates(axis))})" for axis in axes
        )
        or "a number"
        for name, axes in result.tensor_fields().items()
    }


def _provenance_rows(report: Report) -> list[tuple[str, str]]:
    """The provenance that all results share, and the options of each."""
    first = next(iter(report.values())).provenance
    shared = {
        name: value
        for name in ("model", "source", "basis", "dtype", "config_hash", "weights_hash", "changes", "data")
        if (value := getattr(first, name)) or name != "changes"
    }
    shared |= {"tokens": first.tokens, "rows": first.sequences, "batches": first.batches, "seconds": f"{first.seconds:.3g}"}
    options = {name: result.provenance.options for name, result in report.items()}
    same = {key: value for key, value in first.options.items() if all(own.get(key) == value for own in options.values())}
    shared |= {key: value for key, value in same.items() if len(options) > 1}
    rows = [(name, str(value)) for name, value in shared.items()]
    for name, own in options.items():
        rows += [(f"{name}.{key}", str(value)) for key, value in own.items() if key not in same or len(options) == 1]
    rows += [(f"{name}.warning", text) for name, result in report.items() for text in result.provenance.warnings]
    return [*rows, ("versions", ", ".join(f"{package} {version}" for package, version in first.versions.items()))]


def _print_field(report: Report, name: str) -> None:
    """Print the table of one field, `measure.field` or the measure alone for its main field."""
    measure, _, field = name.partition(".")
    if measure not in report:
        raise LayersimError(
            "`--table` names a measure that the file does not hold.",
            given=f"--table {name}",
            expected=f"one of {', '.join(report)}, with a field of it",
            do=f"--table {next(iter(report), '')}",
        )
    frame = report[measure].to_frame(field or "values")
    numbers = [str(column) for column in frame.columns if frame[column].dtype.kind == "f"]
    cells = [[f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row] for row in frame.itertuples(index=False)]
    print_table([str(column) for column in frame.columns], cells, name, numbers=numbers)
