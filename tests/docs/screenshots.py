"""Screenshots of the built site, to be looked at: `python -m tests.docs.screenshots site screenshots`, or `make screenshots`.

Ten pages, light and dark, at widths of 1,280 and 600 pixels; and every figure of the gallery, one picture each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .browser import Browser

PAGES = (
    "index", "quickstart", "concepts", "choosing", "gallery", "lens", "performance", "api/run", "api/similarity", "api/results",
)  # fmt: skip
WIDTHS = (1280, 600)
# Every figure that scripts have drawn, by its place on the page.
FIGURES = """
[...document.querySelectorAll(".md-content .js-plotly-plot, .md-content img, .md-content iframe")].map(figure => {
  const box = figure.getBoundingClientRect();
  return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1};
}).filter(box => box.width > 100 && box.height > 60)
"""


def main(site: Path, out: Path) -> None:
    """Write all pictures into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for page in (site / f"{name}.html" for name in PAGES):
            if not page.exists():
                print(f"no page {page}")
                continue
            for width in WIDTHS:
                for dark in (False, True):
                    browser.look(width, dark=dark)
                    browser.open(page.as_uri())
                    name = page.relative_to(site).with_suffix("").as_posix().replace("/", "-")
                    browser.screenshot(out / f"{name}-{width}-{'dark' if dark else 'light'}.png", whole=True)
        gallery = site / "gallery.html"
        for width in WIDTHS if gallery.exists() else ():
            browser.look(width)
            browser.open(gallery.as_uri())
            for number, clip in enumerate(browser.evaluate(FIGURES)):
                browser.screenshot(out / f"figure-{number:02}-{width}.png", clip=clip)
    print(f"{len(list(out.glob('*.png')))} pictures in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
