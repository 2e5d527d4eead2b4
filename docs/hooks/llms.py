"""`llms.txt`, the map of the site for language models (https://llmstxt.org), and `llms-full.txt` with all pages in one text.

Both follow the navigation, and take the one line about each page from its `description`, or else from its first paragraph.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

MAPS: dict[str, Navigation] = {}


def on_nav(nav: Navigation, **_: object) -> Navigation:
    """Keep the navigation."""
    MAPS["site"] = nav
    return nav


def on_page_content(html: str, page: Page, **_: object) -> None:
    """Give the page its description, which the theme writes into its head too."""
    page.meta.setdefault("description", described(html))


def described(html: str) -> str:
    """The first sentence of the first paragraph that has one."""
    for paragraph in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
        text = " ".join(unescape(re.sub(r"<[^>]+>", "", paragraph)).split())
        sentence = re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text)[0]
        if sentence.endswith((".", "?", "!", ":")):
            return sentence.rstrip(":")
    return ""


def on_post_build(config: MkDocsConfig, **_: object) -> None:
    """Write both files beside the pages."""
    nav = MAPS["site"]
    head = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    home = nav.homepage
    if home is not None and home.meta["description"]:
        head += [home.meta["description"], ""]
    lines, full = list(head), list(head)
    top = [page for page in nav.items if isinstance(page, Page) and page is not home]
    sections: list[tuple[str, list[Page]]] = [("Pages", top)] if top else []
    sections += [(item.title, pages(item)) for item in nav.items if isinstance(item, Section)]
    for title, members in sections:
        lines += [f"## {title}", "", *(line(page) for page in members), ""]
        # Pages of the API are directives until they are built; their text is in the package.
        full += [text for page in members if not page.file.src_uri.startswith("api/") for text in (whole(page), "")]
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines).rstrip() + "\n")
    (site / "llms-full.txt").write_text("\n".join(full).rstrip() + "\n")


def pages(section: Section) -> list[Page]:
    """All pages below a section, in order."""
    return [page for item in section.children for page in (pages(item) if isinstance(item, Section) else [item])]


def line(page: Page) -> str:
    """A link and what it leads to."""
    about = page.meta["description"]
    return f"- [{page.title}]({page.file.dest_uri})" + (f": {about}" if about else "")


def whole(page: Page) -> str:
    """The text of a page, which begins with its title."""
    return (page.markdown or "").strip()
