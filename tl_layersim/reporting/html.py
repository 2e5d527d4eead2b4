"""HTML page of a report, and HTML of results for notebooks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from ..core.file_format import replacing
from ..core.intervals import headline_texts, with_margin
from ..core.report_tables import COLUMNS, field_table
from ..core.result_declarations import Provenance
from ..core.results import UNTRAINED, Report, Result
from .site_labels import axis_title, is_stream, listed_sites, series_label
from .style import FONT, names_of_models

# Maximum number of headline numbers in a sentence.
MOST_HEADLINES = 2
# Maximum number of quantities in a sentence about several models.
MOST_CHANGES = 3


def finding(result: Result) -> str:
    """Sentence with the main numbers of a result; empty if there are none.

    Args:
        result: a result. Its own `finding` comes first.
    """
    own = result.finding()
    if own:
        return own
    models, lines = in_columns(result)
    if models:
        changes = [f"{line[0]} {' → '.join(line[1 : len(models) + 1])}" for line in lines[:MOST_CHANGES]]
        return f"{' → '.join(models)}: {'; '.join(changes)}."
    numbers = [f"{name}: {text}" for name, text in list(headline_texts(result).items())[:MOST_HEADLINES]]
    return "; ".join(numbers)[:1].upper() + "; ".join(numbers)[1:] + "." if numbers else ""


def in_columns(result: Result) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headline numbers of several models: a row for each quantity, a column for each model.

    Returns:
        Names of the models; and rows of a quantity, its value for each model and, for two models, the difference. Empty for a
        result of one model.
    """
    models = tuple(map(str, getattr(result, "models", ())))
    texts = headline_texts(result)
    if len(models) < 2 or not texts or not all(any(name.startswith(f"{model}: ") for model in models) for name in texts):
        return (), []
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(name.partition(": ")[2] for name in texts):
        keys = [f"{model}: {name}" for model in models]
        change = [_difference_text(result, keys[0], keys[1])] if len(models) == 2 and all(key in texts for key in keys) else []
        lines.append((name, *(texts.get(key, "") for key in keys), *change))
    return models, lines


def _difference_text(result: Result, before: str, after: str) -> str:
    """Text of the difference `after` - `before` of two headline numbers, such as "+0.12 ± 0.03"."""
    text = with_margin(result, lambda one: one.headline()[after] - one.headline()[before])
    return text if text.startswith("-") else f"+{text}"


# Colours follow the notebook, light or dark.
NOTEBOOK_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""
<div style="font-family: system-ui, sans-serif; font-size: 13px; line-height: 1.45; max-width: 900px">
<div><b>{{ title }}</b>{% if about %} <span style="opacity: 0.7">{{ about }}</span>{% endif %}</div>
{% if rows %}
<table style="border-collapse: collapse; margin: 6px 0">
<thead><tr>
{% for name in columns %}<th style="text-align: left; padding: 3px 18px 3px 0">{{ name }}</th>{% endfor %}
</tr></thead>
<tbody>
{% for row in rows %}<tr>
{% for cell in row %}<td style="text-align: left; padding: 3px 18px 3px 0">{{ cell }}</td>{% endfor %}
</tr>{% endfor %}
</tbody>
</table>
{% endif %}
<div style="opacity: 0.7">{% for call in calls %}<code>{{ call }}</code>{% if not loop.last %} · {% endif %}{% endfor %}</div>
</div>
""")


def result_html(result: Result) -> str:
    """HTML of a result: a table of headline numbers, and a line with model and data."""
    size = " x ".join(map(str, result.values.shape))
    title = f"{type(result).__name__}" + (f" ({size})" if size else "")
    return _html(title, {"": result}, (".plot()", ".to_frame()", ".save(path)"))


def report_html(report: Report) -> str:
    """HTML of a report: one table of the headline numbers of all results."""
    return _html("Report", report, (".plot()", f'["{next(iter(report), "")}"].plot()', ".to_html(path)", ".save(path)"))


def measured_on(provenance: Provenance) -> str:
    """Model and data of a run in one line."""
    rows = f"{provenance.tokens:,} tokens in {provenance.rows_in_words}"
    return f"{' and '.join(names_of_models(provenance.model))} · {rows} · {provenance.dtype.replace('torch.', '')}"


def _html(title: str, results: Mapping[str, Result], calls: tuple[str, ...]) -> str:
    """HTML of the headline numbers of results, for a notebook."""
    rows: list[tuple[str, ...]] = [(name, *line) for name, result in results.items() for line in headline_texts(result).items()]
    first = next(iter(results.values()), None)
    margin = " (± half of the 95 % interval)" if any(result.has_intervals for result in results.values()) else ""
    about = "without results" if first is None else measured_on(first.provenance)
    columns: tuple[str, ...] = ("analyzer", "measure", f"value{margin}")
    if "" in results:
        columns, rows = columns[1:], [row[1:] for row in rows]
    return NOTEBOOK_PAGE.render(title=title, about=about, columns=columns, rows=rows, calls=calls)


# Maximum number of findings at the top of the page.
MOST_FINDINGS = 6
# Maximum size of a table on the page.
MOST_LINES, MOST_COLUMNS = 300, 7
# Names of the page's own elements, which results may have too.
OWN_NAMES = ("summary", "numbers", "figures")
# Fields of a provenance in words.
RECORD = {
    "model": "Model",
    "config_hash": "Configuration (SHA-256, first digits)",
    "weights_hash": "Weights (checksum of all bytes)",
    "changes": "Hooks and edits",
    "source": "Class of the model",
    "basis": "Basis of the residual stream",
    "dtype": "Dtype of activations",
    "attention": "Attention heads",
    "data": "Data (SHA-256)",
    "tokens": "Positions measured",
    "sequences": "Rows of data",
    "texts": "Texts",
    "batches": "Forward passes",
    "seed": "Seed",
    "seconds": "Seconds, of the whole run",
}


def write_html(report: Mapping[str, Result], path: str | os.PathLike[str]) -> Path:
    """Write the HTML page of a report.

    The page holds plotly.js (4.5 MB), so it opens without a network.

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
        about=measured_on(first.provenance) if first else "",
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
        # No text of a result can close the script element.
        figures=Markup(f"[{','.join(figures)}]".replace("<", "\\u003c")),
        plotly=Markup(get_plotlyjs() if figures else ""),
    )
    with replacing(path) as file:
        file.write(html.encode())
    return Path(path)


def _anchor(name: str) -> str:
    return f"{name}/" if name in OWN_NAMES else name


def _section(name: str, result: Result, figures: list[str]) -> dict[str, Any]:
    """Build the section of one result; append its figures to a list as JSON."""
    plots = []
    for picture in result.pictures:
        shown = [(picture.name, picture.title)]
        if len(result.declared(picture.name).axes) == 2 and result.of_untrained(picture.name) is not None:
            shown.append((f"{UNTRAINED}{picture.name}", f"{picture.title}, untrained"))
        for field, title in shown:
            figure = result.plot(field)
            size = {"width": figure.layout.width, "height": figure.layout.height}
            table = _numbers(result, picture.name)
            plots.append({"number": len(figures), "title": title, "meaning": picture.caption, "table": table, **size})
            figures.append(figure.to_json())
    models, lines = in_columns(result)
    return {
        "name": name,
        "words": result.declared().words,
        "finding": finding(result),
        "headline": list(headline_texts(result).items()),
        "models": models,
        "in_columns": lines,
        "plots": plots,
        "sites": _sites(result),
        "provenance": _provenance(result.provenance),
    }


def _numbers(result: Result, field: str) -> dict[str, Any]:
    """Values of a figure as a table of texts; empty for matrices and large tables."""
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


def _warnings(report: Mapping[str, Result]) -> list[tuple[str, str]]:
    """Distinct warnings of a report, as pairs (names of results, text)."""
    about: dict[str, list[str]] = {}
    for name, result in report.items():
        for text in result.provenance.warnings:
            about.setdefault(text, []).append(name)
    return [(", ".join(names), text) for text, names in about.items()]


def _provenance(run: Provenance) -> list[tuple[str, list[tuple[str, str]]]]:
    """Record of a run, as titled tables of names and values."""
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
    """Description of the report's intervals; empty without intervals."""
    blocks = {name: len(result.block_tokens) for name, result in report.items() if result.has_intervals}
    if max(blocks.values(), default=0) < 2:
        return ""
    counts = sorted(set(blocks.values()))
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    without = [name for name in report if name not in blocks]
    return (
        "The numbers have 95 % confidence intervals: ± is half of the interval, and figures show intervals as bands, "
        f"whiskers or hover texts. They were computed from {each} contiguous blocks of the data (a delete-one-block "
        "jackknife with Student's t) and describe another sample of as many texts of the same kind, not another training of "
        "the model." + (f" No intervals: {', '.join(without)}." if without else "")
    )


def _sites(result: Result) -> str:
    """Sites of a result in words; empty for a result without sites."""
    if not result.layers:
        return ""
    further = (*getattr(result, "sublayers", ()), *getattr(result, "text_layers", ()))
    axes = {axis for own in result.tensor_fields().values() for axis in own}
    labels = {label for axis in axes for label in result.coordinates(axis)}
    # A lens has no numbers at the input of block 0, although the run reads this site.
    measured = [name for name in result.layers if name in labels] or result.layers
    own = listed_sites(tuple(dict.fromkeys((*measured, *further))))
    columns = result.coordinates("column")
    return own if columns == result.layers else f"{own}; second model: {listed_sites(columns)}"
