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
    sentence = result.finding()
    if sentence:
        return sentence
    models, rows = in_columns(result)
    if models:
        changes = []
        for quantity, *texts in rows[:MOST_CHANGES]:
            # For two models, the row ends with their difference.
            changes.append(f"{quantity} {' → '.join(texts[: len(models)])}")
        return f"{' → '.join(models)}: {'; '.join(changes)}."
    numbers = [f"{name}: {text}" for name, text in list(headline_texts(result).items())[:MOST_HEADLINES]]
    if not numbers:
        return ""
    sentence = "; ".join(numbers)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def in_columns(result: Result) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headline numbers of several models: a row for each quantity, a column for each model.

    Returns:
        Names of the models; and rows of a quantity, its value for each model and, for two models, the difference. Empty for a
        result of one model.
    """
    models = tuple(map(str, getattr(result, "models", ())))
    texts = headline_texts(result)
    prefixes = tuple(f"{model}: " for model in models)
    if len(models) < 2 or not texts or not all(name.startswith(prefixes) for name in texts):
        return (), []
    rows: list[tuple[str, ...]] = []
    for quantity in dict.fromkeys(name.partition(": ")[2] for name in texts):
        keys = [f"{model}: {quantity}" for model in models]
        row = [quantity, *(texts.get(key, "") for key in keys)]
        if len(models) == 2 and all(key in texts for key in keys):
            row.append(_difference_text(result, keys[0], keys[1]))
        rows.append(tuple(row))
    return models, rows


def _difference_text(result: Result, before: str, after: str) -> str:
    """Text of the difference `after` - `before` of two headline numbers, such as "+0.12 ± 0.03"."""
    text = with_margin(result, lambda measured: measured.headline()[after] - measured.headline()[before])
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
    title = type(result).__name__
    # The values of a few results are a single number.
    if result.values.shape:
        title += f" ({' x '.join(map(str, result.values.shape))})"
    return _html(title, {"": result}, (".plot()", ".to_frame()", ".save(path)"))


def report_html(report: Report) -> str:
    """HTML of a report: one table of the headline numbers of all results."""
    first_name = next(iter(report), "")
    return _html("Report", report, (".plot()", f'["{first_name}"].plot()', ".to_html(path)", ".save(path)"))


def measured_on(provenance: Provenance) -> str:
    """Model and data of a run in one line."""
    rows = f"{provenance.tokens:,} tokens in {provenance.rows_in_words}"
    return f"{' and '.join(names_of_models(provenance.model))} · {rows} · {provenance.dtype.replace('torch.', '')}"


def _html(title: str, results: Mapping[str, Result], calls: tuple[str, ...]) -> str:
    """HTML of the headline numbers of results, for a notebook."""
    rows: list[tuple[str, ...]] = []
    for name, result in results.items():
        rows += [(name, quantity, text) for quantity, text in headline_texts(result).items()]
    first_result = next(iter(results.values()), None)
    about = "without results" if first_result is None else measured_on(first_result.provenance)
    has_intervals = any(result.has_intervals for result in results.values())
    value_title = "value (± half of the 95 % interval)" if has_intervals else "value"
    columns: tuple[str, ...] = ("analyzer", "measure", value_title)
    # A result alone has no name.
    if "" in results:
        columns = columns[1:]
        rows = [row[1:] for row in rows]
    return NOTEBOOK_PAGE.render(title=title, about=about, columns=columns, rows=rows, calls=calls)


# Maximum number of findings at the top of the page.
MOST_FINDINGS = 6
# Maximum size of a table on the page.
MOST_TABLE_ROWS = 300
MOST_TABLE_COLUMNS = 7
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
    first_result = next(iter(report.values()), None)
    names = " and ".join(names_of_models(first_result.provenance.model)) if first_result else "no model"
    findings = [(section["name"], section["finding"]) for section in sections if section["finding"]][:MOST_FINDINGS]
    names_with_finding = [name for name, _ in findings]
    plots = [section["plots"][0] for section in sections if section["plots"] and section["name"] in names_with_finding]
    numbers = []
    for section in sections:
        if not section["models"]:
            numbers += [(section["name"], *line) for line in section["headline"]]
    folder = files(__package__) / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    page = (folder / "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["anchor"] = _anchor
    html = environment.from_string(page).render(
        title=f"Layers of {names}",
        analyzers=", ".join(report) or "no results",
        about=measured_on(first_result.provenance) if first_result else "",
        findings=findings,
        first_plot=plots[0] if plots else None,
        stream=all(is_stream(result.layers) for result in report.values()),
        sections=sections,
        warnings=_warnings(report),
        numbers=numbers,
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
        fields_and_titles = [(picture.name, picture.title)]
        if len(result.declared(picture.name).axes) == 2 and result.of_untrained(picture.name) is not None:
            fields_and_titles.append((f"{UNTRAINED}{picture.name}", f"{picture.title}, untrained"))
        for field, title in fields_and_titles:
            figure = result.plot(field)
            plots.append(
                {
                    "number": len(figures),
                    "title": title,
                    "meaning": picture.caption,
                    "table": _numbers(result, picture.name),
                    "width": figure.layout.width,
                    "height": figure.layout.height,
                }
            )
            figures.append(figure.to_json())
    models, rows = in_columns(result)
    return {
        "name": name,
        "words": result.declared().words,
        "finding": finding(result),
        "headline": list(headline_texts(result).items()),
        "models": models,
        "in_columns": rows,
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
    if len(table) > MOST_TABLE_ROWS or table.shape[1] > MOST_TABLE_COLUMNS:
        return {}
    return {"columns": columns, "lines": table.replace("nan", "–").to_numpy().tolist()}


def _warnings(report: Mapping[str, Result]) -> list[tuple[str, str]]:
    """Distinct warnings of a report, as pairs (names of results, text)."""
    names_by_text: dict[str, list[str]] = {}
    for name, result in report.items():
        for text in result.provenance.warnings:
            names_by_text.setdefault(text, []).append(name)
    return [(", ".join(names), text) for text, names in names_by_text.items()]


def _provenance(run: Provenance) -> list[tuple[str, list[tuple[str, str]]]]:
    """Record of a run, as titled tables of names and values."""
    record = []
    for field, words in RECORD.items():
        value = getattr(run, field)
        if value not in (None, ""):
            record.append((words, f"{value:.2f}" if isinstance(value, float) else str(value)))
    options = [(name, _option(value)) for name, value in run.options.items() if value is not None]
    versions = [(name, str(version)) for name, version in run.versions.items()]
    return [("Record", record), ("Options", options), ("Versions", versions)]


def _option(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _intervals(report: Mapping[str, Result]) -> str:
    """Description of the report's intervals; empty without intervals."""
    block_counts = {name: len(result.block_tokens) for name, result in report.items() if result.has_intervals}
    if max(block_counts.values(), default=0) < 2:
        return ""
    fewest = min(block_counts.values())
    most = max(block_counts.values())
    blocks = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    text = (
        "The numbers have 95 % confidence intervals: ± is half of the interval, and figures show intervals as bands, "
        f"whiskers or hover texts. They were computed from {blocks} contiguous blocks of the data (a delete-one-block "
        "jackknife with Student's t) and describe another sample of as many texts of the same kind, not another training of "
        "the model."
    )
    names_without = [name for name in report if name not in block_counts]
    if names_without:
        text += f" No intervals: {', '.join(names_without)}."
    return text


def _sites(result: Result) -> str:
    """Sites of a result in words; empty for a result without sites."""
    if not result.layers:
        return ""
    labels = set[Any]()
    for axes in result.tensor_fields().values():
        for axis in axes:
            labels.update(result.coordinates(axis))
    # A lens has no numbers at the input of block 0, although the run reads this site.
    measured = [name for name in result.layers if name in labels] or result.layers
    further_sites = (*getattr(result, "sublayers", ()), *getattr(result, "text_layers", ()))
    sites = listed_sites(tuple(dict.fromkeys((*measured, *further_sites))))
    columns = result.coordinates("column")
    if columns != result.layers:
        sites += f"; second model: {listed_sites(columns)}"
    return sites
