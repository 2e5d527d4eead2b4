"""Render the pictures of README.md, the home page and docs/performance.md: `python -m tests.docs.pictures`, or `make pictures`.

Those of the README are the figures that its first lines of Python make. Chromium takes the screenshots.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

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
        "home_decide": lsim.prediction_grid(model, "Once upon a time there was").plot(),
        "home_prune": lsim.analyze(model, texts[::2], lsim.SkipEffect(), seq_len=64)["skip_effect"].plot("values"),
        "home_agree": lsim.compare(model, aligned, texts, lsim.CKA(), skip_first=2).plot(),
        "home_certain": lsim.difference(lens, other)["logit_lens"].plot("accuracy"),
    }
    return {name: [(figure, HOME)] for name, figure in figures.items()}


# Rows of the table in docs/performance.md that are drawn, with their labels.
TIMES = {
    '(b1) analyze `Cosine(center="none")`, `CKA()`': "tl_layersim: cosine and CKA",
    "(d) run_with_cache of residuals, loop": "run_with_cache and a loop",
    "(c) torch-cka, a sample is a token": "torch-cka, tokens as samples",
    "(c) ckatorch": "ckatorch",
}
BLOCKS_ALONE = "(a') blocks alone, no unembedding"


def seconds_by_variant(page: str) -> dict[str, float]:
    """The column of seconds of the table that compares with other packages, by variant."""
    table = page.split("| variant | seconds | / (a) |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: float(row[1]) for row in rows}


def performance() -> dict[str, list[tuple[Any, int]]]:
    """The time of one pass with CKA beside that of the model's blocks, from the table of docs/performance.md."""
    seconds = seconds_by_variant((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    ratios = {label: seconds[row] / seconds[BLOCKS_ALONE] for row, label in TIMES.items()}
    colors = ["#2a5c9a" if label.startswith("tl_layersim") else "#b9c4d3" for label in ratios]
    bars = go.Bar(
        x=list(ratios.values()),
        y=list(ratios),
        orientation="h",
        marker_color=colors,
        text=[f"{ratio:.1f}" for ratio in ratios.values()],
        textposition="outside",
        cliponaxis=False,
    )
    figure = go.Figure(bars)
    figure.add_vline(x=1, line={"color": "#c8641e", "dash": "dash"})
    figure.add_annotation(
        x=1, y=1.0, yref="paper", yanchor="bottom", text="the blocks of the model alone", showarrow=False, xanchor="left"
    )
    figure.update_layout(
        template="plotly_white",
        title="CKA of all 31 layers of SmolLM2: time over 4,096 tokens",
        xaxis_title="Time / time of the model's blocks",
        yaxis={"autorange": "reversed", "ticksuffix": "  "},
        margin={"l": 240, "r": 60, "t": 90, "b": 60},
        font={"size": 14, "color": "#1d2b3d"},
    )
    return {"performance": [(figure, 900)]}


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
    for name, figures in (readme() | home() | performance()).items():
        render(IMAGES / f"{name}.png", figures, browser)
        print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
