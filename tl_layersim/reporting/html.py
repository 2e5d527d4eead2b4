"""One self-contained HTML page of a report: models and data, a table, and every figure with its meaning."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from ..core.intervals import headline_texts
from ..core.results import Report, Result
from ..core.storage import replacing
from .site_ranges import is_stream, site_ranges
from .style import FONT


def write_html(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page; it opens from disk and needs no network.

    Raises:
        OSError: the file cannot be written.
    """
    import plotly.io
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    sections = []
    for name, result in report.items():
        plots = [
            {
                "html": Markup(
                    plotly.io.to_html(
                        result.plot(p.field), include_plotlyjs=False, full_html=False, config={"displaylogo": False}
                    )
                ),
                "meaning": p.meaning,
            }
            for p in result.pictures
            if _has_values(result, p.field)
        ]
        provenance = {key: value for key, value in vars(result.provenance).items() if value is not None}
        provenance["seconds"] = round(result.provenance.seconds, 2)
        for key in ("options", "versions"):
            provenance[key] = ", ".join(f"{k}={v}" for k, v in provenance[key].items() if v is not None)
        headline = headline_texts(result).items()
        about = {"sites": _sites(result), "provenance": provenance.items()}
        sections.append({"name": name, "headline": headline, "plots": plots, **about})
    first = next(iter(report.values()), None)
    title = f"Layers of {Path(first.provenance.model).name if first else 'no model'}"
    template = Environment(autoescape=True).from_string((files(__package__) / "page.html.j2").read_text(encoding="utf-8"))
    html = template.render(
        title=title,
        first=first.provenance if first else None,
        font=Markup(FONT),
        stream=all(is_stream(result.layers) for result in report.values()),
        sections=sections,
        intervals=_intervals(report),
        plotly=Markup(get_plotlyjs()),
    )
    with replacing(path) as file:
        file.write(html.encode())
    return Path(path)


def _has_values(result: Result, field: str) -> bool:
    """Whether a field has an entry that is defined: the norm ratio of blocks has none at sites inside blocks."""
    table = result.to_frame(field)
    values = getattr(result, field) if field in result.tensor_fields() else result.values
    return bool(table.size) and not bool(values.isnan().all())


def _intervals(report: Report) -> str:
    """What the intervals of a report are, in words; empty without intervals."""
    blocks = {name: len(result.block_tokens) for name, result in report.items() if result.has_intervals}
    if max(blocks.values(), default=0) < 2:
        return ""
    counts = sorted(set(blocks.values()))
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    without = [name for name in report if name not in blocks]
    return (
        "The numbers have 95 % confidence intervals: ± is half the width of an interval, and figures show intervals as bands, "
        f"whiskers or hover texts. They were computed from {each} contiguous blocks of the data (a delete-one-block "
        "jackknife with Student's t) and describe another sample of as many rows of the same kind, not another training of the "
        "model." + (f" No intervals: {', '.join(without)}." if without else "")
    )


def _sites(result: Result) -> str:
    """The sites at which a result was measured, in words; empty for a result without sites, such as one of many models."""
    if not result.layers:
        return ""
    further = (*getattr(result, "sublayers", ()), *getattr(result, "text_layers", ()))
    own = site_ranges(tuple(dict.fromkeys((*result.layers, *further))))
    columns = result.coordinates("column")
    return own if columns == result.layers else f"{own}; second model: {site_ranges(columns)}"
