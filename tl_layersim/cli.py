"""The command line `tl-layersim`, whose commands are in `commands/`."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import metadata
from typing import Annotated, TextIO

import typer

from .commands import compare, estimate, exits, listings, merge, report, show, stitch, train
from .commands.command import Command
from .commands.examples import examples_of
from .commands.tables import print_error, print_warning
from .core.errors import LayersimError, LayersimWarning

MEASURE, MODELS, FILES = "Measure one model", "Two models, and training", "Files and lists"
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # Values of variables may hold keys.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Examples[/bold]\n\n  tl-layersim report\n  tl-layersim report --model gpt2 --data text.txt --intervals\n"
    "  tl-layersim COMMAND --help",
)
# Set by `--traceback`, which `main` reads after the command has failed.
_shown = {"traceback": False}


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"tl-layersim {metadata.version('tl_layersim')}")
        raise typer.Exit


@app.callback()
def settings(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, metavar=" ", help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", metavar=" ", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure how the layers of a transformer relate to each other."""
    _shown["traceback"] = traceback


for name, function, panel in (
    ("report", report.report_on_model, MEASURE),
    ("exits", exits.measure_exits, MEASURE),
    ("estimate", estimate.estimate_cost, MEASURE),
    ("compare", compare.compare_models, MODELS),
    ("stitch", stitch.stitch_models, MODELS),
    ("train", train.train_model, MODELS),
    ("show", show.show_file, FILES),
    ("merge", merge.merge_shards, FILES),
    ("analyzers", listings.list_analyzers, FILES),
    ("sites", listings.list_sites, FILES),
):
    app.command(name, cls=Command, rich_help_panel=panel, epilog=examples_of(name))(function)


def main() -> None:
    """Run the command line. Refusals and wrong usage end it with status 2 and no traceback, other errors with 1 and one."""
    if not sys.stderr.isatty():
        # Read by transformers and datasets when they are imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    shown_before = warnings.showwarning

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, LayersimWarning):
            # Without the line of code, which is one of this package.
            print_warning(str(message))
        else:
            shown_before(message, category, filename, lineno, file, line)

    warnings.showwarning = show_warning
    try:
        app()
    except (LayersimError, OSError) as error:
        if _shown["traceback"]:
            raise
        print_error(error)
        raise SystemExit(2) from None
    except Exception as error:
        typer.echo(f"{type(error).__name__} that tl_layersim did not expect. Please report this traceback as a bug.", err=True)
        raise
    finally:
        warnings.showwarning = shown_before


if __name__ == "__main__":
    main()
