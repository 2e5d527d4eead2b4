"""What a command prints and writes: the numbers in a table, the files of a report, and its run file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from ..core.errors import LayersimError
from ..core.intervals import headline_margins, is_p_value, margin_text
from ..core.results import Report, Result
from ..core.storage import REPORT_FILE, refuse_unwritable_folder
from ..core.wording import MEANING_OF_MARGINS, p_value_text
from .inputs import names_of
from .run_file import RUN_FILE, warn_of_another_run, write_options, write_run_file
from .tables import print_table

# By format: the method of a report that writes it, the name of the file, and what it is.
FORMATS = {
    "html": ("to_html", "report.html", "Report"),
    "csv": ("to_csv", "report.csv", "Table"),
    "json": ("to_json", "report.json", "JSON"),
}
HEADLINES = ("measure", "number", "value", "± 95 %")


def make_folder(out: Path, option: str = "--out") -> None:
    """Create a folder to write to, and check before anything is computed that it is writable.

    Args:
        out: the folder.
        option: that names it, for messages.

    Raises:
        LayersimError: it cannot be created or written to, or a folder has the name of a file that a command writes there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayersimError(
            f"`{option}` names a folder that cannot be created.",
            given=f"{option} {out}: {error.strerror or error}",
            expected="a folder, or a path where a folder can be created",
            do=f"{option} with another path",
        ) from None
    refuse_unwritable_folder(out, option)
    for name in (REPORT_FILE, RUN_FILE, *(file for _, file, _ in FORMATS.values())):
        if (out / name).is_dir():
            raise LayersimError(
                f"`{option}` names a folder in which {name} is a folder.",
                given=f"{option} {out}",
                expected=f"a folder where the file {name} can be written",
                do=f"{option} with another path",
            )


def chosen_formats(text: str) -> list[str]:
    """The formats that `--format` names.

    Args:
        text: names, separated by commas.

    Raises:
        LayersimError: there is no such format.
    """
    names = names_of([text])
    for name in names:
        if name not in FORMATS:
            near = difflib.get_close_matches(name, FORMATS, n=1)
            raise LayersimError(
                "`--format` names an unknown format.",
                given=f"--format {text}",
                expected=f"{', '.join(FORMATS)}, or several; the numbers are always written, as safetensors",
                do=f"--format {near[0] if near else 'html,csv'}",
            )
    return names


def write_report(context: typer.Context, report: Any, settled: Mapping[str, Any] | None = None) -> None:
    """Print the numbers of a report, and write its files and its run file to the folder of `--out`.

    Args:
        context: of the command.
        report: the report.
        settled: options whose default depends on model and data, as they were in the run.
    """
    print_headlines(report)
    out = context.params["out"]
    print_files(write_files(report, out, chosen_formats(context.params["format"])))
    typer.echo(f"{'Config:':<8} {write_run_file(out, RUN_FILE, context, settled or {}, report).resolve()}")
    warn_of_another_run(context, report)


def write_files(report: Any, out: Path, formats: list[str]) -> dict[str, Path]:
    """Write the numbers of a report, and its files in other formats; return their paths by what they are.

    Args:
        report: the report.
        out: folder of the files.
        formats: names in `FORMATS`.
    """
    written = {"Numbers": report.save(out / REPORT_FILE)}
    for name in formats:
        method, file, what = FORMATS[name]
        written[what] = getattr(report, method)(out / file) or out / file
    return written


def print_files(files: dict[str, Path]) -> None:
    """Print the paths of files.

    Args:
        files: by what they are.
    """
    for what, path in files.items():
        typer.echo(f"{what + ':':<8} {Path(path).resolve()}")


def write_merged(report: Any, out: Path, formats: list[str], options: dict[str, Any] | None) -> None:
    """Print and write a report of shards.

    Args:
        report: of all shards.
        out: folder of the files.
        formats: names in `FORMATS`.
        options: of the run, from the run file beside a shard; None where there is none.
    """
    print_headlines(report)
    print_files(write_files(report, out, formats))
    if options is not None:
        path = write_options(out / RUN_FILE, "report", options, report)
        typer.echo(f"{'Config:':<8} {path.resolve()}")


def print_headlines(report: Any) -> None:
    """Print the headline numbers of all results of a report, with their 95 % intervals.

    Args:
        report: the report.
    """
    rows = [row for name, result in report.items() for row in _headline_rows(name, result)]
    with_margins = any(row[3] for row in rows)
    columns = HEADLINES if with_margins else HEADLINES[:3]
    if rows:
        title = "Headline numbers" + (f"; {MEANING_OF_MARGINS}" if with_margins else "")
        print_table(columns, [row[: len(columns)] for row in rows], title, numbers=HEADLINES[2:])


def _headline_rows(name: str, result: Result) -> list[tuple[str, ...]]:
    margins = headline_margins(result)
    rows: list[tuple[str, ...]] = []
    for number, value in result.headline().items():
        margin = margins.get(number, math.nan)
        text, _, half = (p_value_text(value) if is_p_value(number) else margin_text(value, margin)).partition(" ± ")
        rows.append((name, number.strip(), "-" if math.isnan(value) else text, half))
    return rows


def print_run(result: Any) -> None:
    """Print one line on the model, the tokens and the sites of a run.

    Args:
        result: any of its results.
    """
    run = result.provenance
    how = "packed" if run.options.get("pack") else "one text a row"
    stopped = ", where --max-tokens stopped it" if run.tokens == run.options.get("max_tokens") else ""
    rule = run.options.get("positions", "all")
    which = "" if rule == "all" else f", positions {rule}"
    skipped = run.options.get("skip_first", 0)
    left = (f", first {skipped} positions left out" if skipped else "") + which
    heads = " of each head" if run.options.get("per_head") else ""
    at = run.options.get("at", "")
    where = ", ".join(names_of([at] if isinstance(at, str) else list(map(str, at))))
    sites = f", at {where}{heads}" if where not in ("", "resid_post") else ""
    typer.echo(f"{run.model}: {run.tokens} tokens{stopped}, in {run.sequences} rows ({how}){left}{sites}")


def noted(report: Any, **options: Any) -> Any:
    """The report with further options in its provenance.

    Args:
        report: the report.
        **options: by name.
    """
    results = {}
    for name, result in report.items():
        run = replace(result.provenance, options={**result.provenance.options, **options})
        results[name] = replace(result, provenance=run)
    return Report(results)


def settled_options(report: Any, analyzers: list[Any] | None = None) -> dict[str, Any]:
    """The options whose default depends on model, data and version, as a run took them.

    Args:
        report: of the run.
        analyzers: of the run; None for a run whose options are settings of the command.
    """
    options = next(iter(report.values())).provenance.options
    settled = {name: options[name] for name in ("seq_len", "pack", "positions", "batch_size") if options.get(name) is not None}
    return settled if analyzers is None else settled | {"option": analyzer_settings(analyzers)}


def analyzer_settings(analyzers: list[Any]) -> list[str]:
    """Every option of analyzers as `--option` takes it.

    Args:
        analyzers: whose options text can hold; other values, such as heads that were read from a file, are left out.
    """
    from ..analyzers.text_options import as_settings

    return [setting for analyzer in analyzers for setting in as_settings(analyzer)]
