"""The objects of an API page, as a table at its top; the commands of the command line, on theirs."""

from __future__ import annotations

import re

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from tl_layersim.cli import app

# An object that is imported by its path; parts of others, with the option below, are not.
OBJECT = re.compile(r"^::: (\S+)\n(?:    options: (.*)\n)?", re.MULTILINE)
PART = "show_root_full_path: false"
FEWEST = 3
TABLE = ("| object | summary |", "| --- | --- |")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Add what is generated to the pages of the API."""
    if page.file.src_uri == "api/cli.md":
        return markdown + commands()
    if not page.file.src_uri.startswith("api/"):
        return markdown
    names = [path for path, options in OBJECT.findall(markdown) if PART not in options]
    if len(names) < FEWEST:
        return markdown
    rows = [f"| [`{name.rpartition('.')[2]}`](#{name}) | {summary(name, config)} |" for name in names]
    table = "\n".join([*TABLE, *rows])
    first = min(place.start() for place in re.finditer(r"^(?:::: |## )", markdown, re.MULTILINE))
    return f'{markdown[:first]}<div class="objects" markdown>\n\n{table}\n\n</div>\n\n{markdown[first:]}'


def summary(path: str, config: MkDocsConfig) -> str:
    """The first sentence of an object's docstring."""
    handler = config.plugins["mkdocstrings"].get_handler("python")  # type: ignore[attr-defined]
    found = handler.collect(path, handler.get_options({}))
    if found.docstring is None:
        raise PluginError(f"{path} has no docstring.")
    return first_sentence(found.docstring.value)


def first_sentence(text: str) -> str:
    """The first sentence of a text, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", paragraph)[0].replace("|", r"\|")


def commands() -> str:
    """A table of the commands, and the help of each below a heading."""
    group = typer.main.get_command(app)
    rows, helps = [], []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        title = f"tl-layersim {name}"
        rows.append(f"| [`{title}`](#{title.replace(' ', '-')}) | {first_sentence(command.help)} |")
        text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=title)
        helps.append("#" + text.replace("$ tl-layersim", "tl-layersim"))
    return "\n".join(["", '<div class="objects" markdown>', "", *TABLE, *rows, "", "</div>", "", *helps])
