"""The page of the documentation with every option of every command, as `python -m tests.commands.reference_page` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tl_layersim.cli import app
from tl_layersim.commands.examples import EXAMPLES

PAGE = Path(__file__).parents[2] / "docs/api/cli.md"


def text_of_page() -> str:
    """The page, made of the commands themselves."""
    command: Any = typer.main.get_command(app)
    lines = ["# Command line", "", "The guide [The command line](../command_line.md) has the usual calls."]
    for name, own in command.commands.items():
        arguments = " ".join(one.metavar for one in own.params if not one.opts[0].startswith("--"))
        lines += ["", f"## tl-layersim {name}", "", own.help, "", "```sh"]
        lines += [f"tl-layersim {name} {arguments}".rstrip() + " [OPTIONS]", "```", "", "```sh", *EXAMPLES[name], "```"]
        panels: dict[str, list[str]] = {}
        for one in own.params:
            if one.name != "help":
                panels.setdefault(getattr(one, "rich_help_panel", None) or "Arguments", []).append(row(one))
        for panel, rows in panels.items():
            lines += ["", f"| {panel} | |", "| --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def row(option: Any) -> str:
    """A row of a table: the option with its value, its help and its default."""
    is_option = option.opts[0].startswith("--")
    names = " / ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts]) if is_option else f"`{option.metavar}`"
    value = f" `{option.metavar}`" if is_option and (option.metavar or "").strip() else ""
    default = option.default
    shown = "" if default in (None, False, True, ()) else f" Default: `{getattr(default, 'value', default)}`."
    needed = " Required." if option.required else ""
    text = (option.help or "").replace("\\[", "[").replace("|", "\\|")
    return f"| {names}{value} | {text}{needed}{shown} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(text_of_page())


if __name__ == "__main__":
    main()
