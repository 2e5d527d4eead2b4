"""Formulas become MathML when the site is built: browsers draw it themselves, without a script."""

from __future__ import annotations

import re
from html import unescape

from math_core import LatexError, LatexToMathML
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

# What pymdownx.arithmatex writes for $...$ and $$...$$.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
CONVERTER = LatexToMathML(fancy_error=False)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Replace every formula of a page."""

    def mathml(found: re.Match[str]) -> str:
        tag, tex = found[1], unescape(found[2]).strip()
        try:
            drawn = CONVERTER.convert_with_local_state(tex, displaystyle=tag == "div")
        except LatexError as error:
            raise PluginError(f"{page.file.src_uri}: the formula {tex!r} cannot be drawn: {error}") from error
        return f'<{tag} class="formula">{drawn}</{tag}>'

    return FORMULA.sub(mathml, html)
