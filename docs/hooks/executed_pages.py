"""mkdocs hook: execute the code of pages and notebooks at build time, and show the outputs below the code.

A page whose front matter has `executed: true`, and every notebook in `docs/`, is executed by one Jupyter kernel from top to
bottom. The lines that a page shows are the lines that run. An error in a cell is an error of the build. Figures are embedded as
data, and drawn by `javascripts/figures.js` with one local plotly.js when they come into view.

Blocks of pages that begin with ```` ```python ```` are cells; code that is not to be executed begins with ```` ```py ````.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import html
import json
import re
import sys
import tempfile
import textwrap
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "executed_pages"
PLOTLY = "javascripts/plotly.min.js"
FIGURE_TYPE = "application/vnd.plotly.v1+json"
BLOCK = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
PLACE = '<div data-executed-figure="{}"></div>'
# Two kernels at a time; the most that a machine of continuous integration has cores for.
KERNELS = ThreadPoolExecutor(2)
KERNEL_ENVIRONMENT = {
    "PLOTLY_RENDERER": "plotly_mimetype",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
}

# The page whose figures are recorded, by a cell before and a cell after its own, see `drawn_figures.py`.
RECORDED = "gallery.md"
RECORDER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from docs.hooks import drawn_figures as _drawn_figures
_drawn_figures.start()
"""

_executed: dict[str, Future[list[dict[str, Any]]]] = {}
_figures: dict[str, dict[str, Any]] = {}


def cells(markdown: str) -> list[str]:
    """The code of a page, cell by cell."""
    return [textwrap.dedent(found["code"]) for found in BLOCK.finditer(markdown)]


def notebook_markdown(path: Path) -> str:
    """A notebook as the Markdown of a page, with a link to the notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    meta = {"executed": True, **notebook["metadata"].get("tl_layersim", {})}
    parts = ["---", *(f"{key}: {json.dumps(value)}" for key, value in meta.items()), "---", ""]
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        parts += [f"```python\n{source}\n```" if cell["cell_type"] == "code" else source, ""]
        if number == 0:
            parts += [
                f"[Download this notebook]({path.name})",
                "",
            ]
    return "\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook, and start to execute all pages that are to be executed."""
    from mkdocs.structure.files import File

    _executed.clear()
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            source = notebook_markdown(Path(file.abs_src_path))
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=source))
    for file in files.documentation_pages():
        text = file.content_string
        if text.startswith("---\nexecuted: true\n"):
            server = '\nserver: "ndif"\n' in text.partition("\n---\n")[0] + "\n"
            _executed[file.src_uri] = KERNELS.submit(executed_cells, file.src_uri, cells(text), server)
    # Pages are rendered after all cells have run: Python 3.11 cannot build syntax trees in two threads at once.
    for execution in _executed.values():
        execution.result()
    return files


def executed_cells(name: str, code: list[str], server: bool) -> list[dict[str, Any]]:
    """The code cells of a page with their outputs, from an earlier run if neither code nor package have changed.

    The build of the site and the tests of pages share these runs. After the cells of the gallery comes one that prints the
    record of its figures.

    Args:
        name: of the page.
        code: of its cells.
        server: whether the page needs an NDIF server.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from docs.hooks import ndif_server

    kept = CACHE / f"{Path(name).stem}-{_digest(code, ndif_server.kind() if server else '')}.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Processes that ask for one page at a time run it once.
        lock = stack.enter_context(kept.with_suffix(".lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            return json.loads(kept.read_text(encoding="utf-8"))  # type: ignore[no-any-return]  # as it was written
        environment = dict(KERNEL_ENVIRONMENT)
        if server:
            environment |= stack.enter_context(ndif_server.running())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if name == RECORDED:
            found = _run(name, [RECORDER, *code, "_drawn_figures.print_drawn()"], environment, folder)[1:]
        else:
            found = _run(name, code, environment, folder)
        kept.write_text(json.dumps(found), encoding="utf-8")
    return found


def _digest(code: list[str], server: str) -> str:
    """Of everything that decides the outputs: the code, the package, the hooks, and the versions of the libraries."""
    paths = sorted([*(ROOT / "tl_layersim").rglob("*"), *Path(__file__).parent.glob("*.py")])
    files = [path.read_bytes() for path in paths if path.is_file() and "__pycache__" not in path.parts]
    libraries = [version(name) for name in ("torch", "transformers", "nnsight", "plotly")]
    return hashlib.sha256(b"\0".join([json.dumps([code, server, libraries]).encode(), *files])).hexdigest()[:20]


def _run(name: str, code: list[str], environment: dict[str, str], folder: str) -> list[dict[str, Any]]:
    import os

    from mkdocs.exceptions import PluginError
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from nbformat.v4 import new_code_cell, new_notebook
    from traitlets.config import Config

    notebook = new_notebook(cells=[new_code_cell(text) for text in code])
    # Sockets in the file system: nobody else on the machine can speak to the kernel.
    sockets = Config(KernelManager={"transport": "ipc", "connection_file": str(Path(folder, "kernel.json"))})
    where = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, config=sockets, timeout=None, resources=where, coalesce_streams=True)
    try:
        client.execute(env={**os.environ, **environment})
    except CellExecutionError as error:
        raise PluginError(f"{name}: a cell failed.\n{error}") from None
    return [dict(cell) for cell in notebook.cells]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to notebooks, which work in a clone, to their pages, and put the outputs of each cell below its code."""
    markdown = re.sub(r"(\]\(notebooks/\w+)\.ipynb", r"\1.md", markdown)
    if page.file.src_uri not in _executed:
        return markdown
    done = iter(_executed[page.file.src_uri].result())
    return BLOCK.sub(lambda found: _with_outputs(found, next(done)["outputs"]), markdown)


def _with_outputs(found: re.Match[str], outputs: list[dict[str, Any]]) -> str:
    # A warning that two calls of a cell raise is shown once.
    parts = [textwrap.dedent(found[0]), *dict.fromkeys(filter(None, map(_shown, outputs)))]
    return textwrap.indent("\n\n".join(parts), found["indent"])


def _shown(output: dict[str, Any]) -> str:
    """One output of a cell as Markdown: a figure's place, HTML, or text."""
    if output["output_type"] == "stream":
        text = "".join(output["text"])
        return _text(text) if output["name"] == "stdout" else _warnings(text)
    data = output["data"]
    if FIGURE_TYPE in data:
        key = hashlib.sha256(json.dumps(data[FIGURE_TYPE], sort_keys=True).encode()).hexdigest()[:16]
        _figures[key] = data[FIGURE_TYPE]
        return PLACE.format(key)
    if "text/html" in data:
        # A blank line would end the block of HTML.
        table = re.sub(r"\s*\n\s*", " ", "".join(data["text/html"]))
        # The theme styles tables without a class.
        table = table.replace('<table border="1" class="dataframe">', "<table>")
        return f'<div class="executed-html">{table}</div>'
    return _text("".join(data["text/plain"]))


def _text(text: str) -> str:
    # Lines of a table are scrolled where a page is narrow; others are wrapped.
    kind = " executed-table" if re.search(r"\S {2,}\S", text) else ""
    return f'<pre class="executed-output{kind}"><code>{html.escape(text.rstrip()).replace(chr(10), "&#10;")}</code></pre>'


def _warnings(text: str) -> str:
    """The warnings of this package; progress bars and other libraries' lines are left out."""
    found = [line.partition("LayersimWarning: ")[2] for line in text.splitlines() if "LayersimWarning: " in line]
    return "\n\n".join(f'!!! warning "LayersimWarning"\n\n    {line}' for line in dict.fromkeys(found))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Put the data of figures in their places: after the page was rendered and indexed for the search."""
    if "data-executed-figure" not in output:
        return output
    output = re.sub(
        r'<div data-executed-figure="(\w+)"></div>',
        lambda found: _figure_html(_figures[found[1]]),
        output,
    )
    from mkdocs.utils import get_relative_url

    sources = [get_relative_url(path, page.file.url) for path in (PLOTLY, "javascripts/figures.js")]
    scripts = "".join(f'<script defer src="{source}"></script>' for source in sources)
    return output.replace("</body>", f"{scripts}</body>")


def _figure_html(figure: dict[str, Any]) -> str:
    layout = figure["layout"]
    size = f"max-width: {layout.get('width', 700)}px; min-height: {layout.get('height', 450)}px"
    data = json.dumps({"data": figure["data"], "layout": layout}, separators=(",", ":")).replace("<", "\\u003c")
    return f'<div class="executed-figure" style="{size}"><script type="application/json">{data}</script></div>'


def on_post_build(config: Any) -> None:
    """Write plotly.js of the installed plotly beside the pages."""
    from plotly.offline import get_plotlyjs

    path = Path(config.site_dir) / PLOTLY
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(get_plotlyjs(), encoding="utf-8")
