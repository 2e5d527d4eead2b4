"""Names of models, modules, labels and versions come from files and servers: they stay text in every form of output."""

from __future__ import annotations

import csv
import io
import json
import re
from contextlib import redirect_stdout

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.commands.show_merge_list import show_file
from tl_layersim.core import LayerCurve, LayerMatrix, file_format, warn
from tl_layersim.core.errors import printable
from tl_layersim.core.results import card

from ..inputs.views import from_views, provenance, residuals, view_for

# A link of HTML and one of Markdown, a cell, a line, an escape of the terminal, and text from right to left.
HOSTILE = '=1+1<a href="javascript:x">[j](javascript:x)</a>|`\r\n=cmd()\x1b[31m\u202e$x$'
NAMES = tuple(f"{HOSTILE} {number}" for number in range(3))
RUN = provenance(model=HOSTILE, warnings=(HOSTILE,), versions={HOSTILE: HOSTILE}, options={"at": [HOSTILE], "pool": HOSTILE})
CURVE = LayerCurve(values=torch.arange(3).double(), layers=NAMES, provenance=RUN)
MATRIX = LayerMatrix(values=torch.rand(3, 3).double(), layers=NAMES, column_layers=NAMES, provenance=RUN)
REPORT = lsim.Report({"a": CURVE, HOSTILE.replace("/", ""): MATRIX})
RESULTS = pytest.mark.parametrize("result", [CURVE, MATRIX], ids=["curve", "matrix"])
STEERING = re.compile("[\r\x1b\u202e]")


def texts(node):
    """All texts in plain data."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from texts(key)
            yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)


def refuse_live(markdown: str) -> None:
    """Raise if a text of Markdown holds a link or a tag that is not escaped."""
    assert not re.search(r"(?<!\\)[\[\]<>]", markdown)
    assert not STEERING.search(markdown)


@RESULTS
def test_a_markdown_table_has_no_link_and_whole_lines(result):
    table = result.to_markdown()
    refuse_live(table)
    lines = table.splitlines()
    assert len(lines) == 5
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_a_markdown_report_and_its_card_have_no_link():
    refuse_live(REPORT.to_markdown())
    page = card(REPORT, "user/name")
    assert not re.search(r"(?<!\\)\]\(|(?<!\\)<a ", page)


@RESULTS
def test_a_latex_table_has_one_line_for_each_site(result):
    table = result.to_latex()
    assert not STEERING.search(table)
    assert table.count(r"\\") >= 4
    # A line for each site between those of booktabs, and no formula.
    assert len(table.splitlines()) == 4 + 3 + 2
    assert not re.findall(r"(?<!\\)\$", table)


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path):
    content = REPORT.to_csv(tmp_path / "x.csv").read_bytes().decode()
    assert not STEERING.search(content)

    rows = list(csv.reader(io.StringIO(content)))
    assert len({len(row) for row in rows}) == 1
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@", "-"))]

    # Numbers are those of the table.
    values = [float(row[rows[0].index("value")]) for row in rows[1:]]
    torch.testing.assert_close(torch.tensor(values), torch.cat([CURVE.values, MATRIX.values.reshape(-1)]).float())


def test_negative_numbers_and_plain_labels_of_a_csv_file_are_unchanged(tmp_path):
    result = LayerCurve(values=-torch.arange(1, 3).double(), layers=("a b", "-1"), provenance=provenance())
    lines = lsim.Report({"a": result}).to_csv(tmp_path / "x.csv").read_text().splitlines()
    assert lines[1:] == ["a,values,a b,-1.0", "a,values,-1,-2.0"]


@RESULTS
def test_no_figure_has_a_link(result):
    figure = json.loads(result.plot().to_json())
    assert not [text for text in texts(figure) if re.search(r"<\s*a\b", text)]
    # Titles and hover texts show the name.
    assert any("&lt;a href" in text for text in texts(figure))


@pytest.mark.heavy("every figure")
@pytest.mark.parametrize("name", sorted(find_analyzers()))
def test_no_figure_of_an_analyzer_has_a_link(name, tmp_path):
    """The labels that a file may change: names of sites, and others that are texts."""
    cls = find_analyzers()[name]
    header, tensors = file_format.read(from_views(cls(), [view_for(cls, residuals(1))]).save(tmp_path / "result"), ("result",))
    content = {key: value for key, value in header.items() if key not in ("format", "kind")}
    content["provenance"]["model"] = HOSTILE
    hostile_labels = {}
    for field, labels in content["fields"].items():
        if isinstance(labels, list) and all(isinstance(label, str) for label in labels):
            content["fields"][field] = [
                hostile_labels.setdefault(label, f"{HOSTILE} {len(hostile_labels)}") for label in labels
            ]
    path = file_format.write(tmp_path / "x", "result", content, tensors)
    if name == "contribution":
        with pytest.raises(lsim.LayersimError, match="sublayers"):
            lsim.load(path)
        return

    result = lsim.load(path)

    for picture in result.pictures:
        figure = json.loads(result.plot(picture.name).to_json())
        assert not [text for text in texts(figure) if re.search(r"<\s*a\b|&amp;lt;", text)], picture.name


def test_nothing_printed_steers_a_terminal(tmp_path):
    assert not STEERING.search(repr(CURVE))
    assert not STEERING.search(repr(REPORT))

    out = io.StringIO()
    with redirect_stdout(out):
        show_file(file=str(REPORT.save(tmp_path / "x")))
    assert not STEERING.search(out.getvalue())

    with pytest.warns(lsim.LayersimWarning) as warned:
        warn(HOSTILE)
    assert not STEERING.search(str(warned[0].message))
    assert not STEERING.search(str(lsim.LayersimError(HOSTILE)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\nb\tc", "a\nb\tc"),
        ("é 日本 👍🏽", "é 日本 👍🏽"),
        ("\x1b[0m", r"\x1b[0m"),
        ("a\x9bb\x00", r"a\x9bb\x00"),
    ],
)
def test_printable_texts_are_unchanged(text, shown):
    assert printable(text) == shown


def test_pages_hold_names_as_text(tmp_path):
    page = REPORT.to_html(tmp_path / "x.html").read_text().split("plotly.js v")[0]
    for html in (page, CURVE._repr_html_(), REPORT._repr_html_()):
        assert '<a href="javascript' not in html
