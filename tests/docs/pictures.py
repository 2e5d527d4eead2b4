"""Render the pictures of README.md and docs/: `python -m tests.docs.pictures [NAME ...]`, or `make pictures` for all.

Figures of executed lines are those that the page's own lines of Python make; others are drawn from docs/tables (tables.py).
Chromium takes the screenshots.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from PIL import Image

import tl_layersim as lsim

from .helpers import ROOT, blocks
from .tables import Picture, pictures_of_tables, read_csv, side_by_side

IMAGES = ROOT / "docs" / "images"
HOME, HOME_HEIGHT = 590, 440


def executed(page: Path) -> dict[str, Any]:
    """The names that the first Python block of a page defines."""
    names: dict[str, Any] = {}
    exec(compile(blocks(page)[0], page.name, "exec"), names)
    return names


def depth() -> dict[str, Picture]:
    """Contributions of sublayers, and effects of skipped blocks."""
    names = executed(ROOT / "docs/depth.md")
    return {"depth": side_by_side(names["added"].plot("relative_norm"), names["effect"].plot("values"))}


def many_models() -> dict[str, Picture]:
    """Distances between fine-tunes, and CKA within and between their groups."""
    grid = executed(ROOT / "docs/many_models.md")["grid"]
    return {"many_models": side_by_side(grid.plot(), lsim.plot(lsim.many.compare_groups(grid, field="by_site")))}


def home() -> dict[str, Picture]:
    """One figure for each of the four questions of docs/index.md."""
    model, aligned, texts = lsim.demo_model(), lsim.demo_model(aligned=True), lsim.demo_text()
    data = lsim.Data(texts, skip_first=2, batch_size=2)
    lens = lsim.analyze(model, data, lsim.LogitLens(), intervals=True)
    other = lsim.analyze(aligned, data, lsim.LogitLens(), intervals=True)
    figures = {
        "home_decide": lsim.prompts.prediction_grid(model, "Once upon a time there was").plot(),
        "home_prune": lsim.analyze(model, lsim.Data(texts[::2], seq_len=64), lsim.SkipEffect())["skip_effect"].plot("values"),
        "home_agree": lsim.compare(model, aligned, lsim.Data(texts, skip_first=2), lsim.CKA()).plot(),
        "home_certain": lsim.plot(lsim.difference(lens, other)["logit_lens"]["accuracy"]),
    }
    for name in ("home_prune", "home_agree"):
        # Small on the page: colours alone, and room for them.
        figures[name].update_traces(texttemplate="").update_xaxes(tickfont_size=10)
    return {name: Picture([(figure, HOME)], HOME_HEIGHT) for name, figure in figures.items()}


# Rows of docs/tables/one_pass.csv that are drawn, with their labels.
TIMES = {
    '(b1) analyze `Cosine(center="none")`, `CKA()`': "tl_layersim: cosine and CKA",
    "(d) run_with_cache of residuals, loop": "run_with_cache and a loop",
    "(c) torch-cka, a sample is a token": "torch-cka, tokens as samples",
    "(c) ckatorch": "ckatorch",
}
BLOCKS_ALONE = "(a') blocks alone, no unembedding"


def performance() -> dict[str, Picture]:
    """The time of one pass with CKA beside that of the model's blocks, from a table of docs/tables."""
    table = read_csv("one_pass")
    seconds = dict(zip(table.labels, table.column("seconds").values, strict=True))
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
    return {"performance": Picture([(figure, 900)])}


def render(path: Path, picture: Picture, browser: str) -> None:
    """A PNG of figures side by side, at twice the size on the screen."""
    parts = []
    for figure, width in picture.figures:
        figure.update_layout(width=width, height=picture.height)
        parts.append(figure.to_html(full_html=False, include_plotlyjs=not parts, config={"staticPlot": True}))
    style = "body{margin:0;display:flex;background:#fff}"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<!doctype html><meta charset='utf-8'><style>{style}</style>{''.join(parts)}", encoding="utf-8")
        size = f"--window-size={sum(width for _, width in picture.figures)},{picture.height}"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        options += ["--force-device-scale-factor=2", f"--user-data-dir={folder}/profile", size, f"--screenshot={path}"]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=900)
    # Without transparency. Fewer colours would show as bands in colour bars.
    with Image.open(path) as taken:
        opaque = taken.convert("RGB")
    opaque.save(path, optimize=True)


TABLES = (
    "groups", "stitching", "mlp_skip", "clip", "sweep", "lens", "smollm2", "similarity", "measures", "paths", "vit",
    "vit_coupling", "sentence_encoder",
)  # fmt: skip
# Names of pictures, and the function that makes their figures.
PICTURES: dict[tuple[str, ...], Callable[[], dict[str, Picture]]] = {
    ("home_decide", "home_prune", "home_agree", "home_certain"): home,
    ("performance",): performance,
    ("depth",): depth,
    ("many_models",): many_models,
    TABLES: pictures_of_tables,
}


def main(chosen: list[str]) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is needed to take the pictures")
    known = [name for names in PICTURES for name in names]
    if unknown := sorted(set(chosen) - set(known)):
        raise SystemExit(f"no picture {', '.join(unknown)}; pictures are {', '.join(known)}")
    for names, made in PICTURES.items():
        figures = made() if not chosen or set(names) & set(chosen) else {}
        for name in names:
            if name in figures and (not chosen or name in chosen):
                render(IMAGES / f"{name}.png", figures[name], browser)
                print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
