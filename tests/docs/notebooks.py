"""Execute the notebooks of docs/ and write the outputs into their files: `python -m tests.docs.notebooks [NAME ...]`.

The kernel is the one that executes the pages, so both show the same numbers. Figures are written as PNG, which editors and
repositories show without scripts; the pages of the site draw them with plotly.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from .helpers import ROOT, executed_pages

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
# Bytes of a file, outputs included; and the greatest width of a picture in pixels.
LARGEST, WIDEST = 300_000, 720


def code_of(notebook: dict[str, Any]) -> list[str]:
    """The code of the cells."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """A digest of the code, which the file keeps beside the outputs of this code."""
    return hashlib.sha256(json.dumps(code_of(notebook)).encode()).hexdigest()[:16]


def written(output: dict[str, Any]) -> dict[str, Any] | None:
    """An output as a file keeps it. Of the error stream only the warnings of the package are kept, without paths."""
    if output["output_type"] == "stream":
        if output["name"] == "stdout":
            return {**output, "text": output["text"].splitlines(keepends=True)}
        found = [line.partition("LayersimWarning: ")[2] for line in output["text"].splitlines()]
        lines = [f"LayersimWarning: {line}\n" for line in dict.fromkeys(filter(None, found))]
        return {**output, "text": lines} if lines else None
    data = output["data"]
    if figure := data.get(executed_pages().FIGURE_TYPE):
        data = {"image/png": picture(figure)}
    else:
        data = {kind: text.splitlines(keepends=True) for kind, text in data.items() if kind in ("text/plain", "text/html")}
    return {**output, "data": data, "metadata": {}}


def picture(figure: dict[str, Any]) -> str:
    """A PNG of a figure of plotly, in base64."""
    import plotly.graph_objects as go
    from PIL import Image

    with Image.open(io.BytesIO(go.Figure(figure).to_image("png", scale=1))) as drawn:
        small = drawn.convert("RGB")
    if small.width > WIDEST:
        small = small.resize((WIDEST, round(small.height * WIDEST / small.width)), Image.Resampling.LANCZOS)
    # Without dithering, which would double the size.
    small = small.quantize(96, dither=Image.Dither.NONE)
    small.save(file := io.BytesIO(), "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def execute(path: Path) -> None:
    """Execute a notebook and write its outputs into its file."""
    hook = executed_pages()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    own = notebook["metadata"].setdefault("tl_layersim", {})
    name, server = path.relative_to(ROOT / "docs").with_suffix(".md").as_posix(), own.get("server") == "ndif"
    done = iter(hook.executed_cells(name, code_of(notebook), server))
    for number, cell in enumerate([cell for cell in notebook["cells"] if cell["cell_type"] == "code"], 1):
        outputs = [written(output) for output in next(done)["outputs"]]
        cell["outputs"] = [output for output in outputs if output is not None]
        cell["execution_count"] = number
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
    own["code"] = digest(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(chosen: list[str]) -> None:
    for path in NOTEBOOKS:
        if not chosen or path.stem in chosen:
            execute(path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
