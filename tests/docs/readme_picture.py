"""Render docs/images/readme.png, the two figures that the first lines of README.md make: `python -m tests.docs.readme_picture`.

Chromium takes the screenshot.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from .helpers import ROOT, blocks

PICTURE = ROOT / "docs" / "images" / "readme.png"
WIDTHS, HEIGHT = {"similarity": 470, "predictions": 730}, 400


def figures() -> dict[str, Any]:
    """The figures of the first Python block of the README, by the names that it gives them."""
    names: dict[str, Any] = {}
    exec(compile(blocks(ROOT / "README.md")[0], "README.md", "exec"), names)
    return {name: names[name] for name in WIDTHS}


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is needed to take the picture")
    parts = []
    for name, figure in figures().items():
        figure.update_layout(width=WIDTHS[name], height=HEIGHT)
        parts.append(figure.to_html(full_html=False, include_plotlyjs=not parts, config={"staticPlot": True}))
    style = "body{margin:0;display:flex;background:#fff}"
    page = f"<!doctype html><meta charset='utf-8'><style>{style}</style>{''.join(parts)}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        size = f"--window-size={sum(WIDTHS.values())},{HEIGHT}"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        options += ["--force-device-scale-factor=2", f"--user-data-dir={folder}/profile", size, f"--screenshot={PICTURE}"]
        subprocess.run([browser, *options, path.as_uri()], check=True, capture_output=True, timeout=120)
    print(PICTURE)


if __name__ == "__main__":
    main()
