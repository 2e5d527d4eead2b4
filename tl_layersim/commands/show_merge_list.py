"""`tl-layersim show`, `merge`, `analyzers` and `sites`: saved files, and lists of analyzers and sites."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError
from .measure import report_on_model
from .models_and_data import ALIGNED, is_demo, named_model
from .options import CommandCall, command, help_of, names_of, shard_files
from .output import prepare, print_headlines, print_run, print_table, report_file_options, write_report
from .run_file import options_of_shards


def saved_file_options(file: str, *, table: list[str] | None = None, html: Path | None = None) -> None:
    """Declares the options for a saved report or result.

    Args:
        file: file written by `report`, or by save() in Python.
        table: print the table of a field, MEASURE.FIELD, with its intervals. May be repeated.
        html: write the report as an HTML page.
    """


@command("show", {"Output": (saved_file_options,)})
def show_file(call: CommandCall) -> None:
    """Print numbers, fields and provenance of a saved report.

    Examples:
    tl-layersim show layersim-report/report.safetensors
    tl-layersim show report.safetensors --table cosine.to_last
    tl-layersim show cka.safetensors --html cka.html
    """
    from .. import load

    report = _as_report(load(call.options["file"]))
    html = call.options["html"]
    for name in names_of(call.options["table"] or []):
        _print_field(report, name)
    if not call.options["table"]:
        _print_report(report)
    if html is not None:
        print(f"Report:  {Path(report.to_html(html)).resolve()}")


def _as_report(loaded: Any) -> Any:
    """Convert what a file holds, a report or a single result, to a report."""
    from ..core.results import Report, Result

    if not isinstance(loaded, Result):
        return loaded
    return Report({type(loaded).__name__.removesuffix("Result").lower() or "result": loaded})


def _print_report(report: Any) -> None:
    if not report:
        print("The report is empty.")
        return
    print_run(report)
    print_headlines(report)
    print()
    rows = []
    for name, result in report.items():
        for field, axes in _axes_of_fields(result).items():
            rows.append((f"{name}.{field}", axes))
    print_table(("field", "axes"), rows, "Fields, which --table prints")
    print()
    print_table(("provenance", "value"), _provenance_rows(report), "Provenance")


def _axes_of_fields(result: Any) -> dict[str, str]:
    """A dict of the axes and sizes of a result's tensor fields, as text."""
    texts = {}
    for name, axes in result.tensor_fields().items():
        shown_name = result.values_name if name == "values" else name
        sizes = [f"{axis} ({len(result.coordinates(axis))})" for axis in axes]
        texts[shown_name] = " x ".join(sizes) or "a number"
    return texts


def _provenance_rows(report: Any) -> list[tuple[str, str]]:
    """Table rows of the common provenance, and of each result's options and warnings."""
    first = next(iter(report.values())).provenance
    # These three have rows of their own.
    separate = ("options", "warnings", "versions")
    rows = []
    for field in fields(first):
        if field.name not in separate:
            rows.append((field.name, str(getattr(first, field.name))))
    for name, result in report.items():
        rows += [(f"{name}.{key}", str(value)) for key, value in result.provenance.options.items()]
        rows += [(f"{name}.warning", text) for text in result.provenance.warnings]
    versions = ", ".join(f"{package} {version}" for package, version in first.versions.items())
    return [*rows, ("versions", versions)]


def _print_field(report: Any, name: str) -> None:
    """Print the table of a field, given as `measure.field`, or as `measure` for its main field."""
    measure, _, field = name.partition(".")
    if measure not in report:
        raise LayersimError(f"`table` is {name}; it must begin with the name of a result in the file: {', '.join(report)}.")
    frame = report[measure].to_frame(field or None)
    columns = [str(column) for column in frame.columns]
    numbers = [str(column) for column in frame.columns if frame[column].dtype.kind == "f"]
    rows = []
    for row in frame.itertuples(index=False):
        rows.append([f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row])
    print_table(columns, rows, name, numbers=numbers)


def shards_argument(files: list[str]) -> None:
    """Declares the argument of `merge`: the files of shards.

    Args:
        files: files written by `report --shard`, or a folder that holds only such files.
    """


@command("merge", {"Output": (shards_argument, report_file_options)})
def merge_shards(call: CommandCall) -> None:
    """Merge the sums of all shards, and write the report.

    Examples:
    tl-layersim merge parts/
    tl-layersim merge 'parts/*.safetensors' --format html,csv
    """
    from .. import merge

    prepare(call)
    paths = shard_files(call.options["files"], "files")
    options = options_of_shards(paths, report_on_model.takes_several())
    report: Any = merge(paths)
    print_run(report)
    # Options whose defaults depend on the model: the run file gets the values that the run used.
    report_options = {"seq_len": None, "positions": None} | (options or {})
    output_options = {name: call.options[name] for name in ("out", "format")}
    report_call = CommandCall("report", options or {}, report_options | output_options)
    write_report(report_call, report, with_run_file=options is not None)


def analyzer_argument(analyzer: str | None = None) -> None:
    """Declares the argument of `analyzers`: the name of an analyzer.

    Args:
        analyzer: name of an analyzer; its options are listed, as `report --option` sets them.
    """


@command("analyzers", {"Output": (analyzer_argument,)})
def list_analyzers(call: CommandCall) -> None:
    """List the installed analyzers, with a one-line description each.

    Examples:
    tl-layersim analyzers
    tl-layersim analyzers cka
    """
    from ..analyzers import find_analyzers
    from ..engine.run_arguments import choose_analyzers

    if call.options["analyzer"] is None:
        installed = sorted(find_analyzers().items())
        print_table(("name", "measure"), [(name, cls.summary()) for name, cls in installed], "Analyzers")
        return
    analyzer: Any = next(iter(choose_analyzers(call.options["analyzer"]).values()))
    help_texts = help_of(type(analyzer))
    rows = []
    for field in fields(analyzer):
        if field.init:
            rows.append((f"{analyzer.name}.{field.name}", getattr(analyzer, field.name), help_texts.get(field.name, "")))
    print_table(("option", "default", "meaning"), rows, analyzer.summary())


@command("sites", {"Model": (named_model,)}, without=["device", "dtype", "remote", "server"])
def list_sites(call: CommandCall) -> None:
    """List the sites of a model. `report --at` selects sites.

    Examples:
    tl-layersim sites
    tl-layersim sites gpt2
    tl-layersim sites gpt2 | grep attn_out
    """
    from .. import demo_model, sites
    from ..sources.load_by_name import load_without_weights

    name = call.options["model"]
    if is_demo(name):
        model = demo_model(aligned=name == ALIGNED)
    else:
        model = load_without_weights(name, call.options["trust_remote_code"], "model")
    table = sites(model)
    rows = table.astype(object).where(table.notna(), "-").astype(str).to_numpy().tolist()
    print_table(list(table.columns), rows, "Sites in the order in which the model computes them", numbers=("block", "heads"))
