"""The gallery shows every figure, and its lines and those of the notebooks are the ones that run."""

from __future__ import annotations

import json

import pytest

from .helpers import executed_pages, hook, outputs, warnings_of
from .notebooks import LARGEST, NOTEBOOKS, digest

drawn_figures = hook("drawn_figures")
# Of the demo models and of small data; docs/traps.md explains them.
EXPLAINED = "cosine is not defined|NC1 is not defined|All training samples|LinearPredictivity is evaluated|Intervals of"
NULL_MAPS = {"calibrated", "p_values", "null_mean", "null_threshold"}


@pytest.fixture(scope="module")
def gallery():
    """The cells of the gallery with their outputs; the last cell is the record of its figures."""
    return outputs("gallery.md")


@pytest.fixture(scope="module")
def drawn(gallery):
    """What the gallery draws: (path of a class, field), and names of functions."""
    record = json.loads(gallery[-1]["outputs"][0]["text"])
    return {tuple(field) for field in record["fields"]}, set(record["functions"])


def test_every_picture_is_in_the_gallery(drawn):
    fields, _functions = drawn
    wanted = {
        (drawn_figures.path_of(cls), field)
        for cls, pictures in drawn_figures.classes_with_figures().items()
        for field in pictures
    }
    assert len(wanted) > 50
    # The maps of the null look alike for every measure: one of them is enough.
    shown = {field for _cls, field in fields} & NULL_MAPS
    missing = {f"{cls}.plot({field!r})" for cls, field in wanted - fields if field not in shown}
    assert not missing, sorted(missing)


def test_every_function_that_draws_is_in_the_gallery(drawn):
    assert drawn_figures.functions_with_figures() - drawn[1] == set()


def test_blocks_of_the_gallery_end_in_a_figure_or_show_nothing(gallery):
    shown = [output["data"] for cell in gallery[:-1] for output in cell["outputs"] if "data" in output]
    assert len(shown) > 100
    assert [data for data in shown if executed_pages().FIGURE_TYPE not in data] == []


def test_warnings_of_the_gallery_are_explained(gallery):
    assert warnings_of(gallery, EXPLAINED) == []


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
