"""The objects of API pages: a table at the top of each page, and links where a description says "see `name`"."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

# An object that is imported by its path; parts of others, with the option below, are not.
OBJECT = re.compile(r"^::: (\S+)\n(?:    options: (.*)\n)?", re.MULTILINE)
PART = "show_root_full_path: false"
FEWEST = 3
SEE = re.compile(r"\b([Ss]ee )<code>(\w+)</code>")
TABLE = ("| object | summary |", "| --- | --- |")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Put the table before the first object of a page."""
    if not page.file.src_uri.startswith("api/"):
        return markdown
    names = [path for path, options in OBJECT.findall(markdown) if PART not in options]
    if len(names) < FEWEST:
        return markdown
    rows = [f"| [`{name.rpartition('.')[2]}`](#{name}) | {summary(name, config)} |" for name in names]
    table = "\n".join([*TABLE, *rows])
    first = min(place.start() for place in re.finditer(r"^(?:::: |## )", markdown, re.MULTILINE))
    return f'{markdown[:first]}<div class="objects" markdown>\n\n{table}\n\n</div>\n\n{markdown[first:]}'


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Link "see `name`" to the object of this name."""
    if not page.file.src_uri.startswith("api/"):
        return html
    places = {
        path.rpartition(".")[2]: f"{'' if file.stem == Path(page.file.src_uri).stem else f'{file.stem}.html'}#{path}"
        for file in sorted((Path(config.docs_dir) / "api").glob("*.md"))
        for path, options in OBJECT.findall(file.read_text(encoding="utf-8"))
        if PART not in options
    }

    def link(found: re.Match[str]) -> str:
        see, name = found.groups()
        return f'{see}<a href="{places[name]}"><code>{name}</code></a>' if name in places else found[0]

    return SEE.sub(link, html)


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
