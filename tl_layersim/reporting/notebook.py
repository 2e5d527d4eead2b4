"""Results and reports as notebooks show them: headline numbers, what they were measured on, and how to see more."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment

from ..core.intervals import headline_texts
from ..core.provenance import Provenance
from ..core.results import Report, Result
from .style import names_of_models

# Colours are those of the notebook, light or dark.
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
    """A result as HTML: a table of its headline numbers and one line of what it was measured on.

    Args:
        result: any.
    """
    size = " x ".join(map(str, result.values.shape))
    rows = [(name, text) for name, text in headline_texts(result).items()]
    return _html(
        f"{type(result).__name__}" + (f" ({size})" if size else ""),
        measured_on(result.provenance),
        (("measure", _value_column(result.has_intervals)), rows),
        (".plot()", ".to_frame()", ".save(path)"),
    )


def report_html(report: Report) -> str:
    """A report as HTML: one table of the headline numbers of all results.

    Args:
        report: any.
    """
    first = next(iter(report.values()), None)
    rows = [(name, *line) for name, result in report.items() for line in headline_texts(result).items()]
    with_intervals = any(result.has_intervals for result in report.values())
    calls = (".plot()", f'["{next(iter(report))}"].plot()', ".to_html(path)", ".save(path)") if first is not None else ()
    return _html(
        "Report",
        measured_on(first.provenance) if first is not None else "without results",
        (("analyzer", "measure", _value_column(with_intervals)), rows),
        calls,
    )


def measured_on(provenance: Provenance) -> str:
    """The model and the data of a run in one line.

    Args:
        provenance: of a result of the run.
    """
    rows = f"{provenance.tokens:,} tokens in {provenance.sequences:,} rows"
    return f"{' and '.join(names_of_models(provenance.model))} · {rows} · {provenance.dtype.replace('torch.', '')}"


def _value_column(with_intervals: bool) -> str:
    return "value (± half of the 95 % interval)" if with_intervals else "value"


def _html(title: str, about: str, table: tuple[tuple[str, ...], list[Any]], calls: tuple[str, ...]) -> str:
    columns, rows = table
    return NOTEBOOK_PAGE.render(title=title, about=about, columns=columns, rows=rows, calls=calls)
