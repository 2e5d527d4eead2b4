"""The page with every option of every command of the command line, made of the commands when the site is built."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from tl_layersim.commands import measure, show_merge_list, stitch_and_train
from tl_layersim.commands.options import PANELS, Command, flag

PAGE = "api/cli.md"
COMMANDS = (
    *(measure.report_on_model, measure.measure_exits, measure.estimate_cost, measure.compare_models),
    *(stitch_and_train.stitch_models, stitch_and_train.train_model),
    *(show_merge_list.show_file, show_merge_list.merge_shards, show_merge_list.list_analyzers, show_merge_list.list_sites),
)


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=text_of_page()))
    return files


def text_of_page() -> str:
    """The page as Markdown."""
    introduction = "# Command line\n\nThe guide [The command line](../command_line.md) has the usual calls.\n"
    return introduction + "".join(section(command) for command in COMMANDS)


def section(command: Command) -> str:
    """The section of a command: its summary, its examples and its options by panel."""
    text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("Examples:")
    lines = ["", f"## tl-layersim {command.name}", "", text.strip(), "", "```sh", examples.strip(), "```"]
    options = command.__signature__.parameters.values()
    for name, panel in PANELS.items():
        rows = [row(option) for option in options if get_args(option.annotation)[1].group == (panel,)]
        lines += ["", f"| {name} | |", "| --- | --- |", *rows] if rows else []
    return "\n".join(lines) + "\n"


def row(option: inspect.Parameter) -> str:
    """A row of a table: the option with its help and its default."""
    names = f"`{flag(option.name)}`"
    if option.kind is option.POSITIONAL_OR_KEYWORD:
        names = f"`{option.name.upper()}` or {names}"
    kind, parameter = get_args(option.annotation)
    if bool in (kind, *get_args(kind)) and parameter.negative is None:
        names += f" / `{flag(f'no_{option.name}')}`"
    needed = " Required." if option.default is option.empty else ""
    shown = f" Default: `{parameter.show_default(option.default)}`." if parameter.show_default and not needed else ""
    return f"| {names} | {(parameter.help or '').replace('|', chr(92) + '|')}{needed}{shown} |"
