"""Screenshots of the built site, to be looked at: `python -m tests.docs.screenshots site screenshots`, or `make screenshots`.

Ten pages, light and dark, at widths of 1,280 and 600 pixels; and every figure of the gallery, one picture each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .browser import Browser

PAGES = (
    "index", "quickstart", "concepts", "choosing", "gallery", "lens", "performance", "api/run", "api/similarity", "api/results",
)  # fmt: skip
WIDTHS = (1280, 600)
# The event on which docs/javascripts/figures.js draws all visible figures, and time for plotly to draw them. On that event the
# theme opens all folded boxes; they are closed again.
DRAW = """
(async () => {
  const closed = [...document.querySelectorAll("details:not([open])")];
  dispatchEvent(new Event("beforeprint"));
  await new Promise(done => setTimeout(done, 1500));
  closed.forEach(box => box.open = false);
})()
"""
# Number of figures on the page. The header is hidden, since it would cover them.
COUNT = """
document.head.insertAdjacentHTML("beforeend", "<style>.md-header, .md-tabs, .md-top {display: none !important}</style>");
(window.figures = [...document.querySelectorAll(".executed-figure")]).length
"""
# Opens the tabs that contain a figure, scrolls to the figure, waits until it is drawn, and returns its place on the page.
SHOW = """
(async figure => {
  for (let block = figure.closest(".tabbed-block"); block; block = block.parentElement.closest(".tabbed-block")) {
    const position = [...block.parentElement.children].indexOf(block);
    block.closest(".tabbed-set").querySelectorAll(":scope > input")[position].click();
  }
  figure.scrollIntoView({block: "start", behavior: "instant"});
  const moment = milliseconds => new Promise(done => setTimeout(done, milliseconds));
  for (let tries = 0; tries < 200 && !figure.querySelector(".main-svg"); tries++) await moment(50);
  await moment(150);
  if (!figure.querySelector(".main-svg")) return null;
  const box = figure.getBoundingClientRect();
  return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1};
})(figures[%d])
"""


def pages(browser: Browser, site: Path, out: Path) -> None:
    """Take the pages, light and dark, at both widths."""
    for page in (site / f"{name}.html" for name in PAGES):
        name = page.relative_to(site).with_suffix("").as_posix().replace("/", "-")
        for width in WIDTHS:
            for dark in (False, True):
                browser.look(width, dark=dark)
                browser.open(page.as_uri())
                browser.evaluate(DRAW)
                browser.screenshot(out / f"{name}-{width}-{'dark' if dark else 'light'}.png", whole=True)


def figures(browser: Browser, page: Path, out: Path, width: int) -> tuple[int, list[int]]:
    """Take every figure of a page; its number of figures, and those that were not drawn."""
    browser.look(width)
    browser.open(page.as_uri())
    number, missing = browser.evaluate(COUNT), []
    for figure in range(number):
        clip: dict[str, Any] | None = browser.evaluate(SHOW % figure)
        if clip is None or clip["width"] < 100 or clip["height"] < 60:
            missing.append(figure)
        else:
            browser.screenshot(out / f"figure-{figure:03}-{width}.png", clip=clip)
    return number, missing


def main(site: Path, out: Path) -> None:
    """Write all pictures into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    complete = True
    with Browser() as browser:
        for width in WIDTHS:
            number, missing = figures(browser, site / "gallery.html", out, width)
            print(f"{number - len(missing)} of {number} figures of the gallery at {width} pixels")
            if missing or not number:
                complete = False
                print(f"not drawn: {missing}")
        pages(browser, site, out)
    print(f"{len(list(out.glob('*.png')))} pictures in {out}")
    if not complete:
        raise SystemExit("Some figures of the gallery were not drawn.")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
