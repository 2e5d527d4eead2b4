"""Tables, notes and errors of the command line: drawn in a terminal, plain columns in a pipe or a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer

from ..core.errors import LayersimError, without_secrets


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", numbers: Sequence[str] = ()) -> None:
    """Print a table. In a pipe its columns are as wide as their cells, and nothing is wrapped, cut or coloured.

    Args:
        columns: headings.
        rows: cells of each row; they are printed as text.
        title: above the table in a terminal; a pipe gets none.
        numbers: headings of the columns that are aligned at the right in a terminal.
    """
    from rich.console import Console

    cells = [[str(cell) for cell in row] for row in rows]
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_drawn(columns, cells, title, numbers))
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _drawn(columns: Sequence[str], cells: Sequence[Sequence[str]], title: str, numbers: Sequence[str]) -> Any:
    """A table of rich: lines under the heading alone, and cells that wrap where the terminal is narrow."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", header_style="bold cyan")
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in cells:
        # Text, not markup: names of sites hold brackets.
        table.add_row(*map(Text, row))
    return table


def print_error(error: Exception) -> None:
    """Print an error without its traceback: a panel in a terminal, the plain text otherwise.

    Args:
        error: a `LayersimError`, whose parts become rows of the panel, or any other.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        typer.echo(f"Error: {without_secrets(str(error))}", err=True)
        return
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    body: Any = Text(without_secrets(str(error)))
    if isinstance(error, LayersimError):
        parts = Table.grid(padding=(0, 1))
        for name, text in (("given", error.given), ("expected", error.expected), ("do", error.do)):
            parts.add_row(Text(f"{name}:", style="dim"), Text(text, style="bold green" if name == "do" else ""))
        body = Group(Text(error.what, style="bold"), "", parts)
    console.print(Panel(body, title="Error", title_align="left", border_style="red"))


def print_warning(text: str) -> None:
    """Print a warning on the error stream.

    Args:
        text: of the warning.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("Warning: ", "yellow bold"), without_secrets(text)))
