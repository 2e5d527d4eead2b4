"""Tables, warnings and errors of the command line: formatted in a terminal, plain text in a pipe or a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.errors import without_secrets


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

    cells = [[str(cell) for cell in row] for row in rows]
    console = Console(highlight=False)
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in [list(columns), *cells]:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", header_style="bold cyan")
    table.padding, table.pad_edge = (0, 1, 0, 0), False
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

    console, text = Console(stderr=True, highlight=False, soft_wrap=True), without_secrets(str(error))
    panel = Panel(Text(text), title="Error", title_align="left", border_style="red")
    console.print(panel if console.is_terminal else Text(f"Error: {text}"))


def print_warning(text: str) -> None:
    """Print a warning on the error stream."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("Warning: ", "yellow bold"), without_secrets(text)))
