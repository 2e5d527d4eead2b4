"""Render the pictures of README.md and of the home page into docs/images: `python -m tests.docs.pictures`, or `make pictures`.

Those of the README are the figures that its first lines of Python make. Chromium takes the screenshots.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import tl_layersim as lsim

from .helpers import ROOT, blocks

IMAGES = ROOT / "docs" / "images"
HEIGHT, HOME = 400, 620


def readme() -> dict[str, list[tuple[Any, int]]]:
    """The figures of the first Python block of the README, side by side, with their widths."""
    names: dict[str, Any] = {}
    exec(compile(blocks(ROOT / "README.md")[0], "README.md", "exec"), names)
    return {"readme": [(names["similarity"], 470), (names["predictions"], 730)]}


def home() -> dict[str, list[tuple[Any, int]]]:
    """One figure for each of the four questions of docs/index.md."""
    model, aligned, texts = lsim.demo_model(), lsim.demo_model(aligned=True), lsim.demo_text()
    options: dict[str, Any] = {"skip_first": 2, "batch_size": 2, "intervals": True}
    lens = lsim.analyze(model, texts, lsim.LogitLens(), **options)
    other = lsim.analyze(aligned, texts, lsim.LogitLens(), **options)
    figures = {
        "home_decide": lsim.prediction_grid(model, "Once upon a time there was a little girl").plot(),
        "home_prune": lsim.analyze(model, texts[::2], lsim.SkipEffect(), seq_len=64)["skip_effect"].plot("values"),
        "home_agree": lsim.compare(model, aligned, texts, lsim.CKA(), skip_first=2).plot(),
        "home_certain": lsim.difference(lens, other)["logit_lens"].plot("accuracy"),
    }
    return {name: [(figure, HOME)] for name, figure in figures.items()}


def render(path: Path, figures: list[tuple[Any, int]], browser: str) -> None:
    """A PNG of figures side by side, at twice the size on the screen."""
    parts = []
    for figure, width in figures:
        figure.update_layout(width=width, height=HEIGHT)
        parts.append(figure.to_html(full_html=False, include_plotlyjs=not parts, config={"staticPlot": True}))
    style = "body{margin:0;display:flex;background:#fff}"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<!doctype html><meta charset='utf-8'><style>{style}</style>{''.join(parts)}", encoding="utf-8")
        size = f"--window-size={sum(width for _, width in figures)},{HEIGHT}"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        options += ["--force-device-scale-factor=2", f"--user-data-dir={folder}/profile", size, f"--screenshot={path}"]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is needed to take the pictures")
    for name, figures in (readme() | home()).items():
        render(IMAGES / f"{name}.png", figures, browser)
        print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
