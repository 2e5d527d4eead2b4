"""The gallery shows every figure, and its lines and those of the notebooks are the ones that run."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import linecache
import pkgutil
import sys
import types
import warnings

import plotly.graph_objects as go
import pytest

import tl_layersim as lsim
from tl_layersim.core import Result
from tl_layersim.core.result_declarations import declarations

from ..structure.public_names import public_names
from .helpers import ROOT, executed_pages
from .notebooks import LARGEST, NOTEBOOKS, digest

GALLERY = (ROOT / "docs/gallery.md").read_text()
# Of the demo models and of small data; docs/traps.md explains them.
EXPLAINED = "CKA is dominated|CCA rests on|cosine is not defined|NC1 is not defined|All training samples|Intervals .* rest on"

NULL_MAPS = {"calibrated", "p_values", "null_mean", "null_threshold"}


def classes_with_figures() -> dict[type, set[str]]:
    """Every class of the package that draws, with the fields of its pictures; "" is any figure of a class without pictures."""
    for module in pkgutil.walk_packages(lsim.__path__, "tl_layersim."):
        if "demo.make" not in module.name:
            importlib.import_module(module.name)
    found: dict[type, set[str]] = {}
    for name, module in list(sys.modules.items()):
        for cls in vars(module).values() if name.startswith("tl_layersim") and module else ():
            if inspect.isclass(cls) and cls.__module__.startswith("tl_layersim") and hasattr(cls, "plot"):
                fields = pictures_of(cls)
                # Bases of several results have neither pictures nor a figure of their own, or hand theirs to subclasses.
                if not subclasses(cls) and (fields or "plot" in vars(cls)):
                    found[cls] = fields or {""}
    return found


def pictures_of(cls: type) -> set[str]:
    if not issubclass(cls, Result):
        return set()
    if isinstance(own := vars(cls).get("pictures"), tuple):
        return {picture.name for picture in own}
    return {cls.values_name if name == "values" else name for name, own in declarations(cls).items() if own.caption}


def subclasses(cls: type) -> set[type]:
    return {below for direct in cls.__subclasses__() for below in ({direct} | subclasses(direct))}


def functions_with_figures() -> set[str]:
    return {
        name
        for name, made in public_names().items()
        if inspect.isfunction(made) and "Figure" in str(inspect.signature(made).return_annotation)
    }


@pytest.fixture(scope="module")
def drawn():
    """What the gallery draws: (class, field) and names of functions; and the blocks that draw nothing at their end."""
    seen: set[tuple[type, str]] = set()
    patch = pytest.MonkeyPatch()
    for cls in {base for own in classes_with_figures() for base in own.__mro__ if "plot" in vars(base)} | {Result}:
        patch.setattr(cls, "plot", noting(cls.plot, seen))
    functions: set[str] = set()
    for name in functions_with_figures():
        package, _, function = f"tl_layersim.{name}".rpartition(".")
        owner = importlib.import_module(package)
        patch.setattr(owner, function, noting_name(getattr(owner, function), name, functions))
    # Dataclasses look their module up by name, and nnsight reads the body of a trace from the cache of lines.
    page = types.ModuleType("gallery")
    patch.setitem(sys.modules, "gallery", page)
    last = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"(?s).*({EXPLAINED})", category=lsim.LayersimWarning)
        for number, code in enumerate(executed_pages().cells(GALLERY)):
            last[code] = run(code, f"gallery.md[{number}]", vars(page))
    patch.undo()
    return seen, functions, last


def run(code: str, name: str, names: dict) -> object:
    """The value of the last expression, as in a notebook; None without one."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code)
    end = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return eval(compile(ast.Expression(end.value), name, "eval"), names) if end else None


def noting(plot, seen):
    def plot_and_note(self, *args, **options):
        called = inspect.signature(plot).bind(self, *args, **options)
        called.apply_defaults()
        field = called.arguments.get("field", "") or (self.pictures[0].name if getattr(self, "pictures", ()) else "")
        # `plot()` draws the values under their own name.
        own = getattr(self, "values_name", "") if field == "values" else field
        seen.update({(type(self), field), (type(self), own), (type(self), "")})
        return plot(self, *args, **options)

    return plot_and_note


def noting_name(function, name, seen):
    def call_and_note(*args, **options):
        seen.add(name)
        return function(*args, **options)

    return call_and_note


def test_every_picture_is_in_the_gallery(drawn):
    seen, _functions, _last = drawn
    wanted = {(cls, field) for cls, fields in classes_with_figures().items() for field in fields}
    # The maps of the null look alike for every measure: one of them is enough.
    shown = {field for _cls, field in seen} & NULL_MAPS
    missing = {f"{cls.__name__}.plot({field!r})" for cls, field in wanted - seen if field not in shown}
    assert not missing, sorted(missing)


def test_every_function_that_draws_is_in_the_gallery(drawn):
    assert functions_with_figures() - drawn[1] == set()


def test_blocks_of_the_gallery_end_in_a_figure_or_show_nothing(drawn):
    values = drawn[2]
    assert sum(isinstance(value, go.Figure) for value in values.values()) > 100
    assert [code for code, value in values.items() if not isinstance(value, go.Figure | None)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_with_the_outputs_of_their_code(path):
    """`python -m tests.docs.notebooks` writes them."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert notebook["metadata"]["tl_layersim"]["code"] == digest(notebook)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum("image/png" in output.get("data", {}) for output in outputs) > 3
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_runs_the_cells_of_the_notebook(path):
    hook = executed_pages()
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert [cell.rstrip("\n") for cell in hook.cells(hook.notebook_markdown(path))] == code


def test_an_output_stands_below_its_cell_and_a_figure_is_data():
    hook = executed_pages()
    figure = {"output_type": "display_data", "data": {hook.FIGURE_TYPE: {"data": [], "layout": {"title": "</script>"}}}}
    text = {"output_type": "stream", "name": "stdout", "text": "1 < 2\n"}
    page = '=== "A"\n\n    ```python\n    1\n    ```\n'
    found = hook.BLOCK.sub(lambda block: hook._with_outputs(block, [text, figure]), page)
    assert "1 &lt; 2" in found
    [key] = [key for key in hook._figures if key in found]
    assert all(line.startswith("    ") for line in found.splitlines()[2:] if line)
    html = hook._figure_html(hook._figures[key])
    assert html.count("</script>") == 1


@pytest.mark.heavy("executed documentation")
def test_an_error_in_a_cell_fails_the_build(tmp_path):
    PluginError = pytest.importorskip("mkdocs.exceptions").PluginError
    pytest.importorskip("nbclient")
    with pytest.raises(PluginError, match=r"broken\.md: a cell failed(.|\n)*ZeroDivisionError"):
        executed_pages()._run("broken.md", ["1 / 0"], {}, str(tmp_path))
