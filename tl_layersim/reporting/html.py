"""One self-contained HTML page of a report: a summary, tables, and every figure with its meaning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from ..core.intervals import headline_texts
from ..core.label_table import COLUMNS
from ..core.provenance import Provenance
from ..core.report_tables import field_table
from ..core.results import UNTRAINED, Result
from ..core.storage import replacing
from .findings import finding, side_by_side
from .site_labels import axis_title, is_stream, series_label, site_ranges
from .style import FONT, names_of_models

# Findings at the top of the page; those of further analyzers are in their sections.
MOST_FINDINGS = 6
# Larger tables are left to `to_frame`.
MOST_LINES, MOST_COLUMNS = 300, 7
# Elements of the page that its script and its contents find by these names, which results may have too.
OWN_NAMES = ("summary", "numbers", "figures")
# Names of the parts of a provenance in words.
RECORD = {
    "model": "Model",
    "config_hash": "Configuration (SHA-256, first digits)",
    "weights_hash": "Weights (checksum of all bytes)",
    "changes": "Hooks and edits",
    "source": "Class of the model",
    "basis": "Basis of the residual stream",
    "dtype": "Dtype of activations",
    "data": "Data (SHA-256)",
    "tokens": "Positions measured",
    "sequences": "Rows of data",
    "batches": "Forward passes",
    "seed": "Seed",
    "seconds": "Seconds, of the whole run",
}


def write_html(report: Mapping[str, Result], path: str | os.PathLike[str]) -> Path:
    """Write the page; it opens from disk and needs no network. It holds the whole of plotly.js, which has 4.5 MB.

    Raises:
        OSError: the file cannot be written.
    """
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    figures: list[str] = []
    sections = [_section(name, result, figures) for name, result in report.items()]
    first = next(iter(report.values()), None)
    names = " and ".join(names_of_models(first.provenance.model)) if first else "no model"
    findings = [(name, text) for name, result in report.items() if (text := finding(result))][:MOST_FINDINGS]
    shown = [section for section in sections if section["plots"] and section["name"] in dict(findings)]
    folder = files(__package__) / "page"
    style, script, page = ((folder / file).read_text(encoding="utf-8") for file in ("page.css", "page.js", "page.html.j2"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["anchor"] = _anchor
    html = environment.from_string(page).render(
        title=f"Layers of {names}",
        analyzers=", ".join(report) or "no results",
        facts=_facts(report) if first else [],
        findings=findings,
        first_plot=shown[0]["plots"][0] if shown else None,
        stream=all(is_stream(result.layers) for result in report.values()),
        sections=sections,
        warnings=_warnings(report),
        numbers=[(section["name"], *line) for section in sections if not section["models"] for line in section["headline"]],
        compared=[section for section in sections if section["models"]],
        intervals=_intervals(report),
        style=Markup(style.replace("FONT", FONT)),
        script=Markup(script),
        # No text of a result can end the element.
        figures=Markup(f"[{','.join(figures)}]".replace("<", "\\u003c")),
        plotly=Markup(get_plotlyjs() if figures else ""),
    )
    with replacing(path) as file:
        file.write(html.encode())
    return Path(path)


def _anchor(name: str) -> str:
    """The name by which links find the section of a result; no name of a result holds a slash."""
    return f"{name}/" if name in OWN_NAMES else name


def _section(name: str, result: Result, figures: list[str]) -> dict[str, Any]:
    """What the page shows of one result; its figures are added to a list, as JSON."""
    plots = []
    for picture in result.pictures:
        shown = [(picture.field, picture.title)]
        if len(result.declared(picture.field).axes) == 2 and result.of_untrained(picture.field) is not None:
            shown.append((f"{UNTRAINED}{picture.field}", f"{picture.title}, untrained"))
        for field, title in shown:
            figure = result.plot(field)
            size = {"width": figure.layout.width, "height": figure.layout.height}
            table = _numbers(result, picture.field)
            plots.append({"number": len(figures), "title": title, "meaning": picture.meaning, "table": table, **size})
            figures.append(figure.to_json())
    models, lines = side_by_side(result)
    return {
        "name": name,
        "words": result.declared().words,
        "finding": finding(result),
        "headline": list(headline_texts(result).items()),
        "models": models,
        "side_by_side": lines,
        "plots": plots,
        "sites": _sites(result),
        "provenance": _provenance(result.provenance),
    }


def _numbers(result: Result, field: str) -> dict[str, Any]:
    """The numbers of a figure as text, a line for each site; empty for matrices and for tables that are too large."""
    axes = result.declared(field).axes
    if len(axes) not in (1, 2) or (len(axes) == 2 and axes[0] in COLUMNS):
        return {}
    table = field_table(result, field)
    columns = [axis_title(axes[-1]), result.declared(field).words]
    if len(axes) == 2:
        table = table.set_index(table.columns[0]).T.reset_index()
        columns = [columns[0], *(series_label(axes[0], label) for label in result.coordinates(axes[0]))]
    if len(table) > MOST_LINES or table.shape[1] > MOST_COLUMNS:
        return {}
    return {"columns": columns, "lines": table.replace("nan", "–").to_numpy().tolist()}


def _facts(report: Mapping[str, Result]) -> list[tuple[str, str, str]]:
    """What was measured on what: a label, its value and a remark for each tile at the top of the page."""
    results = list(report.values())
    run = results[0].provenance
    models = names_of_models(run.model)
    options = run.options
    remarks = []
    counted = "tokens" if options.get("positions", "all") == "all" else "positions"
    if options.get("positions", "all") != "all":
        remarks.append(f"positions of each row: {options['positions']}")
    if options.get("skip_first"):
        remarks.append(f"the first {options['skip_first']} positions of each row left out")
    sites = sorted({len(result.layers) for result in results if result.layers})
    blocks = sorted({len(result.block_tokens) for result in results if result.has_intervals})
    facts = [
        ("Models" if len(models) > 1 else "Model", " and ".join(models), run.dtype.replace("torch.", "")),
        ("Data", f"{run.tokens:,} {counted}", "; ".join([f"in {run.sequences:,} rows", *remarks])),
    ]
    if sites:
        kind = "residual stream" if all(is_stream(result.layers) for result in results) else "see each section"
        facts.append(("Sites", " to ".join(map(str, dict.fromkeys((sites[0], sites[-1])))), kind))
    certain = f"from {blocks[0]} blocks of the data" if blocks else "intervals=True or --intervals gives them"
    return [*facts, ("Intervals", "95 % confidence" if blocks and blocks[-1] > 1 else "none", certain)]


def _warnings(report: Mapping[str, Result]) -> list[tuple[str, str]]:
    """The warnings of the run, each once, with the names of the results that it is about."""
    about: dict[str, list[str]] = {}
    for name, result in report.items():
        for text in result.provenance.warnings:
            about.setdefault(text, []).append(name)
    return [(", ".join(names), text) for text, names in about.items()]


def _provenance(run: Provenance) -> list[tuple[str, list[tuple[str, str]]]]:
    """The record of a run as titled tables of names and values."""
    record = [(words, getattr(run, name)) for name, words in RECORD.items()]
    return [
        (
            "Record",
            [
                (name, f"{value:.2f}" if isinstance(value, float) else str(value))
                for name, value in record
                if value not in (None, "")
            ],
        ),
        ("Options", [(name, _option(value)) for name, value in run.options.items() if value is not None]),
        ("Versions", [(name, str(value)) for name, value in run.versions.items()]),
    ]


def _option(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _intervals(report: Mapping[str, Result]) -> str:
    """What the intervals of a report are, in words; empty without intervals."""
    blocks = {name: len(result.block_tokens) for name, result in report.items() if result.has_intervals}
    if max(blocks.values(), default=0) < 2:
        return ""
    counts = sorted(set(blocks.values()))
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    without = [name for name in report if name not in blocks]
    return (
        "The numbers have 95 % confidence intervals: ± is half of the interval, and figures show intervals as bands, "
        f"whiskers or hover texts. They were computed from {each} contiguous blocks of the data (a delete-one-block "
        "jackknife with Student's t) and describe another sample of as many rows of the same kind, not another training of the "
        "model." + (f" No intervals: {', '.join(without)}." if without else "")
    )


def _sites(result: Result) -> str:
    """The sites at which a result was measured, in words; empty for a result without sites, such as one of many models."""
    if not result.layers:
        return ""
    further = (*getattr(result, "sublayers", ()), *getattr(result, "text_layers", ()))
    axes = {axis for own in result.tensor_fields().values() for axis in own}
    labels = {label for axis in axes for label in result.coordinates(axis)}
    # A lens has no numbers at the input of block 0, which is a site of the run.
    measured = [name for name in result.layers if name in labels] or result.layers
    own = site_ranges(tuple(dict.fromkeys((*measured, *further))))
    columns = result.coordinates("column")
    return own if columns == result.layers else f"{own}; second model: {site_ranges(columns)}"
