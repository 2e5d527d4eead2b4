"""Output of commands: tables, errors, and the files of a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..core.errors import LayersimError, printable, without_secrets
from .models_and_data import as_settings
from .options import CommandCall, names_of
from .run_file import RUN_FILE, warn_of_another_run, write_run_file

# By format: the method of a report that writes the file, the name of the file, and its kind.
FORMATS = {
    "html": ("to_html", "report.html", "Report"),
    "csv": ("to_csv", "report.csv", "Table"),
    "json": ("to_json", "report.json", "JSON"),
}
HEADLINES = ("measure", "number", "value", "± 95 %")


def report_file_options(*, out: Path = Path("layersim-report"), format: list[str] = ["html"]) -> None:  # noqa: B006
    """Declares the options for the files of a report.

    Args:
        out: folder for the report, its numbers and its run.yaml.
        format: files that are written in addition to the numbers, separated by commas: html, csv, json.
    """


def make_folder(out: Path, option: str = "out") -> None:
    """Create a folder, and check that it is writable.

    Args:
        out: path of the folder.
        option: name of the option, for messages.

    Raises:
        LayersimError: the folder cannot be written to.
    """
    from ..core.file_format import refuse_unwritable_folder

    out.mkdir(parents=True, exist_ok=True)
    refuse_unwritable_folder(out, option)


def prepare(call: CommandCall) -> None:
    """Check the options `format` and `device`, and create the output folder.

    Raises:
        LayersimError: there is no such format or device, or the folder cannot be written to.
    """
    from ..sources.load_by_name import refuse_missing_device

    refuse_missing_device(call.options.get("device") or "cpu")
    for name in names_of(call.options["format"]):
        if name not in FORMATS:
            raise LayersimError(f"`format` is {name}; it must be one of {', '.join(FORMATS)}. The numbers are always written.")
    make_folder(call.options["out"])


def write_report(
    call: CommandCall, report: Any, analyzers: Mapping[str, Any] = MappingProxyType({}), with_run_file: bool = True
) -> None:
    """Print the numbers of a report, and write its files and its run file to the folder of `--out`.

    Args:
        call: the call of the command.
        report: the report.
        analyzers: analyzers of the run, by name, whose options `--option` sets.
        with_run_file: whether the options of the run are known.
    """
    from ..core.file_format import REPORT_FILE

    print_headlines(report)
    # Before the run file is written: it may replace the file of `--config`.
    warn_of_another_run(call, report)
    out = call.options["out"]
    files = {"Numbers": report.save(out / REPORT_FILE)}
    for name in names_of(call.options["format"]):
        method, file_name, kind = FORMATS[name]
        files[kind] = getattr(report, method)(out / file_name) or out / file_name
    if with_run_file:
        files["Config"] = write_run_file(out, RUN_FILE, call, analyzer_settings(analyzers), report)
    print_files(files)


def print_files(files: dict[str, Path]) -> None:
    """Print the paths of files.

    Args:
        files: paths by kind of file.
    """
    for kind, path in files.items():
        print(f"{kind + ':':<8} {Path(path).resolve()}")


def print_headlines(report: Any) -> None:
    """Print the headline numbers of all results of a report, with their 95 % intervals."""
    from ..core.intervals import headline_texts
    from ..core.wording import MEANING_OF_MARGINS

    rows = []
    for name, result in report.items():
        for number, text in headline_texts(result).items():
            value, _, margin = text.partition(" ± ")
            rows.append((name, number, value, margin))
    if not rows:
        return
    columns: Sequence[str] = HEADLINES
    title = f"Headline numbers; {MEANING_OF_MARGINS}"
    if not any(margin for _, _, _, margin in rows):
        columns = HEADLINES[:3]
        title = "Headline numbers"
    print_table(columns, [row[: len(columns)] for row in rows], title, numbers=HEADLINES[2:])


def print_run(report: Any) -> None:
    """Print one line on the model, the tokens and the sites of a run."""
    run = next(iter(report.values())).provenance
    line = f"{run.model}: {run.tokens} tokens in {run.rows_in_words}"
    if not run.options.get("pack") and run.texts >= run.sequences:
        line += " (one text a row)"
    skipped = run.options.get("skip_first", 0)
    if skipped:
        line += f", first {skipped} positions left out"
    rule = run.options.get("positions", "all")
    if rule != "all":
        line += f", positions {rule}"
    at = run.options.get("at", "")
    site_names = ", ".join(names_of([at] if isinstance(at, str) else list(map(str, at))))
    if site_names not in ("", "resid_post"):
        line += f", at {site_names}"
        if run.options.get("per_head"):
            line += " of each head"
    print(printable(line, lines=False))


def analyzer_settings(analyzers: Mapping[str, Any]) -> dict[str, list[str]]:
    """A dict with all options of the analyzers in the form that `--option` takes; empty without analyzers.

    Args:
        analyzers: the analyzers. Values that text cannot hold, such as heads read from a file, are left out.
    """
    if not analyzers:
        return {}
    settings = []
    for analyzer in analyzers.values():
        settings += as_settings(analyzer)
    return {"option": settings}


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", numbers: Sequence[str] = ()) -> None:
    """Print a table. In a pipe, no cell is wrapped, cut or coloured.

    Args:
        columns: headings.
        rows: cells of each row.
        title: title above the table, only in a terminal.
        numbers: headings of the columns that are right-aligned in a terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Names of models, sites and labels may come from a file.
    cells = []
    for row in rows:
        cells.append([printable(str(cell), lines=False) for cell in row])
    console = Console(highlight=False)
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in [list(columns), *cells]:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", header_style="bold cyan")
    table.padding = (0, 1, 0, 0)
    table.pad_edge = False
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in cells:
        # Text, not markup: names of sites hold brackets.
        table.add_row(*map(Text, row))
    console.print(table)


def print_error(error: Exception) -> None:
    """Print an error without its traceback: a panel in a terminal, one line otherwise."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    text = printable(without_secrets(str(error)))
    panel = Panel(Text(text), title="Error", title_align="left", border_style="red")
    console.print(panel if console.is_terminal else Text(f"Error: {text}"))
